"""Payloads and values as Ray keeps and carries them.

A plain payload is bytes to Ray as well. What is more, a pickle with buffers beside it
or handles in it, goes as one object whose buffers Ray leaves in its shared memory, and
whose handles it sees, so that it counts who holds what. A `Shared` is a value that
handles in several processes stand for.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from aiogpu.engines.ray import ray_api as ray
from aiogpu.engines.ray.errors import OWN_FRAMES
from aiogpu.errors import ProtocolError, TaskCancelledError
from aiogpu.serialization.exceptions import RAISED, pack_failure
from aiogpu.serialization.payload import MARK, Contents, Payload
from aiogpu.serialization.references import PickledValue
from aiogpu.wire.messages import Failed

if TYPE_CHECKING:
    from aiogpu.engines.ray.ray_api import Handle, Ref


Terms = tuple[str, Mapping[str, int], Mapping[str, str]]
"""How the calls of an actor are run: `mode`, `limits`, `groups` of `ActorTerms`."""


Passed = tuple[int, "Handle", Terms]
"""An actor of which a handle goes along: its id, Ray's handle, and how it is called."""


IN_STORE: Final = 1
"""In place of a segment's id: the pickle and its buffers are in Ray's store."""


class Stored:
    """See above.

    Attributes:
        stream: the pickle.
        buffers: what was left out of it.
        references: the values to which it holds handles, by their ids.
        actors: the same for actors, with what it takes to call them.
    """

    __slots__ = ("actors", "buffers", "references", "stream")

    def __init__(
        self,
        stream: bytes,
        buffers: Sequence[Any] = (),
        references: tuple[tuple[int, Ref], ...] = (),
        actors: tuple[Passed, ...] = (),
    ) -> None:
        self.stream = stream
        self.buffers = buffers
        self.references = references
        self.actors = actors

    def __repr__(self) -> str:
        return f"<Stored {len(self.stream)} bytes, {len(self.buffers)} buffers>"

    def __reduce__(self) -> tuple[type[Stored], tuple[object, ...]]:
        apart = [PickleBuffer(buffer) for buffer in self.buffers]
        return Stored, (self.stream, apart, self.references, self.actors)


class Broken:
    """Stands in the store for a value that will never be there.

    Attributes:
        fields: why, as a `Failed` says it.
    """

    __slots__ = ("fields",)

    def __init__(self, fields: tuple[Any, ...]) -> None:
        self.fields = fields

    def __reduce__(self) -> tuple[type[Broken], tuple[object, ...]]:
        return Broken, (self.fields,)


class Carried:
    """An actor to which a pickle holds a handle: Ray's goes along, as a holder too.

    Attributes:
        id: of the actor.
        handle: Ray's own.
        terms: how it is called.
    """

    __slots__ = ("handle", "id", "terms")

    def __init__(self, identity: int, handle: Handle, terms: Terms) -> None:
        self.id = identity
        self.handle = handle
        self.terms = terms

    def __repr__(self) -> str:
        return f"<Carried {self.id}>"


class Kept:
    """What a payload of this process is to Ray; the payload's `source`.

    Attributes:
        ref: of the same in Ray's store, None if it is not there.
        references: the values to which the pickle holds handles.
        actors: those to which it does.
    """

    __slots__ = ("actors", "ref", "references")

    def __init__(
        self,
        ref: Ref | None,
        references: tuple[Shared, ...],
        actors: tuple[Carried, ...],
    ) -> None:
        self.ref = ref
        self.references = references
        self.actors = actors

    def __repr__(self) -> str:
        return f"<Kept {self.ref}>"

    def views(self, _contents: Contents) -> list[memoryview]:
        """The pickle and its buffers, out of the store; see `Source`."""
        found: Stored = ray.fetched(self.ref)
        return [memoryview(found.stream), *(memoryview(one) for one in found.buffers)]


def made(
    contents: Contents,
    references: Sequence[Shared | Carried] = (),
    needs: tuple[Shared, ...] = (),
    ref: Ref | None = None,
) -> Payload:
    """A payload of this process that is more than a pickle.

    Args:
        contents: what it says.
        references: what the handles in the pickle stand for.
        needs: the values that are arguments.
        ref: of the same in Ray's store.
    """
    actors = tuple(one for one in references if isinstance(one, Carried))
    values = tuple(one for one in references if not isinstance(one, Carried))
    kept = Kept(ref, values, actors)
    return Payload.of(contents, (*references,), kept, needs, MARK)


def kept_in(payload: bytes | None) -> Kept | None:
    """Return what a payload is to Ray; None if it is a pickle, which says it all."""
    source = payload.source if type(payload) is Payload else None
    return source if isinstance(source, Kept) else None


def stored(payload: bytes) -> Any:
    """A payload that is not in Ray's store, as Ray gets it: without its arguments."""
    kept = kept_in(payload)
    if kept is None:
        return payload
    contents = payload.contents  # type: ignore[attr-defined]
    references = tuple((one.id, one.as_ref()) for one in kept.references)
    actors = tuple((one.id, one.handle, one.terms) for one in kept.actors)
    return Stored(contents.stream, contents.buffers, references, actors)


_ids: Final = count(secrets.randbits(40) << 22 | 1)


_known: Final[WeakValueDictionary[int, Shared]] = WeakValueDictionary()


