"""What a call of an actor says, in one piece: which method, its number, its arguments.

Ray carries bytes as they are, and of anything else that is an argument it makes a
pickle of its own, and undoes it, which costs a small call more than what it says.
"""

from __future__ import annotations

import struct
from typing import Final

_HEAD: Final = struct.Struct(">QH")
"""The number among its caller's calls, and the bytes of the method's name."""


def spoken(number: int, method: bytes, payload: bytes = b"") -> bytes:
    """A call in one piece.

    Args:
        number: its caller's, see `turns`; 0 for none.
        method: the name, encoded.
        payload: the arguments, if they are a pickle and nothing else.
    """
    return b"".join((_HEAD.pack(number, len(method)), method, payload))


def understood(said: bytes) -> tuple[int, str, bytes]:
    """The number, the method and the payload of a call."""
    number, length = _HEAD.unpack_from(said)
    end = _HEAD.size + length
    return number, said[_HEAD.size : end].decode(), said[end:]
