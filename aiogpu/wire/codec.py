"""Messages to frames and back. The only module that imports msgpack.

A frame is a length, four bytes, little-endian, which counts what follows, and a msgpack
array. Reading accepts any cut of the stream. Exactly the tags and the field types of
`messages` are accepted; everything else is a `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import product
from struct import Struct
from types import NoneType
from typing import Any, Final

import msgpack

from aiogpu.errors import ProtocolError, SerializationError
from aiogpu.wire.messages import TAGS, ChildItems, Items, Message

_TYPES: Final[dict[object, tuple[type, ...]]] = {
    int: (int,),
    str: (str,),
    bool: (bool,),
    bytes: (bytes,),
    bytes | None: (bytes, NoneType),
    dict[str, str]: (dict,),
    dict[str, float]: (dict,),
    float: (float,),
    dict[str, int]: (dict,),
    dict[str, tuple[int | str, ...]]: (dict,),
    tuple[int, ...]: (tuple,),
    tuple[str, ...]: (tuple,),
    tuple[bytes, ...]: (tuple,),
}

_HELD: Final[dict[object, tuple[frozenset[type], ...]]] = {
    dict[str, str]: (frozenset({str}), frozenset({str})),
    dict[str, float]: (frozenset({str}), frozenset({float, int})),
    dict[str, int]: (frozenset({str}), frozenset({int})),
    dict[str, tuple[int | str, ...]]: (frozenset({str}), frozenset({tuple})),
    tuple[int, ...]: (frozenset({int}),),
    tuple[str, ...]: (frozenset({str}),),
    tuple[bytes, ...]: (frozenset({bytes}),),
}
"""The types of what a tuple holds, or of a dictionary's keys and values."""


def _hints(kind: type[Message]) -> list[object]:
    return [*kind.__annotations__.values()]


def _wire_types(kind: type[Message]) -> frozenset[tuple[type, ...]]:
    """All combinations of field types, the tag's first, that the kind accepts."""
    return frozenset(product((int,), *(_TYPES[hint] for hint in _hints(kind))))


def _holders(kind: type[Message]) -> list[tuple[int, tuple[frozenset[type], ...]]]:
    """Which fields hold more, the tag's place being 0, and what they may hold."""
    hints = enumerate(_hints(kind), start=1)
    return [(place, _HELD[hint]) for place, hint in hints if hint in _HELD]


_KINDS: Final = {
    tag: (kind, _wire_types(kind), _holders(kind)) for kind, tag in TAGS.items()
}
_new: Final = tuple.__new__


def from_fields(fields: object) -> Message:
    """Make the message that an unpacked array stands for.

    Raises:
        ProtocolError: the tag is unknown, or a field is missing, surplus, of another
            type, or holds such.
    """
    if type(fields) is tuple and fields and type(fields[0]) is int:
        tag = fields[0]
        if tag in _KINDS:
            kind, accepted, holders = _KINDS[tag]
            if tuple(map(type, fields)) in accepted:
                if holders:
                    _check_held(fields, kind, holders)
                return _new(kind, fields[1:])  # `_make` would count them again
    raise ProtocolError(_complaint(fields))


def _check_held(
    fields: tuple[Any, ...],
    kind: type[Message],
    holders: list[tuple[int, tuple[frozenset[type], ...]]],
) -> None:
    for place, (items, *values) in holders:
        held = fields[place]
        is_right = items.issuperset(map(type, held))
        if values and is_right:
            is_right = values[0].issuperset(map(type, held.values()))
        if not is_right:
            name = [*kind.__annotations__][place - 1]
            raise ProtocolError(f"{kind.__name__}.{name} holds what it may not")


def _complaint(fields: object) -> str:
    """What is wrong; it shows no value, for a value may be of any size or depth."""
    if type(fields) is not tuple or not fields:
        return f"a frame holds a {type(fields).__name__}, not a message"
    tag = fields[0]
    if type(tag) is not int:
        return f"a frame begins with a {type(tag).__name__}, not with a tag"
    if tag not in _KINDS:
        return f"a frame carries the unknown tag {tag}"
    found = ", ".join(type(field).__name__ for field in fields[1:9])
    return f"{_KINDS[tag][0].__name__} does not take ({found})"


