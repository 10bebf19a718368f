"""[B26] A share comes back when NVML agrees: real workers, NVML on a stub."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.program import run
from tests.unit.accelerators.stub_fixtures import nvml, stub_library
from tests.unit.accelerators.stub_nvml import StubNvml, gpus

__all__ = ["nvml", "stub_library"]

pytestmark = [
    pytest.mark.usefixtures("runtime_directory"),
    pytest.mark.either_loop,
]

BEGINNING = """
    import asyncio, os, sys, threading, aiogpu
    from aiogpu.runtime.devices import monitor as rounds
    from aiogpu.runtime.devices import release as clearance
    from tests.contract.settling import leave_behind, put, visible

    rounds.EACH = 3600.0  # what is seen between two ends is not the matter here

    async def until(is_so):
        async with asyncio.timeout(60):
            while not is_so(status := await aiogpu.status()):
                await asyncio.sleep(0)
        return status

    def settling(status):
        return [w for w in status.workers if w.state == "settling"]

    def start(main):
        (aiogpu.run if sys.argv[1] == "uvloop" else asyncio.run)(main())
"""

Program = Callable[..., list[str]]


@pytest.fixture(params=["asyncio", "uvloop"])
def on_stub(
    request: pytest.FixtureRequest,
    nvml: StubNvml,
    monkeypatch: pytest.MonkeyPatch,
) -> Program:
    """Runs a program on a stub with GPUs, and gives the lines that it prints."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)

    def run_program(source: str, *, count: int = 1, **changes: str) -> list[str]:
        nvml.write(gpus(count))
        names = ("LD_LIBRARY_PATH", "AIOGPU_STUB_NVML_STATE")
        variables = {name: nvml.environ[name] for name in names} | changes
        return run(BEGINNING + source, str(request.param), **variables).splitlines()

    return run_program


SETTLES = """
    async def main():
        async with aiogpu.init(num_cpus=2):
            print((await aiogpu.cluster_resources())["GPU"])
            await leave_behind.options(num_gpus=SHARE).remote()
            status = await until(settling)
            print((await aiogpu.available_resources())["GPU"])
            print(*str(status).splitlines()[-2:], sep="\\n")
            following = visible.options(num_gpus=1).remote()
            print(*str(await following.why()).splitlines(), sep="|")
            put(count=1)
            print(await following)
            status = await until(lambda status: status.available["GPU"] == 1)
            print(status.devices[0].aside, status.devices[0].is_unverified)
        print([thread.name for thread in threading.enumerate()])
    start(main)
"""


@pytest.mark.parametrize("share", ["1", "0.5"])
def test_a_share_is_held_until_nvml_lists_its_process_no_more(
    on_stub: Program, share: str
) -> None:
    left = f"{1 - float(share):g}"
    total, free, *told, why, seen, end, threads = on_stub(
        SETTLES.replace("SHARE", share)
    )
    assert (total, free) == ("1.0", str(float(left)))
    device, held = (line.split() for line in told)
    assert device[:6] == ["GPU", "0", left, "free", "NVIDIA", "A100-SXM4-40GB"]
    assert held == [share, "(ended)", "until", "its", "driver", "agrees"]
    assert why.endswith(
        f"|    {share} of GPU 0: held by a process that has ended, until its driver "
        f"agrees"
    )
    assert (seen, end, threads) == ("0", "None False", "['MainThread']")


STUCK = """
    clearance.LIMIT, clearance.ASIDE = 0.125, 0.01
    async def main():
        async with aiogpu.init(num_cpus=2):
            print(await leave_behind.options(num_gpus=SHARE).remote(lost=LOST))
            status = await until(lambda status: status.devices[0].aside)
            print(status.devices[0].aside)
            print(str(status).splitlines()[-1])
            print(status.devices[0].free, status.available["GPU"], settling(status))
            following = visible.options(num_gpus=0.25).remote()
            print(*str(await following.why()).splitlines(), sep="|")
            other = asyncio.ensure_future(following)
            await until(lambda status: status.waiting_count == 1)
            put(count=1)
            print(await other)
            status = await until(lambda status: status.available["GPU"] == 1)
            print(status.devices[0].aside, status.devices[0].free)
    start(main)
"""


@pytest.mark.parametrize("share", ["1", "0.5"])
def test_past_the_limit_a_gpu_is_set_aside_with_the_reason(
    on_stub: Program, share: str
) -> None:
    program = STUCK.replace("SHARE", share).replace("LOST", "False")
    pid, aside, line, state, why, seen, end = on_stub(program)
    assert aside == (
        f"GPU 0: of what has ended, the driver still lists pid {pid} with 1024 MiB "
        f"(1073741824 bytes)"
    )
    assert line == f"  set aside: {aside}"
    assert state == "0.0 0.0 []"
    told, share_left, reason = why.split("|")
    assert told.endswith("for {CPU: 1, GPU: 0.25}")
    assert share_left == "  GPU 0.25: 0 of 1 free (0: set aside)"
    assert reason == f"    set aside: {aside}"
    assert (seen, end) == ("0", "None 1.0")


