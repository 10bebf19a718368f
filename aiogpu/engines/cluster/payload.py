"""Payloads as Ray keeps and carries them.

A plain payload is bytes to Ray as well. What is more, a pickle with buffers beside it
or handles in it, goes as one object whose buffers Ray leaves in its shared memory, and
whose handles it sees, so that it counts who holds what.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Final

from aiogpu.engines import ray
from aiogpu.serialization.payload import MARK, Contents, Payload

if TYPE_CHECKING:
    from aiogpu.engines.cluster.shared import Shared
    from aiogpu.engines.ray import Handle, Ref

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
