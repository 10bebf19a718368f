"""A node that is asked to end while programs use it: drained, then stopped."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

import aiogpu
from tests.cli.box import LIMIT, Box
from tests.contract import tasks
from tests.support.gate import Gate
from tests.support.until import until

pytestmark = pytest.mark.either_loop


async def answered() -> None:
    """Ask for work, and for more, for as long as it is done."""
    while True:
        assert await tasks.add.remote(1) == 2


async def until_refused() -> None:
    """Ask for work until the node takes no more; it has answered until then."""
    async with asyncio.timeout(LIMIT):
        with pytest.raises(aiogpu.errors.NodeClosedError, match="takes no new work"):
            await answered()


async def stopped(here: Box, *arguments: str) -> tuple[str, str]:
    """Run `aiogpu stop` beside the loop."""
    return await asyncio.to_thread(here.run, "stop", *arguments)


async def test_what_runs_ends_and_what_is_new_is_refused(here: Box, gate: Gate) -> None:
    await asyncio.to_thread(here.run, "start", "--head", "--num-cpus=2", "--num-gpus=1")
    async with aiogpu.init(address=here.place.socket):
        running = tasks.gated.options(num_gpus=1).remote(gate.path, "one")
        await gate.entered("one")
        # It waits until the first one gives its GPU back, and was there before.
        waiting = tasks.add.options(num_gpus=1).remote(40, 2)
        stopping = asyncio.create_task(stopped(here))
        await until_refused()
        told, _ = await asyncio.to_thread(here.run, "status")
        assert told.startswith("is being stopped: no new work; what runs has ")
        gate.release("one")
        assert await asyncio.gather(running, waiting) == ["one", 42]
        out, _ = await stopping
        assert out.startswith("Stopped the node")
        with pytest.raises(aiogpu.errors.NodeError):
            await tasks.add.remote(1)
    assert here.files == []
    here.wait_for_the_end(0)


@pytest.mark.slow
async def test_what_does_not_end_in_time_is_ended(here: Box, gate: Gate) -> None:
    start = ("start", "--head", "--num-cpus=2", "--num-gpus=1", "--drain=0.05")
    await asyncio.to_thread(here.run, *start)
    async with aiogpu.init(address=here.place.socket):
        running = tasks.gated.remote(gate.path, "one")
        await gate.entered("one")
        await stopped(here)
        with pytest.raises(aiogpu.errors.NodeError):
            await running
    assert here.files == []


async def test_a_second_signal_ends_it_at_once(here: Box, gate: Gate) -> None:
    start = ("start", "--head", "--num-cpus=2", "--num-gpus=1", "--cancel-grace=60")
    await asyncio.to_thread(here.run, *start)
    async with aiogpu.init(address=here.place.socket):
        running = tasks.gated.remote(gate.path, "one")
        await gate.entered("one")
        stopping = asyncio.create_task(stopped(here))
        await until_refused()
        node = here.node
        assert node is not None
        os.kill(node.pid, signal.SIGTERM)
        async with asyncio.timeout(20):
            await stopping
        with pytest.raises(aiogpu.errors.NodeError):
            await running
    assert here.files == []


async def test_a_drain_request_does_not_outlive_its_node(here: Box, gate: Gate) -> None:
    """`aiogpu stop --drain` leaves the seconds in a file; the next node ignores it."""
    await asyncio.to_thread(here.run, "start", "--head", "--num-cpus=2")
    first = here.node
    assert first is not None
    os.kill(first.pid, signal.SIGSTOP)
    asking = here.begin("stop", "--drain=0")
    await until(lambda: os.path.exists(here.place.drain_file))
    os.kill(first.pid, signal.SIGKILL)
    await asyncio.to_thread(asking.communicate, timeout=LIMIT)
    assert os.path.exists(here.place.drain_file), "the node never read it"
    await asyncio.to_thread(here.run, "start", "--head", "--num-cpus=2", "--drain=60")
    second = here.node
    assert second is not None
    async with aiogpu.init(address=here.place.socket):
        running = tasks.gated.remote(gate.path, "one")
        await gate.entered("one")
        os.kill(second.pid, signal.SIGTERM)
        await until_refused()
        gate.release("one")
        assert await running == "one"
        await asyncio.to_thread(here.wait_for_the_end, 20)
    assert here.files == []


async def test_only_its_user_reaches_the_socket(here: Box) -> None:
    await asyncio.to_thread(here.run, "start", "--head", "--num-cpus=1")
    assert os.stat(here.place.socket).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(here.place.socket)).st_mode & 0o777 == 0o700


async def test_a_killed_node_takes_all_along(here: Box, gate: Gate) -> None:
    await asyncio.to_thread(here.run, "start", "--head", "--num-cpus=2")
    async with aiogpu.init(address=here.place.socket):
        running = tasks.gated.remote(gate.path, "one")
        await gate.entered("one")
        node = here.node
        assert node is not None
        os.kill(node.pid, signal.SIGKILL)
        with pytest.raises(aiogpu.NodeDiedError):
            await running
        await asyncio.to_thread(here.wait_for_the_end, 5)
    assert here.files == ["aiogpu/node.pid", "aiogpu/node.sock"]
