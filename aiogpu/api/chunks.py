"""Chunks of a `map`: how many items make one call, and what has come of it.

With `chunk="auto"` a call shall take about `TARGET` seconds, so that what it costs by
itself does not count. The first has one item, and as results tell what an item takes,
those that follow have more. What an item takes is its time in the worker, and on this
loop for pickling it and unpickling its result: so large items make small chunks. A
chunk that takes much longer than was expected ends early, and the rest of it is called
again. This file imports asyncio by way of the handles, so it is imported late.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, Literal, NamedTuple

from aiogpu.api.definition import Definition
from aiogpu.api.handle import Handle
from aiogpu.api.options import LARGEST_COUNT
from aiogpu.api.parameters import Parameters
from aiogpu.api.task import RemoteFunction
from aiogpu.errors import OptionError
from aiogpu.runtime.call import Function, new_function_id
from aiogpu.serialization.exceptions import RAISED, ChunkOutcome, unpack_failure
from aiogpu.serialization.serializer import dump_function
from aiogpu.wire.messages import Failed
from aiogpu.worker.chunk import Sent

TARGET: Final = 0.004
"""Seconds that a call shall take: a call costs up to 0.1 ms by itself."""
LONGEST: Final = 0.05
"""Seconds after which a call of an automatic size ends early."""
MOST: Final = 10_000
"""Items in a call of an automatic size."""
CALLS: Final = 256
"""Calls ahead where the user names no limit; see `map.DEFAULT_LIMIT`."""
SHARE: Final = 16
"""Calls of an automatic size that a named limit has room for, at least."""
FIRST: Final = 1
"""Items in the first call of an automatic size."""
GROWTH: Final = 4
"""How many times more items than those that were measured the next call may have."""

ChunkSize = int | Literal["auto"] | None
Start = Callable[[tuple[Any, ...]], Handle[Any]]


class Sizes:
    """How many items the next chunk has.

    Attributes:
        size: that number.
    """

    def __init__(self, most: int) -> None:
        self.size = FIRST
        self._most = most
        self._each: float | None = None

    def note(self, count: int, seconds: float) -> None:
        """So many items took so long."""
        each = seconds / count
        if self._each is None or each > self._each:
            # One that is slower is believed at once: a chunk must not be too long.
            self._each = each
        else:
            self._each += (each - self._each) / 4
        fitting = int(TARGET / max(self._each, TARGET / MOST))
        grown = max(self.size, GROWTH * count)
        self.size = max(1, min(fitting, grown, self._most))


class Opened(NamedTuple):
    """What has come of a call.

    Attributes:
        values: the results.
        error: to be raised after them.
        again: the call of the item after them, if it is tried again.
        rest: items that are to be called still, after that one.
    """

    values: list[Any]
    error: Exception | None = None
    again: Handle[Any] | None = None
    rest: tuple[Any, ...] = ()


class Packing:
    """Makes calls of items, and opens what they give.

    Attributes:
        partial: items that wait for others to go with.
    """

    def __init__(self, remote: Any, chunk: int | Literal["auto"], most: int) -> None:
        self.partial: list[Any] = []
        self._remote = remote
        self._fixed = None if chunk == "auto" else chunk
        self._sizes = Sizes(min(MOST, most))
        self._seconds = 0.0 if self._fixed else LONGEST
        self._sent: dict[Handle[Any], tuple[tuple[Any, ...], float]] = {}
        self._again: RemoteFunction[..., Any] | None = None

    @property
    def size(self) -> int:
        """How many items the next chunk has."""
        return self._fixed or self._sizes.size

    def send(self, items: tuple[Any, ...]) -> Handle[Any]:
        """Call with some items; raises what `.remote()` raises."""
        begun = perf_counter()
        handle: Handle[Any] = self._remote._remote_chunk((self._seconds, *items))
        self._sent[handle] = items, perf_counter() - begun
        return handle

    def open(self, handle: Handle[Any]) -> Opened:
        """Look at a call that has ended; raises its error if all of it has failed."""
        items, seconds = self._sent.pop(handle, ((), 0.0))
        begun = perf_counter()
        result = handle.result()
        if not items:
            return Opened([result])  # one that was tried again
        outcome = ChunkOutcome(*result)
        seconds += outcome.seconds + perf_counter() - begun
        done = len(outcome.values)
        self._sizes.note(done or 1, seconds)
        if outcome.failure is None:
            return Opened(outcome.values, rest=items[done:])
        failed = Failed(*outcome.failure)
        error = unpack_failure(failed, self._remote.__name__)
        if failed.kind != RAISED or not _is_retried(self._remote, error):
            return Opened(outcome.values, error)
        if self._again is None:
            self._again = _again(self._remote)
        return Opened(
            outcome.values,
            again=self._again.remote(items[done]),
            rest=items[done + 1 :],
        )

    def clear(self) -> None:
        """Forget all items."""
        self.partial.clear()
        self._sent.clear()


def _is_retried(remote: object, error: Exception) -> bool:
    """Whether its options want an item tried again after this error."""
    if not isinstance(remote, RemoteFunction) or not remote._options.max_retries:
        return False
    wanted = remote._options.retry_exceptions
    return wanted if isinstance(wanted, bool) else isinstance(error, wanted)


def _again(remote: RemoteFunction[..., Any]) -> RemoteFunction[..., Any]:
    """What an item is called by that has been tried once already."""
    options = remote._options
    left = max(options.max_retries - 1, -1)  # -1 is without end
    return RemoteFunction(remote._definition, options._replace(max_retries=left))


def in_chunks(remote: RemoteFunction[..., Any]) -> RemoteFunction[..., Any]:
    """The function, with its options, as it is called with chunks.

    Raises:
        SerializationError: with the path to what cannot be pickled.
    """
    base = remote._definition
    chunked = Definition(base.function)
    chunked._sent = Function(
        new_function_id(), dump_function(base.name, Sent(base.sent().payload))
    )
    chunked.parameters = Parameters(base.name, None)  # seconds, and any number of items
    return RemoteFunction(chunked, remote._options)


def check_chunk(chunk: object, limit: int | None) -> int | Literal["auto"] | None:
    """A chunk's size; None if each item is a call of its own.

    Raises:
        OptionError: it is ill-valued, or there is no room for it.
    """
    if chunk is None or chunk == "auto":
        return chunk
    if (
        isinstance(chunk, bool)
        or not isinstance(chunk, int)
        or not 1 <= chunk <= LARGEST_COUNT
    ):
        raise OptionError(
            f'chunk={chunk!r} must be a whole number of items, 1 or more, "auto", or '
            f"None for 1. The most is {LARGEST_COUNT:_}."
        )
    if limit is not None and limit < chunk:
        raise OptionError(
            f"limit={limit} has no room for a chunk of {chunk}: it counts items, not "
            f"calls. For 16 calls ahead say limit={16 * chunk}."
        )
    return chunk if chunk > 1 else None
