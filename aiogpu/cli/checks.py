"""Checks of this machine: each tries one mechanism, harmlessly and in bounded time.

For `aiogpu doctor`. `CHECKS` has a row for each mechanism. A check returns what it has
seen, or yields findings, and prints nothing; it leaves no process, file or group
behind. What may hang or end a process is tried in a child process (`try_out`).
"""

from __future__ import annotations

import json
import os
import pwd
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import aiogpu
from aiogpu.accelerators.base import Health, Sample
from aiogpu.accelerators.nvidia import Nvidia, inventory
from aiogpu.accelerators.nvml.watch import NvmlWatch
from aiogpu.accelerators.visible import VISIBLE, Inventory
from aiogpu.core.model.request import Device
from aiogpu.daemon.place import Place, Record, read_record
from aiogpu.errors import AiogpuError
from aiogpu.linux import cgroup as cgroups
from aiogpu.linux.cgroup import Cgroup
from aiogpu.linux.procfs import MemoryBounds
from aiogpu.runtime import directories
from aiogpu.runtime.descriptors import PER_SLOT, raised, slots_within, used_descriptors
from aiogpu.runtime.workers.slots import most_workers


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """One mechanism, tried.

    Attributes:
        name: the mechanism, in two or three words.
        level: whether it works, works in part, or is not there.
        found: what was seen, in one line.
        means: what that means for a user, one sentence; empty if all is well.
        advice: what to do about it, one sentence; empty if nothing.
        is_essential: no node starts without it.
    """

    name: str
    level: Level
    found: str
    means: str = ""
    advice: str = ""
    is_essential: bool = False

    @property
    def is_fatal(self) -> bool:
        """True if aiogpu cannot work on this machine because of it."""
        return self.is_essential and self.level is Level.MISSING


class CheckError(Exception):
    """A mechanism does not work; the text says what was seen.

    Attributes:
        means: what that means, in place of the words of the check; "" for those.
        advice: what to do about it; likewise.
        level: how bad it is; None for the level of the check.
    """

    def __init__(
        self, found: str, means: str = "", advice: str = "", level: Level | None = None
    ) -> None:
        super().__init__(found)
        self.means, self.advice, self.level = means, advice, level


@dataclass(frozen=True, slots=True)
class Check:
    """One mechanism to try.

    Attributes:
        name: the mechanism.
        run: tries it; returns what was seen if all is well, or findings. Any exception
            becomes a finding.
        means: what a failure means.
        advice: what to do about it.
        limit: seconds after which the check counts as hung.
        is_essential: no node starts if it fails.
    """

    name: str
    run: Callable[[], str | Iterable[Finding]]
    means: str = "It cannot be tried."
    advice: str = ""
    limit: float = 10.0
    is_essential: bool = False

    def failed(self, error: Exception) -> Finding:
        """The finding for an exception."""
        level = Level.MISSING if self.is_essential else Level.WARN
        means, advice, found = self.means, self.advice, str(error)
        if isinstance(error, CheckError):
            level = error.level or level
            if error.means:
                means, advice = error.means, error.advice
        elif isinstance(error, OSError) and error.filename:
            found = f"{error.filename}: {error.strerror}"
        elif not isinstance(error, AiogpuError):
            found = f"{type(error).__name__}: {error}"
        return Finding(self.name, level, found, means, advice, self.is_essential)

    def collect(self, findings: list[Finding]) -> None:
        """Run it and append what it finds."""
        try:
            found = self.run()
            if isinstance(found, str):
                found = [_ok(self.name, found, self.is_essential)]
            findings.extend(found)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
            findings.append(self.failed(error))


def examine(checks: Iterable[Check]) -> Iterator[Finding]:
    """Run the checks one after the other, each in a thread that may be given up."""
    for check in checks:
        findings: list[Finding] = []
        thread = threading.Thread(
            *(None, check.collect, f"check {check.name}", [findings]), daemon=True
        )
        thread.start()
        thread.join(check.limit)
        if thread.is_alive():
            findings = [check.failed(CheckError(f"no answer within {check.limit:g} s"))]
        yield from findings


def _ok(name: str, found: str, is_essential: bool = False) -> Finding:
    return Finding(name, Level.OK, found, is_essential=is_essential)


def _warn(name: str, found: str, means: str, advice: str = "") -> Finding:
    return Finding(name, Level.WARN, found, means, advice)


