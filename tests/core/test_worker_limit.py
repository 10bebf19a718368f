"""A node that may have so many workers and no more: who waits, who makes way."""

from itertools import pairwise

import pytest

from aiogpu.core.model.config import STARTS_ALLOWED, SchedulerConfig
from aiogpu.core.model.ids import TaskId
from aiogpu.core.scheduler.dispatch import refill_spares
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.core.scheduler.workers import WorkerLimit
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.testing import World

CROWDED_FOR = SchedulerConfig().crowded_for


def world(most: int = 2, cpus: float = 100, **options) -> World:
    w = World(cpus=cpus, **options)
    w.scheduler.worker_limit.bound(most)
    return w


def told_why(w: World, name: str) -> str:
    record = w.scheduler.tasks[TaskId(w.tasks[name].id)]
    return str(why(w.scheduler, record, {}, w.now))


def test_more_tasks_than_workers_wait_although_all_else_is_there():
    w = world(most=2)
    for name in ("a", "b", "c", "d"):
        w.submit(name)
    assert (w.running, w.waiting) == ({"a", "b"}, {"c", "d"})
    assert w.free["CPU"] == 98
    w.finish("a")
    assert (w.running, w.waiting) == ({"b", "c"}, {"d"})
    for name in ("b", "c", "d"):
        w.finish(name)
    assert len(w.workers) == 2
    assert set(w.told.values()) == {"settled"}


def test_many_of_them_one_after_the_other():
    w = world(most=3)
    names = [f"t{number}" for number in range(100)]
    for number, name in enumerate(names):
        w.submit(name, max_calls=number % 2, environment={"X": str(number % 5)})
    while w.running:
        assert len(w.workers) <= 3
        w.finish(min(w.running))
    assert w.told == dict.fromkeys(names, "settled")


def test_an_idle_worker_that_does_not_fit_makes_way():
    w = world(most=2, gpus=1, exits=False)
    w.submit("a")
    w.submit("b")
    w.finish("a")
    idle = min(w.workers)
    w.submit("c", num_gpus=1)
    assert w.waiting == {"c"}
    assert w.retired == [idle]
    w.submit("d", environment={"X": "1"})
    assert w.retired == [idle], "no other is idle"
    w.die(idle)
    assert (w.running, w.waiting) == ({"b", "c"}, {"d"})


def test_one_goes_for_each_that_needs_another_and_no_more():
    w = world(most=3, gpus=1, exits=False)
    for name in ("a", "b", "c"):
        w.submit(name)
    for name in ("a", "b", "c"):
        w.finish(name)
    w.submit("x", num_gpus=1)
    w.submit("y", num_gpus=1)
    assert len(w.retired) == 1, "for y there is no device"
    w.submit("z", environment={"X": "1"}, num_cpus=2)
    assert len(w.retired) == 2
    w.submit("again")
    assert w.running == {"again"}
    for worker in list(w.retired):
        w.die(worker)
    assert (w.running, w.waiting) == ({"again", "x", "z"}, {"y"})
    assert w.scheduler.worker_limit.leaving == set()


def test_who_comes_first_has_the_place_of_a_worker_that_would_fit_another():
    w = world(most=1)
    w.submit("a")
    w.submit("first", environment={"X": "1"})
    w.submit("second")
    w.finish("a")
    assert (w.running, w.waiting) == ({"first"}, {"second"})
    w.finish("first")
    assert w.running == {"second"}


def test_who_lacks_more_than_a_worker_holds_up_nobody():
    w = world(most=2, gpus=1)
    w.submit("train", num_gpus=1)
    w.submit("a")
    w.submit("next", num_gpus=1)
    w.submit("b")
    w.finish("a")
    assert (w.running, w.waiting) == ({"train", "b"}, {"next"})
    assert w.retired == []


def test_those_behind_one_that_was_cancelled_go_on():
    w = world(most=2, exits=False)
    w.submit("a")
    w.submit("b", environment={"X": "1"})
    w.submit("c", environment={"X": "2"})
    w.submit("d", environment={"X": "1"})
    w.finish("a")
    w.finish("b")
    assert w.waiting == {"c", "d"}, "they ask for the same, and c comes first"
    assert len(w.retired) == 1
    w.cancel("c")
    assert w.running == {"d"}


def test_a_starting_worker_without_a_task_is_one_to_be_had():
    w = world(most=1, starts=False)
    w.submit("a")
    w.cancel("a")
    w.submit("b")
    assert w.starting == {"b"}
    assert len(w.workers) == 1


