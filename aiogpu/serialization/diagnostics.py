"""Finds the part of an object that cannot be pickled; warns at the user's own line.

The parts of an object are those that pickle visits, without attributes that
`__getstate__` omits. The search starts only after pickling has failed. It goes from a
failing object into its first failing part, until no part fails.
"""

from __future__ import annotations

import copyreg
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import _lru_cache_wrapper, partial
from itertools import chain, islice
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, MethodType
from typing import Any, Final, NamedTuple

from aiogpu.errors import AiogpuWarning

_OURS: Final = frozenset({"aiogpu", "cloudpickle"})

MAX_DEPTH: Final = 32

MAX_PARTS: Final = 1000
"""Parts of one object that are tried at most."""


class Line(NamedTuple):
    """A line of the user's code, for a warning."""

    file: str
    number: int
    variables: dict[str, Any]


def line_of_caller() -> Line:
    """Return the innermost line outside aiogpu."""
    frame: FrameType | None = sys._getframe()
    last = frame
    while frame and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        last, frame = frame, frame.f_back
    found = frame or last
    assert found is not None
    return Line(found.f_code.co_filename, found.f_lineno, found.f_globals)


waiting_line: Final[ContextVar[Line | None]] = ContextVar("waiting_line", default=None)
"""The line of a thread without an event loop that waits while the loop runs this."""


def advise(text: str) -> None:
    """Warn by `AiogpuWarning` at the innermost line outside aiogpu.

    Args:
        text: the problem and the advice, for code on an event loop.

    Raises:
        AiogpuWarning: the filters make errors of warnings.
    """
    line = waiting_line.get()
    if line is None:
        line = line_of_caller()
    else:
        text = re.sub(r"(await )?\baiogpu\.(?!sync\.)", "aiogpu.sync.", text)
    warnings.warn_explicit(
        text,
        AiogpuWarning,
        line.file,
        line.number,
        module=line.variables.get("__name__"),
        registry=line.variables.setdefault("__warningregistry__", {}),
    )


_HOLDERS: Final[tuple[tuple[type | tuple[type, ...], tuple[str, ...]], ...]] = (
    (MethodType, ("__self__", "__func__")),
    ((staticmethod, classmethod), ("__func__",)),
    (property, ("fget", "fset", "fdel")),
    (_lru_cache_wrapper, ("__wrapped__",)),
    (partial, ("func", "args", "keywords", "__dict__")),
)
"""Types whose parts `__reduce_ex__` hides or names less clearly."""

_MADE_ANEW: Final = frozenset(
    {"__dict__", "__weakref__", "_abc_impl", "__annotate_func__"}
)
"""Attributes of a class that are not pickled but made again, like its slots."""


def parts(value: object) -> Iterator[tuple[str, object]]:
    """Return the parts that pickling an object would pickle, each with its step.

    Returns:
        Pairs such as `(".__closure__.db", db)`.

    Raises:
        Exception: whatever the object's own reducer raises.
    """
    if isinstance(value, FunctionType):
        return _parts_of_function(value)
    if isinstance(value, type):
        return _parts_of_class(value)
    if isinstance(value, tuple | set | frozenset):
        items = ((f"[{index}]", item) for index, item in enumerate(value))
        return chain(items, _parts_of_instance(value))
    for kind, names in _HOLDERS:
        if isinstance(value, kind):
            return ((f".{name}", getattr(value, name)) for name in names)
    return _parts_of_instance(value)


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, object]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f".__closure__.{name}", cell.cell_contents
        except ValueError:
            continue  # the cell is still empty
    for name in _global_names(code):
        if name in function.__globals__:
            yield f".__globals__.{name}", function.__globals__[name]
    for index, default in enumerate(function.__defaults__ or ()):
        yield f".__defaults__[{index}]", default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f".__kwdefaults__.{name}", default
    for name, item in vars(function).items():
        yield f".{name}", item
    for name, hint in function.__annotations__.items():
        yield f".__annotations__.{name}", hint


def _global_names(code: CodeType) -> Iterator[str]:
    """Yield the globals that code uses, including its lambdas and comprehensions."""
    from dis import get_instructions

    for instruction in get_instructions(code):
        if instruction.opname in {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"}:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_names(constant)


def _parts_of_class(kind: type) -> Iterator[tuple[str, object]]:
    for index, base in enumerate(kind.__bases__):
        yield f".__bases__[{index}]", base
    for name, item in vars(kind).items():
        if name not in _MADE_ANEW and not isinstance(item, MemberDescriptorType):
            yield f".{name}", item


def _parts_of_instance(value: object) -> Iterator[tuple[str, object]]:
    reducer = copyreg.dispatch_table.get(type(value))
    reduced = reducer(value) if reducer else value.__reduce_ex__(5)
    if isinstance(reduced, str):
        return  # pickled by this name
    make, args, state, items, pairs = (*reduced, None, None, None)[:5]
    # By default `__getstate__` returns the attributes and, if there are any, the slots.
    both = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    for names in both:
        if isinstance(names, dict):
            yield from ((f".{name}", item) for name, item in names.items())
        elif names is not None:
            yield ".__getstate__()", names
    for index, item in enumerate(items or ()):
        yield f"[{index}]", item
    for key, item in pairs or ():
        yield f"[{key!r:.60}]", item
    for index, arg in enumerate((make, *args)):
        is_own_class = arg is type(value)
        yield ".__class__" if is_own_class else f".__reduce__()[{index}]", arg


def walk(
    path: str, value: object, is_wanted: Callable[[str, object], bool]
) -> tuple[str, object]:
    """Descend from an object into its first wanted part, repeatedly.

    Args:
        path: the object's name.
        value: the object.
        is_wanted: called with a part's step and the part.

    Returns:
        The path to the innermost wanted part, and that part.
    """
    trail = [value]
    for _ in range(MAX_DEPTH):
        next_part = next((pair for pair in _new_parts(trail) if is_wanted(*pair)), None)
        if next_part is None:
            break
        path += next_part[0]
        trail.append(next_part[1])
    return path, trail[-1]


def _new_parts(trail: list[object]) -> Iterator[tuple[str, object]]:
    """Yield the parts of the last object that are not on the trail."""
    try:
        for step, part in islice(parts(trail[-1]), MAX_PARTS):
            if all(part is not passed for passed in trail):
                yield step, part
    except (Exception, SystemExit):  # noqa: BLE001 - the object's reducer has failed
        return


def find_unpicklable(
    roots: Mapping[str, object], dumps: Callable[[object], object]
) -> str:
    """Return the path to the innermost part that cannot be pickled.

    Args:
        roots: objects by the first name of their path.
        dumps: raises for an object that cannot be pickled.

    Returns:
        A path such as `f.__closure__.db.socket (a socket)`.
    """

    def fails(_step: str, value: object) -> bool:
        try:
            dumps(value)
        except (Exception, SystemExit):  # noqa: BLE001 - a reducer may raise anything
            return True
        return False

    for name, value in roots.items():
        if fails(name, value):
            path, culprit = walk(name, value, fails)
            return f"{path} (a {type(culprit).__name__})"
    return next(iter(roots), "it")
