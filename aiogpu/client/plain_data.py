"""Tuples of plain values as bytes, and a check of the shape of what has come.

Nothing here runs code of the sender's, so a process may read these bytes before it has
any other reason to trust the sender.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from aiogpu.wire.codec import pack, unpack

_LEAST: Final = -(1 << 63)


_MOST: Final = (1 << 63) - 1
"""What is beyond them is more than anybody has, and stands for that."""


class Maybe(NamedTuple):
    """Of a pattern: that, or None."""

    pattern: object


def plain(value: Any) -> Any:
    """The same without what a subclass of a builtin may add; tuples all through."""
    if type(value) is tuple:
        return tuple(map(plain, value))
    if value is None or isinstance(value, bool):
        return value
    # Not by a method that the subclass may have changed.
    if isinstance(value, int):
        return min(max(int.__getnewargs__(value)[0], _LEAST), _MOST)
    if isinstance(value, float):
        return float.__getnewargs__(value)[0]
    if isinstance(value, str):
        return str.__getnewargs__(value)[0]
    return bytes(value)


def dump_plain(values: tuple[object, ...]) -> bytes:
    """Tuples of numbers, texts, bytes and None as bytes.

    Raises:
        SerializationError: they are too large.
    """
    return pack(plain(values))


def load_plain(data: bytes) -> object:
    """Undo `dump_plain`.

    Raises:
        ProtocolError: it is something else.
    """
    return unpack(data)


def fits(value: object, pattern: Any) -> bool:
    """Return whether a value has a certain shape.

    Args:
        value: what has come.
        pattern: a type or a union of them; a tuple of patterns, for one with as many
            items; a list of one pattern, for a tuple of any length; or `Maybe`.
    """
    if type(pattern) is Maybe:
        return value is None or fits(value, pattern.pattern)
    if type(pattern) is list:
        return type(value) is tuple and all(fits(item, pattern[0]) for item in value)
    if type(pattern) is tuple:
        return (
            type(value) is tuple
            and len(value) == len(pattern)
            and all(map(fits, value, pattern))
        )
    return isinstance(value, pattern)
