"""What this process may have here: CPUs, memory, descriptors, processes, cgroups.

Each is tried or read, and told as a `Finding`.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from aiogpu.errors import NodeStartError
from aiogpu.linux.cgroup import Cgroup
from aiogpu.linux.cgroup_hierarchy import (
    PROC,
    UNIFIED,
    Place,
    find_cgroup,
    find_hierarchy,
    usable_cpus,
)
from aiogpu.runtime.checks.finding import Finding, Level, TrialError, try_out
from aiogpu.runtime.descriptors import PER_SLOT, raised, slots_within, used_descriptors
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


LIMIT: Final = 5.0
"""Seconds for which the end of what was killed is waited for."""


MEANS: Final = (
    "Nodes work without, by keepers; both killed at once may leave a process."
)


def check_cgroup(find: Callable[[], Place] = find_cgroup) -> Iterator[Finding]:
    """Make a group, move a sleeping process into it, kill the group, remove it."""
    place = find()
    if place.directory is None:
        # The reason says what to do as well.
        yield Finding("cgroup2", Level.WARN, place.reason, MEANS)
        return
    group = Cgroup(f"{place.directory}/aiogpu-doctor-{os.getpid()}")
    try:
        group.make()
        try:
            seconds = _kill_sleeper(group)
        finally:
            group.wait_until_empty(LIMIT)
            is_gone = group.remove()
    except OSError as error:
        told = f"{error.filename or group.path}: {error.strerror}"
        yield Finding("cgroup2", Level.WARN, told, MEANS)
        return
    if seconds is None:
        told = f"{place.directory}: killing a group ended nobody within {LIMIT:g} s"
        yield Finding("cgroup2", Level.WARN, told, MEANS)
    elif not is_gone:
        yield Finding("cgroup2", Level.WARN, f"{group.path} cannot be removed", MEANS)
    else:
        told = f"{place.directory}, a group was killed in {1e3 * seconds:.0f} ms"
        yield Finding("cgroup2", Level.OK, told)


def _kill_sleeper(group: Cgroup) -> float | None:
    """Return how long it took to end a process by its group; None if it did not end."""
    program = "import signal; signal.pause()"
    with subprocess.Popen([sys.executable, "-S", "-c", program]) as sleeper:
        try:
            Path(group.path, "cgroup.procs").write_text(str(sleeper.pid))
            begin = time.perf_counter()
            group.kill()
            pidfd = os.pidfd_open(sleeper.pid)
            try:
                ended = select.select([pidfd], [], [], LIMIT)[0]
            finally:
                os.close(pidfd)
            return time.perf_counter() - begin if ended else None
        finally:
            sleeper.send_signal(signal.SIGKILL)
