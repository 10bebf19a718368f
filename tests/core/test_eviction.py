"""Idle actors leave for tasks that wait: which, when, and what becomes of them."""

import pytest

from aiogpu.core import effects
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.records import TaskState
from aiogpu.core.scheduler.scheduler import Scheduler
from tests.core.builders import World

ACTOR = {"max_calls": 1, "is_endless": True, "is_evictable": True, "num_cpus": 0}


def models(*shares: float, gpus: int = 1, max_retries: int = 0) -> World:
    """Return a world with idle actors m0, m1, ... that hold shares of its GPUs."""
    w = World(cpus=8, gpus=gpus)
    for number, share in enumerate(shares):
        name = f"m{number}"
        w.submit(name, num_gpus=share, max_retries=max_retries, **ACTOR)
        w.rest(name)
    return w


def test_the_actor_that_rests_longest_leaves():
    w = models(0.5, 0.5)
    w.play("submit task gpus=0.5; advance 0.1")
    assert w.running == {"m1", "task"}
    assert w.evicted == {"m0"}
    assert w.free_gpus == [0.0]
    w.play("finish task; bring_back m0")
    assert w.running == {"m0", "m1"}


def test_a_call_renews_the_rest():
    w = models(0.5, 0.5)
    w.play("stir m0; rest m0; submit task gpus=0.5; advance 0.1")
    assert w.evicted == {"m1"}


def test_an_actor_with_a_call_stays():
    w = models(0.5, 0.5)
    w.play("stir m0; stir m1; submit task gpus=0.5; advance 9")
    assert not w.evicted
    assert w.waiting == {"task"}
    w.play("rest m1; advance 0.1")
    assert w.evicted == {"m1"}


def test_no_more_actors_leave_than_a_task_needs():
    w = models(0.25, 0.5, 0.25)
    w.play("submit task gpus=0.5; advance 0.1")
    assert w.evicted == {"m1"}, "m0 alone does not help, and m1 alone does"


@pytest.mark.parametrize("gpus", ["2", "1"])
def test_no_actor_leaves_in_vain(gpus):
    w = models(0.5, 1, gpus=2)
    w.play("submit guest gpus=0.5; stir m1")
    w.play(f"submit task gpus={gpus}; advance 9")
    assert not w.evicted, "neither task would fit without m0 alone"


def test_each_waiting_task_gets_its_room():
    w = models(0.5, 0.5)
    w.play("submit task gpus=0.5; submit other gpus=0.5 priority=1; advance 0.1")
    assert w.evicted == {"m0", "m1"}
    assert w.running == {"task", "other"}


def test_no_actor_leaves_for_a_task_that_has_room_soon():
    """The lease of an actor that leaves already counts as free."""
    w = models(0.5, 0.5)
    w.exits = False
    w.play("submit task gpus=0.5; advance 0.1")
    told = w.effects
    w.play("submit late gpus=0.25 priority=-1; advance 5")
    assert not [effect for effect in told if isinstance(effect, effects.Evicted)]
    assert sorted(w.scheduler.evicting) == [w.tasks["m0"].id, w.tasks["m1"].id]
    w = models(0.5, 0.5)
    w.exits = False
    w.play("submit task gpus=0.25; submit late gpus=0.25 priority=-1; advance 5")
    assert [*w.scheduler.evicting] == [w.tasks["m0"].id]


def test_an_actor_stays_as_long_as_it_may():
    w = World(gpus=1)
    w.submit("m0", num_gpus=1, **ACTOR)
    w.rest("m0", stay=5.0)
    w.play("submit task gpus=1; advance 4.9")
    assert not w.evicted
    w.advance(0.2)
    assert w.evicted == {"m0"}


def test_an_actor_with_children_stays():
    w = models(1)
    w.play("submit child cpus=0 parent=m0; submit task gpus=1; advance 9")
    assert not w.evicted
    w.play("finish child; advance 0.1; rest m0; advance 0.1")
    assert w.evicted == {"m0"}


