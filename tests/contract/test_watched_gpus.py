"""GPUs are watched while a node runs: real workers, NVML on a stub."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.contract.test_clearance_of_gpus import Program, on_stub
from tests.unit.accelerators.stub_fixtures import nvml, stub_library

__all__ = ["nvml", "on_stub", "stub_library"]

pytestmark = [
    pytest.mark.usefixtures("runtime_directory"),
    pytest.mark.either_loop,
]

BEGINNING = """
    from aiogpu.runtime.devices import monitor as device_health
    from tests.contract.watched_tasks import let_go, list_on_first, stay

    rounds.EACH, device_health.CALM = 0.01, 3600.0
    pipes = [os.path.join(os.environ["PLACE"], name) for name in "ab"]
    for pipe in pipes:
        os.mkfifo(pipe)

    def pids(status):
        # A worker that still starts may have one: its task might go elsewhere.
        return {
            holder.task: 0 if holder.seconds is None else holder.pid
            for holder in status.devices[0].holders
        }
"""

SICK = """
    async def main():
        async with aiogpu.init(num_cpus=3):
            running = stay.options(num_gpus=0.25).remote(pipes[0])
            await until(lambda status: all(pids(status).values()) and pids(status))
            await until(lambda status: status.devices[0].seen is not None)
            stub().xid(0, 79)
            status = await until(lambda status: status.devices[0].aside)
            print(status.devices[0].aside, status.devices[0].free)
            print(await visible.options(num_gpus=0.25).remote())
            await asyncio.to_thread(let_go, pipes[0])
            print(await running)
            device_health.CALM = 0.0
            # A share that is not returned yet draws the next one to its device.
            whole = lambda status: all(one.free == 1 for one in status.devices)
            await until(whole)
            print(await visible.options(num_gpus=0.25).remote())
    start(main)
"""


def test_a_gpu_with_an_xid_is_drained_and_comes_back(
    on_stub: Program, tmp_path: Path
) -> None:
    program = BEGINNING + "    from tests.contract.settling import stub\n" + SICK
    sick, other, running, back = on_stub(program, count=2, PLACE=str(tmp_path))
    assert re.fullmatch(r"XID 79.* 0\.0", sick)
    assert (other, running, back) == ("1", "0", "0")


OUTGROWN = """
    async def main():
        async with aiogpu.init(num_cpus=3, gpu_memory_enforce=True):
            big = stay.options(num_gpus=0.25, gpu_memory="6GiB", name="big")
            big = big.remote(pipes[0])
            small = stay.options(num_gpus=0.25, name="small").remote(pipes[1])
            both = lambda status: len([p for p in pids(status).values() if p]) == 2
            there = pids(await until(both))
            list_on_first((there["big"], 7), (there["small"], 1), (os.getpid(), 2))
            status = await until(lambda status: status.devices[0].others)
            print(*[line for line in str(status).splitlines() if " used" in line][:3],
                  status.devices[0].others[0].name, sep="|")
            list_on_first((there["big"], 9), (there["small"], 1))
            try:
                await big
            except aiogpu.GpuOutOfMemoryError as error:
                print(error.asked >> 30, error.peak >> 30, error.neighbours)
            list_on_first((there["small"], 1))
            await asyncio.to_thread(let_go, pipes[1])
            print(await small)
            list_on_first()
    start(main)
"""


def test_what_outgrows_its_reservation_is_ended_and_its_neighbour_lives(
    on_stub: Program, tmp_path: Path
) -> None:
    seen, error, small = on_stub(BEGINNING + OUTGROWN, count=2, PLACE=str(tmp_path))
    device, *holders = seen.split("|")
    assert "10 GiB used of 40 GiB  16 GiB reserved  87 % busy" in device
    assert [line.split()[1] for line in holders[:2]] == ["big", "small"]
    assert [line.split()[-3:] for line in holders[:2]] == [
        ["7", "GiB", "used"],
        ["1", "GiB", "used"],
    ]
    assert holders[2] == "this program"
    assert (error, small) == ("6 9 ('small',)", "0")
