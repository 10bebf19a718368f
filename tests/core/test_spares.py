"""Clean workers that stand ready: when they are wanted, how many, of what kind."""

from aiogpu.core import events
from aiogpu.core.effects import Assign, Retire, Spawn
from aiogpu.core.policy import Patience
from aiogpu.testing import World


def world(spares=2, **options):
    return World(cpus=4, gpus=2, patience=Patience(spare_workers=spares), **options)


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
    w = World(cpus=4, patience=Patience(spare_workers=2, refill_after=0.002))
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
    patience = Patience(spare_workers=2, idle_workers=1)
    w = World(cpus=4, patience=patience)
    w.submit("a", max_calls=1)
    for name in "bc":
        w.submit(name)
    for name in "bc":
        w.finish(name)
    assert w.scheduler.workers.spares(()) == 2
    assert w.scheduler.workers.idle == 3
    assert len(w.retired) == 1


def test_clean_workers_beyond_what_is_wanted_go_first():
    w = World(cpus=4, patience=Patience(idle_workers=1))
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
    w.tell(events.Outdated(()))
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
    w.tell(events.Outdated(()))
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
    w.tell(events.Outdated(()))
    assert len(w.workers) == 3


def test_the_spares_say_what_they_are():
    w = world()
    assert repr(w.scheduler.spares) == "<Spares 2 unwanted>"
    w.submit("a", max_calls=1)
    assert repr(w.scheduler.spares) == "<Spares 2 wanted>"
