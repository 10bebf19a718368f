"""The command itself: help, version, mistakes, exit codes."""

from __future__ import annotations

import re
import subprocess
import sys

import click
import pytest

import aiogpu
from aiogpu.cli import main as command
from aiogpu.errors import InfeasibleError, NodeStartError


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiogpu", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=["bare", "--help"])
def test_help_names_the_commands(arguments: list[str]) -> None:
    ran = run(*arguments)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.search(r"\n  demo +Compute a picture", ran.stdout)
    assert re.search(r"\n  doctor +Test the mechanisms", ran.stdout)
    assert re.search(r"\n  gpus +Show the GPUs", ran.stdout)


def test_version() -> None:
    ran = run("--version")
    assert ran.stdout == f"aiogpu, version {aiogpu.__version__}\n"
    assert ran.returncode == 0


def test_version_imports_no_subcommand_and_no_asyncio() -> None:
    program = (
        "import sys; sys.argv = ['aiogpu', '--version']\n"
        "from aiogpu.cli.main import main\n"
        "try: main()\n"
        "finally: print({'asyncio', 'numpy', 'rich', 'aiogpu.cli.demo'} "
        "& set(sys.modules))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.splitlines()[1] == "set()"


def test_unknown_command_is_told() -> None:
    ran = run("dmo")
    assert ran.returncode == 2
    assert "No such command 'dmo'" in ran.stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InfeasibleError("asked for too much"), 2, "Error: asked for too much\n"),
        (NodeStartError("no directory"), 1, "Error: no directory\n"),
        (click.UsageError("what?"), 2, "Error: what?\n"),
        (click.ClickException("it failed"), 1, "Error: it failed\n"),
        (click.Abort(), 130, "Interrupted.\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_exit_codes(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(command.cli, "main", fail)
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == code
    assert capsys.readouterr().err == said
