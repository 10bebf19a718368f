"""How an async actor waits for its next call: awake for a moment, or asleep."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count, repeat
from typing import Any

import pytest

from aiogpu.serialization.serializer import dump_arguments
from aiogpu.wire.messages import Done, Invoke, Leave
from aiogpu.worker.async_actor import AsyncActor
from aiogpu.worker.connection import SHORT, Channel
from aiogpu.worker.execute import Executor
from tests.unit.worker.driver_end import DriverEnd

CALLS = 5


class Noting(AsyncActor):
    """Counts its glances."""

    glances = 0

    def _glance(self) -> None:
        self.glances += 1
        super()._glance()


class Echo:
    async def say(self, word: int) -> int:
        return word


@pytest.fixture
def actor(executor: Executor) -> Noting:
    return Noting(executor, Echo())


def play(actor: Noting, driver: DriverEnd) -> None:
    """Call it one at a time, then have it leave."""

    def call() -> None:
        for number in range(1, CALLS + 1):
            payload = dump_arguments("say", (number,), {})
            driver.send(Invoke(number, "say", payload))
            answer = driver.next()
            assert isinstance(answer, Done), answer
            answers.append(answer.task)
        driver.send(Leave())

    answers: list[int] = []
    caller = threading.Thread(target=call)
    caller.start()
    actor.serve()
    caller.join(60)
    assert answers == [*range(1, CALLS + 1)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_clock(ticks: Iterator[float]) -> None:
        path = "aiogpu.worker.async_actor.perf_counter"
        monkeypatch.setattr(path, lambda: next(ticks))

    return set_clock


def test_calls_in_quick_succession_find_it_awake(
    actor: Noting, channel: Channel, driver: DriverEnd, clock: Any
) -> None:
    channel.may_stay_awake = True
    clock(repeat(0.0))  # no wait lasts any time
    play(actor, driver)
    assert actor.glances >= CALLS - 1


def test_after_a_moment_it_sleeps(
    actor: Noting,
    channel: Channel,
    driver: DriverEnd,
    clock: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two glances and no more; what is there by then comes as from sleep."""
    monkeypatch.setattr(channel, "is_silent", lambda _: True)
    channel.may_stay_awake = True
    clock(count(0.0, SHORT * 0.6))
    play(actor, driver)
    assert 1 <= actor.glances <= 2 * CALLS


@pytest.mark.parametrize(
    ("may_stay_awake", "tick"), [(False, 0.0), (True, 1.0)], ids=["one core", "seldom"]
)
def test_otherwise_it_sleeps_at_once(
    may_stay_awake: bool,
    tick: float,
    actor: Noting,
    channel: Channel,
    driver: DriverEnd,
    clock: Any,
) -> None:
    channel.may_stay_awake = may_stay_awake
    clock(count(1.0, tick) if tick else repeat(0.0))
    play(actor, driver)
    assert not actor.glances
