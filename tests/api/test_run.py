"""[B2] `run` is `asyncio.run` on uvloop."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest
import uvloop

import aiogpu
from aiogpu.api.run import _open_standard_descriptors
from tests.program import environment


async def loop_and_debug() -> tuple[type, bool]:
    loop = asyncio.get_running_loop()
    return type(loop), loop.get_debug()


def test_it_runs_on_uvloop() -> None:
    assert aiogpu.run(loop_and_debug()) == (uvloop.Loop, False)
    assert aiogpu.run(loop_and_debug(), debug=True) == (uvloop.Loop, True)


async def fail() -> None:
    raise KeyError("a")


def test_an_error_comes_out() -> None:
    with pytest.raises(KeyError):
        aiogpu.run(fail())


PROGRAM = """
import aiogpu, os, sys
from tests.engines import tasks
async def main():
    async with aiogpu.init(num_cpus=1, log_to_driver=False):
        value = await tasks.add.remote(1)
    with open(sys.argv[1], "w") as file:
        file.write(str(value))
aiogpu.run(main())
"""


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "<&-", ">&-", "2>&-"])
def test_a_program_without_standard_descriptors(closed: str, tmp_path: object) -> None:
    """libuv aborts a process that lets it have descriptor 0, 1 or 2."""
    result = f"{tmp_path}/result"
    ended = subprocess.run(
        [
            *("sh", "-c", f'exec "$@" {closed}', "sh"),
            *(sys.executable, "-c", PROGRAM, result),
        ],
        stdin=subprocess.DEVNULL,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0
    with open(result) as file:
        assert file.read() == "2"


def test_open_descriptors_are_left_alone() -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    _open_standard_descriptors()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_it_runs_coroutines_alone() -> None:
    with pytest.raises(ValueError, match="coroutine"):
        aiogpu.run(fail)  # type: ignore[arg-type]


async def test_it_begins_no_loop_within_another() -> None:
    coroutine = fail()
    with pytest.raises(RuntimeError, match="running event loop") as raised:
        aiogpu.run(coroutine)
    assert "write `await main()`" in raised.value.__notes__[0]
    coroutine.close()
