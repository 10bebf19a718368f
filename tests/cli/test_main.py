"""The command line: help, errors, exit codes, streams, completion."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

import aiogpu
from aiogpu.cli import connect
from aiogpu.cli import main as command
from aiogpu.cli.views.status import known_tasks
from aiogpu.errors import InfeasibleError, NodeStartError
from tests.cli.status_examples import BUSY, answer_with
from tests.support.program import environment, run_command
from tests.support.program import run as run_program


def shell(line: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `aiogpu` is this interpreter's."""
    begin = f'aiogpu() {{ "{sys.executable}" -m aiogpu "$@"; }}\n'
    return run_command("bash", "-c", begin + line, env=environment(), **options)


@pytest.fixture
def ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str, str]]:
    """Run a command line; return exit code, stdout and stderr."""

    # click looks here for `python -m`, which may have started pytest.
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["aiogpu", *arguments])
        with pytest.raises(SystemExit) as end:
            command.main()
        return (end.value.code, *capsys.readouterr())

    return run


def test_help_names_the_commands(ran: Callable[..., tuple[object, str, str]]) -> None:
    code, text, err = ran()
    assert (code, err) == (0, "")
    assert ran("--help") == ran("-h") == (0, text, "")
    assert re.search(r"\n  demo +Compute a picture", text)
    assert re.search(r"\n  doctor +Check the mechanisms", text)
    assert re.search(r"\n  gpus +Show the GPUs", text)
    for name in command.COMMANDS:
        code, text, err = ran(name, "--help")
        assert (code, err) == (0, "")
        assert text.startswith(f"Usage: aiogpu {name}")
        if name in {"start", "run"}:
            assert ran(name, "-h") == (0, text, "")
        if name in {"completion", "list", "status", "top", "why"}:
            assert "\n  Examples:\n" in text


def test_a_mistyped_command_gets_a_suggestion(
    ran: Callable[..., tuple[object, str, str]],
) -> None:
    for typed, message in (
        ("dmo", "No such command 'dmo'"),
        ("statu", "Did you mean 'status'"),
        ("list tasks nonsense", "extra argument"),
        ("completion csh", "'csh' is not one of 'bash', 'zsh', 'fish'"),
    ):
        code, out, err = ran(*typed.split())
        assert (code, out) == (2, "")
        assert message in err


def test_addresses_are_the_same_for_all_commands(
    tmp_path: Path, ran: Callable[..., tuple[object, str, str]]
) -> None:
    where = f"unix:{tmp_path}/none.sock"
    text = f"there is no socket {tmp_path}/none.sock. Start one by"
    for line in ("status", "list tasks", "why 1", "top", "timeline -"):
        first, *rest = line.split()
        code, _, err = ran(first, f"--socket={where}", *rest)
        assert text in err, line
        assert code == 1, line
    # The command blocks signals for good, so it runs in its own process.
    ended = shell(f"aiogpu run --socket={where} true")
    assert text in ended.stderr
    assert ended.returncode == 125
    assert (
        f"there are no logs in {tmp_path}/none-logs. "
        in ran("logs", f"--socket={where}")[2]
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "code", "message"),
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
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(command.cli, "main", fail)
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == code
    assert capsys.readouterr().err == message


def test_version_imports_no_subcommand_and_no_asyncio() -> None:
    program = (
        "import sys; sys.argv = ['aiogpu', '--version']\n"
        "from aiogpu.cli.main import main\n"
        "try: main()\n"
        "finally: print({'asyncio', 'numpy', 'rich', 'aiogpu.cli.demo'} "
        "& set(sys.modules))\n"
    )
    lines = run_program(program).splitlines()
    assert lines == [f"aiogpu, version {aiogpu.__version__}", "set()"]


# Streams that are closed or full, or have no reader.


@pytest.mark.parametrize("command", ["--help", "completion bash"])
def test_a_closed_pipe_ends_a_command_silently(command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = shell(f"aiogpu {command} >&{writing}", pass_fds=(writing,))
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.parametrize("command", ["--help", "completion bash"])
def test_a_full_disk_is_an_error(command: str) -> None:
    ran = shell(f"aiogpu {command} > /dev/full")
    assert ran.returncode == 1
    assert ran.stderr == ("Error: cannot write the output: No space left on device.\n")


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_commands_run_with_closed_streams(closed: str) -> None:
    assert shell(f"aiogpu completion bash {closed}").returncode == 0


def test_no_file_gets_the_descriptor_of_a_closed_stream() -> None:
    ran = shell(
        "python=" + sys.executable + "; $python -c '"
        "from aiogpu.cli.terminal import open_streams\n"
        "import os, sys\n"
        "open_streams()\n"
        'print(*map(os.readlink, (f"/proc/self/fd/{n}" for n in (0, 1))),'
        " file=sys.stderr)\n"
        "print(sys.stdin.read(), os.get_inheritable(1))' <&- >&-"
    )
    assert (ran.stderr, ran.returncode) == ("/dev/null /dev/null\n", 0)


# Completion in shells.


def completions(place: Path, *words: str) -> list[str]:
    """The completions that bash offers for the last word of a command line."""
    command = place / "aiogpu"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m aiogpu "$@"\n')
    command.chmod(0o700)
    asked = f"""
        eval "$(aiogpu completion bash)"
        COMP_WORDS=(aiogpu {" ".join(words)})
        COMP_CWORD={len(words)}
        _aiogpu_completion aiogpu
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = f"{place}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "--norc", "-c", asked],
        env=environment(PATH=path, XDG_RUNTIME_DIR=str(place)),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert ran.stderr == ""
    return ran.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_by_its_script(tmp_path: Path) -> None:
    assert completions(tmp_path, "list", "a") == ["actors"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["sta"], ["stack", "start", "status"]),
        (["list", "a"], ["actors"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
        (["status", "--wa"], ["--watch"]),
        (["why", ""], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_completion_offers_matching_words(
    runtime_directory: Path, words: list[str], offered: list[str]
) -> None:
    assert runtime_directory
    *before, last = words
    shell = ShellComplete(command.cli, {}, "aiogpu", command.COMPLETE)
    assert [each.value for each in shell.get_completions(before, last)] == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    result = CliRunner().invoke(command.cli, ["completion", shell])
    assert result.exit_code == 0
    assert f"_AIOGPU_COMPLETE={shell}_complete" in result.stdout


def test_completion_offers_tasks_and_actors_of_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer_with(monkeypatch, BUSY)
    why = command.cli.get_command(click.Context(command.cli), "why")
    assert why is not None
    context, argument = click.Context(why), why.params[0]
    assert known_tasks(context, argument, "") == [
        *("1", "12", "7", "8", "Model 'serve'", "serve", "train", "whole"),
    ]
    assert known_tasks(context, argument, "s") == ["serve"]

    def fail(_address: str, _patience: float) -> object:
        raise aiogpu.NodeDiedError("it has ended.")

    monkeypatch.setattr(connect, "joined", fail)
    assert known_tasks(context, argument, "s") == []
