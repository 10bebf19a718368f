"""Calls of actors that wait for their arguments, in line with what is called after.

A caller's calls are begun in the order in which he made them. So behind one whose
arguments are not there yet the others of its caller wait as well; those of other
callers do not, for the argument may depend on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiogpu.wire.parcel import Parcel

if TYPE_CHECKING:
    from aiogpu.core.mailbox import CallId
    from aiogpu.runtime.values import Value


@dataclass(slots=True, eq=False)
class Held:
    """A call in line.

    Attributes:
        number: by which its caller knows it.
        missing: how many of its arguments are not there.
        failed: an argument that never will be, None without.
    """

    number: CallId
    missing: int = 0
    failed: Value | None = None


class Lines:
    """The lines of one actor's callers.

    Attributes:
        post: sends a call on its way; given its number.
        refuse: fails a call for an argument that has failed.
    """

    def __init__(
        self,
        post: Callable[[CallId], object],
        refuse: Callable[[CallId, Value], object],
    ) -> None:
        self._post = post
        self._refuse = refuse
        self._by_caller: dict[int, deque[Held]] = {}

    def __repr__(self) -> str:
        return f"<Lines of {len(self._by_caller)} callers>"

    def __bool__(self) -> bool:
        return bool(self._by_caller)

    def holds_back(self, caller: int, payload: bytes) -> bool:
        """Whether a call of that caller's with this payload has to wait."""
        return caller in self._by_caller or not is_complete(payload)

    def join(self, caller: int, number: CallId, payload: bytes) -> None:
        """Have a call wait in its caller's line."""
        held = Held(number)
        self._by_caller.setdefault(caller, deque()).append(held)
        if type(payload) is Parcel:
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
        line = self._by_caller.get(caller)
        while line and (not line[0].missing or line[0].failed):
            held = line.popleft()
            if held.failed is not None:
                self._refuse(held.number, held.failed)
            else:
                self._post(held.number)
        if line is not None and not line:
            self._by_caller.pop(caller, None)


def is_complete(payload: bytes) -> bool:
    """Whether all arguments are there."""
    if type(payload) is not Parcel:
        return True
    return not any(value.is_pending or value.has_failed for value in payload.needs)
