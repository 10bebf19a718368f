"""A zygote that is forked for a test equals one that is started."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu.runtime.zygote import config
from aiogpu.runtime.zygote.config import start_interpreter
from tests.support.forked_zygotes import Forked, Forker, inherited_state
from tests.support.zygote_forker import IMPORTED, SYS_CLONE

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.skipif(
        os.uname().machine not in SYS_CLONE, reason="zygotes cannot be forked here"
    ),
]

NODE = re.compile("aiogpu-[0-9a-f]+-")
OF_A_PROCESS = ("Name:", "Tgid:", "Pid:", "PPid:", "Ngid:", "NS", "Vm", "Rss", "Huge")
OF_A_TERMINAL = ("COLUMNS", "LINES")
"""readline sets these in C's environment only; pytest imports it without workers."""
OF_A_MOMENT = ("State:", "voluntary_", "nonvoluntary_", "SigQ:", "THP_", "FDSize")


@aiogpu.remote
def worker_state() -> tuple[list[int], dict[str, Any]]:
    """Return the worker's process id and three ancestors', and its visible state."""
    import gc
    import importlib
    import os
    import signal
    import sys
    import warnings

    line = [os.getpid()]
    for _ in range(3):
        with open(f"/proc/{line[-1]}/stat") as stat:
            line.append(int(stat.read().rpartition(")")[2].split()[1]))
    for name in IMPORTED:  # a forked zygote has them already
        importlib.import_module(name)
    return line, {
        "modules": sorted(sys.modules),
        "path": sys.path,
        "argv": sys.argv,
        "flags": tuple(sys.flags),
        "warnings": (sys.warnoptions, len(warnings.filters)),
        "environ": {k: v for k, v in os.environ.items() if k not in OF_A_TERMINAL},
        "place": os.getcwd(),
        "handlers": [
            str(signal.getsignal(n)).partition(" at 0x")[0]
            for n in signal.valid_signals()
        ],
        "collector": (gc.isenabled(), gc.get_threshold()),
        "streams": [
            (type(stream), getattr(stream, "encoding", ""), stream.errors)
            for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__, sys.stdin)
        ],
        "builtins": sorted(vars(sys.modules["builtins"])),
        "main": sorted(vars(sys.modules["__main__"])),
    }


def kernel_state(pid: int) -> dict[str, Any]:
    """The kernel's facts about a process, except those that always differ."""
    proc = Path(f"/proc/{pid}")
    status = (proc / "status").read_text().splitlines()
    fields = (proc / "stat").read_text().rpartition(")")[2].split()
    own = OF_A_PROCESS + OF_A_MOMENT
    return {
        "name": (proc / "comm").read_text(),
        "program": os.readlink(proc / "exe"),
        "status": [line for line in status if not line.startswith(own)],
        "limits": (proc / "limits").read_text(),
        "cgroup": NODE.sub("aiogpu-NODE-", (proc / "cgroup").read_text()),
        "place": os.readlink(proc / "cwd"),
        "niceness": fields[16],
        "leads": (int(fields[2]) == pid, int(fields[3]) == pid),
        "open": sorted(
            # The number of a pipe, and the node's name.
            os.path.basename(os.readlink(link)).partition("[")[0]
            for link in (proc / "fd").iterdir()
        ),
    }


async def node_state() -> tuple[int, dict[str, Any]]:
    """Open a node; return the zygote's parent, and the state of all processes."""
    async with aiogpu.init(num_cpus=1, num_gpus=0):
        (worker, keeper, zygote, driver), state = await worker_state.remote()
        for who, pid in (("worker", worker), ("keeper", keeper), ("zygote", zygote)):
            state |= {f"{who}'s {k}": v for k, v in kernel_state(pid).items()}
        return driver, state


@pytest.fixture
def forked(zygote_forker: Forker, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each zygote, True if it was forked."""
    zygotes = []

    def start(*args: Any) -> Any:
        child = zygote_forker.start(*args)
        zygotes.append(isinstance(child, Forked))
        return child

    monkeypatch.setattr(config, "start_interpreter", start)
    return zygotes


async def test_a_forked_zygote_equals_a_started_one(
    forked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLOUR", "blue")
    driver, forked_state = await node_state()
    assert forked == [True]
    monkeypatch.setattr(config, "start_interpreter", start_interpreter)
    other_driver, started_state = await node_state()
    assert driver == other_driver == os.getpid()
    assert forked_state["environ"]["COLOUR"] == "blue"
    assert forked_state.keys() == started_state.keys()
    for name, value in forked_state.items():
        assert value == started_state[name], name


@pytest.mark.parametrize("variable", ["PYTHONUTF8", "LD_BIND_NOW", "HOME", "TZ"])
async def test_a_variable_that_is_read_at_the_start_prevents_a_fork(
    variable: str, forked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    await node_state()
    assert forked == [False]


async def test_another_umask_prevents_a_fork(
    forked: list[bool],
) -> None:
    before = os.umask(0o123)
    try:
        _, state = await node_state()
    finally:
        os.umask(before)
    assert forked == [False]
    assert "Umask:\t0123" in state["zygote's status"]


async def test_a_forked_zygote_gets_the_limit_of_descriptors(
    forked: list[bool],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = min(soft, 900)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lower, hard))
    try:
        _, state = await node_state()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert forked == [True]
    files = next(x for x in state["zygote's limits"].splitlines() if "open files" in x)
    assert files.split()[3] == str(lower)


def test_the_inherited_state_contains_the_niceness() -> None:
    ours = inherited_state(os.environ)
    assert inherited_state(os.environ) == ours
    command = (
        "import os; os.nice(1); from tests.support import forked_zygotes as forked; "
        "print(forked.inherited_state(os.environ)[-1])"
    )
    nicer = subprocess.check_output([sys.executable, "-c", command], text=True)
    assert int(nicer) == ours[-1] + 1


def test_the_forker_ends_when_its_socket_is_closed() -> None:
    forker = Forker()
    assert forker.close() == ""
