"""How failures travel through Ray, and what its own mean to whoever waits.

A task's exception travels as ours do everywhere, as a pickle where it can and as text
always; Ray carries it as the cause of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from aiogpu.core.scheduler.placement_groups import REMOVED
from aiogpu.engines.ray import ray_api as ray
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


class TaskFailure(Exception):  # noqa: N818 - it carries an error, and is none of its own
    """A task's failure on its way; `failed` tells it."""

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        self.failed = Failed(*fields)

    def __str__(self) -> str:
        return f"{self.failed.type_name}: {self.failed.message}"


class RetriedFailure(TaskFailure):
    """One after which the task's options want it tried again."""


def packed(kind: str, error: BaseException, *, is_retried: bool = False) -> TaskFailure:
    """An exception of the user's code as it travels."""
    failed = pack_failure(0, kind, error, OWN_FRAMES)
    return (RetriedFailure if is_retried else TaskFailure)(*failed)


def failed_as(name: str, error: BaseException) -> Failed:
    """An exception that has come from Ray as a failure of the user's code is told."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, TaskFailure):
        return pack_own_error(explained(name, error))
    if cause.failed.kind == STOPPED:
        return pack_own_error(TaskCancelledError(cause.failed.message))
    return cause.failed


def tell(
    receiver: Any,
    name: str,
    error: BaseException,
    within: PlacementGroupSpec | BundleRef | None = None,
) -> None:
    """Tell who waits what an exception that has come from Ray means.

    `within` is the placement in which it was to run.
    """
    cause = getattr(error, "cause", None)
    failure = cause if isinstance(cause, TaskFailure) else error
    if not isinstance(failure, TaskFailure):
        receiver.fail(explained(name, error, within))
    elif failure.failed.kind != STOPPED:
        receiver.reject(failure.failed)
    elif failure.failed.message == stopped(name) and not _is_stream(receiver):
        receiver.reject(failure.failed)  # somebody has done so who was given it
    else:
        receiver.fail(TaskCancelledError(failure.failed.message))


def _is_stream(receiver: Any) -> bool:
    # What is carried along has a receiver of its own around it.
    return hasattr(getattr(receiver, "receiver", receiver), "window")


def stopped(name: str) -> str:
    """Return what is said of a task that was cancelled."""
    return f"{name} was cancelled."


def died_of(name: str, error: Exception) -> ActorDiedError:
    """The error of an actor that has ended since this has happened."""
    told = died(name, str(error))
    told.__cause__ = error
    return told


def explained(
    name: str,
    error: BaseException,
    within: PlacementGroupSpec | BundleRef | None = None,
) -> Exception:
    """An error of ours for one of Ray's, which is its cause.

    Args:
        name: of the task.
        error: what Ray has raised.
        within: the placement in which it was to run; None for none.
    """
    said = str(error).strip() or type(error).__name__
    if within is not None and isinstance(error, ray.GroupRemoved):
        gone = removed(within.name, name, REMOVED)
        is_of_actor = isinstance(error, ray.ActorGroupRemoved)
        return died_of(name, gone) if is_of_actor else gone
    for kind, ours, what in _MEANINGS:
        if isinstance(error, kind):
            found = ours(f"{name} {what}: {said}")
            break
    else:
        found = InternalError(f"{name}: {type(error).__name__} came from Ray: {said}")
    found.__cause__ = error
    return found


def _died(message: str) -> ActorDiedError:
    name = message.partition(" is dead")[0]
    if "exit_actor() is called" in message or "INTENDED_USER_EXIT" in message:
        # Ray ends it in the same words at the end of an `async with`.
        why = "its block has ended, or a call ended it by exit_actor()."
        return ActorDiedError(f"{name} is dead: {why}", name)
    if "killed by `ray.kill`" in message:
        return ActorDiedError(f"{name} was killed.", name)
    # Ray says this of a call that was lost where another process takes over.
    is_restarting = "is temporarily unavailable" in message
    return ActorDiedError(message, name, is_restarting)


_MEANINGS: Final[tuple[tuple[Any, Callable[[str], Exception], str], ...]] = (
    (ray.GroupRemoved, PlacementRemovedError, "ended, as its placement was removed"),
    (ray.Cancelled, TaskCancelledError, "was cancelled on the cluster"),
    (ray.OutOfMemory, OutOfMemoryError, "was ended, since its node's memory ran out"),
    (ray.ActorGone, _died, "is dead, as Ray says"),
    (ray.NodeGone, WorkerDiedError, "ran on a node of the cluster that has gone"),
    (ray.Crashed, WorkerDiedError, "died with its worker on the cluster"),
    (ray.StoreFull, ObjectMemoryError, "found Ray's object store full"),
    (ray.ObjectLost, NodeDiedError, "needs a value that went with its process"),
    (ray.Unschedulable, InfeasibleError, "can never run on this cluster"),
    (ray.SetupFailed, NodeError, "has no worker: Ray could not set one up"),
    (ray.RayError, NodeError, "has failed, as Ray says"),
)
"""What Ray's exceptions are here, and what they say of a task; first come first."""
