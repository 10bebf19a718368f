"""Workers that cannot be had: so many and no more, or none for an environment [B46]."""

import pytest

from aiogpu.core.model.config import STARTS_ALLOWED, SchedulerConfig
from aiogpu.core.model.ids import PROGRAM
from aiogpu.core.scheduler.dispatch import refill_spares
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.core.scheduler.workers import WorkerLimit
from tests.core.builders import World, finish, status_of, why_of

CROWDED_FOR = SchedulerConfig().crowded_for


def world(most: int = 2, cpus: float = 100, **options) -> World:
    w = World(cpus=cpus, **options)
    w.scheduler.worker_limit.bound(most)
    return w


def test_spares_are_kept_where_they_may_be_and_make_way():
    w = World(cpus=100, config=SchedulerConfig(spare_workers=2), exits=False).play("""
        bound 3; submit a max_calls=1; worker_count = 3
        submit b max_calls=1 environment=X:1
        submit c max_calls=1 environment=X:1 cpus=2
    """)
    assert (len(w.retired), len(w.workers)) == (2, 3)
    for worker in w.retired:
        w.die(worker)
    w.play("running = a b c; submit d max_calls=1")
    assert (len(w.workers), w.waiting) == (3, {"d"})
    w.play("let exits=True; finish a; run_dry")
    assert set(w.told.values()) == {"settled"}


def test_why_a_task_waits_that_lacks_nothing_but_a_worker():
    w = world(most=1).play("submit zeroth b; advance 0.5")
    assert str(why_of(w, "b")) == (
        "b (task 1) has waited 0.5 s for its turn: 0 before it\n"
        "  workers: 1, and no room for more at a time; `aiogpu doctor` says "
        "what bounds them"
    )
    (shape,) = status_of(w).shapes
    assert shape.reason == "waits for a worker: there are 1, and no room for more"
    finish(w, "zeroth b")


def test_a_worker_that_cannot_be_had_is_no_failure_where_there_are_others():
    w = World(cpus=100, starts=False).play("submit a; start a; submit b")
    for _ in range(2 * STARTS_ALLOWED):
        w.tell(Scheduler.worker_gone, w.worker_of("b"), is_crowded=True)
        w.play("running = a; waiting = b; told =; free has CPU:99")
        w.submit(f"c{len(w.tasks)}")
        assert w.worker_count == 1, "there is no room now"
        w.cancel(f"c{len(w.tasks) - 1}")
        while not w.starting:
            w.advance(CROWDED_FOR)
        assert w.starting == {"b"}, "there may be by now"
    w.play("start b; finish a b; told has b:settled")


def test_a_worker_that_dies_lets_another_be_tried():
    w = World(cpus=100, starts=False)
    for name in ("a", "other"):
        w.submit(name, max_retries=0)
        w.start(name)
    w.submit("b")
    w.tell(Scheduler.worker_gone, w.worker_of("b"), is_crowded=True)
    w.play("waiting = b; die other; starting = b")


def test_why_nothing_starts_where_there_is_no_worker():
    w = World(cpus=100, starts=False).play("submit a")
    w.tell(Scheduler.worker_gone, min(w.workers), is_crowded=True, outage="no process")
    told = "no worker can be started: no process (1 try has failed in 0.0 s; next try"
    assert told in str(why_of(w, "a"))
    seen = status_of(w)
    assert [told in str(one) for one in seen.outages] == [True]
    assert told in seen.shapes[0].reason
    assert told in str(seen)
    assert repr(seen).startswith("<NodeStatus no worker can be started; CPU 100/100")
    w.play(f"advance {CROWDED_FOR}; start a; submit b; advance 6.0")
    w.tell(
        Scheduler.worker_gone, w.worker_of("b"), is_crowded=True, outage="no process"
    )
    assert status_of(w).outages == (), "b waits for a's worker"


def test_a_spare_that_cannot_be_had_is_asked_for_no_more():
    w = World(cpus=100, starts=False, config=SchedulerConfig(spare_workers=1))
    w.play("submit a max_calls=1; start a")
    (spare,) = set(w.workers) - {w.worker_of("a")}
    w.tell(Scheduler.worker_gone, spare, is_crowded=True)
    w.play("worker_count = 1; advance 10; worker_count = 1")


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
    w = world(most=most).play("submit t0")
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


