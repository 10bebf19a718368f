"""Events about what is not there, or not any more."""

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.testing import World


def test_events_about_what_is_not_there_change_nothing():
    scheduler: Scheduler = World().scheduler
    for step, *args in (
        (Scheduler.cancel, TaskId(9)),
        (Scheduler.finish, TaskId(9), WorkerId(9)),
        (Scheduler.worker_started, WorkerId(9)),
        (Scheduler.worker_gone, WorkerId(9)),
        (Scheduler.wait_for, TaskId(9), ()),
        (Scheduler.wait_for, TaskId(9), (TaskId(8),)),
        (Scheduler.task_skipped, TaskId(9), WorkerId(9)),
        (Scheduler.revoked, WorkerId(9), 1, TaskId(9)),
        (Scheduler.wake,),
    ):
        assert not step(scheduler, 0.0, *args)
        scheduler.check()


def test_events_about_a_worker_that_has_another_task_change_nothing():
    w = World()
    w.submit("a")
    w.submit("b")
    a, b = (w.tasks[name].id for name in "ab")
    worker = w.worker_of("b")
    for step, *args in (
        (Scheduler.finish, a, worker),
        (Scheduler.task_skipped, a, worker),
        (Scheduler.revoked, worker, 1, b),
        (Scheduler.worker_started, worker),
    ):
        assert not step(w.scheduler, 0.0, *args)
        w.check()
    assert w.running == {"a", "b"}
