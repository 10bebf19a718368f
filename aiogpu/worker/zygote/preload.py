"""Imports modules in a zygote before it forks, and checks that it may fork.

The user names some modules; others were learnt from workers. Learnt modules are
imported in a throw-away child first: one child imports all of them in order; after an
unfit module, another child imports the rest. A process may fork while it has one
thread, no open device file and no CUDA. Also recorded: the environment variables that
imports read, and later edits of modules' files.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import sys
import time
from _thread import _local, get_ident
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import perf_counter
from types import ModuleType
from typing import Any, Final

from aiogpu.client.current import current
from aiogpu.linux import syscalls as kernel
from aiogpu.wire.messages import Imported, LeftOut, Message, Ready, Setup, Unfit
from aiogpu.worker.private_hooks import (
    Find,
    another_environ,
    is_fork_of_cuda,
    wrap_imports,
)
from aiogpu.worker.zygote.keeper import end_children, watched_over

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
        setup: names the modules.
        send: sends a message to the driver.
        leave: called in forks, to close the parent's descriptors.
        driver: pidfd of the driver, whose death ends all imports.
    """

    def __init__(
        self,
        setup: Setup,
        send: Callable[[Message], None],
        leave: Callable[[], None],
        driver: int,
        note: Callable[[str], None],
    ) -> None:
        self._setup = setup
        self._note = note
        self._send = send
        self._leave = leave
        self._driver = driver

    def run(self) -> Ready | None:
        """Import all modules; return the report for the driver.

        Returns:
            None if this process may not fork now, and `Unfit` was sent; or if the
            driver has died.
        """
        with _guarded():
            if not all(map(self._import, NEEDED)):
                return None
            gc.enable()  # until here only modules were made, which are never freed
            before = _top_level()
            with recorded_reads() as names, _loading():
                if not self._import_asked():
                    return None
        modules = _top_level() - before - sys.stdlib_module_names
        return Ready(tuple(sorted(modules)), tuple(sorted(names)))

    def _import_asked(self) -> bool:
        setup = self._setup
        proven = [module for module in setup.learnt if module in setup.proven]
        rest = [module for module in setup.learnt if module not in setup.proven]
        try:
            return (
                self._import_all(setup.preload)
                and self._import_all(proven, True)
                and self._import_all(self._choose(rest), True)
            )
        except DriverHasDied:
            return False

    def _import_all(self, modules: Sequence[str], are_learnt: bool = False) -> bool:
        if not modules:
            return True
        with watched_over(self._setup, self._driver, self._leave):
            return all(self._import(module, are_learnt) for module in modules)

    def _import(self, module: str, is_learnt: bool = False) -> bool:
        """Import a module; report and return False if this process may not fork now.

        A `BaseException` that is no `Exception` ends the zygote if the user asked for
        the module, but not if the module was learnt.
        """
        raised: tuple[type[BaseException], ...]
        raised = (BaseException,) if is_learnt else (Exception,)
        self._note(module)
        try:
            importlib.import_module(module)
        except raised as error:
            raises = f"{type(error).__name__}: {error}"
            if is_learnt:
                raises = f"its import raises {raises}"
            self._send(Unfit(module, raises, not is_learnt))
            return False
        reason = unfit_to_fork()
        if reason is not None:
            self._send(Unfit(module, reason, False))
        return reason is None

    def _choose(self, modules: Sequence[str]) -> list[str]:
        """Return the learnt modules that a process may import before it forks."""
        if not modules:
            return []
        before = kernel.children()
        fit, unfit = probe(modules, self._leave, self._driver)
        # Processes that the imports started and that outlived the children.
        end_children(spared=before)
        for module, reason in unfit.items():
            self._send(LeftOut(module, reason))
        return fit


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


LIMIT: Final = 60.0
"""Seconds that the trial import of a module may take."""


VISIBILITY: Final = (
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    "ROCR_VISIBLE_DEVICES",
)
"""Variables that only code that looks for devices reads."""


class DriverHasDied(Exception):  # noqa: N818 - not an error
    """The driver has died."""


def probe(
    modules: Sequence[str], leave: Callable[[], None], driver: int
) -> tuple[list[str], dict[str, str]]:
    """Try to import each module.

    Args:
        modules: their names, in order of import.
        leave: called first in each fork, to close the parent's descriptors.
        driver: pidfd of the driver.

    Returns:
        The modules after which a process may fork, and the reasons against the others.

    Raises:
        DriverHasDied: the driver died during an import.
    """
    fit: list[str] = []
    unfit: dict[str, str] = {}
    rest = list(modules)
    while rest:
        # Fit modules are imported again first, since others may depend on them.
        answers = _attempt([*fit, *rest], len(fit), leave, driver)
        for answer in answers:
            if answer == "":
                fit.append(rest.pop(0))
            else:
                unfit[rest.pop(0)] = answer
    return fit, unfit


