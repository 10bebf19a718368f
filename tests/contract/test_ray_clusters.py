"""Ray clusters of several nodes on this machine: placement of tasks, and status."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

import aiogpu
from tests.contract import actor_classes, device_tasks
from tests.contract.clusters import Cluster
from tests.support import program

pytestmark = [
    pytest.mark.ray,
    pytest.mark.either_loop,
    pytest.mark.usefixtures("in_no_cluster"),
]

GPUS, CPUS = 3, 5
"""Join a cluster of three nodes, one of which has no GPU."""


@pytest.fixture(scope="module")
def cluster(in_no_cluster: None) -> Iterator[Cluster]:
    with Cluster(num_cpus=2) as cluster:
        cluster.add(
            num_cpus=2, num_gpus=2, resources={"accelerator_type:A100": 1, "license": 1}
        )
        cluster.add(num_cpus=1, num_gpus=1, resources={"accelerator_type:T4": 1})
        yield cluster


@pytest.fixture
def joined_by(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Name the cluster in RAY_ADDRESS."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)
    return cluster


@pytest.fixture
async def joined(joined_by: Cluster) -> AsyncIterator[Cluster]:
    async with aiogpu.init(address="ray"):
        yield joined_by


async def test_tasks_run_on_the_node_with_their_resources(joined):
    a100, t4 = joined.nodes[1:]
    asked = {
        "A100": device_tasks.node.options(num_gpus=1, accelerator_type="A100"),
        "T4": device_tasks.node.options(num_gpus=0.5, accelerator_type="T4"),
        "license": device_tasks.node.options(resources={"license": 0.5}),
    }
    found = await asyncio.gather(*(one.remote() for one in asked.values()))
    assert dict(zip(asked, found, strict=True)) == {
        "A100": a100,
        "T4": t4,
        "license": a100,
    }


async def test_cancel_reaches_coroutines_of_an_actor(joined, gate):
    """Ray cancels coroutines; a plain method runs to its end; its result is lost."""
    # Before the tests that kill nodes: Ray starts actors on a dead node for a while.
    counter = await actor_classes.Counter.options(num_cpus=0).remote()
    actor = await actor_classes.Async.options(num_cpus=0).remote()
    waiting = actor.wait.remote(gate.path, "coroutine")
    await gate.entered("coroutine")
    waiting.cancel()
    await gate.entered("coroutine-cancelled")
    assert await actor.later.remote() == 1

    busy = counter.gated.remote(gate.path, "plain")
    await gate.entered("plain")
    behind = counter.add.remote()
    busy.cancel()
    gate.release("plain")
    assert await behind == 1
    assert await counter.notes.remote() == ["plain"]


async def test_status_tells_what_is_free_and_which_calls_were_sent(joined, gate):
    holding = device_tasks.gated_node.options(num_gpus=1, num_cpus=0)
    held = [holding.remote(gate.path, f"h{i}") for i in range(GPUS)]
    await gate.entered(*(f"h{i}" for i in range(GPUS)))
    waiting = device_tasks.node.options(num_gpus=1, num_cpus=0).remote()
    why = await waiting.why()
    assert (why.name, why.state, why.request) == ("node", "sent", {"GPU": 1.0})

    async with asyncio.timeout(60):
        # Ray's free resources are a moment late.
        while (status := await aiogpu.status()).available["GPU"]:
            await asyncio.sleep(0)
    assert {task.state for task in status.tasks} == {"sent"}
    assert len(status.tasks) == GPUS + 1
    assert status.total["GPU"] == GPUS

    gate.release(*(f"h{i}" for i in range(GPUS)))
    await asyncio.gather(*held, waiting)
    assert await waiting.why() is None or (await waiting.why()).state == "ended"


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpus": 3},
        {"num_gpus": 2, "accelerator_type": "T4"},
        {"num_gpus": 1, "accelerator_type": "H100"},
        {"resources": {"licence": 1}},
        {"num_cpus": 3},
    ],
)
async def test_resources_that_no_node_has_are_refused(joined, options):
    with pytest.raises(aiogpu.InfeasibleError) as caught:
        device_tasks.node.options(**options).remote()
    assert "1 x {CPU: 2}" in str(caught.value), caught.value


BRINGING = """
    import aiogpu

    async def main():
        env = {"working_dir": ".", "env_vars": {"AIOGPU_TEST_BROUGHT": "yes"}}
        async with aiogpu.init(address="ray", runtime_env=env):
            print(await brought.remote())

    @aiogpu.remote
    def brought():
        import os
        from pathlib import Path
        return Path("data.txt").read_text(), os.environ["AIOGPU_TEST_BROUGHT"]

    aiogpu.run(main())
"""


def test_a_runtime_env_goes_to_ray_as_it_is(cluster, tmp_path, monkeypatch):
    (tmp_path / "data.txt").write_text("beside the program")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    at = {"RAY_ADDRESS": cluster.address, **cluster.variables}
    out = program.run(BRINGING, **at)
    assert out.splitlines()[-1] == "('beside the program', 'yes')"


async def seen(resource: str) -> None:
    """Wait until the program has seen a node with a resource; it looks every 2 s."""
    async with asyncio.timeout(60):
        while resource not in await aiogpu.cluster_resources():
            await asyncio.sleep(0)


async def test_refusing_does_not_wait_for_the_cluster(joined, monkeypatch):
    """The cluster answers nothing meanwhile."""
    from aiogpu.engines.ray import cluster

    answered = threading.Event()

    def answer() -> tuple[list[object], bool]:
        answered.wait(60)
        return [], False

    with monkeypatch.context() as patched:
        patched.setattr(cluster, "nodes_and_growth", answer)
        try:
            with pytest.raises(aiogpu.InfeasibleError):
                device_tasks.node.options(num_gpus=3).remote()
        finally:
            answered.set()


async def test_nodes_may_join_and_leave(joined, gate):
    spot = f"spot{len(joined.nodes)}"
    asking = device_tasks.told_node.options(resources={spot: 1}, num_cpus=0)
    with pytest.raises(aiogpu.InfeasibleError):
        asking.remote(gate.path, "never")
    doomed = await asyncio.to_thread(joined.add, num_cpus=4, resources={spot: 4})
    await seen(spot)
    lost = asking.options(max_retries=0).remote(gate.path, "lost")
    saved = [device_tasks.told_node.remote(gate.path, str(i)) for i in range(CPUS + 4)]
    await gate.holds(len(saved) + 1)
    await asyncio.to_thread(joined.kill, doomed)
    with pytest.raises(aiogpu.WorkerDiedError, match="node"):
        await lost

    ended = asyncio.gather(*saved)
    async with asyncio.timeout(120):
        while not ended.done():
            gate.release(*gate.inside)
            await asyncio.wait([ended], timeout=0.2)
    assert doomed not in await ended
