"""Tasks that start tasks: who goes first, who holds what meanwhile, who ends when.

All of it is [B12].
"""

import pytest

from aiogpu.core.effects import Fail, Failure, Forget
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.testing import World

PATIENCE = SchedulerConfig(cancel_grace=2.0, interrupt_every=0.5)


def family(**options) -> World:
    """On one CPU a parent waits for its child, which runs."""
    w = World(cpus=1, gpus=1, config=PATIENCE, **options)
    w.submit("parent", num_gpus=0.5)
    w.submit("child", parent="parent")
    w.wait_for("parent", "child")
    return w


def test_one_cpu_serves_a_tree_of_any_depth():
    w = World(cpus=1)
    w.submit("t0")
    for depth in range(1, 30):
        w.submit(f"t{depth}", parent=f"t{depth - 1}")
        w.wait_for(f"t{depth - 1}", f"t{depth}")
        assert f"t{depth}" in w.running
    for depth in range(29, -1, -1):
        w.finish(f"t{depth}")
    assert set(w.told.values()) == {"settled"}
    assert w.free["CPU"] == 1.0


def test_who_waits_gives_back_its_cpus_and_keeps_its_devices():
    w = World(cpus=2, gpus=1, resources={"license": 1})
    w.submit("parent", num_cpus=2, num_gpus=0.5, resources={"license": 1})
    w.submit("child", parent="parent")
    assert w.free == {"CPU": 0.0, "license": 0.0, "GPU": 0.5}
    w.wait_for("parent", "child")
    assert w.blocked == {"parent"}
    assert w.free == {"CPU": 1.0, "license": 0.0, "GPU": 0.5}


def test_who_goes_on_has_its_cpus_at_once():
    w = World(cpus=2)
    w.submit("parent")
    w.submit("child", parent="parent")
    w.wait_for("parent", "child")
    w.submit("other")
    w.submit("later")
    assert w.running == {"parent", "child", "other"}
    w.finish("child")
    assert w.blocked == set()
    assert w.running == {"parent", "other"}
    assert w.waiting == {"later"}


def test_for_a_moment_there_may_be_less_than_nothing_free():
    w = family()
    w.submit("later", priority=1)
    w.submit("child 2", parent="parent")
    w.wait_for("parent")
    assert w.blocked == set()
    assert w.scheduler.ledger.free["CPU"] == -10_000
    assert w.free["CPU"] == 0.0
    w.finish("child")
    assert w.waiting == {"later", "child 2"}
    w.wait_for("parent", "child 2")
    assert w.running == {"parent", "later"}


def test_it_goes_on_when_all_have_ended_that_it_waits_for():
    w = World(cpus=4)
    w.submit("parent")
    for name in ("a", "b", "c"):
        w.submit(name, parent="parent")
    w.wait_for("parent", "a", "b")
    w.finish("a")
    assert w.blocked == {"parent"}
    w.finish("c")
    assert w.blocked == {"parent"}
    w.finish("b")
    assert w.blocked == set()
    w.finish("parent")
    assert set(w.told.values()) == {"settled"}


def test_who_waits_for_what_has_ended_does_not_wait():
    w = World()
    w.submit("parent")
    w.submit("child", parent="parent")
    w.finish("child")
    w.wait_for("parent", "child")
    assert w.blocked == set()


def test_one_may_wait_for_others_instead():
    w = World(cpus=3)
    w.submit("parent")
    w.submit("a", parent="parent")
    w.submit("b", parent="parent")
    w.wait_for("parent", "a")
    w.wait_for("parent", "b")
    w.finish("a")
    assert w.blocked == {"parent"}
    w.finish("b")
    assert w.blocked == set()


def test_a_task_that_has_started_nobody_does_not_wait():
    w = World()
    w.submit("a")
    w.submit("b")
    w.wait_for("a", "b")
    w.wait_for("a")
    assert w.blocked == set()


