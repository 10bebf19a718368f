"""Tasks that start tasks or need their results: who goes first, holds what, ends when.

All of it is [B12].
"""

import pytest

from aiogpu.core.effects import Fail, Failure, Forget
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.records import TaskState
from aiogpu.core.scheduler.scheduler import Scheduler
from tests.core.builders import World, status_of, submit, why_of

PATIENCE = SchedulerConfig(cancel_grace=2.0, interrupt_every=0.5)


def tree(**options) -> World:
    """On one CPU a parent waits for its child, which runs."""
    return World(cpus=1, gpus=1, config=PATIENCE, **options).play("""
        submit parent gpus=0.5; submit child parent=parent; wait_for parent child
    """)


def test_one_cpu_serves_a_tree_of_any_depth():
    w = World(cpus=1).play("submit t0")
    for depth in range(1, 30):
        w.submit(f"t{depth}", parent=f"t{depth - 1}")
        w.wait_for(f"t{depth - 1}", f"t{depth}")
        assert f"t{depth}" in w.running
    for depth in range(29, -1, -1):
        w.finish(f"t{depth}")
    assert set(w.told.values()) == {"settled"}
    assert w.free["CPU"] == 1.0


def test_who_waits_gives_back_its_cpus_and_keeps_its_devices():
    World(cpus=2, gpus=1, resources={"license": 1}).play("""
        submit parent cpus=2 gpus=0.5 resources=license:1; submit child parent=parent
        free = CPU:0.0 license:0.0 GPU:0.5
        wait_for parent child; blocked = parent; free = CPU:1.0 license:0.0 GPU:0.5
    """)


def test_who_goes_on_has_its_cpus_at_once():
    World(cpus=2).play("""
        submit parent; submit child parent=parent; wait_for parent child
        submit other later; running = child other parent
        finish child; blocked =; running = other parent; waiting = later
    """)


def test_for_a_moment_there_may_be_less_than_nothing_free():
    w = tree().play("submit later priority=1")
    w.play("submit child-2 parent=parent; wait_for parent; blocked =")
    assert w.scheduler.ledger.free["CPU"] == -10_000
    w.play("free has CPU:0.0; finish child")
    w.play("waiting = child-2 later; wait_for parent child-2; running = later parent")


def test_it_goes_on_when_all_have_ended_that_it_waits_for_last():
    w = World(cpus=5).play("""
        submit parent; submit a b c d parent=parent; wait_for parent d
        wait_for parent a b
    """)
    for name in "adc":
        w.finish(name)
        assert w.blocked == {"parent"}
    w.play("""
        finish b; blocked =
        wait_for parent b; blocked = (that has ended); finish parent
    """)
    assert set(w.told.values()) == {"settled"}


def test_who_waits_for_what_is_not_its_child_keeps_its_cpus():
    w = World(cpus=4).play("""
        submit a b; wait_for a b; wait_for a; blocked = (it has started nobody)
    """)
    w.submit("a's", parent="a")
    w.submit("b's", parent="b")
    w.wait_for("a", "a's")
    w.wait_for("b", "a's")
    assert w.blocked == {"a"}
    w.finish("a's")
    assert w.blocked == set()


def test_who_is_being_stopped_does_not_begin_to_wait():
    World(config=PATIENCE).play("""
        submit parent; submit child parent=parent is_detached=True; cancel parent
        wait_for parent child; blocked =; free has CPU:14.0
    """)


def test_a_child_goes_before_those_who_came_earlier():
    w = World(cpus=1).play("submit parent other; submit child parent=parent")
    w.play("""
        submit child-2 parent=parent; wait_for parent child child-2
        running = child parent
        submit grandchild parent=child; wait_for child grandchild
        finish grandchild child; running = child-2 parent
        finish child-2 parent; running = other
    """)


@pytest.mark.parametrize(
    ("of_parent", "of_child", "first"),
    [(1, 0, "child"), (0, 2, "child"), (0, 0, "urgent"), (1, -5, "child")],
)
def test_a_child_is_as_urgent_as_its_parent_at_least(of_parent, of_child, first):
    w = World(cpus=1)
    w.submit("parent", priority=of_parent)
    w.submit("urgent", priority=1)
    w.submit("child", parent="parent", priority=of_child)
    w.wait_for("parent", "child")
    assert w.running == {"parent", first}


