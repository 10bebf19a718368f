"""Calls of one instance that wait to be answered together, and the batches that run.

A batch is *due* when it is full, or when its first call has waited as long as it may;
a due batch starts as soon as fewer run than may. So no call waits longer than that
and the batches before its own. That one ends does not make the next due: what its
callers send next comes into the same batch as what came meanwhile.

A gathering is kept by the calls that wait in it and by its batches, and by nothing
else: with the last of them it goes, and so may the instance. This file imports
asyncio, so it is itself imported late.
"""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop
from collections.abc import Sequence
from contextvars import Context, copy_context
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from aiogpu.errors import MisuseError, NoLoopError

if TYPE_CHECKING:
    from aiogpu.api.batching import Batching


class Call(asyncio.Future[Any]):
    """One call, and what its caller waits on.

    Attributes:
        item: what the caller gave.
        due: loop time from which it need not wait for others.
        context: the caller's.
        gathering: where it waits, or has waited.
        batch: the one that it belongs to; it has none while it waits.
    """

    __slots__ = ("batch", "context", "due", "gathering", "item")

    batch: Batch
    context: Context
    due: float
    gathering: BatchQueue
    item: Any

    def cancel(self, msg: Any | None = None) -> bool:
        """Its caller waits no more; False if it had ended before."""
        if not super().cancel(msg):
            return False
        self.gathering.withdraw(self)
        return True

    def leave(self) -> None:
        """Its caller goes without a result, whatever the cause."""
        # His coroutine may have been closed: then nobody has cancelled this.
        if not self.get_loop().is_closed():
            self.cancel()

    def fail(self, error: BaseException) -> None:
        """Raise an error at the caller."""
        if isinstance(error, StopIteration):
            # No future takes it, and out of a coroutine it comes as this.
            cause, error = error, RuntimeError("the batch raised StopIteration")
            error.__cause__ = cause
        self.set_exception(error)


class Batch:
    """Calls that are answered together.

    Attributes:
        calls: in the order in which they came; none when it has ended.
        awaited: how many of these still have a caller.
        task: runs the user's function; None when it has ended.
        has_suspended: whether the function has left the loop to others.
    """

    __slots__ = ("awaited", "calls", "has_suspended", "task")

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.awaited = len(calls)
        self.has_suspended = False
        self.task: asyncio.Task[None] | None = None
        for call in calls:
            call.batch = self

    def items(self) -> list[Any]:
        """Return what is still asked for."""
        if self.awaited < len(self.calls):
            self.calls = [call for call in self.calls if not call.done()]
        return [call.item for call in self.calls]

    def note_turn(self) -> None:
        """The loop has come to what was due after the function began."""
        self.has_suspended = True

    def answer(self, name: str, results: object) -> None:
        """Give each caller his result, or raise his exception in its place.

        Raises:
            MisuseError: these are not as many results as calls.
        """
        calls = self.calls
        if type(results) is not list or len(results) != len(calls):
            results = _checked(name, results, len(calls))
        for call, result in zip(calls, results, strict=True):
            if call.done():
                continue
            if isinstance(result, BaseException):
                call.fail(result)
            else:
                call.set_result(result)

    def fail(self, error: BaseException) -> bool:
        """Raise it at every caller; False if there is none left to hear it."""
        unanswered = [call for call in self.calls if not call.done()]
        for call in unanswered:
            call.fail(error)
        return bool(unanswered)

    def withdraw(self) -> None:
        """One of its callers has gone; with the last one it is cancelled."""
        self.awaited -= 1
        if not self.awaited and self.task is not None:
            self.task.cancel()


