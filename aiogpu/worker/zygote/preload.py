"""Imports modules in a zygote before it forks, and checks that it may fork.

A process may fork while it has one thread, no open device file and no CUDA. The first
zygote of an environment imports the modules that the user named. Modules that were
learnt are imported by a branch: a fork of a zygote, which imports only what is new. A
branch that turns out to be unfit ends, and the zygote that it was forked from serves
on, so no import is tried twice. Also recorded: the environment variables that imports
read, and later edits of modules' files.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from _thread import _local, get_ident
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from types import ModuleType
from typing import Any, Final

from aiogpu.client.current import current
from aiogpu.serialization.modules import is_installed, will_be_installed
from aiogpu.wire.messages import Imported, Importing, Message, Ready, Setup, Unfit
from aiogpu.worker.private_hooks import (
    Find,
    another_environ,
    is_fork_of_cuda,
    wrap_imports,
)
from aiogpu.worker.zygote.keeper import watched_over

NEEDED: Final = (
    "cloudpickle",
    "aiogpu.serialization.pickler",
    "aiogpu.memory.mapping",
    "aiogpu.memory.fd_passing",
    "aiogpu.memory.segment_pool",
)
"""Modules that nearly every worker needs for its first function and result. Modules of
`memory` must also work in a worker that has no free descriptor to import them."""


class Preload:
    """The imports of one zygote, before its first fork.

    Args:
        send: sends a message to the driver.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send

    def begin(
        self, setup: Setup, leave: Callable[[], None], driver: int
    ) -> Ready | None:
        """Import what every worker needs and what the user named.

        Args:
            setup: names the modules.
            leave: called in a fork, to close this process's descriptors.
            driver: pidfd of the driver, whose death ends all imports.

        Returns:
            The report for the driver; None if this process may not fork now, and
            `Unfit` was sent.
        """
        with _guarded():
            if not all(map(self._import, NEEDED)):
                return None
            gc.enable()  # until here only modules were made, which are never freed
            if not setup.preload:
                return Ready((), (), ())
            with watched_over(setup, driver, leave):
                return self._import_all(setup.preload, are_learnt=False)

    def extend(self, modules: Sequence[str]) -> Ready | None:
        """Import modules that were learnt, in a branch; see `begin`."""
        with _guarded():
            return self._import_all(modules, are_learnt=True)

    def _import_all(self, modules: Sequence[str], are_learnt: bool) -> Ready | None:
        before = _top_level()
        costs = []
        with recorded_reads() as names, _loading():
            for module in modules:
                self._send(Importing(module))
                started = perf_counter()
                if not self._import(module, are_learnt):
                    return None
                costs.append(int((perf_counter() - started) * 1e6))
                seen = names.intersection(VISIBILITY) if are_learnt else ()
                if seen:
                    reason = f"it reads {min(seen)} while it is imported"
                    self._send(Unfit(module, reason, False))
                    return None
        loaded = _top_level() - before - sys.stdlib_module_names
        return Ready(
            modules=tuple(sorted(loaded)),
            variables=tuple(sorted(names)),
            microseconds=tuple(costs),
            memory=_resident_bytes(),
        )

    def _import(self, module: str, is_learnt: bool = False) -> bool:
        """Import a module; report and return False if this process may not fork now.

        A `BaseException` that is no `Exception` ends the zygote if the user asked for
        the module, but not if the module was learnt.
        """
        raised: tuple[type[BaseException], ...]
        raised = (BaseException,) if is_learnt else (Exception,)
        try:
            importlib.import_module(module)
        except raised as error:
            raises = f"{type(error).__name__}: {error}"
            if is_learnt:
                raises = " ".join(f"its import raises {raises}".split())[:500]
            self._send(Unfit(module, raises, not is_learnt))
            return False
        reason = unfit_to_fork()
        if reason is not None:
            self._send(Unfit(module, reason, False))
        return reason is None


def _resident_bytes() -> int:
    """Return the memory of this process, shared pages included (proc(5), statm)."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _top_level() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


@contextmanager
def _loading() -> Iterator[None]:
    """Refuse modules that start their program, and so another zygote."""
    current.loader, current.name = get_ident(), "init(preload=...)"
    try:
        yield
    finally:
        current.loader, current.name = 0, ""


@contextmanager
def _guarded() -> Iterator[None]:
    """Keep libraries from starting threads and seeing devices in the block."""
    before = {name: os.environ.get(name) for name in GUARDS}
    os.environ.update(GUARDS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


VISIBILITY: Final = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)
"""Variables that only code that looks for devices reads."""


class _Recording(os._Environ[str]):
    """`os.environ` that records reads of single names, but not copies of all."""

    names: set[str]
    expected: list[str]

    def __getitem__(self, name: str) -> str:
        # A copy lists all names, and reads them in that order.
        if self.expected and self.expected[-1] == name:
            self.expected.pop()
        elif isinstance(name, str):
            self.names.add(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        listed = list(super().__iter__())
        self.expected = listed[::-1]
        return iter(listed)


@contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """Record the variables that are read in the block; gives the set of names."""
    names: set[str] = set()
    with another_environ(_Recording, names=names, expected=[]):
        yield names


OWN: Final = "aiogpu"
"""This package, whose files are not watched: the driver runs them too."""


class Files:
    """The source files of all loaded modules, with their modification times.

    Args:
        since: start of the imports, in nanoseconds since the epoch. A file that was
            written later may have been read before or after the write.
    """

    def __init__(self, since: int) -> None:
        now = time.time_ns()
        self._written: dict[str, tuple[str, int]] = {}
        for name, module in list(sys.modules.items()):
            path = getattr(getattr(module, "__spec__", None), "origin", None)
            if not isinstance(path, str) or name.partition(".")[0] == OWN:
                continue
            written = _written(path)
            if written:
                is_doubtful = since <= written <= now
                self._written[path] = (name, 0 if is_doubtful else written)

    def edited(self) -> list[str]:
        """Return the modules whose files have changed since the last call.

        A removed file does not count as changed.
        """
        edited = []
        for path, (name, before) in self._written.items():
            written = _written(path)
            if written not in (0, before):
                self._written[path] = (name, written)
                edited.append(name)
        return edited


def _written(path: str) -> int:
    """Return a file's modification time in nanoseconds; 0 if there is no file."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


