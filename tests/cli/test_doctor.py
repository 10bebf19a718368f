"""`aiogpu doctor` as a user runs it, and what it prints of what it finds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from aiogpu.cli.checks import Check, Finding, Level
from aiogpu.cli.doctor import line, run

COMMAND = [sys.executable, "-m", "aiogpu", "doctor"]
PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
LINE = re.compile(r"(ok|warn|missing) +(.+?)  +(\S.*)")
ESSENTIAL = Finding("node", Level.MISSING, "no luck", "None.", "Try.", True)
GOOD = Finding("cpus", Level.OK, "2 to share out")
POOR = Finding("nvml", Level.MISSING, "not here", "No GPUs.", "Get some.")

pytestmark = pytest.mark.usefixtures("runtime_directory")


def environment() -> dict[str, str]:
    """This process's environment without what changes colours and widths."""
    left_out = ("CUDA_", "AIOGPU_", "NO_COLOR", "FORCE_COLOR", "COLUMNS")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    return {**kept, "TERM": "xterm-256color"}


def in_pipe(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *options],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def names(lines: list[str]) -> list[str]:
    """The mechanisms that lines tell of, each GPU counted as one of a kind."""
    told = [LINE.fullmatch(each) for each in lines]
    assert all(told), lines
    found = [match[2] for match in told if match]
    return [name for name in found if not name.startswith("gpu ")]


def test_pipe_gets_plain_lines() -> None:
    ran = in_pipe()
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout
    *lines, end = ran.stdout.splitlines()
    assert names(lines)[:3] == ["python", "directory", "node"]
    assert re.fullmatch(r"Nodes can start here: \d+ ok, \d+ warn, \d+ missing\.", end)


def test_the_page_shows_what_is_printed() -> None:
    """The example in the docs names the same mechanisms, in the same words."""
    example = re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    *lines, end = example.splitlines()
    *real, real_end = in_pipe().stdout.splitlines()
    assert names(lines) == names(real)
    assert re.sub(r"\d+", "1", end) == re.sub(r"\d+", "1", real_end)
    for name in names(lines):
        assert f"\n| `{name}` | " in PAGE.read_text()


def test_terminal_gets_colours() -> None:
    doctor = pexpect.spawn(
        COMMAND[0],
        COMMAND[1:],
        env=environment(),
        dimensions=(50, 60),
        encoding="utf-8",
        timeout=100,
    )
    doctor.expect("\x1b\\[32mok")
    doctor.expect("Nodes can start here")
    doctor.expect(pexpect.EOF)
    doctor.close()
    assert doctor.exitstatus == 0


def test_programs_get_json() -> None:
    ran = in_pipe("--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    findings = json.loads(ran.stdout)
    assert {each["level"] for each in findings} <= {"ok", "warn", "missing"}
    keys = {"name", "level", "found", "means", "advice", "is_essential"}
    assert all(set(each) == keys for each in findings)


def test_a_library_is_imported_when_asked_for() -> None:
    pytest.importorskip("numpy")
    told = in_pipe("--imports").stdout
    assert re.search(
        r"^(ok|warn) +import numpy  .* may be preloaded$", told, re.MULTILINE
    )


def test_the_exit_code_is_that_of_what_is_essential(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run([Check("a", lambda: [GOOD, POOR])]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok      cpus            2 to share out",
        "missing nvml            not here. No GPUs. Get some.",
        "Nodes can start here: 1 ok, 0 warn, 1 missing.",
    ]
    assert run([Check("a", lambda: [GOOD, ESSENTIAL])]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "No node can start here: 1 ok, 0 warn, 1 missing."
    )
    assert run([Check("a", lambda: [ESSENTIAL])], as_json=True) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding == {
        "name": "node",
        "level": "missing",
        "found": "no luck",
        "means": "None.",
        "advice": "Try.",
        "is_essential": True,
    }


def test_what_is_found_may_look_like_markup() -> None:
    text = line(Finding("node", Level.WARN, "[Errno 2] [red]no[/red]", "So."))
    assert text.plain == "warn    node            [Errno 2] [red]no[/red]. So."


def test_a_mistake_is_bad_input() -> None:
    ran = in_pipe("--jsn")
    assert ran.returncode == 2
    assert "--json" in ran.stderr
