"""Payloads: a pickle, or a compound payload of a pickle and its references.

A plain payload is the pickle itself. A compound payload also has the places of its
large buffers, the values that are arguments, and the ids of the values and actors to
which it holds handles. In a process that may open it, it is an object that keeps all of
these alive.
"""

import pickle
from _thread import _local
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol, Self

from aiogpu.serialization.references import ActorReference
from aiogpu.wire.messages import ProtocolError

MARK: Final = b"\x01"
"""The first byte of a compound payload; a pickle begins with 0x80
(`pickletools.opcodes`)."""


class Contents(NamedTuple):
    """The fields of a compound payload; their types are checked when it is read.

    Attributes:
        stream: the pickle; empty if it is the first span of the segment.
        segment: id of the shared memory with its buffers, 0 for none.
        size: bytes of this segment.
        spans: places of buffers in the segment: offset, length, offset, length, ...
        buffers: buffers inside the payload itself.
        needs: ids of the values that are arguments.
        places: their places among the arguments: index or name.
        parts: the payloads of these values, or of several results.
        values: ids of the values to which the pickle holds handles.
        returns: number of results that the call shall have, 0 for the default.
        actors: ids of the actors to which the pickle holds handles.
    """

    stream: bytes = b""
    segment: int = 0
    size: int = 0
    spans: tuple[int, ...] = ()
    buffers: tuple[bytes, ...] = ()
    needs: tuple[int, ...] = ()
    places: tuple[int | str, ...] = ()
    parts: tuple[bytes, ...] = ()
    values: tuple[int, ...] = ()
    returns: int = 0
    actors: tuple[int, ...] = ()

    def in_segment(
        self, segment: int, size: int, spans: Iterable[tuple[int, int]]
    ) -> Self:
        """Return the same contents with the buffers in a segment.

        Args:
            segment: id of the segment.
            size: bytes of the segment.
            spans: offset and length of each buffer.
        """
        flat = tuple(number for span in spans for number in span)
        return self._replace(segment=segment, size=size, spans=flat)


class Source(Protocol):
    """Access to the shared memory of compound payloads."""

    def views(self, contents: Contents) -> list[memoryview]:
        """Return the spans of a payload, which the caller alone sees and may change."""
        ...


class _Opened(_local):
    """The payload that this thread is unpickling."""

    payload: "Payload | None" = None

    def find(self, identity: int) -> Any:
        """Return the object that the payload holds for a handle in its pickle.

        Raises:
            ProtocolError: the payload holds no object of this id.
        """
        for thing in self.payload.holds if self.payload is not None else ():
            if getattr(thing, "id", None) == identity:
                return thing
        raise ProtocolError(f"the payload does not hold the value {identity}")


opened: Final = _Opened()


class Payload(bytes):
    """A compound payload in a process that may open it.

    Attributes:
        contents: its fields.
        parts: the payloads in it, compound or plain.
        holds: objects that it keeps alive.
        source: maps its segment.
        needs: the values that are arguments, in a process that has them.
        is_shown: its buffers were already in shared memory, and were not copied.
    """

    is_shown = False
    contents: Contents
    parts: tuple[bytes, ...]
    holds: tuple[object, ...]
    source: Source | None
    needs: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        contents: Contents,
        holds: tuple[object, ...] = (),
        source: Source | None = None,
        needs: tuple[Any, ...] = (),
        encoded: bytes | None = None,
    ) -> Self:
        """Make a payload from contents, and from their packed form if it is known."""
        payload = cls(pack(contents) if encoded is None else encoded)
        payload.contents, payload.holds = contents, holds
        payload.parts, payload.source, payload.needs = contents.parts, source, needs
        return payload

    def __repr__(self) -> str:
        return f"<Payload of {len(self)} bytes, segment {self.contents.segment}>"

    def release(self) -> None:
        """Release the buffers after the payload was opened or sent."""
        self.parts = self.holds = self.needs = ()
        self.source = None

    def release_actors(self) -> None:
        """Release the actors to which it has handles."""
        holds = self.holds
        self.holds = tuple(hold for hold in holds if type(hold) is not ActorReference)

    def load(self) -> Any:
        """Unpickle the payload."""
        stream, buffers = self.open()
        before, opened.payload = opened.payload, self
        try:
            return pickle.loads(stream, buffers=buffers)
        finally:
            opened.payload = before

    def open(self) -> tuple[bytes | memoryview, Sequence[bytes | memoryview]]:
        """Return the pickle and its out-of-band buffers."""
        contents = self.contents
        buffers: Sequence[bytes | memoryview] = contents.buffers
        if contents.segment:
            assert self.source is not None, self
            buffers = self.source.views(contents)
        if contents.stream:
            return contents.stream, buffers
        return buffers[0], buffers[1:]


def result_part(payload: bytes, part: int) -> bytes:
    """Return one of several results; the payload itself if `part` is below zero."""
    if part < 0 or type(payload) is not Payload:
        return payload
    return payload.parts[part]


def has_handles(payload: bytes) -> bool:
    """Return True if unpickling the payload makes handles."""
    return type(payload) is Payload and (
        bool(payload.contents.values) or any(map(has_handles, payload.parts))
    )


def is_compound(payload: bytes) -> bool:
    """Return True if a payload is more than a pickle."""
    return payload[:1] == MARK


def pack(contents: Contents) -> bytes:
    """Return the bytes of a compound payload.

    Raises:
        SerializationError: the payload is too large for a frame.
    """
    # Imported late, since it imports msgpack: this would delay the zygote's start, and
    # a process that only inspects payloads does not need it.
    from aiogpu.wire import codec

    return MARK + codec.pack(contents)


def unpack(payload: bytes) -> Contents:
    """Undo `pack`.

    Raises:
        ProtocolError: the bytes are no compound payload.
    """
    from aiogpu.wire import codec

    if not is_compound(payload):
        raise ProtocolError("a payload is a pickle, not a compound one")
    contents = codec.unpack_as(Contents, memoryview(payload)[1:])
    if len(contents.spans) % 2 or len(contents.needs) != len(contents.places):
        raise ProtocolError("a payload's spans or argument places do not come in pairs")
    return contents
