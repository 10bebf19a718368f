"""Measures the containers that an object holds, to find what only grows."""

from __future__ import annotations

import asyncio
import gc
from collections import OrderedDict, deque
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

_SIZED: Final = (dict, list, set, deque, OrderedDict)
_WEAK: Final = (WeakKeyDictionary, WeakSet, WeakValueDictionary)
_OPAQUE: Final = (type, ModuleType, asyncio.AbstractEventLoop, asyncio.Task)
_CALLABLE: Final = (FunctionType, MethodType, BuiltinMethodType)


def container_sizes(root: object) -> dict[str, int]:
    """Return the number of items below each attribute of aiogpu's objects.

    An attribute is named by its class, so the containers of all objects of a class
    count together. Tuples and partial functions are looked into as well.
    """
    sizes: dict[str, int] = {}
    seen: set[int] = {id(sizes)}
    todo: list[tuple[str, object]] = [("root", root)]
    while todo:
        name, value = todo.pop()
        if id(value) in seen or isinstance(value, _OPAQUE):
            continue
        seen.add(id(value))
        if isinstance(value, (*_SIZED, *_WEAK)):
            sizes[name] = sizes.get(name, 0) + len(value)
        if isinstance(value, _WEAK):
            continue
        is_ours = type(value).__module__.startswith("aiogpu.")
        if not is_ours or isinstance(value, (*_SIZED, tuple)):
            if isinstance(value, FunctionType):
                value = (value.__closure__, value.__defaults__)
            todo += [(name, each) for each in gc.get_referents(value)]
            continue
        for attribute, each in attributes(value).items():
            todo.append((f"{type(value).__name__}.{attribute}", each))
    return sizes


def attributes(value: object) -> dict[str, Any]:
    """Return the attributes of an object, in slots too."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = slot
            if slot.startswith("__") and not slot.endswith("__"):
                name = f"_{kind.__name__.lstrip('_')}{slot}"
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return found
