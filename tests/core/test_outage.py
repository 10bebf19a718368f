"""An environment for which no worker can be started: its tasks wait, others go on."""

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import PROGRAM, TaskId
from aiogpu.core.records import Memory
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.testing import World

BROKEN = {"X": "1"}
WHY = "the zygote ended with status -9"


def fail(w: World, whom: str | int) -> None:
    """The zygote dies that was to fork a worker."""
    w.tell(Scheduler.worker_gone, w.worker_of(whom), outage=WHY)


def fail_all(w: World) -> int:
    """All workers that start do so no more; gives how many they were."""
    starting = list(w.scheduler.workers)
    for worker in starting:
        if worker.state.value == "starting":
            fail(w, worker.id)
    return len(starting)


def told_why(w: World, name: str) -> str:
    record = w.scheduler.tasks[TaskId(w.tasks[name].id)]
    return str(why(w.scheduler, record, {}, w.now))


def test_its_task_waits_and_holds_nothing():
    w = World(cpus=4, gpus=1, starts=False)
    w.submit("a", num_gpus=1, environment=BROKEN, max_retries=0)
    for n in range(50):
        fail(w, "a")
        assert w.waiting == {"a"}
        assert "a" not in w.told
        assert w.free["GPU"] == 1
        w.submit(f"b{n}", num_gpus=1)
        assert w.running | w.starting == {f"b{n}"}
        if w.starting:
            w.start(f"b{n}")
        w.finish(f"b{n}")
        while "a" not in w.starting:
            w.advance(0.5)
    w.start("a")
    assert w.running == {"a"}
    assert w.scheduler.outages == {}


def test_pauses_grow_up_to_a_bound():
    config = SchedulerConfig(crowded_for=0.5, crowded_at_last=3.0)
    w = World(cpus=4, starts=False, config=config)
    w.submit("a", environment=BROKEN)
    pauses = []
    for _ in range(6):
        fail(w, "a")
        failed_at = w.now
        while "a" not in w.starting:
            w.advance(0.125)
        pauses.append(w.now - failed_at)
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0, 3.0]


def test_one_at_a_time_is_tried_and_the_others_follow():
    w = World(cpus=4, starts=False)
    for name in ("a", "b", "c"):
        w.submit(name, environment=BROKEN)
    for name in ("a", "b", "c"):
        fail(w, name)
    assert w.waiting == {"a", "b", "c"}
    assert w.scheduler.outages[("X", "1"),].failures == 1, "they have failed together"
    w.advance(0.05)
    assert (w.starting, w.waiting) == ({"a"}, {"b", "c"})
    w.submit("d", environment=BROKEN)
    assert "d" in w.waiting
    w.start("a")
    assert w.starting == {"b", "c", "d"}


def test_a_try_that_is_given_up_makes_way_for_another():
    w = World(cpus=4, starts=False)
    w.submit("a", environment=BROKEN)
    fail(w, "a")
    w.advance(0.05)
    worker = w.worker_of("a")
    w.cancel("a")
    w.submit("b", environment=BROKEN)
    assert w.worker_of("b") == worker, "it is being started for whoever comes first"
    w.cancel("b")
    w.submit("c", environment={"Y": "1"})
    w.die(worker)
    w.submit("d", environment=BROKEN)
    assert {"c", "d"} <= w.starting


def test_its_living_workers_serve_on():
    w = World(cpus=2, starts=False)
    w.submit("a", environment=BROKEN)
    w.start("a")
    w.submit("b", environment=BROKEN)
    fail(w, "b")
    assert w.waiting == {"b"}
    w.finish("a")
    assert w.running == {"b"}


def test_others_that_ask_for_the_same_are_not_held_up():
    w = World(cpus=1, starts=False)
    w.submit("a", environment=BROKEN, priority=1)
    fail(w, "a")
    w.submit("b")
    w.submit("c", environment={"Y": "1"})
    w.submit("d", environment=BROKEN)
    assert (w.starting, w.waiting) == ({"b"}, {"a", "c", "d"})
    w.advance(0.01)
    w.start("b")
    w.finish("b")
    assert w.starting == {"c"}
    assert w.waiting == {"a", "d"}


def test_what_was_reserved_is_let_go_once_it_cannot_start():
    w = World(cpus=4, gpus=2, starts=False)
    w.submit("long", num_gpus=1)
    w.start("long")
    w.submit("a", num_gpus=2, environment=BROKEN)
    w.advance(60.0)
    w.submit("late", num_gpus=1)
    assert w.scheduler.reservation.record.spec.name == "a"
    w.submit("first", environment=BROKEN)
    fail(w, "first")
    assert w.scheduler.reservation is None
    assert "late" in w.starting


