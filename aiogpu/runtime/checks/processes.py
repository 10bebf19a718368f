"""Whether workers can be started, forked, watched and ended with what they start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from aiogpu.runtime.checks.finding import Finding, Level
from aiogpu.runtime.checks.trial import TrialError, try_out

OLDEST: Final = (3, 11)
REPORT: Final = "Please report it, with this line."

NODE: Final = """
import asyncio, json, time
import aiogpu

def task():
    return 1

task.__module__ = "__main__"

async def main():
    begin = time.perf_counter()
    async with aiogpu.init(address="local", num_cpus=1, num_gpus=0):
        opened = time.perf_counter()
        remote = aiogpu.remote(task)
        await remote.remote()
        first = time.perf_counter()
        await remote.remote()
        second = time.perf_counter()
    closed = time.perf_counter()
    moments = [begin, opened, first, second, closed]
    print(json.dumps([1e3 * (b - a) for a, b in zip(moments, moments[1:])]))

asyncio.run(main())
"""
"""Opens a node, runs two tasks, closes it; says what each has cost in milliseconds."""

KERNEL: Final = """
import json, os, select, signal
from aiogpu.linux import syscalls

said = {}
try:
    syscalls.adopt_orphans()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        if os.fork() == 0:
            os.close(writing)
            os.read(reading, 1)
        os._exit(0)
    os.waitpid(child, 0)
    orphans = syscalls.children()
    os.close(writing)
    for orphan in orphans:
        os.waitpid(orphan, 0)
    said["subreaper"] = "" if orphans else "the orphan went to another process"
except OSError as error:
    said["subreaper"] = str(error)
try:
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        pidfd = os.pidfd_open(child)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        ended = select.select([pidfd], [], [], 5)[0]
        said["pidfd"] = "" if ended else "it does not show a process's end"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
except OSError as error:
    said["pidfd"] = str(error)
print(json.dumps(said))
"""
"""Adopts an orphan, and ends a child through its pidfd; says what fails."""


def check_python(
    version: Sequence[int] = sys.version_info[:3],
    executable: str = sys.executable,
    platform: str = sys.platform,
) -> Iterator[Finding]:
    """The interpreter, which every node starts once more."""
    told = ".".join(map(str, version))
    if tuple(version[:2]) < OLDEST or platform != "linux":
        yield Finding(
            "python",
            Level.MISSING,
            f"{told} on {platform}",
            "aiogpu is for Python 3.11 and later, on Linux.",
            "Use a newer Python, or a Linux machine.",
            is_essential=True,
        )
    elif not os.access(executable or "-", os.X_OK):
        yield Finding(
            "python",
            Level.MISSING,
            f"{told}, sys.executable is {executable!r}",
            "Workers are started from that path, and it cannot be run.",
            "Set sys.executable to a Python interpreter that can import aiogpu.",
            is_essential=True,
        )
    else:
        yield Finding("python", Level.OK, f"{told}, {executable}", is_essential=True)


def check_node(
    limit: float = 60.0, executable: str = sys.executable
) -> Iterator[Finding]:
    """A real node: zygote, fork, task, end."""
    try:
        times = try_out(NODE, limit=limit, executable=executable)
    except TrialError as error:
        yield Finding(
            "node",
            Level.MISSING,
            str(error),
            "No node starts on this machine.",
            REPORT,
            is_essential=True,
        )
        return
    start, first, second, end = times
    yield Finding(
        "node",
        Level.OK,
        f"started in {start:.0f} ms, first task with its fork {first:.1f} ms, next "
        f"task {second:.2f} ms, closed in {end:.0f} ms",
        is_essential=True,
    )


def check_kernel(
    limit: float = 20.0, executable: str = sys.executable
) -> Iterator[Finding]:
    """Return what a keeper stands on: it adopts orphans, and sees the driver's end."""
    try:
        said = try_out(KERNEL, limit=limit, executable=executable)
    except TrialError as error:
        said = dict.fromkeys(("subreaper", "pidfd"), str(error))
    yield _kernel(
        "subreaper",
        said["subreaper"],
        "a keeper adopts what its worker leaves behind",
        "What a task starts could outlive it.",
    )
    yield _kernel(
        "pidfd",
        said["pidfd"],
        "a process's end is seen at once, and no other is taken for it",
        "Nobody would see a driver or a zygote end.",
    )


def _kernel(name: str, problem: str, works: str, means: str) -> Finding:
    if not problem:
        return Finding(name, Level.OK, works, is_essential=True)
    return Finding(
        name,
        Level.MISSING,
        problem,
        means,
        "Use Linux 5.4 or newer, and a container whose seccomp profile allows it.",
        is_essential=True,
    )
