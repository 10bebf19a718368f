"""Zygotes forked for tests, in place of a new interpreter for each.

Two thirds of the cost of a test's node is the start of the zygote's interpreter. Tests
marked `fresh`, programs that tests start, and the full check (`--fresh`) prove that
start. A zygote that would differ from the forker's process is started as well.
`tests/support/test_forked_zygotes.py` proves that neither a task nor the kernel can
tell a forked zygote from a started one, except by some imported modules.
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
from typing import Any, Final

from aiogpu.runtime.zygote import config as process
from aiogpu.runtime.zygote.config import (
    HASH_SEED,
    interpreter_flags,
    start_interpreter,
)
from tests.support.zygote_forker import LARGEST

READ_AT_START: Final = (
    *("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC_", "GLIBC_"),
    *("HOME", "SETUPTOOLS_", "COVERAGE_"),
)
"""Prefixes of variables that are read before a zygote gets its own environment."""
INHERITED: Final = ("thread-self/status", "self/cgroup", "self/oom_score_adj")
"""Files in /proc that show what else a child process inherits."""
OF_STATUS: Final = (
    *("Umask", "Uid", "Gid", "Groups", "SigBlk", "SigIgn", "CapInh", "CapPrm"),
    *("CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Cpus_allowed"),
)
LIMIT: Final = 60.0
NOFILE: Final = resource.RLIMIT_NOFILE
_BOOT: Final = """
import gc, sys
gc.disable()
del __file__
sys.path[:] = fields["sys_path"]
from tests.support.zygote_forker import serve
fields = serve(fields["socket"])
del serve
from aiogpu.worker.zygote.main import main
fields is None or main(fields)
"""


class Forked(subprocess.Popen[bytes]):
    """A child of this process that another process has forked."""

    def __init__(self, pid: int) -> None:
        self._waitpid_lock = threading.Lock()
        self._child_created = True
        self._sigint_wait_secs = 0.25
        self.args = ()
        self.stdin = self.stdout = self.stderr = None
        self.returncode = None
        self.pid = pid


class Forker:
    """The process that forks zygotes for all tests of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._executable = sys.executable
        self._flags = interpreter_flags()
        self._inherited = inherited_state(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(LIMIT)
        self._output, output = os.pipe2(os.O_CLOEXEC)
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
        """Fork a zygote; start an interpreter if its state would be another."""
        variables = dict(os.environ if environ is None else environ)
        request = marshal.dumps((fields, variables))
        if (
            os.getpid() == self._owner
            and executable == self._executable
            and list(flags) == list(self._flags)
            and len(request) <= LARGEST
            and inherited_state(without_seed(fields, variables)) == self._inherited
        ):
            try:
                return self._fork(request, page, output, directory or ".")
            except OSError:
                pass  # the started interpreter reports the error
        return start_interpreter(
            fields, page, output, environ, directory, executable, flags
        )

    def _fork(
        self, request: bytes, page: int, output: int, directory: str
    ) -> subprocess.Popen[bytes]:
        place = os.open(directory, os.O_PATH | os.O_CLOEXEC)
        try:
            with self._lock:
                socket.send_fds(self._socket, [request], [page, output, place])
                answer = int.from_bytes(self._socket.recv(4), "little", signed=True)
        finally:
            os.close(place)
        if not answer:
            raise RuntimeError(f"the forker has ended: {os.read(self._output, 4096)!r}")
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        with suppress(ProcessLookupError):
            resource.prlimit(answer, NOFILE, resource.getrlimit(NOFILE))
        return Forked(answer)

    def close(self) -> str:
        """End the forker and return its output. Zygotes end with their nodes."""
        self._socket.close()
        self._process.wait(LIMIT)
        with open(self._output, encoding="utf-8", errors="replace") as file:
            return file.read()


def without_seed(
    fields: Mapping[str, Any], variables: Mapping[str, str]
) -> Mapping[str, str]:
    """The variables without a hash seed that the node has chosen: any would do."""
    own = {name for name, value in fields["environ"] if value is None}
    return {k: v for k, v in variables.items() if k != HASH_SEED or k not in own}


def inherited_state(environ: Mapping[str, str]) -> list[object]:
    """The state that an interpreter started now with these variables would inherit.

    Each fork gets its descriptors, its directory and its other variables by request.
    """
    proc = Path("/proc")
    status, *others = [(proc / name).read_text() for name in INHERITED]
    lines = [line for line in status.splitlines() if line.startswith(OF_STATUS)]
    read = {k: v for k, v in environ.items() if k.startswith(READ_AT_START)}
    return [read, lines, *others, limits(), os.getpriority(os.PRIO_PROCESS, 0)]


def limits() -> list[str]:
    """This process's limits, except the limit of descriptors.

    That limit is set for each fork: a node raises it while it is open.
    """
    lines = Path("/proc/self/limits").read_text().splitlines()
    return [line for line in lines if not line.startswith("Max open files")]
