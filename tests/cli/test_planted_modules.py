"""Commands run in a directory where another user has left modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.sandbox import LIMIT, Sandbox

INSTALLED = ("aiogpu", "click", "cloudpickle", "msgpack", "numpy", "rich", "uvloop")
PROGRAM = """
import asyncio, aiogpu
async def main():
    async with aiogpu.init({address}num_cpus=1):
        return await aiogpu.remote(divmod).remote(7, 4)
print(asyncio.run(main()))
"""
EMBEDDED = PROGRAM.format(address="")
JOINED = PROGRAM.format(address="address='auto', ")


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A directory with a file for each module; an import adds a line to `../ran`."""
    directory = tmp_path / "planted"
    directory.mkdir()
    names = {*sys.stdlib_module_names, *INSTALLED} - {*sys.builtin_module_names}
    source = f"open({str(tmp_path / 'ran')!r}, 'a').write(__file__ + chr(10))\n"
    for name in names:
        (directory / f"{name}.py").write_text(source)
    return directory


def run(sandbox: Sandbox, directory: Path, *arguments: str) -> str:
    """Run an interpreter in a directory that is not on its own import path."""
    ran = subprocess.run(
        [sys.executable, "-P", *arguments],
        cwd=directory,
        env=sandbox.variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ran.returncode == 0, (arguments, ran.stdout, ran.stderr)
    return ran.stdout


def check_nothing_ran(planted: Path, *arguments: str) -> None:
    ran = planted.parent / "ran"
    assert not ran.exists(), (arguments, ran.read_text())


def test_the_planted_modules_work(sandbox: Sandbox, planted: Path) -> None:
    code = "import sys; sys.path.insert(0, ''); import json"
    run(sandbox, planted, "-c", code)
    assert (planted.parent / "ran").read_text() == f"{planted}/json.py\n"


@pytest.mark.whole
@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "aiogpu", "doctor", "--imports"],
        ["-m", "aiogpu", "gpus"],
        ["-m", "aiogpu", "demo", "--size=64", "--tasks=4"],
        ["-m", "aiogpu", "completion", "bash"],
        ["-m", "aiogpu", "--help"],
        ["-c", EMBEDDED],
    ],
    ids=["doctor", "gpus", "demo", "completion", "help", "program"],
)
def test_commands_without_a_service_run_nothing_planted(
    sandbox: Sandbox, planted: Path, arguments: list[str]
) -> None:
    run(sandbox, planted, *arguments)
    check_nothing_ran(planted, *arguments)


def test_a_service_and_its_commands_run_nothing_planted(
    sandbox: Sandbox, planted: Path
) -> None:
    commands = [
        ["start", "--head", "--num-cpus=2", "--num-gpus=2"],
        ["status"],
        ["list", "tasks"],
        ["run", "--num-gpus=1", "--", "true"],
        ["logs"],
        ["timeline", "-"],
        ["top"],
        ["doctor"],
        ["stop"],
    ]
    for command in commands:
        run(sandbox, planted, "-m", "aiogpu", *command)
        check_nothing_ran(planted, *command)
        if command[0] == "run":
            assert run(sandbox, planted, "-c", JOINED) == "(1, 3)\n"
            check_nothing_ran(planted, "a program that joins")
