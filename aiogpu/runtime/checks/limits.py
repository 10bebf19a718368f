"""How much this process may have: CPUs, memory, descriptors, processes, a directory."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from aiogpu.errors import NodeStartError
from aiogpu.linux.cgroup_hierarchy import PROC, UNIFIED, find_hierarchy, usable_cpus
from aiogpu.runtime.checks.finding import Finding, Level
from aiogpu.runtime.checks.trial import TrialError, try_out
from aiogpu.runtime.descriptors import (
    PER_SLOT,
    raised,
    slots_within,
    used_descriptors,
)
from aiogpu.runtime.directories import create_directory, remove_directory
from aiogpu.runtime.workers.slots import most_workers

FEW: Final = 64
"""Workers below which a limit is worth a word."""
MEMORY_FILES: Final = (
    (UNIFIED, "memory.max"),
    ("memory", "memory.limit_in_bytes"),
)
"""Where each version of cgroups writes its limit."""
UNLIMITED: Final = 1 << 60
"""Version 1 of cgroups writes a number near 2**63 for no limit."""

ADJUST: Final = """
import json
path = "/proc/self/oom_score_adj"
with open(path) as file:
    now = int(file.read())
with open(path, "w") as file:
    file.write(str(min(now + 1, 1000)))
with open(path) as file:
    print(json.dumps([now, int(file.read())]))
"""
"""Raises its own `oom_score_adj` by one; says what it was and what it is."""


def check_directory(
    create: Callable[[], str] = create_directory,
) -> Iterator[Finding]:
    """Where a node's socket would be: made, entered, taken away again."""
    place = "XDG_RUNTIME_DIR" if os.environ.get("XDG_RUNTIME_DIR") else "TMPDIR"
    try:
        directory = create()
    except NodeStartError as error:
        yield _no_directory(str(error), place)
        return
    try:
        mode = os.stat(directory).st_mode & 0o777
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{directory}/node.sock")
    except OSError as error:
        yield _no_directory(f"{directory}: {error}", place)
        return
    finally:
        remove_directory(directory)
    if mode & 0o077:
        yield Finding(
            "directory",
            Level.WARN,
            f"{directory} has mode {mode:o}, not 700",
            "Other users can see a node's socket; they are still turned away there.",
            f"Set {place} to a directory on a filesystem that keeps modes.",
        )
        return
    yield Finding("directory", Level.OK, f"{os.path.dirname(directory)}, mode {mode:o}")


def _no_directory(found: str, place: str) -> Finding:
    return Finding(
        "directory",
        Level.MISSING,
        found,
        "A node has no place for its socket.",
        f"Set {place} to a short path that you may write to.",
        is_essential=True,
    )


