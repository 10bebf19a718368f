"""Ray clusters of several nodes on this machine: where tasks go, and what is told."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

import aiogpu
from tests import program
from tests.engines import actor_classes, spread_tasks
from tests.engines.clusters import Cluster

pytestmark = [
    pytest.mark.ray,
    pytest.mark.either_loop,
    pytest.mark.usefixtures("in_no_cluster"),
]

GPUS, CPUS = 3, 5
"""In the cluster, on three nodes, of which one has no GPU."""


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
    """RAY_ADDRESS names it."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)
    return cluster


@pytest.fixture
async def joined(joined_by: Cluster) -> AsyncIterator[Cluster]:
    async with aiogpu.init(address="ray"):
        yield joined_by


async def test_tasks_land_where_what_they_ask_for_is(joined):
    a100, t4 = joined.nodes[1:]
    asked = {
        "A100": spread_tasks.node.options(num_gpus=1, accelerator_type="A100"),
        "T4": spread_tasks.node.options(num_gpus=0.5, accelerator_type="T4"),
        "license": spread_tasks.node.options(resources={"license": 0.5}),
    }
    found = await asyncio.gather(*(one.remote() for one in asked.values()))
    assert dict(zip(asked, found, strict=True)) == {
        "A100": a100,
        "T4": t4,
        "license": a100,
    }


async def test_a_share_is_of_one_device(joined):
    halves = spread_tasks.gpus.options(num_gpus=0.5, num_cpus=0)
    found = await asyncio.gather(*(halves.remote() for _ in range(8)))
    assert {len(ids) for _, ids, _ in found} == {1}
    assert {variable for _, ids, variable in found} <= {"0", "1"}
    whole = spread_tasks.gpus.options(num_gpus=2)
    assert await whole.remote() == (joined.nodes[1], [0, 1], "0,1")


async def test_status_tells_what_waits_and_what_is_free(joined, gate):
    holding = spread_tasks.gated_node.options(num_gpus=1, num_cpus=0)
    held = [holding.remote(gate.path, f"h{i}") for i in range(GPUS)]
    await gate.entered(*(f"h{i}" for i in range(GPUS)))
    waiting = spread_tasks.node.options(num_gpus=1, num_cpus=0).remote()
    why = await waiting.why()
    assert (why.name, why.state, why.request) == ("node", "sent", {"GPU": 1.0})

    async with asyncio.timeout(60):
        # Ray tells what waits a moment later.
        while not (status := await aiogpu.status()).waiting_count:
            await asyncio.sleep(0)
    assert {"GPU": 1.0} in [shape.request for shape in status.shapes]
    assert Counter(device.type for device in status.devices) == {"A100": 2, "T4": 1}
    assert {device.free for device in status.devices} == {0.0}
    assert {task.state for task in status.tasks} == {"sent"}
    assert "waiting" in str(status)
    assert status.total["GPU"] == GPUS
    assert status.available["GPU"] == 0.0

    gate.release(*(f"h{i}" for i in range(GPUS)))
    await asyncio.gather(*held, waiting)
    assert await waiting.why() is None or (await waiting.why()).state == "ended"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_gpus": 3}, "lacks GPU 3 of 2"),
        ({"num_gpus": 2, "accelerator_type": "T4"}, "at once"),
        ({"num_gpus": 1, "accelerator_type": "H100"}, " of 0"),
        ({"resources": {"licence": 1}}, "did you mean 'license'?"),
        ({"num_cpus": 3}, "lacks CPU 3 of 2"),
    ],
)
async def test_what_no_node_has_is_refused(joined, options, told):
    with pytest.raises(aiogpu.InfeasibleError) as caught:
        spread_tasks.node.options(**options).remote()
    assert told in str(caught.value), caught.value
    assert "1 x {CPU: 2}" in str(caught.value), caught.value


async def seen(resource: str) -> None:
    """Until the program has seen a node with that; it looks every two seconds."""
    async with asyncio.timeout(60):
        while resource not in await aiogpu.cluster_resources():
            await asyncio.sleep(0)


async def test_to_refuse_what_no_node_has_is_not_to_wait(joined, monkeypatch):
    """[B2] The cluster answers nothing meanwhile."""
    from aiogpu.engines.ray import cluster

    answered = threading.Event()

    def nodes() -> list[object]:
        answered.wait(60)
        return []

    with monkeypatch.context() as patched:
        patched.setattr(cluster, "nodes", nodes)
        try:
            with pytest.raises(aiogpu.InfeasibleError):
                spread_tasks.node.options(num_gpus=3).remote()
        finally:
            answered.set()


async def test_calls_whose_only_node_has_left_say_so_and_fail(
    joined, gate, caplog, monkeypatch
):
    from aiogpu.engines.ray import status

    monkeypatch.setattr(status, "GIVE_UP_AFTER", 3.0)
    spot = f"spot{len(joined.nodes)}"
    node = await asyncio.to_thread(joined.add, num_cpus=1, resources={spot: 1})
    await seen(spot)
    on_it = {"resources": {spot: 1}, "num_cpus": 0}
    asking = spread_tasks.gated_node.options(**on_it)
    running = asking.remote(gate.path, "running")
    await gate.entered("running")
    waiting = [asking.remote(gate.path, "waiting") for _ in range(3)]
    actor = actor_classes.Counter.options(**on_it).remote()
    call = actor.add.remote(1)
    await asyncio.to_thread(joined.kill, node)
    for handle in (running, *waiting):
        with pytest.raises(aiogpu.InfeasibleError, match=spot):
            await handle
    # Ray itself ends it where it had a place in the queue of the node that died.
    with pytest.raises(aiogpu.ActorDiedError):
        await call
    assert caplog.text.count("gated_node asks for") == 1, caplog.text
    assert "has left" in caplog.text
    with pytest.raises(aiogpu.InfeasibleError, match=spot):
        asking.remote(gate.path, "never")


