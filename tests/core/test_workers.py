"""Workers: reuse, isolation, affinity, spares, limits and outages."""

import pytest

from aiogpu.core.effects import Assign, Retire, Spawn
from aiogpu.core.model.config import STARTS_ALLOWED, SchedulerConfig
from aiogpu.core.model.ids import PROGRAM
from aiogpu.core.scheduler.cancellation import SOON
from aiogpu.core.scheduler.dispatch import refill_spares
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.core.scheduler.state import Outage
from aiogpu.core.scheduler.workers import MAX_ENVIRONMENTS, WorkerLimit, Workers
from tests.core.builders import World, kinds, status_of, why_of

pytestmark = pytest.mark.usefixtures("few")


def test_worker_keeps_its_devices():
    w = World(gpus=2).play("submit on-0 on-1 gpus=1")
    first, second = w.worker_of("on-0"), w.worker_of("on-1")
    w.play("finish on-1; submit on-1-again gpus=0.5")
    assert w.worker_of("on-1-again") == second
    w.play("finish on-0; submit cpu")
    assert w.worker_of("cpu") not in {first, second}
    w.submit("on-0-again", num_gpus=1)
    assert w.worker_of("on-0-again") == first


def test_isolated_task_keeps_its_share_until_its_process_is_gone():
    w = World(gpus=1, exits=False).play("submit a gpus=1")
    worker = w.worker_of("a")
    w.play("finish a; submit b gpus=1 max_calls=1")
    isolated = w.worker_of("b")
    assert isolated != worker
    [spawn, assign] = w.effects
    assert (type(spawn), type(assign)) == (Spawn, Assign)
    assert assign.is_first
    assert assign.is_last
    w.play("""
        submit c gpus=1; finish b; told has b:settled; free_gpus = 0.0; waiting = c
    """)
    w.die(isolated)
    assert w.running == {"c"}


@pytest.mark.parametrize("options", [{"max_calls": 1}, {"max_calls": 0}])
def test_worker_that_does_not_exit_in_time_is_killed(options):
    config = SchedulerConfig(exit_grace=5.0, idle_workers=0)
    w = World(exits=False, config=config)
    w.submit("a", **options)
    worker = w.worker_of("a")
    w.play("finish a; advance 4.9; killed =; advance 0.1")
    assert w.killed == [worker]
    w.die(worker)
    w.play("advance 60; deadline = None")


def test_worker_exits_after_max_calls():
    w = World(exits=False).play("submit f function=1 max_calls=2")
    worker = w.worker_of("f")
    w.play("finish f; submit g function=2 max_calls=2")
    assert w.worker_of("g") == worker
    w.play("finish g; submit anything")
    assert w.worker_of("anything") == worker
    w.play("finish anything; submit f-again function=1 max_calls=2")
    assert w.worker_of("f-again") == worker
    w.play("finish f-again; submit next")
    assert w.worker_of("next") != worker


def test_pop_idle_raises_without_an_idle_worker():
    workers = Workers()
    assert workers.spare(()) is None
    assert workers.take_bound(((), (), 0), 1) is None
    assert workers.take_unclaimed(()) is None
    with pytest.raises(KeyError, match="no worker is idle"):
        workers.pop_idle()


# A device with an idle worker that fits is preferred.


def warm(w, name, gpus, **options):
    """Create an idle worker with devices."""
    w.submit(name, num_gpus=gpus, **options)
    worker, gpus = w.worker_of(name), w.gpus_of(name)
    w.finish(name)
    return worker, gpus


@pytest.mark.parametrize(
    "options",
    [{"max_calls": 1}, {"environment": {"X": "1"}}, None],
    ids=["isolated", "environment", "gone"],
)
def test_affinity_ignores_unusable_workers(options):
    w = World(gpus=2).play("submit x gpus=1 max_retries=0")
    worker, _ = warm(w, "a", 1)
    w.finish("x")
    if options is None:
        w.die(worker)
    w.submit("b", num_gpus=1, **(options or {}))
    assert w.gpus_of("b") == [0]


