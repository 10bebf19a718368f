"""Values and failures in Ray's store, and their representation in this process.

A plain payload is sent to Ray as bytes. A pickle with buffers or handles is sent as a
`StoredValue`: Ray keeps its buffers in shared memory, and sees its handles, so it can
count references. A task's exception is sent as on other engines, as a pickle if
possible and always as text; Ray delivers it as the cause of its own exception.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple
from weakref import WeakValueDictionary

from aiogpu import errors
from aiogpu.core.scheduler.placement_groups import REMOVED
from aiogpu.engines.ray import cluster
from aiogpu.engines.ray.cluster import Handle, Ref
from aiogpu.runtime.actors.actor import died
from aiogpu.runtime.callers.leases import removed
from aiogpu.serialization.exceptions import (
    RAISED,
    UNREADABLE,
    pack_failure,
)
from aiogpu.serialization.payload import MARK, Contents, Payload
from aiogpu.serialization.references import PickledValue
from aiogpu.wire.messages import Failed, ProtocolError
from aiogpu.worker.invoke import OWN_FRAMES, Raised

if TYPE_CHECKING:
    from aiogpu.core.model.request import BundleRef, PlacementGroupSpec


class Terms(NamedTuple):
    """The terms of an actor's calls; see `ActorTerms`."""

    mode: str
    groups: Mapping[str, str]


IN_STORE: Final = 1
"""Used as a segment's id: the pickle and its buffers are in Ray's store."""

# Failures

BRINGS_MODULES: Final = (
    ". The worker cannot import it. aiogpu.init(address='ray', runtime_env={...}) "
    "brings it: 'working_dir': '.' brings the modules beside the program, 'py_modules' "
    "a package from another directory, 'pip' an installed one"
)


class TaskFailure(Exception):  # noqa: N818 - it wraps an error
    """A task's failure inside Ray; `failed` describes it."""

    def __init__(self, *fields: Any) -> None:
        super().__init__(*fields)
        self.failed = Failed(*fields)

    def __str__(self) -> str:
        return f"{self.failed.type_name}: {self.failed.message}"


class RetriedFailure(TaskFailure):
    """A failure after which Ray runs the task again."""


def pack_raised(outcome: Raised) -> Failed:
    """Describe the exception of a call in a worker of Ray's."""
    failed = pack_failure(0, outcome.kind, outcome.error, OWN_FRAMES)
    if outcome.kind == UNREADABLE and isinstance(outcome.error, ModuleNotFoundError):
        return failed._replace(message=failed.message + BRINGS_MODULES)
    return failed


def window_of(receiver: Any) -> int:
    """Return how many items a stream may be ahead of its consumer; 0 for no stream."""
    # A receiver in a task wraps the original receiver.
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
) -> Failed | Exception:
    """Translate an exception from Ray.

    The result is a failure of user code, or an error of aiogpu with Ray's error as its
    cause.

    Args:
        name: name of the task.
        error: the exception from Ray.
        group: the placement group of the task; None for none.
    """
    cause = getattr(error, "cause", None)
    if cause is not None and type(cause).__module__ == "ray.exceptions":
        error, cause = cause, None  # of a call that needed this result
    failure = cause if isinstance(cause, TaskFailure) else error
    if isinstance(failure, TaskFailure):
        return failure.failed
    if isinstance(cause, Exception) and type(error).__name__.startswith("RayTaskError"):
        return pack_failure(0, RAISED, cause, "")  # from a task or actor of Ray's own
    message = str(error).strip() or type(error).__name__
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if group is not None and any(kind.endswith("GroupRemoved") for kind in kinds):
        gone = removed(group.name, name, REMOVED)
        return actor_death(name, gone) if kinds[0].startswith("Actor") else gone
    known = next((kind for kind in kinds if kind in _MEANINGS), None)
    translated: Exception
    if known is None:
        text = f"{name}: {type(error).__name__} came from Ray: {message}"
        translated = errors.InternalError(text)
    elif known == "RayActorError":
        translated = _actor_died(name, message)
    else:
        own_type, what = _MEANINGS[known]
        translated = own_type(f"{name} {what}: {message}")
    translated.__cause__ = error
    return translated


