"""Mutations of a valid case: of its bytes, its frames, or the msgpack in a frame."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, Final

import msgpack

from aiogpu.wire.codec import HEADER, LIMIT
from tests.unit.wire.cases import DESCRIPTORS, NODE, ROLES, Case

HUGE: Final = (0xFF, 0xFFFF, 1 << 20, 1 << 30, 0x7FFF_FFFF, 0xFFFF_FFFF)
ODD: Final[tuple[object, ...]] = (
    *(0, 1, -1, 127, 128, 1 << 31, 1 << 32, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1),
    *(None, True, False, 0.0, float("nan"), float("inf"), "", "a", "\udcff", b""),
    *(b"\x01", b"x" * 300, (), (1,), ("a", 1), ((),), {}, {"a": 1}, {"a": ()}),
    *(msgpack.ExtType(5, b""), msgpack.Timestamp(1, 1)),
)
ANNOUNCED: Final = (b"\xdc%H", b"\xdd%I", b"\xde%H", b"\xdf%I", b"\xc5%H", b"\xc6%I")
"""Beginnings of msgpack that say how much follows, and as what."""
OPENINGS: Final = (b"\x91", b"\x81\xa1k", b"\x92\x01", b"\xdc\xff\xff", b"\x80")
PICKLED: Final = (b"\x80\x05", b"\x85", b"2\x86", b"]", b"h\x00", b"\x94", b"N", b".")
PIECES: Final = 500
"""In more of them no case comes: that would only take long."""
Source = random.Random


def spoilt(case: Case, other: Case, source: Source) -> Case:
    """Mutate a case, with parts of another case for the same reader."""
    data = case.data
    ways = [*BYTES]
    if case.target in (NODE, *ROLES):
        ways += [*FRAMES, *FRAMES]
    elif case.target != DESCRIPTORS:
        ways += [*LOADED, *LOADED]
    for _ in range(source.choice((1, 1, 1, 2, 3, 5))):
        data = source.choice(ways)(data, other.data, source)
    cut = source.choice((case.cut, case.cut, 0, 1, 2, 3, 5, 64, 1000))
    if cut and len(data) // cut > PIECES:
        cut = 0
    return Case(case.target, cut, data)


def _place(data: bytes, source: Source) -> int:
    return source.randrange(len(data) + 1)


def _flip(data: bytes, _other: bytes, source: Source) -> bytes:
    if not data:
        return data
    place = source.randrange(len(data))
    mask = source.choice((1, 2, 4, 8, 16, 32, 64, 128, 255, source.randrange(1, 256)))
    return data[:place] + bytes((data[place] ^ mask,)) + data[place + 1 :]


def _truncate(data: bytes, _other: bytes, source: Source) -> bytes:
    return data[: _place(data, source)]


def _remove(data: bytes, _other: bytes, source: Source) -> bytes:
    start = _place(data, source)
    return data[:start] + data[start + source.choice((1, 2, 4, 8, 100)) :]


def _repeat(data: bytes, _other: bytes, source: Source) -> bytes:
    start, end = sorted((_place(data, source), _place(data, source)))
    times = source.choice((2, 2, 3, 50))
    if (end - start) * times > 1 << 16:
        return data
    return data[:start] + data[start:end] * times + data[end:]


def _insert(data: bytes, _other: bytes, source: Source) -> bytes:
    place = _place(data, source)
    size = source.choice((1, 1, 2, 4, 8, 40))
    return data[:place] + source.randbytes(size) + data[place:]


def _splice(data: bytes, other: bytes, source: Source) -> bytes:
    return data[: _place(data, source)] + other[_place(other, source) :]


BYTES: Final = (_flip, _flip, _truncate, _remove, _repeat, _insert, _splice)
Way = Callable[[bytes, bytes, Source], bytes]


def frames_in(data: bytes) -> list[bytes]:
    """Return the frames with headers; the last may be incomplete."""
    frames, start = [], 0
    while start < len(data):
        head = data[start : start + HEADER]
        end = start + HEADER + int.from_bytes(head, "little")
        frames.append(data[start:end])
        start = end
    return frames


def framed(body: bytes) -> bytes:
    """Make a frame with the right length."""
    return struct.pack("<I", len(body)) + body


def _of_one(change: Callable[[bytes, Source], bytes]) -> Way:
    """Mutate the array in one frame, and correct the length."""

    def way(data: bytes, _other: bytes, source: Source) -> bytes:
        frames = frames_in(data) or [b""]
        place = source.randrange(len(frames))
        frames[place] = framed(change(frames[place][HEADER:], source))
        return b"".join(frames)

    return way


def _order(data: bytes, other: bytes, source: Source) -> bytes:
    frames = frames_in(data) + source.choice(([], frames_in(other)))
    source.shuffle(frames)
    return b"".join(frames[: source.randrange(1, 40)])


def _drop(data: bytes, _other: bytes, source: Source) -> bytes:
    frames = frames_in(data) or [b""]
    del frames[source.randrange(len(frames))]
    return b"".join(frames)


def _twice(data: bytes, _other: bytes, source: Source) -> bytes:
    frames = frames_in(data) or [b""]
    frames.insert(source.randrange(len(frames)), source.choice(frames))
    return b"".join(frames)


def _length(data: bytes, _other: bytes, source: Source) -> bytes:
    frames = frames_in(data) or [b""]
    place = source.randrange(len(frames))
    right = max(len(frames[place]) - HEADER, 0)
    wrong = (right + 1, max(right - 1, 0), 0, 1024, 1025, LIMIT, LIMIT + 1, *HUGE)
    head = struct.pack("<I", source.choice(wrong) & 0xFFFF_FFFF)
    frames[place] = head + frames[place][HEADER:]
    return b"".join(frames)


def _deep(body: bytes, source: Source) -> bytes:
    depth = source.choice((1, 3, 10, 500, 1023, 1025, 5000))
    return body[: source.choice((0, 1, 2, 5))] + source.choice(OPENINGS) * depth


def _announced(body: bytes, source: Source) -> bytes:
    """Announce billions of missing items, on many levels."""
    kind = source.choice(ANNOUNCED)
    count = source.choice((*HUGE, 50_000, len(body), len(body) + 1))
    wide = kind[-1:] == b"I"
    count = min(count, 0xFFFF_FFFF if wide else 0xFFFF)
    header = kind[:1] + struct.pack(">I" if wide else ">H", count)
    rest = bytes(source.choice((0, 0, 0, 0, 100, 100, 20_000, 60_000)))
    return (
        source.choice((b"", b"\x95\x01")) + header * source.choice((1, 2, 1000)) + rest
    )


def _field(body: bytes, source: Source) -> bytes:
    """Change, retype or add a field of the message."""
    try:
        fields: Any = msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, TypeError, RecursionError):
        return body
    if type(fields) is not list:
        return body
    place = source.randrange(len(fields) + 1)
    odd = source.choice(ODD)
    inner = fields[place] if place < len(fields) else None
    if isinstance(inner, list) and source.random() < 0.7:
        inner.insert(source.randrange(len(inner) + 1), odd)
    elif isinstance(inner, dict) and source.random() < 0.7:
        inner[source.choice(("k", "", 1, None))] = odd
    elif source.random() < 0.2:
        fields.insert(place, odd)
    else:
        fields[place : place + 1] = [odd]
    return _packed(fields, body)


def _many(body: bytes, source: Source) -> bytes:
    """Fill a list of the message with very many items."""
    try:
        fields: Any = msgpack.unpackb(body, strict_map_key=False)
    except (ValueError, TypeError, RecursionError):
        return body
    lists = (
        [field for field in fields if isinstance(field, list)]
        if _is_list(fields)
        else []
    )
    if not lists:
        return body
    source.choice(lists).extend([source.choice(ODD)] * source.choice((10, 3000)))
    return _packed(fields, body)


def _is_list(fields: object) -> bool:
    return type(fields) is list


def _packed(fields: object, otherwise: bytes) -> bytes:
    packer = msgpack.Packer(unicode_errors="surrogatepass")
    try:
        packed: bytes = packer.pack(fields)
    except (ValueError, TypeError, OverflowError):
        return otherwise
    return packed


FRAMES: Final = (
    *(_order, _drop, _twice, _length, _of_one(_deep), _of_one(_announced)),
    *(_of_one(_field), _of_one(_field), _of_one(_field), _of_one(_many)),
)


def _of_rest(change: Callable[[bytes, Source], bytes]) -> Way:
    """Mutate the array of a parcel, behind its mark."""
    return lambda data, _other, source: data[:1] + change(data[1:], source)


def _opcodes(data: bytes, _other: bytes, source: Source) -> bytes:
    """Insert pickle opcodes, possibly very many."""
    place = _place(data, source)
    huge = struct.pack("<I", source.choice(HUGE))
    long = struct.pack("<Q", source.choice(HUGE))
    kinds = (b"r" + huge, b"j" + huge, b"\x96" + long, b"\x8e" + long, b"\x95" + long)
    some = source.choice((*PICKLED, *kinds)) * source.choice((1, 1, 30, 1000))
    return data[:place] + some + data[place:]


LOADED: Final = (
    *(_of_rest(_deep), _of_rest(_announced), _of_rest(_field), _of_rest(_many)),
    _opcodes,
)
