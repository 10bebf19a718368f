"""Workers that come no further: what they were sent is taken back, by exact rules."""

import pytest

from aiogpu.core import effects
from aiogpu.core.effects import Interrupt, Revoke
from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.model.units import CPU, UNIT
from aiogpu.core.records import Memory
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from tests.core.builders import World, kinds, submit

SHORT = 1e-5


LONG = 1 / 64


PATIENCE = SchedulerConfig(
    long=LONG, unheard=1.0, cancel_grace=2.0, interrupt_every=0.5
)


def queue_behind(count: int = 10, **options) -> World:
    """One worker runs t1, with t2, t3, ... queued behind it."""
    w = World(cpus=1, took=SHORT, config=PATIENCE, **options)
    submit(w, [f"t{n}" for n in range(count)], max_retries=0)
    w.play("finish t0; running = t1; queued has t2")
    return w


def settled_once(w: World, *numbers: int) -> bool:
    """Whether each of these has run once, and its owner has its result."""
    tasks = [w.tasks[f"t{number}"] for number in numbers]
    return {(task.news, task.runs) for task in tasks} == {("settled", 1)}


def test_what_stands_behind_a_long_task_is_taken_back():
    w = queue_behind().play(f"advance {LONG / 2}")
    assert w.queued
    w.play(f"advance {LONG / 2}; queued =")
    assert (w.running, w.waiting) == ({"t1"}, {f"t{number}" for number in range(2, 10)})
    w.play("finish t1; running = t2")


def test_a_worker_without_a_queue_is_looked_at_no_more():
    w = queue_behind(4)
    for number in range(1, 4):
        w.finish(f"t{number}")
    w.advance(60)
    assert w.effects == []
    assert w.deadline is None
    w.play("submit long; advance 3600; running = long; killed =; deadline = None")


def test_a_task_that_is_killed_takes_nobody_along():
    """The kill waits until what is queued has been taken back."""
    w = queue_behind(revokes=False).play("""
        cancel t1; advance 2.5; killed =
        revoked 1; advance 0.1; killed = 1; running = t2; run_dry
    """)
    assert settled_once(w, *range(2, 10))


def test_what_stands_behind_one_that_waits_is_taken_back():
    """[B12]"""
    queue_behind().play("""
        submit child parent=t1; wait_for t1 child; queued =; blocked = t1
        running = child t1
    """)


def test_a_cancelled_task_in_the_queue_of_a_dead_worker_is_forgotten():
    queue_behind(revokes=False).play("cancel t3; die 1; forgotten has t3; running = t2")


def test_queued_tasks_that_are_cancelled_never_begin():
    """Both by one revocation."""
    w = queue_behind(revokes=False).play("cancel t3")
    assert kinds(w) == [Revoke]
    w.cancel("t2")
    assert w.effects == []
    w.play("forgotten =; revoked 1; forgotten = t2 t3; running = t1; run_dry")
    assert w.tasks["t2"].runs == w.tasks["t3"].runs == 0
    assert settled_once(w, 1, *range(4, 10))


def test_a_queued_task_is_cancelled_as_it_begins():
    w = queue_behind(revokes=False).play("finish t1; running = t2; cancel t3")
    w.workers[1].void.popleft()
    w.workers[1].sent.append(w.tasks["t3"])
    w.play("finish t2; running = t3")
    assert Interrupt not in kinds(w)
    w.revoked(1)
    assert kinds(w)[0] is Interrupt
    w.play("finish t3; forgotten has t3; told lacks t3; run_dry")
    assert settled_once(w, *range(4, 10))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_turn_that_comes_as_it_is_taken_back_is_skipped(is_late):
    """The worker says so before it is known what was taken back, or after."""
    w = queue_behind(revokes=False).play(f"advance {LONG}")
    assert kinds(w) == [Revoke]
    w.skip("t1", is_late=is_late)
    w.run_dry()
    assert settled_once(w, *range(10))


def test_skipped_tasks_that_were_cancelled_are_forgotten():
    w = queue_behind(revokes=False).play("""
        cancel t2 t3; skip t1; forgotten = t2
        revoked 1; forgotten = t2 t3; running = t4; run_dry
    """)
    assert w.tasks["t2"].runs == w.tasks["t3"].runs == 0


def test_a_skipped_task_is_known_wherever_it_stands():
    w = queue_behind()
    t3 = w.tasks["t3"].id
    w.scheduler.task_skipped(w.now, t3, w.worker_of("t1"))
    w.scheduler.check()
    w.play("waiting has t3; queued has t2")


def test_a_stopped_worker_is_given_up_and_its_task_runs_elsewhere_once():
    """As under SIGSTOP: it was sent a task and does not begin it."""
    w = World(cpus=1, config=PATIENCE).play("""
        submit a; finish a; stop 1; submit b max_retries=0; running =
        advance 0.75; killed =; advance 1.25; killed = 1; running = b
        finish b; told = a:settled b:settled
    """)
    assert w.tasks["b"].runs == 1


WORKER = WorkerId(1)


def a_short_spec():
    spec = TaskSpec("f", Shape(Request.of({CPU: UNIT}, {}, None)), max_retries=0)
    spec.pace.note(1e-5)
    return spec


def one_runs_and_one_is_ahead():
    """A scheduler with one worker that runs task 2, with task 3 behind it."""
    scheduler, spec = Scheduler(Ledger({CPU: UNIT})), a_short_spec()
    for number in range(1, 5):
        scheduler.submit(0.0, TaskId(number), spec)
    scheduler.worker_started(0.0, WORKER)
    scheduler.finish(0.0, TaskId(1), WORKER, took=1e-5)
    scheduler.cancel(0.0, TaskId(4))
    worker = scheduler.workers.get(WORKER)
    assert [record.id for record in (worker.task, *worker.queue)] == [2, 3]
    return scheduler


def kinds_of(wanted):
    return [type(effect) for effect in wanted]


def test_a_cancelled_task_that_has_begun_before_the_last_ones_answer_is_interrupted():
    scheduler = one_runs_and_one_is_ahead()
    scheduler.wake(0.02)
    scheduler.cancel(0.02, TaskId(3))
    scheduler.revoked(0.021, WORKER, 1, TaskId(3))
    late = scheduler.finish(0.0211, TaskId(2), WORKER, took=0.02)
    assert kinds_of(late) == [effects.Settle, effects.Interrupt]


def test_who_was_killed_over_memory_gets_nothing_more():
    """Its last answers were under way when it was; then it only ends."""
    scheduler = one_runs_and_one_is_ahead()
    for number in (5, 6):
        scheduler.submit(0.0, TaskId(number), a_short_spec())
    killed = scheduler.kill_for_memory(0.0, WORKER, Memory.HOST)
    assert effects.Kill in kinds_of(killed)
    told = [
        *scheduler.finish(0.0, TaskId(2), WORKER, took=1e-5),
        *scheduler.finish(0.0, TaskId(3), WORKER, took=1e-5),
    ]
    assert not {effects.Ahead, effects.Assign} & {*kinds_of(told)}
    told = scheduler.worker_gone(0.0, WORKER, None)
    (spawned,) = [one.worker for one in told if type(one) is effects.Spawn]
    (assigned,) = scheduler.worker_started(0.0, spawned)
    assert (type(assigned), assigned.task) == (effects.Assign, 5)
