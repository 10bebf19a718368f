"""The node that this user's programs share, and what imports cost here.

Whether a node runs, how it stands, and what the zygote would import.
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from aiogpu.linux.cgroup_hierarchy import PROC
from aiogpu.runtime.checks.finding import Finding, Level, TrialError, try_out
from aiogpu.runtime.descriptors import raised, slots_within
from aiogpu.runtime.directories import default_socket, unfit_directory
from aiogpu.runtime.workers.slots import most_workers

NAME: Final = "service"


PATIENCE: Final = 2.0
"""Seconds in which a node that runs takes up a connection."""


FEW: Final = 64
"""Workers below which a limit is worth a word."""


LONGEST: Final = 1 << 16


LINGER: Final = Path("/var/lib/systemd/linger")


RUN_USER: Final = "/run/user/"


START: Final = "`aiogpu start --head` starts one"


class Told(NamedTuple):
    """What a pidfile says, as far as it can be read.

    Attributes:
        pid: the node's process, 0 if nothing is said.
        started: when that began, in ticks since the machine's start; 0 if unknown.
        version: of aiogpu, "" if unknown.
    """

    pid: int = 0
    started: int = 0
    version: str = ""


def check_service(
    path: str | None = None,
    release: str | None = None,
    proc: Path = PROC,
    linger: Path = LINGER,
) -> Iterator[Finding]:
    """Return whether a node serves this user's programs, and what stands in its way.

    Args:
        path: of its socket; where `aiogpu start` listens unless given.
        release: this program's version of aiogpu.
        proc: the proc filesystem.
        linger: where systemd notes whose services outlive their logins.
    """
    from aiogpu import __version__

    path = path or default_socket()
    unfit = _directory(os.path.dirname(path))
    if unfit is not None:
        yield unfit
        return
    told, problem = _told(path), _reach(path)
    if problem is None:
        yield _running(path, told, release or __version__)
        yield from _limits(told.pid, proc)
        yield from _lingers(path, linger)
    elif not os.path.lexists(path) and not _is_alive(told, proc):
        yield from _none(path, told)
    else:
        yield _deaf(path, told, problem, proc)


def _directory(directory: str) -> Finding | None:
    """Return what makes the directory of the socket one that no node may use."""
    try:
        unfit = unfit_directory(directory)
    except OSError:
        return None  # it is made when a node starts
    if unfit is None:
        return None
    return Finding(
        NAME,
        Level.WARN,
        f"{directory} {unfit.problem}",
        "No node starts there, and no program joins one there.",
        f"{unfit.remedy}, or name another place by `aiogpu start --socket`.",
    )


def _told(path: str) -> Told:
    """Return what the pidfile beside a socket says."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        with open(f"{path.removesuffix('.sock')}.pid", "rb") as file:
            said = json.loads(file.read(LONGEST))
        started, version = said.get("started", 0), said.get("version", "")
        return Told(int(said["pid"]), int(started), str(version))
    return Told()


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


def _is_alive(told: Told, proc: Path) -> bool:
    """Whether the pidfile's process lives, and its number was not given to another."""
    with suppress(OSError, IndexError):
        fields = (
            (proc / str(told.pid) / "stat").read_bytes().rpartition(b")")[2].split()
        )
        # Field 22 is the start; field 3 is the first after the name (proc(5)).
        return told.started in (0, int(fields[19])) and fields[0] not in (b"Z", b"X")
    return False


def _running(path: str, told: Told, release: str) -> Finding:
    who = f", pid {told.pid}" if told.pid else ""
    found = f"a node runs at {path}{who}"
    if told.version and told.version != release:
        return Finding(
            NAME,
            Level.WARN,
            f"{found}; it runs aiogpu {told.version}, this is {release}",
            "Programs of another version are turned away.",
            "Start the node anew: `aiogpu stop`, then `aiogpu start --head`.",
        )
    return Finding(NAME, Level.OK, found)


