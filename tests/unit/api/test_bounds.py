"""How many actors a pool is told to have, and what it is not told."""

from __future__ import annotations

from typing import Any

import pytest

from aiogpu.api.actors.pool import PoolLimits, check_bounds
from aiogpu.errors import OptionError


def bounds(**given: Any) -> PoolLimits:
    names = ("size", "min_size", "max_size", "target", "idle_after")
    return check_bounds(*(given.get(name) for name in names))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"size": 4}, (4, 4, 4, 1, 60)),
        ({"min_size": 2}, (2, 2, 2, 1, 60)),
        ({"min_size": 1, "max_size": 8}, (1, 1, 8, 1, 60)),
        ({"min_size": 0, "max_size": 1}, (0, 0, 1, 1, 60)),
        ({"size": 2, "max_size": 8, "target": 16}, (2, 2, 8, 16, 60)),
        ({"size": 4, "min_size": 1, "idle_after": 0}, (4, 1, 4, 1, 0)),
        (
            {"size": 2, "min_size": 0, "max_size": 3, "idle_after": 2.5},
            (2, 0, 3, 1, 2.5),
        ),
        ({"size": 0, "max_size": 3}, (0, 0, 3, 1, 60)),
    ],
)
def test_what_is_not_said_follows_from_what_is(given: Any, found: Any) -> None:
    assert bounds(**given) == found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, r"was not told how many .* size=4, or min_size=1 and max_size=4"),
        ({"max_size": 3}, "was not told how many"),
        ({"size": -1}, "size=-1 must be a whole number of actors, 0 or more"),
        ({"size": 1.0}, r"size=1\.0 must be"),
        ({"size": True}, "size=True must be"),
        ({"size": "4"}, "size='4' must be"),
        ({"min_size": -1}, "min_size=-1 must be"),
        ({"size": 1, "max_size": 0}, "max_size=0 must be a whole number .* 1 or more"),
        ({"size": 0}, "a max_size of 1 or more"),
        ({"size": 3, "max_size": 2}, "must have min_size <= size <= max_size"),
        ({"size": 1, "min_size": 2}, "must have min_size <= size <= max_size"),
        ({"min_size": 3, "max_size": 2}, "must have min_size <= size <= max_size"),
        (
            {"min_size": 1, "max_size": 2, "target": 0},
            "target=0 must be a whole number",
        ),
        ({"min_size": 1, "max_size": 2, "idle_after": -1}, "idle_after=-1 must be"),
        ({"min_size": 1, "max_size": 2, "idle_after": True}, "idle_after=True must be"),
        (
            {"min_size": 1, "max_size": 2, "idle_after": float("nan")},
            "idle_after=nan must be a number of seconds, 0 or more",
        ),
        ({"size": 4, "target": 2}, "target= says when a pool grows .* always has 4"),
        ({"size": 4, "idle_after": 2}, "idle_after= says when a pool grows or shrinks"),
    ],
)
def test_what_cannot_be_is_refused_in_words(given: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        bounds(**given)
