"""How many threads numeric libraries use in a worker.

A zygote loads them while they are told to use one thread, and they do not look at
their variables again: so a worker uses their own setters. threadpoolctl's one door.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from aiogpu.worker.environ import is_given, keep

VARIABLE: Final = "OMP_NUM_THREADS"
OF_LIBRARY: Final = {
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
}
"""Variables that go before `VARIABLE`, by threadpoolctl's names of libraries."""
COUNTS: Final = frozenset({VARIABLE, *OF_LIBRARY.values()})
NUMERIC: Final = ("numpy", "scipy", "sklearn", "torch", "numexpr", "jax", "cv2")
"""Where one of these is loaded, threads may have to be counted."""


class Threads:
    """The thread counts of this process's libraries, and what they ought to be."""

    def __init__(self) -> None:
        self._scanned: tuple[str, ...] = ()
        self._controller: Any = None
        self._set: dict[str, int] = {}
        self._is_users: bool | None = None
        self._is_first = True
        self._cpus = 0

    def scan(self) -> None:
        """Look which libraries are loaded, where that is not known already."""
        loaded = tuple(name for name in NUMERIC if name in sys.modules)
        if loaded == self._scanned:
            return
        # Not before: most workers do without.
        from threadpoolctl import ThreadpoolController

        self._scanned = loaded
        self._controller = ThreadpoolController()
        self._set = {
            each.filepath: each.num_threads for each in self._controller.lib_controllers
        }

    def begin_with_one(self) -> None:
        """In the zygote: be ready for tasks with one CPU, which are most of them.

        What was loaded here uses one thread already.
        """
        if COUNTS.isdisjoint(os.environ):
            keep(VARIABLE, "1")
            self._is_users = False
            if all(count == 1 for count in self._set.values()):
                self._cpus = 1

    def adapt(self, cpus: float) -> None:
        """See to it that a task uses as many threads as it has whole CPUs.

        What the program or the task has set by a variable goes first.
        """
        whole = max(int(cpus), 1)
        if self._is_first:
            self._is_first = False
            if is_given(COUNTS):
                # What `begin_with_one` has assumed does not hold.
                self._cpus = 0
                if is_given((VARIABLE,)):
                    self._is_users = True
        if whole == self._cpus:
            return
        self._cpus = whole
        if self._is_users is None:
            self._is_users = VARIABLE in os.environ
        if not self._is_users:
            keep(VARIABLE, str(whole))
        self.scan()
        default = _count(VARIABLE, whole)
        if self._controller is not None:
            self._limit(default)
        torch = sys.modules.get("torch")
        if torch is not None and torch.get_num_threads() != default:
            torch.set_num_threads(default)

    def _limit(self, default: int) -> None:
        for library in self._controller.lib_controllers:
            variable = OF_LIBRARY.get(library.internal_api, VARIABLE)
            wanted = _count(variable, default)
            if self._set[library.filepath] != wanted:
                library.set_num_threads(wanted)
                self._set[library.filepath] = wanted


def _count(variable: str, default: int) -> int:
    """What a variable says; OMP_NUM_THREADS may be a list, one number a level."""
    first = os.environ.get(variable, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else default
