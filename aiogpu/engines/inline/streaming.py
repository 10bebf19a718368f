"""A generator of a task or a method in this process, as its items go to who waits.

Between two items it lies on top of nothing: whoever takes them runs meanwhile, and so
may other tasks. Its code finds its surroundings around it whenever it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from aiogpu.client.current import take_kept
from aiogpu.errors import SerializationError
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import dump_result
from aiogpu.worker.streams import StreamSender, send_all_async

if TYPE_CHECKING:
    from aiogpu.engines.inline.host import TaskHost
    from aiogpu.engines.inline.job import Job

_NO_ITEM: Final = object()


class InlineFlow(StreamSender):
    """The items of one job on their way."""

    def __init__(self, job: Job) -> None:
        call = job.call
        limit = call.limit or call.site.window
        super().__init__(None, job.id, limit, call.passed)  # type: ignore[arg-type]
        self._job = job

    def send(self, item: object) -> None:
        """Give the next item to who waits; see `StreamSender.send`."""
        if not self.counts():
            return
        try:
            payload = dump_result(item)
            if isinstance(payload, PickledValue):
                payload = self._job.runner.node.pack(payload)
        except SerializationError as error:
            take_kept()  # it will never be sent
            raise self.unsendable(error) from error
        self._job.pass_item(payload)


class PlainItems:
    """A plain generator, whose code runs outside of any event loop, as in a worker."""

    def __init__(self, items: Iterator[Any], job: Job, host: TaskHost) -> None:
        self._items = items
        self._job = job
        self._host = host

    def __iter__(self) -> PlainItems:
        return self

    def __next__(self) -> Any:
        with self._in_turn():
            item = next(self._items, _NO_ITEM)
        if item is _NO_ITEM:
            raise StopIteration
        return item

    def close(self) -> None:
        """End it, and what it has started."""
        with self._in_turn():
            try:
                close: Callable[[], None] | None = getattr(self._items, "close", None)
                if close is not None:
                    close()
            finally:
                self._host.close()

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """The block runs the generator's code, on top of whatever runs."""
        running = self._job.runner.node.turns.running
        loop = asyncio._get_running_loop()
        running.append(self._job)
        asyncio._set_running_loop(None)
        try:
            yield
        finally:
            asyncio._set_running_loop(loop)
            running.remove(self._job)


def begin_stream(
    job: Job, items: Any, host: TaskHost | None
) -> Coroutine[Any, Any, None]:
    """Return what runs a generator to its end.

    Args:
        job: whose it is; its flow is set.
        items: the generator.
        host: of plain code that has no loop of its own; None where it runs on one.
    """
    flow = job.flow = InlineFlow(job)
    job.runner.node.beside.flows[job.id] = flow
    if host is not None and not hasattr(items, "__anext__"):
        items = PlainItems(items, job, host)
    return send_all_async(items, flow, job.runner.loop.create_future)