def test_what_a_task_has_started_ends_with_it():
    w = World(cpus=2, gpus=1, config=PATIENCE)
    w.play("submit parent cpus=0; submit runs parent=parent")
    w.submit("runs-too", num_gpus=1, parent="parent")
    w.submit("waits", parent="parent")
    w.play("submit below cpus=0 parent=runs; submit other; finish parent")
    assert w.told == {
        "parent": "settled",
        "runs": "disowned",
        "runs-too": "disowned",
        "waits": "disowned",
        "below": "disowned",
    }
    assert w.forgotten == {"waits"}
    assert w.tasks["runs"].interrupts == w.tasks["below"].interrupts == 1
    w.play("waiting = other; finish runs")
    assert w.running == {"runs-too", "below", "other"}
    w.play("advance 2.0; forgotten = below runs runs-too waits")


def end_by_cancel(w):
    w.cancel("parent")
    assert w.tasks["parent"].interrupts == w.tasks["child"].interrupts == 1


def end_by_timeout(w):
    w.advance(10.0)


def end_by_death(w):
    w.die("parent")


def end_by_retry(w):
    w.play("wait_for parent; finish parent retry=True")


def end_while_blocked(w):
    """Its wait was cancelled in the worker, and its answer was quicker."""
    w.finish("parent")


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        *[(end_by_cancel, None), (end_by_timeout, "expired"), (end_by_death, None)],
        *[(end_by_retry, None), (end_while_blocked, "settled")],
    ],
)
def test_however_a_task_ends_what_it_has_started_ends_with_it(end, outcome):
    w = World(cpus=1, gpus=1, config=PATIENCE).play("""
        submit parent gpus=0.5 timeout=10.0; submit child parent=parent
        wait_for parent child; submit waits parent=child
    """)
    end(w)
    told = {"child": "disowned", "waits": "disowned"}
    assert w.told == told | ({"parent": outcome} if outcome else {})
    assert "waits" in w.forgotten
    if "child" in w.running:
        w.finish("child")
    assert w.blocked == set()
    if end in (end_by_death, end_by_retry):
        assert w.tasks["parent"].runs == 2
        w.submit("again", parent="parent")
        w.play("wait_for parent again; finish again parent; told has parent:settled")
    w.play("run_dry; free = CPU:1.0 GPU:1.0")


def test_a_child_whose_owner_has_cancelled_it_is_not_disowned_as_well():
    tree().play("cancel child parent; told =; finish child; forgotten = child")


@pytest.mark.parametrize("how", ["cancelled", "lost", "retried"])
def test_a_parent_waits_until_its_child_has_ended_in_any_way(how):
    w = World(cpus=1, config=PATIENCE).play("submit parent")
    w.submit("child", parent="parent", max_retries=how == "retried")
    w.wait_for("parent", "child")
    if how == "cancelled":
        w.cancel("child")
    else:
        w.die("child")
    if how != "lost":
        w.play("blocked = parent; finish child")
    assert w.blocked == set()
    news = {"cancelled": None, "lost": "lost", "retried": "settled"}
    assert w.tasks["child"].news == news[how]
    w.cancel("parent")
    assert w.tasks["child"].news == news[how]


def test_a_detached_child_outlives_its_parent():
    w = World(cpus=1).play("""
        submit parent; submit runs cpus=0 parent=parent is_detached=True
        submit waits parent=parent is_detached=True; finish parent
        told = parent:settled; running = runs waits; finish runs waits
    """)
    assert set(w.told.values()) == {"settled"}


def test_a_parent_may_wait_for_a_detached_child():
    World(cpus=1).play("""
        submit parent; submit child parent=parent is_detached=True
        wait_for parent child; running = child parent
        die parent; told =; finish child; running = parent
    """)


@pytest.mark.parametrize("is_over", [True, False], ids=["ended", "being stopped"])
def test_a_task_that_has_ended_or_is_being_stopped_starts_nobody(is_over):
    w = World(config=PATIENCE).play("submit parent")
    (w.finish if is_over else w.cancel)("parent")
    w.submit("child", parent="parent")
    child = w.tasks["child"].id
    assert w.effects == [Fail(child, Failure.DISOWNED), Forget(child)]
    assert w.told["child"] == "disowned"


