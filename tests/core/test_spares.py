"""Clean workers that stand ready: when they are wanted, how many, of what kind."""

from aiogpu.core.effects import Assign, Retire, Spawn
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.core.scheduler.workers import MOST
from aiogpu.testing import World


def world(spares=2, **options):
    return World(
        cpus=4, gpus=2, config=SchedulerConfig(spare_workers=spares), **options
    )


def kinds(w):
    return [type(effect) for effect in w.effects]


def test_none_is_kept_while_workers_are_reused():
    w = world()
    w.submit("a", num_gpus=0.5)
    w.finish("a")
    assert len(w.workers) == 1


def test_a_task_with_a_process_of_its_own_makes_them_wanted():
    w = world()
    w.submit("a", num_gpus=0.5, max_calls=1)
    assert len(w.workers) == 3
    assert w.running == {"a"}


def test_a_spare_is_taken_at_once_and_replaced_behind_the_task():
    w = world()
    w.submit("a", max_calls=1)
    spare = max(w.workers)
    w.submit("b", max_calls=1)
    assert kinds(w)[:2] == [Assign, Spawn]
    assert w.worker_of("b") in (spare, spare - 1)
    assert len(w.workers) == 4


def test_the_task_that_has_taken_one_is_let_alone_for_a_moment():
    w = World(cpus=4, config=SchedulerConfig(spare_workers=2, refill_after=0.002))
    w.submit("a", max_calls=1)
    assert len(w.workers) == 1
    w.submit("b", max_calls=1)
    assert len(w.workers) == 2
    w.advance(0.001)
    assert len(w.workers) == 2
    w.advance(0.001)
    assert len(w.workers) == 4
    w.submit("c", max_calls=1)
    w.close()
    w.advance(1)
    assert not [e for e in w.effects if isinstance(e, Spawn)]


def test_a_starting_spare_goes_to_who_needs_a_worker():
    w = world(starts=False)
    w.submit("a", max_calls=1)
    assert kinds(w) == [Spawn] * 3
    w.submit("b", max_calls=1)
    assert kinds(w) == [Spawn]
    assert w.worker_of("b") == 2, "the one that was forked first"


def test_what_cannot_start_is_not_asked_for_again_and_again():
    w = world(starts=False)
    w.submit("a", max_calls=1)
    w.die(2)
    w.die(3)
    assert len(w.workers) == 1
    w.start("a")
    w.submit("b", max_calls=1)
    assert len(w.workers) == 4


def test_other_variables_have_workers_of_their_own():
    w = world()
    w.submit("a", max_calls=1)
    w.submit("b", max_calls=1, environment={"X": "1"})
    spawn = w.effects[0]
    assert isinstance(spawn, Spawn)
    assert spawn.environment == (("X", "1"),)
    w.cancel("b")
    w.submit("c", max_calls=1)
    assert w.workers[w.worker_of("c")].environment == ()


def test_an_unclaimed_worker_serves_its_own_variables_only():
    w = world(spares=0, starts=False)
    w.submit("a", environment={"X": "1"})
    w.cancel("a")
    w.submit("b")
    assert kinds(w) == [Spawn]
    w.submit("c", environment={"X": "1"})
    assert kinds(w) == []


def test_spares_do_not_count_among_the_idle():
    config = SchedulerConfig(spare_workers=2, idle_workers=1)
    w = World(cpus=4, config=config)
    w.submit("a", max_calls=1)
    for name in "bc":
        w.submit(name)
    for name in "bc":
        w.finish(name)
    assert w.scheduler.workers.spares(()) == 2
    assert w.scheduler.workers.idle == 3
    assert len(w.retired) == 1


def test_clean_workers_beyond_what_is_wanted_go_first():
    w = World(cpus=4, config=SchedulerConfig(idle_workers=1))
    w.submit("warm")
    w.submit("cold")
    w.finish("warm")
    w.starts = False
    w.submit("late")
    w.submit("later")
    for name in ("late", "later"):
        w.cancel(name)
    assert w.workers[w.worker_of("cold")].binding is not None
    w.run_dry()
    assert w.scheduler.workers.spares(()) == 0


def test_outdated_ones_are_replaced():
    w = world()
    w.submit("a", max_calls=1)
    before = set(w.workers) - {w.worker_of("a")}
    w.tell(Scheduler.environment_outdated, ())
    assert set(w.retired) == before
    assert [type(e) for e in w.effects if not isinstance(e, Retire)] == [Spawn] * 2
    assert len(w.workers) == 3


