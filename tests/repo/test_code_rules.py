"""Rules for all code: no swallowed errors, no postponed work, no sleeps, no mocks."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.repo.source_folders import ROOT, relative, search, source_folders

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
    """True if a node drops every exception without a trace."""
    match node:
        case ast.ExceptHandler(type=None):
            return True
        case ast.ExceptHandler(type=kind, body=[ast.Pass() | ast.Continue()]):
            return bool(names_in(kind) & EVERYTHING)
        case ast.Call(func=function, args=args) if "suppress" in names_in(function):
            return any(names_in(arg) & EVERYTHING for arg in args)
    return False


def task_names(module: ast.Module) -> set[str]:
    """Functions that a call `remote(f)` turns into tasks."""
    return {
        argument.id
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and "remote" in names_in(node.func)
        for argument in node.args
        if isinstance(argument, ast.Name)
    }


def sleeps(module: ast.Module) -> Iterator[int]:
    """Lines that sleep, except in tasks, which may take time."""
    tasks = task_names(module)

    def visit(node: ast.AST) -> Iterator[int]:
        if isinstance(node, Function) and (
            node.name in tasks
            or any("remote" in names_in(each) for each in node.decorator_list)
        ):
            return
        if isinstance(node, ast.Call) and is_sleep(node):
            yield node.lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(module)


def is_sleep(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name == "asyncio.sleep":
        return ast.unparse(call.args[0]) != "0"
    return name in ("time.sleep", "sleep")


def swallowing(source: str) -> Iterator[int]:
    """Lines that drop every exception."""
    return (node.lineno for node in ast.walk(ast.parse(source)) if swallows(node))


def interpreters(source: str) -> Iterator[int]:
    """Lines with a command line that starts an interpreter."""
    return (
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.List | ast.Tuple)
        and node.elts
        and "executable" in names_in(node.elts[0])
        and any(ast.unparse(element).startswith("'-") for element in node.elts)
    )


def mocks(module: ast.Module) -> Iterator[str]:
    """Imports of mocks."""
    return (
        alias.name
        for node in ast.walk(module)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if alias.name in ("mock", "unittest.mock")
    )


def sleeps_and_mocks(source: str) -> Iterator[int | str]:
    """Lines that sleep, and imports of mocks."""
    module = ast.parse(source)
    yield from sleeps(module)
    yield from mocks(module)


@pytest.mark.parametrize("folder", source_folders("aiogpu"), ids=relative)
def test_no_exception_is_swallowed(folder):
    assert search(folder, swallowing) == {}


@pytest.mark.parametrize("folder", source_folders("aiogpu"), ids=relative)
def test_only_one_function_builds_the_command_of_an_interpreter(folder):
    found = search(folder, interpreters)
    assert set(found) <= {"aiogpu/linux/interpreter.py"}, found


@pytest.mark.parametrize("folder", source_folders("aiogpu/cli"), ids=relative)
def test_commands_print_by_one_function(folder):
    """See `aiogpu.cli.terminal`: `click.echo` may go around its stream."""
    assert search(folder, re.compile(r"click\.s?echo\(|\.show\(\)").findall) == {}


@pytest.mark.parametrize("folder", source_folders("aiogpu", "tests"), ids=relative)
def test_no_work_is_postponed_by_a_comment(folder):
    assert search(folder, POSTPONED.findall) == {}


@pytest.mark.parametrize("folder", source_folders("tests"), ids=relative)
def test_no_test_sleeps_or_mocks(folder):
    assert search(folder, sleeps_and_mocks) == {}


@pytest.mark.parametrize("package", ["core", "wire"])
def test_packages_without_io_never_await(package):
    coroutines = [
        f"{relative(path)}:{node.lineno}"
        for path in sorted((ROOT / "aiogpu" / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AsyncFunctionDef | ast.Await)
    ]
    assert not coroutines


@pytest.mark.parametrize(
    ("source", "is_swallowed"),
    [
        ("try: f()\nexcept Exception: pass", True),
        ("try: f()\nexcept: log()", True),
        ("try: f()\nexcept (OSError, BaseException): pass", True),
        ("with contextlib.suppress(Exception): f()", True),
        ("try: f()\nexcept OSError: pass", False),
        ("try: f()\nexcept Exception as error: tell(error)", False),
    ],
)
def test_swallowed_exceptions_are_found(source, is_swallowed):
    assert any(swallowing(source)) == is_swallowed


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
def test_sleeps_are_found(source, lines):
    assert list(sleeps(ast.parse(source))) == lines


@pytest.mark.parametrize(
    ("source", "matches"),
    [
        ("from unittest import mock", ["mock"]),
        ("import unittest.mock", ["unittest.mock"]),
        ("import time\ntime.sleep(1)", [2]),
        ("import mocking", []),
    ],
)
def test_mocks_are_found(source, matches):
    assert list(sleeps_and_mocks(source)) == matches


def test_a_search_names_the_files_with_matches(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.repo.source_folders.ROOT", tmp_path)
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "good.py").write_text("pass\n")
    (folder / "bad.py").write_text("try: f()\nexcept: log()\n")
    assert source_folders("package") == [folder]
    assert search(folder, swallowing) == {"package/bad.py": [2]}