HEADER: Final = 4

LIMIT: Final = 1 << 30
"""The longest frame in bytes, without its header."""

LARGEST_PAYLOAD: Final = LIMIT - 4096
"""Bytes that a call's arguments may have; the rest of a frame is small."""

LARGE: Final = 1 << 20
"""A payload from which on packing takes a buffer of its own."""

DEEPEST: Final = 16
"""Objects within objects that `RecordCodec` reads: each takes some kB of C's stack."""

_pack_length: Final = Struct("<I").pack
_unpack_length: Final = Struct("<I").unpack_from
# Text may hold what came undecoded from the system (PEP 383).
_SURROGATES: Final = "surrogatepass"
# A packer keeps its buffer for good, as large as its largest message.
_pack: Final = msgpack.Packer(unicode_errors=_SURROGATES).pack


def encode(message: Message, limit: int = LIMIT) -> bytes:
    """The frame of a message.

    Raises:
        SerializationError: it would be longer than `limit`.
    """
    pack = _pack
    payload: bytes | None = getattr(message, "payload", None)
    if payload is None and (type(message) is Items or type(message) is ChildItems):
        payload = max(message.payloads, key=len, default=b"")
    if payload is not None and len(payload) >= LARGE:
        pack = msgpack.Packer(unicode_errors=_SURROGATES).pack
    try:
        body: bytes = pack((TAGS[type(message)], *message))
    except ValueError as error:
        raise SerializationError(f"a value is too large for a frame: {error}") from None
    size = len(body)
    if size > limit:
        raise _too_long(size, limit)
    return _pack_length(size) + body


def _too_long(size: int, limit: int) -> SerializationError:
    return SerializationError(
        f"a message of {size} bytes exceeds the limit of {limit}; pass large data by "
        f"file or in parts"
    )


def encode_all(messages: Iterable[Message | bytes], limit: int = LIMIT) -> bytes:
    """The frames of messages that go out together; those that are frames stay so.

    Raises:
        SerializationError: one of them would be longer than `limit`.
    """
    pack, pack_length, tags = _pack, _pack_length, TAGS
    parts: list[bytes] = []
    for message in messages:
        if isinstance(message, bytes):
            parts.append(message)
            continue
        kind = type(message)
        is_large = len(getattr(message, "payload", None) or b"") >= LARGE
        if is_large or kind is Items or kind is ChildItems:
            parts.append(encode(message, limit))
            continue
        body = pack((tags[kind], *message))
        size = len(body)
        if size > limit:
            raise _too_long(size, limit)
        parts += pack_length(size), body
    return b"".join(parts)


def decode(body: bytes | memoryview) -> Message:
    """The message in one frame, without its header.

    Raises:
        ProtocolError: the bytes are no message.
    """
    try:
        fields = msgpack.unpackb(body, use_list=False, unicode_errors=_SURROGATES)
    except ValueError as error:
        # msgpack's own errors are ValueErrors.
        raise ProtocolError(f"a frame is no msgpack: {error}") from None
    return from_fields(fields)


def pack(fields: tuple[object, ...]) -> bytes:
    """An array of what messages carry, outside of a frame.

    Raises:
        SerializationError: it is too large.
    """
    try:
        body: bytes = msgpack.Packer(unicode_errors=_SURROGATES).pack(fields)
    except ValueError as error:
        raise SerializationError(f"a value is too large for a frame: {error}") from None
    return body


def unpack(body: bytes | memoryview) -> object:
    """Undo `pack`.

    Raises:
        ProtocolError: the bytes are no such array.
    """
    try:
        return msgpack.unpackb(body, use_list=False, unicode_errors=_SURROGATES)
    except ValueError as error:
        raise ProtocolError(f"what was packed is no msgpack: {error}") from None


