"""Stories of one node: what it does with a task in each state."""

import pytest

from aiogpu.core.effects import (
    Assign,
    Effect,
    Fail,
    Failure,
    Forget,
    Interrupt,
    Settle,
    Spawn,
)
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import TaskId
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.core.queue.timers import AT_ONCE
from aiogpu.core.scheduler.scheduler import ABANDON_EVERY, ABANDONED
from aiogpu.errors import InfeasibleError
from aiogpu.testing import World

PATIENCE = SchedulerConfig(cancel_grace=2.0, interrupt_every=0.5, exit_grace=5.0)
SPEC = TaskSpec("f", Shape(Request.of({"CPU": UNIT}, {})))


def fails(effect: Effect, failure: Failure) -> bool:
    return isinstance(effect, Fail) and effect.failure is failure


def test_a_task_from_its_submission_to_its_answer():
    w = World(cpus=2, gpus=1, starts=False)
    w.submit("a", num_gpus=0.5)
    assert [type(effect) for effect in w.effects] == [Spawn]
    assert w.starting == {"a"}
    assert w.free_gpus == [0.5]
    w.start("a")
    [assign] = w.effects
    assert isinstance(assign, Assign)
    assert (assign.is_first, assign.is_last) == (True, False)
    assert w.running == {"a"}
    w.finish("a")
    assert w.effects == [Settle(w.tasks["a"].id)]
    assert w.told == {"a": "settled"}
    assert w.free == {"CPU": 2.0, "GPU": 1.0}


def test_what_can_never_run_is_refused():
    w = World(cpus=2)
    for _ in range(2):
        with pytest.raises(
            InfeasibleError, match="'a' can never run: it lacks CPU 3 of 2"
        ):
            w.submit("a", num_cpus=3)
    w.submit("b", num_cpus=2)
    w.submit("c", num_cpus=2)
    assert w.waiting == {"c"}


def test_a_waiting_task_is_cancelled_at_once():
    w = World(cpus=1)
    w.submit("a")
    w.submit("b")
    w.cancel("b")
    assert w.effects == [Forget(w.tasks["b"].id)]
    w.finish("a")
    assert w.running == set()


def test_a_cancelled_task_makes_room_for_those_behind_it():
    w = World(cpus=2)
    w.submit("a")
    w.submit("b", num_cpus=2)
    w.cancel("b")
    w.submit("c")
    assert w.running == {"a", "c"}


def test_a_starting_task_is_cancelled_at_once():
    w = World(cpus=1, starts=False)
    w.submit("a")
    w.submit("b")
    w.cancel("a")
    assert w.effects == [Forget(w.tasks["a"].id)]
    assert w.starting == {"b"}
    w.start("b")
    assert w.running == {"b"}


def test_a_running_task_that_heeds_the_interrupt_keeps_its_worker():
    w = World(cpus=1, config=PATIENCE)
    w.submit("a")
    worker = w.worker_of("a")
    w.cancel("a")
    assert w.effects == [Interrupt(w.tasks["a"].id, worker, 0)]
    assert w.free["CPU"] == 0.0
    w.finish("a")
    assert w.effects == [Forget(w.tasks["a"].id)]
    assert not w.told
    w.advance(10)
    w.submit("b")
    assert w.worker_of("b") == worker


def test_a_running_task_is_interrupted_again_and_then_killed():
    w = World(cpus=1, config=PATIENCE)
    w.submit("a")
    w.cancel("a")
    attempts = []
    for _ in range(3):
        w.advance(0.5)
        attempts += [e.attempt for e in w.effects if isinstance(e, Interrupt)]
    assert attempts == [1, 2, 3]
    assert w.killed == []
    w.advance(0.5)
    assert w.killed == [1]
    assert w.forgotten == {"a"}
    assert w.free["CPU"] == 1.0


def test_the_kill_comes_when_the_grace_ends_not_at_the_next_interrupt():
    w = World(config=SchedulerConfig(cancel_grace=0.7, interrupt_every=0.5))
    w.submit("a")
    w.cancel("a")
    w.advance(0.69)
    assert w.tasks["a"].interrupts == 2
    assert w.killed == []
    w.advance(0.01)
    assert w.killed == [1]


@pytest.mark.parametrize("grace", [0.0, 0.3, 5.0])
def test_a_task_may_have_a_grace_of_its_own(grace):
    w = World(cpus=2, config=PATIENCE)
    w.submit("own", cancel_grace=grace)
    w.submit("expiring", timeout=1.0, cancel_grace=grace)
    w.submit("other")
    w.cancel("own")
    w.advance(grace / 2)
    assert w.killed == ([] if grace else [1])
    w.advance(grace / 2)
    assert w.killed == [1]
    w.advance(max(0.0, 1.0 - grace) + grace)
    assert w.killed[:2] == [1, 2]
    assert "other" in w.running