def test_for_each_task_there_is_one_who_waits():
    """Who waits for another's child keeps his CPUs, and the other has his wait."""
    w = World(cpus=4)
    w.submit("a")
    w.submit("b")
    w.submit("a's", parent="a")
    w.submit("b's", parent="b")
    w.wait_for("a", "a's")
    w.wait_for("b", "a's")
    assert w.blocked == {"a"}
    w.finish("a's")
    assert w.blocked == set()
    w.finish("a")


def test_who_is_being_stopped_does_not_begin_to_wait():
    w = World(config=PATIENCE)
    w.submit("parent")
    w.submit("child", parent="parent", is_detached=True)
    w.cancel("parent")
    w.wait_for("parent", "child")
    assert w.blocked == set()
    assert w.free["CPU"] == 14.0


def test_a_child_goes_before_those_who_came_earlier():
    w = World(cpus=1)
    w.submit("parent")
    w.submit("other")
    w.submit("child", parent="parent")
    w.submit("child 2", parent="parent")
    w.wait_for("parent", "child", "child 2")
    assert w.running == {"parent", "child"}
    w.submit("grandchild", parent="child")
    w.wait_for("child", "grandchild")
    w.finish("grandchild")
    w.finish("child")
    assert w.running == {"parent", "child 2"}
    w.finish("child 2")
    w.finish("parent")
    assert w.running == {"other"}


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
    w.submit("parent", num_cpus=0)
    w.submit("runs", parent="parent")
    w.submit("runs too", num_gpus=1, parent="parent")
    w.submit("waits", parent="parent")
    w.submit("below", num_cpus=0, parent="runs")
    w.submit("other")
    w.finish("parent")
    assert w.told == {
        "parent": "settled",
        "runs": "disowned",
        "runs too": "disowned",
        "waits": "disowned",
        "below": "disowned",
    }
    assert w.forgotten == {"waits"}
    assert w.tasks["runs"].interrupts == w.tasks["below"].interrupts == 1
    assert w.waiting == {"other"}
    w.finish("runs")
    assert w.running == {"runs too", "below", "other"}
    w.advance(2.0)
    assert w.forgotten == {"waits", "runs", "runs too", "below"}


def test_what_is_started_by_a_cancelled_task_ends_with_it():
    w = family()
    w.cancel("parent")
    assert w.told == {"child": "disowned"}
    assert w.tasks["parent"].interrupts == w.tasks["child"].interrupts == 1
    w.finish("child")
    w.finish("parent")
    assert w.forgotten == {"parent", "child"}
    assert w.free == {"CPU": 1.0, "GPU": 1.0}


def test_what_is_started_by_a_task_whose_worker_dies_ends_with_it():
    w = family()
    w.submit("waits", parent="child")
    w.die("parent")
    assert w.told == {"child": "disowned", "waits": "disowned"}
    w.finish("child")
    assert w.running == {"parent"}
    assert w.blocked == set()


def test_what_is_started_by_a_task_that_is_tried_again_ends_first():
    w = family()
    w.wait_for("parent")
    w.finish("parent", retry=True)
    assert w.told == {"child": "disowned"}
    w.finish("child")
    assert w.running == {"parent"}
    assert w.tasks["parent"].runs == 2
    w.submit("child 2", parent="parent")
    w.wait_for("parent", "child 2")
    w.finish("child 2")
    w.finish("parent")
    assert w.told["parent"] == "settled"


def test_what_is_started_by_a_task_whose_time_is_up_ends_with_it():
    w = World(config=PATIENCE)
    w.submit("parent", timeout=1.0)
    w.submit("child", parent="parent")
    w.advance(1.0)
    assert w.told == {"parent": "expired", "child": "disowned"}


def test_a_child_whose_owner_has_cancelled_it_is_told_nothing():
    w = family()
    w.cancel("child")
    w.cancel("parent")
    assert w.told == {}
    w.finish("child")
    assert w.forgotten == {"child"}


def test_a_parent_whose_child_was_cancelled_goes_on():
    w = family()
    w.cancel("child")
    assert w.blocked == {"parent"}
    w.finish("child")
    assert w.blocked == set()


def test_a_parent_whose_child_is_lost_goes_on():
    w = World(config=PATIENCE)
    w.submit("parent")
    w.submit("child", parent="parent", max_retries=0)
    w.wait_for("parent", "child")
    w.die("child")
    assert w.told == {"child": "lost"}
    assert w.blocked == set()