def test_affinity_counts_two_workers_of_one_device():
    w = World(gpus=2).play("""
        submit x gpus=1 max_retries=0; submit a b gpus=0.5; finish a b; die x
    """)
    for name in "cd":
        w.submit(name, num_gpus=0.5)
        assert w.gpus_of(name) == [1]
    assert w.worker_count == 2


# Spare workers.

X = (("X", "1"),)


def world(spares=2, **options):
    config = SchedulerConfig(spare_workers=spares)
    return World(cpus=4, gpus=2, config=config, **options)


def test_one_idle_worker_is_evicted_for_each_task():
    w = crowded(most=3, gpus=1, exits=False).play("""
        submit a b c; finish a b c; submit x y gpus=1
    """)
    assert len(w.retired) == 1, "for y there is no device"
    w.submit("z", environment={"X": "1"}, num_cpus=2)
    assert len(w.retired) == 2
    w.play("submit again; running = again")
    for worker in list(w.retired):
        w.die(worker)
    assert (w.running, w.waiting) == ({"again", "x", "z"}, {"y"})
    assert w.scheduler.worker_limit.leaving == set()


def spares_of(w: World, environment=X) -> int:
    return w.scheduler.workers.spares(environment)


def test_spares_are_kept_after_a_task_took_its_own_process():
    w = world()
    assert repr(w.scheduler.spares) == "<Spares 2 for each of 0 environments>"
    w.play("submit reused gpus=0.5; finish reused")
    w.play("worker_count = 1; submit a max_calls=1")
    assert repr(w.scheduler.spares) == "<Spares 2 for each of 1 environments>"
    spares = w.workers.keys() - {w.worker_of("a")}
    w.submit("b", max_calls=1)
    assert kinds(w)[:2] == [Assign, Spawn], "it is replaced behind the task"
    assert w.worker_of("b") in spares
    assert (spares_of(w, ()), w.scheduler.spares.target) == (2, 2)
    none = world(spares=0)
    none.submit("a", max_calls=1, environment=dict(X))
    assert len(none.workers) == 1
    assert none.scheduler.spares.wanted == {}


def test_spares_are_refilled_after_a_delay():
    w = World(cpus=4, config=SchedulerConfig(spare_workers=2, refill_after=0.002))
    w.play("""
        submit a max_calls=1; worker_count = 1
        submit b max_calls=1; worker_count = 2
        advance 0.001; worker_count = 2; advance 0.001; worker_count = 4
        submit c max_calls=1; close; advance 1
    """)
    assert not [e for e in w.effects if isinstance(e, Spawn)]


def test_spares_do_not_count_as_idle_workers():
    config = SchedulerConfig(spare_workers=2, idle_workers=1)
    w = World(cpus=4, config=config).play("""
        submit a max_calls=1; submit b c; finish b c
    """)
    assert w.scheduler.workers.spares(()) == 2
    assert w.scheduler.workers.idle == 3
    assert len(w.retired) == 1


def test_outdated_spares_are_replaced_unless_the_node_closes():
    w = world().play("submit a max_calls=1")
    before = set(w.workers) - {w.worker_of("a")}
    w.tell(Scheduler.environment_outdated, ())
    assert set(w.retired) == before
    assert [kind for kind in kinds(w) if kind is not Retire] == [Spawn] * 2
    w.play("let exits=False; close")
    w.tell(Scheduler.environment_outdated, ())
    assert w.worker_count == 3


def test_outdated_starting_worker_is_retired():
    w = world().play("submit a max_calls=1")
    first = set(w.workers)
    w.play("let starts=False; submit b max_calls=1")
    [late] = set(w.workers) - first
    w.tell(Scheduler.environment_outdated, ())
    w.play("let starts=True; submit c max_calls=1")
    assert w.worker_of("c") != late
    w.start(late)
    assert late in w.retired
    w.run_dry()
    assert w.scheduler.workers.get(late) is None


