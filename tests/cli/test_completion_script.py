"""What shells complete, with the scripts that `aiogpu completion` prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import aiogpu
from aiogpu.cli import connect
from aiogpu.cli.main import cli
from aiogpu.cli.status import known_tasks
from tests.cli.pictures import BUSY, stand_in
from tests.support.program import environment


def completed(place: Path, *words: str) -> list[str]:
    """What bash offers for the last word of a command line."""
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
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["sta"], ["status"]),
        (["list", "a"], ["actors"]),
        (["completion", '""'], ["bash", "zsh", "fish"]),
        (["status", "--wa"], ["--watch"]),
        (["why", '""'], []),
    ],
    ids=lambda value: " ".join(value),
)
def test_bash_completes(tmp_path: Path, words: list[str], offered: list[str]) -> None:
    found = completed(tmp_path, *words)
    assert [word for word in found if word != "start"] == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0
    assert f"_AIOGPU_COMPLETE={shell}_complete" in result.stdout


def test_another_shell_is_named() -> None:
    result = CliRunner().invoke(cli, ["completion", "csh"])
    assert result.exit_code == 2
    assert "'csh' is not one of 'bash', 'zsh', 'fish'" in result.stderr


def test_tasks_and_actors_of_the_running_node_are_offered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch, BUSY)
    why = cli.get_command(click.Context(cli), "why")
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
