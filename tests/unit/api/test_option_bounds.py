"""[B9] How large the numbers may be that options take, and what is said of larger."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import pytest

import aiogpu
from aiogpu.errors import OptionError

COUNT: Final = 2**31 - 1
TIME: Final = 10**9


@aiogpu.remote
def give() -> int:
    return 1


@aiogpu.remote
class Giver:
    def give(self) -> int:
        return 1


def method(**options: Any) -> object:
    return aiogpu.method(**options)(Giver)


def batch(**options: Any) -> object:
    return aiogpu.batch(**{"max_size": 1, **options})(lambda items: items)


TAKERS: Final[list[tuple[Callable[..., object], str, int, int]]] = [
    (give.options, "max_calls", 0, COUNT),
    (give.options, "max_retries", -1, COUNT),
    (give.options, "num_returns", 1, 100_000),
    (give.options, "max_buffered", 1, COUNT),
    (give.options, "priority", -COUNT, COUNT),
    (give.options, "timeout", 0, TIME),
    (give.options, "cancel_grace", 0, TIME),
    (give.options, "bundle", -1, 255),
    (give.options, "num_cpus", 0, 10**14),
    (give.options, "num_gpus", 0, 10**14),
    (give.options, "memory", 0, 2**60),
    (give.options, "gpu_memory", 0, 2**60),
    (Giver.options, "max_restarts", -1, COUNT),
    (Giver.options, "max_task_retries", -1, COUNT),
    (Giver.options, "max_concurrency", 1, COUNT),
    (Giver.options, "priority", -COUNT, COUNT),
    (method, "num_returns", 1, 100_000),
    (method, "max_buffered", 1, COUNT),
    (batch, "max_size", 1, COUNT),
    (batch, "max_wait", 0, TIME),
]
"""What takes a numeric option, the option, and its bounds."""


@pytest.mark.parametrize(("take", "option", "least", "most"), TAKERS)
def test_a_number_beyond_its_bounds_is_refused(
    take: Callable[..., object], option: str, least: int, most: int
) -> None:
    """By an error that names the option, the value and what is allowed."""
    for value in (most + 1, 2**70, least - 1, -(2**70), math.inf, -math.inf, math.nan):
        with pytest.raises(OptionError) as caught:
            take(**{option: value})
        told = str(caught.value)
        assert told.startswith(f"{option}={value!r}")
        is_size = "memory" in option
        bound = f"{most:.0e}" if most == 10**14 else f"{most:_}"
        assert is_size or bound in told, told


def test_so_are_those_of_groups() -> None:
    with pytest.raises(OptionError, match=r"concurrency_groups\['io'\]=2147483648"):
        Giver.options(concurrency_groups={"io": COUNT + 1})
    Giver.options(concurrency_groups={"io": COUNT})


@pytest.mark.parametrize("option", ["size", "min_size", "max_size", "target"])
def test_so_are_those_of_a_pool(option: str) -> None:
    given = {"size": 1, "min_size": 1, "max_size": 2, "target": 1} | {option: 2**70}
    with pytest.raises(OptionError, match=f"{option}={2**70} .* the most {COUNT:_}"):
        aiogpu.ActorPool(Giver, **given)
    with pytest.raises(OptionError, match=f"idle_after=1e[+]300 .* most is {TIME:_}"):
        aiogpu.ActorPool(Giver, min_size=1, max_size=2, idle_after=1e300)


@pytest.mark.parametrize("option", ["limit", "chunk"])
async def test_so_are_those_of_a_map(option: str) -> None:
    with pytest.raises(OptionError, match=f"{option}={2**70} .* most {COUNT:_}"):
        give.map([1], **{option: 2**70})
