"""Placements that outlive the programs that have asked for them: nodes and clusters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

import aiogpu
from tests import program
from tests.engines import placement_tasks as tasks
from tests.engines.clusters import Cluster
from tests.engines.raw_client import Service, service
from tests.until import LIMIT

MAKES = """
    import asyncio, sys
    import aiogpu

    async def main():
        async with aiogpu.init(address=sys.argv[1]):
            bundles = [{"GPU": 1, "CPU": 1}]
            await aiogpu.placement(bundles, name="kept", lifetime="detached")
            aiogpu.placement([{"CPU": 1}], name="its own")

    asyncio.run(main())
"""
USES = """
    import asyncio, sys
    import aiogpu

    @aiogpu.remote(num_gpus=1)
    def ids():
        return aiogpu.get_gpu_ids()

    async def main():
        async with aiogpu.init(address=sys.argv[1]):
            group = await aiogpu.get_placement("kept")
            print(await ids.options(placement=group).remote(), *group.bundles)
            if len(sys.argv) > 2:
                await group.remove()
                try:
                    await aiogpu.get_placement("kept")
                except aiogpu.PlacementNameError as error:
                    print("gone")

    asyncio.run(main())
"""
FOUND = "[0] {'CPU': 1.0, 'GPU': 1.0}\n"


@pytest.mark.usefixtures("service_forker", "no_leaks")
@pytest.mark.either_loop
async def test_on_a_node() -> None:
    with service(num_cpus=2, num_gpus=1) as here:
        async with aiogpu.init(address=here.path, log_to_driver=False):
            await _uses(here)


async def _uses(here: Service) -> None:
    await asyncio.to_thread(program.run, MAKES, here.path)
    (seen,) = (await aiogpu.status()).placements
    assert (seen.name, seen.is_detached, seen.pid) == ("kept", True, 0)
    assert "kept  PACK  ready, detached" in str(await aiogpu.status())
    known = await aiogpu.get_placement("kept")
    handle = tasks.where.options(placement=known).remote()
    assert (await handle)[0] == [0]
    assert await asyncio.to_thread(program.run, USES, here.path) == FOUND
    told = await asyncio.to_thread(program.run, USES, here.path, "removes")
    assert told == f"{FOUND}gone\n"
    with pytest.raises(aiogpu.PlacementRemovedError, match="kept was removed"):
        await known
    with pytest.raises(aiogpu.PlacementRemovedError):
        await tasks.where.options(placement=known).remote()
    # It is free when the processes of the tasks that were in it have ended.
    async with asyncio.timeout(LIMIT):
        while (await aiogpu.available_resources())["GPU"] < 1:
            await asyncio.sleep(0)


@pytest.fixture(scope="module")
def cluster(in_no_cluster: None) -> Iterator[Cluster]:
    with Cluster(num_cpus=3, num_gpus=1) as cluster:
        yield cluster


@pytest.mark.ray
def test_on_a_cluster(cluster: Cluster) -> None:
    variables = {**cluster.variables, "RAY_ADDRESS": cluster.address}
    program.run(MAKES, "ray", **variables)
    assert program.run(USES, "ray", "removes", **variables) == f"{FOUND}gone\n"
