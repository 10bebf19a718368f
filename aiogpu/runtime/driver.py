"""The one place where decisions meet I/O: events to the core, effects to the pool.

Keeps what the core must not see: each task's payload, its receiver, its answer.
Every event is carried to its end before the next is looked at.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import Final

from aiogpu.core.effects import (
    Abandon,
    Assign,
    Effect,
    Expire,
    Forget,
    Interrupt,
    Kill,
    Lose,
    Retire,
    Settle,
    Spawn,
)
from aiogpu.core.events import (
    Cancelled,
    Closing,
    Event,
    Submitted,
    TaskFinished,
    TimePassed,
    WorkerGone,
    WorkerStarted,
)
from aiogpu.core.ids import TaskId, WorkerId
from aiogpu.core.scheduler import Scheduler
from aiogpu.errors import WorkerDiedError
from aiogpu.runtime.assignment import Assignment
from aiogpu.runtime.call import Call, Receiver, Site
from aiogpu.runtime.pool import Pool
from aiogpu.runtime.slot import Death
from aiogpu.wire.failure import unpack_failure
from aiogpu.wire.messages import Done, Failed

_log: Final = logging.getLogger(__name__)


class Driver:
    """Runs one node's tasks on the loop that it was made for."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        pool: Pool,
        assignment: Assignment,
    ) -> None:
        self.scheduler = scheduler
        self._loop = loop
        self._pool = pool
        self._assignment = assignment
        self._calls: dict[TaskId, Call] = {}
        self._deaths: dict[WorkerId, Death] = {}
        self._last_task = 0
        self._timers = scheduler.timers
        # uvloop's handles do not say when they are due.
        self._timer: asyncio.Handle | None = None
        self._timer_at: float | None = None
        self._closed = loop.create_future()
        pool.on_started = self._on_started
        pool.on_answer = self._on_answer
        pool.on_gone = self._on_gone
        self._ways: Final[dict[type[Effect], Callable[..., None]]] = {
            Spawn: self._spawn,
            Assign: self._assign,
            Interrupt: self._interrupt,
            Retire: self._retire,
            Kill: self._kill,
            Settle: self._settle,
            Expire: self._expire,
            Lose: self._lose,
            Abandon: self._abandon,
            Forget: self._forget,
        }

    def __repr__(self) -> str:
        return f"<Driver {len(self._calls)} calls, {self._pool!r}>"

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Start a task; gives its id, with which it can be cancelled."""
        self._last_task += 1
        task = TaskId(self._last_task)
        self._calls[task] = Call(site, payload, receiver)
        self.feed(Submitted(task, site.spec))
        return task

    def cancel(self, task: int) -> None:
        """Stop a task; its receiver is not told anything any more."""
        call = self._calls.get(TaskId(task))
        if call is not None:
            call.receiver = None
            self.feed(Cancelled(TaskId(task)))

    def feed(self, event: Event) -> None:
        """Tell the core what happened, and do what it says."""
        for effect in self.scheduler.handle(event, self._loop.time()):
            try:
                self._ways[type(effect)](effect)
            except Exception:  # noqa: BLE001
                # A bug of ours in one must not lose the others: somebody waits.
                _log.exception("! %r was not carried out", effect)
        earliest = self._timers.earliest
        if earliest != self._timer_at:
            self._rearm(earliest)
        if self.scheduler.is_closing:
            self._note_closed()

    def _rearm(self, deadline: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = deadline
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self._on_time)

    def _note_closed(self) -> None:
        if self.scheduler.is_closed and not self._closed.done():
            self._closed.set_result(None)

    def _on_time(self) -> None:
        self._timer = self._timer_at = None
        self.feed(TimePassed())

    async def close(self, timeout: float) -> None:
        """Stop everything; returns when the last worker is gone, or time is up."""
        self.feed(Closing())
        await asyncio.wait([self._closed], timeout=timeout)
        if self._timer is not None:
            self._timer.cancel()

    def _on_started(self, worker: int) -> None:
        self.feed(WorkerStarted(WorkerId(worker)))

    def _on_answer(self, worker: int, answer: Done | Failed) -> None:
        task = TaskId(answer.task)
        call = self._calls.get(task)
        if call is None or call.worker != worker:
            return
        call.answer = answer
        retry = type(answer) is Failed and call.is_retried(answer)
        self.feed(TaskFinished(task, WorkerId(worker), retry))

    def _on_gone(self, worker: int, death: Death) -> None:
        self._deaths[WorkerId(worker)] = death
        self.feed(WorkerGone(WorkerId(worker)))
        del self._deaths[WorkerId(worker)]

    def _spawn(self, effect: Spawn) -> None:
        self._pool.spawn(effect.worker)

    def _assign(self, effect: Assign) -> None:
        call = self._calls[effect.task]
        call.worker = effect.worker
        call.answer = call.error = None
        bind = None
        if effect.is_first:
            bind = self._assignment.bind(effect.lease, call.site.environ)
        self._pool.assign(effect.worker, effect.task, call, bind, effect.is_last)

    def _interrupt(self, effect: Interrupt) -> None:
        is_coroutine = self._calls[effect.task].site.is_coroutine
        self._pool.interrupt(effect.worker, effect.task, effect.attempt, is_coroutine)

    def _retire(self, effect: Retire) -> None:
        self._pool.retire(effect.worker)

    def _kill(self, effect: Kill) -> None:
        self._pool.kill(effect.worker)

    def _settle(self, effect: Settle) -> None:
        call = self._calls.pop(effect.task)
        receiver, answer = call.receiver, call.answer
        assert receiver is not None, call
        if type(answer) is Done:
            receiver.receive(answer.payload)
        elif type(answer) is Failed:
            name = call.site.spec.name
            error = call.error
            receiver.fail(unpack_failure(answer, name) if error is None else error)

    def _expire(self, effect: Expire) -> None:
        self._calls[effect.task].tell_timeout()

    def _abandon(self, effect: Abandon) -> None:
        self._calls[effect.task].tell_closed()

    def _lose(self, effect: Lose) -> None:
        call = self._calls.pop(effect.task)
        call.tell(describe_death(call.site.spec.name, self._deaths[effect.worker]))

    def _forget(self, effect: Forget) -> None:
        del self._calls[effect.task]


def describe_death(task_name: str, death: Death) -> WorkerDiedError:
    """The error of a task whose worker has died, with all that is known."""
    if death.status is None:
        return WorkerDiedError(
            f"no worker could be started for {task_name}: {death.reason}"
        )
    number = os.WTERMSIG(death.status) if os.WIFSIGNALED(death.status) else None
    code = os.WEXITSTATUS(death.status) if os.WIFEXITED(death.status) else None
    if number is not None:
        how = f"was ended by signal {number} ({_signal_name(number)})"
    else:
        how = f"exited with code {code} without answering (os._exit?)"
    because = f"; {death.reason}" if death.reason else ""
    lines = "".join(f"\n  {line}" for line in death.last_output)
    last = f" Its last output:{lines}" if lines else ""
    return WorkerDiedError(
        f"the worker that ran {task_name} (pid {death.pid}) {how}{because}.{last}",
        death.pid,
        code,
        number,
        death.last_output,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a real-time signal"
