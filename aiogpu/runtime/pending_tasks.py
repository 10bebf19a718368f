"""The driver's record of a task; the core knows only its id.

A `FunctionSpec` is built once per function and options, a `Call` once per task. The
`Receiver` stands for the waiting code: the driver settles it exactly once. Light to
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
"""Wraps a receiver in a receiver that is settled later."""


EACH: Final = -1
"""As the argument of `delay`: all tasks and calls of a worker."""


def pass_on(receiver: Receiver | None, payloads: tuple[bytes, ...]) -> None:
    """Pass the items of a stream to the receiver, if there is one."""
    if receiver is not None:
        cast("ItemReceiver", receiver).receive_items(payloads)


def pass_on_report(receiver: Receiver | None, lost: int, payload: bytes) -> None:
    """Pass on a report and the number of lost reports before, if they can be read."""
    receive = getattr(receiver, "receive_report", None)  # `map` has none
    if receive is not None:
        receive(lost, payload)


def internal_error(doing: str, error: Exception) -> AiogpuError:
    """Return the error for a failure of aiogpu itself, with its cause.

    An `AiogpuError` other than `InternalError` is returned unchanged: it already names
    the culprit.
    """
    if isinstance(error, AiogpuError) and not isinstance(error, InternalError):
        return error
    internal = InternalError(
        f"aiogpu failed as it {doing}: {type(error).__name__}: {error}. This is a bug "
        f"in aiogpu, not in your program. Please report it, with the traceback that "
        f"the node has logged."
    )
    internal.__cause__ = error
    return internal


def settle(receiver: Receiver, outcome: Outcome) -> None:
    """Settle a receiver; if that raises, settle it with an `InternalError`."""
    try:
        receiver.settle(outcome)
    except Exception as fault:  # noqa: BLE001 - passed to the receiver
        settle_with_fault(receiver, fault)


def settle_with_fault(receiver: Receiver, fault: Exception) -> None:
    """Settle a receiver after aiogpu has failed to pass on the task's outcome."""
    _log.error("! failed to settle %r", receiver, exc_info=fault)
    try:
        receiver.settle(internal_error("passed on the end of a task", fault))
    except Exception:  # noqa: BLE001 - nothing more can be done than to log
        _log.exception("! failed to settle %r with the failure", receiver)


def too_late(spec: TaskSpec, lapse: str) -> TaskTimeoutError:
    """Return the error of a task that has not ended within its `timeout`.

    Args:
        spec: the spec of the task.
        lapse: how long the task has waited, and how long it has run.
    """
    return TaskTimeoutError(
        f"{spec.name} did not end within its timeout of {spec.timeout:g} s after "
        f".remote(): {lapse}. It is being stopped. Give it more time, start fewer "
        f"tasks at once, or limit only its running time, by run_timeout=."
    )


def overrun(
    name: str, limit: float | None, lapse: str, what_next: str = "It is being stopped"
) -> TaskTimeoutError:
    """Return the error of a task or call that exceeded its `run_timeout`.

    Args:
        name: the name of the task or method.
        limit: the `run_timeout` in seconds.
        lapse: how long the code has waited, and how long it has run.
        what_next: how the code is stopped.
    """
    return TaskTimeoutError(
        f"{name} did not end within its run_timeout of {limit:g} s: {lapse}. "
        f"{what_next}. Give it more time."
    )


@dataclass(slots=True, eq=False)
class Call:
    """One task: its function, arguments, receiver and answer.

    Attributes:
        receiver: None once it is settled or cancelled.
        client: the program that has submitted the task.
        worker: the id of the worker that the task was sent to last.
        number: the number of the `Run` that it was sent with.
        answer: the answer of the worker.
        limit: the number of items that a stream may yield in total.
        passed: the number of items received.
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
        """Return the message for the worker; `borrow` lends the references."""
        func, payload = self.func, self.payload
        if type(payload) is not bytes:
            payload = borrow(payload)
        if not func.window:
            return Run(task, func.id, payload, is_last, self.number)
        limit = self.limit or func.window
        return Run(task, func.id, payload, is_last, self.number, limit, self.passed)

    def fail(self, error: Exception) -> None:
        """Settle the receiver with an error, and drop it."""
        receiver, self.receiver = self.receiver, None
        if receiver is not None:
            settle(receiver, error)

    def fail_deadlocked(self, reason: str) -> None:
        """Fail the task because its wait could never end."""
        self.fail(
            DeadlockError(
                f"{reason}. The wait could never end. Let the waiting task ask for "
                f"less, or end before it starts the other task."
            )
        )

    def fail_disowned(self) -> None:
        """Fail the task because its parent has ended."""
        self.fail(
            TaskCancelledError(
                f"{self.func.spec.name} was stopped, since the task that had started "
                f"it has ended or is being stopped."
            )
        )

    def fail_closed(self) -> None:
        """Fail the task because the node was shut down."""
        name = self.func.spec.name
        self.fail(NodeClosedError(f"the node was shut down before {name} had ended."))
