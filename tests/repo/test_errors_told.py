"""Nothing is swallowed, left for later, or waited for by the clock."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.repo.rooms import ROOT, found_in, rooms, shown

POSTPONED = re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X])\b")
EVERYTHING = {"Exception", "BaseException"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def names_in(node: ast.AST | None) -> set[str]:
    """The last parts of all names in an expression: `a.b(c)` has b and c."""
    if node is None:
        return set()
    return {
        each.id if isinstance(each, ast.Name) else each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute)
    }


def swallows(node: ast.AST) -> bool:
    """Whether any exception whatever vanishes here without a trace."""
    match node:
        case ast.ExceptHandler(type=None):
            return True
        case ast.ExceptHandler(type=kind, body=[ast.Pass() | ast.Continue()]):
            return bool(names_in(kind) & EVERYTHING)
        case ast.Call(func=function, args=args) if "suppress" in names_in(function):
            return any(names_in(arg) & EVERYTHING for arg in args)
    return False


def task_names(module: ast.Module) -> set[str]:
    """Functions that a call `remote(f)` makes tasks."""
    return {
        argument.id
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and "remote" in names_in(node.func)
        for argument in node.args
        if isinstance(argument, ast.Name)
    }


def sleeps(module: ast.Module) -> Iterator[int]:
    """Lines that let time pass, but for those of tasks, whose work is to last."""
    tasks = task_names(module)

    def search(node: ast.AST) -> Iterator[int]:
        if isinstance(node, Function) and (
            node.name in tasks
            or any("remote" in names_in(each) for each in node.decorator_list)
        ):
            return
        if isinstance(node, ast.Call) and is_sleep(node):
            yield node.lineno
        for child in ast.iter_child_nodes(node):
            yield from search(child)

    yield from search(module)


def is_sleep(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name == "asyncio.sleep":
        return ast.unparse(call.args[0]) != "0"
    return name in ("time.sleep", "sleep")


def swallowing(source: str) -> Iterator[int]:
    """Lines in which an exception vanishes."""
    return (node.lineno for node in ast.walk(ast.parse(source)) if swallows(node))


def mocks(module: ast.Module) -> Iterator[str]:
    """What a test imports in order to mock."""
    return (
        alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.name in ("mock", "unittest.mock")
    )


def not_of_a_test(source: str) -> Iterator[int | str]:
    """Lines that sleep, and what mocks."""
    module = ast.parse(source)
    yield from sleeps(module)
    yield from mocks(module)


@pytest.mark.parametrize("room", rooms("aiogpu"), ids=shown)
def test_no_exception_is_swallowed(room):
    assert found_in(room, swallowing) == {}


@pytest.mark.parametrize("room", rooms("aiogpu", "tests"), ids=shown)
def test_nothing_is_left_for_later(room):
    assert found_in(room, POSTPONED.findall) == {}


@pytest.mark.parametrize("room", rooms("tests"), ids=shown)
def test_no_test_sleeps_or_mocks(room):
    assert found_in(room, not_of_a_test) == {}


@pytest.mark.parametrize("room", ["core", "wire"])
def test_the_pure_rooms_never_await(room):
    coroutines = [
        f"{shown(path)}:{node.lineno}"
        for path in sorted((ROOT / "aiogpu" / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AsyncFunctionDef | ast.Await)
    ]
    assert not coroutines


@pytest.mark.parametrize(
    ("source", "is_seen"),
    [
        ("try: f()\nexcept Exception: pass", True),
        ("try: f()\nexcept: log()", True),
        ("try: f()\nexcept (OSError, BaseException): pass", True),
        ("with contextlib.suppress(Exception): f()", True),
        ("try: f()\nexcept OSError: pass", False),
        ("try: f()\nexcept Exception as error: tell(error)", False),
    ],
)
def test_the_search_for_swallowed_exceptions(source, is_seen):
    assert any(swallowing(source)) == is_seen


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import time\ntime.sleep(1)", [2]),
        ("async def test(): await asyncio.sleep(0.1)", [1]),
        ("async def test(): await asyncio.sleep(0)", []),
        ("@aiogpu.remote(num_gpus=1)\ndef f(): time.sleep(1)", []),
        ("def f(): time.sleep(1)\ng = remote(f)", []),
    ],
)
def test_the_search_for_sleeps(source, lines):
    assert list(sleeps(ast.parse(source))) == lines


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from unittest import mock", ["mock"]),
        ("import unittest.mock", ["unittest.mock"]),
        ("import time\ntime.sleep(1)", [2]),
        ("import mocking", []),
    ],
)
def test_the_search_in_tests(source, found):
    assert list(not_of_a_test(source)) == found


def test_what_is_found_is_told_by_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.repo.rooms.ROOT", tmp_path)
    room = tmp_path / "room"
    room.mkdir()
    (room / "good.py").write_text("pass\n")
    (room / "bad.py").write_text("try: f()\nexcept: log()\n")
    assert rooms("room") == [room]
    assert found_in(room, swallowing) == {"room/bad.py": [2]}
