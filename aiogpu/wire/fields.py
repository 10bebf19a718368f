"""From the array that a frame holds to the message that it stands for.

Accepts exactly the tags and field types of `wire.messages`.
"""

from __future__ import annotations

from itertools import product
from types import NoneType
from typing import Any, Final

from aiogpu.errors import ProtocolError
from aiogpu.wire.messages import TAGS, Message

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
