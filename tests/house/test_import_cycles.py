"""No package gains modules that import each other; those that have none stay so.

Imports inside functions and under `TYPE_CHECKING` count: a reader follows them too.
"""

from typing import Final

from tests.house.code_metrics import code_lines, cycles, imports, package_of, sizes

ALLOWED: Final = {
    "engines": 19,
}
"""Modules in cycles by package. Lower a number, or drop it, as soon as it falls."""


def test_no_package_gains_modules_in_import_cycles() -> None:
    found = cycles(imports())
    in_cycles = {
        name: size.in_cycles for name, size in sizes(found).items() if size.in_cycles
    }
    worse = {
        name: [cycle for cycle in found if name in map(package_of, cycle)]
        for name, count in in_cycles.items()
        if count > ALLOWED.get(name, 0)
    }
    assert not worse
    assert in_cycles.keys() == ALLOWED.keys(), "drop the packages without cycles"


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
