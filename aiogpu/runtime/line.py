"""Calls of actors that wait for their arguments, in line with what is called after.

A caller's calls are begun in the order in which he made them. So behind one whose
arguments are not there yet the others of its caller wait as well; those of other
callers do not, for the argument may depend on them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiogpu.errors import SerializationError
from aiogpu.runtime.values import Value
from aiogpu.serialization.payload import Payload
from aiogpu.wire.codec import LARGEST_PAYLOAD

if TYPE_CHECKING:
    from aiogpu.core.mailbox import CallId
    from aiogpu.runtime.actor import Actor


@dataclass(slots=True, eq=False)
class Held:
    """A call in line.

    Attributes:
        number: by which its caller knows it.
        payload: its arguments.
        missing: how many of its arguments are not there.
        failed: an argument that never will be, None without.
    """

    number: CallId
    payload: bytes
    missing: int = 0
    failed: Value | None = None


class Lines:
    """The lines of one actor's callers.

    Attributes:
        callers: by caller, his calls that wait.
    """

    def __init__(self, actor: Actor) -> None:
        self.callers: dict[int, deque[Held]] = {}
        self._actor = actor
        self._later: dict[CallId, CallId] = {}

    def __repr__(self) -> str:
        return f"<Lines of {len(self.callers)} callers>"

    def number_of(self, known_as: CallId) -> CallId:
        """The number of a call now, by that under which its caller knows it."""
        return self._later.get(known_as, known_as)

    def forget(self, known_as: CallId) -> None:
        """A call was answered that its caller knows under another number."""
        self._later.pop(known_as, None)

    def holds_back(self, caller: int, payload: bytes) -> bool:
        """Whether a call of that caller's with this payload has to wait."""
        return caller in self.callers or not is_complete(payload)

    def join(self, caller: int, number: CallId, payload: bytes) -> None:
        """Have a call wait in its caller's line."""
        held = Held(number, payload)
        self.callers.setdefault(caller, deque()).append(held)
        if type(payload) is Payload:
            values = dict.fromkeys(payload.needs)
            held.missing = len(values) + 1
            for value in values:
                value.watch(lambda value: self._note(caller, held, value))
            held.missing -= 1
        self._go_on(caller)

    def _note(self, caller: int, held: Held, value: Value) -> None:
        held.missing -= 1
        if value.has_failed:
            held.failed = held.failed or value
        self._go_on(caller)

    def _go_on(self, caller: int) -> None:
        line = self.callers.get(caller)
        while line and (not line[0].missing or line[0].failed):
            held = line.popleft()
            failed = held.failed or oversized(held.payload)
            if failed is not None:
                self._refuse(held.number, failed)
            else:
                self._post(held.number)
        if line is not None and not line:
            self.callers.pop(caller, None)

    def _post(self, number: CallId) -> None:
        """A call is on its way; its place is behind those that were sent."""
        calls = self._actor.calls
        call = calls.pop(number, None)
        if call is None:
            return  # it was cancelled, or the actor has died
        call.known_as = number
        later = self._later[number] = self._actor.new_number()
        calls[later] = call
        self._actor.post(later, call.mailbox)

    def _refuse(self, number: CallId, value: Value) -> None:
        """An argument of a call has failed; so it never runs."""
        call = self._actor.calls.pop(number, None)
        if call is not None and call.receiver is not None:
            value.tell(call.receiver)
            self._actor.look_if_idle()


def is_complete(payload: bytes) -> bool:
    """Whether all arguments are there, and no more than a call carries."""
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
