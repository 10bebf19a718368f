"""Values: results, and what was put, as this process keeps them for others.

Whoever refers to one keeps it alive: a handle, a task that waits for it, a payload that
holds a handle to it, a worker that was lent one. With the last of these it is freed.
"""

from __future__ import annotations

import logging
from _thread import _local
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from aiogpu.errors import ProtocolError, SerializationError
from aiogpu.runtime.pending_tasks import settle
from aiogpu.serialization.payload import Payload
from aiogpu.wire.codec import LARGEST_PAYLOAD
from aiogpu.wire.messages import FIRST_VALUE

if TYPE_CHECKING:
    from aiogpu.client.interface import Receiver
    from aiogpu.wire.messages import Failed


_log: Final = logging.getLogger(__name__)


_ids: Final = count(FIRST_VALUE)


_known: Final[WeakValueDictionary[int, Value]] = WeakValueDictionary()


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
    """A value that is there, or still to come; also the receiver of its coming.

    Attributes:
        id: by which others ask for it; of those that workers put, below zero.
        name: of the task whose result it is, for messages.
        task: that task, 0 for none.
        outcome: the value pickled, or why it will never be there; None until then.
        stop: stops who makes it, None if nobody does.
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
        self.outcome: bytes | Failed | Exception | None = None
        self.stop: Callable[[], object] | None = None
        self._watchers: list[Callable[[Value], object]] = []
        _known[self.id] = self

    def __repr__(self) -> str:
        state = (
            "pending" if self.is_pending else "failed" if self.has_failed else "here"
        )
        return f"<Value {self.id} of {self.name}, {state}>"

    @property
    def payload(self) -> bytes | None:
        """The value pickled, None if it is not there."""
        return self.outcome if isinstance(self.outcome, bytes) else None

    @property
    def has_failed(self) -> bool:
        """True if it will never be there."""
        return not (self.is_pending or isinstance(self.outcome, bytes))

    @property
    def is_pending(self) -> bool:
        """True if it is still to come."""
        return self.outcome is None

    def watch(self, call: Callable[[Value], object]) -> None:
        """Call with this value when it has come or failed; now, if it has.

        If it settles while another watcher runs, the call follows that watcher.
        """
        if self.is_pending:
            self._watchers.append(call)
        else:
            call(self)

    def tell(self, receiver: Receiver) -> None:
        """Tell someone how it has come out; it is not pending."""
        assert self.outcome is not None, self
        settle(receiver, self.outcome)

    def receive(self, outcome: bytes | Failed | Exception) -> None:
        """It has come, or will not; what comes later changes nothing."""
        if self.outcome is not None:
            return
        self.outcome, self.stop = outcome, None
        watchers, self._watchers = self._watchers, []
        if watchers:
            _watchers.call(self, watchers)

    reject = fail = receive


def find(identity: int) -> Value | None:
    """The value of that id, if somebody has it."""
    return _known.get(identity)


def known(identity: int) -> Value:
    """The value of that id.

    Raises:
        ProtocolError: nobody has it any more.
    """
    value = _known.get(identity)
    if value is None:
        raise ProtocolError(f"nobody has the value {identity} any more")
    return value


def unfinished_in(payload: bytes) -> Iterator[int]:
    """The unfinished tasks to whose results a payload holds handles."""
    if type(payload) is not Payload:
        return
    for thing in payload.holds:
        if isinstance(thing, Value) and thing.is_pending and thing.task:
            yield thing.task
    for part in payload.parts:
        yield from unfinished_in(part)


def is_complete(payload: bytes) -> bool:
    """Return whether all arguments are there, and no more than a call carries."""
    if type(payload) is not Payload:
        return True
    if any(value.is_pending or value.has_failed for value in payload.needs):
        return False
    return size_of(payload) <= LARGEST_PAYLOAD


def size_of(payload: Payload) -> int:
    """Bytes of the arguments that are there, as far as they are in no segment."""
    return len(payload) + sum(len(value.payload or b"") for value in payload.needs)


def oversized(payload: bytes) -> Value | None:
    """A value that has failed, if the arguments are more than a call carries."""
    if type(payload) is not Payload or (size := size_of(payload)) <= LARGEST_PAYLOAD:
        return None
    value = Value("its arguments")
    value.fail(
        SerializationError(
            f"the values that are arguments of one call have {size} bytes in all; a "
            f"call carries {LARGEST_PAYLOAD}, beside what lies in shared memory. Give "
            f"it fewer, or have another task gather them."
        )
    )
    return value


def await_arguments(payload: Payload, then: Callable[[Value | None], object]) -> None:
    """Call back once, when all values that a call needs are there.

    Args:
        payload: the arguments.
        then: gets the value that has failed, as soon as one has; None if all are there.
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
