"""Values where descriptors are few, output is long, and processes are killed."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

import aiogpu
from tests.contract import value_tasks as v
from tests.support.gate import Gate

np = pytest.importorskip("numpy")

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.needs("processes"),
]

LARGE = 1 << 20


@pytest.fixture
async def node(address: str) -> AsyncIterator[aiogpu.types.Node]:
    """Two CPUs."""
    async with (
        asyncio.timeout(60),
        aiogpu.init(address=address, num_cpus=2) as session,
    ):
        yield session


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """This process may open only so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1 + left
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_without_descriptors_a_value_travels_in_the_frame(
    node: aiogpu.types.Node,
) -> None:
    await asyncio.gather(*(v.give.remote(i) for i in range(4)))
    with few_descriptors(8):
        handles = [await aiogpu.put(np.full(LARGE, i, np.uint8)) for i in range(30)]
        for i, handle in enumerate(handles):
            assert (await v.give_sum.remote(handle)) == i * LARGE


async def test_one_segment_lent_again_and_again(node: aiogpu.types.Node) -> None:
    """While the worker returns what it was lent before."""
    handle = await aiogpu.put(np.ones(LARGE, np.uint8))
    for _ in range(100):
        found = await asyncio.gather(*(v.give_sum.remote(handle) for _ in range(3)))
        assert found == [LARGE] * 3


async def test_what_is_put_between_much_output(node: aiogpu.types.Node) -> None:
    """The driver hears of it before what was printed is out."""
    for found in await asyncio.gather(*(v.talk_and_pass.remote() for _ in range(3))):
        assert found == LARGE


async def test_a_task_that_waits_for_arguments_says_so(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    slow = v.gated.options(name="load").remote(gate.path, "slow", 1)
    then = v.add.options(name="train").remote(slow)
    await gate.entered("slow")
    assert "waits for its arguments: the result of load" in str(await then.why())
    (waiting,) = (await aiogpu.status()).waiting
    assert (waiting.name, waiting.state) == ("train", "expecting")
    gate.release("slow")
    assert await then == 2


async def test_a_worker_is_killed_that_has_put_something(
    node: aiogpu.types.Node,
) -> None:
    doomed = v.make_and_kill.remote(LARGE)
    with pytest.raises(aiogpu.WorkerDiedError):
        await v.give_sum.remote(doomed)
    with pytest.raises(aiogpu.WorkerDiedError):
        await doomed


async def test_a_worker_is_killed_after_its_result_has_come(
    node: aiogpu.types.Node, gate: Gate
) -> None:
    """The result is here, and stays."""
    large = v.give.remote(np.ones(LARGE))
    await asyncio.wait([large])
    gated = v.gated.remote(gate.path, "alive")
    await gate.entered("alive")
    gated.cancel()
    os.kill(gate.pids["alive"], signal.SIGKILL)
    assert (await large).sum() == LARGE


@pytest.mark.parametrize("kind", ["task", "actor"])
@pytest.mark.parametrize("is_pending", [True, False])
async def test_arguments_that_are_too_large_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, is_pending: bool
) -> None:
    """Each is small; together they are more than one frame carries."""
    monkeypatch.setattr("aiogpu.runtime.objects.values.LARGEST_PAYLOAD", 1 << 20)
    async with asyncio.timeout(60), aiogpu.init(num_cpus=2):
        parts = [v.give.remote(b"x" * 200_000) for _ in range(6)]
        if not is_pending:
            await asyncio.gather(*parts)
        if kind == "task":
            refused = v.how_many.remote(*parts)
        else:
            refused = v.Numbering.remote().how_many.remote(*parts)
        with pytest.raises(
            aiogpu.errors.SerializationError, match=r"have 12\d+ bytes in all"
        ):
            await refused
        assert await v.how_many.remote(*parts[:4]) == 4
        assert not unended(await aiogpu.status())


def unended(status: aiogpu.types.NodeStatus) -> list[str]:
    """The tasks that have not ended, actors left out."""
    return [task.name for task in status.tasks if task.name != "Numbering"]
