"""`map(progress=True)`: a bar in a terminal, nothing in a pipe."""

from __future__ import annotations

import sys
from pathlib import Path

import pexpect
import pytest

from aiogpu.errors import OptionError
from tests.contract.tasks import add
from tests.support.program import ROOT, environment, run

PROGRAM = """
import asyncio
import aiogpu
import aiogpu.sync

@aiogpu.remote
def square(number):
    if number == 2:
        print("two", flush=True)
    return number * number

async def main():
    async with aiogpu.init(num_cpus=1):
        return [n async for n in square.map(range(30), progress=True, chunk=CHUNK)]

print(sum(asyncio.run(main())))
with aiogpu.sync.init(num_cpus=1):
    print(sum(aiogpu.sync.remote(square).map(range(4), progress=True)))
"""


@pytest.fixture(params=["None", "4"])
def program(request: pytest.FixtureRequest) -> str:
    return PROGRAM.replace("CHUNK", request.param)


def test_nothing_is_shown_in_a_pipe(program: str) -> None:
    lines = run(program).splitlines()
    assert [line.partition(") ")[2] or line for line in lines] == [
        *("two", "8555", "two", "14")
    ]


def on_terminal(command: str, *arguments: str) -> str:
    """What a command writes to a terminal."""
    child = pexpect.spawn(
        command,
        list(arguments),
        env={**environment(), "TERM": "xterm-256color", "COLUMNS": "120"},
        cwd=ROOT,
        encoding="utf-8",
        timeout=60,
    )
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0, child.before
    return str(child.before)


def test_a_terminal_shows_a_bar_to_the_end(program: str) -> None:
    shown = on_terminal(sys.executable, "-c", program)
    assert "30/30" in shown
    assert "4/4" in shown
    assert "two" in shown
    assert "8555" in shown


def test_the_bar_leaves_stdout_alone(program: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    (tmp_path / "program.py").write_text(program)
    shell = f"exec {sys.executable} {tmp_path}/program.py > {path}"
    shown = on_terminal("/bin/sh", "-c", shell)
    assert "30/30" in shown
    assert "8555" in path.read_text()
    assert "30/30" not in path.read_text()


async def test_progress_must_be_true_or_false() -> None:
    with pytest.raises(OptionError, match="progress='yes' must be True or False"):
        add.map([], progress="yes")  # type: ignore[arg-type]
