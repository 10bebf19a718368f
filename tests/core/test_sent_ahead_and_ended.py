"""Corners of what is sent ahead: ends there, late news, overdrafts, kept shares."""

from aiogpu.core import effects
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.model.units import CPU, UNIT
from aiogpu.core.records import Memory
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.testing import World

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


def kinds(wanted):
    return [type(effect) for effect in wanted]


def a_parent_with_children_ahead():
    w = World(cpus=2, took=1e-5)
    w.submit("warm", function=1)
    w.finish("warm")
    w.submit("p", function=2)
    children = [f"c{number}" for number in range(12)]
    for child in children:
        w.submit(child, parent="p", function=1)
    w.wait_for("p", *children)
    w.finish("c0")
    w.finish("c1")
    return w, [record.spec.name for w_ in w.scheduler.workers for record in w_.queue]


def test_a_child_cancelled_where_it_was_sent_ahead_leaves_its_parent():
    w, ahead = a_parent_with_children_ahead()
    w.cancel(ahead[-1])
    while children := w.running - {"p"}:
        w.finish(min(children))
    assert w.running == {"p"}  # all that it waited for has ended
    w.finish("p")
    assert w.tasks["p"].news == "settled"


def test_a_child_whose_worker_dies_while_it_is_cancelled_there_leaves_its_parent():
    w, ahead = a_parent_with_children_ahead()
    w.revokes = False
    w.cancel(ahead[-1])
    w.die(w.scheduler.tasks[w.tasks[ahead[-1]].id].worker.id)
    w.revokes = True
    while children := w.running - {"p"}:
        w.finish(min(children))
    w.finish("p")
    assert w.tasks["p"].news == "settled"


def test_an_old_revocation_does_not_touch_what_was_sent_after_it():
    scheduler = one_runs_and_one_is_ahead()
    assert kinds(scheduler.wake(0.02)) == [effects.Revoke]
    scheduler.finish(0.0201, TaskId(2), WORKER, took=0.02)
    skipped = scheduler.task_skipped(0.0202, TaskId(3), WORKER)
    assert kinds(skipped) == [effects.Assign]  # again, under a number of its own
    assert not scheduler.revoked(0.021, WORKER, 1, None)


def test_a_cancelled_task_that_has_begun_before_the_last_ones_answer_is_interrupted():
    scheduler = one_runs_and_one_is_ahead()
    scheduler.wake(0.02)
    scheduler.cancel(0.02, TaskId(3))
    scheduler.revoked(0.021, WORKER, 1, TaskId(3))
    late = scheduler.finish(0.0211, TaskId(2), WORKER, took=0.02)
    assert kinds(late) == [effects.Settle, effects.Interrupt]


def test_who_waited_and_goes_on_makes_one_task_too_many_for_a_moment_only():
    w = World(cpus=1)
    w.submit("p")
    w.submit("c", parent="p")
    for number in range(4):
        w.submit(f"f{number}")
    w.wait_for("p", "c")
    w.finish("c")
    w.finish("p")
    assert len(w.running) == 1


def test_a_long_queue_of_one_shape_is_sent_ahead_after_a_second_too():
    w = World(cpus=2, took=1e-5)
    for number in range(300):
        w.submit(f"t{number:03}")
    w.finish("t000")
    w.advance(5)
    for _ in range(10):
        w.finish(min(w.running))
    assert sum(len(worker.queue) for worker in w.scheduler.workers) > 20


def test_who_was_killed_over_memory_gets_nothing_more():
    """Its last answers were under way when it was; then it only ends."""
    scheduler = one_runs_and_one_is_ahead()
    for number in (5, 6):
        scheduler.submit(0.0, TaskId(number), a_short_spec())
    killed = scheduler.kill_for_memory(0.0, WORKER, Memory.HOST)
    assert effects.Kill in kinds(killed)
    told = [
        *scheduler.finish(0.0, TaskId(2), WORKER, took=1e-5),
        *scheduler.finish(0.0, TaskId(3), WORKER, took=1e-5),
    ]
    assert not {effects.Ahead, effects.Assign} & {*kinds(told)}
    told = scheduler.worker_gone(0.0, WORKER, None)
    (spawned,) = [one.worker for one in told if type(one) is effects.Spawn]
    (assigned,) = scheduler.worker_started(0.0, spawned)
    assert (type(assigned), assigned.task) == (effects.Assign, 5)


def test_nor_where_it_has_begun_nothing_of_what_it_was_sent():
    scheduler = one_runs_and_one_is_ahead()
    scheduler.kill_for_memory(0.0, WORKER, Memory.HOST)
    (revoke,) = scheduler.cancel(0.0, TaskId(3))
    told = scheduler.revoked(0.0, WORKER, revoke.number, None)
    assert not {effects.Ahead, effects.Assign} & {*kinds(told)}
    assert not scheduler.workers.idle
    told = scheduler.worker_gone(0.0, WORKER, None)
    (spawned,) = [one.worker for one in told if type(one) is effects.Spawn]
    (assigned,) = scheduler.worker_started(0.0, spawned)
    assert assigned.task == 2