def _none(path: str, told: Told) -> Iterator[Finding]:
    if told.pid:
        yield Finding(
            NAME,
            Level.OK,
            f"none runs; a pidfile of one that was process {told.pid} is left at "
            f"{os.path.dirname(path)}, and is replaced by the next; {START}",
        )
    else:
        yield Finding(NAME, Level.OK, f"none runs, and none need; {START} at {path}")


def _deaf(path: str, told: Told, problem: str, proc: Path) -> Finding:
    """There is a socket, or a process, and nobody answers."""
    if _is_alive(told, proc):
        return Finding(
            NAME,
            Level.WARN,
            f"{path}: {problem}, though process {told.pid} lives",
            "Programs cannot join the node, if it is one.",
            f"See its logs, or end it: `aiogpu stop --force`, `kill {told.pid}`.",
        )
    return Finding(
        NAME,
        Level.WARN,
        f"{path}: {problem}; a node that has ended has left it",
        "Programs that would join are told that none runs.",
        "`aiogpu start --head` takes its place; nothing need be removed.",
    )


def _limits(pid: int, proc: Path) -> Iterator[Finding]:
    """For how many workers there is room in the node that runs."""
    with suppress(OSError, ValueError, IndexError):
        files = _limit(proc, pid, "Max open files")
        tasks = _limit(proc, pid, "Max processes")
        open_now = len(os.listdir(proc / str(pid) / "fd"))
        slots = slots_within(raised(*files, open_now), open_now)
        workers = most_workers(slots) if slots else 0
        told = f"{files[0]} may be open, {open_now} are; room for {workers} workers"
        processes = "any number of" if tasks[0] < 0 else str(tasks[0])
        if workers >= FEW:
            yield Finding(f"{NAME} limits", Level.OK, f"{told}, {processes} processes")
            return
        yield Finding(
            f"{NAME} limits",
            Level.WARN,
            f"{told}, {processes} processes",
            "Tasks that would need more workers wait for one.",
            "Start the node with a higher `ulimit -Hn`, or LimitNOFILE= in its unit.",
        )


def _limit(proc: Path, pid: int, name: str) -> tuple[int, int]:
    """The soft limit of a process, and the hard one; -1 for none (proc(5))."""
    for line in (proc / str(pid) / "limits").read_text().splitlines():
        if line.startswith(name):
            soft, hard = line[len(name) :].split()[:2]
            return tuple(-1 if one == "unlimited" else int(one) for one in (soft, hard))  # type: ignore[return-value]
    raise ValueError(name)


def _lingers(path: str, linger: Path) -> Iterator[Finding]:
    """Return whether systemd takes the directory away with the user's last login."""
    if not path.startswith(RUN_USER) or not linger.parent.is_dir():
        return
    with suppress(KeyError):
        user = pwd.getpwuid(os.geteuid()).pw_name
        if os.geteuid() and not (linger / user).exists():
            yield Finding(
                f"{NAME} linger",
                Level.WARN,
                f"{path} is taken away when you log out for the last time",
                "The node ends then, with all that runs on it.",
                f"To have it go on: `loginctl enable-linger {user}`.",
            )


LIBRARIES: Final = ("numpy", "torch", "jax", "tensorflow", "cupy")


LIMIT: Final = 120.0
"""Seconds that one import may take."""


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


def check_import(
    library: str,
    is_there: Callable[[str], bool] = lambda name: find_spec(name) is not None,
    limit: float = LIMIT,
) -> Iterator[Finding]:
    """Import one library in a throw-away process; says nothing if it is not there."""
    if not is_there(library):
        return
    name = f"import {library}"
    try:
        seconds, version, reason = try_out(
            IMPORT, library, limit=limit, environ=dict(os.environ)
        )
    except TrialError as error:
        yield Finding(
            name,
            Level.WARN,
            str(error),
            "It cannot be preloaded, and tasks that import it fail as well.",
            f"See what `python -c 'import {library}'` says.",
        )
        return
    told = f"{version} in {seconds:.1f} s".strip()
    if reason is None:
        yield Finding(name, Level.OK, f"{told}; it may be preloaded")
        return
    yield Finding(
        name,
        Level.WARN,
        f"{told}; {reason}",
        "It is not preloaded: workers import it themselves, each for that long.",
    )
