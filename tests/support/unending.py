"""Processes that SIGKILL does not end, for tests, where the machine allows them.

- `frozen`: a process in a freezer of cgroup version 1. It waits in the kernel (state D)
  as one does whose device driver or disk hangs.
- `stuck`: the first process of a PID namespace ends only when all others of the
  namespace have been reaped (`zap_pid_ns_processes` of the kernel), and one of them is
  a child of a process outside, which does not.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from aiogpu.linux.cgroup import find_hierarchy

CLONE_NEWPID: Final = 0x20000000
HIERARCHY: Final = find_hierarchy("freezer")


def _may_freeze() -> bool:
    return (
        HIERARCHY is not None
        and HIERARCHY.is_writable
        and os.access(HIERARCHY.own, os.W_OK)
    )


def _may_unshare() -> bool:
    code = "import ctypes; exit(ctypes.CDLL(None).unshare(0x20000000) != 0)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


needs_freezer = pytest.mark.skipif(
    not _may_freeze(), reason="no writable freezer of cgroup version 1"
)
needs_namespaces = pytest.mark.skipif(
    not _may_unshare(), reason="this user may not make a PID namespace"
)


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """Freeze processes in the block."""
    assert HIERARCHY is not None
    group = Path(HIERARCHY.own, f"aiogpu-test-{os.getpid()}")
    group.mkdir()
    state = group / "freezer.state"
    try:
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        state.write_text("FROZEN")
        while state.read_text().strip() != "FROZEN":
            pass
        yield
    finally:
        state.write_text("THAWED")
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        while group.exists():
            # A dying process keeps its group busy for a moment.
            with suppress(OSError):
                group.rmdir()


def start_init() -> None:
    """In a task: start the first process of a PID namespace."""
    if ctypes.CDLL(None).unshare(CLONE_NEWPID):
        raise OSError("no PID namespace")
    if os.fork() == 0:
        while True:
            signal.pause()


_GUEST = """
import ctypes, os, signal, sys
namespace = os.open(f"/proc/{sys.argv[1]}/ns/pid", os.O_RDONLY)
assert ctypes.CDLL(None).setns(namespace, 0x20000000) == 0
pid = os.fork()
if pid == 0:
    while True:
        signal.pause()
print("ready", flush=True)
sys.stdin.read()
os.waitpid(pid, 0)
"""


@contextmanager
def stuck(init: int) -> Iterator[None]:
    """Keep the first process of a PID namespace from ending in the block."""
    guest = subprocess.Popen(
        [sys.executable, "-c", _GUEST, str(init)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert guest.stdout is not None
    assert guest.stdout.readline() == b"ready\n"
    try:
        yield
    finally:
        guest.communicate()
