"""Numbers in arrays: values that pickle alone can carry, at a third of the cost.

cloudpickle looks at each object in Python, in case it is a function or a class of the
program. Where all are scalars and arrays of numbers there is none.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from sys import modules
from typing import Any, Final

from aiogpu.wire.outgoing import APART, Outgoing, keeping

PROTOCOL: Final = 5
SCALARS: Final = frozenset({int, float, complex, bool, str, bytes, type(None)})
_KINDS: Final = frozenset("biufc")
"""Of numpy's types of items those that are numbers."""


def are_numbers(values: Iterable[object]) -> bool:
    """Whether each is a scalar or an array of numbers, and of no class of its own."""
    # Half imported it has no arrays yet, and nobody has one.
    array = getattr(modules.get("numpy"), "ndarray", None)
    for value in values:
        kind = type(value)
        if kind not in SCALARS and (kind is not array or not _has_numbers(value)):
            return False
    return True


def _has_numbers(array: Any) -> bool:
    dtype = array.dtype
    # What a type is annotated with may be an object of any kind.
    return dtype.kind in _KINDS and dtype.metadata is None


def dump_numbers(value: object) -> bytes | Outgoing:
    """Pickle something that holds nothing else; see `are_numbers`."""
    apart: list[memoryview] = []
    stream = pickle.dumps(value, PROTOCOL, buffer_callback=keeping(apart))
    return Outgoing(stream, apart) if apart or len(stream) >= APART else stream
