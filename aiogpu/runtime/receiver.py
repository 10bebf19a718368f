"""Who waits for the end of a task, or for what it yields. Light to import."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, cast

from aiogpu.errors import AiogpuError, InternalError

if TYPE_CHECKING:
    from aiogpu.wire.messages import Failed

_log: Final = logging.getLogger(__name__)


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


def internal_error(doing: str, error: Exception) -> AiogpuError:
    """The error to tell where aiogpu itself has failed; its cause is what was raised.

    An error that says already whose fault it is stays as it is.
    """
    if isinstance(error, AiogpuError) and not isinstance(error, InternalError):
        return error
    told = InternalError(
        f"aiogpu failed as it {doing}: {type(error).__name__}: {error}. This is a bug "
        f"in aiogpu, not in your program. Please report it, with the traceback that "
        f"the node has logged."
    )
    told.__cause__ = error
    return told


def tell_safely(receiver: Receiver, error: Exception) -> None:
    """Tell who waits an error; should that fail, an `InternalError` that says so."""
    try:
        receiver.fail(error)
    except Exception as fault:  # noqa: BLE001 - it is told to who waits
        tell_fault(receiver, fault)


def tell_fault(receiver: Receiver, fault: Exception) -> None:
    """Tell who waits that aiogpu has failed to pass on how the task has ended."""
    _log.error("! failed to tell %r", receiver, exc_info=fault)
    try:
        receiver.fail(internal_error("passed on the end of a task", fault))
    except Exception:  # noqa: BLE001 - there is nobody left to be told
        _log.exception("! nobody was told")
