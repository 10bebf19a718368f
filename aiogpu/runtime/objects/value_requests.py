"""Values as workers have them: put, shared, asked for and returned over the socket."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.ids import TaskId
from aiogpu.errors import DeserializationError, ProtocolError, TaskCancelledError
from aiogpu.runtime.callers.caller import Carrying, Child
from aiogpu.runtime.objects.values import Value, find, known
from aiogpu.serialization.exceptions import RAISED, STOPPED, pack_failure
from aiogpu.wire.messages import (
    Discard,
    Failed,
    Fetch,
    Message,
    Put,
    PutFailed,
    Returned,
    Share,
    Sync,
    Synced,
)

if TYPE_CHECKING:
    from aiogpu.client.interface import Receiver
    from aiogpu.runtime.callers.caller import Caller
    from aiogpu.runtime.driver import Driver
    from aiogpu.runtime.objects.store import Store


KINDS: Final = (Returned, Put, PutFailed, Share, Fetch, Discard, Sync)
"""The messages that concern values."""


class ValueRequests:
    """Hears what workers say of values."""

    def __init__(
        self,
        driver: Driver,
        store: Store,
        on_answered: Callable[[Caller, int], None],
    ) -> None:
        self._on_answered = on_answered
        self._driver = driver
        self._store = store
        self._ways: Final[dict[type[Message], Callable[..., None]]] = {
            Returned: self._take_back,
            Put: self._put,
            PutFailed: self._put_failed,
            Share: self._share,
            Fetch: self._fetch,
            Discard: self._discard,
            Sync: self._sync,
        }

    def on_message(self, caller: Caller, message: Message) -> None:
        """Take in one of their messages."""
        self._ways[type(message)](caller, message)

    def _take_back(self, caller: Caller, message: Returned) -> None:
        self._store.take_back(caller, message.things, message.counts)

    def _value(self, caller: Caller, identity: int) -> Value:
        """The value that a worker speaks of, which it may just have put."""
        self._store.announce(caller, identity)
        return known(identity)

    def _put(self, caller: Caller, message: Put) -> None:
        self._value(caller, message.value).receive(message.payload)

    def _put_failed(self, caller: Caller, message: PutFailed) -> None:
        self._value(caller, message.value).reject(Failed(0, *message[1:]))

    def _share(self, caller: Caller, message: Share) -> None:
        value = self._value(caller, message.value)
        child = caller.children.get(message.child)
        if child is not None:
            value.task = child
            stop = partial(self._driver.cancel, child)
            value.stop = partial(self._stop, child, stop)
            _tell_as_well(self._driver.receiver_of(TaskId(child)), value, message.part)
            return
        actor, number = caller.asked.get(message.child, (0, 0))
        if number:
            stop = partial(self._driver.actors.cancel, actor, number)
            value.stop = partial(self._stop, number, stop)
            _tell_as_well(self._driver.actors.receiver_of(number), value, message.part)
        # Else the child has ended and its answer is on the way to the caller, which
        # sends the result as a `Put`. A worker does not end before: see `Sync`.

    def _stop(self, number: int, stop: Callable[[], object]) -> None:
        """Somebody else cancels what it was given; who has started it is told."""
        receiver = self._driver.receiver_of(TaskId(number))
        stop()
        if receiver is not None:
            error = TaskCancelledError("it was cancelled by who was given its handle.")
            failed = pack_failure(0, RAISED, error, "")
            receiver.reject(failed._replace(kind=STOPPED))

    def _fetch(self, caller: Caller, message: Fetch) -> None:
        receiver = Child(caller, message.child)
        try:
            value = known(message.value)
        except ProtocolError as error:
            receiver.fail(DeserializationError(str(error)))
            return
        if value.is_pending:
            caller.fetched[message.child] = value
        value.watch(partial(self._tell, caller, message.child, receiver))

    def _tell(self, caller: Caller, child: int, receiver: Child, value: Value) -> None:
        was_due = caller.fetched.pop(child, None) is not None
        value.tell(receiver)
        if was_due:
            self._on_answered(caller, child)

    def _discard(self, _worker: Caller, message: Discard) -> None:
        value = find(message.value)
        if value is not None and value.stop is not None:
            value.stop()

    def _sync(self, caller: Caller, _message: Sync) -> None:
        if caller.peer is not None:
            caller.peer.send_one(Synced())


def _tell_as_well(receiver: Receiver | None, value: Value, part: int) -> None:
    while isinstance(receiver, Carrying):
        receiver = receiver.receiver
    if isinstance(receiver, Child):
        receiver.values = [*(receiver.values or ()), (value, part)]
