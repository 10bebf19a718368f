"""Who is told of a failure by the very exception, with the frames that it has here."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiogpu.client.interface import Receiver
    from aiogpu.wire.messages import Failed


class Raising:
    """A receiver of an answer that is an exception of this process."""

    __slots__ = ("_error", "_receiver")

    def __init__(self, receiver: Receiver, error: Exception) -> None:
        self._receiver = receiver
        self._error = error

    def receive(self, payload: bytes) -> None:
        """Pass on a result."""
        self._receiver.receive(payload)

    def reject(self, _failed: Failed) -> None:
        """Give the exception in place of its description."""
        self._receiver.fail(self._error)

    def fail(self, error: Exception) -> None:
        """Pass on an error."""
        self._receiver.fail(error)
