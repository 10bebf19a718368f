"""Tasks whose arguments are results of others that are not there yet."""

import pytest

from aiogpu.core.records import TaskState
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.testing import World


def state_of(w, name):
    record = w.scheduler.tasks.get(w.tasks[name].id)
    return record and record.state


def test_it_begins_when_all_is_there_and_not_before():
    w = World(cpus=4)
    w.submit("first")
    w.submit("then", needs=["first"])
    assert state_of(w, "then") is TaskState.EXPECTING
    w.finish("first")
    assert "then" not in w.running
    w.supply("then")
    assert "then" in w.running
    w.finish("then")
    assert w.told["then"] == "settled"
    assert not w.scheduler.tasks


def test_it_holds_nothing_and_keeps_nobody_waiting():
    w = World(cpus=1)
    w.submit("producer")
    w.submit("consumer", needs=["producer"])
    w.submit("other")
    w.finish("producer")
    assert "other" in w.running


def test_it_waits_in_its_turn_where_there_is_no_room():
    w = World(cpus=1)
    w.submit("busy")
    w.submit("expecting", needs=[])
    w.submit("later")
    w.supply("expecting")
    assert state_of(w, "expecting") is TaskState.WAITING
    w.finish("busy")
    assert "expecting" in w.running  # it was submitted before the other


def test_what_is_supplied_twice_or_after_its_end_changes_nothing():
    w = World(cpus=1)
    w.submit("a", needs=[])
    w.supply("a")
    w.supply("a")
    assert "a" in w.running
    w.finish("a")
    w.supply("a")
    assert w.told["a"] == "settled"


def test_it_can_be_cancelled():
    w = World()
    w.submit("a", needs=[])
    w.cancel("a")
    assert w.tasks["a"].is_forgotten
    assert not w.scheduler.expecting


def test_its_time_runs_out():
    w = World()
    w.submit("a", needs=[], timeout=1.0)
    w.advance(2.0)
    assert w.told["a"] == "expired"
    assert not w.scheduler.expecting


def test_it_ends_with_the_one_that_has_started_it():
    w = World()
    w.submit("parent")
    w.submit("child", parent="parent", needs=[])
    w.finish("parent")
    assert w.told["child"] == "disowned"


@pytest.mark.parametrize("at_once", [False, True])
def test_it_is_told_when_the_node_closes(at_once):
    w = World()
    w.submit("a", needs=[])
    w.submit("b", needs=[])
    w.close(at_once)
    assert w.told["a"] == w.told["b"] == "abandoned"
    assert w.scheduler.is_closed


def test_a_wait_through_an_expected_result_that_can_never_end_is_told():
    w = World(gpus=1)
    w.submit("parent", num_gpus=1)
    w.submit("needed", parent="parent", num_gpus=1)
    w.submit("child", parent="parent", needs=["needed"])
    w.wait_for("parent", "child")
    assert w.told["needed"] == "deadlocked"
    assert "child" not in w.told  # whoever has the values fails it
    w.cancel("child")
    assert "parent" in w.running


def test_a_wait_is_told_that_can_never_end_since_the_argument_came():
    w = World(gpus=1)
    w.submit("parent", num_gpus=1)
    w.submit("child", parent="parent", num_gpus=1, needs=[])
    w.wait_for("parent", "child")
    assert "child" not in w.told
    w.supply("child")
    assert w.told["child"] == "deadlocked"


def test_why_names_what_it_waits_for():
    w = World()
    w.submit("load")
    w.submit("train", needs=["load"])
    record = w.scheduler.tasks[w.tasks["train"].id]
    found = why(w.scheduler, record, {}, w.now)
    assert (found.state, found.children, found.count) == ("expecting", ("load",), 1)
    assert str(found) == (
        f"train (task {record.id}) waits for its arguments: the result of load."
    )
    w.finish("load")
    assert "an actor's call" in str(why(w.scheduler, record, {}, w.now))


def test_the_picture_lists_it():
    w = World()
    w.submit("a", needs=[])
    shown = snapshot(w.scheduler, {}, w.now)
    assert shown.waiting_count == 1
    (task,) = shown.tasks
    assert (task.state, task.worker) == ("expecting", None)
    assert task.reason == "waits for results that are its arguments"


def test_two_that_expect_the_same_result_are_waited_for():
    w = World(gpus=1)
    w.submit("parent", num_gpus=1)
    w.submit("needed", parent="parent", num_gpus=1)
    w.submit("one", parent="parent", needs=["needed"])
    w.submit("two", parent="parent", needs=["needed"])
    w.wait_for("parent", "one", "two")
    assert w.told["needed"] == "deadlocked"
