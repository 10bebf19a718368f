"""Where everybody stands when something hangs is told by the soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import stacks
from benchmarks.soak.box import LIMITING, Box
from tests.support.program import start

PROGRAM = """
import asyncio
import os
import sys

import aiogpu
from benchmarks.soak.operation import Account, Operation
from benchmarks.soak.tasks import echo

@aiogpu.remote
def stands_still(way):
    open(way, "w").write("!")
    with open(way + ".never") as never:  # a pipe that nobody writes to
        never.read()

async def waits(one):
    way = os.environ["TMPDIR"] + "/begun"
    os.mkfifo(way + ".never")
    await one.end(one.begin("a call", stands_still.remote(way)), None)

async def main():
    account = Account()
    async with aiogpu.init(num_cpus=1):
        assert await echo.remote(1) == 1
        await Operation("waits", 1, "seed", account).run(waits)
        assert await echo.remote(2) == 2
    print(account.hung[0], flush=True)

aiogpu.run(main())
"""


def test_stacks_of_all_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMITING, "1")
    box = Box(str(tmp_path))
    told, complaints = start(PROGRAM, **box.environ).communicate(timeout=60)
    assert "waits 1 has not ended in 1 s: a call" in told
    assert "stands_still" in told, "what hangs is named"
    assert "(aiogpu-work" in complaints
    assert " in stands_still" in complaints, "the worker's"
    assert "benchmarks/soak/stacks.py" in complaints, "the program's own"


async def test_outside_a_soak_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(stacks.PLACE, raising=False)
    assert await stacks.asked() == []