def test_spares_alarm_is_set_for_the_oldest_use():
    w = World(cpus=9, config=SchedulerConfig(spare_workers=1, spares_for=10.0))
    w.submit("plain", max_calls=1)
    assert spares_of(w, ()) == 1, "these are kept"
    for n in range(3):
        w.submit(f"t{n}", max_calls=1, environment={"N": str(n)})
        w.advance(2)
    w.submit("again", max_calls=1, environment={"N": "0"})
    remaining = []
    for _ in range(6):
        w.advance(2)
        remaining.append([n for n in range(3) if spares_of(w, (("N", str(n)),))])
    assert remaining == [[0, 1, 2], [0, 1, 2], [0, 2], [0], [], []]


def test_spares_alarm_is_not_set_again_for_the_same_time():
    """0.2 + 0.5 - 0.2 is less than 0.5; the alarm was set again without end."""
    w = World(cpus=4, config=SchedulerConfig(spare_workers=1, spares_for=0.5))
    w.clock.advance_to(0.2)
    w.submit("a", max_calls=1, environment=dict(X))
    while (moment := w.scheduler.deadline()) is not None:
        w.clock.advance_to(moment)
        w.tell(Scheduler.wake)
        assert w.scheduler.deadline() != moment
    assert spares_of(w) == 0


def test_number_of_environments_with_spares_is_limited():
    w = World(cpus=100, config=SchedulerConfig(spare_workers=1, spares_for=10.0))
    for n in range(MAX_ENVIRONMENTS + 2):
        w.submit(f"t{n}", max_calls=1, environment={"N": str(n)})
    having = [n for n in range(MAX_ENVIRONMENTS + 2) if spares_of(w, (("N", str(n)),))]
    assert having == list(range(MAX_ENVIRONMENTS))
    w.advance(10)
    w.submit("later", max_calls=1, environment={"N": str(MAX_ENVIRONMENTS)})
    assert spares_of(w, (("N", str(MAX_ENVIRONMENTS)),)) == 1


def test_spares_of_a_replaced_zygote_are_not_refilled():
    """Otherwise two environments replace each other's zygotes for ever."""
    w = world().play("submit a max_calls=1 environment=X:1")
    w.tell(Scheduler.environment_outdated, X)
    assert spares_of(w) == 0
    assert not [e for e in w.effects if isinstance(e, Spawn)]
    w.submit("b", max_calls=1, environment=dict(X))
    assert spares_of(w) == 2


def test_failed_spare_concerns_its_own_environment():
    w = world(starts=False).play("submit a max_calls=1 environment=X:1")
    for worker in set(w.workers) - {w.worker_of("a")}:
        w.die(worker)
    w.submit("b", max_calls=1)
    assert (spares_of(w), spares_of(w, ())) == (0, 2)
    w.tell(Scheduler.worker_gone, w.worker_of("b"), outage="no zygote")
    w.play("start a; submit c max_calls=1 environment=X:1")
    assert spares_of(w) == 2


# Workers that would have to prepare at length for a task.


def outdone(w: World, *workers: int) -> World:
    """Let a new worker be better than these, for each task called b."""
    w.scheduler.is_outdone = lambda worker, task: (
        worker in workers and w.scheduler.tasks[task].spec.name.startswith("b")
    )
    return w


def test_idle_worker_that_is_outdone_stays_idle():
    w = World(cpus=4).play("submit a1 a2 function=1")
    first, second = w.worker_of("a1"), w.worker_of("a2")
    outdone(w, first, second).play("finish a1; finish a2; submit b1 function=2")
    third = w.worker_of("b1")
    assert third not in {first, second}
    w.play("finish b1; submit a3 function=1; submit b2 function=2")
    assert w.worker_of("a3") == third, "the last used"
    assert w.worker_of("b2") not in {first, second, third}
    outdone(w, second).play("submit b3 function=2")
    assert w.worker_of("b3") == first
    w.check()


def test_worker_that_is_outdone_serves_where_no_other_can_start():
    w = World(cpus=4).play("bound 1; submit a")
    worker = w.worker_of("a")
    outdone(w, worker).play("finish a; submit b1 function=2")
    assert w.worker_of("b1") == worker
    w = World(cpus=4).play("submit a")
    worker = w.worker_of("a")
    w.scheduler.outages[()] = Outage("no zygote", w.now, is_paused=True)
    outdone(w, worker).play("finish a; submit b1 function=2")
    assert w.worker_of("b1") == worker


