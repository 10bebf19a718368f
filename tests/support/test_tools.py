"""A gate releases every task; drawn cases cover each value; the clock of a world."""

from __future__ import annotations

import asyncio
import math
import socket
from itertools import product

import pytest

from tests.core.builders import World
from tests.support.clock import HandClock
from tests.support.gate import Gate
from tests.support.sampling import covering


@pytest.mark.parametrize("turns", range(6))
async def test_a_closing_gate_does_not_wait_for_a_late_task(turns: int) -> None:
    with socket.socket(socket.AF_UNIX) as early, socket.socket(socket.AF_UNIX) as late:
        async with asyncio.timeout(30), Gate.open() as gate:
            early.connect(gate.path)
            early.sendall(b"early 1\n")
            await gate.entered("early")
            late.connect(gate.path)
            for _ in range(turns):
                await asyncio.sleep(0)
        early.setblocking(False)
        assert await asyncio.get_running_loop().sock_recv(early, 1) == b""


MATRIX = {
    f"{engine}-{kind}-{size}": frozenset(
        {("engine", engine), ("kind", kind), ("size", size)}
    )
    for engine, kind, size in product(("local", "inline"), "abcde", range(3))
}


def test_few_cases_cover_each_value() -> None:
    drawn = covering(MATRIX)
    covered = set().union(*(MATRIX[name] for name in drawn))
    assert covered == set().union(*MATRIX.values())
    assert len(drawn) == 5


def test_the_order_of_the_cases_does_not_change_the_choice() -> None:
    assert covering(MATRIX) == covering(dict(reversed(MATRIX.items())))


def test_a_single_case_is_drawn() -> None:
    assert covering({"only": frozenset({("engine", "local")})}) == {"only"}
    assert covering({}) == set()


@pytest.mark.parametrize(
    "wrong",
    [
        *("running =", "running = a", "running = a b c", "running has c"),
        *("running lacks a", "waiting = a", "told = b:settled", "told = c:lost"),
        *("told has d:settled", "free = CPU:1", "free has GPU:1", "killed = 1"),
        *("free_gpus = 0 1", "free_gpus has 0", "gpus_of a = 1"),
    ],
)
def test_a_false_expectation_in_a_story_fails_at_its_step(wrong: str) -> None:
    w = World(cpus=3, gpus=2).play("""
        submit a gpus=0.25 environment=X:1; submit c b cpus=0.5 (they are small)
        finish c; running = a b; running has b; running lacks c; told = c:settled
        told lacks a b; free = CPU:1.5 GPU:1.75; free has CPU:1.5; killed =
        free_gpus = 0.75 1; gpus_of a = 0
    """)
    with pytest.raises(AssertionError, match=wrong.split(maxsplit=1)[0]):
        w.play(f"pass_over; {wrong}")


def test_clock_moves_only_forward_and_only_when_advanced() -> None:
    clock = HandClock(5)
    assert (clock.now, clock()) == (5.0, 5.0)
    clock.advance(0.25)
    clock.advance(0)
    assert (clock.now, clock()) == (5.25, 5.25)
    assert repr(clock) == "<HandClock at 5.25s>"
    for seconds in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"advanced by {seconds!r} s"):
            clock.advance(seconds)
    clock.advance_to(5.3)
    clock.advance_to(5.1)
    assert clock.now == 5.3


def test_world_uses_the_clock() -> None:
    clock = HandClock(1000.0)
    w = World(cpus=1, clock=clock)
    w.submit("a")
    w.submit("b", timeout=0.1)
    w.submit("c", timeout=2)
    w.advance(0.09)
    assert w.told == {}
    w.advance(0.02)
    assert w.told == {"b": "expired"}
    assert w.now == clock.now == pytest.approx(1000.11)
    clock.advance(2)
    assert w.told == {"b": "expired"}, "the scheduler has not run"
    w.advance(0)
    assert w.told == {"b": "expired", "c": "expired"}
