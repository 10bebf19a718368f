"""Asks the process of a task or an actor where its code is.

The process is asked by a signal, and answers with an anonymous file, which is read
through `/proc`: no part of the node is involved, and nothing is done for a task that
nobody asks about. Python code answers itself. If native code keeps Python from it, a
handler in C answers with the calls of the main thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import linecache
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from aiogpu.core.model.text import printable, span
from aiogpu.errors import StackError
from aiogpu.observe.why import Why
from aiogpu.worker.interrupts import (
    NATIVE_FILE,
    NATIVE_SIGNAL,
    PACKAGE,
    STACK_END,
    STACK_FILE,
    STACK_SIGNAL,
)

PATIENCE: Final = 2.0
"""Seconds in which Python code answers."""
NATIVE_PATIENCE: Final = 1.0
"""Seconds in which the handler in C answers."""
POLL: Final = 0.01
"""Seconds between two looks for an answer."""
QUIET: Final = 5
"""Looks without a new line after which an answer from C, which has no end, is whole."""
RUNNING: Final = ("running", "blocked", "stopping")
"""States in which the code of a task may run in its process."""
_NATIVE_CALL: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


async def stack_of(why: Why) -> str:
    """Return the stack of a running task or actor, for people to read.

    Args:
        why: the state of the task.

    Raises:
        StackError: it has no stack, or its process does not answer.
    """
    pid, what = running_process(why), named(why)
    lines = await _ask_python(pid)
    if lines is None:
        lines = await _ask_native(pid)
    if lines is None:
        raise StackError(
            f"{what} has not answered within {PATIENCE + NATIVE_PATIENCE:g} s: its "
            f"process (pid {pid}) is stopped, or its code handles the signals SIGURG "
            f"and SIGWINCH itself. `aiogpu stack --native` looks from outside, by "
            f"py-spy."
        )
    return "\n".join([f"{what}, pid {pid}", *_with_sources(lines)])


def named(why: Why) -> str:
    """Return the name of a task with its number, for one line of text."""
    return f"{printable(why.name)} (task {why.task})"


def running_process(why: Why) -> int:
    """Return the process in which the code of a task or an actor runs.

    Raises:
        StackError: no code of it runs.
    """
    what, ended = named(why), why.ended
    if ended is not None:
        when = f"{what} has ended {span(ended.seconds)} ago"
        raise StackError(f"{when}: it {_ENDS.get(ended.state, ended.state)}.")
    if why.is_lease:
        raise StackError(
            f"{what} is a lease: its processes are not workers of the node. Ask them "
            f"with a tool of their language."
        )
    if not why.pid or why.state not in RUNNING:
        raise StackError(f"{what} does not run: {why}")
    return why.pid


_ENDS: Final = {"cancelled": "was cancelled"}


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise StackError(f"process {pid} has just ended.") from None
    except PermissionError:
        raise StackError(
            f"process {pid} belongs to another user; only root and that user may look "
            f"into it."
        ) from None


async def _ask_python(pid: int) -> list[str] | None:
    """Return what Python code answers; None if it does not within `PATIENCE`."""
    before = _answers(pid, STACK_FILE)
    _signal(pid, STACK_SIGNAL)
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE):
            while True:
                for name, _ in _answers(pid, STACK_FILE) - before:
                    lines = _read(pid, name)
                    if lines and lines[-1] == STACK_END:
                        return lines[:-1]
                await asyncio.sleep(POLL)
    return None


def _answers(pid: int, file: str) -> set[tuple[str, int]]:
    """Return the descriptors of a process for such files, each with its inode."""
    found = set()
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if file in entry.readlink().name:
                    found.add((entry.name, entry.stat().st_ino))
    return found


def _read(pid: int, name: str) -> list[str]:
    with suppress(OSError):
        text = Path(f"/proc/{pid}/fd/{name}").read_text("utf-8", "replace")
        return text.splitlines()
    return []


async def _ask_native(pid: int) -> list[str] | None:
    """Return what the handler in C answers; None without an answer.

    Without its file the process has closed the descriptor, so that the handler would
    write elsewhere: then the process is not asked.
    """
    for name, _ in _answers(pid, NATIVE_FILE):
        with (
            suppress(OSError, TimeoutError),
            # In memory, so that nothing waits.
            open(f"/proc/{pid}/fd/{name}", "r+b") as file,  # noqa: ASYNC230
        ):
            async with asyncio.timeout(NATIVE_PATIENCE):
                await _lock(file)
                file.truncate(0)
                _signal(pid, NATIVE_SIGNAL)
                return _native_calls(await _answer_in(file))
    return None


async def _lock(file: BinaryIO) -> None:
    """Lock the file, which all workers of a zygote share; its close unlocks it."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(POLL)
        else:
            return


async def _answer_in(file: BinaryIO) -> str:
    size, quiet = 0, 0
    while quiet < QUIET:
        await asyncio.sleep(POLL)
        before, size = size, os.fstat(file.fileno()).st_size
        quiet = quiet + 1 if before == size > 0 else 0
    return os.pread(file.fileno(), size, 0).decode("utf-8", "replace")


def _native_calls(text: str) -> list[str]:
    """Return the calls in an answer from C as `show_stack` writes them."""
    calls = list[str]()
    for line in text.splitlines():  # the innermost call first
        if call := _NATIVE_CALL.match(line):
            file, number, function = call.groups()
            if file.startswith(PACKAGE) and calls:
                break  # what follows has started the worker
            calls.append(f"{file}:{number} {function}")
    return ["thread MainThread, which runs native code", *calls[::-1]]


def _with_sources(lines: list[str]) -> Iterator[str]:
    """Yield the lines to print: the heads, and each call with its line of source."""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        place, _, function = line.rpartition(" ")
        file, _, number = place.rpartition(":")
        if not number.isdecimal():
            is_idle = ":" not in following
            yield f"{printable(line)}:{' no code of yours runs' if is_idle else ''}"
            continue
        yield f"  {printable(file)}:{number} in {printable(function)}"
        if source := linecache.getline(file, int(number)).strip():
            yield f"    {printable(source)}"
