"""Which process runs what: reuse, bindings, isolation, affinity and spare workers."""

import pytest

from aiogpu.core.effects import Assign, Retire, Spawn
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.core.scheduler.workers import MOST, Workers
from tests.core.builders import World, kinds


def test_a_worker_keeps_its_devices():
    """[B27]"""
    w = World(gpus=2)
    w.submit("on 0", num_gpus=1)
    w.submit("on 1", num_gpus=1)
    first, second = w.worker_of("on 0"), w.worker_of("on 1")
    w.finish("on 1")
    w.submit("on-1-again", num_gpus=0.5)
    assert w.worker_of("on-1-again") == second
    w.finish("on 0")
    w.submit("cpu")
    assert w.worker_of("cpu") not in {first, second}
    w.submit("on-0-again", num_gpus=1)
    assert w.worker_of("on-0-again") == first


def test_an_isolated_task_has_a_process_of_its_own_and_its_share_until_that_is_gone():
    """[B26]"""
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
def test_a_worker_that_does_not_exit_in_time_is_killed(options):
    config = SchedulerConfig(exit_grace=5.0, idle_workers=0)
    w = World(exits=False, config=config)
    w.submit("a", **options)
    worker = w.worker_of("a")
    w.play("finish a; advance 4.9; killed =; advance 0.1")
    assert w.killed == [worker]
    w.die(worker)
    w.play("advance 60; deadline = None")


def test_a_worker_ends_after_so_many_calls_of_the_function():
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


def test_no_worker_can_be_taken_where_none_is_idle():
    workers = Workers()
    assert workers.take_clean(()) is None
    assert workers.take_bound(((), ())) is None
    assert workers.take_unclaimed(()) is None
    with pytest.raises(KeyError, match="no worker is idle"):
        workers.pop_idle()


# [B27] A device with an idle worker that fits is preferred.


def warm(w, name, gpus, **options):
    """Leave an idle worker behind."""
    w.submit(name, num_gpus=gpus, **options)
    worker, held = w.worker_of(name), w.gpus_of(name)
    w.finish(name)
    return worker, held


@pytest.mark.parametrize(
    "options",
    [{"max_calls": 1}, {"environment": {"X": "1"}}, None],
    ids=["isolated", "environment", "gone"],
)
def test_a_worker_that_cannot_be_used_or_has_gone_does_not_count(options):
    w = World(gpus=2).play("submit x gpus=1 max_retries=0")
    worker, _ = warm(w, "a", 1)
    w.finish("x")
    if options is None:
        w.die(worker)
    w.submit("b", num_gpus=1, **(options or {}))
    assert w.gpus_of("b") == [0]


# Spare workers.

X = (("X", "1"),)


def world(spares=2, **options):
    config = SchedulerConfig(spare_workers=spares)
    return World(cpus=4, gpus=2, config=config, **options)


def spares_of(w: World, environment=X) -> int:
    return w.scheduler.workers.spares(environment)


def test_spares_are_wanted_once_a_task_has_a_process_of_its_own():
    w = world()
    assert repr(w.scheduler.spares) == "<Spares 2 for nobody>"
    w.play("submit reused gpus=0.5; finish reused")
    w.play("worker_count = 1; submit a max_calls=1")
    assert repr(w.scheduler.spares) == "<Spares 2 for 1 environments>"
    spares = w.workers.keys() - {w.worker_of("a")}
    w.submit("b", max_calls=1)
    assert kinds(w)[:2] == [Assign, Spawn], "it is replaced behind the task"
    assert w.worker_of("b") in spares
    assert (spares_of(w, ()), w.scheduler.spares.target) == (2, 2)
    none = world(spares=0)
    none.submit("a", max_calls=1, environment=dict(X))
    assert len(none.workers) == 1
    assert none.scheduler.spares.wanted == {}


