"""Functions as they are in a script: defined in `__main__`, they travel by value."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

T = TypeVar("T")


def in_script(function: Callable[[int], T]) -> Callable[[int], T]:
    """The same function as if the program itself had defined it, and no module.

    A function of a module has the module imported, in each fresh process again.

    Args:
        function: uses nothing global.
    """
    source = cast("Any", function)
    names = {"__name__": "__main__", "__builtins__": builtins}
    return FunctionType(source.__code__, names, source.__name__)
