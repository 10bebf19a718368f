"""Who waits for the end of a task, or for what it yields. Light to import."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, cast

if TYPE_CHECKING:
    from aiogpu.wire.messages import Failed


class Receiver(Protocol):
    """Who waits for a task's end. One of the three is called, at most once."""

    def receive(self, payload: bytes) -> None:
        """Take the pickled result."""
        ...

    def reject(self, failed: Failed) -> None:
        """Take what the worker says of its failure in place of a result."""
        ...

    def fail(self, error: Exception) -> None:
        """Take the error in place of a result."""
        ...


class ItemReceiver(Receiver, Protocol):
    """Who waits for a stream: items come first, then one of the three is called."""

    def receive_items(self, payloads: tuple[bytes, ...]) -> None:
        """Take pickled items, in order."""
        ...


Delay = Callable[[Receiver], Receiver]
"""Gives the receiver that is told later in place of one."""
EACH: Final = -1
"""Stands for all tasks and calls of a worker, where these are to be delayed."""


def pass_on(receiver: Receiver | None, payloads: tuple[bytes, ...]) -> None:
    """Give items to whom they are for; None, if nobody wants them any more."""
    if receiver is not None:
        cast("ItemReceiver", receiver).receive_items(payloads)
