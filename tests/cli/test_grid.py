"""Tables in as many columns as there are."""

import pytest
from rich.cells import cell_len
from rich.text import Text

from aiogpu.cli.terminal import Column, Table, cut, fitted, grid, plain, text
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


def told(table: Table, width: int | None) -> list[str]:
    return list(plain(grid(table, width)))


def test_without_a_width_nothing_is_cut_and_empty_columns_are_left_out() -> None:
    assert told(TABLE, None) == [
        "TASK  NAME         PID  WHY",
        "   1  train        101",
        "  20  a-long-name       waits for its turn",
    ]


def test_the_widest_is_cut_first_then_the_least_needed_goes() -> None:
    assert told(TABLE, 30)[2] == "  20  a-long-…       waits fo…"
    assert told(TABLE, 20)[1:] == ["   1  train      101", "  20  a-long-n…"]
    assert told(TABLE, 12)[1:] == ["   1  train", "  20  a-lon…"]


def test_where_nothing_more_can_be_given_up_it_is_cut_off() -> None:
    assert told(TABLE, 7)[1:] == ["   1  …", "  20  …"]
    assert told(TABLE, 1)[1:] == ["…", "…"]


@pytest.mark.parametrize("width", range(1, 80))
def test_no_line_is_wider_than_it_may_be(width: int) -> None:
    assert all(cell_len(line) <= width for line in told(TABLE, width))


def test_styles_stay_with_their_text() -> None:
    *_, last = grid(TABLE, 12)
    (red,) = [last.plain[span.start : span.end] for span in last.spans if span.style]
    assert red == "a-lon…"


def test_wide_characters_count_twice() -> None:
    assert cut(Text("データ処理"), 7).plain == "データ…"
    table = Table(
        [("データ処理", "1")],
        Column("NAME", lambda row: row[0], least=4),
        Column("ID", lambda row: row[1]),
    )
    assert told(table, None)[1] == "データ処理  1"


def test_names_cannot_command_a_terminal() -> None:
    assert printable("a\x1b]0;title\x07b\nc\u202e") == "a?]0;title?b?c?"
    table = Table(["\x1b[2J"], Column("NAME", str))
    assert told(table, None)[1] == "?[2J"


def test_no_columns_fit_into_nothing() -> None:
    assert fitted((), (), 10) == []
    assert cut(text("abc"), 0).plain == ""
