"""Options of `init` at a join: what the node has is accepted, more is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from tests.contract import tasks
from tests.contract.raw_client import Service, service
from tests.support.program import run

pytestmark = [
    pytest.mark.usefixtures("service_forker", "no_leaks"),
    pytest.mark.either_loop,
]
GIB = 1 << 30


@pytest.fixture
def node(no_leaks: None) -> Iterator[Service]:
    with service(
        num_cpus=4,
        num_gpus=2,
        resources={"license": 3, "neuron_cores": 2},
        accelerator_type="A100",
        gpu_memory=80 * GIB,
        memory=8 * GIB,
        object_memory=GIB,
        cancel_grace=5.0,
    ) as running:
        yield running


async def test_what_the_node_has_is_accepted(node: Service) -> None:
    async with aiogpu.init(
        address=node.path,
        num_cpus=2,
        num_gpus=1,
        resources={"license": 3, "neuron_cores": 1},
        accelerator_type="A100",
        gpu_memory="79GiB",
        memory="4GiB",
        object_memory="512MiB",
        cancel_grace=5.0,
        spare_workers=2,
        memory_guard=True,
        log_to_driver=False,
    ):
        assert (await aiogpu.cluster_resources())["GPU"] == 2
        assert await tasks.add.options(num_gpus=1).remote(1, 2) == 3


@pytest.mark.parametrize(
    ("option", "value", "has"),
    [
        ("num_cpus", 5, "init(num_cpus=5): .* has CPU 4"),
        ("num_gpus", 3, "init(num_gpus=3): .* has GPU 2"),
        ("resources", {"license": 4}, "={'license': 4}.* has .license: 3"),
        ("resources", {"seats": 1}, "init(resources={'seats': 1}): .* has .seats: 0"),
        ("resources", {"neuron_cores": 3}, ".* has .neuron_cores: 2"),
        ("accelerator_type", "H100", "=.H100.*: .* has GPUs of type A100"),
        ("gpu_memory", "90GiB", "=.90GiB.*: .* has a GPU of 80GiB"),
        ("memory", "9GiB", "init(memory='9GiB'): .* has memory 8GiB"),
        ("object_memory", "2GiB", "=.2GiB.*: .* has 1GiB"),
        ("cancel_grace", 1.0, "init(cancel_grace=1.0): .* has cancel_grace=5.0"),
        ("foreign", "wait", "init(foreign='wait'): .* has foreign='ignore'"),
        ("spill_directory", "/tmp", "='/tmp'): .* has spill_directory=None"),
    ],
)
async def test_more_than_the_node_has_is_told(
    option: str, value: Any, has: str, node: Service
) -> None:
    pattern = has.replace("(", r"\(").replace("):", r"\):")
    with pytest.raises(aiogpu.OptionError, match=pattern) as error:
        await aiogpu.init(address=node.path, **{option: value})
    assert node.path in str(error.value)
    assert f"leave {option} out here" in str(error.value)
    assert "`aiogpu start --head`" in str(error.value)


PROGRAM = """
import aiogpu

@aiogpu.remote(num_gpus=0.25)
def embed(batch):
    return [len(text) for text in batch]

async def main():
    async with aiogpu.init(num_gpus=1, log_to_driver=False):
        print(await embed.remote(["a", "bc"]))

aiogpu.run(main())
"""


async def test_the_program_of_the_readme_runs_on_a_shared_node(node: Service) -> None:
    assert run(PROGRAM, AIOGPU_ADDRESS=node.path) == "[1, 2]\n"


async def test_it_is_told_where_the_address_comes_from(
    node: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOGPU_ADDRESS", node.path)
    with pytest.raises(aiogpu.OptionError, match="since AIOGPU_ADDRESS='/tmp/"):
        await aiogpu.init(num_gpus=3)


async def test_a_node_without_gpus_or_their_memory(no_leaks: None) -> None:
    with service(num_gpus=0) as node:
        with pytest.raises(aiogpu.OptionError, match="has no GPU"):
            await aiogpu.init(address=node.path, gpu_memory="1GiB")
        with pytest.raises(aiogpu.OptionError, match="has GPU 0"):
            await aiogpu.init(address=node.path, num_gpus=1)


async def test_what_is_not_known_of_a_services_gpus_is_told_of_its_start(
    node: Service, tmp_path: Path
) -> None:
    with service(num_gpus=1) as unknown:
        with pytest.raises(aiogpu.OptionError, match="has GPUs of unknown memory"):
            await aiogpu.init(address=unknown.path, gpu_memory="1GiB")
        with pytest.raises(aiogpu.OptionError, match="has GPUs of unknown type"):
            await aiogpu.init(address=unknown.path, accelerator_type="A100")
        async with aiogpu.init(address=unknown.path, log_to_driver=False):
            with pytest.raises(aiogpu.InfeasibleError) as error:
                await tasks.add.options(gpu_memory="1GiB").remote(1, 2)
            assert "`aiogpu start --gpu-memory 80GiB`" in str(error.value)
            with pytest.raises(aiogpu.InfeasibleError) as error:
                await tasks.add.options(num_gpus=1, accelerator_type="T4").remote(1, 2)
            assert "`aiogpu start --accelerator-type" in str(error.value)