def test_the_task_that_has_taken_one_is_let_alone_for_a_moment():
    w = World(cpus=4, config=SchedulerConfig(spare_workers=2, refill_after=0.002))
    w.play("""
        submit a max_calls=1; worker_count = 1
        submit b max_calls=1; worker_count = 2
        advance 0.001; worker_count = 2; advance 0.001; worker_count = 4
        submit c max_calls=1; close; advance 1
    """)
    assert not [e for e in w.effects if isinstance(e, Spawn)]


def test_spares_do_not_count_among_the_idle():
    config = SchedulerConfig(spare_workers=2, idle_workers=1)
    w = World(cpus=4, config=config).play("""
        submit a max_calls=1; submit b c; finish b c
    """)
    assert w.scheduler.workers.spares(()) == 2
    assert w.scheduler.workers.idle == 3
    assert len(w.retired) == 1


def test_outdated_ones_are_replaced_unless_the_node_closes():
    w = world().play("submit a max_calls=1")
    before = set(w.workers) - {w.worker_of("a")}
    w.tell(Scheduler.environment_outdated, ())
    assert set(w.retired) == before
    assert [kind for kind in kinds(w) if kind is not Retire] == [Spawn] * 2
    w.play("let exits=False; close")
    w.tell(Scheduler.environment_outdated, ())
    assert w.worker_count == 3


def test_an_outdated_one_that_starts_is_retired_and_given_to_nobody():
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


def test_the_alarm_rings_for_the_one_that_was_used_first():
    w = World(cpus=9, config=SchedulerConfig(spare_workers=1, spares_for=10.0))
    for n in range(3):
        w.submit(f"t{n}", max_calls=1, environment={"N": str(n)})
        w.advance(2)
    w.submit("again", max_calls=1, environment={"N": "0"})
    left = []
    for _ in range(6):
        w.advance(2)
        left.append([n for n in range(3) if spares_of(w, (("N", str(n)),))])
    assert left == [[0, 1, 2], [0, 1, 2], [0, 2], [0], [], []]


def test_an_alarm_for_spares_is_not_set_again_for_the_moment_at_which_it_rings():
    """0.2 + 0.5 - 0.2 is less than 0.5; a node woke without end."""
    w = World(cpus=4, config=SchedulerConfig(spare_workers=1, spares_for=0.5))
    w.clock.advance_to(0.2)
    w.submit("a", max_calls=1, environment=dict(X))
    while (moment := w.scheduler.deadline()) is not None:
        w.clock.advance_to(moment)
        w.tell(Scheduler.wake)
        assert w.scheduler.deadline() != moment
    assert spares_of(w) == 0


def test_so_many_environments_have_spares_and_no_more():
    w = World(cpus=100, config=SchedulerConfig(spare_workers=1, spares_for=10.0))
    for n in range(MOST + 2):
        w.submit(f"t{n}", max_calls=1, environment={"N": str(n)})
    having = [n for n in range(MOST + 2) if spares_of(w, (("N", str(n)),))]
    assert having == list(range(MOST))
    w.advance(10)
    w.submit("later", max_calls=1, environment={"N": str(MOST)})
    assert spares_of(w, (("N", str(MOST)),)) == 1


def test_spares_of_an_environment_whose_zygote_has_made_way_are_not_replaced():
    """Or two environments would give up each other's zygotes for ever."""
    w = world().play("submit a max_calls=1 environment=X:1")
    w.tell(Scheduler.environment_outdated, X)
    assert spares_of(w) == 0
    assert not [e for e in w.effects if isinstance(e, Spawn)]
    w.submit("b", max_calls=1, environment=dict(X))
    assert spares_of(w) == 2


def test_a_spare_that_fails_concerns_its_own_environment():
    w = world(starts=False).play("submit a max_calls=1 environment=X:1")
    for worker in set(w.workers) - {w.worker_of("a")}:
        w.die(worker)
    w.submit("b", max_calls=1)
    assert (spares_of(w), spares_of(w, ())) == (0, 2)
    w.tell(Scheduler.worker_gone, w.worker_of("b"), outage="no zygote")
    w.play("start a; submit c max_calls=1 environment=X:1")
    assert spares_of(w) == 2
