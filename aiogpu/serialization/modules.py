"""Which installed modules a function needs, found without running it.

A worker that runs the function will import these modules: those that its code names,
those of the objects that its code refers to, and, for a function that is sent by name,
those of its whole module. The search follows the program's own modules and stops at
installed ones. What a function imports deep inside a library is found only by running
it (see `worker.zygote.preload.Imports`).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from opcode import opmap
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

MOST: Final = 16
"""Most modules that are named for a function."""

SEARCHED: Final = 2000
"""Most objects that are searched: the search must not hold the caller."""

START_UP: Final = frozenset({"sitecustomize", "usercustomize"})
"""Modules that Python runs before a program; only their effects are of use."""

MAIN: Final = ("__main__", "__mp_main__")
"""The program's own module, which workers do not import."""

OWN: Final = frozenset({"aiogpu", "cloudpickle", "msgpack"})
"""Packages that every worker has imported."""

_STANDARD: Final = f"{os.path.dirname(os.__file__)}{os.sep}"

_SITES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_IMPORT_NAME: Final = opmap["IMPORT_NAME"]


def is_installed(module: object) -> bool:
    """Return whether a module belongs to Python or to an installed package."""
    spec = getattr(module, "__spec__", None)
    origin = getattr(spec, "origin", None)
    if not isinstance(origin, str) or getattr(spec, "name", "") in START_UP:
        return False
    if origin in ("built-in", "frozen") or origin.startswith(_STANDARD):
        return True
    return any(site in origin for site in _SITES)


def needed_modules(*functions: object) -> tuple[str, ...]:
    """Return the installed modules that calls of functions or classes will import.

    The standard library is left out. A module that a function imports itself and that
    this process has not loaded is named if it is no part of the program.

    Args:
        functions: functions, classes, or any other objects that are called.
    """
    search = _Search()
    for function in functions:
        search.visit(function)
    search.run()
    return tuple(search.names)[:MOST]


class _Search:
    """A search through the objects that a function refers to.

    Attributes:
        names: the installed modules, in the order in which they were found.
    """

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self._left: list[object] = []
        self._seen: set[int] = set()

    def run(self) -> None:
        """Search until nothing is left, or enough was found."""
        while self._left and len(self.names) < MOST and len(self._seen) < SEARCHED:
            self._look_into(self._left.pop(0))

    def visit(self, value: object) -> None:
        """Note a value that the function refers to."""
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._left.append(value)

    def _look_into(self, value: Any) -> None:
        if isinstance(value, ModuleType):
            self._note_module(value.__name__)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.visit(part)
        elif isinstance(value, MethodType):
            self.visit(value.__func__)
            self.visit(value.__self__)
        elif isinstance(value, FunctionType):
            if self._note_module(value.__module__):
                self._look_into_function(value)
        elif isinstance(value, type):
            if self._note_module(value.__module__):
                for part in (*value.__bases__, *vars(value).values()):
                    self.visit(getattr(part, "__func__", part))
        else:
            name = getattr(value, "__module__", None)
            self._note_module(name if isinstance(name, str) else None)

    def _note_module(self, name: str | None) -> bool:
        """Note a module; return True if it is the program's, and is searched further.

        A module other than `__main__` is imported as a whole.
        """
        if name in MAIN:
            return True  # only what the code refers to is pickled
        module = sys.modules.get(name or "")
        if module is None or name is None:
            return False
        root = name.partition(".")[0]
        if root in sys.stdlib_module_names or root in OWN:
            return False
        if is_installed(module):
            self.names.setdefault(name)
            return False
        if id(module) not in self._seen:
            self._seen.add(id(module))
            for value in list(vars(module).values()):
                self.visit(value)
        return True

    def _look_into_function(self, function: FunctionType) -> None:
        namespace = function.__globals__
        for code in _codes(function.__code__):
            for name in code.co_names:
                if name in namespace:
                    self.visit(namespace[name])
            for name in _imports(code):
                self._note_import(name)
        for cell in function.__closure__ or ():
            try:
                self.visit(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
        for value in function.__defaults__ or ():
            self.visit(value)
        for value in (function.__kwdefaults__ or {}).values():
            self.visit(value)

    def _note_import(self, name: str) -> None:
        """Note a module that the function's own code imports."""
        root = name.partition(".")[0]
        if root in sys.stdlib_module_names or root in OWN or not root:
            return
        if root in sys.modules:
            self._note_module(name if name in sys.modules else root)
        elif _is_found_installed(root):
            self.names.setdefault(name)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of its inner functions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _imports(code: CodeType) -> Iterator[str]:
    """Yield the names of the modules that a code object imports, relative ones not."""
    instructions, argument = code.co_code, 0
    for position in range(0, len(instructions), 2):
        operation, low = instructions[position : position + 2]
        argument = argument << 8 | low
        if operation == opmap["EXTENDED_ARG"]:
            continue
        if operation == _IMPORT_NAME:
            yield code.co_names[argument]
        argument = 0


def _is_found_installed(name: str) -> bool:
    """Return whether a top-level module that is not loaded is an installed one."""
    # Not by `importlib.util`, which each fresh worker would have to import.
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        try:
            spec = None if find is None else find(name, None)
        except (ImportError, AttributeError, ValueError):
            return False
        if spec is not None:
            origin = spec.origin
            return isinstance(origin, str) and any(site in origin for site in _SITES)
    return False


def will_be_installed(name: str) -> bool:
    """Return whether a module that is about to be imported is installed.

    The standard library does not count.
    """
    root = name.partition(".")[0]
    if root in sys.stdlib_module_names or root in OWN:
        return False
    loaded = sys.modules.get(root)
    return _is_found_installed(root) if loaded is None else is_installed(loaded)
