"""Values: results and what was `put`, as this process keeps them for others.

Each reference keeps a value alive: a handle, a task that waits for it, a payload that
contains a handle to it, a worker that was lent it. The last one frees it.
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
"""The values to which this process has given their ids, which no two nodes share."""


class _Watchers(_local):
    """The watchers of settled values that have yet to be called, in order.

    One queue per thread. A watcher often settles the next value: a task fails because
    its argument has failed, and so on. The queue keeps a chain of any length at the
    same depth of the stack.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[Callable[[Value], object], Value]] = deque()
        self._is_calling = False

    def call(self, value: Value, watchers: list[Callable[[Value], object]]) -> None:
        """Call watchers with a value, after those that were queued before."""
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
            except Exception:  # noqa: BLE001 - the others wait as well
                _log.exception("! a watcher of %r failed", settled)
            except BaseException as error:  # noqa: BLE001 - raised when all are told
                interrupt = error
        self._is_calling = False
        if interrupt is not None:
            raise interrupt


_watchers: Final = _Watchers()


class Value:
    """A value that exists or is still to come; also the receiver of its outcome.

    Attributes:
        id: the id by which others ask for it; negative if a worker created it.
        name: name of the task whose result it is, for messages.
        task: id of that task, 0 for none.
        outcome: the pickled value, or why there will be none; None while it is pending.
        stop: stops the task or call that makes it, None if there is none.
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
        """The pickled value, None if there is none."""
        return self.outcome if isinstance(self.outcome, bytes) else None

    @property
    def has_failed(self) -> bool:
        """True if there will never be a value."""
        return not (self.is_pending or isinstance(self.outcome, bytes))

    @property
    def is_pending(self) -> bool:
        """True if there is no outcome yet."""
        return self.outcome is None

    def under_own_id(self) -> Value:
        """Return a value with an id of this process that settles as this one does.

        Workers of two nodes in one process may give their values the same id.
        """
        if self.id > 0:
            return self
        value = Value(self.name, self.task)
        value.stop = self._stop  # it also keeps this value alive until it settles
        self.watch(lambda settled: settled.tell(value))
        return value

    def _stop(self) -> None:
        if self.stop is not None:
            self.stop()

    def watch(self, call: Callable[[Value], object]) -> None:
        """Call a function with this value once it is settled; now, if it is.

        If it settles while another watcher runs, the call follows that watcher.
        """
        if self.is_pending:
            self._watchers.append(call)
        else:
            call(self)

    def tell(self, receiver: Receiver) -> None:
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
    """Return the value to which this process gave an id; None if it is not in use."""
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
    """Return whether all arguments are there and fit into one call."""
    if type(payload) is not Payload:
        return True
    if any(value.is_pending or value.has_failed for value in payload.needs):
        return False
    return size_of(payload) <= LARGEST_PAYLOAD


def size_of(payload: Payload) -> int:
    """Return the bytes of the arguments that are there and in no segment."""
    return len(payload) + sum(len(value.payload or b"") for value in payload.needs)


def oversized(payload: bytes) -> Value | None:
    """Return a failed value if the arguments do not fit into one call, else None."""
    if type(payload) is not Payload or (size := size_of(payload)) <= LARGEST_PAYLOAD:
        return None
    value = Value("its arguments")
    value.settle(
        SerializationError(
            f"the values that are arguments of one call have {size} bytes in all; a "
            f"call carries {LARGEST_PAYLOAD}, beside what lies in shared memory. Give "
            f"it fewer, or have another task gather them."
        )
    )
    return value


def await_arguments(payload: Payload, then: Callable[[Value | None], object]) -> None:
    """Call back once, when all values that a call needs are there or one has failed.

    Args:
        payload: the arguments.
        then: called with the value that has failed, or None if all are there.
    """
    values = dict.fromkeys(payload.needs)
    missing = len(values)

    def note(value: Value) -> None:
        nonlocal missing
        missing -= 1
        if missing < 0:
            return  # another one has failed
        if value.has_failed:
            missing = 0
            then(value)
        elif not missing:
            then(oversized(payload))

    for value in values:
        value.watch(note)
    if not values:
        then(oversized(payload))
