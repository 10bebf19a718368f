"""Tasks that stay in one phase of their life, and report it at the gate.

Each notes in the file `place` that it has begun and, if its code can, that it has
stopped. Light to import, since workers import it.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import aiogpu
from tests.support.gate import pass_gate, say

BEGUN: Final = "begun"
STOPPED: Final = "stopped"


def note(place: str, word: str) -> None:
    """Append a word to a file, in one write."""
    descriptor = os.open(place, os.O_APPEND | os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, f"{word}\n".encode())
    os.close(descriptor)


@contextmanager
def noted(place: str) -> Iterator[None]:
    """Note the begin and the end of the task's own code."""
    note(place, BEGUN)
    try:
        yield
    finally:
        note(place, STOPPED)


def spin() -> None:
    while True:
        pass


@aiogpu.remote
def loop(path: str, name: str, place: str) -> None:
    with noted(place):
        say(path, name)
        spin()


@aiogpu.remote
async def coroutine(path: str, name: str, place: str) -> None:
    """Clear up by a step of the loop."""
    import asyncio

    with noted(place):
        try:
            say(path, name)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)


@aiogpu.remote
async def busy_coroutine(path: str, name: str, place: str) -> None:
    with noted(place):
        say(path, name)
        spin()


@aiogpu.remote
async def left_context(path: str, name: str, place: str) -> None:
    """A coroutine that awaits for ever on its way out of `async with`."""
    import asyncio

    class Slow:
        async def __aenter__(self) -> None:
            pass

        async def __aexit__(self, *_: object) -> None:
            say(path, name)
            await asyncio.Event().wait()

    with noted(place):
        async with Slow():
            pass


@aiogpu.remote
def blocked_by_lock(path: str, name: str, place: str) -> None:
    import threading

    with noted(place):
        say(path, name)
        threading.Event().wait()


@aiogpu.remote
def waiting_for_a_process(path: str, name: str, place: str) -> None:
    with noted(place):
        say(path, name)
        subprocess.run(["sleep", "1000"], check=False)


@aiogpu.remote
def in_finally(path: str, name: str, place: str) -> None:
    with noted(place):
        try:
            raise ValueError
        finally:
            say(path, name)
            spin()


class Dying:
    """An object whose finaliser never ends."""

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name

    def __del__(self) -> None:
        say(self.path, self.name)
        spin()


@aiogpu.remote
def in_del(path: str, name: str, place: str) -> None:
    """Python ignores an error of `__del__`; the code after it goes on."""
    sys.unraisablehook = lambda _: None
    with noted(place):
        dying = Dying(path, name)
        del dying


@aiogpu.remote
def in_del_for_ever(path: str, name: str, place: str) -> None:
    sys.unraisablehook = lambda _: None
    note(place, BEGUN)
    while True:
        dying = Dying(path, name)
        del dying


@aiogpu.remote
def swallowing(path: str, name: str, place: str) -> None:
    note(place, BEGUN)
    while True:
        with swallowed():
            say(path, name)
            spin()


@contextmanager
def swallowed() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        del error


@aiogpu.remote
def in_foreign_code(path: str, name: str, place: str) -> None:
    """Lock a mutex twice; no signal makes this call return."""
    note(place, BEGUN)
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.CDLL(None)
    library.pthread_mutex_lock(mutex)
    try:
        say(path, name)
    finally:
        library.pthread_mutex_lock(mutex)


@aiogpu.remote
def ignoring(path: str, name: str, place: str) -> None:
    note(place, BEGUN)
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    say(path, name)
    spin()


@aiogpu.remote
def blocking_signals(path: str, name: str, place: str) -> None:
    note(place, BEGUN)
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    say(path, name)
    spin()


@aiogpu.remote
def importing(path: str, name: str, place: str) -> None:
    """`endless_import` is written by the test and imports for ever."""
    note(place, BEGUN)
    os.environ["PHASE"] = f"{path} {name}"
    importlib.import_module("endless_import")


ENDLESS_IMPORT: Final = """
import os
from tests.support.gate import say
say(*os.environ["PHASE"].split())
while True:
    pass
"""


