"""Handles that have come from elsewhere, and what handles stand for that go there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiogpu.api.blocking import handle_for
from aiogpu.api.blocking_handle import BlockingHandle, Borrowed
from aiogpu.client.current import is_loop_running, services
from aiogpu.runtime.objects.values import Value, known

if TYPE_CHECKING:
    from aiogpu.client.interface import Client, ValueStore
    from aiogpu.observe.why import Why
    from aiogpu.serialization.references import Reference


def borrow(identity: int, name: str) -> Any:
    """The handle that was pickled, in the process that it has come to.

    Args:
        identity: of the value that it stands for.
        name: of its task.
    """
    client, far = _caller()
    if far is not None:
        return _far_handle(client, far, far.loans.loan(identity), name)
    value = known(identity)
    handle = _near_handle(client, value, name)
    value.watch(lambda settled: settled.tell(handle))
    return handle


def put_here(payload: bytes, name: str = "put") -> Any:
    """A handle of a value that is there.

    Args:
        payload: the value pickled.
        name: what the handle is called.
    """
    client, far = _caller("aiogpu.put()")
    if far is not None:
        handle = _far_handle(client, far, far.shares.put(payload), name)
        if isinstance(handle, BlockingHandle):
            handle.receive(payload)
        else:
            handle.settle_with(payload)
        return handle
    value = Value(name)
    value.receive(payload)
    handle = _near_handle(client, value, name)
    handle.receive(payload)
    return handle


def _caller(what: str = ".remote()") -> tuple[Client | None, ValueStore | None]:
    """The client of the task whose code asks, None for a program; and who knows values.

    The latter is None where all values are this process's own.
    """
    client: Client | None = services.client
    if client is None:
        # Late: a worker has no session.
        from aiogpu.api.submission import host_beside_loop, session_of_caller

        client = host_beside_loop()
        if client is None:
            return None, session_of_caller(what).far
    return client, client.far


def _far_handle(
    client: Client | None, far: ValueStore, loan: Reference, name: str
) -> Any:
    """The kind of handle that fits, of a value that another process keeps."""
    if client is None or is_loop_running():
        import asyncio

        from aiogpu.api.child_handle import BorrowedHandle

        loop = asyncio.get_running_loop()
        waits = None if client is None else client.waits
        return BorrowedHandle(name, far, loan, loop, waits)
    handle: BlockingHandle[Any] = BlockingHandle(name, client)
    handle.owner, handle.shared = Borrowed(far, loan), loan
    return handle


def _near_handle(client: Client | None, value: Value, name: str) -> Any:
    """The kind of handle that fits, of a value of this process."""
    if client is None:
        from aiogpu.api.submission import session_of_caller

        handle = session_of_caller().new_handle(name, Lender(value))
    else:
        handle = handle_for(client, name, Lender(value))
    handle.stand_for(value)
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