def test_spare_worker_goes_before_one_that_is_outdone():
    w = world().play("submit a")
    worker = w.worker_of("a")
    w.play("submit fresh max_calls=1; finish a; finish fresh")
    assert spares_of(w, ()) == 2
    outdone(w, worker).play("submit b1 function=2")
    assert w.worker_of("b1") != worker
    w.check()


@pytest.mark.parametrize("has_room", [True, False])
def test_spare_that_is_outdone_is_taken_only_where_no_worker_can_start(has_room: bool):
    w = world().play("submit fresh max_calls=1; finish fresh")
    spares = {spare.id for spare in w.scheduler.workers.clean(())}
    assert len(spares) == 2
    if not has_room:
        w.play(f"bound {len(w.workers)}")
    outdone(w, *spares).play("submit b1 max_calls=1")
    assert (w.worker_of("b1") in spares) is not has_room
    w.check()


def test_worker_that_is_outdone_gives_its_lease_to_a_new_worker():
    w = World(cpus=1, took=1e-5).play("""
        submit a1 a2 function=1; submit b1 b2 function=2
    """)
    worker = w.worker_of("a1")
    outdone(w, worker).play("finish a1")
    assert w.worker_of("a2") == worker
    w.play("finish a2")
    assert w.worker_of("b1") not in {worker, None}
    assert w.running == {"b1"}
    w.check()


def test_worker_that_is_not_outdone_takes_over_another_function():
    w = World(cpus=1, took=1e-5).play("submit a1 function=1; submit b1 b2 function=2")
    worker = w.worker_of("a1")
    outdone(w).play("finish a1")
    assert w.worker_of("b1") == worker
    outdone(w, worker).play("finish b1")
    assert w.worker_of("b2") == worker, "it has the modules since b1"
    w.check()


def test_task_is_not_sent_ahead_to_a_worker_that_is_outdone():
    w = World(cpus=1, took=1e-5).play("""
        submit a0 function=1; finish a0; submit b function=2
    """)
    used = w.worker_of("b")
    w.play("finish b")
    w.die(used)
    for number in range(4):
        w.play(f"submit a{number + 1} function=1")
    for number in range(20):
        w.play(f"submit b{number} function=2")
    worker = w.worker_of("a1")
    outdone(w, worker).play("finish a1; finish a2")
    queued = w.scheduler.workers.get(worker).queue
    assert not [task for task in queued if task.spec.name.startswith("b")]
    w.check()


# The worker limit, and failed starts of workers.

START_RETRY_AFTER = SchedulerConfig().start_retry_after


def crowded(most: int = 2, cpus: float = 100, **options) -> World:
    w = World(cpus=cpus, **options)
    w.scheduler.worker_limit.bound(most)
    return w


def test_spares_make_room_at_the_worker_limit():
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


def test_why_explains_a_task_that_lacks_only_a_worker():
    w = crowded(most=1).play("submit zeroth b; advance 0.5")
    assert str(why_of(w, "b")) == (
        "b (task 1) has waited 0.5 s for its turn: 0 before it\n"
        "  workers: 1, and no room for more at a time; `aiogpu doctor` says "
        "what limits them"
    )
    (shape,) = status_of(w).shapes
    assert shape.reason == "waits for a worker: there are 1, and no room for more"
    w.play("finish zeroth b")


def test_crowded_start_requeues_the_task():
    w = World(cpus=100, starts=False).play("submit a; start a; submit b")
    for _ in range(2 * STARTS_ALLOWED):
        w.tell(Scheduler.worker_gone, w.worker_of("b"), is_crowded=True)
        w.play("running = a; waiting = b; told =; free has CPU:99")
        w.submit(f"c{len(w.tasks)}")
        assert w.worker_count == 1, "there is no room now"
        w.cancel(f"c{len(w.tasks) - 1}")
        while not w.starting:
            w.advance(START_RETRY_AFTER)
        assert w.starting == {"b"}, "there may be by now"
    w.play("start b; finish a b; told has b:settled")


