"""No modules import each other, directly or through other modules.

Imports inside functions and under `TYPE_CHECKING` count: a reader follows them too.
"""

from tests.repo.code_metrics import code_lines, cycles, imports


def test_the_package_has_no_import_cycles() -> None:
    assert cycles(imports()) == []


def test_import_cycles_are_found() -> None:
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
    source = (
        '"""Of\nthe module."""\n\n# why\n'
        'def f():\n    """Do."""\n    return (\n        1\n    )'
    )
    assert code_lines(source) == 4
