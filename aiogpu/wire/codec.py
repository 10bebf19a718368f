"""Encodes messages as frames, and decodes frames. The only module with msgpack.

A frame is a length (four bytes, little-endian, not counting itself) and a msgpack
array. The stream may be cut anywhere. A reader accepts exactly the tags and the field
types of `messages`; everything else is a `ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from itertools import product
from struct import Struct
from types import UnionType
from typing import Any, Final, TypeVar, get_args, get_origin

import msgpack

from aiogpu.errors import SerializationError
from aiogpu.wire.messages import LIMIT, TAGS, Message, ProtocolError

HEADER: Final = 4

LARGE: Final = 1 << 20
"""Bytes from which a payload or a frame counts as large."""

MAX_DEPTH: Final = 16
"""The deepest nesting that `RecordCodec` reads: a level takes some kB of C stack."""

_Fields = TypeVar("_Fields", bound=tuple[Any, ...])
_pack_length: Final = Struct("<I").pack
_unpack_length: Final = Struct("<I").unpack_from
# Text from the system may contain undecodable bytes (PEP 383).
_SURROGATES: Final = "surrogatepass"


_Items = list[tuple[int, str, list[frozenset[type]]]]
"""For each field that is a collection: its index, its name, and the types of its items,
or of its keys and its values."""


def _types(hint: Any) -> frozenset[type]:
    """Return the types that msgpack reads for a value of this annotation."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return frozenset(get_origin(part) or part for part in parts)


def _item_types(hint: Any) -> list[frozenset[type]]:
    item_types = [_types(part) for part in get_args(hint) if part is not ...]
    return [types | {int} if float in types else types for types in item_types]


@cache
def _layout(kind: Any) -> tuple[Any, frozenset[tuple[type, ...]], _Items]:
    """Return a class, the combinations of field types it accepts, its collections."""
    hints: dict[str, Any] = kind.__annotations__
    items = [
        (index, name, _item_types(hint))
        for index, (name, hint) in enumerate(hints.items())
        if get_origin(hint) in {dict, tuple}
    ]
    return kind, frozenset(product(*map(_types, hints.values()))), items


_LAYOUTS: Final = {tag: _layout(kind) for kind, tag in TAGS.items()}  # type: ignore[arg-type]
_new: Final = tuple.__new__


def from_fields(fields: object) -> Message:
    """Make the message of an unpacked array.

    Raises:
        ProtocolError: the tag is unknown; or a field is missing, superfluous or of a
            wrong type; or an item of a field is of a wrong type.
    """
    if type(fields) is tuple and fields and type(fields[0]) is int:
        tag, values = fields[0], fields[1:]
        if tag in _LAYOUTS:
            kind, accepted, items = _LAYOUTS[tag]
            if tuple(map(type, values)) in accepted:
                if items:
                    _check_items(values, kind, items)
                # Not `_make`, which would check the length again.
                return _new(kind, values)  # type: ignore[no-any-return]
    raise ProtocolError(_explain(fields))


def _check_items(values: tuple[Any, ...], kind: type[Any], items: _Items) -> None:
    for index, name, (types, *types_of_values) in items:
        value = values[index]
        is_right = types.issuperset(map(type, value))
        if types_of_values and is_right:
            is_right = types_of_values[0].issuperset(map(type, value.values()))
        if not is_right:
            raise ProtocolError(f"{kind.__name__}.{name} has an item of a wrong type")


def _explain(fields: object) -> str:
    """Explain why an array is not a message; without values, which may be large."""
    if type(fields) is not tuple or not fields:
        return f"a frame holds a {type(fields).__name__}, not a message"
    tag = fields[0]
    if type(tag) is not int:
        return f"a frame begins with a {type(tag).__name__}, not with a tag"
    if tag not in _LAYOUTS:
        return f"a frame has the unknown tag {tag}"
    types = ", ".join(type(field).__name__ for field in fields[1:9])
    return f"{_LAYOUTS[tag][0].__name__} does not take ({types})"


_pack: Any = None


def _renew_packer() -> None:
    """Replace the packer, whose buffer never shrinks."""
    global _pack  # noqa: PLW0603 - an attribute would be looked up for each message
    _pack = msgpack.Packer(unicode_errors=_SURROGATES).pack


_renew_packer()


def encode(message: Message, limit: int = LIMIT) -> bytes:
    """Return the frame of a message.

    Raises:
        SerializationError: the frame would be longer than `limit`.
    """
    try:
        body: bytes = _pack((TAGS[type(message)], *message))
    except ValueError as error:
        raise _unpackable(error) from None
    size = len(body)
    if size >= LARGE:
        _renew_packer()
    if size > limit:
        raise _too_long(size, limit)
    return _pack_length(size) + body


def encode_all(messages: Iterable[Message | bytes], limit: int = LIMIT) -> bytes:
    """Return the frames of messages that are sent together; `bytes` are frames already.

    Raises:
        SerializationError: a frame would be longer than `limit`.
    """
    tags, parts = TAGS, []
    try:
        for message in messages:
            if isinstance(message, bytes):
                parts.append(message)
                continue
            body: bytes = _pack((tags[type(message)], *message))
            size = len(body)
            if size >= LARGE:
                _renew_packer()
            if size > limit:
                raise _too_long(size, limit)
            parts += _pack_length(size), body
    except ValueError as error:
        raise _unpackable(error) from None
    return b"".join(parts)


