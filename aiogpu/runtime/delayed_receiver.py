"""Receivers that are told once the lines that their task has printed are out.

A terminal may block for ever. The core and other processes hear of an answer at once,
so that what its task held is free; the program's own handle waits for the lines.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from aiogpu.runtime.actor import Actor
from aiogpu.runtime.child import Carrying, Child
from aiogpu.runtime.receiver import ItemReceiver

if TYPE_CHECKING:
    from aiogpu.runtime.console import Console
    from aiogpu.runtime.receiver import Receiver
    from aiogpu.wire.messages import Failed


class DelayedReceiver:
    """Tells another receiver after a line of the console's, in the order of calls.

    Attributes:
        number: of that line.
    """

    __slots__ = ("_console", "_receiver", "number")

    def __init__(self, receiver: Receiver, console: Console, number: int) -> None:
        self.number = number
        self._receiver = receiver
        self._console = console

    def __repr__(self) -> str:
        return f"<DelayedReceiver {self._receiver!r} after line {self.number}>"

    def _delay(self, tell: Callable[..., None], *told: Any) -> None:
        self._console.after(self.number, partial(tell, *told))

    def receive(self, payload: bytes) -> None:
        """Take the pickled result."""
        self._delay(self._receiver.receive, payload)

    def reject(self, failed: Failed) -> None:
        """Take what the worker says of its failure in place of a result."""
        self._delay(self._receiver.reject, failed)

    def fail(self, error: Exception) -> None:
        """Take the error in place of a result."""
        self._delay(self._receiver.fail, error)

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Take pickled items, in order."""
        self._delay(cast("ItemReceiver", self._receiver).receive_items, payloads)


def delayed(receiver: Receiver, console: Console, number: int) -> Receiver:
    """The receiver to be told after line `number`; others' are told at once."""
    if isinstance(receiver, Child | Carrying | Actor):
        return receiver
    if isinstance(receiver, DelayedReceiver):
        receiver.number = number
        return receiver
    return DelayedReceiver(receiver, console, number)
