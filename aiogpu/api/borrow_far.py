"""Handles that have come to a worker: asked for their value when it is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiogpu.api.blocking_handle import BlockingHandle, Borrowed
from aiogpu.engines import nested
from aiogpu.engines.family import is_loop_running

if TYPE_CHECKING:
    from aiogpu.worker.objects import Loan


def borrow_far(loan: Loan, name: str) -> Any:
    """The kind of handle that fits, of a value that this worker was lent.

    Args:
        loan: of the value; it lasts as long as the handle.
        name: of its task.
    """
    if is_loop_running():
        import asyncio

        from aiogpu.api.nested import BorrowedHandle, session_of_task

        link = session_of_task(asyncio.get_running_loop()).link
        return BorrowedHandle(name, link, loan)
    handle: BlockingHandle[Any] = BlockingHandle(name, nested.family())
    handle.owner, handle.shared = Borrowed(loan), loan
    return handle
