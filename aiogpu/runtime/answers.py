"""What workers say of the ends of tasks, on its way to the core and to who waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiogpu.core.events import Detached, TaskFinished, TaskSkipped
from aiogpu.core.ids import TaskId, WorkerId
from aiogpu.runtime.values import unfinished_in
from aiogpu.wire.messages import Done, Failed, Skipped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiogpu.core.effects import Effect
    from aiogpu.core.events import Event
    from aiogpu.core.scheduler import Scheduler
    from aiogpu.core.table import Table
    from aiogpu.runtime.call import Call
    from aiogpu.runtime.gpu_shortage import Shortages


class Answers:
    """Hears them.

    Attributes:
        on_end: told of an answer before the core is; None for nobody.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - both ways, and what lies between
        self,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        calls: Table[Call],
        shortages: Shortages,
        feed: Callable[[Event], None],
        carry_out: Callable[[Sequence[Effect]], None],
    ) -> None:
        self.on_end: Callable[[int, Done | Failed], None] | None = None
        self._loop = loop
        self._scheduler = scheduler
        self._calls = calls
        self._shortages = shortages
        self._feed = feed
        self._carry_out = carry_out

    def on_answer(self, worker: int, answer: Done | Failed) -> None:
        """A worker has ended a task."""
        task = TaskId(answer.task)
        call = self._calls.young.get(task) or self._calls.get(task)
        if call is None or call.worker != worker:
            self._shortages.drop(worker, answer.task)
            return
        if self.on_end is not None:
            self.on_end(worker, answer)
        call.answer = answer
        retry, took = False, 0.0
        if type(answer) is Done:
            if type(answer.payload) is not bytes:
                self._keep_carried(answer.payload)
            took = answer.took * 1e-6
        elif type(answer) is Failed:
            retry = answer.is_retried
            if self._shortages and self._shortages.concerns(worker, answer):
                self._shortages.replace(call, answer)
                self._feed(TaskFinished(task, WorkerId(worker), retry, ran_out=True))
                return
        now, finish = self._loop.time(), self._scheduler.finish
        self._carry_out(finish(task, WorkerId(worker), retry, took, now))

    def _keep_carried(self, payload: bytes) -> None:
        """What a result has handles to goes on, though who has started it ends."""
        for task in unfinished_in(payload):
            self._feed(Detached(TaskId(task)))

    def on_skipped(self, worker: int, skipped: Skipped) -> None:
        """A worker was sent a task that was taken back as it came up."""
        call = self._calls.get(TaskId(skipped.task))
        if call is not None and call.number == skipped.number:
            self._feed(TaskSkipped(TaskId(skipped.task), WorkerId(worker)))
