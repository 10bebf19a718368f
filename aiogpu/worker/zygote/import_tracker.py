"""What a worker imports, and what that costs: noted where CPython imports at all.

That is called for each module that is not in `sys.modules`, and for no other, so what
is imported already costs nothing.
"""

from __future__ import annotations

import os
import sys
from _thread import _local
from time import perf_counter
from types import ModuleType
from typing import Any, Final

from aiogpu.wire.messages import Imported
from aiogpu.worker.private_hooks import Find, wrap_imports

NOISE: Final = 1000
"""Microseconds below which an import is not worth a word."""


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
        return wrap_imports(self._noting)

    def _noting(self, find_and_load: Find) -> Find:
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
