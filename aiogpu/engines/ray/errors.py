"""Sends failures through Ray, and translates Ray's own errors.

A task's exception is sent as on other engines, as a pickle if possible and always as
text. Ray delivers it as the cause of its own exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from aiogpu import errors
from aiogpu.core.scheduler.placement_groups import REMOVED
from aiogpu.engines.ray.cluster import exceptions
from aiogpu.runtime.actors.actor import died
from aiogpu.runtime.callers.leases import removed
from aiogpu.serialization.exceptions import STOPPED
from aiogpu.wire.messages import Failed

if TYPE_CHECKING:
    from aiogpu.core.model.request import BundleRef, PlacementGroupSpec

_CANCELLED: Final = "was cancelled."


class TaskFailure(Exception):  # noqa: N818 - it wraps an error
    """A task's failure inside Ray; `failed` describes it."""

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        self.failed = Failed(*fields)

    def __str__(self) -> str:
        return f"{self.failed.type_name}: {self.failed.message}"


class RetriedFailure(TaskFailure):
    """A failure after which Ray runs the task again."""


def cancelled(name: str) -> TaskFailure:
    """Return the failure of a task that was cancelled."""
    return TaskFailure(0, STOPPED, "", f"{name} {_CANCELLED}", "", None)


def window_of(receiver: Any) -> int:
    """Return how many items a stream may be ahead of its consumer; 0 for no stream."""
    # A `LoopReceiver` wraps the original receiver.
    window = getattr(getattr(receiver, "receiver", receiver), "window", None)
    return 0 if window is None else int(window.size)


def actor_death(name: str, error: Exception) -> errors.ActorDiedError:
    """Return the error of an actor that has ended because of another error."""
    death = died(name, str(error))
    death.__cause__ = error
    return death


def outcome_of(
    name: str,
    error: BaseException,
    group: PlacementGroupSpec | BundleRef | None = None,
    receiver: Any = None,
) -> Failed | Exception:
    """Translate an exception from Ray.

    The result is a failure of user code, or an error of aiogpu with Ray's error as its
    cause.

    Args:
        name: name of the task.
        error: the exception from Ray.
        group: the placement group of the task; None for none.
        receiver: receiver of the call; None for none.
    """
    cause = getattr(error, "cause", None)
    failure = cause if isinstance(cause, TaskFailure) else error
    if not isinstance(failure, TaskFailure):
        return _explain(name, error, group)
    failed = failure.failed
    if failed.kind != STOPPED:
        return failed
    if failed.message == f"{name} {_CANCELLED}" and not window_of(receiver):
        return failed  # another holder of the handle cancelled it
    return errors.TaskCancelledError(failed.message)


def _explain(
    name: str, error: BaseException, group: PlacementGroupSpec | BundleRef | None
) -> Exception:
    message = str(error).strip() or type(error).__name__
    kinds = [
        kind for kind in type(error).__mro__ if kind.__module__ == "ray.exceptions"
    ]
    meanings = (
        _MEANINGS[kind.__name__] for kind in kinds if kind.__name__ in _MEANINGS
    )
    meaning = next(meanings, None)
    if group is not None and meaning is _REMOVED:
        gone = removed(group.name, name, REMOVED)
        is_of_actor = isinstance(error, exceptions.ActorPlacementGroupRemoved)
        return actor_death(name, gone) if is_of_actor else gone
    if meaning is None:
        text = f"{name}: {type(error).__name__} came from Ray: {message}"
        translated: Exception = errors.InternalError(text)
    else:
        own_type, what = meaning
        translated = own_type(f"{name} {what}: {message}")
    translated.__cause__ = error
    return translated


def _actor_died(message: str) -> errors.ActorDiedError:
    name = message.partition(" is dead")[0]
    if "exit_actor() is called" in message or "INTENDED_USER_EXIT" in message:
        # Ray gives the same text at the end of an `async with`.
        why = "its block has ended, or a call ended it by exit_actor()."
        return errors.ActorDiedError(f"{name} is dead: {why}", name)
    if "killed by `ray.kill`" in message:
        return errors.ActorDiedError(f"{name} was killed.", name)
    # Ray's text for a call that was lost while the actor restarts.
    is_restarting = "is temporarily unavailable" in message
    return errors.ActorDiedError(message, name, is_restarting)


_Meaning = tuple[Callable[[str], Exception], str]
_REMOVED: Final[_Meaning] = errors.PlacementRemovedError, "ended with its placement"
_NEVER: Final[_Meaning] = errors.InfeasibleError, "can never run on this cluster"
_MEANINGS: Final[dict[str, _Meaning]] = {
    "TaskPlacementGroupRemoved": _REMOVED,
    "ActorPlacementGroupRemoved": _REMOVED,
    "TaskCancelledError": (errors.TaskCancelledError, "was cancelled on the cluster"),
    "OutOfMemoryError": (errors.OutOfMemoryError, "ran out of its node's memory"),
    "RayActorError": (_actor_died, "is dead, as Ray says"),
    "NodeDiedError": (errors.WorkerDiedError, "ran on a node that has gone"),
    "WorkerCrashedError": (errors.WorkerDiedError, "died with its worker"),
    "ObjectStoreFullError": (errors.ObjectMemoryError, "found Ray's store full"),
    "ObjectLostError": (errors.NodeDiedError, "needs a value that is lost"),
    "TaskUnschedulableError": _NEVER,
    "ActorUnschedulableError": _NEVER,
    "RuntimeEnvSetupError": (errors.NodeError, "has no worker: Ray cannot set it up"),
    "RayError": (errors.NodeError, "has failed, as Ray says"),
}
"""For each of Ray's errors, aiogpu's error and its text about a task."""
