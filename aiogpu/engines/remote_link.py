"""What a program asks of a node that it has joined, beside its tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiogpu.errors import DeserializationError, ProtocolError
from aiogpu.serialization.exceptions import unpack_failure
from aiogpu.wire.messages import Discard, Fetch

if TYPE_CHECKING:
    from aiogpu.engines.remote import RemoteEngine
    from aiogpu.observe.why import Why
    from aiogpu.runtime.calls import Receiver
    from aiogpu.wire.messages import Failed


class RemoteLink:
    """The way to values that have come from elsewhere; see `base.ValueLink`."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """On which they are asked for."""
        return self._engine.loop

    @property
    def far(self) -> RemoteEngine:
        """Whose way it is; see `ValueLink.far`."""
        return self._engine

    def fetch(self, value: int, receiver: Receiver) -> int:
        """Ask for a value; gives the question's number."""
        number = self._engine.expect(receiver)
        self._engine.send(Fetch(0, number, value))
        return number

    def discard(self, value: int) -> None:
        """Nobody wants a value any more: stop whoever makes it."""
        self._engine.send(Discard(value))

    def cancel(self, task: int) -> None:
        """Nobody wants an answer any more."""
        self._engine.cancel(task)

    async def why(self, name: str, task: int) -> Why:
        """Say why a task waits."""
        from aiogpu.observe.why import Why

        return await self._engine.why(task) or Why(name, task, "ended")

    def begin_wait(self, task: int) -> None:
        """Nobody is told of it: a program holds nothing that it could lend."""

    def end_wait(self, task: int) -> None:
        """See `begin_wait`."""

    def settle(self, task: int) -> None:
        """See `begin_wait`."""


class Told:
    """Waits for what was asked of the node.

    Attributes:
        future: has the answer.
    """

    def __init__(
        self,
        future: asyncio.Future[Any],
        load: Callable[[bytes], Any] | None = None,
    ) -> None:
        """Wait.

        Args:
            future: gets the answer.
            load: reads it; as what a node says of itself unless given.
        """
        self.future = future
        self._load = load

    def receive(self, payload: bytes) -> None:
        """It has come."""
        load = self._load
        if load is None:
            # Late: who only runs tasks never needs it.
            from aiogpu.runtime.callers.status_codec import status_codec

            load = status_codec.load
        try:
            answer = load(payload)
        except ProtocolError as error:
            self.fail(
                DeserializationError(
                    f"what the node says of itself cannot be read: {error}. Use the "
                    f"same version of aiogpu in the program and the node."
                )
            )
            return
        if not self.future.done():
            self.future.set_result(answer)

    def reject(self, failed: Failed) -> None:
        """The node cannot tell."""
        self.fail(unpack_failure(failed, "the node"))

    def fail(self, error: Exception) -> None:
        """It will not come."""
        if not self.future.done():
            self.future.set_exception(error)