def _too_long(size: int, limit: int) -> SerializationError:
    return SerializationError(
        f"a message of {size} bytes exceeds the limit of {limit}; pass large data by "
        f"file or in parts"
    )


def _unpackable(error: ValueError) -> SerializationError:
    return SerializationError(f"a value is too large for a frame: {error}")


def decode(body: bytes | memoryview) -> Message:
    """Return the message of one frame, without its header.

    Raises:
        ProtocolError: the bytes are not a message.
    """
    try:
        fields = msgpack.unpackb(body, use_list=False, unicode_errors=_SURROGATES)
    except ValueError as error:
        # msgpack's own errors are ValueErrors.
        raise ProtocolError(f"a frame is not msgpack: {error}") from None
    return from_fields(fields)


def pack(fields: tuple[object, ...]) -> bytes:
    """Pack an array of plain values that is not a message.

    Raises:
        SerializationError: a value is too large.
    """
    try:
        body: bytes = _pack(fields)
    except ValueError as error:
        raise _unpackable(error) from None
    if len(body) >= LARGE:
        _renew_packer()
    return body


def unpack(body: bytes | memoryview) -> object:
    """Undo `pack`.

    Raises:
        ProtocolError: the bytes are not such an array.
    """
    try:
        return msgpack.unpackb(body, use_list=False, unicode_errors=_SURROGATES)
    except ValueError as error:
        raise ProtocolError(f"packed data is not msgpack: {error}") from None


def unpack_as(kind: type[_Fields], body: bytes | memoryview) -> _Fields:
    """Undo `pack` for a named tuple, and check the field types by its annotations.

    Raises:
        ProtocolError: the bytes are not such a tuple.
    """
    fields = unpack(body)
    _, accepted, items = _layout(kind)
    if type(fields) is not tuple or tuple(map(type, fields)) not in accepted:
        raise ProtocolError(f"packed data is not a {kind.__name__}")
    _check_items(fields, kind, items)
    return _new(kind, fields)


class RecordCodec:
    """Packs plain values, and objects of certain classes by their fields.

    Each class is a dataclass or NamedTuple whose constructor takes its fields in order.
    `load` makes objects of these classes only; unlike pickle, it runs no foreign code.

    Attributes:
        classes: the classes, each identified by its index.
    """

    def __init__(self, *classes: type[Any]) -> None:
        self.classes = classes
        self._numbers = {kind: number for number, kind in enumerate(classes)}

    def dump(self, value: object) -> bytes:
        """Return the value as bytes; sequences become tuples.

        Raises:
            SerializationError: the value is too large, or contains an object of another
                class.
        """
        try:
            return self._pack(value)
        except (ValueError, TypeError, OverflowError) as error:
            raise SerializationError(f"a value cannot be packed: {error}") from None

    def load(self, data: bytes) -> Any:
        """Undo `dump`.

        Raises:
            ProtocolError: the bytes were not made by `dump`.
        """
        try:
            return self._unpack(data, 0)
        except (ValueError, TypeError, IndexError) as error:
            raise ProtocolError(f"packed data cannot be read: {error}") from None

    def _pack(self, value: object) -> bytes:
        packer = msgpack.Packer(unicode_errors=_SURROGATES, default=self._pack_object)
        return packer.pack(value)  # type: ignore[no-any-return]

    def _pack_object(self, value: object) -> msgpack.ExtType:
        number = self._numbers.get(type(value))
        if number is None:
            raise TypeError(f"a {type(value).__name__} has no plain form")
        names = self.classes[number].__match_args__
        fields = tuple([getattr(value, name) for name in names])
        return msgpack.ExtType(number, self._pack(fields))

    def _unpack(self, data: bytes, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"objects are nested more than {MAX_DEPTH} deep")
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
        limit: the longest accepted frame, in bytes without the header.
        is_single: `feed` reads only one frame and leaves the rest for later.
        missing: the least number of further bytes that complete a message.
    """

    def __init__(self, limit: int = LIMIT, is_single: bool = False) -> None:
        self.limit = limit
        self.is_single = is_single
        self.missing = HEADER
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Take in bytes; return all messages that are complete now.

        Raises:
            ProtocolError: a frame is too long or is not a message. The reader cannot
                be used any more.
        """
        if not self._rest:
            size = len(data)
            if HEADER <= size <= self.limit:
                # Nearly always the data is exactly one frame.
                (length,) = _unpack_length(data)
                if length == size - HEADER:
                    return [decode(data[HEADER:])]
            messages, read = self._read(data)
            if read < len(data):
                self._rest += memoryview(data)[read:]
            return messages
        self._rest += data
        if len(data) < self.missing:
            self.missing -= len(data)
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
                self.missing = end - size
                return messages, start
            messages.append(decode(source[body:end]))
            start = end
            if self.is_single:
                break
        self.missing = HEADER - (size - start)
        return messages, start