def test_an_actor_that_dies_while_it_leaves_uses_no_restart():
    w = models(1, max_retries=1)
    w.exits = False
    w.play("submit task gpus=1; advance 0.1; die m0")
    assert w.evicted == {"m0"}
    w.exits = True
    w.play("finish task; bring_back m0; die m0")
    assert w.running == {"m0"}, "the restart is left"


def test_an_actor_that_dies_at_rest_restarts_where_it_was():
    w = models(1, max_retries=-1)
    w.play("stir m0; die m0; submit task gpus=1; advance 0.1")
    assert w.running == {"m0"}
    assert not w.scheduler.resting


def test_a_call_after_the_decision_undoes_it():
    w = models(1)
    w.exits = False
    w.play("submit task gpus=1; advance 0.1; stir m0")
    assert not w.scheduler.evicting
    w.exits = True
    w.play("finish m0")
    assert w.told["m0"] == "settled", "it has ended by itself"
    assert w.running == {"task"}


@pytest.mark.parametrize("end", ["cancel m0", "close"])
def test_an_evicted_actor_can_end(end):
    w = models(1)
    w.play(f"submit task gpus=1; advance 0.1; {end}; run_dry")
    assert not w.evicted
    assert not w.scheduler.tasks
    assert "m0" in w.forgotten


def test_an_evicted_actor_keeps_its_place():
    w = models(1)
    w.play("submit task gpus=1; advance 0.1; submit later gpus=1; bring_back m0")
    w.play("finish task")
    assert w.running == {"m0"}
    assert w.waiting == {"later"}


def test_what_an_actor_holds_that_may_leave_is_not_held_without_end():
    w = World(gpus=1, config=SchedulerConfig(warn_after=1.0))
    w.submit("m0", num_gpus=1, **ACTOR)
    w.play("submit task gpus=1; advance 9")
    assert not w.warnings
    assert w.scheduler.tasks[w.tasks["m0"].id].state is TaskState.RUNNING


def test_late_events_change_nothing():
    w = models(1)
    for step in (Scheduler.rest, Scheduler.stir, Scheduler.bring_back):
        args = (w.tasks["m0"].id + 1, *((0.0,) if step is Scheduler.rest else ()))
        assert not step(w.scheduler, w.now, *args)
    w.bring_back("m0")
    assert w.running == {"m0"}


def test_several_actors_leave_for_one_task():
    w = models(0.5, 0.5)
    w.play("submit task gpus=1; advance 0.1")
    assert w.evicted == {"m0", "m1"}
    assert w.running == {"task"}


def test_a_call_before_the_plan_leaves_nothing_to_do():
    w = models(1)
    w.play("submit task gpus=1; stir m0; advance 1.0")
    assert w.running == {"m0"}


def test_no_actor_leaves_for_a_task_that_its_program_may_not_start():
    w = models(0.5, 0.5)
    w.join(1, limits=Limits(max_share={"GPU": 0.25}))
    w.play("submit first gpus=0.25 client=1; advance 0.1")
    assert w.evicted == {"m0"}
    w.play("submit second gpus=0.25 client=1; advance 1.0")
    w.play("submit third gpus=0.5; advance 0.1")
    assert w.waiting == {"second"}


def test_other_tasks_end_while_an_actor_leaves():
    w = models(1)
    w.exits = False
    w.play("submit other; submit task gpus=1; advance 0.1; finish other retry=True")
    assert [*w.scheduler.evicting] == [w.tasks["m0"].id]
    assert "other" in w.running


def test_an_actor_that_does_not_leave_is_killed():
    w = models(1)
    w.exits = False
    w.play("submit task gpus=1; advance 59")
    assert not w.killed
    w.advance(2)
    assert w.killed == [w.worker_of("m0")]
    w.play("die m0")
    assert w.evicted == {"m0"}
    assert w.running == {"task"}


def test_an_actor_that_stays_after_all_is_not_killed():
    w = models(1)
    w.exits = False
    w.play("submit task gpus=1; advance 0.1; stir m0; advance 90")
    assert w.running == {"m0"}
    assert not w.killed
