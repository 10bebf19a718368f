"""How a node reacts to what NVML shows; NVML is a stub.

A share comes back when NVML agrees; GPUs that are sick, lost or used by others get no
new tasks; a task that outgrows its reservation is ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import threading
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

import aiogpu
from aiogpu.accelerators import nvidia
from aiogpu.errors import InfeasibleError, OptionError
from aiogpu.observe.status import NodeStatus
from aiogpu.runtime.devices import monitor, release
from tests.contract import nvml_tasks
from tests.contract.nvml_tasks import grow, leave_behind, show, stay, visible
from tests.support.gate import Gate
from tests.unit.accelerators.stub_nvml import STATE, StubNvml, compile_stub

pytestmark = pytest.mark.either_loop


@pytest.fixture(scope="session")
def own_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a stub with a name of its own, so that other tests do not load it."""
    folder = tmp_path_factory.mktemp("nvml")
    return compile_stub(folder, soname="libaiogpu-nvml-stub.so")


@pytest.fixture
def nvml(
    own_library: Path, no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StubNvml:
    """Show this process one GPU, which no timer looks at."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(STATE, str(tmp_path / "nvml.state"))
    monkeypatch.setattr(nvidia, "LIBRARY", str(own_library))
    monkeypatch.setattr(pynvml, "CDLL", lambda _: ctypes.CDLL(str(own_library)))
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(monitor, "EACH", 3600.0)
    show()
    return StubNvml.here()


async def until(is_so: Callable[[NodeStatus], object]) -> NodeStatus:
    """Wait until the status fulfils a condition; return the status."""
    async with asyncio.timeout(60):
        while not is_so(status := await aiogpu.status()):
            await asyncio.sleep(0)
    return status


def is_free(status: NodeStatus) -> bool:
    """Tell if no share of any device is held."""
    return all(device.free == 1 for device in status.devices)


def settling(status: NodeStatus) -> list[object]:
    """Return the workers that have ended, and still hold their shares."""
    return [worker for worker in status.workers if worker.state == "settling"]


def watches() -> bool:
    """Tell if a thread asks drivers."""
    return any(thread.name == "aiogpu-devices" for thread in threading.enumerate())


@pytest.mark.parametrize("share", [1, 0.5])
async def test_shares_wait_until_nvml_agrees(share: float, nvml: StubNvml) -> None:
    async with aiogpu.init(num_cpus=2):
        assert (await aiogpu.cluster_resources())["GPU"] == 1
        await leave_behind.options(num_gpus=share).remote()
        status = await until(settling)
        assert (await aiogpu.available_resources())["GPU"] == 1 - share
        device, holder = (" ".join(x.split()) for x in str(status).splitlines()[-2:])
        assert device.startswith(f"GPU 0 {1 - share:g} free NVIDIA A100-SXM4-40GB ")
        assert holder == f"{share:g} (ended) until the driver confirms"
        following = visible.options(num_gpus=1).remote()
        assert str(await following.why()).endswith(
            f"\n    {share:g} of GPU 0: held until the driver confirms that its "
            f"process has ended"
        )
        show()
        assert await following == "0"
        (seen,) = (await until(is_free)).devices
        assert (seen.aside, seen.is_unverified) == (None, False)
        assert watches()
    assert not watches()


async def test_memory_that_is_the_machines_is_counted_once(nvml: StubNvml) -> None:
    """NVML says NOT_SUPPORTED for the memory of GB10 and Jetson."""
    nvml.write([replace(nvml_tasks.gpus(1)[0], name="NVIDIA GB10", total=0)])
    async with aiogpu.init(num_cpus=1):
        memory = (await aiogpu.cluster_resources())["memory"]
        assert await visible.options(num_gpus=0.5).remote() == "0"
        with pytest.raises(
            InfeasibleError,
            match=r"GPU 0 \(NVIDIA GB10\), which uses the machine's, has: start it",
        ):
            visible.options(gpu_memory="1GiB").remote()
    async with aiogpu.init(num_cpus=1, gpu_memory="1GiB"):
        assert (await aiogpu.cluster_resources())["memory"] == memory - 2**30
        assert await visible.options(gpu_memory="1GiB").remote() == "0"
        (device,) = (await aiogpu.status()).devices
        assert (device.memory, device.used) == (2**30, None)
    async with aiogpu.init(num_cpus=1, gpu_memory="1GiB", memory="2GiB"):
        assert (await aiogpu.cluster_resources())["memory"] == 2**31
    with pytest.raises(OptionError, match=r"GPU 0 \(NVIDIA GB10\) is that of the mach"):
        await aiogpu.init(gpu_memory="9000TiB")


@pytest.mark.whole
@pytest.mark.parametrize(("share", "is_lost"), [(1, False), (0.5, False), (1, True)])
async def test_a_gpu_is_set_aside_past_the_limit(
    share: float, is_lost: bool, nvml: StubNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost GPU is set aside at once."""
    monkeypatch.setattr(release, "LIMIT", 99.0 if is_lost else 0.125)
    monkeypatch.setattr(release, "ASIDE", 0.01)
    async with aiogpu.init(num_cpus=2):
        pid = await leave_behind.options(num_gpus=share).remote(lost=is_lost)
        status = await until(lambda status: status.devices[0].aside)
        listed = f"the driver still lists ended processes: pid {pid} with 1024 MiB"
        reason = f"GPU 0: {listed} (1073741824 bytes)"
        if is_lost:
            reason = "GPU 0: the driver calls it lost (GPU is lost)"
        (device,) = status.devices
        assert (device.aside, device.free) == (reason, 0)
        assert str(status).endswith(f"\n  set aside: {reason}")
        assert (status.available["GPU"], settling(status)) == (0, [])
        following = visible.options(num_gpus=0.25).remote()
        first, *rest = str(await following.why()).splitlines()
        assert first.endswith("for {CPU: 1, GPU: 0.25}")
        shortage = "  GPU 0.25: 0 of 1 free (0: set aside)"
        assert rest == [shortage, f"    set aside: {reason}"]
        assert (await aiogpu.status()).waiting_count == 1
        show()
        assert await following == "0"
        assert (await until(is_free)).devices[0].aside is None


async def test_other_gpus_are_used_meanwhile(
    nvml: StubNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "LIMIT", 0.05)
    show(count=2)
    async with aiogpu.init(num_cpus=2):
        await leave_behind.options(num_gpus=1).remote(count=2)
        await until(lambda status: status.devices[0].aside)
        for share in (1, 0.5):
            assert await visible.options(num_gpus=share).remote() == "1"


@pytest.mark.parametrize("share", [1, 0.5])
async def test_a_process_listed_before_the_task_is_ignored(
    share: float, nvml: StubNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is invisible here, like a process of another container."""
    monkeypatch.setattr(release, "LIMIT", 0.125)
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    show({process.pid: 1})
    async with aiogpu.init(num_cpus=2):
        await grow.options(num_gpus=share).remote(process.pid)
        status = await until(lambda seen: is_free(seen) or seen.devices[0].aside)
        (device,) = status.devices
        assert (device.aside, device.is_unverified) == (None, False)


async def test_a_failing_nvml_leaves_the_status_unverified(nvml: StubNvml) -> None:
    async with aiogpu.init(num_cpus=2):
        show(fail={"nvmlDeviceGetComputeRunningProcesses_v3": 999})
        for _ in range(3):
            assert await visible.options(num_gpus=0.5).remote() == "0"
        status = await until(is_free)
        assert status.devices[0].is_unverified
        note = "unverified: ended tasks may have left something on it"
        assert str(status).count(note) == 1


async def test_logical_gpus_are_not_watched(nvml: StubNvml) -> None:
    nvml.write()
    async with aiogpu.init(num_cpus=2, num_gpus=2):
        assert await visible.options(num_gpus=1).remote() == "0"
        assert not watches()
        await until(is_free)


async def test_a_node_closes_without_waiting_for_its_gpus(
    nvml: StubNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "LIMIT", 60.0)
    async with asyncio.timeout(30), aiogpu.init(num_cpus=2):
        await leave_behind.options(num_gpus=1).remote()
        await until(settling)


async def test_nvml_is_asked_once_per_ended_task(
    nvml: StubNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("AIOGPU_STUB_NVML_CALLS", str(calls))

    def looks() -> int:
        return calls.read_text().count("nvmlDeviceGetMemoryInfo\n")

    async with aiogpu.init(num_cpus=2):
        await until(lambda status: status.devices[0].seen is not None)
        at_first = looks()
        for _ in range(2):
            assert await visible.options(num_gpus=0.5).remote() == "0"
        await until(is_free)
        before = calls.read_text()
        assert (looks() - at_first, before.count("ByUUID")) == (2, 1)
        for _ in range(10):
            assert await visible.remote() == ""
        assert calls.read_text() == before, "tasks without a GPU cause no call"


@pytest.fixture
def watched(nvml: StubNvml, monkeypatch: pytest.MonkeyPatch) -> StubNvml:
    """Show two GPUs, and look at them all the time, even on a busy machine."""
    monkeypatch.setattr(monitor, "EACH", 0.01)
    monkeypatch.setattr(monitor, "DEAREST", 0.0)
    show(count=2)
    return nvml


@asynccontextmanager
async def process_on_first(size: int = 1, **variables: str) -> AsyncIterator[Process]:
    """Run a process that uses so many GiB of the first GPU."""
    environ = {**os.environ, **variables}
    process = await asyncio.create_subprocess_exec("sleep", "600", env=environ)
    show({process.pid: size}, count=2)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        show(count=2)


async def test_a_gpu_with_an_xid_gets_no_task_until_it_recovers(
    watched: StubNvml, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "CALM", 3600.0)
    share = {"num_gpus": 0.25}
    async with aiogpu.init(num_cpus=3):
        running = stay.options(**share).remote(gate.path, "runs")
        await gate.entered("runs")
        await until(lambda status: status.devices[0].seen is not None)
        watched.xid(0, 79)
        first = (await until(lambda status: status.devices[0].aside)).devices[0]
        assert re.match("XID 79", first.aside or "")
        assert first.free == 0
        assert await visible.options(**share).remote() == "1"
        gate.release("runs")
        assert await running == "0", "the running task goes on"
        monkeypatch.setattr(monitor, "CALM", 0.0)
        # Until a share is returned, it draws the next task to its device.
        await until(is_free)
        assert await visible.options(**share).remote() == "0"


async def test_only_the_oversized_task_is_ended(watched: StubNvml, gate: Gate) -> None:
    async with aiogpu.init(num_cpus=3, gpu_memory_enforce=True):
        share = stay.options(num_gpus=0.25)
        big = share.options(gpu_memory="6GiB", name="big").remote(gate.path, "big")
        small = share.options(name="small").remote(gate.path, "small")
        await gate.entered("big", "small")
        pid = gate.pids
        show({pid["big"]: 7, pid["small"]: 1, os.getpid(): 2}, count=2)
        status = await until(lambda status: status.devices[0].others)
        device, *holders = [line for line in str(status).splitlines() if "used" in line]
        assert "10 GiB used of 40 GiB  16 GiB reserved  87 % busy" in device
        words = [line.split() for line in holders[:2]]
        assert [[line[1], *line[-3:]] for line in words] == [
            ["big", "7", "GiB", "used"],
            ["small", "1", "GiB", "used"],
        ]
        assert status.devices[0].others[0].name == "this program"
        show({pid["big"]: 9, pid["small"]: 1}, count=2)
        with pytest.raises(aiogpu.GpuOutOfMemoryError) as caught:
            await big
        error = caught.value
        assert (error.asked >> 30, error.peak >> 30) == (6, 9)
        assert error.neighbours == ("small",)
        show({pid["small"]: 1}, count=2)
        gate.release("small")
        assert await small == "0"
        show(count=2)


async def test_a_task_waits_for_a_gpu_that_others_use(watched: StubNvml) -> None:
    async with process_on_first() as process, aiogpu.init(num_cpus=3, foreign="wait"):
        reason = f"foreign processes are on it: sleep (pid {process.pid})"
        assert (await aiogpu.status()).devices[0].aside == reason, "known at once"
        task = visible.options(num_gpus=2).remote()
        assert "set aside" in str(await task.why())
        assert await visible.options(num_gpus=1).remote() == "1"
        process.kill()
        await process.wait()
        show(count=2)
        assert await task == "0,1"


async def test_tasks_avoid_a_gpu_that_others_use(watched: StubNvml) -> None:
    half = visible.options(num_gpus=0.5)
    async with aiogpu.init(num_cpus=3, foreign="avoid"):
        async with process_on_first():
            await until(lambda status: status.devices[0].others)
            assert await half.remote() == "1"
            await until(is_free)
            async with aiogpu.lease(num_gpus=1) as gpu:
                assert (gpu.ids, await half.remote()) == ([1], "0")
        await until(lambda status: is_free(status) and not status.devices[0].others)
        assert await half.remote() == "0"


async def test_a_process_of_a_lease_is_not_foreign(watched: StubNvml) -> None:
    async with aiogpu.init(num_cpus=3, foreign="wait"):
        async with (
            aiogpu.lease(num_gpus=0.5, name="mine") as gpu,
            process_on_first(3, **gpu.environ),
        ):
            status = await until(lambda status: status.devices[0].holders[0].used)
            (holder,), first = status.devices[0].holders, status.devices[0]
            assert (holder.task, holder.used) == ("mine", 3 << 30)
            assert (first.aside, first.others) == (None, ())
        await until(is_free)


async def test_a_leases_gpu_is_free_when_nvml_agrees(
    watched: StubNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the look before the lease may see the lease's own process.
    monkeypatch.setattr(release, "LATE", -1.0)
    show()
    async with aiogpu.init(num_cpus=3):
        async with aiogpu.lease(num_gpus=1) as gpu:
            environ = {**os.environ, **gpu.environ}
            process = await asyncio.create_subprocess_exec("sleep", "600", env=environ)
            show({process.pid: 3})
            await until(lambda status: status.devices[0].holders[0].used)
        status = await until(lambda status: status.tasks[0].state == "stopping")
        assert status.devices[0].free == 0
        process.kill()
        await process.wait()
        await until(lambda seen: any(h.is_settling for h in seen.devices[0].holders))
        show()
        await until(is_free)