def try_out(
    source: str,
    *arguments: str,
    limit: float = 20.0,
    executable: str = sys.executable,
) -> Any:
    """Run a program that prints one line of JSON last, and return the value.

    It has a session of its own, which is killed as a whole when time is up.

    Args:
        source: the text of the program.
        arguments: its `sys.argv[1:]`.
        limit: seconds.
        executable: the interpreter.

    Raises:
        CheckError: it cannot be started, fails, hangs, or prints something else.
    """
    # The program can import what this one can.
    path = os.pathsep.join(path for path in sys.path if path)
    try:
        child = subprocess.Popen(
            [executable, "-c", source, *arguments],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
            errors="replace",
        )
    except (OSError, ValueError) as error:
        raise CheckError(f"{executable or 'no interpreter'}: {error}") from error
    with child:
        try:
            out, err = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            raise CheckError(f"no answer within {limit:g} s") from None
    try:
        return json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        last = (err.strip().splitlines() or ["it says nothing"])[-1]
        code = child.returncode
        ended = f"exit code {code}"
        if code < 0:
            ended = f"killed by {signal.Signals(-code).name}"
        raise CheckError(f"{ended}: {last}") from None


def try_mechanism(source: str, works: str, executable: str = sys.executable) -> str:
    """Run a program that says what fails; returns `works` if nothing does."""
    if problem := try_out(source, executable=executable):
        raise CheckError(problem)
    return works


OLDEST: Final = (3, 11)


def check_python(
    version: Sequence[int] = sys.version_info[:3],
    executable: str = sys.executable,
    platform: str = sys.platform,
) -> str:
    """The interpreter, which every node starts once more."""
    told = ".".join(map(str, version))
    if tuple(version[:2]) < OLDEST or platform != "linux":
        raise CheckError(
            f"{told} on {platform}",
            "aiogpu is for Python 3.11 and later, on Linux.",
            "Use a newer Python, or a Linux machine.",
        )
    if not os.access(executable or "-", os.X_OK):
        raise CheckError(f"{told}, sys.executable is {executable!r}")
    return f"{told}, {executable}"


def check_directory(create: Callable[[], str] = directories.create_directory) -> str:
    """Make the directory of a node's socket, bind there, remove it."""
    directory = create()
    try:
        mode = os.stat(directory).st_mode & 0o777
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"{directory}/node.sock")
    except OSError as error:
        raise CheckError(f"{directory}: {error}") from error
    finally:
        directories.remove_directory(directory)
    if mode & 0o077:
        raise CheckError(
            f"{directory} has mode {mode:o}, not 700",
            "Other users can see a node's socket; they are still turned away there.",
            f"Set {PARENT} to a directory on a filesystem that keeps modes.",
            Level.WARN,
        )
    return f"{os.path.dirname(directory)}, mode {mode:o}"


PARENT: Final = "XDG_RUNTIME_DIR" if os.environ.get("XDG_RUNTIME_DIR") else "TMPDIR"
"""The variable that says where a node's directory is made."""
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


def check_node(limit: float = 60.0, executable: str = sys.executable) -> str:
    """A real node: zygote, fork, task, end."""
    start, first, second, end = try_out(NODE, limit=limit, executable=executable)
    return (
        f"started in {start:.0f} ms, first task with its fork {first:.1f} ms, next "
        f"task {second:.2f} ms, closed in {end:.0f} ms"
    )


SUBREAPER: Final = """
import json, os, subprocess
from aiogpu.linux import syscalls

syscalls.adopt_orphans()
reading, writing = os.pipe()
orphan = f"cat <&{reading} >/dev/null 2>&1 &"
subprocess.run(["/bin/sh", "-c", orphan], pass_fds=[reading], check=True)
orphans = syscalls.children()
os.close(writing)
for orphan in orphans:
    os.waitpid(orphan, 0)
print(json.dumps("" if orphans else "the orphan went to another process"))
"""
"""Adopts an orphan; says what fails."""
PIDFD: Final = """
import json, os, select, signal, subprocess

with subprocess.Popen(["/bin/sleep", "20"]) as child:
    try:
        pidfd = os.pidfd_open(child.pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        ended = select.select([pidfd], [], [], 5)[0]
    finally:
        child.kill()
print(json.dumps("" if ended else "it does not show a process's end"))
"""
"""Ends a child through its pidfd; says what fails."""
ADJUST: Final = """
import json
with open("/proc/self/oom_score_adj", "r+") as file:
    before = int(file.read())
    file.write(str(min(before + 1, 1000)))
    file.seek(0)
    fails = int(file.read()) <= before != 1000
print(json.dumps("it stays what it was" if fails else ""))
"""
"""Raises its own `oom_score_adj` by one; says what fails."""
LIMIT: Final = 5.0
"""Seconds for which the end of what was killed is waited for."""