class BatchQueue:
    """What is called on one instance and one event loop."""

    __slots__ = (
        "__weakref__",
        "_alarm",
        "_batching",
        "_instance",
        "_loop",
        "_running",
        "_waiting",
    )

    def __init__(
        self, batching: Batching, instance: object, loop: asyncio.AbstractEventLoop
    ) -> None:
        self._batching = batching
        self._instance = instance
        self._loop = loop
        self._waiting: dict[Call, None] = {}
        self._running: set[Batch] = set()
        self._alarm: asyncio.Handle | None = None

    def take(self, item: object) -> Call:
        """Take a call; a batch that it fills starts at once, if it may."""
        batching, loop, waiting = self._batching, self._loop, self._waiting
        call = Call(loop=loop)
        call.item = item
        call.gathering = self
        call.context = copy_context()
        call.due = loop.time() + batching.max_wait if batching.max_wait else 0.0
        waiting[call] = None
        if len(self._running) < batching.max_concurrency:
            if len(waiting) >= batching.max_size:
                self._start()
            elif self._alarm is None:
                self._set_alarm(call.due)
        return call

    def withdraw(self, call: Call) -> None:
        """Nobody waits for it any more."""
        if call not in self._waiting:
            call.batch.withdraw()
            return
        del self._waiting[call]
        if not self._waiting:
            self._unset_alarm()

    def _start(self) -> None:
        waiting = self._waiting
        calls = list(islice(waiting, self._batching.max_size))
        for call in calls:
            del waiting[call]
        if not waiting:
            self._unset_alarm()
        batch = Batch(calls)
        self._running.add(batch)
        task = self._loop.create_task(self._run(batch), context=calls[0].context)
        batch.task = task
        task.add_done_callback(partial(self._end, batch))
        self._loop.call_soon(batch.note_turn)

    async def _run(self, batch: Batch) -> None:
        batching = self._batching
        bound = (self._instance,) if batching.is_method else ()
        try:
            results = await batching.function(*bound, batch.items())
            if batch.has_suspended and len(self._waiting) >= batching.max_size:
                # Its work is done elsewhere, in a thread or on a device, which need
                # not idle while callers are woken: they go after the loop has polled,
                # since then a thread gets the interpreter. Where the function holds
                # the loop instead, callers go first: see `_end`.
                self._start()
                await asyncio.sleep(0)
            batch.answer(batching.name, results)
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:
            # As long as there are callers it is theirs, also if it ends the loop.
            if not batch.fail(error):
                raise

    def _end(self, batch: Batch, task: asyncio.Task[None]) -> None:
        """Go on; callers were woken before this, and may have called again."""
        self._running.discard(batch)
        if task.cancelled():
            for call in batch.calls:
                call.cancel()
        # They would keep each other, and with them results and frames.
        batch.calls, batch.task = [], None
        if self._waiting:
            self._look(self._loop.time())

    def _look(self, now: float) -> None:
        """Start what is due, and look again when more will be."""
        batching, waiting = self._batching, self._waiting
        self._unset_alarm()
        while waiting and len(self._running) < batching.max_concurrency:
            due = next(iter(waiting)).due
            if len(waiting) < batching.max_size and due > now:
                self._set_alarm(due)
                break
            self._start()

    def _set_alarm(self, due: float) -> None:
        # A loop may wake a little early, and uvloop counts whole milliseconds: what
        # it wakes for is due by definition.
        self._alarm = self._loop.call_at(due, self._look, due)

    def _unset_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


def join(batching: Batching, instance: object, item: object) -> Call:
    """Make a call on the running loop.

    Args:
        batching: the decorated method or function.
        instance: whose method it is; None for a function.
        item: what is given to it.

    Raises:
        NoLoopError: no asyncio loop runs in this thread.
    """
    loop = _get_running_loop()
    # By identity: instances may be equal, or have no hash.
    gathering = batching.gatherings.get((id(loop), id(instance)))
    if gathering is None:
        if loop is None:
            raise NoLoopError(
                f"{batching.name} gathers calls on an asyncio event loop, and none is "
                f"running in this thread; await it in what aiogpu.run() runs."
            )
        gathering = BatchQueue(batching, instance, loop)
        batching.gatherings[id(loop), id(instance)] = gathering
    return gathering.take(item)


def _checked(name: str, results: object, count: int) -> Sequence[Any]:
    kind = type(results).__name__
    if isinstance(results, str | bytes) or not isinstance(results, Sequence):
        given = f"an object of type {kind}"
    elif len(results) != count:
        given = f"a {kind} of {len(results)}"
    else:
        return results
    raise MisuseError(
        f"{name} was given a list of {count} and must return a list of {count}, one "
        f"result for each item in the same order; it returned {given}. In the place "
        f"of an item that fails, return the exception."
    )
