"""Placements reserve resources for tasks; leases reserve them for other code."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu.errors import MisuseError, NodeClosedError, NodeError, PlacementRemovedError
from aiogpu.types import Node
from tests.contract import device_tasks, tasks
from tests.support.waits import LIMIT, until, until_free

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.either_loop,
    pytest.mark.aiogpu(num_gpus=1, num_cpus=4),
]
LEASES = pytest.mark.needs("leases")


def member(group: aiogpu.types.Placement, **options: Any) -> Any:
    """Return a task of a placement that tells its devices."""
    return device_tasks.where.options(placement=group, **options)


@pytest.mark.needs("waiting for resources")
@pytest.mark.aiogpu(num_gpus=3, num_cpus=4)
async def test_tasks_run_on_the_devices_of_their_bundle(node: Node) -> None:
    async with aiogpu.placement([{"GPU": 1, "CPU": 2}, {"GPU": 0.5}]) as group:
        assert group.is_ready
        assert group.bundles == ({"CPU": 2.0, "GPU": 1.0}, {"GPU": 0.5})
        assert (group.name, group.strategy, len(group)) == ("placement", "PACK", 2)
        await until_free(CPU=2, GPU=1.5)
        assert (await group.why()).state == "running"
        first, second = member(group, bundle=0), member(group, bundle=1)
        assert await first.remote() == ([0], "0", {"CPU": 1.0, "GPU": 0.25})
        assert await second.remote() == ([1], "1", {"GPU": 0.25})
        await until_free(GPU=1.5)
        assert (await member(group, num_gpus=1).remote())[0] == [0]
        without_gpu = device_tasks.plain.options(placement=group, num_cpus=2)
        assert await without_gpu.remote() == []
        add = device_tasks.adds.options(placement=group)
        assert await add.remote(await add.remote(1, 2), add.remote(3, 4)) == 10
    await until_free(GPU=3, CPU=4)


@pytest.mark.needs("waiting for resources")
async def test_tasks_wait_for_their_placement(address: str, node: Node) -> None:
    async with aiogpu.placement([{"GPU": 0.5}]):
        group = aiogpu.placement([{"GPU": 1}], name="group")
        handle = member(group).remote()
        cancelled = member(group).remote()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await group
        cancelled.cancel()
        assert not group.is_ready
        why = await group.why()
        assert (why.state, why.request) == ("waiting", {"GPU": 1.0})
        if address != "ray":
            assert "GPU 1" in str(why)
        assert "group" in str(await handle.why())
        assert not handle.done()
    assert (await handle)[0] == [0]
    assert await group is group
    await group.remove()
    await until_free(GPU=1)


@pytest.mark.needs("waiting for resources")
@pytest.mark.aiogpu(num_gpus=2, num_cpus=4)
async def test_an_actor_lives_in_a_bundle(node: Node) -> None:
    async with aiogpu.placement([{"GPU": 1}, {"GPU": 0.5}]) as group:
        kind = device_tasks.Actor.options(placement=group, bundle=1)
        actor = kind.remote()
        assert await actor.where.remote() == [1]
        await until_free(GPU=0.5)
        aiogpu.kill(actor)
        assert await kind.remote().where.remote() == [1]


@pytest.mark.needs("ends of placements")
@pytest.mark.aiogpu(num_gpus=2, num_cpus=4)
async def test_remove_ends_tasks_and_actors(node: Node, tmp_path: Path) -> None:
    started = tmp_path / "started"
    group = await aiogpu.placement([{"GPU": 1}, {"GPU": 1}], name="group")
    actor = await device_tasks.Actor.options(placement=group, bundle=0).remote()
    forever = device_tasks.forever.options(placement=group, bundle=1)
    running = forever.remote(started)
    await until(started.exists)
    waiting = forever.options(num_gpus=1).remote(started)
    await group.remove()
    await group.remove()
    for handle in (running, waiting):
        with pytest.raises(PlacementRemovedError, match="group") as caught:
            await handle
        assert caught.value.placement == "group"
    with pytest.raises(aiogpu.ActorDiedError, match="was removed") as dead:
        await actor.where.remote()
    assert isinstance(dead.value.__cause__, PlacementRemovedError)
    with pytest.raises(PlacementRemovedError, match="was removed before"):
        await forever.remote(started)
    with pytest.raises(PlacementRemovedError, match="was removed"):
        await group
    await until_free(GPU=2)


async def test_an_actor_of_a_removed_placement_never_starts(node: Node) -> None:
    group = await aiogpu.placement([{"GPU": 1}])
    await group.remove()
    actor = device_tasks.Actor.options(placement=group).remote()
    with pytest.raises(aiogpu.ActorDiedError) as dead:
        await actor.where.remote()
    assert isinstance(dead.value.__cause__, PlacementRemovedError)
    await until_free(GPU=1)


async def test_remove_cancels_a_placement_that_waits(node: Node) -> None:
    async with aiogpu.placement([{"GPU": 1}]):
        group = aiogpu.placement([{"GPU": 1}])
        handle = member(group).remote()
        await group.remove()
        with pytest.raises(PlacementRemovedError):
            await handle
        with pytest.raises(PlacementRemovedError):
            await group.ready()
    await until_free(GPU=1)


@pytest.mark.needs("waiting for resources")
async def test_a_timeout_withdraws_the_request_for_a_placement(node: Node) -> None:
    async with aiogpu.placement([{"GPU": 1}]):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), aiogpu.placement([{"GPU": 1}]):
                pytest.fail("the placement was granted")
        assert not (await aiogpu.status()).waiting
    await until_free(GPU=1)


@pytest.mark.parametrize("kind", ["parent", "plain_parent"])
@pytest.mark.aiogpu(num_gpus=2, num_cpus=4)
async def test_children_run_in_their_parents_placement(node: Node, kind: str) -> None:
    async with aiogpu.placement([{"GPU": 1, "CPU": 1}]) as group:
        function = getattr(device_tasks, kind).options(placement=group, bundle=0)
        assert await function.remote(group) == [0]


async def test_a_task_may_neither_make_nor_await_a_placement(node: Node) -> None:
    async with aiogpu.placement([{"CPU": 1}]) as group:
        assert "inside a task" in await device_tasks.asks_for_one.remote()
        assert "program that made" in await device_tasks.waits_for.remote(group)
        copy = pickle.loads(pickle.dumps(group))
        assert (copy.id, copy.bundles) == (group.id, group.bundles)


@pytest.mark.aiogpu(num_gpus=2, num_cpus=4)
async def test_a_placement_that_can_never_fit_is_refused(node: Node) -> None:
    assert node.is_open
    for bundles, strategy, why in (
        ([{"GPU": 3}], "PACK", "lacks GPU 3 of 2"),
        ([{"GPU": 1}] * 3, "PACK", "do not all fit at once"),
        ([{"GPU": 1}] * 2, "STRICT_SPREAD", "on a machine of its own"),
        ([{"licence": 1}], "PACK", "lacks licence 1 of 0"),
    ):
        with pytest.raises(aiogpu.InfeasibleError, match=why):
            await aiogpu.placement(bundles, strategy)  # type: ignore[arg-type]


async def test_a_placement_may_precede_its_node(address: str) -> None:
    async def init() -> None:
        await aiogpu.init(address=address, num_gpus=1, num_cpus=2)

    opening = asyncio.ensure_future(init())
    await asyncio.sleep(0)
    group = aiogpu.placement([{"GPU": 1}])
    never = aiogpu.placement([{"GPU": 2}])
    handle = member(group).remote()
    lost = device_tasks.where.options(placement=never).remote()
    assert (await handle)[0] == [0]
    assert (await group).is_ready
    with pytest.raises(aiogpu.InfeasibleError):
        await never
    with pytest.raises(PlacementRemovedError, match="never requested"):
        await lost
    await opening
    await aiogpu.shutdown()


@pytest.mark.needs("waiting for resources")
@pytest.mark.needs("ledger")
@pytest.mark.aiogpu(num_gpus=1, num_cpus=2, accelerator_type="T4")
async def test_a_task_of_another_type_than_its_bundle_is_refused(node: Node) -> None:
    async with aiogpu.placement([{"GPU": 1}]):
        group = aiogpu.placement([{"GPU": 1}])
        misfit = member(group, accelerator_type="A100")
        handle = misfit.remote()
    with pytest.raises(aiogpu.InfeasibleError, match="type T4"):
        await handle
    with pytest.raises(aiogpu.InfeasibleError, match="type T4"):
        await misfit.remote()
    assert (await member(group, accelerator_type="T4").remote())[0] == [0]


@pytest.mark.aiogpu(num_gpus=1, num_cpus=2, gpu_memory="8GiB")
async def test_gpu_memory_is_limited_within_a_bundle(node: Node) -> None:
    async with aiogpu.placement([{"GPU": 0.5}]) as group:
        assert (await member(group, gpu_memory="4GiB").remote())[0] == [0]
        with pytest.raises(aiogpu.InfeasibleError):
            await member(group, gpu_memory="5GiB").remote()


async def test_a_placement_ends_with_its_node(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1, num_cpus=2):
        group = await aiogpu.placement([{"GPU": 1}], "SPREAD", name="g")
        waiting = aiogpu.placement([{"GPU": 1}])
        assert repr(group) == "<Placement g SPREAD [{GPU: 1}]>"
    for placement in (group, waiting):
        with pytest.raises(NodeClosedError):
            await placement
    await group.remove()


@pytest.mark.needs("priority", "at once")
async def test_a_placement_with_priority_goes_first(node: Node) -> None:
    async with aiogpu.placement([{"GPU": 1}]):
        later = aiogpu.placement([{"GPU": 1}])
        sooner = aiogpu.placement([{"GPU": 1}], priority=1)
    await sooner
    assert not later.is_ready
    await sooner.remove()
    await later


@pytest.mark.aiogpu(num_gpus=1, num_cpus=2, accelerator_type="T4")
@pytest.mark.needs("typed bundles")
async def test_tasks_may_name_the_type_of_their_bundle(node: Node) -> None:
    async with aiogpu.placement([{"GPU": 1, "accelerator_type:T4": 0.001}]) as group:
        typed = member(group, accelerator_type="T4")
        answers = await asyncio.gather(typed.remote(), typed.remote())
        assert [ids for ids, *_ in answers] == [[0], [0]]


@pytest.mark.needs("waiting for resources")
@pytest.mark.needs("device memory")
@pytest.mark.aiogpu(num_gpus=2, num_cpus=4, gpu_memory="8GiB")
async def test_a_bundle_reserves_gpu_memory(node: Node) -> None:
    bundles = [{"gpu_memory": "6GiB"}, {"GPU": 0.5, "gpu_memory": "3GiB"}]
    async with aiogpu.placement(bundles) as group:
        free = await aiogpu.available_resources()
        assert free["gpu_memory"] == 7 << 30
        assert group.bundles[0] == {"gpu_memory": float(6 << 30)}
        alone = member(group, num_gpus=0, bundle=0, gpu_memory="4GiB")
        assert (await alone.remote())[2]["gpu_memory"] == 4 << 30
        seen = (await aiogpu.status()).placements[0]
        assert seen.bundles[1].free["gpu_memory"] == 3 << 30
        with pytest.raises(aiogpu.InfeasibleError):
            await member(group, num_gpus=0, gpu_memory="7GiB").remote()
        half = member(group, bundle=1, gpu_memory="3GiB")
        assert (await half.remote())[1] in ("0", "1")
        with pytest.raises(aiogpu.InfeasibleError):
            await half.options(gpu_memory="4GiB").remote()
        waiting = aiogpu.placement([{"gpu_memory": "6GiB"}])
        assert not waiting.is_ready
        assert "gpu_memory" in str(waiting.bundles)
    await waiting
    await waiting.remove()
    await until_free(gpu_memory=16 << 30)


async def test_a_bundle_of_unknown_gpu_memory_is_refused(node: Node) -> None:
    """The node does not know the GPU's memory; Ray reserves no memory."""
    refusals = (aiogpu.InfeasibleError, aiogpu.OptionError)
    with pytest.raises(refusals, match="memory"):
        await aiogpu.placement([{"GPU": 0.5, "gpu_memory": "1GiB"}])