class Reducing:
    """An object that takes for ever to pickle."""

    def __init__(self, path: str, name: str, place: str) -> None:
        self.fields = path, name, place

    def __reduce__(self) -> Any:
        path, name, place = self.fields
        with noted(place):
            say(path, name)
            spin()


@aiogpu.remote
def packing(path: str, name: str, place: str) -> object:
    return Reducing(path, name, place)


def refused(*_: object) -> int:
    """Fail as memfd_create(2) does without free descriptors."""
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Large:
    """A value of 32 MB that reports when it is pickled."""

    def __init__(self, path: str, name: str) -> None:
        self.fields = path, name

    def __reduce__(self) -> Any:
        say(*self.fields)
        # Without free descriptors the frame carries all of the value.
        os.memfd_create = refused  # type: ignore[assignment]
        return len, (b"x" * (1 << 25),)


@aiogpu.remote
def dispatcher(path: str, name: str, place: str) -> object:
    with noted(place):
        return Large(path, name)


@aiogpu.remote
def leaving(path: str, name: str, place: str, is_endless: bool = False) -> int:
    """Send the result before the process reports that it leaves."""

    def leave() -> None:
        with noted(place):
            if is_endless:
                say(path, name)
                spin()
            pass_gate(path, name)

    atexit.register(leave)
    return os.getpid()


@aiogpu.remote
def begins(place: str) -> int:
    note(place, BEGUN)
    return os.getpid()


@aiogpu.remote
def relay(depth: int, phase: str, options: dict[str, Any], args: list[str]) -> object:
    """Nest plain tasks, with a phase at the bottom."""
    if depth:
        return aiogpu.get(relay.remote(depth - 1, phase, options, args))
    return aiogpu.get(PHASES[phase].options(**options).remote(*args))


@aiogpu.remote
async def relay_softly(
    depth: int, phase: str, options: dict[str, Any], args: list[str]
) -> object:
    """Nest coroutines, with a phase at the bottom."""
    if depth:
        return await relay_softly.remote(depth - 1, phase, options, args)
    return await PHASES[phase].options(**options).remote(*args)


INTERRUPTED: Final[list[Callable[..., Any]]] = [
    loop,
    coroutine,
    busy_coroutine,
    left_context,
    blocked_by_lock,
    waiting_for_a_process,
    in_finally,
    in_del,
    packing,
]
"""Tasks whose code an interrupt stops, and whose worker goes on."""
KILLED: Final[list[Callable[..., Any]]] = [
    in_del_for_ever,
    swallowing,
    in_foreign_code,
    ignoring,
    blocking_signals,
    importing,
]
"""Tasks that only the end of their process stops."""
PHASES: Final[dict[str, Any]] = {
    each.__name__: each for each in [*INTERRUPTED, *KILLED, dispatcher, begins]
}


@aiogpu.remote
def count(number: int, until: int) -> int:
    for _ in range(until):
        pass
    return number


@aiogpu.remote
async def count_softly(number: int, until: int) -> int:
    import asyncio

    for _ in range(until // 2):
        pass
    await asyncio.sleep(0)
    for _ in range(until // 2):
        pass
    return number


@aiogpu.remote
def clean_up(path: str, seconds: float) -> None:
    """Take so many seconds to stop after an interrupt."""
    try:
        say(path, "in")
        spin()
    finally:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            pass
        say(path, "out")


class Cleaner:
    """A class with a `finally` that waits at a gate."""

    def clean(self, path: str, cleaned: str) -> None:
        """Wait for an interrupt, then clean up until the test releases the call."""
        try:
            pass_gate(path, "runs")
        finally:
            pass_gate(path, "cleans")
            Path(cleaned).touch()

    def rest(self) -> None:
        """Do nothing, after the earlier calls."""


@aiogpu.remote
def clean(path: str, cleaned: str) -> None:
    Cleaner().clean(path, cleaned)


CleanerActor = aiogpu.remote(Cleaner)


@aiogpu.remote
def write_and_go_on(path: str, size: int, went_on: str) -> None:
    """Print more than the socket takes, then go on."""
    say(path, "writes")
    print("-" * size)
    Path(went_on).touch()
