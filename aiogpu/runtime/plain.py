"""Plain values, pickled: who reads them runs nobody's code, and knows their shape."""

from __future__ import annotations

import pickle
from io import BytesIO
from typing import Any, Final, NamedTuple, NoReturn

from aiogpu.errors import ProtocolError

_PLAIN: Final[tuple[Any, ...]] = (int, float, str)


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
    for kind in _PLAIN:
        if isinstance(value, kind):
            return kind.__getnewargs__(value)[0]
    return bytes(value)


def load_plain(data: bytes) -> object:
    """Undo `pickle.dumps` of what `plain` has given.

    Raises:
        ProtocolError: it is something else.
    """
    try:
        return _Unpickler(BytesIO(data)).load()
    except Exception as error:
        # Of bytes that were made up, unpickling may raise anything.
        raise ProtocolError(f"no plain values: {type(error).__name__}") from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name} is not plain")


def fits(value: object, pattern: Any) -> bool:
    """Whether a value has a certain shape.

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
