"""Payloads: a pickle, or a pickle and what it refers to.

A plain payload is the pickle itself. Another one holds, beside it, the places of its
large buffers, the values that are its arguments, and the values to which it holds
handles. In a process it is an object that keeps alive what it refers to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from aiogpu.errors import ProtocolError

MARK: Final = b"\x01"
"""The first byte of a parcel; a pickle begins with 0x80 (`pickletools.opcodes`)."""


class Contents(NamedTuple):
    """What a parcel says.

    Attributes:
        stream: the pickle; empty if it is the first span of the segment.
        segment: id of the shared memory that has its buffers, 0 for none.
        size: bytes of that segment.
        spans: where in the segment they are: offset, length, offset, length, ...
        buffers: the same, where they travel in the parcel.
        needs: ids of the values that are arguments.
        places: where among the arguments these are: index, or name.
        parts: the payloads of these values; or of several results.
        values: ids of the values to which the pickle holds handles.
        returns: how many results the call shall have, 0 for the usual one.
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

    def placed(
        self, segment: int, size: int, spans: Iterable[tuple[int, int]]
    ) -> Contents:
        """The same with its buffers in a segment.

        Args:
            segment: id of it.
            size: its bytes.
            spans: offset and length of each buffer.
        """
        flat = tuple(number for span in spans for number in span)
        return self._replace(segment=segment, size=size, spans=flat)


class Source(Protocol):
    """Who has the shared memory that a parcel refers to."""

    def views(self, contents: Contents) -> list[memoryview]:
        """Its spans, mapped and read-only."""
        ...


class Payload(bytes):
    """A parcel in a process that may open it.

    Attributes:
        contents: what it says.
        parts: the payloads in it, parcels themselves or plain.
        holds: what it keeps alive.
        source: who has its segment.
        needs: the values that are arguments, in a process that has them.
        is_shown: its buffers lay in shared memory before, and were not copied.
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
    ) -> Payload:
        """A parcel with these contents; `encoded` if they are packed already."""
        parcel = cls(pack(contents) if encoded is None else encoded)
        parcel.contents, parcel.holds = contents, holds
        parcel.parts, parcel.source, parcel.needs = contents.parts, source, needs
        return parcel

    def __repr__(self) -> str:
        return f"<Parcel of {len(self)} bytes, segment {self.contents.segment}>"

    def let_go(self) -> None:
        """Keep nothing alive any more: it was opened, or sent."""
        self.parts = self.holds = self.needs = ()
        self.source = None

    def open(self) -> tuple[bytes | memoryview, Sequence[bytes | memoryview]]:
        """Its pickle, and the buffers that were left out of that."""
        contents = self.contents
        buffers: Sequence[bytes | memoryview] = contents.buffers
        if contents.segment:
            assert self.source is not None, self
            buffers = self.source.views(contents)
        if contents.stream:
            return contents.stream, buffers
        return buffers[0], buffers[1:]


def part_of(payload: bytes, part: int) -> bytes:
    """One of several results; the payload itself if `part` is below zero."""
    if part < 0 or type(payload) is not Payload:
        return payload
    return payload.parts[part]


def has_handles(payload: bytes) -> bool:
    """Whether unpickling it makes handles."""
    return type(payload) is Payload and (
        bool(payload.contents.values) or any(map(has_handles, payload.parts))
    )


def is_parcel(payload: bytes) -> bool:
    """Whether a payload is a parcel, not a pickle."""
    return payload[:1] == MARK


def pack(contents: Contents) -> bytes:
    """The bytes of a parcel.

    Raises:
        SerializationError: what it carries is too large for a frame.
    """
    # Late, so that the zygote's start need not wait for msgpack.
    from aiogpu.wire import codec as frames

    # msgpack comes with it, which who only looks at payloads does not need.

    return MARK + frames.pack(contents)


_TYPES: Final = (bytes, int, int, tuple, tuple, tuple, tuple, tuple, tuple, int)
_ITEMS: Final[tuple[tuple[type, ...] | None, ...]] = (
    *(None, None, None),
    *((int,), (bytes,), (int,), (int, str), (bytes,), (int,)),
    None,
)


def unpack(payload: bytes) -> Contents:
    """What a parcel says.

    Raises:
        ProtocolError: it is none.
    """
    from aiogpu.wire import codec as frames

    fields = frames.unpack(memoryview(payload)[1:]) if is_parcel(payload) else None
    if type(fields) is not tuple or tuple(map(type, fields)) != _TYPES:
        raise ProtocolError("a payload is no parcel")
    for field, kinds in zip(fields, _ITEMS, strict=True):
        if kinds and any(type(item) not in kinds for item in field):
            raise ProtocolError("a parcel lists what it may not")
    contents = Contents(*fields)
    if len(contents.spans) % 2 or len(contents.needs) != len(contents.places):
        raise ProtocolError("a parcel says half of something")
    return contents
