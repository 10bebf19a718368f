"""A clock moved by hand, alone and as a world's."""

from __future__ import annotations

import math

import pytest

from aiogpu.testing import HandClock, World


def test_it_stands_still_until_it_is_moved() -> None:
    clock = HandClock(5)
    assert (clock.now, clock()) == (5.0, 5.0)
    clock.advance(0.25)
    clock.advance(0)
    assert (clock.now, clock()) == (5.25, 5.25)
    assert repr(clock) == "<HandClock at 5.25s>"


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf])
def test_it_does_not_go_back(seconds: float) -> None:
    clock = HandClock()
    with pytest.raises(ValueError, match=f"advanced by {seconds!r} s"):
        clock.advance(seconds)
    assert clock.now == 0


def test_it_reaches_a_moment_exactly() -> None:
    clock = HandClock(0.1)
    clock.advance_to(0.3)
    assert clock.now == 0.3
    clock.advance_to(0.2)
    assert clock.now == 0.3


def test_a_world_uses_it() -> None:
    clock = HandClock(1000.0)
    w = World(cpus=1, clock=clock)
    w.submit("a")
    w.submit("b", timeout=0.1)
    w.advance(0.09)
    assert w.told == {}
    w.advance(0.02)
    assert w.told == {"b": "expired"}
    assert w.now == clock.now == pytest.approx(1000.11)


def test_a_world_sees_time_that_passed_without_it() -> None:
    clock = HandClock()
    w = World(cpus=1, clock=clock)
    w.submit("a")
    w.submit("b", timeout=1)
    clock.advance(2)
    assert w.told == {}, "nobody has woken the scheduler"
    w.advance(0)
    assert w.told == {"b": "expired"}
    assert w.now == 2
