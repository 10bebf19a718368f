"""No modules import each other, not by way of others either.

Imports inside functions and under `TYPE_CHECKING` count: a reader follows them too.
"""

from tests.repo.code_metrics import code_lines, cycles, imports


def test_there_are_no_import_cycles() -> None:
    assert cycles(imports()) == []


def test_cycles_are_found() -> None:
    edges = {
        "a": {"b"},
        "b": {"c", "d"},
        "c": {"a"},
        "d": {"e"},
        "e": {"d"},
        "f": {"a", "f"},
    }
    assert cycles(edges) == [["a", "b", "c"], ["d", "e"]]
    assert cycles({"a": {"b"}, "b": set()}) == []


def test_code_lines_leave_out_comments_and_docstrings() -> None:
    source = "\n".join(
        (
            '"""Of',
            'the module."""',
            "",
            "# why",
            "def f():",
            '    """Do."""',
            "    return (",
            "        1",
            "    )",
        )
    )
    assert code_lines(source) == 4
