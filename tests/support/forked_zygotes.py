"""Zygotes that are forked for tests, in place of an interpreter started for each.

Two thirds of what a test's node costs is the start of its zygote's interpreter. That
is proven by the tests marked `fresh`, by the nodes of all programs that tests start,
and by the full check, where each is started (`--fresh`). What would begin otherwise
than the forker has is started as well; `tests/support/test_forked_zygotes.py` holds
that neither a task nor the kernel can tell one from the other, but by some modules that
are imported.
"""

from __future__ import annotations

import marshal
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from aiogpu.runtime.zygote import config as process
from aiogpu.runtime.zygote.config import interpreter_flags, start_interpreter
from tests.support.zygote_forker import LARGEST

READ_AT_START: Final = (
    *("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_"),
    *("HOME", "SETUPTOOLS_", "COVERAGE_"),
)
"""How variables begin that are read before a zygote knows its own."""
INHERITED: Final = ("thread-self/status", "self/cgroup", "self/oom_score_adj")
"""What tells of whatever else a process hands down to those that it starts."""
OF_STATUS: Final = (
    *("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapInh", "CapPrm"),
    *("CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Cpus_allowed"),
)
LIMIT: Final = 60.0
NOFILE: Final = resource.RLIMIT_NOFILE
_BOOT: Final = (
    "import gc, marshal, os, sys; gc.disable(); "
    "fields = marshal.loads(os.read(0, 1 << 24)); "
    "sys.path[:] = fields['sys_path']; "
    "from tests.support.zygote_forker import serve; fields = serve(fields['socket']); "
    "del serve; "
    "from aiogpu.worker.zygote.main import main; fields is None or main(fields)"
)


class Forked(subprocess.Popen[bytes]):
    """A child of this process that it has not started itself."""

    def __init__(self, pid: int) -> None:
        self._waitpid_lock = threading.Lock()
        self._child_created = True
        self._sigint_wait_secs = 0.25
        self.args = ()
        self.stdin = self.stdout = self.stderr = None
        self.returncode = None
        self.pid = pid


class Forker:
    """Has zygotes forked; one for all tests of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._executable = sys.executable
        self._flags = interpreter_flags()
        self._begins = handed_down(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(LIMIT)
        self._told, output = os.pipe2(os.O_CLOEXEC)
        fields: dict[str, object] = {"sys_path": sys.path, "socket": theirs.fileno()}
        import pytest  # late: services import this module

        with theirs, pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "_BOOT", _BOOT)
            self._process = start_interpreter(
                fields, theirs.fileno(), output, flags=self._flags
            )
        os.close(output)

    def start(
        self,
        fields: dict[str, object],
        page: int,
        output: int,
        environ: Mapping[str, str] | None = None,
        directory: str | None = None,
        executable: str | None = None,
        flags: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Fork a zygote, or start one that would begin otherwise than a fork."""
        variables = dict(os.environ if environ is None else environ)
        told = marshal.dumps((fields, variables))
        if (
            os.getpid() == self._owner
            and executable == self._executable
            and list(flags) == list(self._flags)
            and len(told) <= LARGEST
            and handed_down(variables) == self._begins
        ):
            try:
                return self._fork(told, page, output, directory or ".")
            except OSError:
                pass  # then it is told by what is started
        return start_interpreter(
            fields, page, output, environ, directory, executable, flags
        )

    def _fork(
        self, told: bytes, page: int, output: int, directory: str
    ) -> subprocess.Popen[bytes]:
        place = os.open(directory, os.O_PATH | os.O_CLOEXEC)
        try:
            with self._lock:
                socket.send_fds(self._socket, [told], [page, output, place])
                answer = int.from_bytes(self._socket.recv(4), "little", signed=True)
        finally:
            os.close(place)
        if not answer:
            raise RuntimeError(f"the forker has ended: {os.read(self._told, 4096)!r}")
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        with suppress(ProcessLookupError):
            resource.prlimit(answer, NOFILE, resource.getrlimit(NOFILE))
        return Forked(answer)

    def close(self) -> str:
        """End it, and give what it has printed.

        Zygotes are ended by whoever had them started.
        """
        self._socket.close()
        self._process.wait(LIMIT)
        with open(self._told, encoding="utf-8", errors="replace") as told:
            return told.read()


def handed_down(environ: Mapping[str, str]) -> list[object]:
    """What an interpreter that is started now with these variables begins from.

    Its descriptors, its place and other variables are told to each fork.
    """
    proc = Path("/proc")
    status, *others = [(proc / name).read_text() for name in INHERITED]
    lines = [line for line in status.splitlines() if line.startswith(OF_STATUS)]
    read = {k: v for k, v in environ.items() if k.startswith(READ_AT_START)}
    return [read, lines, *others, limits(), os.getpriority(os.PRIO_PROCESS, 0)]


def limits() -> list[str]:
    """This process's limits, but for that of descriptors.

    That is set for each fork: a node raises it while it is open.
    """
    lines = Path("/proc/self/limits").read_text().splitlines()
    return [line for line in lines if not line.startswith("Max open files")]
