"""Who waits for a worker's task or a client, and who is kept alive meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aiogpu.errors import ProtocolError
from aiogpu.runtime.call import pass_on
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.serialization.payload import result_part
from aiogpu.wire.codec import LARGE
from aiogpu.wire.messages import ChildDone, ChildFailed, ChildItems, Failed, Message

if TYPE_CHECKING:
    from aiogpu.runtime.call import Receiver
    from aiogpu.runtime.caller import Caller
    from aiogpu.runtime.values import Value


class Child:
    """Waits for a child in its parent's stead, and passes on how it ends.

    Attributes:
        caller: the parent's worker, or a client.
        number: of the child, by which the caller knows it.
        values: tell others the same, or that part of it; None for nobody.
    """

    __slots__ = ("caller", "number", "values")

    def __init__(self, caller: Caller, number: int) -> None:
        self.caller = caller
        self.values: list[tuple[Value, int]] | None = None
        self.number = number

    def receive(self, payload: bytes) -> None:
        """Pass on the result."""
        for value, part in self.values or ():
            try:
                value.receive(result_part(payload, part))
            except IndexError:
                value.fail(ProtocolError(f"a result has no part {part}"))
        caller, number = self.caller, self.number
        if type(payload) is not bytes:
            payload = caller.borrow(payload)
        # As `_send` does; of all that is told to programs, nearly all is this.
        caller.children.pop(number, None)
        if caller.fetched:
            caller.fetched.pop(number, None)
        if caller.peer is not None:
            caller.peer.post(ChildDone(number, payload))

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Pass on items of its stream."""
        if self.caller.peer is not None:
            lent = tuple(map(self.caller.borrow, payloads))
            self.caller.peer.post(ChildItems(self.number, lent))

    def reject(self, failed: Failed) -> None:
        """Pass on what the child's worker said of its failure."""
        for value, _ in self.values or ():
            value.reject(failed)
        if self.number in self.caller.bound:
            self.caller.bound = ()  # the failure ends the wait
        self._send(ChildFailed(self.number, *failed.why))

    def fail(self, error: Exception) -> None:
        """Pass on an error of aiogpu's own."""
        self.reject(pack_own_error(error))

    def _send(self, message: Message) -> None:
        caller = self.caller
        caller.children.pop(self.number, None)
        if caller.fetched:
            caller.fetched.pop(self.number, None)
        if caller.peer is not None:
            caller.peer.post(message)


def pass_on_all(
    receivers: Sequence[Receiver | None], payloads: Sequence[bytes]
) -> bool:
    """Pass on plain results that one caller waits for, all at once.

    Returns:
        False where each is to be told by itself; then nobody was.
    """
    first = receivers[0]
    if type(first) is not Child or first.caller.fetched:
        return False
    caller, answers = first.caller, []
    for child, payload in zip(receivers, payloads, strict=True):
        if type(child) is not Child or child.caller is not caller:
            return False
        if child.values is not None or len(payload) >= LARGE:
            return False
        answers.append(ChildDone(child.number, payload))
    for number, _ in answers:
        caller.children.pop(number, None)
    if caller.peer is not None:
        caller.peer.post_all(answers)
    return True


class Carrying:
    """Passes on an answer, and lets go of what the question has carried.

    It lets go as well when it is dropped, since nobody wants the answer any more.

    Attributes:
        receiver: who waits.
    """

    __slots__ = ("_let_go", "receiver")

    def __init__(self, receiver: Receiver, let_go: Callable[[], object]) -> None:
        self.receiver = receiver
        self._let_go: Callable[[], object] | None = let_go

    def receive(self, payload: bytes) -> None:
        """Pass on the result."""
        self.receiver.receive(payload)
        self._end()

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Pass on items; what was carried may still be asked for."""
        pass_on(self.receiver, payloads)

    def reject(self, failed: Failed) -> None:
        """Pass on the failure."""
        self.receiver.reject(failed)
        self._end()

    def fail(self, error: Exception) -> None:
        """Pass on the error."""
        self.receiver.fail(error)
        self._end()

    def _end(self) -> None:
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()

    __del__ = _end


class Then:
    """Calls back, whatever the answer is."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def receive(self, _payload: bytes) -> None:
        """It came."""
        self._call()

    def reject(self, _failed: Failed) -> None:
        """It failed."""
        self._call()

    def fail(self, _error: Exception) -> None:
        """It will not come."""
        self._call()
