"""What workers say of the ends of tasks, on its way to the core and to who waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from aiogpu.core.effects import NOTHING
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.runtime.child import pass_on_all
from aiogpu.runtime.receiver import tell_fault
from aiogpu.runtime.values import unfinished_in
from aiogpu.wire.messages import Done, Failed, Skipped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiogpu.core.effects import Effect
    from aiogpu.core.queue.sharded_dict import ShardedDict
    from aiogpu.core.records import TaskRecord
    from aiogpu.runtime.call import Call
    from aiogpu.runtime.driver import Driver

_log: Final = logging.getLogger(__name__)


class Answers:
    """Hears them.

    Attributes:
        on_end: told of an answer before the core is; None for nobody.
        on_row: told of the tasks that a worker has ended in a row, as the core knew
            them, and of the seconds that each took; None for nobody.
    """

    def __init__(
        self, driver: Driver, loop: asyncio.AbstractEventLoop, calls: ShardedDict[Call]
    ) -> None:
        self.on_end: Callable[[int, Done | Failed], None] | None = None
        self.on_row: Callable[[int, list[TaskRecord], list[float]], None] | None = None
        self._driver = driver
        self._loop = loop
        self._scheduler = driver.scheduler
        self._calls = calls
        self._shortages = driver.shortages

    def on_done(self, worker: int, answers: Sequence[Done]) -> None:
        """A worker has ended some tasks, one after the other."""
        start, last = 0, len(answers) - 1
        while start <= last:
            if start < last:
                start += self._end_row(worker, answers[start:])
            if start <= last:
                self.on_answer(worker, answers[start])
                start += 1

    def _end_row(self, worker: int, answers: Sequence[Done]) -> int:
        """End as many tasks as can be ended together; gives how many."""
        tasks = [TaskId(answer.task) for answer in answers]
        calls: list[Call] = []
        ended: list[tuple[TaskId, float]] = []
        found = self._calls.some(tasks)
        for task, call, answer in zip(tasks, found, answers, strict=True):
            if call is None or call.worker != worker:
                break
            if type(answer.payload) is not bytes:
                break
            calls.append(call)
            ended.append((task, answer.took * 1e-6))
        effects: list[Effect] = []
        now, who, driver = self._loop.time(), WorkerId(worker), self._driver
        if driver.is_busy:
            return 0
        driver.is_busy = True
        records: list[TaskRecord] = []
        try:
            records = self._scheduler.finish_many(now, who, ended, effects)
        except Exception as error:  # noqa: BLE001 - one of them harms no other
            for task, _ in ended:
                driver.faults.on_event(Scheduler.finish, (task, who), error)
        if records and self.on_row is not None:
            took = [seconds for _, seconds in ended[: len(records)]]
            try:
                self.on_row(worker, records, took)
            except Exception:  # noqa: BLE001 - it only observes
                _log.exception("! the recorder failed; the tasks go on")
        if effects or driver.events:
            # What the worker is to do next goes first: others only hear of it.
            driver.carry_out(effects)
        driver.is_busy = False
        if not records:
            return 0
        self._tell(calls[: len(records)], answers)
        self._calls.pop_some(tasks[: len(records)])
        return len(records)

    def _tell(self, calls: Sequence[Call], answers: Sequence[Done]) -> None:
        receivers = [call.receiver for call in calls]
        payloads = [answer.payload for answer in answers[: len(calls)]]
        if pass_on_all(receivers, payloads):
            return
        # Each by itself: what one makes of it is no other's business.
        for call, answer in zip(calls, answers, strict=False):
            if call.receiver is not None:
                try:
                    call.receiver.receive(answer.payload)
                except Exception as error:  # noqa: BLE001 - it is told to who waits
                    tell_fault(call.receiver, error)

    def on_answer(self, worker: int, answer: Done | Failed) -> None:
        """A worker has ended a task."""
        task = TaskId(answer.task)
        call = self._calls.young.get(task) or self._calls.get(task)
        if call is None or call.worker != worker:
            self._shortages.drop(worker, answer.task)
            return
        if self.on_end is not None:
            try:
                self.on_end(worker, answer)
            except Exception:  # noqa: BLE001 - it only observes
                _log.exception("! the recorder failed; the task goes on")
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
                self._driver.feed(
                    Scheduler.finish, task, WorkerId(worker), retry, ran_out=True
                )
                return
        driver = self._driver
        if driver.is_busy:
            driver.feed(Scheduler.finish, task, WorkerId(worker), retry, took)
            return
        now, finish = self._loop.time(), self._scheduler.finish
        driver.is_busy = True
        wanted: Sequence[Effect] = NOTHING
        try:
            wanted = finish(now, task, WorkerId(worker), retry, took)
        except Exception as error:  # noqa: BLE001 - one of them harms no other
            args = (task, WorkerId(worker), retry, took)
            driver.faults.on_event(Scheduler.finish, args, error)
        driver.carry_out(wanted)

    def _keep_carried(self, payload: bytes) -> None:
        """What a result has handles to goes on, though who has started it ends."""
        for task in unfinished_in(payload):
            self._driver.feed(Scheduler.detach, TaskId(task))

    def on_skipped(self, worker: int, skipped: Skipped) -> None:
        """A worker was sent a task that was taken back as it came up."""
        call = self._calls.get(TaskId(skipped.task))
        if call is not None and call.number == skipped.number:
            self._driver.feed(
                Scheduler.task_skipped, TaskId(skipped.task), WorkerId(worker)
            )
