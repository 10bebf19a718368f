"""What a program brings to a Ray cluster, and aiogpu beside plain Ray."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiogpu
from aiogpu import errors
from tests.contract import tasks
from tests.contract.clusters import USUAL
from tests.contract.ray_actor_classes import Adder, Grouped

pytestmark = [pytest.mark.ray, pytest.mark.either_loop]


@pytest.fixture
async def ray(rayed: None) -> AsyncIterator[Any]:
    """Ray's own module, in a program that has joined a cluster by aiogpu."""
    async with aiogpu.init(address="ray", **USUAL):
        yield importlib.import_module("ray")


async def test_plain_ray_calls_named_actors_of_aiogpu(ray: Any) -> None:
    adder = await Adder.options(name="adder").remote()
    grouped = await Grouped.options(name="grouped").remote()
    threads = await Adder.options(name="threads", max_concurrency=2).remote()
    assert await adder.add.remote(1) == 1

    def call() -> list[object]:
        by_name = [
            ray.get_actor(name, namespace="aiogpu")
            for name in ("adder", "grouped", "threads")
        ]
        return [
            ray.get(by_name[0].add.remote(2)),
            ray.get(by_name[0].add.remote(what=3)),
            ray.get(by_name[1].total.remote([])),
            ray.get(by_name[2].add.remote(4)),
        ]

    assert await asyncio.to_thread(call) == [3, 6, 0, 4]
    assert await adder.add.remote(1) == 7
    assert await threads.add.remote(1) == 5
    assert await grouped.total.remote([]) == 0


async def test_named_actors_of_plain_ray_are_called_by_ray(ray: Any) -> None:
    class Plain:
        def add(self, what: int) -> int:
            return what + 1

    options = {"name": "plain", "namespace": "aiogpu", "num_cpus": 0}
    made = ray.remote(Plain).options(**options).remote()
    told = r"plain Ray.*await ray\.get_actor\('plain', namespace='aiogpu'\)"
    with pytest.raises(errors.ActorNameError, match=told):
        await aiogpu.get_actor("plain")
    assert await made.add.remote(1) == 2


@aiogpu.remote(num_cpus=4)
async def await_child() -> int:
    return int(await tasks.add.options(num_cpus=4).remote(1))


@aiogpu.remote(num_cpus=4)
def get_child() -> int:
    return int(aiogpu.get(tasks.add.options(num_cpus=4).remote(1)))


@pytest.mark.parametrize("parent", [await_child, get_child], ids=["async", "plain"])
async def test_a_waiting_parent_lends_all_cpus_of_the_cluster(
    ray: Any, parent: Any
) -> None:
    """Else both would wait for ever."""
    assert await parent.remote() == 2


class OnlyHere:
    """Needs a module that no worker can import."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return importlib.import_module, ("only_here",)


async def test_a_missing_module_names_the_key_that_brings_it(ray: Any) -> None:
    with pytest.raises(errors.DeserializationError) as caught:
        await tasks.echo.remote(OnlyHere())
    told = str(caught.value)
    assert "No module named 'only_here'" in told
    for key in ("runtime_env=", "'working_dir': '.'", "'py_modules'", "'pip'"):
        assert key in told


@pytest.mark.parametrize("address", ["local", "inline", "/nowhere", "auto"])
async def test_a_runtime_env_is_refused_elsewhere(address: str) -> None:
    with pytest.raises(errors.OptionError, match=r"runtime_env.*address='ray'"):
        await aiogpu.init(address=address, runtime_env={"pip": ["einops"]})


async def test_gpu_memory_is_a_share_of_a_known_gpu(
    rayed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.contract.rayed.OF_PROGRAMS", ("gpu_memory",))
    cluster = {"address": "ray", **USUAL}
    six = tasks.where.options(gpu_memory="6GiB")
    async with aiogpu.init(**cluster):
        with pytest.raises(errors.OptionError, match=r"gpu_memory.*num_gpus=0\.5"):
            six.remote()
    async with aiogpu.init(**cluster, gpu_memory="8GiB"):
        first, second = await asyncio.gather(six.remote(), six.remote())
        assert [first["ids"], second["ids"]] in ([[0], [1]], [[1], [0]], [[0], [0]])
        assert first["resources"]["GPU"] == 0.75
        holder = await Adder.options(gpu_memory="6GiB").remote()
        assert await holder.add.remote(1) == 1
        with pytest.raises(errors.InfeasibleError, match="each GPU of the cluster"):
            tasks.where.options(gpu_memory="9GiB").remote()
