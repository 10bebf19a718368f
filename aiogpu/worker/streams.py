"""The producer's end of a stream: sends what a generator yields, while it may.

Each item goes out at once, by itself. Nobody knows how long the generator will
compute before it yields the next one, and while it does nothing here runs that could
send what was kept back; the driver takes what has come together all at once.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from aiogpu.errors import NodeClosedError, SerializationError
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import dump_result
from aiogpu.wire.messages import Demand, Items
from aiogpu.worker.invoke import packed
from aiogpu.worker.nested import SLICE

if TYPE_CHECKING:
    from asyncio import Future

    from aiogpu.worker.connection import Channel
    from aiogpu.worker.interrupts import Interrupts


class UnsendableError(Exception):
    """An item cannot be sent; its cause says why."""


class StreamSender:
    """One stream's items on their way out.

    Attributes:
        task: whose items they are.
        limit: how many it may yield in all, as far as this end knows.
        on_open: told when the limit has risen.
    """

    __slots__ = ("_channel", "_count", "_skip", "limit", "on_open", "task")

    def __init__(self, channel: Channel, task: int, limit: int, skip: int) -> None:
        self.task = task
        self.limit = limit
        self.on_open: Callable[[], object] | None = None
        self._channel = channel
        self._skip = skip
        self._count = 0

    def __repr__(self) -> str:
        return f"<StreamSender {self.task}: {self._count} of {self.limit}>"

    @property
    def is_held(self) -> bool:
        """True if the consumer has to take items before the next one is yielded."""
        return self._count >= self.limit

    def rise(self, limit: int) -> None:
        """The consumer has taken items."""
        if limit > self.limit:
            self.limit = limit
            if self.on_open is not None:
                self.on_open()

    def send(self, item: object) -> None:
        """Send the next item, unless an attempt before has done so.

        Raises:
            UnsendableError: it cannot be pickled, or is too large.
        """
        if not self.counts():
            return
        try:
            payload = dump_result(item)
            if isinstance(payload, PickledValue):
                payload = packed(payload)
            self._channel.send(Items(self.task, (payload,)))
        except SerializationError as error:
            raise self.unsendable(error) from error

    def counts(self) -> bool:
        """Count one more item; False if an attempt before has sent it."""
        self._count += 1
        return self._count > self._skip

    def unsendable(self, error: SerializationError) -> UnsendableError:
        """The error for the last item, which cannot be sent."""
        return UnsendableError(f"item {self._count} of its stream is lost: {error}")


def send_all(
    items: Iterator[Any], flow: StreamSender, hold: Callable[[], object]
) -> None:
    """Run a plain generator to its end, and send what it yields.

    Whatever ends it before, its `finally` blocks have run when this raises.

    Args:
        items: the generator.
        flow: its way out.
        hold: waits, while the flow is held; raises if the generator is to end.
    """
    try:
        send = flow.send
        for item in items:
            send(item)
            del item  # it may be large, and the next is as well
            hold()
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()


async def send_all_async(
    items: Any, flow: StreamSender, new_future: Callable[[], Future[None]]
) -> None:
    """The same on an event loop, for a generator of either kind.

    A plain one has the loop to itself until it is held.

    Args:
        items: the generator.
        flow: its way out.
        new_future: makes a future of the loop.
    """
    try:
        if hasattr(items, "__anext__"):
            async for item in items:
                flow.send(item)
                del item
                if flow.is_held:
                    await _opened(flow, new_future)
        else:
            for item in items:
                flow.send(item)
                del item
                if flow.is_held:
                    await _opened(flow, new_future)
    finally:
        if hasattr(items, "aclose"):
            await items.aclose()
        elif hasattr(items, "close"):
            items.close()


async def _opened(flow: StreamSender, new_future: Callable[[], Future[None]]) -> None:
    while flow.is_held:
        waiter = new_future()
        flow.on_open = partial(_set, waiter)
        await waiter


def _set(waiter: Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class ThreadWindow:
    """Holds a generator that runs in a thread beside the one that reads.

    Attributes:
        flow: its way out.
        is_stopped: it was told to end before its time.
    """

    def __init__(self, flow: StreamSender) -> None:
        self.flow = flow
        self.is_stopped = False
        self._turn = _thread.allocate_lock()
        flow.on_open = self._wake

    def stop(self) -> None:
        """End the generator at its next `yield`; called by the thread that reads."""
        self.is_stopped = True
        self._wake()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # it is not waiting
            self._turn.release()

    def hold(self) -> None:
        """Wait until the consumer wants more.

        Raises:
            GeneratorExit: the call is to stop.
        """
        while self.flow.is_held or self.is_stopped:
            if self.is_stopped:
                raise GeneratorExit("the call was dropped")
            self._turn.acquire()


class MainThreadWindow:
    """Holds a generator that runs in the worker's main thread, as a task or a call."""

    def __init__(
        self, channel: Channel, interrupts: Interrupts, flow: StreamSender
    ) -> None:
        self._channel = channel
        self._interrupts = interrupts
        self._flow = flow

    def hold(self) -> None:
        """Read what comes until the consumer wants more.

        Raises:
            KeyboardInterrupt: the task is to stop.
            NodeClosedError: the driver has gone.
        """
        flow, interrupts = self._flow, self._interrupts
        if interrupts.is_asked(flow.task):
            self._stop()
        while flow.is_held:
            if self._has_demand():
                return
            if interrupts.is_asked(flow.task):
                self._stop()
            try:
                self._wait()
            except KeyboardInterrupt:
                self._stop()

    def _has_demand(self) -> bool:
        flow = self._flow
        for message in self._channel.take(Demand):
            if isinstance(message, Demand) and message.task == flow.task:
                flow.rise(message.limit)
        return not flow.is_held

    def _wait(self) -> None:
        # Another thread of the task's may read what this one waits for.
        self._channel.wait(SLICE if _thread._count() else None)
        if not self._channel.read_ready():
            raise NodeClosedError("the node has gone.")

    def _stop(self) -> NoReturn:
        """End the generator where it is, at its `yield`."""
        self._interrupts.hear(self._flow.task)
        # What it does last may take its time, but not another interrupt.
        self._interrupts.entered = 0
        raise KeyboardInterrupt(f"task {self._flow.task} was cancelled")
