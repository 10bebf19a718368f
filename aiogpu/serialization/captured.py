"""What a function captures: the objects that its pickle contains.

A function that is sent by value is pickled with its defaults, its outer variables and
the globals that it names, as they are at that moment. `captured` finds these objects
without pickling them, to tell whether the function would be pickled differently now.
"""

from __future__ import annotations

from collections.abc import Iterator
from sys import modules
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

from aiogpu.serialization.pickler import importable, is_sent_by_value
from aiogpu.serialization.serializer import SCALARS

MOST_ITEMS: Final = 16
"""Items of a tuple that are looked at; a larger one counts as changed in place."""

_EMPTY: Final = object()
"""Stands for the content of a cell without one."""

_EQUAL: Final = frozenset({int, str, bytes})
"""Types whose equal objects are pickled alike."""


class Captured(NamedTuple):
    """The objects that a function captures.

    Attributes:
        parts: the objects by their paths, such as `f.__closure__.limit`.
        are_fixed: no object can change in place, so the function is the same as long as
            the objects are the same.
        modules: number of imported modules; the pickle names submodules among them.
    """

    parts: dict[str, object]
    are_fixed: bool
    modules: int

    def is_same(self, before: Captured) -> bool:
        """Return whether the function is certainly as it was before."""
        return (
            self.are_fixed
            and before.are_fixed
            and self.modules == before.modules
            and before.find_change(self) is None
        )

    def find_change(self, now: Captured) -> str | None:
        """Return the path to an object that is another one now; None without one."""
        for path, part in self.parts.items():
            part_now = now.parts.get(path, _EMPTY)
            if part_now is part:
                continue
            if type(part) not in _EQUAL or type(part_now) is not type(part):
                return path
            if part != part_now:
                return path
        return next((path for path in now.parts if path not in self.parts), None)


def captured(function: FunctionType) -> Captured:
    """Return what a function captures; nothing if workers import it by its name.

    Annotations are left out, since they seldom decide what a function does.
    """
    parts: dict[str, object] = {}
    are_fixed = _capture(function.__name__, function, parts, set())
    return Captured(parts, are_fixed, len(modules))


def _capture(
    path: str, value: Any, parts: dict[str, object], seen: set[FunctionType]
) -> bool:
    """Add an object and what it captures; return whether it cannot change in place."""
    kind = type(value)
    if kind is FunctionType:
        if value in seen or _is_importable(value):
            parts[path] = value
            return True
        seen.add(value)
        are_fixed = True
        for step, part in _parts_of(value):
            are_fixed &= _capture(f"{path}.{step}", part, parts, seen)
        return are_fixed
    if kind is tuple or kind is frozenset:
        parts[path] = value
        if len(value) > MOST_ITEMS:
            return False
        are_fixed = True
        for index, item in enumerate(value):
            are_fixed &= _capture(f"{path}[{index}]", item, parts, seen)
        return are_fixed
    parts[path] = value
    if kind in SCALARS or kind is CodeType:
        return True
    if kind is ModuleType:
        name = value.__name__
        return modules.get(name) is value and not is_sent_by_value(name)
    if kind is BuiltinFunctionType:
        return isinstance(value.__self__, ModuleType | None)
    return isinstance(value, type) and _is_importable(value)


def _parts_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code, names = function.__code__, function.__globals__
    yield "__code__", code
    for index, default in enumerate(function.__defaults__ or ()):
        yield f"__defaults__[{index}]", default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f"__kwdefaults__.{name}", default
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"__closure__.{name}", cell.cell_contents
        except ValueError:
            yield f"__closure__.{name}", _EMPTY
    for name in _names_in(code):
        if name in names:
            yield f"__globals__.{name}", names[name]
    yield from function.__dict__.items()


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names in code and in the functions that it defines.

    These are its globals, and its attributes: a global of the same name does no harm.
    """
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _names_in(constant)


def _is_importable(value: Any) -> bool:
    return importable(value.__module__ or "", value.__qualname__) is value
