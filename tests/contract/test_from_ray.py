"""The programs and promises of Ray's GPU page, on aiogpu.

`design/ray-gpu-page.md` goes through that page and cites these tests and tests of other
files. The GPUs are logical, except those of the NVML stub.
"""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import replace

import pytest

import aiogpu
from aiogpu import errors
from tests.contract import tasks
from tests.support.gate import Gate, pass_gate
from tests.support.program import run
from tests.unit.accelerators.stub_fixtures import nvml, stub_library
from tests.unit.accelerators.stub_nvml import StubNvml, gpus

__all__ = ["nvml", "stub_library"]
pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of this machine changes what a program sees."""
    monkeypatch.delenv(VISIBLE, raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)


DETECTED = """
    import aiogpu

    @aiogpu.remote(num_gpus=1)
    def use_gpu():
        return aiogpu.get_gpu_ids()

    async def main():
        for wanted in (None, 2, 5):
            async with aiogpu.init(num_cpus=1, num_gpus=wanted):
                resources = await aiogpu.cluster_resources()
                types = sorted(name[17:] for name in resources if ":" in name)
                print(resources["GPU"], *types)
        async with aiogpu.init(num_cpus=1):
            print(await use_gpu.remote())
            print(await use_gpu.options(accelerator_type="T4").remote())
            print(await use_gpu.options(num_gpus=2, accelerator_type="A100").remote())

    aiogpu.run(main())
"""


def test_gpus_are_detected_unless_num_gpus_is_given(nvml: StubNvml) -> None:
    """A type chooses among cards of several kinds."""
    cards = gpus(3)
    cards[1] = replace(cards[1], name="Tesla T4")
    nvml.write(cards)
    assert run(DETECTED, **nvml.environ).splitlines() == [
        "3.0 A100 T4",
        "2.0 A100 T4",
        "5.0 A100 T4",
        "[0]",
        "[1]",
        "[0, 2]",
    ]


@pytest.mark.usefixtures("each_engine")
async def test_more_gpus_than_there_are_may_be_declared() -> None:
    """Only a task that uses a missing GPU fails."""
    async with aiogpu.init(num_cpus=1, num_gpus=64):
        facts = await tasks.where.options(num_gpus=64).remote()
        assert facts["ids"] == list(range(64))
        assert facts["visible"] == ",".join(map(str, range(64)))


async def test_a_preset_variable_gives_devices_1_and_3(
    monkeypatch: pytest.MonkeyPatch, gate: Gate
) -> None:
    """Ids are integers; Ray gives texts under a preset variable."""
    monkeypatch.setenv(VISIBLE, "1,3")
    async with aiogpu.init(num_cpus=3, num_gpus=2):
        holder = tasks.where_gated.options(num_gpus=1).remote(gate.path, "holder")
        await gate.entered("holder")
        second = await tasks.where.options(num_gpus=1).remote()
        assert (second["ids"], second["visible"]) == ([3], "3")
        assert second["accelerators"]["GPU"] == ["3"]
        assert (await tasks.where.remote())["visible"] == ""
        gate.release("holder")
        assert await holder == [1]


@pytest.mark.usefixtures("each_engine")
async def test_num_gpus_counts_among_the_preset_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first of them are used; more is an error."""
    monkeypatch.setenv(VISIBLE, "1,3")
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        assert (await tasks.where.options(num_gpus=1).remote())["ids"] == [1]
        with pytest.raises(errors.InfeasibleError, match="GPU 2 of 1"):
            tasks.where.options(num_gpus=2).remote()
    with pytest.raises(errors.DeviceError, match="num_gpus=3"):
        await aiogpu.init(num_gpus=3)