def _actor_died(name: str, message: str) -> errors.ActorDiedError:
    if "exit_actor() is called" in message or "INTENDED_USER_EXIT" in message:
        # Ray gives the same text at the end of an `async with`.
        return died(name, "its block has ended, or a call ended it by exit_actor().")
    if "killed by `ray.kill`" in message:
        return errors.ActorDiedError(f"{name} was killed.", name)
    # Ray's text for a call that was lost while the actor restarts.
    is_restarting = "is temporarily unavailable" in message
    text = f"{name} is dead, as Ray says: {message}"
    return errors.ActorDiedError(text, name, is_restarting)


_NEVER: Final = (errors.InfeasibleError, "can never run on this cluster")
_MEANINGS: Final[dict[str, tuple[type[errors.AiogpuError], str]]] = {
    "TaskPlacementGroupRemoved": (
        errors.PlacementRemovedError,
        "ended with its placement",
    ),
    "TaskCancelledError": (errors.TaskCancelledError, "was cancelled on the cluster"),
    "OutOfMemoryError": (errors.OutOfMemoryError, "ran out of its node's memory"),
    "RayActorError": (errors.ActorDiedError, ""),
    "NodeDiedError": (errors.WorkerDiedError, "ran on a node that has gone"),
    "WorkerCrashedError": (errors.WorkerDiedError, "died with its worker"),
    "ObjectStoreFullError": (errors.ObjectMemoryError, "found Ray's store full"),
    "ObjectLostError": (errors.NodeDiedError, "needs a value that is lost"),
    "TaskUnschedulableError": _NEVER,
    "ActorUnschedulableError": _NEVER,
    "RuntimeEnvSetupError": (
        errors.NodeError,
        "has no worker: Ray cannot set up its runtime_env",
    ),
    "RayError": (errors.NodeError, "has failed, as Ray says"),
}
"""For each of Ray's errors, aiogpu's error and its text about a task."""


# Stored values


@dataclass(slots=True, eq=False)
class StoredValue:
    """A pickle in Ray's store, with its buffers and references.

    Attributes:
        stream: the pickle.
        buffers: its out-of-band buffers.
        references: id and object of each value to which it holds handles.
        actors: Ray's handle and the terms of each actor to which it holds handles.
    """

    stream: bytes
    buffers: Sequence[Any] = ()
    references: tuple[tuple[int, Ref], ...] = ()
    actors: tuple[tuple[Handle, Terms], ...] = ()

    def __repr__(self) -> str:
        return f"<StoredValue {len(self.stream)} bytes, {len(self.buffers)} buffers>"

    def __reduce__(self) -> tuple[type[StoredValue], tuple[object, ...]]:
        outside = [PickleBuffer(buffer) for buffer in self.buffers]
        return StoredValue, (self.stream, outside, self.references, self.actors)


# Values and actors of this process

_ids: Final = count(secrets.randbits(40) << 22 | 1)
"""Starts at a random number, so that no two processes use the same id."""
_values: Final[WeakValueDictionary[int, SharedValue]] = WeakValueDictionary()
known_actors: Final[WeakValueDictionary[int, ActorReference]] = WeakValueDictionary()
"""The actors that this process knows, by their ids."""
_kept_by_forks: Final[list[Any]] = []


@dataclass(slots=True, eq=False, weakref_slot=True)
class ActorReference:
    """An actor, as known to this process.

    It accompanies a pickled handle; Ray's own handle in it keeps the actor alive.

    Attributes:
        id: its number, the same in all processes.
        handle: Ray's handle.
        terms: the terms of its calls.
    """

    is_pending: ClassVar[bool] = False
    """As of a `SharedValue`: Ray knows every actor that has a handle."""

    id: int
    handle: Handle
    terms: Terms


def number_of(actor_id: str) -> int:
    """Return the number of an actor, the same in all processes."""
    return int(actor_id[:15], 16)


