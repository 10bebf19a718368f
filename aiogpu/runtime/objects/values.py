"""Values: results of tasks and arguments of `put`, kept in this process.

A value lives as long as it has references: a handle, a task that waits for the value, a
payload that contains a handle, or a worker that has borrowed the value.
"""

from __future__ import annotations

import logging
from _thread import _local
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from aiogpu.errors import SerializationError
from aiogpu.runtime.pending_tasks import settle
from aiogpu.serialization.payload import Payload
from aiogpu.wire.messages import FIRST_VALUE, LARGEST_PAYLOAD

if TYPE_CHECKING:
    from aiogpu.client.interface import Outcome, Receiver


_log: Final = logging.getLogger(__name__)


_ids: Final = count(FIRST_VALUE)


_known: Final[WeakValueDictionary[int, Value]] = WeakValueDictionary()
"""The values with ids of this process, which are unique across its nodes."""


class _Watchers(_local):
    """The queue of watchers of settled values that have yet to be called.

    One queue per thread. A watcher often settles the next value: a task fails because
    its argument has failed, and so on. The queue keeps the stack flat for a chain of
    any length.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[[Value], object], Value]] = deque()
        self._is_calling = False

    def call(self, value: Value, watchers: list[Callable[[Value], object]]) -> None:
        """Call watchers with a value, after the watchers that are queued."""
        queue = self._queue
        queue.extend((watcher, value) for watcher in watchers)
        if self._is_calling:
            return
        self._is_calling = True
        interrupt: BaseException | None = None
        while queue:
            watcher, settled = queue.popleft()
            try:
                watcher(settled)
            except Exception:  # noqa: BLE001 - the other watchers must be called
                _log.exception("! a watcher of %r failed", settled)
            except BaseException as error:  # noqa: BLE001 - raised after the loop
                interrupt = error
        self._is_calling = False
        if interrupt is not None:
            raise interrupt


_watchers: Final = _Watchers()


class Value:
    """A pending or settled value; also the receiver of its outcome.

    Attributes:
        id: the id by which workers request the value; negative if a worker created it.
        name: the name of the task that computes the value, for messages.
        task: the id of that task, 0 for none.
        outcome: the pickled value or the error; None while pending.
        stop: stops the task or call that computes the value, None if there is none.
    """

    __slots__ = (
        "__weakref__",
        "_watchers",
        "id",
        "name",
        "outcome",
        "stop",
        "task",
    )

    def __init__(self, name: str, task: int = 0, identity: int = 0) -> None:
        self.id = identity or next(_ids)
        self.name = name
        self.task = task
        self.outcome: Outcome | None = None
        self.stop: Callable[[], object] | None = None
        self._watchers: list[Callable[[Value], object]] = []
        if not identity:
            _known[self.id] = self

    def __repr__(self) -> str:
        state = (
            "pending" if self.is_pending else "failed" if self.has_failed else "here"
        )
        return f"<Value {self.id} of {self.name}, {state}>"

    @property
    def payload(self) -> bytes | None:
        """The pickled value; None if pending or failed."""
        return self.outcome if isinstance(self.outcome, bytes) else None

    @property
    def has_failed(self) -> bool:
        """True if the outcome is an error."""
        return not (self.is_pending or isinstance(self.outcome, bytes))

    @property
    def is_pending(self) -> bool:
        """True if there is no outcome yet."""
        return self.outcome is None

    def under_own_id(self) -> Value:
        """Return a value with an id of this process and the same outcome.

        Workers of two nodes in one process may give their values the same id.
        """
        if self.id > 0:
            return self
        value = Value(self.name, self.task)
        value.stop = self._stop  # also keeps `self` alive until it settles
        self.watch(lambda settled: settled.pass_to(value))
        return value

    def _stop(self) -> None:
        if self.stop is not None:
            self.stop()

    def watch(self, call: Callable[[Value], object]) -> None:
        """Call a function with this value once it is settled; at once if it is.

        If the value settles while another watcher runs, the call follows that watcher.
        """
        if self.is_pending:
            self._watchers.append(call)
        else:
            call(self)

    def pass_to(self, receiver: Receiver) -> None:
        """Settle a receiver with the outcome of this value, which is not pending."""
        assert self.outcome is not None, self
        settle(receiver, self.outcome)

    def settle(self, outcome: Outcome) -> None:
        """Settle the value; later outcomes are ignored."""
        if self.outcome is not None:
            return
        self.outcome, self.stop = outcome, None
        watchers, self._watchers = self._watchers, []
        if watchers:
            _watchers.call(self, watchers)


def find(identity: int) -> Value | None:
    """Return the value with an id of this process; None if it is not in use."""
    return _known.get(identity)


def unfinished_in(payload: bytes) -> Iterator[int]:
    """Yield the unfinished tasks to whose results a payload contains handles."""
    if type(payload) is not Payload:
        return
    for thing in payload.holds:
        if isinstance(thing, Value) and thing.is_pending and thing.task:
            yield thing.task
    for part in payload.parts:
        yield from unfinished_in(part)


def is_complete(payload: bytes) -> bool:
    """Return True if all arguments are available and fit into one call."""
    if type(payload) is not Payload:
        return True
    if any(value.is_pending or value.has_failed for value in payload.needs):
        return False
    return size_of(payload) <= LARGEST_PAYLOAD


def size_of(payload: Payload) -> int:
    """Return the bytes of the available arguments outside of shared memory."""
    return len(payload) + sum(len(value.payload or b"") for value in payload.needs)


def oversized(payload: bytes) -> Value | None:
    """Return a failed value if the arguments do not fit into one call, else None."""
    if type(payload) is not Payload or (size := size_of(payload)) <= LARGEST_PAYLOAD:
        return None
    value = Value("its arguments")
    value.settle(
        SerializationError(
            f"the values that are arguments of one call have {size} bytes in total; a "
            f"call can carry {LARGEST_PAYLOAD} outside of shared memory. Pass fewer "
            f"values, or let another task combine them."
        )
    )
    return value


def await_arguments(payload: Payload, then: Callable[[Value | None], object]) -> None:
    """Call back once, when all values in a payload are settled or one has failed.

    Args:
        payload: the arguments.
        then: called with the failed value, or None if all are available.
    """
    values = dict.fromkeys(payload.needs)
    missing = len(values)

    def note(value: Value) -> None:
        nonlocal missing
        missing -= 1
        if missing < 0:
            return  # another value has failed before
        if value.has_failed:
            missing = 0
            then(value)
        elif not missing:
            then(oversized(payload))

    for value in values:
        value.watch(note)
    if not values:
        then(oversized(payload))
