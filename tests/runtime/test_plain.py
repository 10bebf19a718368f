"""What is read without running anybody's code."""

from __future__ import annotations

import enum
import pickle
import tracemalloc
from typing import Any

import pytest

from aiogpu.client.plain_data import Maybe, dump_plain, fits, load_plain, plain
from aiogpu.client.spec_codec import Terms
from aiogpu.errors import ProtocolError
from aiogpu.wire.codec import pack
from tests.runtime import funcs


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
    assert load_plain(dump_plain(value)) == value


@pytest.mark.parametrize("sign", [1, -1])
def test_more_than_anybody_has_is_the_most_that_can_be_said(sign: int) -> None:
    told = load_plain(dump_plain((sign << 80, sign << 62)))
    assert told == (sign * (1 << 63) - (sign > 0), sign << 62)


def test_subclasses_become_what_they_are_of() -> None:
    values = plain((Level.HIGH, Loud("quiet"), Half(0.5)))
    assert values == (7, "quiet", 0.5)
    assert list(map(type, values)) == [int, str, float]


@pytest.mark.parametrize(
    "data",
    [b"", b"garbage", b"\x92\x01", pickle.dumps(Level.HIGH), pickle.dumps(print)],
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
        {"scalars": {"CPU": 1}},
        {"name": 3},
        {"where": (1, 2, 3)},
        {"acting": ("serial",)},
        {"timeout": "soon"},
        {"retried": None},
    ],
    ids=str,
)
def test_terms_that_were_made_up(changed: dict[str, Any]) -> None:
    fields = tuple(Terms.of(funcs.func())._replace(**changed))
    for said in (pack(fields), pack(fields[:3]), pickle.dumps(fields)):
        with pytest.raises(ProtocolError):
            Terms.unpack(said)


def test_a_few_bytes_of_terms_cost_little() -> None:
    """Of a pickle, these would have cost gigabytes."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            Terms.unpack(b"\x80\x05Nr\x00\x00\x00\x10.")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