def refer_to(handle: Handle, terms: Terms) -> ActorReference:
    """Return the reference of an actor; of several handles the first is kept."""
    number = number_of(cluster.actor_id(handle))
    return known_actors.setdefault(number, ActorReference(number, handle, terms))


@dataclass(slots=True, eq=False, weakref_slot=True)
class SharedValue:
    """A value to which handles refer, in one process.

    Attributes:
        id: other processes request it by this id.
        content: its object in Ray's store, or its payload in this process, or why there
            is no value; None until its task is sent.
        task: number of this process's call that produces it; 0 for other values.
        part: index among several results of this call; -1 for the whole result.
    """

    id: int = field(default_factory=lambda: next(_ids))
    content: Ref | bytes | Failed | None = None
    task: int = 0
    part: int = -1
    _callbacks: list[Callable[[], object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _values[self.id] = self

    def __repr__(self) -> str:
        return f"<SharedValue {self.id}>"

    @property
    def is_pending(self) -> bool:
        """True until its task is sent or has failed."""
        return self.content is None

    @property
    def is_here(self) -> bool:
        """True if this process has the value, or knows why there is none."""
        return isinstance(self.content, bytes | Failed)

    @property
    def ref(self) -> Ref | None:
        """Its object in Ray's store; None if it has none."""
        source = source_of(self.content)
        if source is not None:
            return source.ref
        return None if self.is_here else self.content

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call when the value is no longer pending; now, if it is not."""
        if self.is_pending:
            self._callbacks.append(callback)
        else:
            callback()

    def set_ref(self, ref: Ref) -> None:
        """Set its object, which may not exist yet, unless the content is known."""
        if self.is_pending:
            self._replace(ref)

    def set_outcome(self, outcome: bytes | Failed | BaseException) -> None:
        """Set the outcome of its task, unless the value is here.

        Later calls with it get this outcome, even if Ray has another.
        """
        if isinstance(outcome, BaseException):
            outcome = pack_failure(0, RAISED, outcome, OWN_FRAMES)
        if not self.is_here:
            self._replace(outcome)

    def _replace(self, content: Ref | bytes | Failed) -> None:
        self.content = content
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def as_argument(self) -> Any:
        """Return its argument for Ray; Ray resolves objects to their values."""
        ref = self.ref
        if ref is not None or isinstance(self.content, Failed):
            return ref or self.content
        assert isinstance(self.content, bytes), self
        return to_stored(self.content)

    def as_ref(self) -> Ref:
        """Return its object; put the value into the store if it has none."""
        if self.ref is None:
            self.content = cluster.put(self.as_argument())
        return self.ref


def find_value(identity: int) -> SharedValue:
    """Return the value of an id.

    Raises:
        ProtocolError: this process does not know the value.
    """
    value = _values.get(identity)
    if value is None:
        raise ProtocolError(f"this process does not have the value {identity}")
    return value


def forget_after_fork() -> None:
    """Keep Ray's handles in a fork, so that Ray sees no release there."""
    _kept_by_forks.extend(known_actors.values())


# Payloads


@dataclass(slots=True, eq=False)
class PayloadSource:
    """The source of a payload of this process for Ray.

    Attributes:
        ref: its object in Ray's store; None if it is not in the store.
        references: the values and actors to which the pickle holds handles.
    """

    ref: Ref | None
    references: tuple[SharedValue | ActorReference, ...]

    def views(self, _contents: Contents) -> list[memoryview]:
        """Return the pickle and its buffers from the store; see `Source`."""
        stored: StoredValue = cluster.get(self.ref)
        return [
            memoryview(stored.stream),
            *(memoryview(buffer) for buffer in stored.buffers),
        ]


def source_of(payload: object) -> PayloadSource | None:
    """Return the source of a payload; None for a plain pickle."""
    source = payload.source if type(payload) is Payload else None
    return source if isinstance(source, PayloadSource) else None


def _payload_of(
    contents: Contents,
    references: Sequence[SharedValue | ActorReference] = (),
    needs: tuple[SharedValue, ...] = (),
    ref: Ref | None = None,
) -> Payload:
    source = PayloadSource(ref, (*references,))
    return Payload.of(contents, source.references, source, needs, MARK)


def pack(outgoing: PickledValue) -> Payload:
    """Make a payload that refers to the sender's buffers; it must be sent at once."""
    references: tuple[Any, ...] = tuple(outgoing.references)
    contents = Contents(
        outgoing.stream,
        buffers=tuple(outgoing.buffers),  # type: ignore[arg-type]
        places=outgoing.places,
        returns=outgoing.returns,
    )
    needs: tuple[Any, ...] = tuple(one.share() for one in outgoing.handles)
    return _payload_of(contents, references, needs)


def pack_copy(outgoing: PickledValue, *, may_store: bool) -> Payload:
    """Make a payload from the current state of arguments, to be sent later.

    Args:
        outgoing: the pickled arguments.
        may_store: a large payload may be put into Ray's store.
    """
    payload = pack(outgoing)
    source = source_of(payload)
    assert source is not None, payload
    is_pending = any(reference.is_pending for reference in source.references)
    if outgoing.is_large and may_store and not is_pending:
        source.ref = cluster.put(to_stored(payload))
        payload.contents = payload.contents._replace(
            stream=b"", buffers=(), segment=IN_STORE
        )
    elif outgoing.buffers:
        copied = tuple(map(bytes, outgoing.buffers))
        payload.contents = payload.contents._replace(buffers=copied)
    return payload


def to_stored(payload: bytes) -> Any:
    """Return a payload in Ray's form, without its arguments that are values."""
    source = source_of(payload)
    if source is None:
        return payload
    contents = payload.contents  # type: ignore[attr-defined]
    references, actors = [], []
    for reference in source.references:
        if isinstance(reference, ActorReference):
            actors.append((reference.handle, reference.terms))
        else:
            references.append((reference.id, reference.as_ref()))
    return StoredValue(
        contents.stream, contents.buffers, tuple(references), tuple(actors)
    )


def to_arguments(payload: bytes) -> tuple[Any, ...]:
    """Return a payload as the arguments of a Ray call; see `from_arguments`."""
    source = source_of(payload)
    if source is None:
        return (payload,)
    head = to_stored(payload) if source.ref is None else source.ref
    contents = payload.contents  # type: ignore[attr-defined]
    values = [value.as_argument() for value in payload.needs]  # type: ignore[attr-defined]
    return head, contents.places, contents.returns, *values


def from_stored(stored: Any, ref: Ref | None = None) -> bytes:
    """Return the payload of a value from Ray, which must be no `Failed`.

    Args:
        stored: the value from Ray.
        ref: its object, used if the payload is passed on.
    """
    if not isinstance(stored, StoredValue):
        return stored  # type: ignore[no-any-return]
    references: list[SharedValue | ActorReference] = []
    for identity, ref_of_value in stored.references:
        value = _values.get(identity)
        if value is None:
            value = SharedValue(identity, ref_of_value)
        references.append(value)
    references += [refer_to(*actor) for actor in stored.actors]
    contents = Contents(
        stored.stream,
        buffers=tuple(stored.buffers),
        values=tuple(identity for identity, _ in stored.references),
    )
    return _payload_of(contents, references, ref=ref)


def from_arguments(
    head: Any, places: Sequence[int | str] = (), returns: int = 0, *values: Any
) -> bytes:
    """Undo `to_arguments`: rebuild the payload.

    Raises:
        TaskFailure: an argument has failed.
    """
    for value in values:
        if isinstance(value, Failed):
            raise TaskFailure(*value)
    if not isinstance(head, StoredValue) and not values and not returns:
        return head  # type: ignore[no-any-return]
    payload = from_stored(head if isinstance(head, StoredValue) else StoredValue(head))
    assert isinstance(payload, Payload), head
    payload.contents = payload.contents._replace(places=tuple(places), returns=returns)
    payload.parts = tuple(from_stored(value) for value in values)
    return payload
