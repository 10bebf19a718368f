"""The environment of a worker's code: variables, threads, directory, handlers.

The environment is set before anything of the user's is unpickled. A zygote loads
numeric libraries while they are told to use one thread, and they do not look at their
variables again: so a worker uses their own setters (threadpoolctl's one door).
`TaskStateReset` puts back the directory, the file mode mask and the handler that
interrupts a task, each in well under a microsecond. What a process cannot be given back
so cheaply (limits, locale, masked signals, threads) stays with the worker:
`max_calls=1` avoids that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

from aiogpu.client.current import current
from aiogpu.wire.messages import Bind
from aiogpu.worker.private_hooks import variables

_given: Final[set[str]] = set()


_found: Final[dict[bytes, bytes]] = {}
"""The variables that each task finds; see `restore`."""


def bind(message: Bind) -> None:
    """Take on the environment and the devices that this worker has for life."""
    for name, value in message.environ.items():
        keep(name, value)
    _given.update(message.environ)
    current.accelerators = message.accelerators
    if message.cpus:
        _pin(message.cpus)
    if message.gpu_memory:
        # Of no use to most workers.
        from aiogpu.worker.gpu import limit_torch

        limit_torch(message.gpu_memory)


def _pin(cpus: tuple[int, ...]) -> None:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        # They may have been taken away meanwhile, by a cpuset say.
        sys.stderr.write(
            f"aiogpu: this worker could not be pinned to CPUs {cpus}, which are near "
            f"its GPUs: {error}\n"
        )


def is_given(names: Iterable[str]) -> bool:
    """Return whether the assignment has set one of these variables."""
    return not _given.isdisjoint(names)


def keep(name: str, value: str) -> None:
    """Set a variable that is restored for each task."""
    os.environ[name] = value
    _found[os.fsencode(name)] = os.fsencode(value)


def drop(name: str) -> None:
    """Forget a variable that was kept, and unset it."""
    _found.pop(os.fsencode(name), None)
    os.environ.pop(name, None)


def find() -> None:
    """Note the variables that tasks find, before the worker's first task begins."""
    _found.update(variables())


def restore() -> None:
    """Give the next task the variables that this one found.

    What a task has changed or removed is put back. What it has added stays: libraries
    set variables as they are imported, once in a process, and read them later.
    """
    now = variables()
    if now == _found:
        return
    for name, value in _found.items():
        if now.get(name) != value:
            os.environb[name] = value


def seeds() -> list[Callable[[], object]]:
    """Return functions that reseed the generators of imported libraries.

    A fork repeats its parent's numbers. The standard library's `random` sees to
    itself after a fork; numpy's and torch's global generators do not. What torch has
    for devices is seeded when CUDA begins, which is after the fork.
    """
    found: list[Callable[[], object]] = []
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # Without an argument it would take four times as long.
        found.append(lambda: numpy_random.seed(memoryview(os.urandom(16)).cast("I")))
    torch = sys.modules.get("torch")
    if torch is not None:
        found.append(torch.default_generator.seed)
    return found


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
        """In the zygote: set up for tasks with one CPU, which most tasks have.

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
    """Parse a variable; OMP_NUM_THREADS may be a list, one number per level."""
    first = os.environ.get(variable, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else default


class TaskStateReset:
    """Restores the state in which each task of a worker begins."""

    def __init__(self, restore_handler: Callable[[], None]) -> None:
        self._restore_handler = restore_handler
        self._directory = -1
        self._mask = -1

    def find(self) -> None:
        """Note where this process stands: in the zygote, for all its workers."""
        # The directory may be unreadable, or removed under the program's feet.
        try:
            self._directory = os.open(".", os.O_PATH | os.O_CLOEXEC)
        except OSError:
            self._directory = -1
        self._mask = os.umask(0)
        os.umask(self._mask)

    def restore(self) -> None:
        """Undo what a task did to it."""
        if self._directory >= 0:
            try:
                os.fchdir(self._directory)
            except OSError:
                # It was removed or closed, and is no better for the next task.
                self._directory = -1
        if self._mask >= 0:
            os.umask(self._mask)
        self._restore_handler()
