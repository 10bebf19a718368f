"""`aiogpu logs`: what is shown of a node's logs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from aiogpu.cli.logs import logs
from aiogpu.runtime.output import FILE, Entry, Pages
from tests.support.program import environment

CLIENT = 1 << 26


def lines(count: int, start: int = 0) -> list[str]:
    return [
        str(
            Entry(
                1000.0 + n, CLIENT + n % 2, n % 3 + 1, 1, f"work pid={n}", f"word {n}"
            )
        )
        for n in range(start, start + count)
    ]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The logs of a node at `tmp_path/node.sock`."""
    directory = tmp_path / "logs"
    directory.mkdir()
    pages = Pages(str(directory / FILE), 500, 50)
    pages.write(lines(30))
    pages.close()
    (directory / "node.log").write_text("ready\nended\n")
    return tmp_path


def shown(place: Path, *arguments: str) -> list[str]:
    ran = CliRunner().invoke(logs, ["--address", f"{place}/node.sock", *arguments])
    assert ran.exit_code == 0, ran.output
    return ran.stdout.splitlines()


def test_all_of_it(place: Path) -> None:
    assert shown(place) == lines(30)


def test_the_last_lines(place: Path) -> None:
    assert shown(place, "-n", "3") == lines(30)[-3:]
    assert shown(place, "--lines", "0") == []


def test_of_one_task_or_program(place: Path) -> None:
    of_task = [line for n, line in enumerate(lines(30)) if n % 3 == 1]
    assert shown(place, "--task", "2") == of_task
    of_client = [line for n, line in enumerate(lines(30)) if n % 2 == 1]
    assert shown(place, "--client", str(CLIENT + 1)) == of_client
    both = shown(place, "--task", "2", "--client", str(CLIENT + 1), "-n", "1")
    assert both == [line for line in of_task if line in of_client][-1:]
    assert shown(place, "--task", "99") == []


def test_of_a_program_that_nobody_knows(place: Path) -> None:
    address = ["--address", f"{place}/node.sock"]
    ran = CliRunner().invoke(logs, [*address, "--client", "4711"])
    assert ran.exit_code == 1
    assert "no line of program 4711 is kept in" in ran.output
    assert f"There are lines of {CLIENT}, {CLIENT + 1}; `aiogpu list" in ran.output
    (place / "logs" / FILE).write_text("")
    for old in place.glob(f"logs/{FILE}.*"):
        old.unlink()
    ran = CliRunner().invoke(logs, [*address, "--client", "4711"])
    assert ran.exit_code == 1
    assert "There are no lines at all" in ran.output


def test_a_line_that_looks_like_another_tasks(place: Path) -> None:
    sly = str(Entry(1.0, CLIENT, 1, 1, "sly", "1 2 client=5 task=7 out (x) y"))
    pages = Pages(str(place / "logs" / FILE), 1 << 20, 1)
    pages.write([sly])
    pages.close()
    assert shown(place, "--task", "7") == []


def test_what_the_node_says(place: Path) -> None:
    assert shown(place, "--node") == ["ready", "ended"]


def test_another_directory(place: Path) -> None:
    (place / "logs").rename(place / "elsewhere")
    assert shown(place, "--log-dir", f"{place}/elsewhere", "-n", "1") == lines(30)[-1:]


def test_a_node_that_has_printed_nothing(tmp_path: Path) -> None:
    (tmp_path / "b-logs").mkdir()
    ran = CliRunner().invoke(logs, ["--address", f"{tmp_path}/b.sock"])
    assert (ran.exit_code, ran.stdout) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--address", "/no/such/node.sock"], 1, "no logs in /no/such/logs"),
        (["--node", "--task", "3"], 2, "--node has no tasks"),
        (["--task", "0"], 2, "Invalid value for '--task'"),
        (["--lines", "few"], 2, "Invalid value for '--lines'"),
    ],
    ids=lambda value: str(value),
)
def test_mistakes_are_told(arguments: list[str], code: int, told: str) -> None:
    ran = CliRunner().invoke(logs, arguments)
    assert ran.exit_code == code
    assert told in ran.output


def started(place: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "aiogpu", "logs", *arguments]
    return subprocess.Popen(
        [*command, "--address", f"{place}/node.sock"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_following_survives_turning_and_ends_by_ctrl_c(place: Path) -> None:
    with started(place, "--follow", "-n", "1") as program:
        assert program.stdout is not None
        assert program.stdout.readline() == lines(30)[-1] + "\n"
        pages = Pages(str(place / "logs" / FILE), 500, 50)
        pages.write(lines(40, 30))
        pages.close()
        seen = [program.stdout.readline().rstrip("\n") for _ in range(40)]
        assert seen == lines(40, 30)
        program.send_signal(signal.SIGINT)
        out, _ = program.communicate(timeout=60)
    assert (program.returncode, out) == (130, "")


def test_whoever_reads_may_stop_at_any_time(place: Path) -> None:
    with started(place, "--follow") as program:
        assert program.stdout is not None
        os.read(program.stdout.fileno(), 1)
        program.stdout.close()
        assert program.stderr is not None
        assert program.stderr.read() == ""
        assert program.wait(60) == 141