async def test_a_node_that_comes_back_runs_what_waits_for_it(joined, gate, caplog):
    spot = f"spot{len(joined.nodes)}"
    node = await asyncio.to_thread(joined.add, num_cpus=1, resources={spot: 1})
    await seen(spot)
    asking = spread_tasks.gated_node.options(resources={spot: 1}, num_cpus=0)
    running = asking.remote(gate.path, "first")
    await gate.entered("first")
    gate.forget("first")
    await asyncio.to_thread(joined.kill, node)
    async with asyncio.timeout(60):
        while "unless such a node joins" not in caplog.text:
            await asyncio.sleep(0)
    again = await asyncio.to_thread(joined.add, num_cpus=1, resources={spot: 1})
    await gate.entered("first")
    gate.release("first")
    assert await running == again


async def test_a_node_that_has_come_is_seen_and_one_that_goes_is_missed_by_nobody(
    joined, gate
):
    spot = f"spot{len(joined.nodes)}"
    asking = spread_tasks.told_node.options(resources={spot: 1}, num_cpus=0)
    with pytest.raises(aiogpu.InfeasibleError):
        asking.remote(gate.path, "never")
    doomed = await asyncio.to_thread(joined.add, num_cpus=4, resources={spot: 4})
    await seen(spot)
    lost = asking.options(max_retries=0).remote(gate.path, "lost")
    saved = [spread_tasks.told_node.remote(gate.path, str(i)) for i in range(CPUS + 4)]
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


def test_programs_share_it_and_it_goes_on(joined_by):
    source = """
        import aiogpu
        from tests.engines.tasks import add

        async def main():
            async with aiogpu.init(address="ray"):
                print(sum([await add.remote(i) for i in range(10)]))

        aiogpu.run(main())
    """
    running = [program.start(source) for _ in range(3)]
    for one in running:
        out, err = one.communicate(timeout=120)
        # Ray may have something to say before.
        assert (one.returncode, out[-3:]) == (0, "55\n"), err


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors are taken for another machine's, though all nodes are on this one."""
    from aiogpu.engines.ray.actors import CancelSender

    monkeypatch.setattr(CancelSender, "sends_here", lambda *_: False)


async def test_an_actor_elsewhere_hears_of_cancelled_calls(joined, gate, elsewhere):
    """A task of Ray's tells it, which has a place beside it though no CPU is free."""
    beside = {"resources": {"license": 0.1}}
    counter = await actor_classes.Counter.options(num_cpus=0, **beside).remote()
    soft = await actor_classes.Async.options(num_cpus=0, **beside).remote()
    assert counter._link._actor.place[0] == joined.nodes[1]
    holding = spread_tasks.gated_node.options(num_cpus=1, **beside)
    held = [holding.remote(gate.path, f"h{i}") for i in range(2)]
    await gate.entered("h0", "h1")

    busy = counter.spin.remote(gate.path, "busy")
    await gate.entered("busy")
    calls = [counter.note.remote(number) for number in range(40)]
    for call in calls[1::2]:
        call.cancel()
    # It is told after the others, and in their order.
    busy.cancel()
    await gate.entered("busy-interrupted")
    await asyncio.gather(*calls[::2])
    assert await counter.notes.remote() == [*range(0, 40, 2)]

    waiting = soft.wait.remote(gate.path, "soft")
    await gate.entered("soft")
    waiting.cancel()
    await gate.entered("soft-cancelled")
    assert await soft.later.remote() == 1
    gate.release("h0", "h1")
    await asyncio.gather(*held)


async def test_where_an_actor_is_need_not_be_known(joined, gate, elsewhere):
    beside = {"resources": {"license": 0.1}}
    counter = await actor_classes.Counter.options(num_cpus=0, **beside).remote()
    counter._link._actor.place = "", 0
    for name in ("a", "b"):
        busy = counter.spin.remote(gate.path, name)
        await gate.entered(name)
        busy.cancel()
        await gate.entered(f"{name}-interrupted")


async def test_a_node_that_dies_holds_up_no_cancels(joined, gate, monkeypatch):
    spot = f"doomed{len(joined.nodes)}"
    node = await asyncio.to_thread(joined.add, num_cpus=1, resources={spot: 1})
    await seen(spot)
    on_it = actor_classes.Counter.options(num_cpus=0, resources={spot: 1})
    doomed, living = await on_it.remote(), actor_classes.Counter.options(num_cpus=0)
    living = await living.options(resources={"license": 0.1}).remote()
    dying = threading.Event()

    def reaches(_: object, actor: str, *_calls: object) -> bool:
        """The first question is of the node that dies, and it dies of it."""
        if not dying.is_set():
            dying.set()
            joined.kill(node)
        return False

    from aiogpu.engines.ray.actors import CancelSender

    lost, runs = doomed.spin.remote(gate.path, "lost"), living.spin
    await gate.entered("lost")
    runs = runs.remote(gate.path, "runs")
    await gate.entered("runs")
    monkeypatch.setattr(CancelSender, "sends_here", reaches)
    lost.cancel()
    runs.cancel()
    await gate.entered("runs-interrupted")
    with pytest.raises(aiogpu.ActorDiedError):
        await doomed.add.remote()
    assert await living.add.remote() == 1
