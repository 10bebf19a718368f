"""The cases of large tables that run with every change: few, but covering all values.

A case is drawn by its name, so the choice depends neither on the machine nor on what
else runs. The full check runs all cases.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Final
from zlib import crc32

import pytest
from hypothesis import settings

Value = tuple[str, Hashable]

CHANGE: Final = "change"
FULL: Final = "full"
settings.register_profile(FULL, max_examples=100)
settings.register_profile(CHANGE, max_examples=30)


def values(item: pytest.Item) -> frozenset[Value]:
    """The values of a case's parameters; parameters of one table count as a row.

    Values are compared by identity, since some cannot be hashed or compared.
    """
    return frozenset(_values(item))


def _values(item: pytest.Item) -> Iterator[Value]:
    spec = getattr(item, "callspec", None)
    single = dict(spec.params) if spec is not None else {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",")]
        yield ",".join(names), tuple(id(single.pop(name)) for name in names)
    for name, value in single.items():
        yield name, id(value)


def examples(full: int) -> int:
    """Number of examples of a property: all with `--hypothesis-profile=full`."""
    return (
        full * settings.default.max_examples // settings.get_profile(FULL).max_examples
    )


def covering(cases: Mapping[str, frozenset[Value]]) -> set[str]:
    """Names of a few cases that together have each value of each parameter."""
    missing = set().union(*cases.values())
    remaining = dict(sorted(cases.items(), key=lambda case: crc32(case[0].encode())))
    drawn = set()
    while missing:
        best = max(remaining, key=lambda name: len(missing & remaining[name]))
        missing -= remaining.pop(best)
        drawn.add(best)
    return drawn