def test_dead_worker_makes_room_for_another():
    w = World(cpus=100, starts=False)
    for name in ("a", "other"):
        w.submit(name, max_retries=0)
        w.start(name)
    w.submit("b")
    w.tell(Scheduler.worker_gone, w.worker_of("b"), is_crowded=True)
    w.play("waiting = b; die other; starting = b")


def test_why_explains_that_no_worker_starts():
    w = World(cpus=100, starts=False).play("submit a")
    w.tell(Scheduler.worker_gone, min(w.workers), is_crowded=True, outage="no process")
    told = "no worker can be started: no process (1 try has failed in 0.0 s; next try"
    assert told in str(why_of(w, "a"))
    status = status_of(w)
    assert [told in str(outage) for outage in status.outages] == [True]
    assert told in status.shapes[0].reason
    assert told in str(status)
    assert repr(status).startswith("<NodeStatus no worker can be started; CPU 100/100")
    w.play(f"advance {START_RETRY_AFTER}; start a; submit b; advance 6.0")
    w.tell(
        Scheduler.worker_gone, w.worker_of("b"), is_crowded=True, outage="no process"
    )
    assert status_of(w).outages == (), "b waits for a's worker"


def test_start_failures_are_forgotten_after_success():
    w = World(cpus=100, starts=False).play("bound 1; submit a")
    w.tell(Scheduler.worker_gone, min(w.workers), is_crowded=True, outage="no process")
    w.play("cancel a; advance 10")
    assert w.scheduler.worker_limit.failures == 0
    assert w.deadline is None


def test_failed_spare_is_not_forked_again():
    w = World(cpus=100, starts=False, config=SchedulerConfig(spare_workers=1))
    w.play("submit a max_calls=1; start a")
    (spare,) = set(w.workers) - {w.worker_of("a")}
    w.tell(Scheduler.worker_gone, spare, is_crowded=True)
    w.play("worker_count = 1; advance 10; worker_count = 1")


def test_worker_limit_rises_step_by_step():
    room = WorkerLimit()
    room.bound(20)
    assert room.shrink(10, "", 0.0)
    assert not room.shrink(12, "", 0.0), "it is lowered already"
    assert repr(room) == "<WorkerLimit 10 of 20>"
    limits = []
    while room.grow():
        limits.append(room.now)
    assert limits == [11, 13, 17]
    assert room.now == 20
    assert room.shrink(0, "", 0.0)
    assert room.now == 0


@pytest.mark.parametrize("most", [1, 3])
def test_deadlock_at_the_worker_limit_fails(most: int):
    w = crowded(most=most).play("submit t0")
    for depth in range(most):
        assert w.told == {}
        w.submit(f"t{depth + 1}", parent=f"t{depth}")
        w.wait_for(f"t{depth}", f"t{depth + 1}")
    assert w.told == {f"t{most}": "deadlocked"}
    assert w.tasks[f"t{most}"].reason == (
        f"t{most} needs a worker process, but this node can have only {most} at a "
        f"time, and each runs a task that waits (t{most - 1} waits for t{most}); "
        f"`aiogpu doctor` says what limits their number"
    )
    assert w.blocked == {f"t{depth}" for depth in range(most - 1)}
    for depth in reversed(range(most)):
        w.finish(f"t{depth}")


def test_no_spare_is_forked_while_a_task_lacks_a_worker():
    w = World(cpus=1, starts=False, config=SchedulerConfig(spare_workers=2))
    w.play("submit runs max_calls=1; submit waits")
    node = w.scheduler
    node.spares.target += 1
    for refused, is_forked in ((1, False), (0, True)):
        node.worker_limit.refused = refused
        node.effects = []
        refill_spares(node)
        assert bool(node.effects) == is_forked


# Outages of an environment.


BROKEN = {"X": "1"}


WHY = "the zygote ended with status -9"


def fail(w: World, whom: str | int) -> None:
    """Report that a worker could not be started."""
    w.tell(Scheduler.worker_gone, w.worker_of(whom), outage=WHY)


