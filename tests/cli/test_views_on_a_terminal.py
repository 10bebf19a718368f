"""Views on a terminal: tables of its width, with colours unless they are unwanted."""

from __future__ import annotations

import re
import sys

import pexpect
import pytest
from rich.console import Group

from aiogpu.cli.status import sections
from aiogpu.cli.tables import plain, worker_table
from tests.cli.pictures import BUSY
from tests.support.program import environment

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def shown(*arguments: str, columns: int, **variables: str) -> list[str]:
    """What a terminal is sent."""
    environ = environment(TERM="xterm-256color", **variables)
    for name in ("FORCE_COLOR", "COLUMNS", "NO_COLOR"):
        if name not in variables:
            environ.pop(name, None)
    program = pexpect.spawn(
        sys.executable,
        ["-m", "tests.cli.view_program", "busy", *arguments],
        env=environ,  # type: ignore[arg-type]
        dimensions=(50, columns),
        encoding="utf-8",
        timeout=60,
    )
    try:
        program.expect(pexpect.EOF)
        told = program.before
        assert isinstance(told, str)
        assert told.endswith("\r\n"), "where a prompt would be"
        return told.splitlines()
    finally:
        program.close(force=True)


@pytest.mark.parametrize("columns", [60, 120])
def test_tables_are_as_wide_as_the_terminal(columns: int) -> None:
    lines = shown("status", columns=columns)
    told = [COLOUR.sub("", line).rstrip() for line in lines]
    assert told == list(plain(Group(*sections(BUSY)), columns))
    assert any("\x1b[1;31m" in line and "set aside" in line for line in lines)


def test_no_colours_where_they_are_unwanted() -> None:
    lines = shown("list", "workers", columns=80, NO_COLOR="1")
    assert "\x1b[3" not in "".join(lines)
    told = [COLOUR.sub("", line).rstrip() for line in lines]
    assert told == list(plain(worker_table(BUSY.workers, BUSY), 80))


def test_an_encoding_without_such_characters_is_no_failure() -> None:
    lines = shown("list", "tasks", columns=60, PYTHONIOENCODING="ascii", NO_COLOR="1")
    (cut,) = [line for line in lines if "whole" in line]
    assert "?" in cut