async def until_waits(lease: aiogpu.types.Lease) -> aiogpu.types.Why:
    """Wait until a lease waits for its resources; return why."""
    async with asyncio.timeout(LIMIT):
        while not (repr(lease).endswith("waiting>") and (why := await lease.why())):
            await asyncio.sleep(0)
        while why.state != "waiting":
            why = await lease.why()
    return why


@pytest.mark.needs("waiting for resources")
@LEASES
@pytest.mark.aiogpu(num_gpus=2, num_cpus=2)
async def test_a_lease_holds_its_devices_and_names_them(node: Node) -> None:
    async with aiogpu.lease(num_gpus=1, name="mine") as gpu:
        assert gpu.is_held
        assert (gpu.ids, gpu.accelerators) == ([0], {"GPU": [0]})
        assert gpu.environ["CUDA_VISIBLE_DEVICES"] == "0"
        assert gpu.gpu_memory == 0
        assert repr(gpu) == "<Lease mine held>"
        assert (await aiogpu.available_resources())["GPU"] == 1
        status = await aiogpu.status()
        (task,) = [task for task in status.tasks if task.is_lease]
        assert (task.name, task.state, task.pid) == ("mine", "running", os.getpid())
        assert status.devices[0].holders[0].task == "mine"
        assert (await gpu.why()).state == "running"
    assert not gpu.is_held
    await gpu.release()
    await until_free(GPU=2)


