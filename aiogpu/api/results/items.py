"""The consumer's end of a stream, and the base of streams.

Light to import: must not import asyncio.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from aiogpu.api.results.base import Reporting, StreamOwner
from aiogpu.core.mailbox import Window
from aiogpu.errors import MisuseError
from aiogpu.serialization.exceptions import error_of
from aiogpu.serialization.serializer import load_result

if TYPE_CHECKING:
    from aiogpu.client.interface import Outcome


class ItemBuffer(Reporting):
    """The consumer's end of a stream: the items to take, and its end.

    Engines refer to this buffer and not to the user's stream, so that dropping the
    stream stops the producer. Items may arrive in any thread.

    Attributes:
        task_name: name of the task.
        task_id: number of the task.
        window: how far the producer may be ahead.
        buffer: pickled items that were not taken.
        error: the error that ended the stream, until it is raised.
        is_over: True if no more items will come.
        is_cancelled: True if the consumer stopped the stream.
    """

    __slots__ = (
        "__weakref__",
        "_owner",
        "_reports",
        "buffer",
        "error",
        "is_cancelled",
        "is_over",
        "task_id",
        "task_name",
        "window",
    )

    def __init__(self, task_name: str, owner: StreamOwner, size: int) -> None:
        self.task_name = task_name
        self.task_id = 0
        self.window = Window(size)
        self.buffer: deque[bytes] = deque()
        self.error: Exception | None = None
        self.is_over = False
        self.is_cancelled = False
        self._owner: StreamOwner | None = owner

    def __repr__(self) -> str:
        return f"<ItemBuffer {self.task_name} {self.task_id} {len(self.buffer)} items>"

    def on_submitted(self, number: int) -> None:
        """Note the number of the submitted task."""
        self.task_id = number

    @property
    def is_held(self) -> bool:
        """True if the producer waits for its consumer, as far as the consumer knows."""
        return not self.is_over and self.window.holds(len(self.buffer))

    def done(self) -> bool:
        """Return whether no more items will come."""
        return self.is_over

    def take(self) -> Any:
        """Take the oldest item, and let the producer go on.

        Raises:
            DeserializationError: the item cannot be unpickled in this process.
        """
        payload = self.buffer.popleft()
        limit = self.window.take()
        if limit and self._owner is not None:
            self._owner.demand(self.task_id, limit)
        return load_result(payload)

    def raise_error(self) -> None:
        """Raise the error that ended the stream, if any, once."""
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                del error  # the error's traceback refers to this frame

    def cancel(self) -> None:
        """Stop the producer and drop the items that have arrived."""
        owner = self._owner
        if self.close() and owner is not None:
            owner.cancel(self.task_id)

    def close(self) -> bool:
        """Drop all items and accept no more; return False if the stream was over."""
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

    def settle(self, outcome: Outcome) -> None:
        """Note that the stream ended, maybe with an error; see `Receiver`."""
        if isinstance(outcome, bytes):
            self._end(None)
        else:
            self._end(error_of(outcome, self.task_name))

    def _end(self, error: Exception | None) -> None:
        if not self.is_over:
            self.error, self.is_over = error, True
            # Kept items must not keep an actor alive, which is an owner.
            self._owner = None
            self.wake()
            if hasattr(self, "_reports"):
                self._reports.wake()

    def wake(self) -> None:
        """Wake the consumer, if it waits."""


class StreamBase:
    """The common base of streams in plain tasks and on event loops.

    Attributes:
        items: the items to take.
        LOOP: the statement that iterates the stream.
    """

    LOOP: ClassVar[str]

    items: ItemBuffer

    @property
    def task_name(self) -> str:
        """Name of the task."""
        return self.items.task_name

    @property
    def task_id(self) -> int:
        """Number of the task."""
        return self.items.task_id

    def __bool__(self) -> NoReturn:
        raise MisuseError(
            f"a stream has no truth value; write `{self.LOOP} item in "
            f"{self.task_name}.remote(...)`."
        )

    def cancel(self) -> bool:
        """Stop the generator; return False if it had already ended."""
        if self.items.is_over:
            return False
        self.items.cancel()
        return True

    def __reduce__(self) -> NoReturn:
        raise MisuseError(
            f"the stream of {self.task_name} cannot be pickled; iterate it in this "
            f"process and pass its items on."
        )
