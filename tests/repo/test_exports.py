"""The public face: every name is there once, loads, and is described."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

import aiogpu
import aiogpu.errors
from tests.repo.rooms import ROOT, found_in, rooms, shown

PACKAGE = ROOT / "aiogpu"
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def seen_by_type_checkers() -> dict[str, str]:
    """Each name that `__init__` imports under TYPE_CHECKING, with its module."""
    face = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in face.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    return {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module != "aiogpu"
        for alias in node.names
    }


def is_overload(node: ast.AST) -> bool:
    return any(
        isinstance(decorator, ast.Name) and decorator.id == "overload"
        for decorator in getattr(node, "decorator_list", ())
    )


def undocumented(node: Documented, name: str) -> Iterator[str]:
    """The public definitions at and below this one that have no docstring."""
    if not ast.get_docstring(node):
        yield name
    if isinstance(node, ast.Module | ast.ClassDef):
        for child in ast.iter_child_nodes(node):
            if (
                isinstance(child, Documented)
                and not child.name.startswith("_")
                and not is_overload(child)
            ):
                yield from undocumented(child, f"{name}.{child.name}")


def undescribed(source: str) -> Iterator[str]:
    """Those of a whole file."""
    return undocumented(ast.parse(source), "file")


def test_type_checkers_see_exactly_the_public_names():
    assert sorted(seen_by_type_checkers()) == aiogpu.__all__


@pytest.mark.parametrize(("name", "module"), seen_by_type_checkers().items())
def test_a_public_name_is_the_one_that_type_checkers_see(name, module):
    found = getattr(aiogpu, name)
    assert found is getattr(sys.modules[module], name)
    assert found.__module__ == module
    assert found.__doc__


def test_all_names_come_by_star():
    names = {}
    exec("from aiogpu import *", names)
    assert set(aiogpu.__all__) <= set(names)


CAUGHT = 12
"""Errors that programs catch; the others are in `aiogpu.errors` alone."""


def test_errors_that_programs_catch_stand_at_the_top_too():
    errors = {
        name
        for name, value in vars(aiogpu.errors).items()
        if isinstance(value, type) and issubclass(value, aiogpu.AiogpuError)
    }
    at_top = errors & set(aiogpu.__all__)
    assert len(at_top) == CAUGHT < len(errors)
    assert all(getattr(aiogpu, name) is getattr(aiogpu.errors, name) for name in at_top)


def test_types_are_described_and_stand_in_one_place():
    for name in aiogpu.types.__all__:
        assert getattr(aiogpu.types, name).__doc__
    assert not set(aiogpu.types.__all__) & set(aiogpu.__all__)


@pytest.mark.parametrize(
    ("name", "place"), [("NodeError", "errors"), ("Lease", "types")]
)
def test_a_name_that_stands_below_is_told_with_its_place(name, place):
    with pytest.raises(AttributeError, match=f"it is `aiogpu.{place}.{name}`"):
        getattr(aiogpu, name)


def test_dir_shows_what_is_public_before_it_is_loaded():
    listed = subprocess.run(
        [sys.executable, "-c", "import aiogpu; print(*dir(aiogpu))"],
        text=True,
        capture_output=True,
        check=True,
    ).stdout.split()
    assert set(aiogpu.__all__) <= set(listed)
    public = {name for name in listed if not name.startswith("_")}
    assert public == {*aiogpu.__all__, "accelerators", "errors", "sync", "types"}


def test_a_misspelt_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'aiogpu' has no attribute 'remotee'"):
        _ = aiogpu.remotee
    with pytest.raises(ImportError, match="cannot import name 'Handel'"):
        exec("from aiogpu import Handel")
    assert not hasattr(aiogpu, "remotee")


def test_the_types_are_delivered():
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("room", rooms("aiogpu"), ids=shown)
def test_all_that_is_public_is_described(room):
    assert found_in(room, undescribed) == {}