@pytest.mark.needs("waiting for resources")
@LEASES
async def test_a_lease_waits_and_says_why(node: Node) -> None:
    first = await aiogpu.lease(num_gpus=1, name="first")
    second = aiogpu.lease(num_gpus=0.5, name="second")
    waiting = asyncio.ensure_future(second)
    why = await until_waits(second)
    assert "held by first" in str(why)
    status = await aiogpu.status()
    assert [task.name for task in status.waiting] == ["second"]
    await first.release()
    assert (await waiting).ids == [0]
    await second.release()


@LEASES
@pytest.mark.aiogpu(num_gpus=1, gpu_memory="8GiB")
async def test_a_lease_limits_gpu_memory_like_a_task(node: Node) -> None:
    async with aiogpu.lease(gpu_memory="2GiB") as gpu:
        assert gpu.gpu_memory == 2 << 30
        assert gpu.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.25"


@pytest.mark.needs("waiting for resources")
@LEASES
async def test_a_lease_given_up_while_it_waits_holds_nothing(node: Node) -> None:
    async with aiogpu.lease(num_gpus=1):
        with pytest.raises(aiogpu.TaskTimeoutError, match=r"timeout of 0\.01 s"):
            await aiogpu.lease(num_gpus=1, timeout=0.01)
        second = aiogpu.lease(num_gpus=1)
        waiting = asyncio.ensure_future(second)
        await until_waits(second)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not (await aiogpu.status()).waiting
    await until_free(GPU=1)


