"""How failures travel through Ray, and what Ray's own errors mean to users.

A task's exception travels as on other engines, as a pickle if possible and always as
text. Ray carries it as the cause of an exception of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from aiogpu.core.scheduler.placement_groups import REMOVED
from aiogpu.engines.ray.cluster import exceptions
from aiogpu.errors import (
    ActorDiedError,
    InfeasibleError,
    InternalError,
    NodeDiedError,
    NodeError,
    ObjectMemoryError,
    OutOfMemoryError,
    PlacementRemovedError,
    TaskCancelledError,
    WorkerDiedError,
)
from aiogpu.runtime.actors.actor import died
from aiogpu.runtime.callers.leases import removed
from aiogpu.serialization.exceptions import STOPPED, pack_failure, pack_own_error
from aiogpu.wire.messages import Failed

if TYPE_CHECKING:
    from aiogpu.core.model.request import BundleRef, PlacementGroupSpec

OWN_FRAMES: Final = "/aiogpu/engines/"
"""Marks frames that a user's traceback leaves out."""


class TaskFailure(Exception):  # noqa: N818 - it carries an error and is none itself
    """A task's failure as Ray carries it; `failed` describes it."""

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        self.failed = Failed(*fields)

    def __str__(self) -> str:
        return f"{self.failed.type_name}: {self.failed.message}"


class RetriedFailure(TaskFailure):
    """A failure after which Ray runs the task again."""


def pack_error(
    kind: str, error: BaseException, *, is_retried: bool = False
) -> TaskFailure:
    """Return the failure for an exception of user code.

    `kind` says where it was raised, see `serialization.exceptions`.
    """
    if isinstance(error, TaskFailure):
        return error
    failed = pack_failure(0, kind, error, OWN_FRAMES)
    return (RetriedFailure if is_retried else TaskFailure)(*failed)


def cancelled(name: str) -> TaskFailure:
    """Return the failure of a task that was cancelled."""
    return TaskFailure(0, STOPPED, "", _cancelled_message(name), "", None)


def _cancelled_message(name: str) -> str:
    return f"{name} was cancelled."


def unpack_error(name: str, error: BaseException) -> Failed:
    """Return an exception that came from Ray as a failure of user code."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, TaskFailure):
        return pack_own_error(explain(name, error))
    if cause.failed.kind == STOPPED:
        return pack_own_error(TaskCancelledError(cause.failed.message))
    return cause.failed


def deliver_error(
    receiver: Any,
    name: str,
    error: BaseException,
    group: PlacementGroupSpec | BundleRef | None = None,
) -> None:
    """Tell a receiver what an exception that came from Ray means.

    `group` is the placement group in which the task was to run.
    """
    cause = getattr(error, "cause", None)
    failure = cause if isinstance(cause, TaskFailure) else error
    if not isinstance(failure, TaskFailure):
        receiver.fail(explain(name, error, group))
    elif failure.failed.kind != STOPPED:
        receiver.reject(failure.failed)
    elif failure.failed.message == _cancelled_message(name) and not window_of(receiver):
        receiver.reject(failure.failed)  # another holder of the handle cancelled it
    else:
        receiver.fail(TaskCancelledError(failure.failed.message))


def window_of(receiver: Any) -> int:
    """Return how far a stream may be ahead of its consumer; 0 if it is no stream."""
    # A receiver that carries a context along has another one inside.
    window = getattr(getattr(receiver, "receiver", receiver), "window", None)
    return 0 if window is None else int(window.size)


def actor_death(name: str, error: Exception) -> ActorDiedError:
    """Return the error of an actor that has ended because of another error."""
    death = died(name, str(error))
    death.__cause__ = error
    return death


def explain(
    name: str,
    error: BaseException,
    group: PlacementGroupSpec | BundleRef | None = None,
) -> Exception:
    """Return the error of aiogpu for one of Ray's, which becomes its cause.

    Args:
        name: of the task.
        error: what Ray has raised.
        group: the placement group in which the task was to run; None for none.
    """
    message = str(error).strip() or type(error).__name__
    if group is not None and isinstance(error, _GROUP_REMOVED):
        gone = removed(group.name, name, REMOVED)
        is_of_actor = isinstance(error, exceptions.ActorPlacementGroupRemoved)
        return actor_death(name, gone) if is_of_actor else gone
    for kind, own_type, what in _MEANINGS:
        if isinstance(error, kind):
            found = own_type(f"{name} {what}: {message}")
            break
    else:
        found = InternalError(
            f"{name}: {type(error).__name__} came from Ray: {message}"
        )
    found.__cause__ = error
    return found


def _actor_died(message: str) -> ActorDiedError:
    name = message.partition(" is dead")[0]
    if "exit_actor() is called" in message or "INTENDED_USER_EXIT" in message:
        # Ray says the same at the end of an `async with`.
        why = "its block has ended, or a call ended it by exit_actor()."
        return ActorDiedError(f"{name} is dead: {why}", name)
    if "killed by `ray.kill`" in message:
        return ActorDiedError(f"{name} was killed.", name)
    # Ray says this of a call that was lost while another process takes over.
    is_restarting = "is temporarily unavailable" in message
    return ActorDiedError(message, name, is_restarting)


_GROUP_REMOVED: Final = (
    exceptions.TaskPlacementGroupRemoved,
    exceptions.ActorPlacementGroupRemoved,
)
_UNSCHEDULABLE: Final = (
    exceptions.TaskUnschedulableError,
    exceptions.ActorUnschedulableError,
)
_MEANINGS: Final[tuple[tuple[Any, Callable[[str], Exception], str], ...]] = (
    (_GROUP_REMOVED, PlacementRemovedError, "ended, as its placement was removed"),
    (
        exceptions.TaskCancelledError,
        TaskCancelledError,
        "was cancelled on the cluster",
    ),
    (
        exceptions.OutOfMemoryError,
        OutOfMemoryError,
        "was ended, since its node's memory ran out",
    ),
    (exceptions.RayActorError, _actor_died, "is dead, as Ray says"),
    (
        exceptions.NodeDiedError,
        WorkerDiedError,
        "ran on a node of the cluster that has gone",
    ),
    (
        exceptions.WorkerCrashedError,
        WorkerDiedError,
        "died with its worker on the cluster",
    ),
    (
        exceptions.ObjectStoreFullError,
        ObjectMemoryError,
        "found Ray's object store full",
    ),
    (
        exceptions.ObjectLostError,
        NodeDiedError,
        "needs a value that went with its process",
    ),
    (_UNSCHEDULABLE, InfeasibleError, "can never run on this cluster"),
    (
        exceptions.RuntimeEnvSetupError,
        NodeError,
        "has no worker: Ray could not set one up",
    ),
    (exceptions.RayError, NodeError, "has failed, as Ray says"),
)
"""Ray's exceptions, aiogpu's, and what they say of a task; the first match counts."""
