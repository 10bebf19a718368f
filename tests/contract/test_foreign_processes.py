"""Processes outside of aiogpu that are on a GPU: real workers, NVML on a stub."""

from __future__ import annotations

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
    from tests.contract.watched_tasks import list_on_first

    rounds.EACH = 0.01

    async def foreign():
        process = await asyncio.create_subprocess_exec("sleep", "600")
        list_on_first((process.pid, 1))
        return process

    async def leave(process):
        process.kill()
        await process.wait()
        list_on_first()
"""

WAITS = """
    async def main():
        process = await foreign()
        async with aiogpu.init(num_cpus=3, foreign="wait"):
            (await aiogpu.status()).devices[0].aside  # known at once
            task = visible.options(num_gpus=2).remote()
            status = await until(lambda status: status.waiting)
            told = status.devices[0].aside.replace(str(process.pid), "PID")
            print(told, "set aside" in str(await task.why()))
            print(await visible.options(num_gpus=1).remote())
            await leave(process)
            print(await task)
    start(main)
"""

AVOIDS = """
    async def main():
        process = await foreign()
        async with aiogpu.init(num_cpus=3, foreign="avoid"):
            whole = lambda status: all(one.free == 1 for one in status.devices)
            print(await visible.options(num_gpus=0.5).remote())
            await until(whole)
            async with aiogpu.lease(num_gpus=1) as gpu:
                print(gpu.ids, await visible.options(num_gpus=0.5).remote())
            await leave(process)
            await until(lambda status: whole(status) and not status.devices[0].others)
            print(await visible.options(num_gpus=0.5).remote())
    start(main)
"""

LEASED = """
    async def main():
        async with aiogpu.init(num_cpus=3, foreign="wait"):
            async with aiogpu.lease(num_gpus=0.5, name="mine") as gpu:
                process = await asyncio.create_subprocess_exec(
                    "sleep", "600", env={**os.environ, **gpu.environ}
                )
                list_on_first((process.pid, 3))
                used = lambda status: status.devices[0].holders[0].used
                status = await until(used)
                print(status.devices[0].holders[0].task, used(status) >> 30)
                print(status.devices[0].aside, status.devices[0].others)
                await leave(process)
            await until(lambda status: status.devices[0].free == 1)
    start(main)
"""

STAYS = """
    async def main():
        async with aiogpu.init(num_cpus=3):
            async with aiogpu.lease(num_gpus=1) as gpu:
                process = await asyncio.create_subprocess_exec(
                    "sleep", "600", env={**os.environ, **gpu.environ}
                )
                list_on_first((process.pid, 3))
            status = await until(lambda status: status.tasks[0].state == "stopping")
            print(status.devices[0].free)
            process.kill()
            await process.wait()
            settling = lambda status: any(
                holder.is_settling for holder in status.devices[0].holders
            )
            print(settling(await until(settling)))
            list_on_first()
            await until(lambda status: status.devices[0].free == 1)
    start(main)
"""


def test_a_gpu_is_waited_for_until_they_have_gone(
    on_stub: Program, tmp_path: Path
) -> None:
    aside, other, both = on_stub(BEGINNING + WAITS, count=2, PLACE=str(tmp_path))
    assert aside == "others' processes are on it: sleep (pid PID) True"
    assert (other, both) == ("1", "0,1")


def test_a_gpu_is_avoided_while_there_is_another(
    on_stub: Program, tmp_path: Path
) -> None:
    told = on_stub(BEGINNING + AVOIDS, count=2, PLACE=str(tmp_path))
    assert told == ["1", "[1] 0", "0"]


def test_what_a_lease_is_for_is_not_foreign(on_stub: Program, tmp_path: Path) -> None:
    told = on_stub(BEGINNING + LEASED, count=2, PLACE=str(tmp_path))
    assert told == ["mine 3", "None ()"]


def test_a_lease_is_free_when_its_driver_agrees(
    on_stub: Program, tmp_path: Path
) -> None:
    told = on_stub(BEGINNING + STAYS, count=1, PLACE=str(tmp_path))
    assert told == ["0.0", "True"]