def check_cgroup(
    find: Callable[[], cgroups.Place] = cgroups.find_cgroup,
) -> str:
    """Make a group, move a sleeping process into it, kill the group, remove it."""
    place = find()
    if place.directory is None:
        raise CheckError(place.reason)  # which says what to do as well
    group = Cgroup(f"{place.directory}/aiogpu-doctor-{os.getpid()}")
    group.make()
    program = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    try:
        # Its output ends with it, so its end is seen without polling.
        with subprocess.Popen(program, stdout=subprocess.PIPE) as sleeper:
            try:
                Path(group.path, "cgroup.procs").write_text(str(sleeper.pid))
                begin = time.perf_counter()
                group.kill()
                sleeper.communicate(timeout=LIMIT)
                seconds = time.perf_counter() - begin
            except subprocess.TimeoutExpired:
                told = f"{place.directory}: killing a group ended nobody"
                raise CheckError(f"{told} within {LIMIT:g} s") from None
            finally:
                sleeper.kill()
    finally:
        group.wait_until_empty(LIMIT)
        is_gone = group.remove()
    if not is_gone:
        raise CheckError(f"{group.path} cannot be removed")
    return f"{place.directory}, a group was killed in {1e3 * seconds:.0f} ms"


def check_cpus(
    there: int | None = None, affinity: int | None = None, usable: float | None = None
) -> str:
    """The CPUs that a node shares out unless `num_cpus` says otherwise."""
    there = there or os.cpu_count() or 1
    affinity = affinity or len(os.sched_getaffinity(0))
    usable = usable or cgroups.usable_cpus()
    why = []
    if affinity < there:
        why.append(f"affinity allows {affinity}")
    if usable < affinity:
        why.append("a cgroup's quota allows less")
    told = f" of {there}: {', '.join(why)}" if why else ""
    return f"{usable:g} to share out{told}"


FEW: Final = 64
"""Workers below which a limit is reported."""


def _enough(workers: int, found: str, advice: str) -> str:
    """Return `found` if there is room for enough workers."""
    if workers >= FEW:
        return found
    means = "Tasks that would need more workers wait for one."
    raise CheckError(found, means, advice, Level.WARN if workers else None)


def _workers(soft: int, hard: int, used: int) -> int:
    """For how many workers limits on descriptors have room."""
    slots = slots_within(raised(soft, hard, used), used)
    return most_workers(slots) if slots else 0


def check_descriptors(
    limits: tuple[int, int] | None = None, used: int | None = None
) -> str:
    """The limit on open files, and for how many workers there is room."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    used = used_descriptors() if used is None else used
    reached, workers = raised(soft, hard, used), _workers(soft, hard, used)
    found = "no limit" if soft == resource.RLIM_INFINITY else f"{soft} may be open"
    if reached != soft:
        found += f", {reached} while there is a node"
    return _enough(
        workers,
        f"{found}; room for {workers} workers at a time, {PER_SLOT} for each",
        f"Raise the hard limit ({hard}): `ulimit -Hn`, LimitNOFILE= of systemd, "
        f"--ulimit nofile= of a container.",
    )


def check_processes(
    proc: cgroups.StrPath = cgroups.PROC, euid: int | None = None
) -> str:
    """Check the limit on processes: each worker needs two, its keeper and itself."""
    bounds = list(_process_limits(proc, os.geteuid() if euid is None else euid))
    if not bounds:
        return "no limit"
    limit, there, source = min(bounds, key=lambda bound: bound[0] - bound[1])
    workers = max(0, limit - there - 1) // 2
    return _enough(
        workers,
        f"{limit} by {source}, {there} are there; room for about {workers} workers at "
        f"a time, 2 for each",
        "Raise `ulimit -u`, TasksMax= of systemd, --pids-limit of a container.",
    )


def _process_limits(proc: cgroups.StrPath, euid: int) -> Iterator[tuple[int, int, str]]:
    """Yield each limit on processes: (limit, current number, source)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if euid and soft != resource.RLIM_INFINITY:  # root has none
        yield soft, _threads_of(proc, euid), "ulimit -u"
    for controller in (cgroups.UNIFIED, "pids"):
        hierarchy = cgroups.find_hierarchy(controller, proc)
        for group in hierarchy.groups if hierarchy else ():
            limit = cgroups.read_limit(f"{group}/pids.max")
            there = cgroups.read_limit(f"{group}/pids.current")
            if limit is not None and there is not None:
                yield limit, there, f"{group}/pids.max"


