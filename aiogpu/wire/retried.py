"""After which exceptions a task is tried again, as it travels to who decides it.

The worker decides: it has the user's modules, which the node need not have.
"""

from __future__ import annotations

from typing import Any, Final

from aiogpu.wire.payload import dump_option, load

Retried = bool | tuple[type[BaseException], ...]
"""Exception classes; True for all, False for none."""

NONE: Final = b""
ALL: Final = b"*"
"""No pickle begins so."""


def dump_retried(wanted: Retried) -> bytes:
    """The option `retry_exceptions` as bytes.

    Raises:
        SerializationError: with the path to what cannot be pickled.
    """
    if isinstance(wanted, bool):
        return ALL if wanted else NONE
    return dump_option("retry_exceptions", wanted)


def load_retried(retried: bytes) -> Retried:
    """Undo `dump_retried`; raises whatever unpickling raises."""
    if retried in (NONE, ALL):
        return retried == ALL
    wanted: Any = load(retried)
    return tuple(wanted)


def is_one_of(wanted: Retried, error: BaseException) -> bool:
    """Whether it is one of these; raises what a metaclass of the user's may raise."""
    return wanted if isinstance(wanted, bool) else isinstance(error, wanted)