DEVICE_FILES: Final = (
    "/dev/nvidia",
    "/dev/dri",
    "/dev/kfd",
    "/dev/neuron",
    "/dev/accel",
    "/dev/hl",
    "/dev/davinci",
)


GUARDS: Final = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "BLIS_NUM_THREADS": "1",
}
"""Variables that are set during imports: libraries that read them start no threads and
use no GPU. The program's own values are restored before the first fork."""


BAD: Final = 1


def unfit_to_fork() -> str | None:
    """Return the reason why this process may not fork, None if it may."""
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"it left {threads - 1} threads running ({', '.join(_thread_names())})"
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith(DEVICE_FILES):
            return f"it opened {target}"
    torch = sys.modules.get("torch")
    if torch is not None and has_begun_cuda(torch):
        return "it made torch look for CUDA devices"
    return None


def _thread_names() -> list[str]:
    """Return the names of up to eight other threads, Python's name where it has one."""
    threading = sys.modules.get("threading")
    python = threading.enumerate() if threading is not None else ()
    known = {str(thread.native_id): thread.name for thread in python}
    names = []
    for number in os.listdir("/proc/self/task"):
        if number == str(os.getpid()):
            continue
        if number in known:
            names.append(known[number])
        else:
            with suppress(OSError), open(f"/proc/self/task/{number}/comm") as file:
                names.append(file.read().strip())
    return sorted(names)[:8]


def has_begun_cuda(torch: ModuleType) -> bool:
    """Return whether torch would refuse CUDA in forks of this process."""
    cuda = getattr(torch, "cuda", None)
    if cuda is None:
        return False
    if cuda.is_initialized():
        return True
    pid = os.fork()
    if pid == 0:
        status = BAD
        try:
            status = BAD if is_fork_of_cuda(cuda) else 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] != 0


NOISE: Final = 1000
"""Microseconds; shorter imports are not reported."""


class _Nesting(_local):
    """The running imports of one thread, and their results."""

    depth = 0
    begun = ""
    found: list[tuple[str, int]]
    name = ""


def _note_nowhere(_module: str) -> None:
    """Note no import: the process is no worker yet."""


class Imports:
    """The installed modules that this process has imported since the last `take`.

    An installed module counts alone, without the modules that it imports. A user's own
    module does not count, but its imports do: what the user's module does at its import
    may depend on the worker.

    The beginning and the end of the import of an installed module are reported at once,
    so that the driver learns of a slow import while it runs.

    Attributes:
        found: names and microseconds, nested imports included.
        report: sends `Importing`; None outside of workers.
        note: called with the name of each module as its import begins, and with that of
            the outer import, or "", as it ends.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []
        self.report: Callable[[Message], None] | None = None
        self.note: Callable[[str], None] = _note_nowhere

    def leave(self) -> None:
        """Note and report nothing: this process is a fork made by user code."""
        self.report = None
        self.note = _note_nowhere

    def take(self) -> Imported:
        """Return and forget the recorded imports."""
        imports, self.found = self.found, []
        return Imported(
            tuple(name for name, _ in imports), tuple(cost for _, cost in imports)
        )

    def watch(self) -> bool:
        """Record all imports from now on; False if this Python does not support it."""
        return wrap_imports(self._noting)

    def _noting(self, find_and_load: Find) -> Find:
        nesting, imports = _Nesting(), self

        def note(name: str, import_: object) -> Any:
            if name in sys.modules:
                return find_and_load(name, import_)
            if nesting.depth == 0:
                nesting.found = []
            nesting.depth += 1
            is_begun = False
            if imports.report and not nesting.begun and will_be_installed(name):
                nesting.begun, is_begun = name, True
                imports.report(Importing(name))
            outer, nesting.name = nesting.name, name
            imports.note(name)
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
                if is_begun:
                    nesting.begun = ""
                    if imports.report:  # None if the module has forked this process
                        imports.report(Importing(""))
                nesting.name = outer
                imports.note(outer)
                if nesting.depth == 0 and nesting.found:
                    imports.found += nesting.found

        return note
