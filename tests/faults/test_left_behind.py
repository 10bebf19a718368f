"""[B6, B7] What a program leaves that ends amid its node's end, or by exec: nothing.

It ends at a chosen step, so no moment is left to chance.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import psutil
import pytest

from tests.faults.remains import gone_within
from tests.support.cgroups import all_groups
from tests.support.program import start

LIMIT = 20.0
"""Seconds; what nobody removes stays for ever."""


@pytest.fixture
def place() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="agd-", dir="/tmp") as place:
        yield place


def new_groups(pid: int, before: set[str]) -> list[str]:
    """Groups of a program's nodes; another one may have had the same number before."""
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

    # Not the loop's own handler, which cancels main() and lets its end go on.
    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
"""


@pytest.mark.parametrize("number", ["SIGKILL", "SIGINT"])
def test_an_end_amid_the_nodes_end(number: str, place: str) -> None:
    """After its zygote was asked to end: the last step is to remove the cgroup."""
    before = all_groups()
    program = start(ENDING, number, XDG_RUNTIME_DIR=place)
    program.wait(60)
    gone_within(LIMIT, place)
    program.communicate()
    assert program.returncode != 0
    assert new_groups(program.pid, before) == []


EXEC = """
    import asyncio, os, shutil, sys
    import aiogpu
    from tests.contract import tasks

    def become_another_program():
        print("exec", flush=True)
        # Without variables, by which what is left is looked up.
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
def test_an_exec(when: str, place: str) -> None:
    """The process lives on, so nothing but its sockets says that the node has gone."""
    before = all_groups()
    program = start(EXEC, when, XDG_RUNTIME_DIR=place)
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "exec\n"
        gone_within(LIMIT, place)
        assert new_groups(program.pid, before) == []
        assert psutil.Process(program.pid).name() == "sleep"
    finally:
        program.kill()
        program.communicate()
