"""What is read without running anybody's code."""

from __future__ import annotations

import enum
import pickle
from typing import Any

import pytest

from aiogpu.errors import ProtocolError
from aiogpu.runtime.plain import Maybe, fits, load_plain, plain
from aiogpu.runtime.terms import Terms
from tests.runtime import sites


class Level(enum.IntEnum):
    HIGH = 7


class Loud(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "loud"


class Half(float):
    __slots__ = ()


def test_there_and_back() -> None:
    value = ("a", 1, (2.5, None, (True, b"x")), ())
    assert load_plain(pickle.dumps(plain(value), 5)) == value


def test_subclasses_become_what_they_are_of() -> None:
    values = plain((Level.HIGH, Loud("quiet"), Half(0.5)))
    assert values == (7, "quiet", 0.5)
    assert list(map(type, values)) == [int, str, float]


@pytest.mark.parametrize(
    "data", [b"", b"garbage", pickle.dumps(Level.HIGH), pickle.dumps(print)]
)
def test_nothing_else_is_read(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        load_plain(data)


@pytest.mark.parametrize(
    ("value", "pattern", "is_so"),
    [
        (1, int, True),
        ("1", int, False),
        (None, float | None, True),
        ((), [int], True),
        ((1, 2, 3), [int], True),
        ((1, "2"), [int], False),
        ([1], [int], False),
        ((1, "a"), (int, str), True),
        ((1, "a", 2), (int, str), False),
        ((1,), (int, str), False),
        (3, (int,), False),
        (None, Maybe((int,)), True),
        ((1,), Maybe((int,)), True),
        (1, Maybe((int,)), False),
    ],
)
def test_shapes(value: object, pattern: Any, is_so: bool) -> None:
    assert fits(value, pattern) is is_so


@pytest.mark.parametrize(
    "changed",
    [
        {"scalars": (("CPU", "many"),)},
        {"scalars": [("CPU", 1)]},
        {"name": 3},
        {"where": (1, 2, 3)},
        {"acting": ("serial",)},
        {"timeout": "soon"},
        {"retried": None},
    ],
    ids=str,
)
def test_terms_that_were_made_up(changed: dict[str, Any]) -> None:
    fields = tuple(Terms.of(sites.site())._replace(**changed))
    with pytest.raises(ProtocolError):
        Terms.unpack(pickle.dumps(fields))
    with pytest.raises(ProtocolError):
        Terms.unpack(pickle.dumps(fields[:3]))
