"""The environment of a worker's code: variables, threads, directory, handlers.

Variables are set before the user's code is unpickled. A zygote loads numeric libraries
while variables limit them to one thread, and they do not read the variables again; so a
worker sets thread counts by threadpoolctl. `TaskStateReset` restores the directory, the
umask, each in well under a microsecond; `interrupts.UserSignals` restores signals, and
`Settings` the rest when another function comes. Other state (limits, locale, threads)
is not restored between tasks: use `max_calls=1`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final

from aiogpu.client.current import current
from aiogpu.wire.messages import ARGUMENTS, Bind
from aiogpu.worker.private_hooks import variables

_given: Final[set[str]] = set()


_recorded: Final[dict[bytes, bytes]] = {}
"""The variables at the start of each task; see `restore`."""


def bind(message: Bind) -> None:
    """Set the environment and the devices of this worker, for its whole life."""
    arguments = message.environ.pop(ARGUMENTS, None)
    if arguments is not None:
        sys.argv[:] = arguments.split("\0")
    for name, value in message.environ.items():
        keep(name, value)
    _given.update(message.environ)
    current.accelerators = message.accelerators
    if message.cpus:
        _pin(message.cpus)
    if message.gpu_memory:
        # Imported late: most workers have no limit.
        from aiogpu.worker.gpu import limit_torch

        limit_torch(message.gpu_memory)


def _pin(cpus: tuple[int, ...]) -> None:
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        # The CPUs may be gone, for example by a change of the cpuset.
        sys.stderr.write(
            f"aiogpu: this worker could not be pinned to CPUs {cpus}, the CPUs near "
            f"its GPUs: {error}\n"
        )


def is_given(names: Iterable[str]) -> bool:
    """Return whether `bind` has set one of these variables."""
    return not _given.isdisjoint(names)


def keep(name: str, value: str) -> None:
    """Set a variable that is restored for each task."""
    os.environ[name] = value
    _recorded[os.fsencode(name)] = os.fsencode(value)


def drop(name: str) -> None:
    """Unset a variable, and stop restoring it."""
    _recorded.pop(os.fsencode(name), None)
    os.environ.pop(name, None)


def record() -> None:
    """Record the variables before the worker's first task."""
    _recorded.update(variables())


def restore() -> None:
    """Restore the variables for the next task.

    Variables that a task has changed or removed are restored. Added variables stay:
    libraries set variables at their import, once in a process, and read them later.
    """
    now = variables()
    if now == _recorded:
        return
    for name, value in _recorded.items():
        if now.get(name) != value:
            os.environb[name] = value


class Settings:
    """Settings of the process that are restored when another function comes.

    All take a microsecond together, too much for each call of a short function.
    """

    def __init__(self) -> None:
        self._recorded: tuple[Any, ...] = ()

    def restore(self) -> None:
        """Restore the settings; the first call records them."""
        now = (
            gc.isenabled(),
            sys.gettrace(),
            sys.getprofile(),
            sys.getrecursionlimit(),
            os.getpriority(os.PRIO_PROCESS, 0),
            os.sched_getaffinity(0),
        )
        if not self._recorded:
            self._recorded = now
        if now == self._recorded:
            return
        collects, trace, profile, depth, priority, cpus = self._recorded
        (gc.enable if collects else gc.disable)()
        # A debugger that was attached to this worker stays.
        if "pydevd" not in sys.modules:
            sys.settrace(trace)
            sys.setprofile(profile)
        sys.setrecursionlimit(depth)
        with suppress(OSError):  # these CPUs may be gone
            os.sched_setaffinity(0, cpus)
        with suppress(PermissionError):  # only a privileged process may lower it
            os.setpriority(os.PRIO_PROCESS, 0, priority)


def seeds() -> list[Callable[[], object]]:
    """Return functions that reseed the generators of imported libraries.

    A fork repeats its parent's random numbers. The standard library's `random` reseeds
    itself after a fork; the global generators of numpy and torch do not. torch seeds
    its device generators when CUDA is initialised, which is after the fork.
    """
    functions: list[Callable[[], object]] = []
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        # Four times as fast as without an argument.
        functions.append(
            lambda: numpy_random.seed(memoryview(os.urandom(16)).cast("I"))
        )
    torch = sys.modules.get("torch")
    if torch is not None:
        functions.append(torch.default_generator.seed)
    return functions


VARIABLE: Final = "OMP_NUM_THREADS"


OF_LIBRARY: Final = {
    "openblas": "OPENBLAS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "blis": "BLIS_NUM_THREADS",
}
"""Variables that take precedence over `VARIABLE`, by threadpoolctl's library names."""


COUNTS: Final = frozenset({VARIABLE, *OF_LIBRARY.values()})


NUMERIC: Final = ("numpy", "scipy", "sklearn", "torch", "numexpr", "jax", "cv2")
"""Modules that load libraries with thread pools."""


class Threads:
    """Sets the thread counts of this process's numeric libraries."""

    def __init__(self) -> None:
        self._scanned: tuple[str, ...] = ()
        self._controller: Any = None
        self._set: dict[str, int] = {}
        self._is_users: bool | None = None
        self._is_first = True
        self._cpus = 0

    def scan(self) -> None:
        """Find loaded libraries, if numeric modules were loaded since the last scan."""
        loaded = tuple(name for name in NUMERIC if name in sys.modules)
        if loaded == self._scanned:
            return
        # Imported late: most workers do not need it.
        from threadpoolctl import ThreadpoolController

        self._scanned = loaded
        self._controller = ThreadpoolController()
        self._set = {
            library.filepath: library.num_threads
            for library in self._controller.lib_controllers
        }

    def begin_with_one(self) -> None:
        """Prepare the zygote for tasks with one CPU, which most tasks have.

        Libraries loaded in the zygote use one thread already.
        """
        if COUNTS.isdisjoint(os.environ):
            keep(VARIABLE, "1")
            self._is_users = False
            if all(count == 1 for count in self._set.values()):
                self._cpus = 1

    def adapt(self, cpus: float) -> None:
        """Give a task as many threads as it has whole CPUs.

        Variables set by the program or the task take precedence.
        """
        whole = max(int(cpus), 1)
        if self._is_first:
            self._is_first = False
            if is_given(COUNTS):
                # The assumption of `begin_with_one` does not hold.
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
    """Restores process state between the tasks of a worker."""

    def __init__(self) -> None:
        self._directory = -1
        self._mask = -1

    def record(self) -> None:
        """Record the directory and the umask, in the zygote for all workers."""
        # The directory may be unreadable or removed.
        try:
            self._directory = os.open(".", os.O_PATH | os.O_CLOEXEC)
        except OSError:
            self._directory = -1
        self._mask = os.umask(0)
        os.umask(self._mask)

    def restore(self) -> None:
        """Restore the directory and the umask."""
        if self._directory >= 0:
            try:
                os.fchdir(self._directory)
            except OSError:
                # The directory was removed, or its descriptor closed: do not try again.
                self._directory = -1
        if self._mask >= 0:
            os.umask(self._mask)