def _threads_of(proc: cgroups.StrPath, euid: int) -> int:
    """Count a user's threads, which is what the kernel limits (setrlimit(2))."""
    count = 0
    for process in os.scandir(proc):
        with suppress(OSError):
            if process.name.isdigit() and process.stat().st_uid == euid:
                count += len(os.listdir(f"{process.path}/task"))
    return count


BOUNDLESS: Final = 1 << 60
"""Bytes from which on a limit on memory is none."""


def check_memory(proc: cgroups.StrPath = cgroups.PROC) -> str:
    """Find the tightest limit on memory, and its source."""
    usage = MemoryBounds(proc).tightest()
    if usage.limit >= BOUNDLESS:
        raise CheckError(f"neither {proc}/meminfo nor a cgroup says how much there is")
    return f"{usage.limit / 2**30:.1f} GiB by {usage.where}"


def check_kernel_log(path: str = "/dev/kmsg") -> str:
    """Check that the kernel's log of OOM kills is readable."""
    log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with suppress(BlockingIOError, BrokenPipeError):
            os.read(log, 8192)
    finally:
        os.close(log)
    return f"{path} is readable"


UNVERIFIED: Final = "Shares come back when their processes end, and are `unverified`."


def check_gpus(
    take: Callable[[], Inventory] = inventory,
    make_watch: Callable[[], NvmlWatch] = NvmlWatch,
) -> Iterator[Finding]:
    """NVML, and each GPU."""
    there = take()
    if there.count is None:
        raise CheckError(there.problem or "it says nothing", level=Level.MISSING)
    watch = make_watch()
    watch.open()
    try:
        version = watch.driver_version or "of unknown version"
        told = f"driver {version}, {there.count} GPU{'s' * (there.count != 1)}"
        if there.problem is None:
            yield _ok("nvml", told)
        else:
            yield _warn(
                "nvml",
                f"{told}; {there.problem}",
                "A GPU that does not answer is not shared out.",
                NVIDIA_SMI,
            )
        for mig in there.mig:
            if not mig.instances:
                told = f"{mig.gpu.name or UNNAMED}: in MIG mode, without an instance"
                means = "No task can use it, and it is not shared out."
                advice = "Make instances (`nvidia-smi mig -cgi`), or leave MIG mode."
                yield _warn(f"gpu {mig.gpu.id}", told, means, advice)
        for device in there.devices:
            yield _device(device, watch.look(device), watch.check(device))
    finally:
        watch.close()


UNNAMED: Final = "without a name"
NVIDIA_SMI: Final = "See what `nvidia-smi` says of it."


def _device(device: Device, sample: Sample, health: Health) -> Finding:
    name, told = f"gpu {device.id}", device.name or UNNAMED
    if sample.problem is not None:
        means = "It is set aside." if sample.is_lost else UNVERIFIED
        return _warn(name, f"{told}: {sample.problem}", means, NVIDIA_SMI)
    if health.action:
        return _warn(
            name,
            f"{told}: its driver asks for this: {health.action}",
            "It is not given to tasks until that is done.",
            "See what `nvidia-smi -q` says of it.",
        )
    if sample.used is not None:
        told += f", {sample.used / 2**30:.1f} GiB in use"
    if sample.processes is None:
        means = "A share of it comes back `unverified`."
        if sample.used is None:
            means = UNVERIFIED
        return _warn(name, f"{told}; it lists no processes", means)
    told += f", {len(sample.processes)} processes listed"
    if not sample.reads_pids:
        return _warn(
            name,
            f"{told}; whether their ids are ours is unknown before a task of ours "
            f"is listed",
            "Until then a share of it comes back `unverified`.",
            "To have it verified, run the container with `--pid=host`.",
        )
    return _ok(name, told)


