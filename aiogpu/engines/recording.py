"""Has what a node's driver does written down; other drivers pay nothing for it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.ids import WorkerId
from aiogpu.observe.recorder import Recorder, Span
from aiogpu.serialization.exceptions import STOPPED
from aiogpu.wire.messages import Done, Failed

if TYPE_CHECKING:
    from aiogpu.core.records import TaskRecord
    from aiogpu.runtime.driver import Driver

FINISHED: Final = "finished"
FAILED: Final = "failed"
RETRIED: Final = "retried"
CANCELLED: Final = "cancelled"
DIED: Final = "died"


class Recording:
    """One node's recorder, and its clock.

    Attributes:
        recorder: has what was written down.
    """

    def __init__(self, driver: Driver, loop: asyncio.AbstractEventLoop) -> None:
        self.recorder = Recorder()
        self._workers = driver.scheduler.workers
        self._live = driver.workers
        self._now = loop.time
        self._end = self.recorder.end
        driver.observe(self)

    def on_assign(self, worker: int) -> None:
        """See `Observer`."""
        live = self._live.get(worker)
        self.recorder.begin(worker, 0 if live is None else live.pid, self._now())

    def on_end(self, worker_id: int, answer: Done | Failed) -> None:
        """See `Observer`."""
        worker = self._workers.get(worker_id)  # type: ignore[arg-type]
        record = None if worker is None else worker.task
        if worker is None or record is None or record.id != answer.task:
            return
        if type(answer) is Done:
            self._end(worker, record, FINISHED, self._now(), answer.took * 1e-6)
        elif isinstance(answer, Failed):
            is_again = answer.is_retried and record.retries_left
            outcome = RETRIED if is_again else FAILED
            if answer.kind == STOPPED:
                outcome = CANCELLED
            self.recorder.end(worker, record, outcome, self._now())

    def on_row(
        self, worker_id: int, records: list[TaskRecord], took: list[float]
    ) -> None:
        """See `Observer`."""
        worker = self._workers.get(worker_id)  # type: ignore[arg-type]
        if worker is not None:
            self.recorder.end_row(worker, records, took, FINISHED, self._now())

    def on_death(self, worker_id: int) -> None:
        """See `Observer`."""
        worker = self._workers.get(WorkerId(worker_id))
        if worker is not None and worker.task is not None:
            outcome = CANCELLED if worker.task.stop is not None else DIED
            self.recorder.end(worker, worker.task, outcome, self._now())
        self.recorder.forget(worker_id)

    def spans(self) -> list[Span]:
        """All that is kept; see `Recorder.spans`."""
        now = self._now()
        return self.recorder.spans(self._workers, now, time.time() - now)