def test_an_outdated_one_that_starts_is_retired_and_given_to_nobody():
    w = world()
    w.submit("a", max_calls=1)
    first = set(w.workers)
    w.starts = False
    w.submit("b", max_calls=1)
    [late] = set(w.workers) - first
    w.tell(Scheduler.environment_outdated, ())
    w.starts = True
    w.submit("c", max_calls=1)
    assert w.worker_of("c") != late
    w.start(late)
    assert late in w.retired
    w.run_dry()
    assert w.scheduler.workers.get(late) is None


def test_outdated_ones_are_not_replaced_where_the_node_closes():
    w = world(exits=False)
    w.submit("a", max_calls=1)
    w.close()
    w.tell(Scheduler.environment_outdated, ())
    assert len(w.workers) == 3


def test_the_spares_say_what_they_are():
    w = world()
    assert repr(w.scheduler.spares) == "<Spares 2 for nobody>"
    w.submit("a", max_calls=1)
    assert repr(w.scheduler.spares) == "<Spares 2 for 1 environments>"


X = (("X", "1"),)


def spares_of(w: World, environment=X) -> int:
    return w.scheduler.workers.spares(environment)


def test_tasks_with_variables_of_their_own_have_spares_too():
    w = world()
    w.submit("a", max_calls=1, environment=dict(X))
    assert spares_of(w) == 2
    assert spares_of(w, ()) == 0
    spares = set(w.workers) - {w.worker_of("a")}
    w.submit("b", max_calls=1, environment=dict(X))
    assert kinds(w)[:2] == [Assign, Spawn]
    assert w.worker_of("b") in spares
    w.submit("c", max_calls=1)
    assert (spares_of(w), spares_of(w, ())) == (2, 2)
    w.finish("a")
    assert (spares_of(w), spares_of(w, ())) == (2, 2), "they are no idle ones too many"


def test_spares_that_nobody_uses_any_more_go():
    config = SchedulerConfig(spare_workers=2, spares_for=10.0)
    w = World(cpus=4, config=config)
    w.submit("a", max_calls=1, environment=dict(X))
    w.submit("own", max_calls=1)
    w.advance(6)
    w.submit("b", max_calls=1, environment=dict(X))
    w.advance(6)
    assert spares_of(w) == 2, "one was used six seconds ago"
    w.submit("y", max_calls=1, environment={"Y": "1"})
    w.advance(5)
    assert spares_of(w) == 0
    assert spares_of(w, (("Y", "1"),)) == 2
    assert len(w.retired) == 2
    w.advance(100)
    assert spares_of(w, (("Y", "1"),)) == 0
    assert spares_of(w, ()) == 2, "those of the node's own program stay"
    assert w.scheduler.deadline() is None
    assert w.scheduler.most_idle == config.idle_workers + 2


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
    w = world()
    w.submit("a", max_calls=1, environment=dict(X))
    w.tell(Scheduler.environment_outdated, X)
    assert spares_of(w) == 0
    assert not [e for e in w.effects if isinstance(e, Spawn)]
    w.submit("b", max_calls=1, environment=dict(X))
    assert spares_of(w) == 2


def test_a_spare_that_fails_concerns_its_own_environment():
    w = world(starts=False)
    w.submit("a", max_calls=1, environment=dict(X))
    for worker in set(w.workers) - {w.worker_of("a")}:
        w.die(worker)
    w.submit("b", max_calls=1)
    assert (spares_of(w), spares_of(w, ())) == (0, 2)
    w.tell(Scheduler.worker_gone, w.worker_of("b"), outage="no zygote")
    w.start("a")
    w.submit("c", max_calls=1, environment=dict(X))
    assert spares_of(w) == 2


def test_no_spares_are_wanted_where_none_are_to_be():
    w = world(spares=0)
    w.submit("a", max_calls=1, environment=dict(X))
    assert len(w.workers) == 1
    assert w.scheduler.spares.wanted == {}


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


def test_spares_of_a_node_that_closes_are_left_to_it():
    w = World(
        cpus=1, exits=False, config=SchedulerConfig(spare_workers=1, spares_for=1.0)
    )
    w.submit("a", max_calls=1, environment=dict(X))
    w.close()
    w.advance(2)
    assert w.scheduler.spares.wanted
