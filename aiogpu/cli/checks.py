"""Checks of this machine for `aiogpu doctor`.

`CHECKS` has a row for each mechanism. A check tries one mechanism, harmlessly and in
bounded time. It returns an observation or yields findings, prints nothing, and leaves
no process, file or group behind. Code that may hang or end the process runs in a child
process (`try_out`).
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
from aiogpu.linux.interpreter import interpreter_command
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
    """The result of trying a mechanism.

    Attributes:
        name: the mechanism, in two or three words.
        level: `ok` if it works, `warn` if it works in part, `missing` if not.
        found: the observation, in one line.
        means: a sentence about the consequence for users; empty if all is well.
        advice: a sentence about what to do; empty if nothing.
        is_essential: True if no node can start without the mechanism.
    """

    name: str
    level: Level
    found: str
    means: str = ""
    advice: str = ""
    is_essential: bool = False

    @property
    def is_fatal(self) -> bool:
        """True if aiogpu cannot work on this machine because of this finding."""
        return self.is_essential and self.level is Level.MISSING


class CheckError(Exception):
    """A mechanism does not work; the message is the observation.

    Attributes:
        means: the consequence; "" for the text of the check.
        advice: what to do; used only with `means`.
        level: the severity; None for the severity of the check.
    """

    def __init__(
        self, found: str, means: str = "", advice: str = "", level: Level | None = None
    ) -> None:
        super().__init__(found)
        self.means, self.advice, self.level = means, advice, level


@dataclass(frozen=True, slots=True)
class Check:
    """A mechanism to try.

    Attributes:
        name: the mechanism.
        run: tries the mechanism; returns an observation if all is well, or findings.
            An exception becomes a finding.
        means: the consequence of a failure.
        advice: what to do after a failure.
        limit: seconds after which the check counts as hung.
        is_essential: True if no node can start after a failure.
    """

    name: str
    run: Callable[[], str | Iterable[Finding]]
    means: str = "It cannot be tried."
    advice: str = ""
    limit: float = 10.0
    is_essential: bool = False

    def failed(self, error: Exception) -> Finding:
        """Return the finding for an exception."""
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
        """Run the check and append its findings."""
        try:
            found = self.run()
            if isinstance(found, str):
                found = [_ok(self.name, found, self.is_essential)]
            findings.extend(found)
        except Exception as error:  # noqa: BLE001 - any error is a finding
            findings.append(self.failed(error))


def examine(checks: Iterable[Check]) -> Iterator[Finding]:
    """Run the checks one by one, each in a thread that is abandoned if it hangs."""
    for check in checks:
        findings: list[Finding] = []
        thread = threading.Thread(
            None, check.collect, f"check {check.name}", [findings], daemon=True
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
    """Run a Python program whose last line of output is JSON; return the value.

    The program runs in a session of its own, which is killed when the time is up.

    Args:
        source: the source of the program.
        arguments: the program's `sys.argv[1:]`.
        limit: seconds that the program has.
        executable: the interpreter.

    Raises:
        CheckError: the program cannot be started, fails, hangs, or prints no JSON.
    """
    # The program has the import path of this process.
    path = os.pathsep.join(path for path in sys.path if path)
    try:
        child = subprocess.Popen(
            interpreter_command(executable, "-c", source, *arguments),
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
        last = (err.strip().splitlines() or ["no error message"])[-1]
        code = child.returncode
        ended = f"exit code {code}"
        if code < 0:
            ended = f"killed by {signal.Signals(-code).name}"
        raise CheckError(f"{ended}: {last}") from None


def try_mechanism(source: str, works: str, executable: str = sys.executable) -> str:
    """Run a program that prints a problem or ""; return `works` for ""."""
    if problem := try_out(source, executable=executable):
        raise CheckError(problem)
    return works


OLDEST: Final = (3, 11)


def check_python(
    version: Sequence[int] = sys.version_info[:3],
    executable: str = sys.executable,
    platform: str = sys.platform,
) -> str:
    """Check the interpreter, which every node starts again for its workers."""
    name = ".".join(map(str, version))
    if tuple(version[:2]) < OLDEST or platform != "linux":
        raise CheckError(
            f"{name} on {platform}",
            "aiogpu is for Python 3.11 and later, on Linux.",
            "Use a newer Python, or a Linux machine.",
        )
    if not os.access(executable or "-", os.X_OK):
        raise CheckError(f"{name}, sys.executable is {executable!r}")
    return f"{name}, {executable}"


def check_directory(create: Callable[[], str] = directories.create_directory) -> str:
    """Make the directory of a node's socket, bind a socket in it, remove it."""
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
            "Other users can see a node's socket, but the node still refuses them.",
            f"Set {PARENT} to a directory on a filesystem that supports modes.",
            Level.WARN,
        )
    return f"{os.path.dirname(directory)}, mode {mode:o}"


