"""Tables in as many columns as a terminal has, with or without colours."""

from __future__ import annotations

import re
import sys

import pexpect
from rich.cells import cell_len
from rich.console import Console, Group
from rich.text import Text

from aiogpu.cli.status import sections
from aiogpu.cli.tables import WIDE, Column, Table, plain, text
from aiogpu.core.model.text import printable
from tests.cli.pictures import BUSY
from tests.support.program import environment

TABLE = Table(
    [
        ("1", "train", "", "101", ""),
        ("20", Text("a-long-name", "red"), "", "", "waits for its turn"),
    ],
    Column("TASK", lambda row: row[0], is_number=True),
    Column("NAME", lambda row: row[1], least=4),
    Column("EMPTY", lambda row: row[2]),
    Column("PID", lambda row: row[3], is_number=True, rank=1),
    Column("WHY", lambda row: row[4], least=5, rank=2),
)


def told(table: Table, width: int = WIDE) -> list[str]:
    return list(plain(table, width))


def test_without_a_width_nothing_is_cut_and_empty_columns_are_left_out() -> None:
    assert told(TABLE) == [
        "TASK  NAME         PID  WHY",
        "   1  train        101",
        "  20  a-long-name       waits for its turn",
    ]


def test_the_widest_is_cut_first_then_the_least_needed_goes() -> None:
    assert told(TABLE, 30)[2] == "  20  a-long…       waits for…"
    assert told(TABLE, 20)[1:] == ["   1  train      101", "  20  a-long-n…"]
    assert told(TABLE, 12)[1:] == ["   1  train", "  20  a-lon…"]


def test_wide_characters_count_twice() -> None:
    table = Table(
        [("データ処理", "1")],
        Column("NAME", lambda row: row[0], least=4),
        Column("ID", lambda row: row[1]),
    )
    assert told(table)[1] == "データ処理  1"
    assert told(table, 11)[1] == "データ…  1"


def test_names_cannot_command_a_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\nc\u202e") == "a?]0;title?b?c?"
    table = Table(["\x1b[2J"], Column("NAME", str))
    assert told(table)[1] == "?[2J"
    assert text("[red]a").plain == "[red]a"


def test_any_part_fits_any_width_with_its_styles() -> None:
    for width in range(1, 80):
        assert all(cell_len(line) <= width for line in told(TABLE, width)), width
    assert list(plain(TABLE.part(0, 2))) == ["TASK  NAME   PID", "   1  train  101"]
    assert list(plain(TABLE.part(2, 9))) == ["20  a-long-name  waits for its turn"]
    segments = Console(width=12).render_lines(TABLE)[-1]
    assert [one.text for one in segments if one.style and one.style.color] == ["a-lon…"]


COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def shown(*arguments: str, columns: int, **variables: str) -> list[str]:
    """What a terminal is sent."""
    environ = environment(TERM="xterm-256color", **variables)
    for name in ("FORCE_COLOR", "COLUMNS", "NO_COLOR"):
        if name not in variables:
            environ.pop(name, None)
    program = pexpect.spawn(
        sys.executable,
        ["-m", "tests.cli.pictures", "busy", *arguments],
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


def test_tables_are_as_wide_as_the_terminal() -> None:
    lines = shown("status", columns=60)
    told = [COLOUR.sub("", line).rstrip() for line in lines]
    assert told == list(plain(Group(*sections(BUSY)), 60))
    assert any("\x1b[1;31m" in line and "set aside" in line for line in lines)


def test_no_colours_where_they_are_unwanted() -> None:
    """And an encoding without such characters is no failure."""
    variables = {"NO_COLOR": "1", "PYTHONIOENCODING": "ascii"}
    lines = shown("list", "tasks", columns=60, **variables)
    assert "\x1b[3" not in "".join(lines)
    (cut,) = [line for line in lines if "whole" in line]
    assert "?" in cut