def test_cancelling_again_changes_nothing():
    w = World(config=PATIENCE)
    w.submit("a")
    w.cancel("a")
    w.cancel("a")
    assert w.effects == []
    w.finish("a")
    w.cancel("a")
    assert w.effects == []
    assert w.forgotten == {"a"}


def test_cancelling_what_has_ended_changes_nothing():
    w = World()
    w.submit("a")
    w.finish("a")
    w.cancel("a")
    assert w.effects == []
    assert w.told == {"a": "settled"}


def test_a_worker_under_sentence_gets_no_work_though_it_answers():
    w = World(cpus=1, exits=False, config=PATIENCE)
    w.submit("a")
    w.submit("b", max_retries=0)
    w.cancel("a")
    w.advance(2.0)
    assert w.killed == [1]
    w.finish("a")
    assert w.forgotten == {"a"}
    assert w.waiting == {"b"}
    w.die(1)
    w.finish("b")
    assert w.told == {"b": "settled"}


def test_a_timeout_ends_a_task_that_waits():
    w = World(cpus=1)
    w.submit("a")
    w.submit("b", timeout=1.0)
    w.advance(0.9)
    assert not w.told
    w.advance(0.1)
    assert w.told == {"b": "expired"}
    assert w.forgotten == {"b"}
    assert w.running == {"a"}


def test_a_timeout_ends_a_task_that_starts():
    w = World(cpus=1, starts=False)
    w.submit("a", timeout=1.0)
    w.advance(1.0)
    assert w.told == {"a": "expired"}
    assert w.forgotten == {"a"}
    assert w.free["CPU"] == 1.0


def test_a_timeout_stops_a_task_that_runs():
    w = World(cpus=1, config=PATIENCE)
    w.submit("a", timeout=1.0)
    w.submit("b")
    w.advance(1.0)
    assert w.told == {"a": "expired"}
    assert w.tasks["a"].interrupts == 1
    assert w.waiting == {"b"}
    w.finish("a")
    assert w.forgotten == {"a"}
    assert w.running == {"b"}


def test_a_timeout_comes_too_late_for_a_cancelled_task():
    w = World(config=PATIENCE)
    w.submit("a", timeout=1.0)
    w.cancel("a")
    w.advance(1.5)
    assert not w.told
    w.advance(0.5)
    assert w.killed == [1]
    assert w.forgotten == {"a"}


def test_a_timeout_comes_too_late_for_an_answered_task():
    w = World()
    w.submit("a", timeout=1.0)
    w.finish("a")
    w.advance(2.0)
    assert w.told == {"a": "settled"}


def test_a_timeout_counts_from_submission_over_all_retries():
    w = World()
    w.submit("a", timeout=1.0)
    w.advance(0.9)
    w.die("a")
    assert w.running == {"a"}
    w.advance(0.1)
    assert w.told == {"a": "expired"}


def test_a_task_that_stops_may_take_its_worker_with_it():
    w = World(cpus=1, config=PATIENCE)
    w.submit("a", timeout=1.0)
    w.advance(1.0)
    w.die("a")
    assert w.told == {"a": "expired"}
    assert w.forgotten == {"a"}
    assert w.free["CPU"] == 1.0


def test_timeouts_of_tasks_that_ended_do_not_pile_up():
    w = World(cpus=1)
    most = 0
    for number in range(300):
        w.submit(f"t{number}", timeout=3600)
        w.finish(f"t{number}")
        most = max(most, len(w.scheduler.timers))
    assert most < 100


def test_of_thousands_whose_time_is_up_each_is_told_and_the_loop_has_time_between():
    w = World(cpus=1)
    spec = TaskSpec("f", SPEC.shape, timeout=1.0)
    for number in range(AT_ONCE + 10):
        w.scheduler.submit(w.now, TaskId(number), spec)
    first = w.scheduler.wake(1.0)
    assert (
        len([effect for effect in first if fails(effect, Failure.EXPIRED)]) == AT_ONCE
    )
    assert w.scheduler.deadline() == 1.0
    rest = w.scheduler.wake(1.0)
    assert len([effect for effect in rest if fails(effect, Failure.EXPIRED)]) == 10
    assert not w.scheduler.tasks


def test_closing_in_every_state():
    w = World(cpus=3, starts=False, exits=False, config=PATIENCE)
    for name in ("answered", "running", "stopping"):
        w.submit(name)
        w.start(name)
    w.cancel("stopping")
    w.finish("answered")
    idle = w.scheduler.workers.idle
    w.submit("starting", environment={"X": "1"})
    w.submit("waiting")
    assert (idle, w.starting, w.waiting) == (1, {"starting"}, {"waiting"})
    w.close()
    assert w.told == {
        "answered": "settled",
        "running": "abandoned",
        "starting": "abandoned",
        "waiting": "abandoned",
    }
    assert w.forgotten == {"starting", "waiting"}
    assert w.retired == [1]
    assert w.running == {"running", "stopping"}
    w.finish("running")
    assert w.retired == [1, 2]
    w.start(4)
    assert w.retired == [1, 2, 4]
    w.advance(2.0)
    assert w.killed == [4, 3], "one that starts need not come any more"
    for worker in (1, 2, 3):
        w.die(worker)
    assert not w.scheduler.is_closed
    w.die(4)
    assert w.scheduler.is_closed
    assert w.forgotten == {"running", "starting", "stopping", "waiting"}