def check_descriptors(
    limits: tuple[int, int] | None = None, used: int | None = None
) -> Iterator[Finding]:
    """The limit on open files, and for how many workers there is room."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    held = used_descriptors() if used is None else used
    reached = raised(soft, hard, held)
    slots = slots_within(reached, held)
    workers = most_workers(slots) if slots else 0
    found = "no limit" if soft == resource.RLIM_INFINITY else f"{soft} may be open"
    if reached != soft:
        found += f", {reached} while there is a node"
    found += f"; room for {workers} workers at a time, {PER_SLOT} for each"
    if workers >= FEW:
        yield Finding("descriptors", Level.OK, found)
        return
    yield Finding(
        "descriptors",
        Level.WARN if workers else Level.MISSING,
        found,
        "Tasks that would need more workers wait for one.",
        f"Raise the hard limit ({hard}): `ulimit -Hn`, LimitNOFILE= of systemd, "
        f"--ulimit nofile= of a container.",
        is_essential=True,
    )


def check_processes(proc: Path = PROC, euid: int | None = None) -> Iterator[Finding]:
    """How many processes there may be: two for each worker, its keeper and itself."""
    bounds = dict(_process_limits(proc, os.geteuid() if euid is None else euid))
    if not bounds:
        yield Finding("processes", Level.OK, "no limit")
        return
    source = min(bounds, key=lambda source: bounds[source][0] - bounds[source][1])
    limit, there = bounds[source]
    workers = max(0, limit - there - 1) // 2
    found = (
        f"{limit} by {source}, {there} are there; room for about {workers} workers at "
        f"a time, 2 for each"
    )
    if workers >= FEW:
        yield Finding("processes", Level.OK, found)
        return
    yield Finding(
        "processes",
        Level.WARN,
        found,
        "Tasks that would need more workers wait for one.",
        "Raise `ulimit -u`, TasksMax= of systemd, --pids-limit of a container.",
    )


def _process_limits(proc: Path, euid: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Return what bounds processes, how many there may be, and how many there are."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if euid and soft != resource.RLIM_INFINITY:  # root has none
        yield "ulimit -u", (soft, _threads_of(proc, euid))
    for controller in (UNIFIED, "pids"):
        hierarchy = find_hierarchy(controller, proc)
        for group in hierarchy.groups if hierarchy else ():
            with suppress(OSError, ValueError):
                limit = int((group / "pids.max").read_text())
                there = int((group / "pids.current").read_text())
                yield str(group / "pids.max"), (limit, there)


def _threads_of(proc: Path, euid: int) -> int:
    """How many threads a user has, which is what the kernel counts (setrlimit(2))."""
    count = 0
    for process in proc.iterdir():
        with suppress(OSError):
            if process.name.isdigit() and process.stat().st_uid == euid:
                count += len(os.listdir(process / "task"))
    return count


def check_cpus(
    there: int | None = None, affinity: int | None = None, usable: float | None = None
) -> Iterator[Finding]:
    """The CPUs that a node shares out unless `num_cpus` says otherwise."""
    there = there or os.cpu_count() or 1
    affinity = affinity or len(os.sched_getaffinity(0))
    usable = usable or usable_cpus()
    why = []
    if affinity < there:
        why.append(f"affinity allows {affinity}")
    if usable < affinity:
        why.append("a cgroup's quota allows less")
    told = f" of {there}: {', '.join(why)}" if why else ""
    yield Finding("cpus", Level.OK, f"{usable:g} to share out{told}")


def check_memory(proc: Path = PROC) -> Iterator[Finding]:
    """How much memory there is before the kernel ends something, by which measure."""
    limits = dict(_memory_limits(proc))
    if not limits:
        yield Finding(
            "memory",
            Level.WARN,
            f"neither {proc}/meminfo nor a cgroup says how much there is",
            "Nothing can end a task before the kernel does.",
            "Mount the proc filesystem.",
        )
        return
    source = min(limits, key=lambda source: limits[source])
    yield Finding("memory", Level.OK, f"{limits[source] / 2**30:.1f} GiB by {source}")


def _memory_limits(proc: Path) -> Iterator[tuple[str, int]]:
    with suppress(OSError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemTotal:"):
                yield str(proc / "meminfo"), int(line.split()[1]) << 10
    for controller, name in MEMORY_FILES:
        hierarchy = find_hierarchy(controller, proc)
        for group in hierarchy.groups if hierarchy else ():
            yield from _limit(group / name)


def _limit(file: Path) -> Iterator[tuple[str, int]]:
    with suppress(OSError, ValueError):
        limit = int(file.read_text())  # "max" is no number, and no limit
        if limit < UNLIMITED:
            yield str(file), limit


def check_oom_score(
    limit: float = 10.0, executable: str = sys.executable
) -> Iterator[Finding]:
    """Return whether a worker can offer itself to the kernel before the driver."""
    try:
        before, after = try_out(ADJUST, limit=limit, executable=executable)
        problem = "" if after > before or before == 1000 else "it stays what it was"
    except TrialError as error:
        problem = str(error)
    if not problem:
        yield Finding("oom_score_adj", Level.OK, "a worker may raise its own")
        return
    yield Finding(
        "oom_score_adj",
        Level.WARN,
        problem,
        "Where memory runs out, the kernel may end the driver instead of a worker.",
        "Mount /proc writable, or set memory= on tasks that need much.",
    )


def check_kernel_log(path: str = "/dev/kmsg") -> Iterator[Finding]:
    """Return whether what the kernel says of those that it has ended can be read."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with suppress(BlockingIOError, BrokenPipeError):
                os.read(log, 8192)
        finally:
            os.close(log)
    except OSError as error:
        yield Finding(
            "kernel log",
            Level.WARN,
            f"{path}: {error.strerror}",
            "That the kernel ended a worker for memory is known from cgroups alone.",
            "It is not needed; to have it, set kernel.dmesg_restrict=0.",
        )
        return
    yield Finding("kernel log", Level.OK, f"{path} is readable")