def check_visible(environ: Mapping[str, str] = os.environ) -> str:
    """Describe the devices that a node would share out, by the node's own rules."""
    text = environ.get(VISIBLE)
    devices = Nvidia().devices(environ, None)
    ids = ", ".join(str(device.id) for device in devices) or "none"
    said = f"{VISIBLE}={text!r}" if text is not None else f"{VISIBLE} is not set"
    return f"{said}: a node shares out {ids}"


SERVICE: Final = "service"
PATIENCE: Final = 2.0
"""Seconds in which a running node accepts a connection."""
LINGER: Final = Path("/var/lib/systemd/linger")
RUN_USER: Final = "/run/user/"
START: Final = "`aiogpu start --head` starts one"


def check_service(
    socket_path: str | None = None, linger: Path = LINGER
) -> Iterator[Finding]:
    """A node serves this user's programs, or could; what stands in its way.

    Args:
        socket_path: where `aiogpu start` listens unless given.
        linger: where systemd notes whose services outlive their logins.
    """
    place = Place.at(socket_path)
    path, directory = place.socket, os.path.dirname(place.socket)
    with suppress(OSError):  # it is made when a node starts
        if unfit := directories.unfit_directory(directory):
            raise CheckError(
                f"{directory} {unfit.problem}",
                "No node starts there, and no program joins one there.",
                f"{unfit.remedy}, or name another place by `aiogpu start --socket`.",
            )
    record, problem = read_record(place.pidfile), _reach(path)
    living = record if record is not None and record.is_alive else None
    if problem is None:
        yield _running(path, record)
        with suppress(OSError):  # it has ended meanwhile
            if living is not None:
                limits = Check(f"{SERVICE} limits", partial(_service_limits, living))
                yield from examine([limits])
        yield from _lingers(path, linger)
    elif living is not None:
        raise CheckError(
            f"{path}: {problem}, though process {living.pid} lives",
            "Programs cannot join the node, if it is one.",
            f"See its logs, or end it: `aiogpu stop --force`, `kill {living.pid}`.",
        )
    elif os.path.lexists(path):
        raise CheckError(
            f"{path}: {problem}; a node that has ended has left it",
            "Programs that would join are told that none runs.",
            "`aiogpu start --head` takes its place; nothing need be removed.",
        )
    elif record is not None:
        yield _ok(
            SERVICE,
            f"none runs; a pidfile of one that was process {record.pid} is left at "
            f"{directory}, and is replaced by the next; {START}",
        )
    else:
        yield _ok(SERVICE, f"none runs, and none need; {START} at {path}")


def _reach(path: str) -> str | None:
    """Return why no node answers at a socket; None if one does."""
    with socket.socket(socket.AF_UNIX) as caller:
        # Not `settimeout`: without blocking, a full queue of connections is EAGAIN at
        # once, and not only after that time; see unix(7).
        limit = struct.pack("ll", int(PATIENCE), int(PATIENCE % 1 * 1e6))
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            caller.connect(path)
        except BlockingIOError:
            return f"no answer within {PATIENCE:g} s"
        except OSError as error:
            return error.strerror or str(error)
    return None


def _running(path: str, record: Record | None) -> Finding:
    found = f"a node runs at {path}" + (f", pid {record.pid}" if record else "")
    if record is None or record.version == aiogpu.__version__:
        return _ok(SERVICE, found)
    return _warn(
        SERVICE,
        f"{found}; it runs aiogpu {record.version}, this is {aiogpu.__version__}",
        "Programs of another version are turned away.",
        "Start the node anew: `aiogpu stop`, then `aiogpu start --head`.",
    )


def _service_limits(node: Record) -> str:
    """For how many workers the running node has room."""
    soft, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
    tasks, _ = resource.prlimit(node.pid, resource.RLIMIT_NPROC)
    used = len(os.listdir(f"/proc/{node.pid}/fd"))
    workers = _workers(soft, hard, used)
    processes = "any number of" if tasks < 0 else str(tasks)
    return _enough(
        workers,
        f"{soft} may be open, {used} are; room for {workers} workers, "
        f"{processes} processes",
        "Start the node with a higher `ulimit -Hn`, or LimitNOFILE= in its unit.",
    )