def test_closing_tries_nothing_again():
    w = World(config=PATIENCE)
    w.submit("a", max_retries=-1)
    w.submit("b", max_retries=-1)
    w.close()
    w.finish("a", retry=True)
    w.die("b")
    assert w.told == {"a": "abandoned", "b": "abandoned"}
    assert w.scheduler.is_closed


def test_closing_twice_tells_nobody_twice():
    w = World()
    w.submit("a")
    w.close()
    w.close()
    assert w.effects == []


def test_what_comes_after_closing_is_abandoned():
    w = World()
    w.close()
    w.submit("a")
    a = w.tasks["a"].id
    assert w.effects == [Fail(a, Failure.ABANDONED), Forget(a)]
    assert w.scheduler.is_closed


def test_closing_tells_those_who_wait_in_slices():
    """The loop has time for other things in between."""
    w = World(cpus=1, config=PATIENCE)
    for number in range(2 * ABANDONED + 10):
        w.scheduler.submit(w.now, TaskId(number), SPEC)
    [worker] = w.scheduler.workers
    slices = [w.scheduler.close(w.now)]
    assert not w.scheduler.is_closed
    while (moment := w.scheduler.deadline()) == w.now + ABANDON_EVERY:
        w.clock.advance_to(moment)
        slices.append(w.scheduler.wake(moment))
        w.scheduler.check()
    told = [
        [effect.task for effect in effects if fails(effect, Failure.ABANDONED)]
        for effects in slices
    ]
    assert [len(tasks) for tasks in told] == [1 + ABANDONED, ABANDONED, 9]
    assert [task for tasks in told for task in tasks] == list(range(2 * ABANDONED + 10))
    assert not w.scheduler.tasks
    w.scheduler.worker_gone(w.now, worker.id)
    assert w.scheduler.is_closed


def test_closing_at_once_gives_nobody_time():
    w = World(cpus=3, config=PATIENCE)
    w.submit("answers")
    w.submit("deaf", cancel_grace=60)
    w.submit("idle")
    w.finish("idle")
    w.close()
    assert (w.running, w.killed) == ({"answers", "deaf"}, [])
    theirs = {w.worker_of("answers"), w.worker_of("deaf")}
    w.close(at_once=True)
    assert not w.running
    assert set(w.killed) == theirs
    assert w.scheduler.is_closed


def test_closing_at_once_without_closing_before():
    w = World(cpus=1, config=PATIENCE)
    w.submit("deaf", cancel_grace=60)
    w.submit("waits")
    w.close(at_once=True)
    assert w.scheduler.is_closed
    assert not w.scheduler.tasks


def test_closing_at_once_ends_those_who_idle_or_start():
    idle, starting = World(cpus=1), World(cpus=1)
    idle.submit("a")
    idle.finish("a")
    starting.starts = False
    starting.submit("a")
    for w in (idle, starting):
        [worker] = w.scheduler.workers
        w.close(at_once=True)
        assert w.killed == [worker.id]
        assert w.scheduler.is_closed


def test_what_comes_between_two_slices_is_abandoned_as_well():
    w = World(cpus=1)
    for number in range(ABANDONED + 10):
        w.scheduler.submit(w.now, TaskId(number), SPEC)
    w.scheduler.close(w.now)
    late = TaskId(ABANDONED + 10)
    effects = w.scheduler.submit(w.now, late, SPEC)
    assert effects == [Fail(late, Failure.ABANDONED), Forget(late)]


def test_an_answer_from_a_worker_that_has_lost_the_task_is_not_heard():
    w = World(cpus=1)
    w.submit("a")
    task, worker = w.tasks["a"].id, w.worker_of("a")
    w.die("a")
    assert not w.scheduler.finish(w.now, task, worker)
    assert w.running == {"a"}


def test_a_worker_starts_once():
    w = World()
    w.submit("a")
    assert not w.scheduler.worker_started(w.now, w.worker_of("a"))


def test_a_scheduler_shows_what_it_has():
    w = World(cpus=1)
    w.submit("a")
    w.submit("b")
    assert repr(w.scheduler) == (
        "<Scheduler 2 tasks, <Workers 1: 0 idle>, <Ledger CPU 0/1, GPU 0/0; 1 leases>>"
    )
    assert repr(w) == f"<World at 0s: {w.scheduler!r}>"
