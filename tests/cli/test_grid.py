"""Tables in as many columns as there are."""

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from aiogpu.cli.tables import WIDE, Column, Table, plain, text
from aiogpu.core.model.text import printable

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


def test_a_part_has_the_lines_that_are_asked_for() -> None:
    assert list(plain(TABLE.part(0, 2))) == ["TASK  NAME   PID", "   1  train  101"]
    assert list(plain(TABLE.part(2, 9))) == ["20  a-long-name  waits for its turn"]


@pytest.mark.parametrize("width", range(1, 80))
def test_no_line_is_wider_than_it_may_be(width: int) -> None:
    assert all(cell_len(line) <= width for line in told(TABLE, width))


def test_styles_stay_with_their_text() -> None:
    console = Console(width=12)
    segments = console.render_lines(TABLE)[-1]
    assert [one.text for one in segments if one.style and one.style.color] == ["a-lon…"]


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
