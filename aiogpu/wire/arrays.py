"""Numbers in arrays: values that pickle alone can carry, at a third of the cost.

cloudpickle looks at each object in Python, in case it is a function or a class of the
program. Where all are scalars and arrays of numbers there is none.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from copyreg import dispatch_table
from sys import modules
from typing import Any, Final

from aiogpu.wire.outgoing import APART, Outgoing, keeping

PROTOCOL: Final = 5
SCALARS: Final = frozenset({int, float, complex, bool, str, bytes, type(None)})
_KINDS: Final = frozenset("biufc")
"""Of numpy's types of items those that are numbers."""


def are_numbers(values: Iterable[object]) -> bool:
    """Whether each is a scalar or an array of numbers, and of no class of its own."""
    for value in values:
        kind = type(value)
        # By its name first: numpy may be a module that is loaded by a look at it.
        if kind not in SCALARS and (
            kind.__name__ != "ndarray" or not _is_array_of_numbers(kind, value)
        ):
            return False
    return True


def _is_array_of_numbers(kind: type, value: Any) -> bool:
    if kind is not getattr(modules.get("numpy"), "ndarray", None):
        return False
    dtype = value.dtype
    return (
        dtype.kind in _KINDS
        # What it, or a part of each item, is annotated with may be of any kind.
        and dtype.metadata is None
        and dtype.names is None
        # Nor has the program its own way to pickle arrays.
        and kind not in dispatch_table
    )


def dump_numbers(value: object) -> bytes | Outgoing:
    """Pickle something that holds nothing else; see `are_numbers`."""
    apart: list[memoryview] = []
    stream = pickle.dumps(value, PROTOCOL, buffer_callback=keeping(apart))
    return Outgoing(stream, apart) if apart or len(stream) >= APART else stream
