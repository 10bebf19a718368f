"""What the command does with streams that are closed, full, or read by nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.program import environment


def shell(line: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which `aiogpu` is this one."""
    begin = f'aiogpu() {{ "{sys.executable}" -m aiogpu "$@"; }}\n'
    return subprocess.run(
        ["bash", "-c", begin + line],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment(),
        **options,
    )


@pytest.mark.parametrize("command", ["--help", "status --help", "completion bash"])
def test_a_pipe_that_nobody_reads_ends_it_in_silence(command: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = shell(f"aiogpu {command} >&{writing}", pass_fds=(writing,))
    os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.parametrize("command", ["--help", "status --help", "completion bash"])
def test_a_full_disk_is_told(command: str) -> None:
    ran = shell(f"aiogpu {command} > /dev/full")
    assert ran.returncode == 1
    assert ran.stderr == (
        "Error: what is printed has no room: No space left on device.\n"
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(closed: str) -> None:
    assert shell(f"aiogpu completion bash {closed}").returncode == 0


def test_no_file_takes_the_place_of_a_closed_stream() -> None:
    ran = shell(
        "python=" + sys.executable + "; $python -c '"
        "from aiogpu.cli.main import open_streams\n"
        "import os, sys\n"
        "open_streams()\n"
        'print(*map(os.readlink, (f"/proc/self/fd/{n}" for n in (0, 1))),'
        " file=sys.stderr)\n"
        "print(sys.stdin.read(), os.get_inheritable(1))' <&- >&-"
    )
    assert (ran.stderr, ran.returncode) == ("/dev/null /dev/null\n", 0)


@pytest.mark.parametrize(
    ("typed", "told"),
    [("statu", "Did you mean 'status'"), ("list tasks nonsense", "extra argument")],
)
def test_who_mistypes_is_told_what_there_is(typed: str, told: str) -> None:
    ran = shell(f"aiogpu {typed}")
    assert ran.returncode == 2
    assert told in ran.stderr


@pytest.mark.parametrize("command", ["", "start", "run"])
def test_help_is_found_by_its_short_name(command: str) -> None:
    assert shell(f"aiogpu {command} -h").stdout.startswith("Usage: ")


def test_addresses_are_the_same_for_all_commands(tmp_path: Path) -> None:
    where = f"unix:{tmp_path}/none.sock"
    told = f"there is no socket {tmp_path}/none.sock. Start one by"
    for command in ("status", "list tasks", "why 1", "top", "timeline -", "run true"):
        first, *rest = command.split()
        ran = shell(f"aiogpu {first} --socket={where} {' '.join(rest)}")
        assert told in ran.stderr, command
        assert ran.returncode == (125 if first == "run" else 1), command
    ran = shell(f"aiogpu logs --socket={where}")
    assert f"there are no logs in {tmp_path}/none-logs. " in ran.stderr
    assert os.listdir(tmp_path) == []