@pytest.mark.parametrize("is_shared", [False, True])
def test_nothing_is_reserved_for_what_cannot_start(is_shared: bool):
    w = World(cpus=4, gpus=2, starts=False)
    if is_shared:
        w.join(1)
    client = {"client": 1} if is_shared else {}
    w.submit("long", num_gpus=1)
    w.start("long")
    w.submit("a", num_gpus=2, environment=BROKEN, **client)
    w.submit("first", environment=BROKEN, **client)
    fail(w, "first")
    for n in range(20):
        w.submit(f"short{n}", num_gpus=1)
        w.advance(1.0)
        if "first" in w.starting:
            fail(w, "first")
        assert w.scheduler.reservation is None
        w.start(f"short{n}")
        w.finish(f"short{n}")


def test_programs_that_share_a_node_go_past_each_other():
    w = World(cpus=1, starts=False)
    w.join(1)
    w.join(2)
    w.submit("a", environment=BROKEN, client=1, priority=1)
    fail(w, "a")
    w.submit("b", client=1)
    w.submit("c", client=2)
    assert w.starting == {"b"}
    w.start("b")
    w.finish("b")
    assert w.running == {"c"}
    w.finish("c")
    w.advance(0.05)
    assert w.starting == {"a"}


def test_spares_are_not_asked_for_meanwhile():
    """Each failed spare once had another forked, thousands in a second."""
    w = World(cpus=4, starts=False, config=SchedulerConfig(spare_workers=2))
    w.submit("a", max_calls=1)
    spawned = 0
    for _ in range(100):
        spawned += fail_all(w)
        w.advance(0.05)
    assert w.told == {}
    assert spawned < 100


def test_what_nobody_waits_for_is_forgotten():
    w = World(cpus=4, starts=False)
    w.submit("a", environment=BROKEN)
    fail(w, "a")
    w.cancel("a")
    assert w.scheduler.outages
    w.advance(1)
    assert w.scheduler.outages == {}
    assert w.scheduler.deadline() is None
    w.submit("b", environment=BROKEN)
    assert w.starting == {"b"}


def test_how_it_is_told():
    w = World(cpus=4, starts=False)
    variables = {**BROKEN, PROGRAM: "key"}
    w.submit("a", environment=variables)
    fail(w, "a")
    w.submit("b", environment={"Y": "1"})
    told = (
        "no worker can be started for tasks of a program that has joined with X: the "
        "zygote ended with status -9 (1 try has failed in 0.0 s; next try in 0.1 s)"
    )
    assert told_why(w, "a") == f"a has waited 0.0 s for a worker\n  {told}"
    seen = snapshot(w.scheduler, {}, w.now)
    assert [str(one) for one in seen.outages] == [told]
    assert [shape.reason for shape in seen.shapes] == [told]
    assert told in str(seen).splitlines()
    w.advance(0.05)
    (trying,) = snapshot(w.scheduler, {}, w.now).outages
    assert str(trying).endswith("(1 try has failed in 0.1 s; next try now)")
    fail(w, "a")
    (again,) = snapshot(w.scheduler, {}, w.now).outages
    assert "(2 tries have failed in 0.1 s; next try in 0.1 s)" in str(again)


def test_two_programs_that_ask_for_the_same_are_both_passed_over():
    w = World(cpus=1, starts=False)
    w.join(1)
    w.join(2)
    w.submit("a", environment=BROKEN, client=1)
    fail(w, "a")
    w.submit("b", environment=BROKEN, client=2)
    w.submit("c", client=2)
    assert (w.starting, w.waiting) == ({"c"}, {"a", "b"})
    w.start("c")
    w.finish("c")
    w.advance(0.05)
    (first,) = w.starting
    w.start(first)
    w.finish(first)
    assert w.running == {"a", "b"} - {first}


def test_what_is_to_run_alone_waits_as_well():
    w = World(cpus=4, starts=False)
    w.submit("a", environment=BROKEN)
    w.start("a")
    w.submit("b", environment=BROKEN)
    w.submit("other")
    w.start("other")
    fail(w, "b")
    w.tell(Scheduler.kill_for_memory, w.worker_of("a"), Memory.HOST)
    w.finish("other")
    assert "a" not in w.starting | w.running
    assert w.retired == [], "nobody has to make way: there is room"
    w.advance(6.0)
    assert w.starting == {"a"}


def test_environments_are_tried_again_each_at_its_own_time():
    config = SchedulerConfig(crowded_for=1.0, crowded_at_last=1.0)
    w = World(cpus=4, starts=False, config=config)
    w.submit("a", environment=BROKEN)
    fail(w, "a")
    w.advance(0.5)
    w.submit("b", environment={"Y": "1"})
    fail(w, "b")
    w.advance(0.5)
    assert w.starting == {"a"}
    assert w.waiting == {"b"}
    w.advance(0.5)
    assert w.starting == {"a", "b"}