def test_spares_are_kept_where_there_is_room_for_them():
    w = World(cpus=100, config=SchedulerConfig(spare_workers=2))
    w.scheduler.worker_limit.bound(3)
    w.submit("a", max_calls=1)
    assert len(w.workers) == 3
    w.submit("b", max_calls=1)
    w.submit("c", max_calls=1)
    assert w.running == {"a", "b", "c"}
    w.submit("d", max_calls=1)
    assert (len(w.workers), w.waiting) == (3, {"d"})
    w.finish("a")
    assert w.running == {"b", "c", "d"}


def test_a_spare_makes_way_and_is_not_replaced_meanwhile():
    w = World(cpus=100, config=SchedulerConfig(spare_workers=2), exits=False)
    w.scheduler.worker_limit.bound(3)
    w.submit("a", max_calls=1)
    w.submit("b", max_calls=1, environment={"X": "1"})
    w.submit("c", max_calls=1, environment={"X": "1"}, num_cpus=2)
    assert len(w.retired) == 2
    assert len(w.workers) == 3
    for worker in w.retired:
        w.die(worker)
    assert w.running == {"a", "b", "c"}


def test_why_a_task_waits_that_lacks_nothing_but_a_worker():
    w = world(most=1)
    w.submit("zeroth")
    w.submit("b")
    w.advance(0.5)
    assert told_why(w, "b") == (
        "b (task 1) has waited 0.5 s for its turn: 0 before it\n"
        "  workers: 1, and no room for more at a time; `aiogpu doctor` says "
        "what bounds them"
    )
    (shape,) = snapshot(w.scheduler, {}, w.now).shapes
    assert shape.reason == "waits for a worker: there are 1, and no room for more"
    w.finish("zeroth")
    w.finish("b")


def test_why_a_task_waits_where_actors_hold_all_workers():
    w = world(most=2)
    w.submit("actor", num_cpus=0, is_endless=True)
    w.submit("other", num_cpus=0, is_endless=True)
    w.submit("b")
    assert "workers: 2, each held without end, and no room" in told_why(w, "b")
    w.finish("actor")
    assert w.running == {"other", "b"}
    w.submit("c", environment={"X": "1"})
    assert "  workers: 2, and no room" in told_why(w, "c")


def test_a_worker_that_cannot_be_had_is_no_failure_where_there_are_others():
    w = World(cpus=100, starts=False)
    w.submit("a")
    w.start("a")
    w.submit("b")
    for _ in range(2 * STARTS_ALLOWED):
        w.tell(Scheduler.worker_gone, w.worker_of("b"), is_crowded=True)
        assert (w.running, w.waiting, w.told) == ({"a"}, {"b"}, {})
        assert w.free["CPU"] == 99
        w.submit(f"c{len(w.tasks)}")
        assert len(w.workers) == 1, "there is no room now"
        w.cancel(f"c{len(w.tasks) - 1}")
        while not w.starting:
            w.advance(CROWDED_FOR)
        assert w.starting == {"b"}, "there may be by now"
    w.start("b")
    w.finish("a")
    w.finish("b")
    assert w.told["b"] == "settled"


def test_what_could_not_be_had_is_taken_where_another_worker_ends():
    w = World(cpus=100, starts=False)
    w.submit("a")
    w.start("a")
    w.submit("b")
    w.tell(Scheduler.worker_gone, w.worker_of("b"), is_crowded=True)
    w.finish("a")
    assert w.running == {"b"}


def test_a_worker_that_dies_lets_another_be_tried():
    w = World(cpus=100, starts=False)
    for name in ("a", "other"):
        w.submit(name, max_retries=0)
        w.start(name)
    w.submit("b")
    w.tell(Scheduler.worker_gone, w.worker_of("b"), is_crowded=True)
    assert w.waiting == {"b"}
    w.die("other")
    assert w.starting == {"b"}


def test_alone_it_waits_and_is_tried_again_for_ever():
    """No worker is there that could make room: once, this failed after 40 tries."""
    config = SchedulerConfig(crowded_for=0.5, crowded_at_last=3.0)
    w = World(cpus=100, starts=False, config=config)
    w.submit("a")
    w.submit("b")
    tried = [w.now]
    for _ in range(100):
        while w.starting:
            w.tell(
                Scheduler.worker_gone,
                min(w.workers),
                is_crowded=True,
                outage="no process",
            )
        assert w.waiting == {"a", "b"}
        while not w.starting:
            w.advance(0.125)
        tried.append(w.now)
    pauses = [after - before for before, after in pairwise(tried)]
    assert sorted(set(pauses)) == [0.5, 1.0, 2.0, 3.0]
    assert pauses == sorted(pauses), "longer and longer, up to a bound"
    while w.starting:
        w.start(min(w.starting))
        w.advance(6.0)
    assert w.running == {"a", "b"}
    assert w.scheduler.worker_limit.failures == 0


