"""What follows from what is seen on devices: told to the core, and to people."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence

import pytest

from aiogpu.accelerators.base import Health, Sample
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Device, Request, Shape, TaskSpec
from aiogpu.core.model.units import BY_SHARE, GPU, UNIT
from aiogpu.core.records import Memory
from aiogpu.core.resources.devices import Cause, DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.linux.procfs import Origin
from aiogpu.observe.status import OtherProcess
from aiogpu.runtime.devices import monitor as module
from aiogpu.runtime.devices.monitor import CALM, DeviceMonitor
from aiogpu.runtime.devices.probe_thread import Key, Look
from tests.support.until import until

ZERO, ONE = ("GPU", 0), ("GPU", 1)
GIB = 1 << 30
IDLE = Sample({}, reads_pids=True, used=0)
XORG = 7

pytestmark = pytest.mark.either_loop


class PaperThread:
    """A thread that looks at nothing: rounds come from the test."""

    def __init__(self, devices: Mapping[Key, Device]) -> None:
        self.devices = devices
        self.waits: tuple[str, float] | None = None
        self.is_alive = True
        self.looks: list[tuple[Sequence[Key], bool]] = []

    def start(self, _on_failed: object) -> None:
        """Nothing need be done."""

    def name_of(self, key: Key) -> str:
        return f"{key[0]} {self.devices[key].id}"

    def look(
        self, keys: Sequence[Key], _then: object, *, is_checked: bool = False
    ) -> None:
        self.looks.append((keys, is_checked))

    def quit(self) -> None:
        """Nothing need be done."""

    def mute_for(self) -> tuple[str, float] | None:
        return self.waits


class Story:
    """A node with two GPUs, of which the first one has tasks, and what is told."""

    def __init__(self, enforces: bool = False) -> None:
        devices = [Device(index, uuid=f"u{index}", memory=40 * GIB) for index in (0, 1)]
        ledger = Ledger({"CPU": 9 * UNIT}, [DeviceSet(GPU, devices)])
        self.scheduler = Scheduler(ledger)
        self.thread = PaperThread({(GPU, index): devices[index] for index in (0, 1)})
        self.told: list[tuple[object, ...]] = []
        self.monitor = DeviceMonitor(
            asyncio.get_running_loop(),
            self.scheduler,
            self.thread,  # type: ignore[arg-type]
            lambda: {100 + worker.id: worker.id for worker in self.scheduler.workers},
            lambda *event: self.told.append(event),
            lambda _key: {},
        )
        self.guard = self.monitor.guard
        self.guard.enforces = enforces
        self.watched: list[set[Key]] = []
        self.guard._on_hot = lambda keys: self.watched.append(set(keys))
        self.when = time.monotonic()

    def start(self, name: str, share: float = 0.25, memory: int = 0) -> None:
        """A task, on worker n with process 100 + n."""
        number = len(list(self.scheduler.workers)) + 1
        request = Request.of({"CPU": UNIT}, {GPU: int(share * UNIT)}, gpu_memory=memory)
        spec = TaskSpec(name, Shape(request))
        self.scheduler.submit(0.0, TaskId(number), spec)
        self.scheduler.worker_started(0.0, WorkerId(number))
        worker = self.scheduler.workers.get(WorkerId(number))
        assert worker is not None
        assert worker.lease is not None
        self.guard.begin(worker.lease)

    def sees(
        self,
        used: Mapping[int, int] | None = None,
        health: Health | None = None,
        sample: Sample | None = None,
    ) -> None:
        """A round: what processes use of the first GPU, and how well it is."""
        used = used or {}
        found = sample or Sample(used, frozenset(used), True, sum(used.values()), 87)
        told = {ZERO: health or Health(action=""), ONE: Health(action="")}
        origins = {pid: Origin("python", ()) for pid in used} | {XORG: Origin("X", ())}
        self.when += 1.0
        self.monitor.on_round(Look(self.when, {ZERO: found, ONE: IDLE}, told, origins))


async def test_each_device_is_known_as_it_was_seen_last() -> None:
    story = Story()
    story.start("a")
    assert story.monitor.observed == {}
    story.sees({101: 3 * GIB, XORG: GIB})
    first, second = story.monitor.observed[ZERO], story.monitor.observed[ONE]
    assert (first.used, first.utilisation, first.unknown) == (4 * GIB, 87, None)
    assert first.workers == {1: 3 * GIB}
    assert first.others == (OtherProcess(XORG, "X", GIB),)
    assert abs(first.seen - asyncio.get_running_loop().time()) < 5
    assert (second.used, second.others) == (0, ())
    assert story.told == []
    story.monitor.quit()


async def test_what_is_seen_is_told_until_its_end() -> None:
    story = Story()
    story.sees(health=Health(("XID 79",), ""))
    story.sees()
    assert story.told == [(Scheduler.device_changed, GPU, 0, Cause.SICK, "XID 79")]
    story.monitor.quit()
    story.sees(health=Health(("XID 80",), ""))
    assert len(story.told) == 1, "after the end nothing is told"


async def test_a_sick_device_is_told_once_and_when_it_is_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = Story()
    for _ in range(3):
        story.sees(health=Health(("XID 79",), ""))
    assert story.told == [(Scheduler.device_changed, GPU, 0, Cause.SICK, "XID 79")]
    for _ in range(int(CALM)):
        story.sees()
    assert story.told[1:] == [(Scheduler.device_changed, GPU, 0, Cause.SICK, None)]
    assert [record.message for record in caplog.records] == [
        "! GPU 0 gets no new tasks until it is well: XID 79",
        "! GPU 0 is well again",
    ]
    story.monitor.quit()


async def test_the_devices_of_a_driver_that_hangs_are_sick_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SILENT", 0.03)
    story = Story()
    story.start("a")
    worker = story.scheduler.workers.get(WorkerId(1))
    assert worker is not None
    assert worker.lease is not None
    assert story.monitor.release.end(worker.id, worker.lease, [101])
    story.thread.waits = GPU, 0.01
    story.sees()
    story.thread.waits = GPU, 0.05
    await until(lambda: story.told)
    reason = "the driver has not answered for 0.03 s"
    assert story.told.pop(0) == (Scheduler.devices_stuck, 1, f"GPU 0: {reason}")
    assert story.told == [
        (Scheduler.device_changed, GPU, 0, Cause.SICK, reason),
        (Scheduler.device_changed, GPU, 1, Cause.SICK, reason),
    ]
    story.thread.waits = None
    story.sees(health=Health(("XID 79",), ""))
    assert story.told[2:] == [
        (Scheduler.device_changed, GPU, 0, Cause.SICK, "XID 79"),
        (Scheduler.device_changed, GPU, 1, Cause.SICK, None),
    ]
    story.monitor.quit()


async def test_a_thread_that_has_failed_has_seen_nothing() -> None:
    story = Story()
    story.sees()
    story.monitor.on_failed()
    assert story.monitor.observed == {}


async def test_a_task_that_outgrows_what_it_reserved_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = Story()
    story.start("big", memory=6 * GIB)
    story.start("small")
    story.sees({101: 7 * GIB, 102: 30 * GIB})
    assert story.monitor.observed[ZERO].outgrown == frozenset()
    for _ in range(2):
        story.sees({101: 7 * GIB + 1, 102: 30 * GIB})
        assert story.monitor.observed[ZERO].outgrown == {1}
    assert [record.message for record in caplog.records] == [
        "! big uses 7.1GiB of GPU 0, and had asked for 6GiB (gpu_memory=); beside it "
        "there: small. It goes on; init(gpu_memory_enforce=True) would end it."
    ]
    assert story.told == []
    assert story.guard.explain(1, 1) is None
    assert (story.guard.peak_of(1), story.guard.peak_of(9)) == (7 * GIB + 1, 0)
    story.monitor.quit()


async def test_each_of_its_processes_may_have_a_context() -> None:
    story = Story()
    story.start("big", memory=6 * GIB)
    story.sees({101: 6 * GIB, 201: 3 * GIB // 2})
    assert story.monitor.observed[ZERO].workers == {1: 6 * GIB}
    assert story.monitor.observed[ZERO].outgrown == frozenset()
    story.monitor.quit()


async def test_the_part_that_a_share_is_may_be_outgrown_too() -> None:
    story = Story()
    story.start("quarter", memory=BY_SHARE)
    story.start("whole", share=1.0, memory=BY_SHARE)
    story.sees({101: 11 * GIB + 1})
    assert story.monitor.observed[ZERO].outgrown == {1}
    assert story.watched == [{ZERO}]
    story.monitor.quit()


async def test_with_enforcement_it_is_ended_and_its_owner_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = Story(enforces=True)
    story.start("big", memory=6 * GIB)
    story.start("small")
    for _ in range(2):
        story.sees({101: 9 * GIB})
    assert story.told == [(Scheduler.kill_for_memory, WorkerId(1), Memory.DEVICE)]
    assert caplog.records[0].message.endswith("beside it there: small. It is ended.")
    error = story.guard.explain(1, 1)
    assert error is not None
    assert (error.asked, error.peak, error.devices) == (6 * GIB, 9 * GIB, (0,))
    assert error.neighbours == ("small",)
    assert str(error).startswith(
        "big was ended, for it used more GPU memory than was reserved for it."
    )
    assert story.guard.explain(1, 2) is None, "what it had begun since"
    story.monitor.quit()


async def test_a_worker_that_runs_on_leaves_nothing_behind() -> None:
    story = Story(enforces=True)
    story.start("big", memory=6 * GIB)
    worker = story.scheduler.workers.get(WorkerId(1))
    assert worker is not None
    assert worker.task is not None
    for number in range(1, 6):
        worker.task.id = TaskId(number)
        story.sees({101: 9 * GIB})
    assert len(story.told) == 5, "each is another"
    assert len(story.guard._told) == 1
    worker.task = None
    story.sees({101: 9 * GIB})
    assert story.guard._told == set()
    assert story.guard.explain(1, 5) is not None, "its end may still be told"
    story.scheduler.workers._records.clear()
    story.sees()
    assert (story.guard._errors, story.guard._peaks) == ({}, {})
    story.monitor.quit()


async def test_devices_with_reserved_memory_are_looked_at_more_often() -> None:
    story = Story()
    story.start("plain")
    assert story.watched == []
    story.start("big", memory=6 * GIB)
    assert story.watched == [{ZERO}]
    story.sees()
    assert len(story.watched) == 1, "nothing is new"
    worker = story.scheduler.workers.get(WorkerId(2))
    assert worker is not None
    worker.lease = None
    story.sees({102: GIB})
    assert story.watched[1:] == [set()]
    assert "of 0 devices" in repr(story.guard)
    story.monitor.quit()


@pytest.mark.parametrize("foreign", ["avoid", "wait"])
async def test_others_processes_are_told_of_when_they_change(foreign: str) -> None:
    story = Story()
    story.sees({XORG: GIB})
    story.monitor.foreign = foreign
    story.sees({XORG: GIB})
    story.sees({XORG: 2 * GIB})
    told = "others' processes are on it: X (pid 7)"
    assert story.told == [
        (Scheduler.device_changed, *ZERO, Cause.FOREIGN, told, foreign == "avoid")
    ]
    story.sees({os.getpid(): GIB})
    assert story.told[1:] == [
        (Scheduler.device_changed, *ZERO, Cause.FOREIGN, None, foreign == "avoid")
    ]
    story.monitor.quit()


async def test_others_processes_are_nobodys_business_unless_asked_for() -> None:
    story = Story()
    story.sees({XORG: GIB})
    await story.monitor.mind_foreign("ignore")
    assert story.told == []
    story.monitor.quit()