@pytest.mark.parametrize("is_crowded", [False, True])
def test_outage_is_retried_with_growing_delays(is_crowded: bool):
    """Also if no worker could make room: attempts once ended after 40."""
    config = SchedulerConfig(start_retry_after=0.5, max_start_retry_delay=3.0)
    w = World(cpus=4, starts=False, config=config).play("submit a b environment=X:1")
    pauses = []
    for _ in range(60):
        while w.starting:
            worker, failed_at = min(w.workers), w.now
            w.tell(Scheduler.worker_gone, worker, is_crowded=is_crowded, outage=WHY)
        while not w.starting:
            w.play("waiting = a b; advance 0.125")
        pauses.append(w.now - failed_at)
    assert pauses == [0.5] * is_crowded + [0.5, 1.0, 2.0] + [3.0] * (57 - is_crowded)
    while w.starting:
        w.play(f"start {min(w.starting)}; advance 6.0")
    assert w.running == {"a", "b"}
    assert w.scheduler.worker_limit.failures == 0


def test_outage_is_retried_with_one_worker():
    w = World(cpus=4, starts=False).play("submit a b c environment=X:1")
    for name in ("a", "b", "c"):
        fail(w, name)
    assert w.waiting == {"a", "b", "c"}
    assert w.scheduler.outages[("X", "1"),].failures == 1, "they have failed together"
    w.play("advance 0.05; starting = a; waiting = b c")
    w.play("submit d environment=X:1; waiting has d; start a; starting = b c d")


def test_outage_ends_the_reservation():
    w = World(cpus=4, gpus=2, starts=False).play("submit long gpus=1; start long")
    w.submit("a", num_gpus=2, environment=BROKEN)
    w.play("advance 60.0; submit late gpus=1; kept = a; submit first environment=X:1")
    fail(w, "first")
    w.play("kept = None; starting has late")


def test_outage_without_waiting_tasks_is_forgotten():
    w = World(cpus=4, starts=False).play("submit a environment=X:1")
    fail(w, "a")
    w.cancel("a")
    assert w.scheduler.outages
    w.advance(1)
    assert w.scheduler.outages == {}
    assert w.deadline is None
    w.play("submit b environment=X:1; starting = b")


def test_exclusive_retry_waits_during_an_outage():
    w = World(cpus=4, starts=False).play("""
        submit a environment=X:1; start a; submit b environment=X:1; submit other
        start other
    """)
    fail(w, "b")
    w.play("starve a; finish other")
    assert "a" not in w.starting | w.running
    assert w.retired == [], "nobody has to make way: there is room"
    w.play("advance 6.0; starting = a")


def test_why_describes_an_outage():
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
    status = status_of(w)
    assert [str(outage) for outage in status.outages] == [told]
    assert [shape.reason for shape in status.shapes] == [told]
    assert told in str(status).splitlines()
    w.advance(0.05)
    (trying,) = status_of(w).outages
    assert str(trying).endswith("(1 try has failed in 0.1 s; next try now)")
    fail(w, "a")
    (again,) = status_of(w).outages
    assert "(2 tries have failed in 0.1 s; next try in 0.1 s)" in str(again)


def test_outages_of_environments_are_independent():
    config = SchedulerConfig(start_retry_after=1.0, max_start_retry_delay=1.0)
    w = World(cpus=4, starts=False, config=config).play("submit a environment=X:1")
    fail(w, "a")
    w.play("advance 0.5; submit b environment=Y:1")
    fail(w, "b")
    w.play("advance 0.5; starting = a; waiting = b; advance 0.5; starting = a b")


def test_idle_worker_that_is_ended_soon_is_killed_if_it_stays():
    w = World(exits=False).play("submit a; finish a; submit b")
    busy = w.worker_of("b")
    w.tell(Scheduler.end_idle, busy)
    w.play("killed =; finish b")
    w.tell(Scheduler.end_idle, busy)
    assert Retire(busy) in w.effects
    w.advance(SOON)
    assert w.killed == [busy]
    w.tell(Scheduler.end_idle, busy)
    w.submit("c")
    assert w.worker_of("c") != busy
