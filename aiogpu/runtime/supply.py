"""Arguments of a task that are still to come: when they are there, and if they fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiogpu.core.model.ids import TaskId
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.runtime.line import is_complete, oversized
from aiogpu.serialization.payload import Payload

if TYPE_CHECKING:
    from aiogpu.runtime.driver import Driver
    from aiogpu.runtime.values import Value


class Supply:
    """What one task waits for before it may begin."""

    __slots__ = ("_driver", "_missing", "_payload", "_task", "_values")

    def __init__(self, driver: Driver, task: TaskId, payload: Payload) -> None:
        self._driver = driver
        self._task = task
        self._payload = payload
        self._values: dict[Value, None] = dict.fromkeys(payload.needs)
        self._missing = len(self._values)

    @classmethod
    def of(cls, driver: Driver, task: TaskId, payload: bytes) -> Supply | None:
        """What a task with this payload waits for; None for nothing."""
        if type(payload) is not Payload or is_complete(payload):
            return None
        return cls(driver, task, payload)

    @property
    def tasks(self) -> tuple[TaskId, ...]:
        """The tasks whose results it waits for."""
        return tuple(TaskId(v.task) for v in self._values if v.is_pending and v.task)

    def watch(self) -> None:
        """Tell the core when all is there, or the owner if something will not be."""
        for value in self._values:
            value.watch(self._note)

    def _note(self, value: Value) -> None:
        self._missing -= 1
        if value.has_failed:
            self._refuse(value)
        elif not self._missing:
            too_large = oversized(self._payload)
            if too_large is None:
                self._driver.feed(Scheduler.supply, self._task)
            else:
                self._refuse(too_large)

    def _refuse(self, value: Value) -> None:
        """Fail the task as the value has failed that it needs; it never runs."""
        call = self._driver.call_of(self._task)
        if call is not None and call.receiver is not None:
            receiver, call.receiver = call.receiver, None
            value.tell(receiver)
            self._driver.feed(Scheduler.cancel, self._task)
