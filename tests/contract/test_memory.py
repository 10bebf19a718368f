"""`memory=`: shared out like all else, and guarded where it is used."""

from __future__ import annotations

import asyncio
import os

import psutil
import pytest

import aiogpu
from aiogpu.linux.procfs import MemoryBounds, Usage
from tests.contract import tasks
from tests.contract.backlog_tasks import fill
from tests.support.gate import Gate

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

MIB = 1 << 20
LIMIT = 200 * MIB


async def test_those_who_ask_for_memory_share_it(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=4, memory="1GiB"):
        task = tasks.gated.options(memory="600MiB")
        first, second = task.remote(gate.path, "a"), task.remote(gate.path, "b")
        await gate.entered("a")
        why = str(await second.why())
        assert "memory 600MiB: 424MiB of 1GiB free" in why
        assert "600MiB: held by gated" in why
        assert "memory" in str(await aiogpu.status())
        other = tasks.gated.options(memory=424 * MIB).remote(gate.path, "c")
        await gate.entered("c")
        gate.release("a", "c")
        await gate.entered("b")
        gate.release("b")
        assert await asyncio.gather(first, second, other) == ["a", "b", "c"]


async def test_more_than_there_is_is_refused() -> None:
    async with aiogpu.init(num_cpus=1, memory="1GiB"):
        with pytest.raises(aiogpu.InfeasibleError, match="memory 2GiB of 1GiB"):
            tasks.add.options(memory="2GiB").remote(1)


async def test_without_a_word_there_is_what_is_safe() -> None:
    async with aiogpu.init(num_cpus=1):
        found = (await aiogpu.cluster_resources())["memory"]
        assert 0 < found <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def used_by_workers(bounds: MemoryBounds) -> Usage:
    """As if there were little memory, and workers alone used it."""
    below = psutil.Process().children(recursive=True)
    pids = [one.pid for one in below if one.name().startswith("aiogpu-work")]
    return Usage("a test", bounds.used_by(pids), LIMIT)


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers together may use no more than `LIMIT`."""
    monkeypatch.setattr(MemoryBounds, "tightest", used_by_workers)


@pytest.mark.usefixtures("scarce")
async def test_of_two_that_do_not_fit_one_goes_and_is_tried_alone(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=4, num_gpus=1):
        handles = {
            name: fill.options(num_gpus=0.5).remote(gate.path, name, 125)
            for name in "ab"
        }
        states: dict[str, str] = {}
        async with asyncio.timeout(60):
            while "delayed" not in states.values():
                await asyncio.sleep(0)
                states = {n: (await h.why()).state for n, h in handles.items()}
        (ended,) = (name for name, state in states.items() if state == "delayed")
        (other,) = set("ab") - {ended}
        await gate.entered(other)
        if ended in gate.inside:
            gate.forget(ended)
        late = tasks.add.remote(1)
        assert "run alone" in str(await late.why())
        gate.release(other)
        assert await handles[other] == 125
        await gate.entered(ended)
        assert not late.done()
        gate.release(ended)
        assert await handles[ended] == 125
        assert await late == 2


@pytest.mark.usefixtures("scarce")
async def test_what_does_not_fit_alone_is_an_error(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2):
        task = fill.options(memory="50MiB", name="glutton")
        with pytest.raises(aiogpu.OutOfMemoryError, match="glutton") as caught:
            await task.remote(gate.path, "a", 300)
        error = caught.value
        assert isinstance(error, MemoryError)
        assert error.cause == "out of memory"
        assert (error.asked, error.limit) == (50 * MIB, int(LIMIT * 0.95))
        assert error.used > error.limit - 50 * MIB
        assert await tasks.add.remote(1) == 2


@pytest.mark.usefixtures("scarce")
async def test_what_must_not_be_tried_twice_is_not(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2):
        with pytest.raises(aiogpu.OutOfMemoryError):
            await fill.options(max_retries=0).remote(gate.path, "a", 300)


@pytest.mark.usefixtures("scarce")
async def test_the_guard_can_be_sent_home(gate: Gate) -> None:
    async with aiogpu.init(num_cpus=2, memory_guard=False):
        handle = fill.remote(gate.path, "a", 225)
        await gate.entered("a")
        gate.release("a")
        assert await handle == 225
