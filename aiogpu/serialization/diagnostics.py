"""Finds what in an object cannot be pickled; warns at the user's own line.

The parts of an object are those that pickling itself would take: what `__getstate__`
leaves out is none of them. The search starts only after pickling has failed. It goes
from the outside in: of an object that fails, into the first part that fails too, until
no part does.
"""

from __future__ import annotations

import copyreg
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import _lru_cache_wrapper, partial
from itertools import chain, islice
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, MethodType
from typing import Final

from aiogpu.errors import AiogpuWarning

_OURS: Final = frozenset({"aiogpu", "cloudpickle"})


def advise(text: str) -> None:
    """Warn by `AiogpuWarning` at the innermost line that is not aiogpu's own.

    Args:
        text: what is slow or wasteful, and what to do.

    Raises:
        AiogpuWarning: the filters make errors of warnings.
    """
    level = 1
    frame: FrameType | None = sys._getframe()
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
        level += 1
    warnings.warn(text, AiogpuWarning, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] in _OURS


_HOLDERS: Final[tuple[tuple[type | tuple[type, ...], tuple[str, ...]], ...]] = (
    (MethodType, ("__self__", "__func__")),
    ((staticmethod, classmethod), ("__func__",)),
    (property, ("fget", "fset", "fdel")),
    (_lru_cache_wrapper, ("__wrapped__",)),
    (partial, ("func", "args", "keywords", "__dict__")),
)
"""Types that hide their parts from `__reduce_ex__`, or name them worse."""

_MADE_ANEW: Final = frozenset(
    {"__dict__", "__weakref__", "_abc_impl", "__annotate_func__"}
)
"""What of a class is not pickled, nor are its slots: unpickling makes it again."""


def parts(value: object) -> Iterator[tuple[str, object]]:
    """What pickling an object would go on to pickle, each with its step.

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
    """The globals that the code uses, also within its lambdas and comprehensions."""
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
        return  # it is pickled by that name
    make, args, state, items, pairs = (*reduced, None, None, None)[:5]
    yield from _parts_of_state(state)
    for index, item in enumerate(items or ()):
        yield f"[{index}]", item
    for key, item in pairs or ():
        yield f"[{key!r:.60}]", item
    for index, arg in enumerate((make, *args)):
        is_own_class = arg is type(value)
        yield ".__class__" if is_own_class else f".__reduce__()[{index}]", arg


def _parts_of_state(state: object) -> Iterator[tuple[str, object]]:
    """The parts of what `__getstate__` gives: by default attributes and slots."""
    both = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    for names in both:
        if isinstance(names, dict):
            yield from ((f".{name}", item) for name, item in names.items())
        elif names is not None:
            yield ".__getstate__()", names


DEEPEST: Final = 32

WIDEST: Final = 1000
"""Parts of one object that are tried."""


def find_unpicklable(
    roots: Mapping[str, object], dumps: Callable[[object], object]
) -> str:
    """The path to the innermost part that cannot be pickled.

    Args:
        roots: objects by the name that the path begins with.
        dumps: raises on what cannot be pickled.

    Returns:
        Such as `f.__closure__.db.socket (a socket)`.
    """
    for name, value in roots.items():
        if _fails(value, dumps):
            path, culprit = _descend(name, value, dumps)
            return f"{path} (a {type(culprit).__name__})"
    return next(iter(roots), "it")


def _descend(
    path: str, value: object, dumps: Callable[[object], object]
) -> tuple[str, object]:
    trail = [value]
    for _ in range(DEEPEST):
        found = _failing_part(trail, dumps)
        if found is None:
            break
        step, part = found
        path += step
        trail.append(part)
    return path, trail[-1]


def _failing_part(
    trail: list[object], dumps: Callable[[object], object]
) -> tuple[str, object] | None:
    try:
        for step, part in islice(parts(trail[-1]), WIDEST):
            is_new = all(part is not passed for passed in trail)
            if is_new and _fails(part, dumps):
                return step, part
    except (Exception, SystemExit):  # noqa: BLE001 - it will not be reduced: the culprit
        return None
    return None


def _fails(value: object, dumps: Callable[[object], object]) -> bool:
    try:
        dumps(value)
    except (Exception, SystemExit):  # noqa: BLE001 - a reducer may raise anything
        return True
    return False
