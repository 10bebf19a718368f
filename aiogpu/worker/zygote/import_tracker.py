"""What a worker imports, and what that costs: noted where CPython imports at all.

CPython calls `importlib._bootstrap._find_and_load` for each module that is not in
`sys.modules`, and for no other, so what is imported already costs nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from _thread import _local
from collections.abc import Callable
from time import perf_counter
from types import ModuleType
from typing import Any, Final

from aiogpu.wire.messages import Imported
from aiogpu.worker.interrupts import IMPORT

NOISE: Final = 1000
"""Microseconds below which an import is not worth a word."""


_ENTRY: Final = "_find_and_load"


_STANDARD: Final = f"{os.path.dirname(os.__file__)}{os.sep}"


_SITES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class _Nesting(_local):
    """One thread's imports under way, and what came of them."""

    depth = 0
    found: list[tuple[str, int]]


class Imports:
    """The installed modules that this process has imported since it was last asked.

    Of a user's own module that imports others those others count: what his own does
    when it is imported may depend on the worker. Of an installed one, itself alone.

    Attributes:
        found: names and microseconds, the time of all that each has imported
            included.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []

    def take(self) -> Imported:
        """Return what was found; forgotten with this."""
        found, self.found = self.found, []
        return Imported(
            tuple(name for name, _ in found), tuple(cost for _, cost in found)
        )

    def watch(self) -> bool:
        """Note all imports from now on; False if this Python has another way."""
        bootstrap: Any = getattr(importlib, "_bootstrap", None)
        find_and_load = getattr(bootstrap, _ENTRY, None)
        if find_and_load is None:
            return False
        setattr(bootstrap, _ENTRY, self._noting(find_and_load))
        return True

    def _noting(self, find_and_load: Callable[..., Any]) -> Callable[..., Any]:
        nesting, imports = _Nesting(), self

        def note(name: str, import_: object) -> Any:
            if name in sys.modules:
                return find_and_load(name, import_)
            if nesting.depth == 0:
                nesting.found = []
            nesting.depth += 1
            inner = len(nesting.found)
            started = perf_counter()
            try:
                module = find_and_load(name, import_)
                if is_installed(module):
                    cost = int((perf_counter() - started) * 1e6)
                    nesting.found[inner:] = [(name, cost)] if cost >= NOISE else []
                return module
            finally:
                nesting.depth -= 1
                if nesting.depth == 0 and nesting.found:
                    imports.found += nesting.found

        # So it counts as a part of importlib: tracebacks leave it out, and it is not
        # broken off.
        note.__code__ = note.__code__.replace(co_filename=IMPORT)
        return note


def is_installed(module: ModuleType) -> bool:
    """Return whether a module belongs to Python or to an installed package."""
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    if not isinstance(origin, str):
        return False
    if origin in ("built-in", "frozen") or origin.startswith(_STANDARD):
        return True
    return any(func in origin for func in _SITES)
