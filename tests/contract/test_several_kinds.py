"""[B35] [B36] Nodes with devices of several kinds, and of a user's own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import aiogpu
from aiogpu.accelerators import AWS_NEURON_CORE, registry
from tests.contract.kind_tasks import Holder, seen, starts_another
from tests.support.until import LIMIT
from tests.unit.accelerators.vendors import Fpga, listing

pytestmark = [pytest.mark.usefixtures("no_leaks", "plain"), pytest.mark.either_loop]

CORES = "NEURON_RT_VISIBLE_CORES"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of this machine changes what a program sees."""
    for name in ("CUDA_VISIBLE_DEVICES", CORES):
        monkeypatch.delenv(name, raising=False)


async def cores_are_free() -> None:
    """Return when those that a process has had are given back: it ends afterwards."""
    async with asyncio.timeout(LIMIT):
        while (await aiogpu.available_resources())["neuron_cores"] != 4:
            await asyncio.sleep(0)


async def test_a_node_with_both(address: str) -> None:
    """Each task has the devices of one kind, and the other's are hidden."""
    resources = {"neuron_cores": 4, "license": 1}
    async with aiogpu.init(
        address=address, num_cpus=2, num_gpus=2, resources=resources
    ):
        total = await aiogpu.cluster_resources()
        told = {"GPU": 2.0, "neuron_cores": 4.0, "license": 1.0}
        assert told.items() <= total.items()
        assert total[f"accelerator_type:{AWS_NEURON_CORE}"] == 1.0
        cores = await seen.options(resources={"neuron_cores": 2}).remote()
        assert cores["ids"] == {"neuron_cores": ["0", "1"]}
        assert (cores[CORES], cores["CUDA_VISIBLE_DEVICES"]) == ("0,1", "")
        assert cores["resources"] == {"CPU": 1.0, "neuron_cores": 2.0}
        gpu = await seen.options(num_gpus=1, resources={"license": 1}).remote()
        assert gpu["ids"] == {"GPU": ["0"]}
        assert (gpu[CORES], gpu["CUDA_VISIBLE_DEVICES"]) == ("", "0")
        none = await seen.remote()
        assert none["ids"] == {}
        assert (none[CORES], none["CUDA_VISIBLE_DEVICES"]) == ("", "")
        typed = seen.options(
            resources={"neuron_cores": 1}, accelerator_type=AWS_NEURON_CORE
        )
        await cores_are_free()
        assert (await typed.remote())["ids"] == {"neuron_cores": ["0"]}
        with pytest.raises(aiogpu.InfeasibleError, match="neuron_cores 5 of 4"):
            await seen.options(resources={"neuron_cores": 5}).remote()
        with pytest.raises(aiogpu.InfeasibleError, match="TPU 1 of 0"):
            await seen.options(resources={"TPU": 1}).remote()


@pytest.mark.needs("processes")
async def test_a_task_with_cores_has_a_process_of_its_own(address: str) -> None:
    """[B26] And so has every other that has devices, unless it says otherwise."""
    async with aiogpu.init(
        address=address, num_cpus=1, num_gpus=0, resources={"neuron_cores": 1}
    ):
        isolated = seen.options(resources={"neuron_cores": 1})
        pids = [(await isolated.remote())["pid"] for _ in range(3)]
        assert len(set(pids)) == 3
        reused = isolated.options(max_calls=0)
        pids = [(await reused.remote())["pid"] for _ in range(3)]
        assert len(set(pids)) == 1


async def test_an_actor_holds_its_cores_for_life(address: str) -> None:
    async with aiogpu.init(
        address=address, num_cpus=1, num_gpus=0, resources={"neuron_cores": 3}
    ):
        holding = Holder.options(resources={"neuron_cores": 2})
        async with holding.remote() as actor:
            assert await actor.seen.remote() == ["0", "1"]
            assert (await aiogpu.available_resources())["neuron_cores"] == 1.0
            one = await seen.options(resources={"neuron_cores": 1}).remote()
            assert one["ids"] == {"neuron_cores": ["2"]}


@pytest.mark.needs("detection")
async def test_cores_are_detected_by_their_tool(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{os.environ['PATH']}:{listing(tmp_path)['PATH']}"
    monkeypatch.setenv("PATH", path)
    async with aiogpu.init(address=address, num_cpus=1, num_gpus=1):
        assert (await aiogpu.cluster_resources())["neuron_cores"] == 4.0
        all_ = await seen.options(resources={"neuron_cores": 4}).remote()
        assert all_[CORES] == "0,1,2,3"
    monkeypatch.setenv(CORES, "1-2")
    async with aiogpu.init(address=address, num_cpus=1):
        both = await seen.options(resources={"neuron_cores": 2}).remote()
        assert (both[CORES], both["ids"]) == ("1,2", {"neuron_cores": ["1", "2"]})
    with pytest.raises(
        aiogpu.errors.DeviceError, match=f"=3, but {CORES}='1-2' names 2"
    ):
        await aiogpu.init(address=address, resources={"neuron_cores": 3})


async def test_a_node_without_a_kind_leaves_its_variable_alone(address: str) -> None:
    """[B25] What is absent is nobody's affair; GPUs are hidden as ever."""
    async with aiogpu.init(address=address, num_cpus=1, num_gpus=0):
        facts = await seen.remote()
        assert (facts[CORES], facts["CUDA_VISIBLE_DEVICES"]) == (None, "")
        assert "neuron_cores" not in await aiogpu.cluster_resources()


class Counted(Fpga):
    """A user's vendor: two boards, of which a task has whole ones."""

    def quantity(self, value: object) -> int:
        return int(str(value)) * 10_000


@pytest.fixture
def registered() -> Iterator[None]:
    aiogpu.accelerators.register(Counted())
    yield
    registry._registered.clear()


@pytest.mark.usefixtures("registered")
@pytest.mark.needs("own vendors")
async def test_a_vendor_of_ones_own(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=2, num_gpus=1):
        assert (await aiogpu.cluster_resources())["FPGA"] == 2.0
        both = seen.options(num_gpus=1, resources={"FPGA": 2})
        facts = await both.remote()
        assert facts["ids"] == {"GPU": ["0"], "FPGA": ["0", "1"]}
        assert (facts["FPGA_VISIBLE"], facts["CUDA_VISIBLE_DEVICES"]) == ("0,1", "0")
        none = await seen.remote()
        assert none["FPGA_VISIBLE"] == ""
        assert "FPGA" in none["knows"], "its worker is told of it by the node"
        assert await starts_another.remote() == {"FPGA": ["0"]}
    async with aiogpu.init(address=address, resources={"FPGA": 3}, num_gpus=0):
        assert (await aiogpu.cluster_resources())["FPGA"] == 3.0


@pytest.mark.usefixtures("registered")
@pytest.mark.needs("own vendors")
@pytest.mark.needs("at once")
async def test_devices_of_two_kinds_are_held_side_by_side(address: str) -> None:
    resources = {"neuron_cores": 2, "FPGA": 1}
    async with aiogpu.init(
        address=address, num_cpus=3, num_gpus=0, resources=resources
    ):
        asked = [{"neuron_cores": 1}, {"neuron_cores": 1}, {"FPGA": 1}]
        facts = await asyncio.gather(
            *(seen.options(resources=each).remote() for each in asked)
        )
        ids = sorted(json.dumps(each["ids"]) for each in facts)
        assert ids[0] == '{"FPGA": ["0"]}'
        assert set(ids[1:]) <= {'{"neuron_cores": ["0"]}', '{"neuron_cores": ["1"]}'}