def _attempt(
    modules: Sequence[str], known: int, leave: Callable[[], None], driver: int
) -> list[str]:
    """Try the modules after the first `known`, up to the first unfit module."""
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            kernel.die_with_parent(parent)
            leave()
            _import_all(modules, known, writing)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        answers, is_hanging = _listen(reading, len(modules) - known, driver)
    finally:
        os.close(reading)
        kernel.kill(pid)
        status = os.waitpid(pid, 0)[1]
    if len(answers) < len(modules) - known and not any(answers):
        answers.append(_describe(status, is_hanging))
    return answers


def _import_all(modules: Sequence[str], known: int, answers: int) -> None:
    """Import modules in the child, and write a line about each: "" if it is fit."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        # Their output is shown when the zygote imports them.
        os.dup2(nothing, stream)
    for count, module in enumerate(modules):
        reason = _import_one(module)
        if count >= known or reason:
            os.write(answers, f"{reason}\n".encode())
        if reason:
            return


def _import_one(module: str) -> str:
    """Import a module; return the reason if it is unfit, else ""."""
    try:
        with recorded_reads() as names:
            importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001 - an import may raise anything
        reason = f"its import raises {type(error).__name__}: {error}"
        return " ".join(reason.split())[:500]
    seen = names.intersection(VISIBILITY)
    if seen:
        return f"it reads {min(seen)} while it is imported"
    return unfit_to_fork() or ""


def _listen(reading: int, count: int, driver: int) -> tuple[list[str], bool]:
    """Read up to `count` answers, up to the first with a reason.

    Returns:
        The answers, and True if the next answer did not arrive in time.
    """
    poll = select.poll()
    for descriptor in (reading, driver):
        poll.register(descriptor, select.POLLIN)
    answers: list[str] = []
    partial = b""
    deadline = time.monotonic() + LIMIT
    while len(answers) < count and not any(answers):
        ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if not ready:
            return answers, True
        if driver in ready:
            raise DriverHasDied
        data = os.read(reading, 1 << 16)
        if not data:
            break
        *lines, partial = (partial + data).split(b"\n")
        if lines:
            answers += [line.decode("utf-8", "replace") for line in lines]
            deadline = time.monotonic() + LIMIT
    return answers, False


def _describe(status: int, is_hanging: bool) -> str:
    """Return the reason why the child has not answered."""
    if is_hanging:
        return f"its import did not end within {LIMIT:g} s"
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"its import was ended by {name}"
    return f"its import ended the process with code {os.WEXITSTATUS(status)}"


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
    *("/dev/nvidia", "/dev/dri", "/dev/kfd", "/dev/neuron"),
    *("/dev/accel", "/dev/hl", "/dev/davinci"),
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


_STANDARD: Final = f"{os.path.dirname(os.__file__)}{os.sep}"


START_UP: Final = frozenset({"sitecustomize", "usercustomize"})
"""Modules that Python runs before a program; only their effects are of use."""


_SITES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class _Nesting(_local):
    """The running imports of one thread, and their results."""

    depth = 0
    found: list[tuple[str, int]]
    name = ""


def _note_nowhere(_module: str) -> None:
    """Note no import: the process is no worker yet."""


class Imports:
    """The installed modules that this process has imported since the last `take`.

    An installed module counts alone, without the modules that it imports. A user's own
    module does not count, but its imports do: what the user's module does at its import
    may depend on the worker.

    Attributes:
        found: names and microseconds, nested imports included.
        note: called with the name of each module as its import begins, and with that of
            the outer import, or "", as it ends.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []
        self.note: Callable[[str], None] = _note_nowhere

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
                nesting.name = outer
                imports.note(outer)
                if nesting.depth == 0 and nesting.found:
                    imports.found += nesting.found

        return note


def is_installed(module: ModuleType) -> bool:
    """Return whether a module belongs to Python or to an installed package."""
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    if not isinstance(origin, str) or getattr(spec, "name", "") in START_UP:
        return False
    if origin in ("built-in", "frozen") or origin.startswith(_STANDARD):
        return True
    return any(site in origin for site in _SITES)
