"""The union of events is closed, and each is light and plain."""

from dataclasses import is_dataclass
from typing import get_args

from aiogpu.core import events
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.testing import World


def test_every_class_of_the_file_is_in_the_union():
    own = {
        value
        for value in vars(events).values()
        if is_dataclass(value) and value.__module__ == events.__name__
    }
    assert set(get_args(events.Event)) == own
    assert all("__slots__" in vars(event) for event in own)


def test_events_are_compared_by_value():
    finished = events.TaskFinished(TaskId(1), WorkerId(2))
    assert finished == events.TaskFinished(TaskId(1), WorkerId(2), retry=False)
    assert finished != events.TaskFinished(TaskId(1), WorkerId(3))


def test_events_about_what_is_not_there_change_nothing():
    scheduler: Scheduler = World().scheduler
    for event in (
        events.Cancelled(TaskId(9)),
        events.TaskFinished(TaskId(9), WorkerId(9)),
        events.WorkerStarted(WorkerId(9)),
        events.WorkerGone(WorkerId(9)),
        events.TaskWaits(TaskId(9), ()),
        events.TaskWaits(TaskId(9), (TaskId(8),)),
        events.TaskSkipped(TaskId(9), WorkerId(9)),
        events.Revoked(WorkerId(9), 1, TaskId(9)),
        events.TimePassed(),
    ):
        assert not scheduler.handle(event, 0.0)
        scheduler.check()


def test_events_about_a_worker_that_has_another_task_change_nothing():
    w = World()
    w.submit("a")
    w.submit("b")
    a, b = (w.tasks[name].id for name in "ab")
    worker = w.worker_of("b")
    for event in (
        events.TaskFinished(a, worker),
        events.TaskSkipped(a, worker),
        events.Revoked(worker, 1, b),
        events.WorkerStarted(worker),
    ):
        assert not w.scheduler.handle(event, 0.0)
        w.check()
    assert w.running == {"a", "b"}
