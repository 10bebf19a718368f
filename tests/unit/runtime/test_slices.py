"""Work that is spread over turns of the event loop."""

import asyncio

import pytest

from aiogpu.runtime import slices as module
from aiogpu.runtime.slices import Slices


async def test_work_is_spread_in_order(monkeypatch):
    ticks = iter(range(10_000))
    monkeypatch.setattr(module, "perf_counter", lambda: next(ticks))
    slices, done = Slices(asyncio.get_running_loop(), seconds=10), []
    slices.add(map(done.append, range(25)))
    counts = [len(done)]
    slices.add(map(done.append, range(25, 30)))
    while len(done) < 30:
        await asyncio.sleep(0)
        counts.append(len(done))
    assert done == list(range(30))
    assert max(b - a for a, b in zip([0, *counts], counts, strict=False)) <= 10
    await slices.finish()


async def test_little_work_of_many_shares_one_turn(monkeypatch):
    ticks = iter(range(10_000))
    monkeypatch.setattr(module, "perf_counter", lambda: next(ticks))
    slices, done = Slices(asyncio.get_running_loop(), seconds=10), []
    for number in range(50):
        slices.add(map(done.append, (number,)))
    assert len(done) <= 10
    await slices.finish()
    assert done == list(range(50))


async def test_work_that_fails_does_not_stop_the_rest():
    slices, done = Slices(asyncio.get_running_loop()), []
    with pytest.raises(ZeroDivisionError):
        slices.add(1 // number for number in (1, 0, 1))
    slices.add(map(done.append, range(3)))
    await slices.finish()
    assert done == [0, 1, 2]


async def test_run_returns_after_its_work_or_raises_its_exception():
    slices, done = Slices(asyncio.get_running_loop()), []
    await slices.run(map(done.append, range(3)))
    assert done == [0, 1, 2]
    with pytest.raises(ZeroDivisionError):
        await slices.run(1 // number for number in (1, 0))
    abandoned = asyncio.ensure_future(slices.run(done.append(n) for n in range(3, 5)))
    abandoned.cancel()
    await asyncio.wait([abandoned])
    await slices.run(map(done.append, (5,)))
    assert done[-1] == 5
