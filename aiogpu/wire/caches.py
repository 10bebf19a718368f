"""Functions under `functools.lru_cache`: by name where others find that, else anew."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import _lru_cache_wrapper, lru_cache
from typing import Any, Final

_PROGRAM: Final = "__main__"


def reduced_cache(
    cached: _lru_cache_wrapper[Any], sent_by_value: Callable[[str], bool]
) -> str | tuple[object, ...]:
    """How such a function is pickled; `functools` knows only the way by its name.

    Args:
        cached: what `lru_cache` has made of a function.
        sent_by_value: whether what a module defines goes by value, by its name.
    """
    module = cached.__module__ or _PROGRAM
    name = getattr(cached, "__qualname__", "")  # a partial object has none
    if module != _PROGRAM and not sent_by_value(module):
        found: object = sys.modules.get(module)
        for step in name.split("."):
            found = getattr(found, step, None)
        if found is cached:
            return name
    terms = cached.cache_parameters()
    return _cached, (cached.__wrapped__, terms["maxsize"], terms["typed"])


def _cached(
    function: Callable[..., Any], most: int | None, is_typed: bool
) -> _lru_cache_wrapper[Any]:
    """The same function with a cache of its own, which is empty."""
    return lru_cache(most, is_typed)(function)
