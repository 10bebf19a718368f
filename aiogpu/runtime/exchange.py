"""Values as workers have them: put, shared, asked for and returned over the socket."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from aiogpu.core.ids import TaskId
from aiogpu.errors import DeserializationError, ProtocolError
from aiogpu.runtime.child import Carrying, Child
from aiogpu.runtime.values import Value, find, known
from aiogpu.wire.messages import Failed, Message
from aiogpu.wire.sharing import (
    Discard,
    Fetch,
    Put,
    PutFailed,
    Returned,
    Share,
)

if TYPE_CHECKING:
    from aiogpu.runtime.call import Receiver
    from aiogpu.runtime.driver import Driver
    from aiogpu.runtime.slot import LiveWorker
    from aiogpu.runtime.store import Store

KINDS: Final = (Returned, Put, PutFailed, Share, Fetch, Discard)
"""The messages that concern values."""


class Exchange:
    """Hears what workers say of values."""

    def __init__(
        self,
        driver: Driver,
        store: Store,
        on_answered: Callable[[LiveWorker], None],
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
        }

    def on_message(self, worker: LiveWorker, message: Message) -> None:
        """Take in one of their messages."""
        self._ways[type(message)](worker, message)

    def _take_back(self, worker: LiveWorker, message: Returned) -> None:
        self._store.lending(worker).take_back(message.things, message.counts)

    def _value(self, worker: LiveWorker, identity: int) -> Value:
        """The value that a worker speaks of, which it may just have put."""
        self._store.announce(worker, identity)
        return known(identity)

    def _put(self, worker: LiveWorker, message: Put) -> None:
        self._value(worker, message.value).receive(message.payload)

    def _put_failed(self, worker: LiveWorker, message: PutFailed) -> None:
        self._value(worker, message.value).reject(Failed(0, *message[1:]))

    def _share(self, worker: LiveWorker, message: Share) -> None:
        value = self._value(worker, message.value)
        child = worker.children.get(message.child)
        if child is not None:
            value.task = child
            value.stop = partial(self._driver.cancel, child)
            _tell_as_well(self._driver.receiver_of(TaskId(child)), value, message.part)
            return
        actor, number = worker.asked.get(message.child, (0, 0))
        if number:
            value.stop = partial(self._driver.actors.cancel, actor, number)
            _tell_as_well(self._driver.actors.receiver_of(number), value, message.part)
        # Else it was told before, and the worker says so when it hears that.

    def _fetch(self, worker: LiveWorker, message: Fetch) -> None:
        receiver = Child(worker, message.child)
        try:
            value = known(message.value)
        except ProtocolError as error:
            receiver.fail(DeserializationError(str(error)))
            return
        if value.is_pending:
            worker.fetched[message.child] = value
        value.watch(partial(self._tell, worker, message.child, receiver))

    def _tell(
        self, worker: LiveWorker, child: int, receiver: Child, value: Value
    ) -> None:
        was_due = worker.fetched.pop(child, None) is not None
        value.tell(receiver)
        if was_due and child in worker.waits_for:
            self._on_answered(worker)

    def _discard(self, _worker: LiveWorker, message: Discard) -> None:
        value = find(message.value)
        if value is not None and value.stop is not None:
            value.stop()


def _tell_as_well(receiver: Receiver | None, value: Value, part: int) -> None:
    while isinstance(receiver, Carrying):
        receiver = receiver.receiver
    if isinstance(receiver, Child):
        receiver.values = [*(receiver.values or ()), (value, part)]