class RecordCodec:
    """Packs plain values and objects of certain classes, which travel by their fields.

    Each class is a dataclass or NamedTuple whose constructor takes its fields in order.
    Only these classes can come out of `load`, so it runs nobody's code, unlike pickle.

    Attributes:
        classes: those; each is known by its place.
    """

    def __init__(self, *classes: type[Any]) -> None:
        self.classes = classes
        self._numbers = {one: number for number, one in enumerate(classes)}

    def dump(self, value: object) -> bytes:
        """The value as bytes; sequences become tuples.

        Raises:
            SerializationError: it is too large, or contains an object of another class.
        """
        try:
            body: bytes = self._packer().pack(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise SerializationError(f"a value cannot be packed: {error}") from None
        return body

    def load(self, data: bytes) -> Any:
        """Undo `dump`.

        Raises:
            ProtocolError: the bytes are something else.
        """
        try:
            return self._unpack(data, 0)
        except (ValueError, TypeError, IndexError) as error:
            raise ProtocolError(f"what was packed cannot be read: {error}") from None

    def _packer(self) -> msgpack.Packer:
        return msgpack.Packer(unicode_errors=_SURROGATES, default=self._pack_object)

    def _pack_object(self, value: object) -> msgpack.ExtType:
        number = self._numbers.get(type(value))
        if number is None:
            raise TypeError(f"a {type(value).__name__} has no plain form")
        names = self.classes[number].__match_args__
        fields = tuple([getattr(value, name) for name in names])
        return msgpack.ExtType(number, self._packer().pack(fields))

    def _unpack(self, data: bytes, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError(f"objects within objects, more than {DEEPEST} deep")
        return msgpack.unpackb(
            data,
            use_list=False,
            strict_map_key=False,
            unicode_errors=_SURROGATES,
            ext_hook=partial(self._unpack_object, depth + 1),
        )

    def _unpack_object(self, depth: int, number: int, data: bytes) -> object:
        return self.classes[number](*self._unpack(data, depth))


class FrameReader:
    """Turns a stream of bytes, cut anywhere, into messages.

    Attributes:
        limit: the longest frame that is accepted, without its header.
        is_single: whether what follows the first frame is left for later.
    """

    def __init__(self, limit: int = LIMIT, is_single: bool = False) -> None:
        self.limit = limit
        self.is_single = is_single
        self._rest = bytearray()
        self._wanted = HEADER

    @property
    def missing(self) -> int:
        """How many bytes at least must come before another message is whole."""
        return self._wanted - len(self._rest)

    def feed(self, data: bytes) -> list[Message]:
        """Take in bytes; give all messages that are complete now.

        Raises:
            ProtocolError: a frame is too long or holds no message. The reader is
                of no use afterwards.
        """
        if not self._rest:
            size = len(data)
            if HEADER <= size <= self.limit:
                # Nearly always a chunk is exactly one frame.
                (length,) = _unpack_length(data)
                if length == size - HEADER:
                    return [decode(data[HEADER:])]
            messages, read = self._read(data)
            if read < len(data):
                self._rest += memoryview(data)[read:]
            return messages
        self._rest += data
        if len(self._rest) < self._wanted:
            return []
        with memoryview(self._rest) as view:
            messages, read = self._read(view)
        del self._rest[:read]
        return messages

    def _read(self, source: bytes | memoryview) -> tuple[list[Message], int]:
        messages: list[Message] = []
        start, size = 0, len(source)
        while size - start >= HEADER:
            (length,) = _unpack_length(source, start)
            if length > self.limit:
                raise ProtocolError(
                    f"a frame of {length} bytes exceeds the limit of {self.limit}"
                )
            body = start + HEADER
            end = body + length
            if end > size:
                self._wanted = end - start
                return messages, start
            messages.append(decode(source[body:end]))
            start = end
            if self.is_single:
                break
        self._wanted = HEADER
        return messages, start
