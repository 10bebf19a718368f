"""The probe sees who holds the loop, and for how long."""

import asyncio
import gc

import pytest

from benchmarks import probe
from benchmarks.probe import Probe

MS = 1_000_000


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(probe, "perf_counter_ns", clock)
    monkeypatch.setattr(probe, "thread_time_ns", lambda: clock.now // 2)
    return clock


def holding(clock, milliseconds):
    """A call that takes so long."""

    def hold(_number=0):
        clock.now += milliseconds * MS

    return hold


async def test_the_longest_turn_of_the_loop_counts(clock):
    loop = asyncio.get_running_loop()
    with Probe().watch() as hold:
        for milliseconds in (3, 7, 5):
            loop.call_soon(holding(clock, milliseconds))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    assert (hold.longest, hold.on_cpu) == (7 * MS, 3.5 * MS)
    assert hold.whole == 15 * MS


async def test_what_is_called_in_one_turn_adds_up(clock):
    loop = asyncio.get_running_loop()
    with Probe().watch() as hold:
        loop.call_soon(holding(clock, 3))
        loop.call_soon(holding(clock, 4))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert hold.longest == 7 * MS


async def test_of_the_users_calls_only_the_longest_counts(clock):
    watcher = Probe()
    with watcher.watch() as hold:
        watcher.call(holding(clock, 2), range(50))
        await asyncio.sleep(0)
    assert hold.longest == 2 * MS
    assert hold.calls == hold.whole == 100 * MS


async def test_what_the_users_calls_leave_behind_counts(clock):
    loop, watcher = asyncio.get_running_loop(), Probe()

    def put_off(_number):
        clock.now += MS
        loop.call_soon(holding(clock, 1))

    with watcher.watch() as hold:
        watcher.call(put_off, range(30))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert hold.longest == 30 * MS


async def test_a_coroutine_that_holds_the_loop_until_the_end_counts(clock):
    with Probe().watch() as hold:
        clock.now += 9 * MS
    assert hold.longest == 9 * MS


async def test_a_probe_forgets_what_it_saw_before(clock):
    watcher = Probe()
    with watcher.watch():
        clock.now += 9 * MS
    clock.now += 50 * MS
    with watcher.watch() as hold:
        await asyncio.sleep(0)
    assert hold.longest == 0


async def test_collections_are_told_apart(clock):
    def count(phase, _info):
        clock.now += 4 * MS if phase == "start" else 0

    with Probe().watch() as hold:
        gc.callbacks.append(count)
        gc.collect()
        gc.callbacks.remove(count)
    assert hold.collecting == hold.longest == 4 * MS
    before = len(gc.callbacks)
    with Probe().watch():
        assert len(gc.callbacks) == before + 1
    assert len(gc.callbacks) == before


async def test_settling_turns_the_loop(clock):
    loop, turns = asyncio.get_running_loop(), []

    def turn():
        turns.append(clock.now)
        clock.now += 50 * MS
        loop.call_soon(turn)

    loop.call_soon(turn)
    await probe.settle()
    assert turns == [0, 50 * MS, 100 * MS, 150 * MS]