def test_a_child_that_starts_is_ended_before_it_has_begun():
    World(starts=False).play("""
        submit parent; start parent; submit child parent=parent; finish parent
        told has child:disowned; forgotten = child; free has CPU:16.0
    """)


def test_children_that_are_sent_ahead_end_with_their_parent():
    w = World(cpus=1, took=1e-5, config=PATIENCE).play("submit parent cpus=0")
    submit(w, [f"t{n}" for n in range(10)], parent="parent")
    w.finish("t0")
    assert len(w.queued) == 4
    w.finish("parent")
    assert w.forgotten == {f"t{number}" for number in range(2, 10)}
    w.finish("t1")
    assert {w.told[f"t{number}"] for number in range(1, 10)} == {"disowned"}
    assert [w.tasks[f"t{number}"].runs for number in range(2, 10)] == [0] * 8


def test_closing_ends_a_tree_and_reports_each_of_it_once():
    w = tree().play("""
        submit waits parent=child; submit detached parent=child is_detached=True; close
        told has parent:abandoned
    """)
    assert set(w.told) == {"parent", "child", "waits", "detached"}
    w.play("run_dry; is_closed = True")


def test_a_child_whose_handle_is_in_the_result_goes_on():
    w = World().play("submit parent; submit child other parent=parent")
    child = w.tasks["child"].id
    w.tell(Scheduler.detach, child)
    w.tell(Scheduler.detach, child)
    w.play("""
        finish parent; running has child; told has other:disowned
        finish child; told has child:settled
    """)
    w.tell(Scheduler.detach, child)
    w.submit("alone")
    w.tell(Scheduler.detach, w.tasks["alone"].id)
    assert "alone" in w.running


# Tasks whose arguments are results of others that are not there yet.


def state_of(w, name):
    record = w.scheduler.tasks.get(w.tasks[name].id)
    return record and record.state


def test_it_begins_in_its_turn_when_all_is_there_and_holds_nothing_before():
    w = World(cpus=1).play("submit first; submit then needs=first; submit later")
    assert state_of(w, "then") is TaskState.EXPECTING
    w.play("finish first; running = later; supply then then; submit last")
    assert state_of(w, "then") is TaskState.WAITING
    w.play("""
        finish later; running = then
        finish then; supply then; told has then:settled
    """)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (lambda w: w.cancel("a"), None),
        (lambda w: w.advance(2.0), "expired"),
        (lambda w: w.finish("parent"), "disowned"),
        (lambda w: w.close(), "abandoned"),
        (lambda w: w.close(True), "abandoned"),
    ],
    ids=["cancelled", "expired", "its parent ends", "close", "close at once"],
)
def test_one_that_expects_arguments_can_end(end, outcome):
    w = World().play("submit parent")
    parent = "parent" if outcome == "disowned" else None
    w.submit("a", parent=parent, needs=[], timeout=1.0)
    end(w)
    assert w.tasks["a"].news == outcome
    assert w.tasks["a"].is_forgotten
    assert w.tasks["a"].runs == 0
    assert not w.scheduler.expecting


def test_a_wait_through_an_expected_result_that_can_never_end_fails():
    w = World(gpus=1).play("""
        submit parent gpus=1; submit needed parent=parent gpus=1
        submit one two parent=parent needs=needed; wait_for parent one two
        told = needed:deadlocked (whoever has the values fails the others)
        cancel one two; running has parent
    """)
    w.submit("third", parent="parent", num_gpus=1, needs=[])
    w.wait_for("parent", "third")
    w.play("told lacks third; supply third; told has third:deadlocked")


def test_status_and_why_name_what_it_waits_for():
    w = World().play("submit load; submit train needs=load")
    found = why_of(w, "train")
    assert (found.state, found.children, found.count) == ("expecting", ("load",), 1)
    assert str(found) == (
        f"train (task {found.task}) waits for its arguments: the result of load."
    )
    w.finish("load")
    assert "an actor's call" in str(why_of(w, "train"))
    status = status_of(w)
    (task,) = status.tasks
    assert (status.waiting_count, task.state, task.worker) == (1, "expecting", None)
    assert task.reason == "waits for results that are its arguments"