async def test_the_second_task_with_a_gpu_prints_gpu_1(
    gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's first program; a task stands for its actor."""

    @aiogpu.remote(num_gpus=1)
    def use_gpu() -> None:
        ids = aiogpu.get_runtime_context().get_accelerator_ids()["GPU"]
        print(f"GPU IDs: {aiogpu.get_gpu_ids()}")
        print(f"accelerator ids: {ids}")
        print(f"CUDA_VISIBLE_DEVICES: {os.environ['CUDA_VISIBLE_DEVICES']}")

    async with aiogpu.init(num_cpus=2, num_gpus=2):
        first = tasks.where_gated.options(num_gpus=1).remote(gate.path, "first")
        await gate.entered("first")
        await use_gpu.remote()
        gate.release("first")
        assert await first == [0]
    out, err = capsys.readouterr()
    lines = re.fullmatch(
        r"\(use_gpu pid=(\d+)\) GPU IDs: \[1\]\n"
        r"\(use_gpu pid=\1\) accelerator ids: \['1'\]\n"
        r"\(use_gpu pid=\1\) CUDA_VISIBLE_DEVICES: 1\n",
        out,
    )
    assert lines is not None, out
    assert err == ""


async def test_four_quarters_at_once_need_four_cpus(gate: Gate) -> None:
    """A task takes one CPU unless it says otherwise."""

    @aiogpu.remote(num_gpus=0.25)
    def f(path: str, name: str) -> str:
        return pass_gate(path, name)

    async with aiogpu.init(num_cpus=4, num_gpus=1):
        handles = [f.remote(gate.path, f"with-4-{i}") for i in range(4)]
        await gate.entered(*(f"with-4-{i}" for i in range(4)))
        free = await aiogpu.available_resources()
        assert {"CPU": 0.0, "GPU": 0.0}.items() <= free.items()
        gate.release(*(f"with-4-{i}" for i in range(4)))
        await asyncio.gather(*handles)

    async with aiogpu.init(num_cpus=2, num_gpus=1):
        handles = [f.remote(gate.path, f"with-2-{i}") for i in range(4)]
        await gate.entered("with-2-0", "with-2-1")
        node = await aiogpu.status()
        reasons = [task.reason for task in node.waiting]
        # If one has waited for long, the CPU is kept for it, and the other says so.
        assert [reason[:24] for reason in reasons] == ["waits for CPU 1 (free: 0"] * 2
        gate.release("with-2-0", "with-2-1")
        await gate.let_pass("with-2-2", "with-2-3")
        await asyncio.gather(*handles)

    async with aiogpu.init(num_cpus=1, num_gpus=1):
        small = f.options(num_cpus=0.25)
        handles = [small.remote(gate.path, f"with-1-{i}") for i in range(4)]
        await gate.entered(*(f"with-1-{i}" for i in range(4)))
        gate.release(*(f"with-1-{i}" for i in range(4)))
        await asyncio.gather(*handles)


async def test_a_share_waits_when_only_the_sum_of_two_gpus_fits(gate: Gate) -> None:
    """Two devices have 0.3 free each; 0.5 waits, and 0.3 overtakes it."""
    async with aiogpu.init(num_cpus=4, num_gpus=2):
        most = tasks.where_gated.options(num_gpus=0.7)
        handles = [most.remote(gate.path, name) for name in ("a", "b")]
        await gate.entered("a", "b")
        half = tasks.where_gated.options(num_gpus=0.5).remote(gate.path, "half")
        assert (await aiogpu.available_resources())["GPU"] == 0.6
        (waiting,) = (await aiogpu.status()).waiting
        assert waiting.reason == "waits for GPU 0.5 (free by device: 0: 0.3, 1: 0.3)"
        small = tasks.where.options(num_gpus=0.3)
        assert (await small.remote())["ids"] == [0]
        assert gate.inside == {"a", "b"}
        gate.release("b")
        await gate.entered("half")
        gate.release("a", "half")
        assert await half == [1]
        await asyncio.gather(*handles)


async def test_a_third_fits_three_times_on_one_gpu(gate: Gate) -> None:
    """A third is 0.3333, so that 0.0001 is left, as in Ray."""
    async with aiogpu.init(num_cpus=3, num_gpus=1):
        third = tasks.where_gated.options(num_gpus=1 / 3)
        handles = [third.remote(gate.path, name) for name in "abc"]
        await gate.entered(*"abc")
        assert (await aiogpu.available_resources())["GPU"] == 0.0001
        gate.release(*"abc")
        assert await asyncio.gather(*handles) == [[0]] * 3


@pytest.mark.needs("waiting for resources")
@pytest.mark.usefixtures("each_engine")
async def test_available_resources_keeps_keys_at_zero(gate: Gate) -> None:
    """Ray leaves the key out."""
    async with aiogpu.init(num_cpus=1, num_gpus=1):
        everything = tasks.gated_coroutine.options(num_gpus=1)
        handle = everything.remote(gate.path, "all")
        await gate.entered("all")
        free = await aiogpu.available_resources()
        assert {"CPU": 0.0, "GPU": 0.0}.items() <= free.items()
        gate.release("all")
        await handle


async def test_leaks_of_a_task_need_a_reused_worker() -> None:
    """The page's program of a task that does not clean up.

    A task may also ignore its assignment.
    """

    def leak() -> bool:
        is_leaked = "AIOGPU_TEST_LEAK" in os.environ
        os.environ["AIOGPU_TEST_LEAK"] = "1"
        seen, os.environ[VISIBLE] = os.environ[VISIBLE], "0,1,2,3"
        assert seen == "0"
        return is_leaked

    async with aiogpu.init(num_cpus=1, num_gpus=1):
        isolated = aiogpu.remote(num_gpus=1)(leak)
        assert [await isolated.remote() for _ in range(3)] == [False] * 3
        reused = aiogpu.remote(num_gpus=1, max_calls=0)(leak)
        assert [await reused.remote() for _ in range(3)] == [False, True, True]


async def test_isolation_follows_the_effective_options() -> None:
    """In Ray the decorator alone decides."""

    @aiogpu.remote
    def on_cpu() -> int:
        return os.getpid()

    @aiogpu.remote(num_gpus=1)
    def on_gpu() -> int:
        return os.getpid()

    async with aiogpu.init(num_cpus=1, num_gpus=1):
        with_gpu = on_cpu.options(num_gpus=1)
        assert len({await with_gpu.remote() for _ in range(3)}) == 3
        without = on_gpu.options(num_gpus=0)
        assert len({await without.remote() for _ in range(3)}) == 1
        assert len({await on_gpu.remote() for _ in range(2)}) == 2


async def test_a_share_is_free_only_when_the_process_has_ended(gate: Gate) -> None:
    """The task has answered, and its process has yet to end."""

    @aiogpu.remote(num_gpus=1)
    def leave_slowly(path: str) -> int:
        import atexit

        atexit.register(pass_gate, path, "leaving")
        return os.getpid()

    async with aiogpu.init(num_cpus=2, num_gpus=1):
        pid = await leave_slowly.remote(gate.path)
        after = tasks.gated.options(num_gpus=1, name="after")
        handle = after.remote(gate.path, "after")
        await gate.entered("leaving")
        assert await tasks.add.remote(1) == 2, "there is a CPU to run on"
        node = await aiogpu.status()
        assert node.available["GPU"] == 0.0
        ((holder,),) = (device.holders for device in node.devices)
        assert (holder.pid, holder.task) == (pid, None)
        assert [task.name for task in node.waiting] == ["after"]
        assert "after" not in gate.pids

        gate.release("leaving")
        await gate.entered("after")
        assert not os.path.exists(f"/proc/{pid}")
        gate.release("after")
        await handle


@pytest.mark.needs("waiting for resources")
@pytest.mark.usefixtures("each_engine")
async def test_a_type_is_a_thousandth_of_its_own_resource(gate: Gate) -> None:
    """The page's last program, on a node that declares its type."""

    @aiogpu.remote(num_gpus=1, accelerator_type="V100")
    async def train(path: str) -> str:
        await tasks.gated_coroutine.__wrapped__(path, "train")
        return "trained on a V100"

    declared = {"accelerator_type:V100": 1}
    async with aiogpu.init(num_cpus=1, num_gpus=4, resources=declared):
        handle = train.remote(gate.path)
        await gate.entered("train")
        left = await aiogpu.available_resources()
        expected = {"CPU": 0.0, "GPU": 3.0, "accelerator_type:V100": 0.999}
        assert expected.items() <= left.items()
        gate.release("train")
        assert await handle == "trained on a V100"
        with pytest.raises(errors.InfeasibleError, match="T4"):
            train.options(accelerator_type="T4").remote(gate.path)
