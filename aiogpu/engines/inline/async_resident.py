"""An actor in this process whose coroutine methods interleave on the program's loop.

As many at once as its groups may. Each step of their code finds the actor's
surroundings, which the program's code between two steps does not see.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Coroutine, Iterable
from contextvars import Context
from functools import partial
from inspect import iscoroutinefunction, signature
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from aiogpu.client.current import method_called
from aiogpu.core.model.ids import WorkerId
from aiogpu.engines.inline.invocation import Invocation
from aiogpu.engines.inline.job import acting_job
from aiogpu.engines.inline.outcome import Outcome
from aiogpu.engines.inline.resident import Resident
from aiogpu.errors import NodeClosedError
from aiogpu.runtime.actors.actor import Actor, ActorState
from aiogpu.runtime.actors.registry import LEAVE_LIMIT
from aiogpu.wire.messages import Invoke, Leave, Message

if TYPE_CHECKING:
    from aiogpu.engines.inline.residents import Residents

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)


class AsyncResident(Resident):
    """See above."""

    def __init__(
        self,
        actor: Actor,
        residents: Residents,
        worker_id: WorkerId,
        restarts_left: int,
    ) -> None:
        super().__init__(actor, residents, worker_id, restarts_left)
        self._runner = residents.runner
        self._context = Context()
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._ending: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._is_made = False

    @property
    def is_busy_below(self) -> bool:
        """Never: its code is the loop's, and whoever waits lets that run."""
        return False

    def on_made(self) -> None:
        """Its constructor has returned."""
        self._is_made = True
        self.creation.worn = self.surroundings()
        self._context.run(acting_job.set, self.creation)
        self._runner.offspring.begin()
        super().on_made()

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        # Not by the loop's factory, which would take it for the caller's.
        context = self._context.copy()
        return asyncio.Task(coroutine, loop=self._runner.loop, context=context)

    # What its actor tells its process.

    def post(self, message: Message) -> None:
        """Begin a call."""
        if type(message) is not Invoke:
            super().post(message)
            return
        call = self._invocation(message)
        call.worn = self.creation.worn
        self.begun = message.call
        task = self._start(self._run(call))
        self._calls[message.call] = task
        ended = partial(self._on_ended, message.call)
        task.add_done_callback(ended, context=Context())

    async def _run(self, call: Invocation) -> None:
        # Neither the task's result nor a name here: a loop that ends keeps its tasks
        # for a while, and an error the frames that awaited it, so it would hold itself
        # and the actor's object until the garbage is collected.
        method_called.set(call.method)
        self._outcomes[call.id] = await self._runner.node.executor.interleave(call)

    def _on_ended(self, number: int, task: asyncio.Task[None]) -> None:
        del self._calls[number]
        outcome = self._outcomes.pop(number, None)
        if outcome is None:
            self._answer_dropped(number)  # it was cancelled before it had begun
            return
        if task.cancelling() and isinstance(outcome.error, asyncio.CancelledError):
            self._tell_cancelled(number)
        self.answer(outcome)
        if outcome.is_ctrl_c and outcome.error is not None:
            raise outcome.error

    def _tell_cancelled(self, number: int) -> None:
        """If somebody wants it, the loop has cancelled all that runs, since it ends."""
        if self.actor.state is ActorState.LEAVING:
            self._answer_dropped(number)  # another call has ended the actor
            return
        call = self.actor.calls.get(number) if self._is_current else None
        if call is not None and call.receiver is not None:
            call.receiver.fail(
                NodeClosedError(f"the event loop of {self.actor.name} has ended.")
            )
            self.actor.cancel(number)

    def drop(self, number: int) -> None:
        """Nobody wants a call's answer any more: cancel it."""
        task = self._calls.get(number)
        if task is not None:
            task.cancel()

    def send(self, message: Message) -> None:
        """End in an orderly way."""
        if type(message) is Leave:
            self._end_within(LEAVE_LIMIT, is_orderly=True)

    def kill(self) -> None:
        """Cancel all that runs, and end."""
        if self._is_made:
            self._end_within(self._runner.node.cancel_grace, is_orderly=False)
        else:
            super().kill()

    def close_down(self, grace: float) -> None:
        """End with the node, which waits for nobody beyond its grace."""
        if self._is_made:
            self._end_within(grace, is_orderly=True)
        else:
            super().kill()

    def hasten(self) -> None:
        """End now, and leave behind what takes its time."""
        rest = [*self._calls.values(), *self.creation.started]
        for task in (self._ending, *rest):
            if task is not None:
                task.cancel()
        self.end()

    # Its end.

    def _end_within(self, seconds: float, is_orderly: bool) -> None:
        if self.is_over:
            return
        if self._ending is None:
            self._ending = self._start(self._end(is_orderly))
        if self._alarm is not None:
            self._alarm.cancel()
        loop = self._runner.loop
        self._alarm = loop.call_later(seconds, self._give_up, context=Context())

    async def _end(self, is_orderly: bool) -> None:
        await _cancelled(self._calls.values())
        if is_orderly:
            await self._close()
        await _cancelled(self.creation.started)
        self.end()

    async def _close(self) -> None:
        executor = self._runner.node.executor
        try:
            close = getattr(self.object, "close", None)
            if iscoroutinefunction(close) and not signature(close).parameters:
                await executor.dressed(self.creation, close())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the actor ends
            if executor.is_ctrl_c(error):
                # To be raised where it ends the program; a task would keep it.
                self._runner.loop.call_soon(_raise, error, context=Context())
            elif not self.is_over:  # else it was cancelled, being left behind
                sys.excepthook(*sys.exc_info())

    def _give_up(self) -> None:
        _log.warning(
            "! %s was told to end and runs on. In a process of its own it would be "
            "killed; here it is left behind, and its code may run beside other code.",
            self.actor.name,
        )
        self.hasten()

    def _let_go(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._is_made:
            self._runner.offspring.end()
        super()._let_go()


async def _cancelled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended, whatever they do about it."""
    rest = list(tasks)
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def _raise(error: BaseException) -> NoReturn:
    raise error