@LEASES
async def test_a_lease_that_can_never_fit_is_refused(node: Node) -> None:
    with pytest.raises(aiogpu.InfeasibleError, match="GPU 2 of 1"):
        await aiogpu.lease(num_gpus=2)
    with pytest.raises(MisuseError, match="already awaited"):
        async with aiogpu.lease(num_gpus=1) as gpu:
            await gpu


@LEASES
async def test_a_task_waits_for_a_lease(node: Node) -> None:
    async with aiogpu.lease(num_gpus=1):
        handle = tasks.add.options(num_gpus=1).remote(1, 2)
        why = await handle.why()
        assert not handle.done()
        assert why.state in ("waiting", "opening")
    assert await handle == 3


@LEASES
async def test_a_forgotten_lease_is_released_with_a_warning(node: Node) -> None:
    gpu = await aiogpu.lease(num_gpus=1, name="forgotten")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del gpu
        gc.collect()
    assert any("forgotten was never released" in str(w.message) for w in caught)
    await until_free(GPU=1)


@LEASES
async def test_a_lease_ends_with_its_node(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
        gpu = await aiogpu.lease(num_gpus=1)
        lost = asyncio.ensure_future(gpu.lost())
        await asyncio.sleep(0)
    assert isinstance(await lost, NodeClosedError)
    assert not gpu.is_held
    await gpu.release()


@pytest.mark.needs("leases", "processes")
async def test_a_lease_is_held_until_its_processes_have_ended(node: Node) -> None:
    async with aiogpu.lease(num_gpus=1) as gpu:
        environ = {**os.environ, **gpu.environ}
        started = await asyncio.create_subprocess_exec("sleep", "60", env=environ)
    async with asyncio.timeout(LIMIT):
        while True:
            (task,) = (await aiogpu.status()).tasks
            if task.state == "stopping":
                break
    assert (await aiogpu.available_resources())["GPU"] == 0
    started.kill()
    await until_free(GPU=1)
    await started.wait()


@LEASES
async def test_a_task_may_not_take_a_lease(node: Node) -> None:
    @aiogpu.remote
    async def inside() -> None:
        await aiogpu.lease(num_gpus=1)

    with pytest.raises(NodeError, match="inside a task"):
        await inside.remote()