PARENT: Final = "XDG_RUNTIME_DIR" if os.environ.get("XDG_RUNTIME_DIR") else "TMPDIR"
"""The variable that decides where a node's directory is made."""
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
"""Opens a node, runs two tasks, closes it; prints the milliseconds of each step."""


def check_node(limit: float = 60.0, executable: str = sys.executable) -> str:
    """Open a real node, run two tasks and close it."""
    start, first, second, end = try_out(NODE, limit=limit, executable=executable)
    return (
        f"started in {start:.0f} ms, first task (with a fork) in {first:.1f} ms, next "
        f"task in {second:.2f} ms, closed in {end:.0f} ms"
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
"""Adopts an orphan; prints the problem, or ""."""
PIDFD: Final = """
import json, os, select, signal, subprocess

with subprocess.Popen(["/bin/sleep", "20"]) as child:
    try:
        pidfd = os.pidfd_open(child.pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        ended = select.select([pidfd], [], [], 5)[0]
    finally:
        child.kill()
print(json.dumps("" if ended else "a pidfd does not show the end of its process"))
"""
"""Ends a child through its pidfd; prints the problem, or ""."""
ADJUST: Final = """
import json
with open("/proc/self/oom_score_adj", "r+") as file:
    before = int(file.read())
    file.write(str(min(before + 1, 1000)))
    file.seek(0)
    fails = int(file.read()) <= before != 1000
print(json.dumps("a write does not change the value" if fails else ""))
"""
"""Raises its own `oom_score_adj` by one; prints the problem, or ""."""
LIMIT: Final = 5.0
"""Seconds to wait for the end of a killed process."""


def check_cgroup(
    find: Callable[[], cgroups.ParentCgroup] = cgroups.find_cgroup,
) -> str:
    """Make a group, move a sleeping process into it, kill the group, remove it."""
    place = find()
    if place.directory is None:
        raise CheckError(place.reason)  # contains advice
    group = Cgroup(f"{place.directory}/aiogpu-doctor-{os.getpid()}")
    group.make()
    program = interpreter_command(
        sys.executable, "-c", "import signal; signal.pause()", flags=("-S",)
    )
    try:
        # The pipe closes when the process ends, so its end is seen without polling.
        with subprocess.Popen(program, stdout=subprocess.PIPE) as sleeper:
            try:
                Path(group.path, "cgroup.procs").write_text(str(sleeper.pid))
                begin = time.perf_counter()
                group.kill()
                sleeper.communicate(timeout=LIMIT)
                seconds = time.perf_counter() - begin
            except subprocess.TimeoutExpired:
                raise CheckError(
                    f"{place.directory}: killing a group did not end its process "
                    f"within {LIMIT:g} s"
                ) from None
            finally:
                sleeper.kill()
    finally:
        group.wait_until_empty(LIMIT)
        is_gone = group.remove()
    if not is_gone:
        raise CheckError(f"{group.path} cannot be removed")
    return f"{place.directory}, a group was killed in {1e3 * seconds:.0f} ms"


def check_cpus(
    total: int | None = None, affinity: int | None = None, usable: float | None = None
) -> str:
    """Return the number of CPUs of a node, unless `num_cpus` is given."""
    total = total or os.cpu_count() or 1
    affinity = affinity or len(os.sched_getaffinity(0))
    usable = usable or cgroups.usable_cpus()
    reasons = []
    if affinity < total:
        reasons.append(f"affinity allows {affinity}")
    if usable < affinity:
        reasons.append("a cgroup's quota allows less")
    of_total = f" of {total}: {', '.join(reasons)}" if reasons else ""
    return f"{usable:g} usable{of_total}"


FEW: Final = 64
"""Number of workers below which a limit is reported."""


def _enough(workers: int, found: str, advice: str) -> str:
    """Return `found` if there is room for enough workers, else raise."""
    if workers >= FEW:
        return found
    means = "Tasks beyond that number of workers wait."
    raise CheckError(found, means, advice, Level.WARN if workers else None)


def _workers(soft: int, hard: int, used: int) -> int:
    """Return the number of workers that limits on descriptors allow."""
    slots = slots_within(raised(soft, hard, used), used)
    return most_workers(slots) if slots else 0


def check_descriptors(
    limits: tuple[int, int] | None = None, used: int | None = None
) -> str:
    """Check the limit on open files, and the number of workers that it allows."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    used = used_descriptors() if used is None else used
    reached, workers = raised(soft, hard, used), _workers(soft, hard, used)
    found = "no limit" if soft == resource.RLIM_INFINITY else f"limit {soft}"
    if reached != soft:
        found += f", a node raises it to {reached}"
    return _enough(
        workers,
        f"{found}; room for {workers} workers at a time, with {PER_SLOT} for each",
        f"Raise the hard limit ({hard}): `ulimit -Hn`, LimitNOFILE= of systemd, "
        f"--ulimit nofile= of a container.",
    )


def check_processes(
    proc: cgroups.StrPath = cgroups.PROC, euid: int | None = None
) -> str:
    """Check the limit on processes: each worker needs two, itself and its keeper."""
    bounds = list(_process_limits(proc, os.geteuid() if euid is None else euid))
    if not bounds:
        return "no limit"
    limit, used, source = min(bounds, key=lambda bound: bound[0] - bound[1])
    workers = max(0, limit - used - 1) // 2
    return _enough(
        workers,
        f"limit {limit} by {source}, {used} used; room for about {workers} workers at "
        f"a time, with 2 for each",
        "Raise `ulimit -u`, TasksMax= of systemd, --pids-limit of a container.",
    )


def _process_limits(proc: cgroups.StrPath, euid: int) -> Iterator[tuple[int, int, str]]:
    """Yield each limit on processes: (limit, current number, source)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if euid and soft != resource.RLIM_INFINITY:  # root has no limit
        yield soft, _threads_of(proc, euid), "ulimit -u"
    for controller in (cgroups.UNIFIED, "pids"):
        hierarchy = cgroups.find_hierarchy(controller, proc)
        for group in hierarchy.groups if hierarchy else ():
            limit = cgroups.read_limit(f"{group}/pids.max")
            current = cgroups.read_limit(f"{group}/pids.current")
            if limit is not None and current is not None:
                yield limit, current, f"{group}/pids.max"


def _threads_of(proc: cgroups.StrPath, euid: int) -> int:
    """Count a user's threads; the kernel limits threads, see setrlimit(2)."""
    count = 0
    for process in os.scandir(proc):
        with suppress(OSError):
            if process.name.isdigit() and process.stat().st_uid == euid:
                count += len(os.listdir(f"{process.path}/task"))
    return count


BOUNDLESS: Final = 1 << 60
"""Bytes from which a limit on memory counts as no limit."""


def check_memory(proc: cgroups.StrPath = cgroups.PROC) -> str:
    """Find the tightest limit on memory, and its source."""
    usage = MemoryBounds(proc).tightest()
    if usage.limit >= BOUNDLESS:
        raise CheckError(f"neither {proc}/meminfo nor a cgroup shows a limit")
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


UNVERIFIED: Final = "Shares are free when their processes end, and are `unverified`."


def check_gpus(
    take: Callable[[], Inventory] = inventory,
    make_watch: Callable[[], NvmlWatch] = NvmlWatch,
) -> Iterator[Finding]:
    """Check NVML and each GPU."""
    gpus = take()
    if gpus.count is None:
        raise CheckError(gpus.problem or "no answer", level=Level.MISSING)
    watch = make_watch()
    watch.open()
    try:
        version = watch.driver_version or "of unknown version"
        driver = f"driver {version}, {gpus.count} GPU{'s' * (gpus.count != 1)}"
        if gpus.problem is None:
            yield _ok("nvml", driver)
        else:
            yield _warn(
                "nvml",
                f"{driver}; {gpus.problem}",
                "Nodes do not use a GPU that does not answer.",
                NVIDIA_SMI,
            )
        for mig in gpus.mig:
            if not mig.instances:
                found = f"{mig.gpu.name or UNNAMED}: in MIG mode, without an instance"
                means = "No task can use it."
                advice = "Make instances (`nvidia-smi mig -cgi`), or leave MIG mode."
                yield _warn(f"gpu {mig.gpu.id}", found, means, advice)
        for device in gpus.devices:
            yield _device(device, watch.look(device), watch.check(device))
    finally:
        watch.close()


UNNAMED: Final = "without a name"
NVIDIA_SMI: Final = "Check the output of `nvidia-smi`."


def _device(device: Device, sample: Sample, health: Health) -> Finding:
    name, found = f"gpu {device.id}", device.name or UNNAMED
    if sample.problem is not None:
        means = "It is set aside." if sample.is_lost else UNVERIFIED
        return _warn(name, f"{found}: {sample.problem}", means, NVIDIA_SMI)
    if health.action:
        return _warn(
            name,
            f"{found}: the driver asks for this: {health.action}",
            "Tasks do not get this GPU until that is done.",
            "Check the output of `nvidia-smi -q`.",
        )
    if sample.used is not None:
        found += f", {sample.used / 2**30:.1f} GiB in use"
    if sample.processes is None:
        means = "Freed shares of this GPU are `unverified`."
        if sample.used is None:
            means = UNVERIFIED
        return _warn(name, f"{found}; the driver lists no processes", means)
    found += f", {len(sample.processes)} processes listed"
    if not sample.reads_pids:
        return _warn(
            name,
            f"{found}; unknown whether the listed process ids are of this container, "
            f"until a task is listed",
            "Until then, freed shares of this GPU are `unverified`.",
            "To verify them, run the container with `--pid=host`.",
        )
    return _ok(name, found)


def check_visible(environ: Mapping[str, str] = os.environ) -> str:
    """Describe the GPUs that a node would use, by the node's own rules."""
    value = environ.get(VISIBLE)
    devices = Nvidia().devices(environ, None)
    ids = ", ".join(str(device.id) for device in devices) or "none"
    setting = f"{VISIBLE}={value!r}" if value is not None else f"{VISIBLE} is not set"
    return f"{setting}: a node uses {ids}"


SERVICE: Final = "service"
PATIENCE: Final = 2.0
"""Seconds that a running node has to accept a connection."""
LINGER: Final = Path("/var/lib/systemd/linger")
RUN_USER: Final = "/run/user/"
START: Final = "`aiogpu start --head` starts one"


def check_service(
    socket_path: str | None = None, linger: Path = LINGER
) -> Iterator[Finding]:
    """Check that a shared node of this user runs, or could start.

    Args:
        socket_path: the socket of the node; None for the default of `aiogpu start`.
        linger: the directory where systemd notes users whose services outlive logins.
    """
    place = Place.at(socket_path)
    path, directory = place.socket, os.path.dirname(place.socket)
    with suppress(OSError):  # a node makes the directory when it starts
        if unfit := directories.unfit_directory(directory):
            raise CheckError(
                f"{directory} {unfit.problem}",
                "No shared node can start there, and no program can join one.",
                f"{unfit.remedy}, or give another path by `aiogpu start --socket`.",
            )
    record, problem = read_record(place.pidfile), _reach(path)
    living = record if record is not None and record.is_alive else None
    if problem is None:
        yield _running(path, record)
        with suppress(OSError):  # the node has ended meanwhile
            if living is not None:
                limits = Check(f"{SERVICE} limits", partial(_service_limits, living))
                yield from examine([limits])
        yield from _lingers(path, linger)
    elif living is not None:
        raise CheckError(
            f"{path}: {problem}, but process {living.pid} is alive",
            "Programs cannot join the node.",
            f"Read its logs, or end it: `aiogpu stop --force`, `kill {living.pid}`.",
        )
    elif os.path.lexists(path):
        raise CheckError(
            f"{path}: {problem}; the socket was left by a node that has ended",
            "Programs that join get an error: no node runs.",
            "Run `aiogpu start --head`, which replaces the socket.",
        )
    elif record is not None:
        yield _ok(
            SERVICE,
            f"no shared node runs; the pidfile of process {record.pid}, which has "
            f"ended, is left in {directory}, and the next node replaces it; {START}",
        )
    else:
        yield _ok(
            SERVICE, f"no shared node runs, and none is needed; {START} at {path}"
        )


def _reach(path: str) -> str | None:
    """Return why no node answers on a socket; None if one answers."""
    with socket.socket(socket.AF_UNIX) as caller:
        # Not `settimeout`, which makes `connect` fail at once (EAGAIN) if the queue of
        # connections is full; see unix(7).
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
        f"{found}, with aiogpu {record.version}; this is {aiogpu.__version__}",
        "The node refuses programs of another version.",
        "Restart the node: `aiogpu stop`, then `aiogpu start --head`.",
    )


