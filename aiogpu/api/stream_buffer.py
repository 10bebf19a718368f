"""The consumer's end of a stream: what has come and was not taken, and how it ends.

Engines know this, and not the `Stream` that is the user's, so that dropping the stream
stops the producer. Items may come in any thread; asyncio stays out, since plain
functions need none.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from aiogpu.api.blocking_handle import abandoned
from aiogpu.core.mailbox import Window
from aiogpu.serialization.exceptions import unpack_failure
from aiogpu.serialization.serializer import load_result

if TYPE_CHECKING:
    from aiogpu.wire.messages import Failed


class Source(Protocol):
    """Who has started the task and reaches its producer."""

    def demand(self, task: int, limit: int) -> None:
        """Let it yield so many items in all."""
        ...

    def cancel(self, task: int) -> None:
        """Stop it."""
        ...


class ItemBuffer:
    """See above.

    Attributes:
        task_name: name of the task.
        task_id: its number, by which its source knows it.
        window: how far it may be ahead.
        buffer: pickled items that were not taken.
        error: why no further item will come, if there is a reason.
        is_over: whether no further item will come.
        is_cancelled: whether it was stopped from this end.
    """

    __slots__ = (
        "__weakref__",
        "_source",
        "buffer",
        "error",
        "is_cancelled",
        "is_over",
        "task_id",
        "task_name",
        "window",
    )

    def __init__(self, task_name: str, source: Source, size: int) -> None:
        self.task_name = task_name
        self.task_id = 0
        self.window = Window(size)
        self.buffer: deque[bytes] = deque()
        self.error: Exception | None = None
        self.is_over = False
        self.is_cancelled = False
        self._source: Source | None = source

    def __repr__(self) -> str:
        return f"<ItemBuffer {self.task_name} {self.task_id} {len(self.buffer)} items>"

    @property
    def is_held(self) -> bool:
        """True if the producer waits for its consumer, as far as this end can know."""
        return not self.is_over and self.window.holds(len(self.buffer))

    def done(self) -> bool:
        """Return whether no further item will come."""
        return self.is_over

    def take(self) -> Any:
        """The oldest item; the producer may go on.

        Raises:
            DeserializationError: it cannot be unpickled in this process.
        """
        payload = self.buffer.popleft()
        limit = self.window.take()
        if limit and self._source is not None:
            self._source.demand(self.task_id, limit)
        return load_result(payload)

    def cancel(self) -> None:
        """Stop the producer, and drop what has come."""
        source = self._source
        if self.close() and source is not None:
            source.cancel(self.task_id)

    def close(self) -> bool:
        """Drop what has come, and take no more; False if nothing would come."""
        was_open = not self.is_over
        if was_open:
            self.is_cancelled = True
            self._end(None)
        self.buffer.clear()
        return was_open

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Take pickled items; called by the engine."""
        if not self.is_over:
            self.buffer.extend(payloads)
            self.wake()

    def receive(self, _payload: bytes) -> None:
        """Learn that all items have come; called by the engine."""
        self._end(None)

    def reject(self, failed: Failed) -> None:
        """Take what the worker says of its failure; called by the engine."""
        self._end(unpack_failure(failed, self.task_name))

    def fail(self, error: Exception) -> None:
        """Take why no further item will come; called by the engine."""
        self._end(error)

    def abandon(self) -> None:
        """Learn that the task has ended that has started it; called by the engine."""
        self._end(abandoned(self.task_name))

    def _end(self, error: Exception | None) -> None:
        if not self.is_over:
            self.error, self.is_over = error, True
            # An actor ends although items of its calls are kept.
            self._source = None
            self.wake()

    def wake(self) -> None:
        """Whoever waits shall look again."""