class Shared:
    """See above.

    Attributes:
        id: by which others ask for it.
        ref: its object, None if it has none.
        payload: it is here.
        failed: why there is none.
        task: number of the call of this process that makes it, 0 for others' values.
        part: which of several results of that it is; -1 for all of it.
    """

    __slots__ = (
        *("__weakref__", "_watchers", "failed", "id", "part", "payload", "ref"),
        "task",
    )

    def __init__(self, identity: int = 0) -> None:
        self.id = identity or next(_ids)
        self.ref: Ref | None = None
        self.payload: bytes | None = None
        self.failed: Failed | None = None
        self.task, self.part = 0, -1
        self._watchers: list[Callable[[], object]] = []
        _known[self.id] = self

    def __repr__(self) -> str:
        return f"<Shared {self.id}>"

    @property
    def is_promised(self) -> bool:
        """True if its task is still to be started."""
        return self.ref is None and self.payload is None and self.failed is None

    def when_known(self, call: Callable[[], object]) -> None:
        """Call when it is promised no more; now, if it is not."""
        if self.is_promised:
            self._watchers.append(call)
        else:
            call()

    def keep(self, ref: Ref) -> None:
        """It is that object, there or still to come."""
        self.ref = ref
        self._settle()

    def take(self, payload: bytes) -> None:
        """It is here."""
        self.payload = payload
        kept = kept_in(payload)
        if kept is not None:
            self.ref = kept.ref
        self._settle()

    def take_over(self, other: Shared) -> None:
        """It is what the other one is."""
        self.ref, self.payload, self.failed = other.ref, other.payload, other.failed
        self.task, self.part = other.task, other.part
        self._settle()

    def fail(self, error: BaseException) -> None:
        """It will never be there."""
        self.failed = pack_failure(0, RAISED, error, OWN_FRAMES)
        self._settle()

    def forsake(self, error: BaseException) -> None:
        """Whoever is given it from here on is told that, though Ray may still make it.

        Not if it has come.
        """
        if self.payload is None:
            self.ref = None
            self.fail(error)

    def _settle(self) -> None:
        watchers, self._watchers = self._watchers, []
        for call in watchers:
            call()

    def as_argument(self) -> Any:
        """What Ray is given where it is an argument: it brings the value itself."""
        if self.ref is not None:
            return self.ref
        if self.failed is not None:
            return Broken(tuple(self.failed))
        assert self.payload is not None, self
        return stored(self.payload)

    def as_ref(self) -> Ref:
        """Its object; it is put into the store if it has none."""
        if self.ref is None:
            self.ref = ray.keep(self.as_argument())
        return self.ref


def shared_of(handle: Any, ref_of: Callable[[int, int], Ref | None]) -> Shared:
    """Return what others refer to who are given a handle.

    Args:
        handle: of a task that was started.
        ref_of: gives the object of a task that runs, and of which of its results.
    """
    shared = Shared()
    shared.task, shared.part = handle.child, handle.part
    if handle.raw is not None:
        shared.take(handle.raw)
    elif handle.cancelled():
        shared.fail(TaskCancelledError(f"{handle.task_name} was cancelled."))
    elif handle.error is not None:
        shared.fail(handle.error)
    else:
        ref = ref_of(handle.child, handle.part)
        if ref is not None:
            shared.keep(ref)
    return shared


def known(identity: int) -> Shared:
    """The value of that id, while it is known to this process.

    Raises:
        ProtocolError: nobody here has it.
    """
    shared = _known.get(identity)
    if shared is None:
        raise ProtocolError(f"nobody in this process has the value {identity}")
    return shared


def arrived(found: Any, ref: Ref | None = None) -> bytes:
    """A payload of this process for what has come from Ray, not `Broken`.

    Args:
        found: what has come.
        ref: of the object that it was, for whoever passes it on.
    """
    if not isinstance(found, Stored):
        return found  # type: ignore[no-any-return]
    references = tuple(_arrived(*one) for one in found.references)
    contents = Contents(found.stream, buffers=tuple(found.buffers))
    actors = tuple(meet(*one) for one in found.actors)
    return made(contents, (*references, *actors), ref=ref)


def _arrived(identity: int, ref: Ref) -> Shared:
    shared = _known.get(identity)
    if shared is None:
        shared = Shared(identity)
        shared.keep(ref)
    return shared


def meet(identity: int, handle: Handle, terms: Terms) -> Carried:
    """A handle of Ray's has come to this process, before one of ours is unpickled."""
    handle = met.setdefault(identity, handle)
    return Carried(identity, handle, terms_met.setdefault(handle, terms))


def outlive() -> None:
    """This process is a fork: what it lets go of here, Ray must not hear of."""
    _kept_by_forks.extend(met.values())


met: Final[WeakValueDictionary[int, Any]] = WeakValueDictionary()
"""Ray's handles of actors that have come to this process, by the actors' ids."""


terms_met: Final[WeakKeyDictionary[Any, Terms]] = WeakKeyDictionary()
"""How these are called, as far as their handles have brought it along."""


_kept_by_forks: Final[list[Any]] = []


def failure_in(found: Any) -> Failed | None:
    """Return why there is no value, if that is what has come."""
    return Failed(*found.fields) if isinstance(found, Broken) else None


def packed_here(outgoing: PickledValue) -> Payload:
    """A payload that refers to the sender's own buffers: it is to be sent at once."""
    references: tuple[Any, ...] = tuple(outgoing.references)
    contents = Contents(
        outgoing.stream,
        buffers=tuple(outgoing.buffers),  # type: ignore[arg-type]
        places=outgoing.places,
        returns=outgoing.returns,
    )
    needs: tuple[Any, ...] = tuple(one.share() for one in outgoing.handles)
    return made(contents, references, needs)