def _service_limits(node: Record) -> str:
    """Check the number of workers that the limits of the running node allow."""
    soft, hard = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
    tasks, _ = resource.prlimit(node.pid, resource.RLIMIT_NPROC)
    used = len(os.listdir(f"/proc/{node.pid}/fd"))
    workers = _workers(soft, hard, used)
    processes = "any number of" if tasks < 0 else str(tasks)
    return _enough(
        workers,
        f"limit of {soft} open files, {used} used; room for {workers} workers, "
        f"{processes} processes",
        "Start the node with a higher `ulimit -Hn`, or LimitNOFILE= in its unit.",
    )


def _lingers(path: str, linger: Path) -> Iterator[Finding]:
    """Warn if systemd removes the directory when the user logs out."""
    if not path.startswith(RUN_USER) or not linger.parent.is_dir():
        return
    with suppress(KeyError):
        user = pwd.getpwuid(os.geteuid()).pw_name
        if os.geteuid() and not (linger / user).exists():
            yield _warn(
                f"{SERVICE} linger",
                f"systemd removes {path} when your last session ends",
                "The node and its tasks end then.",
                f"To keep the node running: `loginctl enable-linger {user}`.",
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
"""Imports a module like a zygote, and checks that the process may still fork."""


def check_import(library: str) -> str:
    """Import a library in a separate process."""
    seconds, version, reason = try_out(IMPORT, library, limit=IMPORT_LIMIT)
    found = f"{version} in {seconds:.1f} s".strip()
    if reason is not None:
        raise CheckError(
            f"{found}; {reason}",
            "It cannot be preloaded: each worker imports it, in that time.",
        )
    return f"{found}; it can be preloaded"


IMPORT_LIMIT: Final = 120.0
"""Seconds that an import may take."""
KERNEL: Final = (
    "Use Linux 5.4 or newer, and a container whose seccomp profile allows it."
)
essential: Final = partial(Check, is_essential=True)
CHECKS: Final = (
    essential(
        "python",
        check_python,
        "Workers are started from that path, which cannot be run.",
        "Set sys.executable to a Python interpreter that can import aiogpu.",
    ),
    essential(
        "directory",
        check_directory,
        "A node has no place for its socket.",
        f"Set {PARENT} to a short path that you can write to.",
    ),
    essential(
        "node",
        check_node,
        "No node can start on this machine.",
        "Do what it says; if it says nothing, please report this line as a bug.",
        limit=70,
    ),
    essential(
        "subreaper",
        partial(
            try_mechanism,
            SUBREAPER,
            "a keeper adopts the processes that its worker leaves behind",
        ),
        "Processes that a task starts could outlive it.",
        KERNEL,
        limit=30,
    ),
    essential(
        "pidfd",
        partial(
            try_mechanism,
            PIDFD,
            "the end of a process is seen at once, without mistaken pids",
        ),
        "The end of a driver or a zygote would go unnoticed.",
        KERNEL,
        limit=30,
    ),
    Check(
        "cgroup2",
        check_cgroup,
        "Nodes work without it: keepers end processes. If a keeper and the zygote are "
        "killed at once, a process may stay.",
        limit=20,
    ),
    Check("cpus", check_cpus),
    essential("descriptors", check_descriptors),
    Check("processes", check_processes),
    Check(
        "memory",
        check_memory,
        "Nodes cannot end a task before the kernel's OOM killer does.",
        "Mount the proc filesystem.",
    ),
    Check(
        "oom_score_adj",
        partial(try_mechanism, ADJUST, "a worker can raise its own value"),
        "When memory runs out, the kernel may end the driver instead of a worker.",
        "Mount /proc writable, or set memory= on tasks that use much memory.",
        limit=30,
    ),
    Check(
        "kernel log",
        check_kernel_log,
        "Only cgroups show that the kernel ended a worker for lack of memory.",
        "Not needed; to enable it, set kernel.dmesg_restrict=0.",
    ),
    Check(
        "nvml",
        check_gpus,
        "GPUs are not detected; `num_gpus=` makes logical GPUs.",
        "Install NVIDIA's driver, or run the container with `--gpus all`.",
        limit=30,
    ),
    Check(
        "visible gpus",
        check_visible,
        "A node cannot start, unless with num_gpus=0.",
        f"Correct {VISIBLE}.",
        limit=30,
    ),
    Check(SERVICE, check_service),
)
"""The checks for every machine, in the order of the report."""


def import_checks() -> list[Check]:
    """Return a check for each common library that is installed; each takes seconds."""
    return [
        Check(
            f"import {library}",
            partial(check_import, library),
            "It cannot be preloaded, and tasks that import it fail as well.",
            f"Run `python -c 'import {library}'` to see the error.",
            limit=IMPORT_LIMIT + 10,
        )
        for library in LIBRARIES
        if find_spec(library) is not None
    ]
