"""Placements and leases: what is reserved for tasks, or for code that is no task."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import warnings
from pathlib import Path

import pytest

import aiogpu
from tests.contract import device_tasks, tasks
from tests.support.until import LIMIT, until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]


async def until_free(name: str, amount: float) -> None:
    async with asyncio.timeout(LIMIT):
        while (await aiogpu.available_resources())[name] != amount:
            await asyncio.sleep(0)


async def test_a_placement_holds_its_bundles_and_tasks_run_on_their_devices(
    address: str,
) -> None:
    async with aiogpu.init(address=address, num_gpus=3, num_cpus=4):
        async with aiogpu.placement([{"GPU": 1, "CPU": 2}, {"GPU": 0.5}]) as group:
            assert group.is_ready
            assert group.bundles == ({"CPU": 2.0, "GPU": 1.0}, {"GPU": 0.5})
            assert (group.name, group.strategy, len(group)) == ("placement", "PACK", 2)
            await until_free("CPU", 2)
            await until_free("GPU", 1.5)
            assert (await group.why()).state == "running"
            first = device_tasks.where.options(placement=group, bundle=0)
            second = device_tasks.where.options(placement=group, bundle=1)
            assert await first.remote() == ([0], "0", {"CPU": 1.0, "GPU": 0.25})
            assert await second.remote() == ([1], "1", {"GPU": 0.25})
            await until_free("GPU", 1.5)
            anywhere = device_tasks.where.options(placement=group, num_gpus=1)
            assert (await anywhere.remote())[0] == [0]
            in_none = device_tasks.plain.options(placement=group, num_cpus=2)
            assert await in_none.remote() == []
            add = device_tasks.adds.options(placement=group)
            assert await add.remote(await add.remote(1, 2), add.remote(3, 4)) == 10
        await until_free("GPU", 3)
        await until_free("CPU", 4)


async def test_what_is_given_before_it_is_ready_waits(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1, num_cpus=4):
        async with aiogpu.placement([{"GPU": 0.5}]):
            group = aiogpu.placement([{"GPU": 1}], name="group")
            handle = device_tasks.where.options(placement=group).remote()
            cancelled = device_tasks.where.options(placement=group).remote()
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
        await until_free("GPU", 1)


async def test_an_actor_lives_in_a_bundle(address: str) -> None:
    async with (
        aiogpu.init(address=address, num_gpus=2, num_cpus=4),
        aiogpu.placement([{"GPU": 1}, {"GPU": 0.5}]) as group,
    ):
        actor = device_tasks.Actor.options(placement=group, bundle=1).remote()
        assert await actor.where.remote() == [1]
        await until_free("GPU", 0.5)
        aiogpu.kill(actor)
        again = device_tasks.Actor.options(placement=group, bundle=1).remote()
        assert await again.where.remote() == [1]


async def test_a_removed_placement_ends_what_runs_in_it(
    address: str, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    async with aiogpu.init(address=address, num_gpus=2, num_cpus=4):
        group = await aiogpu.placement([{"GPU": 1}, {"GPU": 1}], name="group")
        actor = device_tasks.Actor.options(placement=group, bundle=0).remote()
        await actor
        forever = device_tasks.forever.options(placement=group, bundle=1)
        runs = forever.remote(begun)
        await until(begun.exists)
        waits = forever.options(num_gpus=1).remote(begun)
        await group.remove()
        await group.remove()
        for handle in (runs, waits):
            with pytest.raises(
                aiogpu.errors.PlacementRemovedError, match="group"
            ) as caught:
                await handle
            assert caught.value.placement == "group"
        with pytest.raises(aiogpu.ActorDiedError, match="was removed") as dead:
            await actor.where.remote()
        assert isinstance(dead.value.__cause__, aiogpu.errors.PlacementRemovedError)
        late = forever.remote(begun)
        with pytest.raises(
            aiogpu.errors.PlacementRemovedError, match="was removed before"
        ):
            await late
        with pytest.raises(aiogpu.errors.PlacementRemovedError, match="was removed"):
            await group
        await until_free("GPU", 2)


async def test_an_actor_in_a_removed_placement_never_lives(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1, num_cpus=4):
        group = await aiogpu.placement([{"GPU": 1}])
        await group.remove()
        actor = device_tasks.Actor.options(placement=group).remote()
        with pytest.raises(aiogpu.ActorDiedError) as dead:
            await actor.where.remote()
        assert isinstance(dead.value.__cause__, aiogpu.errors.PlacementRemovedError)
        await until_free("GPU", 1)


async def test_a_placement_that_waits_is_removed_with_what_waits_for_it(
    address: str,
) -> None:
    async with aiogpu.init(address=address, num_gpus=1, num_cpus=4):
        async with aiogpu.placement([{"GPU": 1}]):
            group = aiogpu.placement([{"GPU": 1}])
            handle = device_tasks.where.options(placement=group).remote()
            await group.remove()
            with pytest.raises(aiogpu.errors.PlacementRemovedError):
                await handle
            with pytest.raises(aiogpu.errors.PlacementRemovedError):
                await group.ready()
        await until_free("GPU", 1)


async def test_who_gives_up_waiting_in_a_block_asks_no_more(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1, num_cpus=4):
        async with aiogpu.placement([{"GPU": 1}]):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), aiogpu.placement([{"GPU": 1}]):
                    pytest.fail("it was granted")
            status = await aiogpu.status()
            assert not status.waiting
        await until_free("GPU", 1)


@pytest.mark.parametrize("kind", ["parent", "plain_parent"])
async def test_a_task_has_its_children_run_in_its_placement(
    address: str, kind: str
) -> None:
    async with (
        aiogpu.init(address=address, num_gpus=2, num_cpus=4),
        aiogpu.placement([{"GPU": 1, "CPU": 1}]) as group,
    ):
        function = getattr(device_tasks, kind).options(placement=group, bundle=0)
        assert await function.remote(group) == [0]


async def test_a_task_neither_makes_a_placement_nor_waits_for_one(address: str) -> None:
    async with (
        aiogpu.init(address=address, num_cpus=2),
        aiogpu.placement([{"CPU": 1}]) as group,
    ):
        assert "inside a task" in await device_tasks.asks_for_one.remote()
        assert "program that has made it" in await device_tasks.waits_for.remote(group)
        other = pickle.loads(pickle.dumps(group))
        assert (other.id, other.bundles) == (group.id, group.bundles)


async def test_what_can_never_be_granted_is_refused(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=2, num_cpus=4) as node:
        assert node.is_open
        for bundles, strategy, why in (
            ([{"GPU": 3}], "PACK", "lacks GPU 3 of 2"),
            ([{"GPU": 1}] * 3, "PACK", "do not all fit at once"),
            ([{"GPU": 1}] * 2, "STRICT_SPREAD", "on a machine of its own"),
            ([{"licence": 1}], "PACK", "lacks licence 1 of 0"),
        ):
            with pytest.raises(aiogpu.InfeasibleError, match=why):
                await aiogpu.placement(bundles, strategy)  # type: ignore[arg-type]


async def test_before_the_node_is_open(address: str) -> None:
    opening = aiogpu.init(address=address, num_gpus=1, num_cpus=2)
    node = asyncio.ensure_future(_opened(opening))
    await asyncio.sleep(0)
    group = aiogpu.placement([{"GPU": 1}])
    never = aiogpu.placement([{"GPU": 2}])
    handle = device_tasks.where.options(placement=group).remote()
    lost = device_tasks.where.options(placement=never).remote()
    assert (await handle)[0] == [0]
    assert (await group).is_ready
    with pytest.raises(aiogpu.InfeasibleError):
        await never
    with pytest.raises(aiogpu.errors.PlacementRemovedError, match="never asked for"):
        await lost
    await node
    await aiogpu.shutdown()


async def _opened(opening: aiogpu.types.Node) -> None:
    await opening


@pytest.mark.needs("ledger")
async def test_a_member_of_a_type_that_its_bundle_has_not(address: str) -> None:
    async with aiogpu.init(
        address=address, num_gpus=1, num_cpus=2, accelerator_type="T4"
    ):
        async with aiogpu.placement([{"GPU": 1}]):
            group = aiogpu.placement([{"GPU": 1}])
            early = device_tasks.where.options(placement=group, accelerator_type="A100")
            handle = early.remote()
        with pytest.raises(aiogpu.InfeasibleError, match="type T4"):
            await handle
        with pytest.raises(aiogpu.InfeasibleError, match="type T4"):
            await early.remote()
        fits = device_tasks.where.options(placement=group, accelerator_type="T4")
        assert (await fits.remote())[0] == [0]


async def test_memory_of_gpus_is_limited_within_a_bundle(address: str) -> None:
    async with (
        aiogpu.init(address=address, num_gpus=1, num_cpus=2, gpu_memory="8GiB"),
        aiogpu.placement([{"GPU": 0.5}]) as group,
    ):
        fits = device_tasks.where.options(placement=group, gpu_memory="4GiB")
        assert (await fits.remote())[0] == [0]
        with pytest.raises(aiogpu.InfeasibleError):
            await fits.options(gpu_memory="5GiB").remote()


async def test_a_placement_ends_with_its_node(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1, num_cpus=2):
        group = await aiogpu.placement([{"GPU": 1}], "SPREAD", name="g")
        waits = aiogpu.placement([{"GPU": 1}])
        assert repr(group) == "<Placement g SPREAD [{GPU: 1}]>"
    with pytest.raises(aiogpu.errors.NodeClosedError):
        await group
    with pytest.raises(aiogpu.errors.NodeClosedError):
        await waits
    await group.remove()


@pytest.mark.needs("priority")
@pytest.mark.needs("at once")
async def test_the_one_with_priority_goes_first(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1, num_cpus=2):
        async with aiogpu.placement([{"GPU": 1}]):
            later = aiogpu.placement([{"GPU": 1}])
            sooner = aiogpu.placement([{"GPU": 1}], priority=1)
        await sooner
        assert not later.is_ready
        await sooner.remove()
        await later


async def test_members_of_the_type_of_their_bundle(address: str) -> None:
    of_type = "accelerator_type:T4"
    async with (
        aiogpu.init(address=address, num_gpus=1, num_cpus=2, accelerator_type="T4"),
        aiogpu.placement([{"GPU": 1, of_type: 0.001}]) as group,
    ):
        typed = device_tasks.where.options(placement=group, accelerator_type="T4")
        found = await asyncio.gather(typed.remote(), typed.remote())
        assert [ids for ids, *_ in found] == [[0], [0]]


@pytest.mark.needs("device memory")
async def test_a_bundle_reserves_memory_of_a_gpu(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=2, num_cpus=4, gpu_memory="8GiB"):
        bundles = [{"gpu_memory": "6GiB"}, {"GPU": 0.5, "gpu_memory": "3GiB"}]
        async with aiogpu.placement(bundles) as group:
            free = await aiogpu.available_resources()
            assert free["gpu_memory"] == 7 << 30
            assert group.bundles[0] == {"gpu_memory": float(6 << 30)}
            alone = device_tasks.where.options(num_gpus=0, gpu_memory="4GiB")
            found = await alone.options(placement=group, bundle=0).remote()
            assert found[2]["gpu_memory"] == 4 << 30
            seen = (await aiogpu.status()).placements[0]
            assert seen.bundles[1].free["gpu_memory"] == 3 << 30
            with pytest.raises(aiogpu.InfeasibleError):
                await alone.options(placement=group, gpu_memory="7GiB").remote()
            half = device_tasks.where.options(
                placement=group, bundle=1, gpu_memory="3GiB"
            )
            assert (await half.remote())[1] in ("0", "1")
            with pytest.raises(aiogpu.InfeasibleError):
                await half.options(gpu_memory="4GiB").remote()
            held = aiogpu.placement([{"gpu_memory": "6GiB"}])
            assert not held.is_ready
            assert "gpu_memory" in str(held.bundles)
        await held
        await held.remove()
        await until_free("gpu_memory", 16 << 30)


async def test_a_bundle_that_names_memory_is_granted_or_refused_in_words(
    address: str,
) -> None:
    async with aiogpu.init(address=address, num_gpus=1, num_cpus=1):
        # Nobody knows how much memory the GPU has; and Ray reserves none.
        with pytest.raises(
            (aiogpu.InfeasibleError, aiogpu.OptionError), match="memory"
        ):
            await aiogpu.placement([{"GPU": 0.5, "gpu_memory": "1GiB"}])


async def until_waits(lease: aiogpu.types.Lease) -> aiogpu.types.Why:
    async with asyncio.timeout(LIMIT):
        while not (repr(lease).endswith("waiting>") and (why := await lease.why())):
            await asyncio.sleep(0)
        while why.state != "waiting":
            why = await lease.why()
    return why


@pytest.mark.needs("leases")
async def test_a_lease_keeps_others_away_and_says_where(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=2, num_cpus=2):
        async with aiogpu.lease(num_gpus=1, name="mine") as gpu:
            assert gpu.is_held
            assert gpu.ids == [0]
            assert gpu.accelerators == {"GPU": [0]}
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
        await until_free("GPU", 2)


@pytest.mark.needs("leases")
async def test_a_lease_waits_and_says_why(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
        held = await aiogpu.lease(num_gpus=1, name="first")
        second = aiogpu.lease(num_gpus=0.5, name="second")
        waiting = asyncio.ensure_future(second)
        why = await until_waits(second)
        assert "held by first" in str(why)
        status = await aiogpu.status()
        assert [task.name for task in status.waiting] == ["second"]
        await held.release()
        assert (await waiting).ids == [0]
        await second.release()


@pytest.mark.needs("leases")
async def test_memory_is_limited_as_for_a_task(address: str) -> None:
    async with (
        aiogpu.init(address=address, num_gpus=1, gpu_memory="8GiB"),
        aiogpu.lease(gpu_memory="2GiB") as gpu,
    ):
        assert gpu.gpu_memory == 2 << 30
        assert gpu.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.25"


@pytest.mark.needs("leases")
async def test_what_is_given_up_while_it_waits_holds_nothing(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
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
        await until_free("GPU", 1)


@pytest.mark.needs("leases")
async def test_what_can_never_be_is_refused(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
        with pytest.raises(aiogpu.InfeasibleError, match="GPU 2 of 1"):
            await aiogpu.lease(num_gpus=2)
        with pytest.raises(aiogpu.errors.MisuseError, match="awaited before"):
            async with aiogpu.lease(num_gpus=1) as gpu:
                await gpu


@pytest.mark.needs("leases")
async def test_a_task_takes_its_turn_after_a_lease(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
        async with aiogpu.lease(num_gpus=1):
            handle = tasks.add.options(num_gpus=1).remote(1, 2)
            why = await handle.why()
            assert not handle.done()
            assert why.state in ("waiting", "opening")
        assert await handle == 3


@pytest.mark.needs("leases")
async def test_a_forgotten_lease_is_given_back(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
        gpu = await aiogpu.lease(num_gpus=1, name="forgotten")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del gpu
            gc.collect()
        assert any("forgotten was never released" in str(w.message) for w in caught)
        await until_free("GPU", 1)


@pytest.mark.needs("leases")
async def test_a_lease_ends_with_its_node(address: str) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
        gpu = await aiogpu.lease(num_gpus=1)
        lost = asyncio.ensure_future(gpu.lost())
        await asyncio.sleep(0)
    assert isinstance(await lost, aiogpu.errors.NodeClosedError)
    assert not gpu.is_held
    await gpu.release()


@pytest.mark.needs("leases")
@pytest.mark.needs("processes")
async def test_it_is_held_until_its_processes_have_ended(
    address: str, tmp_path: Path
) -> None:
    async with aiogpu.init(address=address, num_gpus=1):
        async with aiogpu.lease(num_gpus=1) as gpu:
            started = await asyncio.create_subprocess_exec(
                "sleep", "60", env={**os.environ, **gpu.environ}
            )
        async with asyncio.timeout(LIMIT):
            while True:
                (task,) = (await aiogpu.status()).tasks
                if task.state == "stopping":
                    break
        assert (await aiogpu.available_resources())["GPU"] == 0
        started.kill()
        await until_free("GPU", 1)
        await started.wait()


@pytest.mark.needs("leases")
@pytest.mark.either_loop
async def test_a_task_has_what_its_options_say(address: str) -> None:
    @aiogpu.remote
    async def inside() -> None:
        await aiogpu.lease(num_gpus=1)

    async with aiogpu.init(address=address, num_gpus=1):
        with pytest.raises(aiogpu.errors.NodeError, match="inside a task"):
            await inside.remote()
