"""Payloads as Ray keeps and carries them.

A plain payload is bytes to Ray as well. What is more, a pickle with buffers beside it
or handles in it, goes as one object whose buffers Ray leaves in its shared memory, and
whose handles it sees, so that it counts who holds what.
"""

from __future__ import annotations

from collections.abc import Sequence
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Final

from aiogpu.engines import ray
from aiogpu.wire.parcel import MARK, Contents, Parcel

if TYPE_CHECKING:
    from aiogpu.engines.cluster.shared import Shared
    from aiogpu.engines.ray import Handle, Ref

IN_STORE: Final = 1
"""In place of a segment's id: the pickle and its buffers are in Ray's store."""


class Stored:
    """See above.

    Attributes:
        stream: the pickle.
        buffers: what was left out of it.
        references: the values to which it holds handles, by their ids.
        actors: the same for actors.
    """

    __slots__ = ("actors", "buffers", "references", "stream")

    def __init__(
        self,
        stream: bytes,
        buffers: Sequence[Any] = (),
        references: tuple[tuple[int, Ref], ...] = (),
        actors: tuple[tuple[int, Handle], ...] = (),
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


class Kept:
    """What a payload of this process is to Ray; the payload's `source`.

    Attributes:
        ref: of the same in Ray's store, None if it is not there.
        references: the values to which the pickle holds handles.
    """

    __slots__ = ("ref", "references")

    def __init__(self, ref: Ref | None, references: tuple[Shared, ...]) -> None:
        self.ref = ref
        self.references = references

    def __repr__(self) -> str:
        return f"<Kept {self.ref}>"

    def views(self, _contents: Contents) -> list[memoryview]:
        """The pickle and its buffers, out of the store; see `Source`."""
        found: Stored = ray.fetched(self.ref)
        return [memoryview(found.stream), *(memoryview(one) for one in found.buffers)]


def made(
    contents: Contents,
    references: tuple[Shared, ...] = (),
    needs: tuple[Shared, ...] = (),
    ref: Ref | None = None,
    holds: tuple[object, ...] = (),
) -> Parcel:
    """A payload of this process that is more than a pickle."""
    kept = Kept(ref, references)
    return Parcel.of(contents, (*holds, *references), kept, needs, MARK)


def kept_in(payload: bytes | None) -> Kept | None:
    """What a payload is to Ray; None if it is a pickle, which says it all."""
    source = payload.source if type(payload) is Parcel else None
    return source if isinstance(source, Kept) else None


def stored(payload: bytes, actors: tuple[tuple[int, Handle], ...] = ()) -> Any:
    """A payload as Ray gets it, without its arguments; it holds these actors."""
    kept = kept_in(payload)
    if kept is None:
        return Stored(payload, actors=actors) if actors else payload
    contents = payload.contents  # type: ignore[attr-defined]
    if contents.segment:
        found: Stored = ray.fetched(kept.ref)
        return Stored(found.stream, found.buffers, found.references, actors)
    references = tuple((one.id, one.as_ref()) for one in kept.references)
    return Stored(contents.stream, contents.buffers, references, actors)