def _lingers(path: str, linger: Path) -> Iterator[Finding]:
    """Warn if systemd removes the directory when the user has logged out."""
    if not path.startswith(RUN_USER) or not linger.parent.is_dir():
        return
    with suppress(KeyError):
        user = pwd.getpwuid(os.geteuid()).pw_name
        if os.geteuid() and not (linger / user).exists():
            yield _warn(
                f"{SERVICE} linger",
                f"{path} is taken away when you log out for the last time",
                "The node ends then, with all that runs on it.",
                f"To have it go on: `loginctl enable-linger {user}`.",
            )


LIBRARIES: Final = ("numpy", "torch", "jax", "tensorflow", "cupy")


IMPORT: Final = """
import importlib, json, os, sys, time
from aiogpu.worker.zygote.preload import GUARDS, unfit_to_fork

os.environ.update(GUARDS)
begin = time.perf_counter()
module = importlib.import_module(sys.argv[1])
seconds = time.perf_counter() - begin
version = str(getattr(module, "__version__", ""))
print(json.dumps([seconds, version, unfit_to_fork()]))
"""
"""Imports as a zygote does, and proves what a zygote proves."""


def check_import(library: str) -> str:
    """Import one library in a throw-away process."""
    seconds, version, reason = try_out(IMPORT, library, limit=IMPORT_LIMIT)
    told = f"{version} in {seconds:.1f} s".strip()
    if reason is not None:
        raise CheckError(
            f"{told}; {reason}",
            "It is not preloaded: workers import it themselves, each for that long.",
        )
    return f"{told}; it may be preloaded"


IMPORT_LIMIT: Final = 120.0
"""Seconds that one import may take."""
KERNEL: Final = (
    "Use Linux 5.4 or newer, and a container whose seccomp profile allows it."
)
essential: Final = partial(Check, is_essential=True)
CHECKS: Final = (
    essential(
        "python",
        check_python,
        "Workers are started from that path, and it cannot be run.",
        "Set sys.executable to a Python interpreter that can import aiogpu.",
    ),
    essential(
        "directory",
        check_directory,
        "A node has no place for its socket.",
        f"Set {PARENT} to a short path that you may write to.",
    ),
    essential(
        "node",
        check_node,
        "No node starts on this machine.",
        "Please report it, with this line.",
        limit=70,
    ),
    essential(
        "subreaper",
        partial(
            try_mechanism,
            SUBREAPER,
            "a keeper adopts what its worker leaves behind",
        ),
        "What a task starts could outlive it.",
        KERNEL,
        limit=30,
    ),
    essential(
        "pidfd",
        partial(
            try_mechanism,
            PIDFD,
            "a process's end is seen at once, and no other is taken for it",
        ),
        "Nobody would see a driver or a zygote end.",
        KERNEL,
        limit=30,
    ),
    Check(
        "cgroup2",
        check_cgroup,
        "Nodes work without, by keepers; both killed at once may leave a process.",
        limit=20,
    ),
    Check("cpus", check_cpus),
    essential("descriptors", check_descriptors),
    Check("processes", check_processes),
    Check(
        "memory",
        check_memory,
        "Nothing can end a task before the kernel does.",
        "Mount the proc filesystem.",
    ),
    Check(
        "oom_score_adj",
        partial(try_mechanism, ADJUST, "a worker may raise its own"),
        "Where memory runs out, the kernel may end the driver instead of a worker.",
        "Mount /proc writable, or set memory= on tasks that need much.",
        limit=30,
    ),
    Check(
        "kernel log",
        check_kernel_log,
        "That the kernel ended a worker for memory is known from cgroups alone.",
        "It is not needed; to have it, set kernel.dmesg_restrict=0.",
    ),
    Check(
        "nvml",
        check_gpus,
        "GPUs are not detected; `num_gpus=` makes logical ones.",
        "Install NVIDIA's driver, or give the container `--gpus all`.",
        limit=30,
    ),
    Check(
        "visible gpus",
        check_visible,
        "A node does not start, unless num_gpus=0.",
        f"Correct {VISIBLE}.",
        limit=30,
    ),
    Check(SERVICE, check_service),
)
"""What is tried on every machine, in the order of the report."""


def import_checks() -> list[Check]:
    """A check for each of the usual libraries that is installed; takes seconds each."""
    return [
        Check(
            f"import {library}",
            partial(check_import, library),
            "It cannot be preloaded, and tasks that import it fail as well.",
            f"See what `python -c 'import {library}'` says.",
            limit=IMPORT_LIMIT + 10,
        )
        for library in LIBRARIES
        if find_spec(library) is not None
    ]
