"""Values that this worker gives to others: what it puts, and its children's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from aiogpu.errors import TaskCancelledError
from aiogpu.serialization.exceptions import RAISED, pack_failure
from aiogpu.serialization.payload import result_part
from aiogpu.wire.messages import (
    NUMBER_BITS,
    ChildDone,
    ChildFailed,
    Message,
    Put,
    PutFailed,
    Share,
)
from aiogpu.worker.context import current

if TYPE_CHECKING:
    from aiogpu.wire.messages import Failed
    from aiogpu.worker.loan import Loan
    from aiogpu.worker.loans import Loans

OWN_FRAMES: Final = "/aiogpu/"
"""Marks frames that a user's traceback leaves out."""


class Sending(Protocol):
    """Says things to the node."""

    def send(self, message: Message) -> None:
        """Say one."""
        ...


class Receiver(Protocol):
    """Who waits for a child. One of the three is called, at most once."""

    def receive(self, payload: bytes) -> None:
        """Take the pickled result."""
        ...

    def reject(self, failed: Failed) -> None:
        """Take why there is none."""
        ...

    def abandon(self) -> None:
        """Learn that the task has ended first, and the child with it."""
        ...


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

    @property
    def part(self) -> int:
        """Which of several results of the child it is; -1 for all of it."""
        ...

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        ...


class _Due(NamedTuple):
    """A result that was shared before it came.

    Attributes:
        loan: of the value; it is needed until the answer was passed on.
        part: which of several results it is; -1 for all of it.
        name: of the task.
    """

    loan: Loan
    part: int
    name: str


class Shares:
    """See above.

    Attributes:
        due: what was shared before its answer came, by child.
    """

    def __init__(
        self,
        channel: Sending,
        read: Callable[[], object],
        new_number: Callable[[], int],
        loans: Loans | None = None,
        owner: int = 0,
    ) -> None:
        """Prepare.

        Args:
            channel: says it to the node.
            read: takes in what has come.
            new_number: gives one that was not given before.
            loans: what was lent to this process; None for what the worker has.
            owner: id of the client whose process this is; 0 in a worker.
        """
        self.due: dict[int, list[_Due]] = {}
        self._loans = loans
        self._owner = owner
        self._channel = channel
        self._read = read
        self._new_number = new_number

    def _new_id(self) -> int:
        owner = self._owner or current.worker
        return -((owner << NUMBER_BITS) + self._new_number())

    def put(self, payload: bytes) -> Loan:
        """Have a value kept; this process holds it."""
        return self._lent(Put(self._new_id(), payload))

    def share(self, handle: Shareable) -> Loan:
        """What others refer to who are given a handle of a child; see `Family`."""
        if _is_due(handle):
            return self._share_due(handle)
        identity = self._new_id()
        if handle.raw is not None:
            return self._lent(Put(identity, handle.raw))
        error = handle.error
        if handle.cancelled() or error is None:
            error = TaskCancelledError(f"{handle.task_name} was cancelled.")
        failed = pack_failure(0, RAISED, error, OWN_FRAMES)
        return self._lent(PutFailed(identity, *failed.why))

    def _share_due(self, handle: Shareable) -> Loan:
        """Share a result that the handle does not have yet.

        The answer may have come: the driver keeps no answer that it has sent. So it is
        read here, and `pass_on` sends it back as the value. The handle itself may learn
        of it later, in a turn of its loop.
        """
        loan = self._owned(self._new_id())
        due = _Due(loan, handle.part, handle.task_name)
        self.due.setdefault(handle.child, []).append(due)
        self._read()
        if due in self.due.get(handle.child, ()):
            self._channel.send(Share(loan.id, handle.child, handle.part))
        return loan

    def promise(self) -> Loan:
        """What others refer to before its task is started; said by `keep` or `fail`."""
        return self._owned(self._new_id())

    def keep(self, loan: Loan, handle: Shareable) -> None:
        """The task of what was promised is started: its result is that value."""
        self._channel.send(Share(loan.id, handle.child, handle.part))
        due = self.due.setdefault(handle.child, [])
        due.append(_Due(loan, handle.part, handle.task_name))

    def fail(self, loan: Loan, error: BaseException) -> None:
        """What was shared, or promised, will never be there."""
        failed = pack_failure(0, RAISED, error, OWN_FRAMES)
        self._channel.send(PutFailed(loan.id, *failed.why))

    def withdraw(self, child: int) -> None:
        """A child is cancelled: nobody else will say so of its result."""
        for due in self.due.pop(child, ()):
            self.fail(due.loan, TaskCancelledError(f"{due.name} was cancelled."))

    def drop(self, child: int, loan: object) -> None:
        """One of a child's several results is cancelled; the others may still come."""
        kept = [due for due in self.due.get(child, ()) if due.loan is not loan]
        for due in self.due.pop(child, ()):
            if due.loan is loan:
                self.fail(due.loan, TaskCancelledError(f"{due.name} was cancelled."))
        if kept:
            self.due[child] = kept

    def due_now(self) -> dict[int, tuple[_Due, ...]]:
        """A copy of `due`."""
        return {child: tuple(due) for child, due in self.due.items()}

    def forget(self, told: dict[int, tuple[_Due, ...]]) -> None:
        """The driver itself passes on these results when they come."""
        for child, over in told.items():
            # Another thread may have shared one of them again meanwhile.
            left = [due for due in self.due.pop(child, ()) if due not in over]
            if left:
                self.due[child] = left

    def _lent(self, message: Put | PutFailed | Share) -> Loan:
        loan = self._owned(message.value)
        self._channel.send(message)
        return loan

    def _owned(self, identity: int) -> Loan:
        loans = self._loans or current.loans
        assert loans is not None, self
        return loans.own(identity)

    def pass_on(self, message: Message) -> None:
        """Tell the driver the answer of a child that was shared while it was due.

        It may have told it before it heard that; then nobody else has it.
        """
        if not isinstance(message, ChildDone | ChildFailed):
            return
        for due in self.due.pop(message.child, ()):
            if isinstance(message, ChildFailed):
                self._channel.send(PutFailed(due.loan.id, *message[1:]))
            else:
                payload = result_part(message.payload, due.part)
                self._channel.send(Put(due.loan.id, payload))


def _is_due(handle: Shareable) -> bool:
    return handle.raw is None and handle.error is None and not handle.cancelled()
