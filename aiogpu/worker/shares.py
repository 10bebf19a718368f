"""Values that this worker gives to others: what it puts, and its children's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from aiogpu.errors import TaskCancelledError
from aiogpu.wire.failure import RAISED, pack_failure
from aiogpu.wire.messages import ChildDone, ChildFailed, Message
from aiogpu.wire.sharing import Put, PutFailed, Share
from aiogpu.worker.context import current

if TYPE_CHECKING:
    from aiogpu.worker.channel import Channel
    from aiogpu.worker.loans import Loan

OWN_FRAMES: Final = "/aiogpu/"
"""Marks frames that a user's traceback leaves out."""
NUMBERS: Final = 32
"""Bits of an id below those of the worker's, so that no two workers give the same."""


class Shareable(Protocol):
    """The handle of a child, as it is given to others; see `engines.family`."""

    @property
    def task_name(self) -> str:
        """Name of the task."""
        ...

    @property
    def child(self) -> int:
        """Its number among the children."""
        ...

    @property
    def raw(self) -> bytes | None:
        """The value pickled, if it is there."""
        ...

    @property
    def error(self) -> BaseException | None:
        """Why there will be no result, None if there is one or may be."""
        ...

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        ...


class Shares:
    """See above.

    Attributes:
        due: the children that were shared before their answer came, and as what.
    """

    def __init__(
        self,
        channel: Channel,
        read: Callable[[], object],
        new_number: Callable[[], int],
    ) -> None:
        self.due: dict[int, int] = {}
        self._channel = channel
        self._read = read
        self._new_number = new_number

    def _new_id(self) -> int:
        return -((current.worker << NUMBERS) + self._new_number())

    def put(self, payload: bytes) -> Loan:
        """Have a value kept; this process holds it."""
        return self._lent(Put(self._new_id(), payload))

    def share(self, handle: Shareable) -> Loan:
        """What others refer to who are given a handle of a child; see `Family`."""
        if _is_due(handle):
            # Its answer may have come, and the driver keeps none that it has told.
            self._read()
        identity = self._new_id()
        if handle.raw is not None:
            return self._lent(Put(identity, handle.raw))
        error = handle.error
        if handle.cancelled():
            error = TaskCancelledError(f"{handle.task_name} was cancelled.")
        if error is not None:
            failed = pack_failure(0, RAISED, error, OWN_FRAMES)
            return self._lent(PutFailed(identity, *failed[1:]))
        self.due[handle.child] = identity
        return self._lent(Share(identity, handle.child))

    def _lent(self, message: Put | PutFailed | Share) -> Loan:
        assert current.loans is not None, self
        loan = current.loans.own(message.value)
        self._channel.send(message)
        return loan

    def pass_on(self, message: Message) -> None:
        """Tell the driver the answer of a child that was shared while it was due.

        It may have told it before it heard that; then nobody else has it.
        """
        if not isinstance(message, ChildDone | ChildFailed):
            return
        identity = self.due.pop(message.child, None)
        if identity is None:
            return
        if isinstance(message, ChildDone):
            self._channel.send(Put(identity, message.payload))
        else:
            self._channel.send(PutFailed(identity, *message[1:]))


def _is_due(handle: Shareable) -> bool:
    return handle.raw is None and handle.error is None and not handle.cancelled()
