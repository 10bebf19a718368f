"""Handles that have come from elsewhere, and what handles stand for that go there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiogpu.api.blocking import handle_for
from aiogpu.api.blocking_handle import BlockingHandle, Borrowed
from aiogpu.errors import TaskCancelledError
from aiogpu.runtime.objects.values import Value, known
from aiogpu.worker.services import services

if TYPE_CHECKING:
    from aiogpu.engines.base import Far
    from aiogpu.engines.family import Host
    from aiogpu.observe.why import Why
    from aiogpu.serialization.references import Reference


def value_of(handle: Any) -> Value:
    """The value of a handle of this process, there or still to come.

    The handle tells the value when it learns of it itself.
    """
    value = Value(handle.task_name, handle.child)
    if handle.raw is not None:
        value.receive(handle.raw)
    elif handle.cancelled():
        value.fail(TaskCancelledError(f"{handle.task_name} was cancelled."))
    elif handle.error is not None:
        value.fail(handle.error)
    else:
        value.stop = handle.cancel
    return value


def borrow(identity: int, name: str) -> Any:
    """The handle that was pickled, in the process that it has come to.

    Args:
        identity: of the value that it stands for.
        name: of its task.
    """
    if services.loans is not None:
        from aiogpu.api.blocking_handle import borrow_far

        return borrow_far(services.loans.loan(identity), name)
    from aiogpu.api.submission import host_beside_loop, session_of_caller

    host = host_beside_loop()
    far = session_of_caller().far if host is None else host.far
    if far is not None:
        loan = far.loans.loan(identity)
        if host is not None:
            return _beside(host, far, loan, name)
        from aiogpu.api.nested import BorrowedHandle

        return BorrowedHandle(name, far.link, loan)
    value = known(identity)
    if host is None:
        handle = session_of_caller().new_handle(name, Lender(value))
    else:
        handle = handle_for(host, name, Lender(value))
    handle.stand_for(value)
    value.watch(lambda settled: settled.tell(handle))
    return handle


class Lender:
    """Owns handles that have come from elsewhere; see `api.handle.Owner`."""

    def __init__(self, value: Value) -> None:
        self._value = value

    def on_loop(self, name: str) -> Any:
        """The same handle for the event loop that runs."""
        return borrow(self._value.id, name)

    def cancel(self, _task: int) -> None:
        """Stop whoever makes the value."""
        if self._value.stop is not None:
            self._value.stop()

    async def why(self, name: str, task: int) -> Why:
        """Return why that one waits."""
        from aiogpu.api.session import current_session

        return await current_session().why(name, task)


class Beside(Borrowed):
    """Owns a handle of plain code whose values another process keeps."""

    def __init__(self, far: Far, loan: Reference) -> None:
        super().__init__(loan)
        self._far = far

    def on_loop(self, name: str) -> Any:
        """The same handle for the event loop that runs."""
        return borrow(self.loan.id, name)

    def fetch(self, handle: BlockingHandle[Any]) -> None:
        """Ask for the value."""
        handle.child = self._far.link.fetch(self.loan.id, handle)

    def cancel(self, _child: int) -> None:
        """Stop whoever makes the value."""
        self._far.link.discard(self.loan.id)


def _beside(host: Host, far: Far, loan: Reference, name: str) -> BlockingHandle[Any]:
    handle: BlockingHandle[Any] = BlockingHandle(name, host)
    handle.owner, handle.shared = Beside(far, loan), loan
    return handle


def put_here(payload: bytes, name: str = "put") -> Any:
    """A handle of a value that is there.

    Args:
        payload: the value pickled.
        name: what the handle is called.
    """
    from aiogpu.api.submission import host_beside_loop, session_of_caller

    host = host_beside_loop()
    far = session_of_caller("aiogpu.put()").far if host is None else host.far
    if far is not None:
        loan = far.shares.put(payload)
        borrowed: Any
        if host is not None:
            borrowed = _beside(host, far, loan, name)
            borrowed.receive(payload)
            return borrowed
        from aiogpu.api.nested import BorrowedHandle

        borrowed = BorrowedHandle(name, far.link, loan)
        borrowed.settle_with(payload)
        return borrowed
    value = Value(name)
    value.receive(payload)
    if host is None:
        handle = session_of_caller().new_handle(name, Lender(value))
    else:
        handle = handle_for(host, name, Lender(value))
    handle.stand_for(value)
    handle.receive(payload)
    return handle
