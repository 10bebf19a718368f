"""A node stays awake while messages follow each other closely, and no longer."""

from __future__ import annotations

import asyncio

import pytest

from aiogpu.runtime import node as wakefulness
from aiogpu.runtime.node import AWAKE, SHORT, BusyPoll


class Hand:
    """A clock, and a loop that notes what it is to call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cpus: int = 2) -> None:
        self.now = 1.0
        self.soon: list[object] = []
        monkeypatch.setattr(wakefulness, "perf_counter", lambda: self.now)
        monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cpus)))
        self.it = BusyPoll(self)  # type: ignore[arg-type]

    def call_soon(self, call: object) -> None:
        self.soon.append(call)

    def turn(self, after: float) -> int:
        """Let the loop turn after so long; gives how many calls it has left."""
        self.now += after
        calls, self.soon = self.soon, []
        for call in calls:
            call()  # type: ignore[operator]
        return len(self.soon)


def test_it_stays_awake_while_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(monkeypatch)
    hand.it.note(1)
    assert not hand.soon
    hand.now += SHORT / 2
    hand.it.note(1)
    hand.it.note(1)
    assert len(hand.soon) == 1
    assert hand.turn(AWAKE / 2) == 1
    hand.it.note(1)
    assert hand.turn(AWAKE * 0.9) == 1
    assert hand.turn(AWAKE) == 0
    hand.now += SHORT
    hand.it.note(1)
    assert not hand.soon


def test_in_a_flood_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(monkeypatch)
    for _ in range(3):
        hand.it.note(1)
        hand.it.note(2)
    assert not hand.soon
    hand.it.note(1)
    hand.it.note(1)
    assert len(hand.soon) == 1
    hand.it.note(9)
    assert hand.turn(0) == 0


def test_with_one_cpu_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand(monkeypatch, cpus=1)
    hand.it.note(1)
    hand.it.note(1)
    assert not hand.soon


async def test_on_a_loop_it_ends_by_itself() -> None:
    it = BusyPoll(asyncio.get_running_loop())
    it.note(1)
    it.note(1)
    async with asyncio.timeout(30):
        while it._is_awake:
            await asyncio.sleep(0)