def test_no_spare_is_forked_while_somebody_lacks_a_worker():
    w = World(cpus=1, starts=False, config=SchedulerConfig(spare_workers=2))
    w.play("submit runs max_calls=1; submit waits")
    node = w.scheduler
    node.spares.target += 1
    for refused, is_forked in ((1, False), (0, True)):
        node.worker_limit.refused = refused
        node.effects = []
        refill_spares(node)
        assert bool(node.effects) == is_forked


# An environment for which no worker can be started.


BROKEN = {"X": "1"}


WHY = "the zygote ended with status -9"


def fail(w: World, whom: str | int) -> None:
    """The zygote dies that was to fork a worker."""
    w.tell(Scheduler.worker_gone, w.worker_of(whom), outage=WHY)


def test_one_at_a_time_is_tried_and_the_others_follow():
    w = World(cpus=4, starts=False).play("submit a b c environment=X:1")
    for name in ("a", "b", "c"):
        fail(w, name)
    assert w.waiting == {"a", "b", "c"}
    assert w.scheduler.outages[("X", "1"),].failures == 1, "they have failed together"
    w.play("advance 0.05; starting = a; waiting = b c")
    w.play("submit d environment=X:1; waiting has d; start a; starting = b c d")


def test_what_was_reserved_is_let_go_once_it_cannot_start():
    w = World(cpus=4, gpus=2, starts=False).play("submit long gpus=1; start long")
    w.submit("a", num_gpus=2, environment=BROKEN)
    w.play("advance 60.0; submit late gpus=1; kept = a; submit first environment=X:1")
    fail(w, "first")
    w.play("kept = None; starting has late")


def test_what_nobody_waits_for_is_forgotten():
    w = World(cpus=4, starts=False).play("submit a environment=X:1")
    fail(w, "a")
    w.cancel("a")
    assert w.scheduler.outages
    w.advance(1)
    assert w.scheduler.outages == {}
    assert w.deadline is None
    w.play("submit b environment=X:1; starting = b")


def test_what_is_to_run_alone_waits_while_no_worker_can_be_started():
    w = World(cpus=4, starts=False).play("""
        submit a environment=X:1; start a; submit b environment=X:1; submit other
        start other
    """)
    fail(w, "b")
    w.play("starve a; finish other")
    assert "a" not in w.starting | w.running
    assert w.retired == [], "nobody has to make way: there is room"
    w.play("advance 6.0; starting = a")


def test_status_and_why_say_what_failed_and_when_it_is_tried_again():
    w = World(cpus=4, starts=False)
    variables = {**BROKEN, PROGRAM: "key"}
    w.submit("a", environment=variables)
    fail(w, "a")
    w.submit("b", environment={"Y": "1"})
    told = (
        "no worker can be started for tasks of a program that has joined with X: the "
        "zygote ended with status -9 (1 try has failed in 0.0 s; next try in 0.1 s)"
    )
    assert str(why_of(w, "a")) == f"a has waited 0.0 s for a worker\n  {told}"
    seen = status_of(w)
    assert [str(one) for one in seen.outages] == [told]
    assert [shape.reason for shape in seen.shapes] == [told]
    assert told in str(seen).splitlines()
    w.advance(0.05)
    (trying,) = status_of(w).outages
    assert str(trying).endswith("(1 try has failed in 0.1 s; next try now)")
    fail(w, "a")
    (again,) = status_of(w).outages
    assert "(2 tries have failed in 0.1 s; next try in 0.1 s)" in str(again)


def test_environments_are_tried_again_each_at_its_own_time():
    config = SchedulerConfig(crowded_for=1.0, crowded_at_last=1.0)
    w = World(cpus=4, starts=False, config=config).play("submit a environment=X:1")
    fail(w, "a")
    w.play("advance 0.5; submit b environment=Y:1")
    fail(w, "b")
    w.play("advance 0.5; starting = a; waiting = b; advance 0.5; starting = a b")
