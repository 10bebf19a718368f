"""The public names: each is exported once, loads, and has a docstring."""

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest

import aiogpu
import aiogpu.errors
from tests.repo.source_folders import ROOT, relative, search, source_folders

PACKAGE = ROOT / "aiogpu"
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def typed_names() -> dict[str, str]:
    """The names that `__init__` imports under TYPE_CHECKING, with their modules."""
    module = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in module.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    return {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        and node.module not in ("aiogpu", "aiogpu.version")
        for alias in node.names
    }


def is_overload(node: ast.AST) -> bool:
    return any(
        isinstance(decorator, ast.Name) and decorator.id == "overload"
        for decorator in getattr(node, "decorator_list", ())
    )


def undocumented(node: Documented, name: str) -> Iterator[str]:
    """Public definitions without a docstring, from this one down."""
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


def test_type_checkers_see_exactly_the_public_names():
    assert sorted(typed_names()) == aiogpu.__all__


@pytest.mark.parametrize(("name", "module"), typed_names().items())
def test_a_public_name_is_the_object_that_type_checkers_see(name, module):
    value = getattr(aiogpu, name)
    assert value is getattr(sys.modules[module], name)
    assert value.__module__ == module
    assert value.__doc__


def test_import_star_gives_all_public_names():
    names = {}
    exec("from aiogpu import *", names)
    assert set(aiogpu.__all__) <= set(names)


CAUGHT = 12
"""Number of errors that programs catch; the others are only in `aiogpu.errors`."""


def test_errors_that_programs_catch_are_exported_by_aiogpu():
    errors = {
        name
        for name, value in vars(aiogpu.errors).items()
        if isinstance(value, type) and issubclass(value, aiogpu.AiogpuError)
    }
    at_top = errors & set(aiogpu.__all__)
    assert len(at_top) == CAUGHT < len(errors)
    assert all(getattr(aiogpu, name) is getattr(aiogpu.errors, name) for name in at_top)


def test_types_have_docstrings_and_one_place():
    for name in aiogpu.types.__all__:
        assert getattr(aiogpu.types, name).__doc__
    assert not set(aiogpu.types.__all__) & set(aiogpu.__all__)


@pytest.mark.parametrize(
    ("name", "place"), [("NodeError", "errors"), ("Lease", "types")]
)
def test_the_error_for_a_missing_name_says_where_it_is(name, place):
    with pytest.raises(AttributeError, match=f"it is `aiogpu.{place}.{name}`"):
        getattr(aiogpu, name)


def test_dir_lists_public_names_before_they_are_loaded():
    listed = subprocess.run(
        [sys.executable, "-c", "import aiogpu; print(*dir(aiogpu))"],
        text=True,
        capture_output=True,
        check=True,
    ).stdout.split()
    assert set(aiogpu.__all__) <= set(listed)
    public = {name for name in listed if not name.startswith("_")}
    assert public == {*aiogpu.__all__, "accelerators", "errors", "sync", "types"}


def test_a_misspelt_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="'aiogpu' has no attribute 'remotee'"):
        _ = aiogpu.remotee
    with pytest.raises(ImportError, match="cannot import name 'Handel'"):
        exec("from aiogpu import Handel")
    assert not hasattr(aiogpu, "remotee")


def test_the_package_ships_its_types():
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("folder", source_folders("aiogpu"), ids=relative)
def test_all_public_definitions_have_docstrings(folder):
    assert search(folder, lambda source: undocumented(ast.parse(source), "file")) == {}