def test_why_nothing_starts_where_there_is_no_worker():
    w = World(cpus=100, starts=False)
    w.submit("a")
    w.tell(Scheduler.worker_gone, min(w.workers), is_crowded=True, outage="no process")
    told = "no worker can be started: no process (1 try has failed in 0.0 s; next try"
    assert told in told_why(w, "a")
    seen = snapshot(w.scheduler, {}, w.now)
    assert [told in str(one) for one in seen.outages] == [True]
    assert told in seen.shapes[0].reason
    assert told in str(seen)
    assert repr(seen).startswith("<NodeStatus no worker can be started; CPU 100/100")
    w.advance(CROWDED_FOR)
    w.start("a")
    w.submit("b")
    w.advance(6.0)
    w.tell(
        Scheduler.worker_gone, w.worker_of("b"), is_crowded=True, outage="no process"
    )
    assert snapshot(w.scheduler, {}, w.now).outages == (), "b waits for a's worker"


def test_failures_are_forgotten_when_nothing_fails_any_more():
    w = World(cpus=100, starts=False)
    w.scheduler.worker_limit.bound(1)
    w.submit("a")
    w.tell(Scheduler.worker_gone, min(w.workers), is_crowded=True, outage="no process")
    w.cancel("a")
    w.advance(10)
    assert w.scheduler.worker_limit.failures == 0
    assert w.scheduler.deadline() is None


def test_a_spare_that_cannot_be_had_is_asked_for_no_more():
    w = World(cpus=100, starts=False, config=SchedulerConfig(spare_workers=1))
    w.submit("a", max_calls=1)
    w.start("a")
    (spare,) = set(w.workers) - {w.worker_of("a")}
    w.tell(Scheduler.worker_gone, spare, is_crowded=True)
    assert len(w.workers) == 1
    w.advance(10)
    assert len(w.workers) == 1


def test_the_bound_comes_back_step_by_step():
    room = WorkerLimit()
    room.bound(20)
    assert room.shrink(10, "", 0.0)
    assert not room.shrink(12, "", 0.0), "it is lowered already"
    assert repr(room) == "<Room for 10 of 20>"
    seen = []
    while room.grow():
        seen.append(room.now)
    assert seen == [11, 13, 17]
    assert room.now == 20
    assert room.shrink(0, "", 0.0)
    assert room.now == 0


@pytest.mark.parametrize("most", [1, 3])
def test_a_tree_that_needs_more_workers_than_there_can_be(most: int):
    w = world(most=most)
    w.submit("t0")
    for depth in range(most):
        assert w.told == {}
        w.submit(f"t{depth + 1}", parent=f"t{depth}")
        w.wait_for(f"t{depth}", f"t{depth + 1}")
    assert w.told == {f"t{most}": "deadlocked"}
    assert w.tasks[f"t{most}"].reason == (
        f"t{most} needs a worker process, of which this node can have {most} at a "
        f"time, and each of these has a task that waits, as t{most - 1} does for "
        f"t{most}; `aiogpu doctor` says what bounds them"
    )
    assert w.blocked == {f"t{depth}" for depth in range(most - 1)}
    for depth in reversed(range(most)):
        w.finish(f"t{depth}")


def test_a_tree_that_has_one_worker_left_goes_on():
    w = world(most=2)
    w.submit("parent")
    for name in ("a", "b"):
        w.submit(name, parent="parent")
    w.wait_for("parent", "a", "b")
    assert (w.running, w.told) == ({"parent", "a"}, {})
    w.finish("a")
    w.finish("b")
    w.finish("parent")
    assert set(w.told.values()) == {"settled"}


def test_a_device_is_still_named_where_that_is_what_is_held():
    w = world(most=2, gpus=1)
    w.submit("a", num_gpus=1)
    w.submit("b", parent="a", num_gpus=1)
    w.wait_for("a", "b")
    assert "those that wait hold it" in w.tasks["b"].reason
    w.finish("a")


def test_no_spare_is_forked_while_somebody_lacks_a_worker():
    w = World(cpus=1, starts=False, config=SchedulerConfig(spare_workers=2))
    w.submit("runs", max_calls=1)
    w.submit("waits")
    node = w.scheduler
    node.spares.target += 1
    for refused, is_forked in ((1, False), (0, True)):
        node.worker_limit.refused = refused
        node.effects = []
        refill_spares(node)
        assert bool(node.effects) == is_forked
