"""The driver's record of a task; the core knows only its id.

A `FunctionSpec` is built once per function and options, a `Call` once per task. The
`Receiver` is whoever waits: the driver tells it exactly one thing, once. Light to
import.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import ItemReceiver, Outcome, Receiver
from aiogpu.errors import (
    AiogpuError,
    DeadlockError,
    InternalError,
    NodeClosedError,
    TaskCancelledError,
    TaskTimeoutError,
)
from aiogpu.wire.messages import Run

if TYPE_CHECKING:
    from aiogpu.core.model.request import TaskSpec
    from aiogpu.wire.messages import Done, Failed


_log: Final = logging.getLogger(__name__)


Delay = Callable[[Receiver], Receiver]
"""Gives the receiver that is told later in place of one."""


EACH: Final = -1
"""Stands for all tasks and calls of a worker, where these are to be delayed."""


def pass_on(receiver: Receiver | None, payloads: tuple[bytes, ...]) -> None:
    """Pass items to their receiver, if there is one."""
    if receiver is not None:
        cast("ItemReceiver", receiver).receive_items(payloads)


def pass_on_report(receiver: Receiver | None, lost: int, payload: bytes) -> None:
    """Pass on a report, `lost` before which are missing, where somebody can read it."""
    receive = getattr(receiver, "receive_report", None)  # `map` has none
    if receive is not None:
        receive(lost, payload)


def internal_error(doing: str, error: Exception) -> AiogpuError:
    """Return the error for a failure of aiogpu itself, with its cause.

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


def settle(receiver: Receiver, outcome: Outcome) -> None:
    """Tell who waits how it has ended; should that fail, an `InternalError`."""
    try:
        receiver.settle(outcome)
    except Exception as fault:  # noqa: BLE001 - it is told to who waits
        tell_fault(receiver, fault)


def tell_fault(receiver: Receiver, fault: Exception) -> None:
    """Tell who waits that aiogpu has failed to pass on how the task has ended."""
    _log.error("! failed to tell %r", receiver, exc_info=fault)
    try:
        receiver.settle(internal_error("passed on the end of a task", fault))
    except Exception:  # noqa: BLE001 - there is nobody left to be told
        _log.exception("! nobody was told")


def too_late(spec: TaskSpec, lapse: str) -> TaskTimeoutError:
    """Return the error of a task that has not ended within its `timeout`.

    Args:
        spec: of the task.
        lapse: how long it has waited, and how long it has run.
    """
    return TaskTimeoutError(
        f"{spec.name} did not end within its timeout of {spec.timeout:g} s after "
        f".remote(): {lapse}. It is being stopped. Give it more time, start fewer "
        f"tasks at once, or limit its run alone, by run_timeout=."
    )


def overrun(
    name: str, limit: float | None, lapse: str, what_next: str = "It is being stopped"
) -> TaskTimeoutError:
    """Return the error of a task or call that ran for longer than its `run_timeout`.

    Args:
        name: of the task or method.
        limit: the seconds.
        lapse: how long it has waited, and how long it has run.
        what_next: what becomes of its code.
    """
    return TaskTimeoutError(
        f"{name} did not end within its run_timeout of {limit:g} s: {lapse}. "
        f"{what_next}. Give it more time."
    )


@dataclass(slots=True, eq=False)
class Call:
    """One task: its arguments going out, its answer coming back.

    Attributes:
        receiver: None once it has been told how the task ended.
        client: the program that has submitted it.
        worker: id of the worker that it was sent to last.
        number: under which it was sent.
        answer: what that worker said.
        limit: of a stream, how many items it may yield in all.
        passed: how many have come.
    """

    func: FunctionSpec
    payload: bytes
    receiver: Receiver | None
    client: int = 0
    worker: int = 0
    number: int = 0
    answer: Done | Failed | None = None
    limit: int = 0
    passed: int = 0

    def run(self, task: int, is_last: bool, borrow: Callable[[bytes], bytes]) -> Run:
        """Return the message for the worker; `borrow` lends it the references."""
        func, payload = self.func, self.payload
        if type(payload) is not bytes:
            payload = borrow(payload)
        if not func.window:
            return Run(task, func.id, payload, is_last, self.number)
        limit = self.limit or func.window
        return Run(task, func.id, payload, is_last, self.number, limit, self.passed)

    def tell(self, error: Exception) -> None:
        """Fail the receiver, which gets nothing more."""
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            settle(receiver, error)

    def tell_deadlock(self, reason: str) -> None:
        """Tell who waits that the wait could never end."""
        self.tell(
            DeadlockError(
                f"{reason}. The wait could never end. Let the one that waits ask for "
                f"less, or end before it starts the other."
            )
        )

    def tell_disowned(self) -> None:
        """Tell who waits that the task ends with the one that has started it."""
        self.tell(
            TaskCancelledError(
                f"{self.func.spec.name} was stopped, since the task that had started "
                f"it has ended or is being stopped."
            )
        )

    def tell_closed(self) -> None:
        """Tell who waits that the node was shut down."""
        name = self.func.spec.name
        self.tell(NodeClosedError(f"the node was shut down before {name} had ended."))