def test_a_lost_gpu_is_set_aside_at_once(on_stub: Program) -> None:
    program = STUCK.replace("SHARE", "1").replace("LOST", "True").replace("0.125", "99")
    _, aside, _, _, _, seen, end = on_stub(program)
    assert aside == "GPU 0: the driver calls it lost (GPU is lost)"
    assert (seen, end) == ("0", "None 1.0")


OTHERS = """
    clearance.LIMIT = 0.05
    async def main():
        async with aiogpu.init(num_cpus=2):
            await leave_behind.options(num_gpus=1).remote(count=2)
            await until(lambda status: any(d.aside for d in status.devices))
            print(await visible.options(num_gpus=1).remote())
            print(await visible.options(num_gpus=0.5).remote())
    start(main)
"""


def test_the_other_gpus_are_used_meanwhile(on_stub: Program) -> None:
    assert on_stub(OTHERS, count=2) == ["1", "1"]


ELSEWHERE = """
    clearance.LIMIT = 0.125
    @aiogpu.remote
    def has_it_grow(pid):
        put(pid, pid, count=1)

    async def main():
        # It cannot be seen from here, like a process of another container.
        process = await asyncio.create_subprocess_exec("true")
        await process.wait()
        put(process.pid, count=1)
        async with aiogpu.init(num_cpus=2):
            await has_it_grow.options(num_gpus=SHARE).remote(process.pid)
            is_over = lambda it: it.available["GPU"] == 1 or it.devices[0].aside
            device = (await until(is_over)).devices[0]
            print(device.aside, device.is_unverified)
    start(main)
"""


@pytest.mark.parametrize("share", ["1", "0.5"])
def test_a_process_listed_before_the_task_is_not_left_over_of_it(
    on_stub: Program, share: str
) -> None:
    assert on_stub(ELSEWHERE.replace("SHARE", share)) == ["None False"]


BROKEN = """
    async def main():
        async with aiogpu.init(num_cpus=2):
            put(count=1, fail={"nvmlDeviceGetComputeRunningProcesses_v3": 999})
            for _ in range(3):
                print(await visible.options(num_gpus=0.5).remote())
            status = await until(lambda status: status.available["GPU"] == 1)
            print(status.devices[0].is_unverified)
            lines = str(status).splitlines()
            print(*(line for line in lines if "unverified" in line), sep="|")
    start(main)
"""


def test_an_nvml_that_fails_midway_leaves_the_status_unverified(
    on_stub: Program,
) -> None:
    assert on_stub(BROKEN) == [
        *"000",
        "True",
        "  unverified: whether ended tasks left something on it is not known",
    ]


UNASKED = """
    async def main():
        async with aiogpu.init(num_cpus=2, num_gpus=2):
            print(await visible.options(num_gpus=1).remote())
            print([thread.name for thread in threading.enumerate()])
            await until(lambda status: status.available["GPU"] == 2)
    start(main)
"""


def test_logical_gpus_ask_nobody(on_stub: Program) -> None:
    assert on_stub(UNASKED, count=0) == ["0", "['MainThread']"]


CLOSING = """
    import time
    clearance.LIMIT = 60.0
    async def main():
        async with aiogpu.init(num_cpus=2):
            await leave_behind.options(num_gpus=1).remote()
            await until(settling)
            begin = time.monotonic()
        print(time.monotonic() - begin < clearance.LIMIT / 2)
    start(main)
"""


def test_a_node_closes_without_waiting_for_its_gpus(on_stub: Program) -> None:
    assert on_stub(CLOSING) == ["True"]


UNUSED = """
    async def main():
        async with aiogpu.init(num_cpus=2):
            path = os.environ["AIOGPU_STUB_NVML_CALLS"]
            await until(lambda status: status.devices[0].seen is not None)
            looks = open(path).read().count("nvmlDeviceGetMemoryInfo\\n")
            for _ in range(2):
                print(await visible.options(num_gpus=0.5).remote())
            await until(lambda status: status.available["GPU"] == 1)
            before = open(path).read()
            for _ in range(10):
                await asyncio.to_thread(threading.Event().wait, 0.01)
            print(open(path).read() == before, before.count("ByUUID"))
            print(before.count("nvmlDeviceGetMemoryInfo\\n") - looks)
    start(main)
"""


def test_nvml_is_asked_once_for_each_end(on_stub: Program, tmp_path: Path) -> None:
    calls = {"AIOGPU_STUB_NVML_CALLS": str(tmp_path / "calls")}
    # At the end of each of two tasks, beside what is seen from time to time.
    assert on_stub(UNUSED, **calls) == ["0", "0", "True 1", "2"]
