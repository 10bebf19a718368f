"""Runs the coroutines of tasks, one at a time.

While a coroutine runs, its loop watches the driver's connection, so a cancel arrives as
a message and becomes a `CancelledError` at the coroutine's `await`. Signals follow, for
code that does not await. A worker that was starved of CPU receives both at once. A
coroutine that awaits must be cancelled in this case too: an interrupt raised inside the
loop would break the loop and skip the coroutine's `finally` (`CoroutineCancel`).
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from os.path import dirname
from types import FrameType
from typing import Any, Final

from aiogpu.client.current import current
from aiogpu.wire.messages import Cancel, Demand
from aiogpu.worker.connection import Channel
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.invoke import Arguments, StreamSender, open_arguments, send_all_async
from aiogpu.worker.nested import task_client
from aiogpu.worker.private_hooks import leave_pending, set_running_loop

_LOOP_CODE: Final = (dirname(asyncio.__file__), selectors.__file__, dirname(__file__))
"""Directories and files of the code that runs coroutines."""


class Coroutines:
    """One worker's event loop, kept between tasks."""

    def __init__(self, channel: Channel, interrupts: Interrupts) -> None:
        self._channel = channel
        self._interrupts = interrupts
        self._loop = asyncio.new_event_loop()
        self._flow: StreamSender | None = None

    def load(self, payload: bytes) -> Arguments:
        """Unpickle a coroutine function's arguments; handles belong to its loop."""
        set_running_loop(self._loop)
        try:
            return open_arguments(payload)
        finally:
            set_running_loop(None)

    def send_items(self, items: AsyncIterator[Any], flow: StreamSender) -> None:
        """Run one task's async generator, and send what it yields."""
        self._flow = flow
        sending: Any = send_all_async(items, flow, self._new_future)
        try:
            self.run(sending, flow.task)
        finally:
            self._flow = None
            if not sending.cr_suspended:
                sending.close()  # avoids the warning about a coroutine that never began

    def _new_future(self) -> asyncio.Future[None]:
        return self._loop.create_future()

    def run(self, coroutine: Coroutine[Any, Any, Any], task_id: int) -> Any:
        """Run one task's coroutine, and cancel the asyncio tasks that it leaves."""
        loop = self._loop
        asyncio.set_event_loop(loop)
        self._interrupts.soften = _put_off
        task = loop.create_task(coroutine)
        self._interrupts.soften = CoroutineCancel(
            task, partial(self._cancel, task, task_id)
        )
        loop.add_reader(self._channel.fileno(), self._read, task, task_id)
        client = None if current.client is None else task_client()
        if client is not None:
            client.loop = loop
            client.wake = partial(self._obey_soon, task, task_id)
        try:
            self._obey(task, task_id)
            return loop.run_until_complete(task)
        except BaseException as error:
            if not task.done() or isinstance(error, KeyboardInterrupt):
                # A signal handler has raised it, perhaps inside the loop's own code.
                self._replace_loop()
            if task.done() and not task.cancelled():
                # Reported as the task's failure; asyncio must not log it as well.
                task.exception()
            raise
        finally:
            # An interrupt in the loop's own code would make the loop unfit for the next
            # task.
            self._interrupts.soften = _is_loop_code
            if client is not None:
                client.loop = client.wake = None
            try:
                if loop is self._loop and not self._channel.is_closed:
                    loop.remove_reader(self._channel.fileno())
                    self._end_rest()
            finally:
                self._interrupts.soften = None

    def settle(self) -> None:
        """Run what is ready between tasks: the ends of children that a task has left.

        Otherwise their handles, and what these hold, stay until the next coroutine.
        """
        # A late interrupt in the loop's own code would make the loop unfit.
        self._interrupts.soften = _is_loop_code
        try:
            self._loop.run_until_complete(asyncio.sleep(0))
        finally:
            self._interrupts.soften = None

    def _read(self, task: asyncio.Task[Any], task_id: int) -> None:
        if not self._channel.read_ready():
            self._loop.remove_reader(self._channel.fileno())
            task.cancel()
        self._obey(task, task_id)

    def _obey_soon(self, task: asyncio.Task[Any], task_id: int) -> None:
        """Handle messages that another thread has read; one may be a cancel."""
        with suppress(RuntimeError):  # the loop is closed
            task.get_loop().call_soon_threadsafe(self._obey, task, task_id)

    def _obey(self, task: asyncio.Task[Any], task_id: int) -> None:
        for message in self._channel.take(Cancel):
            if isinstance(message, Cancel) and message.task == task_id:
                self._cancel(task, task_id)
        flow = self._flow
        if flow is not None:
            for message in self._channel.take(Demand):
                if isinstance(message, Demand) and message.task == flow.task:
                    flow.raise_limit(message.limit)

    def _cancel(self, task: asyncio.Task[Any], task_id: int) -> None:
        """Cancel the task once: a second cancel would interrupt its cleanup."""
        if not (task.done() or self._interrupts.has_acknowledged(task_id)):
            self._interrupts.acknowledge(task_id)
            task.cancel()

    def _end_rest(self) -> None:
        """Cancel all asyncio tasks that the coroutine left running."""
        loop = self._loop
        rest = asyncio.all_tasks(loop)
        for task in rest:
            task.cancel()
        try:
            if rest:
                loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
        except BaseException:
            # Asyncio tasks that resist the cancel are abandoned with their loop.
            self._replace_loop()
            raise

    def _replace_loop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            # They never run again, and the task's failure was reported.
            leave_pending(task)
        self._loop.close()
        self._loop = asyncio.new_event_loop()


class CoroutineCancel:
    """Cancels a coroutine when an interrupt would not hit the coroutine's own code.

    Args:
        task: runs the coroutine.
        cancel: cancels the task; called on the loop.
    """

    def __init__(self, task: asyncio.Task[Any], cancel: Callable[[], None]) -> None:
        self._task = task
        self._cancel = cancel
        self._is_asked = False

    def __call__(self, frame: FrameType) -> bool:
        """Return True if the loop cancels the coroutine: no interrupt is raised.

        False if the coroutine's own code runs and does not await, and if other code has
        blocked the loop since the last signal.
        """
        loop = self._task.get_loop()
        if asyncio.current_task(loop) is self._task:
            return False
        if self._is_asked:
            return _is_loop_code(frame)
        self._is_asked = True
        loop.call_soon_threadsafe(self._cancel)
        return True


def _put_off(_frame: FrameType) -> bool:
    """Raise nothing while the asyncio task is made: it would stay and run later.

    The driver sends the signal again.
    """
    return True


def _is_loop_code(frame: FrameType | None) -> bool:
    """Return whether all frames up to `Coroutines.run` are the loop's own code."""
    while frame is not None and frame.f_code.co_filename.startswith(_LOOP_CODE):
        if frame.f_code is Coroutines.run.__code__:
            return True
        frame = frame.f_back
    return False
