"""A program that is killed, signalled or replaced by exec leaves nothing.

Each program ends at a chosen step, so no moment is left to chance.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.leftovers import wait_until_gone
from tests.support.cgroups import all_groups, groups_of
from tests.support.gate import Gate
from tests.support.program import start

LIMIT = 20.0
"""Seconds; a file that no process removes stays for ever."""


@pytest.fixture
def directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="agd-", dir="/tmp") as directory:
        yield directory


def new_groups(pid: int, before: set[str]) -> list[str]:
    """New groups of a program's nodes; an earlier process may have had the same id."""
    return [name for name in all_groups() - before if name.endswith(f"-{pid}")]


ENDING = """
    import asyncio, os, signal, sys
    import aiogpu
    from aiogpu.runtime.node_cgroup import NodeCgroup
    from tests.contract import tasks

    async def end(cgroup):
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
        await asyncio.Event().wait()

    async def main():
        async with aiogpu.init(num_cpus=1, num_gpus=1):
            await tasks.add.remote(1)
            NodeCgroup.remove = end

    # Not aiogpu.run, whose handler cancels main() and lets the node close.
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
"""


@pytest.mark.parametrize("number", ["SIGKILL", "SIGINT"])
def test_a_program_killed_while_its_node_closes_leaves_nothing(
    number: str, directory: str
) -> None:
    """The last step is to remove the cgroup, after the zygote was told to end."""
    before = all_groups()
    program = start(ENDING, number, XDG_RUNTIME_DIR=directory)
    program.wait(60)
    wait_until_gone(LIMIT, directory)
    program.communicate()
    assert program.returncode != 0
    assert new_groups(program.pid, before) == []


EXEC = """
    import asyncio, os, shutil, sys
    import aiogpu
    from tests.contract import tasks

    def become_another_program():
        print("exec", flush=True)
        # Without variables: processes are found by theirs.
        os.execve(shutil.which("sleep"), ["sleep", "1000"], {})

    async def main():
        opening = asyncio.ensure_future(aiogpu.init(num_cpus=1).__aenter__())
        if sys.argv[1] == "amid its start":
            while not os.listdir(os.environ["XDG_RUNTIME_DIR"]):
                await asyncio.sleep(0)
            become_another_program()
        await opening
        await tasks.add.remote(1)
        become_another_program()

    aiogpu.run(main())
"""


@pytest.mark.parametrize("when", ["amid its start", "while its node is open"])
def test_a_program_that_calls_exec_leaves_nothing(when: str, directory: str) -> None:
    """The process lives on: only closed sockets tell helpers that the node is gone."""
    before = all_groups()
    program = start(EXEC, when, XDG_RUNTIME_DIR=directory)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "exec\n"
        wait_until_gone(LIMIT, directory)
        assert new_groups(program.pid, before) == []
        assert psutil.Process(program.pid).name() == "sleep"
    finally:
        program.kill()
        program.communicate()


# A killed driver whose zygote or keeper is stopped or killed.


KILLED = """
    import asyncio, sys, threading
    import aiogpu
    from tests.contract import tasks

    async def main():
        async with aiogpu.init(num_cpus=1, num_gpus=1):
            if sys.argv[1] == "with a keeper":
                await tasks.add.remote(1)
            print("ready", flush=True)
            await asyncio.Event().wait()

    if sys.argv[2] == "in a thread":
        thread = threading.Thread(target=asyncio.run, args=(main(),))
        thread.start()
        thread.join()
    else:
        aiogpu.run(main())
"""


@pytest.mark.parametrize("where", ["in the main thread", "in a thread"])
@pytest.mark.parametrize(
    ("has", "stopped", "killed"),
    [
        ("no keeper", "aiogpu-zygote", ""),
        ("with a keeper", "aiogpu-zygote", ""),
        ("with a keeper", "aiogpu-", ""),
        ("with a keeper", "aiogpu-keep", "aiogpu-zygote"),
    ],
)
def test_a_killed_driver_leaves_nothing(
    has: str, stopped: str, killed: str, where: str, directory: str
) -> None:
    program = start(KILLED, has, where, XDG_RUNTIME_DIR=directory)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    helpers = psutil.Process(program.pid).children(recursive=True)
    for helper in helpers:
        if helper.name().startswith(stopped):
            helper.suspend()
    groups = groups_of(program.pid)
    program.send_signal(signal.SIGSTOP)
    for helper in helpers:
        if killed and helper.name().startswith(killed):
            helper.kill()
    program.kill()
    program.wait(60)
    try:
        wait_until_gone(LIMIT, directory)
    finally:
        for helper in helpers:
            if helper.is_running():
                helper.kill()
        program.communicate()
    assert {*groups} & {*groups_of(program.pid)} == set()
    assert program.returncode == -signal.SIGKILL
    assert os.listdir(directory) == []


# SIGTERM to a program under aiogpu.run, as Slurm and Kubernetes send it.


TERMINATED = """
    import sys, aiogpu
    from tests.support.gate import pass_gate, pass_gate_softly
    @aiogpu.remote
    def plain(path, directory):
        try:
            pass_gate(path, "plain")
        finally:
            open(directory + "/plain", "w").close()
    @aiogpu.remote
    async def softly(path, directory):
        try:
            await pass_gate_softly(path, "softly")
        finally:
            open(directory + "/softly", "w").close()
    async def main():
        path, directory = sys.argv[1:]
        try:
            async with aiogpu.init(num_cpus=2, log_to_driver=False):
                a, b = plain.remote(path, directory), softly.remote(path, directory)
                await a
                await b
        finally:
            print("the program's finally", flush=True)
    try:
        aiogpu.run(main())
    finally:
        print("the end", flush=True)
"""


@pytest.mark.usefixtures("no_leaks")
async def test_sigterm_ends_a_program_like_ctrl_c(gate: Gate, tmp_path: Path) -> None:
    program = start(TERMINATED, gate.path, str(tmp_path))
    await gate.entered("plain", "softly")
    program.send_signal(signal.SIGTERM)
    out, errors = await asyncio.to_thread(program.communicate, timeout=60)
    assert out == "the program's finally\nthe end\n"
    assert program.returncode == 128 + signal.SIGTERM
    assert errors == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "softly"]


STUBBORN = """
    import asyncio, os, signal, sys, aiogpu
    async def main():
        print("runs", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print("holds on", flush=True)
            await asyncio.Event().wait()
    aiogpu.run(main())
"""


async def test_a_second_sigterm_ends_a_program_at_once() -> None:
    program = start(STUBBORN)
    assert program.stdout is not None
    for line in ("runs", "holds on"):
        assert await asyncio.to_thread(program.stdout.readline) == f"{line}\n"
        program.send_signal(signal.SIGTERM)
    await asyncio.to_thread(program.communicate, timeout=60)
    assert program.returncode == -signal.SIGTERM


OWN = """
    import asyncio, signal, aiogpu
    async def main():
        heard = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, heard.set)
        print("runs", flush=True)
        await heard.wait()
        print("heard", flush=True)
    aiogpu.run(main())
"""


async def test_a_program_may_handle_sigterm_itself() -> None:
    program = start(OWN)
    assert program.stdout is not None
    assert await asyncio.to_thread(program.stdout.readline) == "runs\n"
    program.send_signal(signal.SIGTERM)
    out, _ = await asyncio.to_thread(program.communicate, timeout=60)
    assert (out, program.returncode) == ("heard\n", 0)
