"""An actor whose coroutine methods interleave on one event loop."""

from __future__ import annotations

import asyncio
import os
import selectors
import sys
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from inspect import CORO_CREATED, getcoroutinestate, iscoroutinefunction, signature
from math import inf
from time import perf_counter
from types import FrameType
from typing import Any, Final

from aiogpu.client.current import method_called
from aiogpu.wire.messages import Demand, Done, Drop, Failed, Invoke
from aiogpu.worker.actors import Methods, dropped, is_end
from aiogpu.worker.connection import SHORT
from aiogpu.worker.execute import Executor
from aiogpu.worker.interrupts import PACKAGE, report_dropped
from aiogpu.worker.invoke import (
    Invoker,
    Raised,
    StreamSender,
    call_function,
    invoke,
    send_all_async,
)

GLANCES: Final = 10
"""Polls of the socket between two turns of the loop."""

LOOP_CODE: Final = (os.path.dirname(asyncio.__file__), selectors.__file__)
"""Directories and files of the code that runs the loop."""

PATIENCE: Final = 0.001
"""Seconds that answers and received messages wait for the loop's next turn. One turn
starts all calls that arrived together, so plain methods can make a turn long. Answers
are therefore sent before a method that has taken longer than this, and before a
method's first call."""


class AsyncActor(Invoker):
    """Starts each call on arrival; the driver limits how many calls run at once.

    Handles among the arguments belong to the actor's loop, since that loop runs.
    """

    def __init__(self, executor: Executor, actor: object) -> None:
        self._executor = executor
        self._channel = executor.channel
        self._actor = actor
        self._methods = Methods(actor, executor.begin_call)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._dropped: set[int] = set()
        self._streams: dict[int, StreamSender] = {}
        self._answers: list[Done | Failed] = []
        self._is_stopped = False
        self._is_over = False
        self._waits_since = 0.0
        self._is_awake = False
        self._is_report_scheduled = False
        self._awake_until = 0.0
        self._flushed_at = 0.0
        self._took: dict[str, float] = {}  # seconds, a decaying maximum by method
        self._loop = asyncio.new_event_loop()

    def serve(self) -> None:
        """Run calls until the actor is to end, then run its `close`."""
        loop, client, loans = self._loop, self._executor.client, self._channel.loans
        signals = self._executor.interrupts.user
        is_open = signals.is_open
        signals.is_open = self._is_open_to_handlers
        signals.wake = partial(loop.call_soon_threadsafe, signals.run_deferred)
        asyncio.set_event_loop(loop)
        client.loop, client.wake = loop, self._obey_soon
        if loans is not None:
            loans.on_over = self._report_soon
        loop.add_reader(self._channel.fileno(), self._read)
        loop.call_soon(self._obey)
        try:
            while not self._is_stopped:
                try:
                    loop.run_forever()
                except BaseException as error:  # noqa: BLE001 - no call can have it
                    report_dropped(error)
            # Calls that end from here on must not stop the loop again.
            self._is_over = True
            loop.remove_reader(self._channel.fileno())
            loop.run_until_complete(self._close())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            self._flush()
            signals.is_open, signals.wake = is_open, None
            loop.close()
            # Both hold the actor, which is to be freed now.
            client.loop = client.wake = None
            if loans is not None:
                loans.on_over = None

    async def _close(self) -> None:
        await cancel_all(self._running.values())
        try:
            close = close_method(self._actor)
            if close is not None:
                await close()
        except BaseException:  # noqa: BLE001 - the actor ends in any case
            sys.excepthook(*sys.exc_info())
        await cancel_all(asyncio.all_tasks() - {asyncio.current_task()})

    def _obey_soon(self) -> None:
        """Handle messages for this loop that another thread has read."""
        self._loop.call_soon_threadsafe(self._obey)

    def _read(self) -> None:
        if not self._is_awake and not self._running and self._channel.may_stay_awake:
            self._is_awake = perf_counter() - self._waits_since < SHORT
        if not self._channel.read_ready():
            self._stop()
        self._obey()

    def _wait(self) -> None:
        """Wait for the next call while no call runs; see `Channel.next`."""
        self._waits_since = perf_counter()
        if self._is_awake:
            self._awake_until = self._waits_since + SHORT
            self._loop.call_soon(self._glance)

    def _glance(self) -> None:
        """Poll for the next call before the loop sleeps: waking up is slow."""
        if self._running or self._is_over:
            return
        for _ in range(GLANCES):
            if not self._channel.is_silent(0):
                self._read()
                return
            os.sched_yield()
        if perf_counter() < self._awake_until:
            self._loop.call_soon(self._glance)
        else:
            self._is_awake = False

    def _obey(self) -> None:
        for message in self._channel.take_all():
            if type(message) is Invoke:
                # `loop.create_task` does the same, but takes half as long again.
                task = asyncio.Task(self._call(message), loop=self._loop)
                self._running[message.call] = task
            elif type(message) is Drop:
                self._drop(message.call)
            elif type(message) is Demand:
                stream = self._streams.get(message.task)
                if stream is not None:
                    stream.raise_limit(message.limit)
            elif is_end(self._executor, message):
                self._stop()

    def _is_open_to_handlers(self, frame: FrameType | None) -> bool:
        """Return whether a signal handler may raise in a frame: user code runs there.

        That is below `invoke`, and in asyncio tasks that user code has started. In
        asyncio's own code a task would be lost.
        """
        if self._is_over or asyncio.current_task(self._loop) is None:
            return False
        has_users = False
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            has_users |= not frame.f_code.co_filename.startswith(LOOP_CODE)
            frame = frame.f_back
        return has_users and frame is not None and frame.f_code in _CALLERS

    def _stop(self) -> None:
        if not self._is_over:
            self._is_stopped = True
            self._loop.stop()

    def _drop(self, call: int) -> None:
        task = self._running.get(call)
        if task is None:
            return
        self._dropped.add(call)
        has_begun = getcoroutinestate(task.get_coro()) != CORO_CREATED  # type: ignore[arg-type]
        task.cancel()
        if not has_begun:
            # The coroutine never starts, so it cannot answer.
            del self._running[call]
            self._dropped.discard(call)
            self._answer(dropped(call))

    async def _call(self, message: Invoke) -> None:
        call, stream = message.call, None
        if message.limit:
            stream = self._streams[call] = self._executor.new_stream(call, message)
        method_called.set((message.method, call))
        lately = self._took.get(message.method, inf)
        if self._answers and lately > PATIENCE:
            self._flush()  # the call may block the loop
        outcome = await invoke(
            self, call, self._methods, message.method, message.payload, stream
        )
        answer: Done | Failed
        if type(outcome) is not Raised:
            answer = outcome
            took = outcome.took * 1e-6
            self._took[message.method] = (
                took if lately == inf else max(took, lately / 2)
            )
        else:
            is_cancelled = isinstance(outcome.error, asyncio.CancelledError)
            if is_cancelled and (call in self._dropped or self._is_over):
                answer = dropped(call)
            else:
                answer = self._executor.describe(call, outcome)
        # From Python 3.12 the frame of a failed coroutine keeps the frames of its
        # callers. A name here would hold the error, which holds that frame.
        del outcome
        del self._running[call]
        if stream is not None:
            del self._streams[call]
        if self._dropped:
            self._dropped.discard(call)
        if self._answers and not self._channel.is_closed:
            self._answers.append(answer)
        else:
            self._answer(answer)
        if self._executor.has_left:
            self._stop()
        elif self._answers and perf_counter() - self._flushed_at > PATIENCE:
            self._flush()
            if not self._channel.is_silent(0):
                self._read()

    async def send_items(self, items: Any, stream: StreamSender) -> None:
        """Send a generator's items; a plain one blocks the loop until it is held."""
        await send_all_async(items, stream, self._loop.create_future)

    def _answer(self, answer: Done | Failed) -> None:
        """Answer at once if no other call runs, else with later answers."""
        if self._channel.is_closed or not (self._running or self._answers):
            self._executor.answer(answer)
            self._executor.client.report_ended_loans()
            self._wait()
        else:
            if not self._answers:
                self._loop.call_soon(self._flush)
            self._answers.append(answer)

    def _report_soon(self) -> None:
        """Schedule the release of references that have just been dropped."""
        if not self._is_report_scheduled:
            self._is_report_scheduled = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._report)

    def _report(self) -> None:
        self._is_report_scheduled = False
        self._executor.client.report_ended_loans()

    def _flush(self) -> None:
        answers, self._answers = self._answers, []
        self._flushed_at = perf_counter()
        if answers:
            self._executor.answer_all(answers)
            self._executor.client.report_ended_loans()


_CALLERS: Final = {invoke.__code__, call_function.__code__, AsyncActor.serve.__code__}
"""The code of this library that calls user code on the loop."""


def close_method(actor: object) -> Callable[[], Coroutine[Any, Any, object]] | None:
    """Return an actor's `async def close(self)`; None if it has none."""
    close = getattr(actor, "close", None)
    if not iscoroutinefunction(close) or signature(close).parameters:
        return None
    return close


async def cancel_all(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Cancel tasks and wait until all have ended."""
    rest = [task for task in tasks if task is not None]
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