def test_a_parent_waits_on_while_its_child_is_tried_again():
    w = family()
    w.die("child")
    assert w.blocked == {"parent"}
    assert w.running == {"parent", "child"}
    w.finish("child")
    assert w.blocked == set()


def test_a_parent_may_end_while_it_is_blocked():
    """Its wait was cancelled in the worker, and its answer was quicker."""
    w = family()
    w.finish("parent")
    assert w.told == {"parent": "settled", "child": "disowned"}
    assert w.free["CPU"] == 0.0
    w.finish("child")
    assert w.free == {"CPU": 1.0, "GPU": 1.0}


def test_a_detached_child_outlives_its_parent():
    w = World(cpus=1)
    w.submit("parent")
    w.submit("runs", num_cpus=0, parent="parent", is_detached=True)
    w.submit("waits", parent="parent", is_detached=True)
    w.finish("parent")
    assert w.told == {"parent": "settled"}
    assert w.running == {"runs", "waits"}
    w.finish("runs")
    w.finish("waits")
    assert set(w.told.values()) == {"settled"}


def test_a_parent_may_wait_for_a_detached_child():
    w = World(cpus=1)
    w.submit("parent")
    w.submit("child", parent="parent", is_detached=True)
    w.wait_for("parent", "child")
    assert w.running == {"parent", "child"}
    w.die("parent")
    assert w.told == {}
    w.finish("child")
    assert w.running == {"parent"}


def test_a_task_that_has_ended_starts_nobody():
    w = World()
    w.submit("parent")
    w.finish("parent")
    w.submit("child", parent="parent")
    child = w.tasks["child"].id
    assert w.effects == [Fail(child, Failure.DISOWNED), Forget(child)]
    assert w.told["child"] == "disowned"


def test_a_task_that_is_being_stopped_starts_nobody():
    w = World(config=PATIENCE)
    w.submit("parent")
    w.cancel("parent")
    w.submit("child", parent="parent")
    assert w.told == {"child": "disowned"}
    assert w.forgotten == {"child"}


def test_a_child_that_starts_is_ended_before_it_has_begun():
    w = World(starts=False)
    w.submit("parent")
    w.start("parent")
    w.submit("child", parent="parent")
    w.finish("parent")
    assert w.told["child"] == "disowned"
    assert w.forgotten == {"child"}
    assert w.free["CPU"] == 16.0


def test_children_that_are_sent_ahead_end_with_their_parent():
    w = World(cpus=1, took=1e-5, config=PATIENCE)
    w.submit("parent", num_cpus=0)
    for number in range(10):
        w.submit(f"t{number}", parent="parent")
    w.finish("t0")
    assert len(w.queued) == 4
    w.finish("parent")
    assert w.forgotten == {f"t{number}" for number in range(2, 10)}
    w.finish("t1")
    assert {w.told[f"t{number}"] for number in range(1, 10)} == {"disowned"}
    assert [w.tasks[f"t{number}"].runs for number in range(2, 10)] == [0] * 8


def test_closing_ends_a_tree_and_tells_each_of_it_once():
    w = family()
    w.submit("waits", parent="child")
    w.submit("detached", parent="child", is_detached=True)
    w.close()
    assert w.told["parent"] == "abandoned"
    assert set(w.told) == {"parent", "child", "waits", "detached"}
    w.run_dry()
    assert w.scheduler.is_closed


def test_a_child_whose_handle_is_in_the_result_goes_on():
    w = World()
    w.submit("parent")
    w.submit("child", parent="parent")
    w.submit("other", parent="parent")
    child = w.tasks["child"].id
    w.tell(Scheduler.detach, child)
    w.tell(Scheduler.detach, child)
    w.finish("parent")
    assert "child" in w.running
    assert w.told["other"] == "disowned"
    w.finish("child")
    assert w.told["child"] == "settled"
    w.tell(Scheduler.detach, child)
    w.submit("alone")
    w.tell(Scheduler.detach, w.tasks["alone"].id)
    assert "alone" in w.running
