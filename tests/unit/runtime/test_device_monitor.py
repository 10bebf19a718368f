"""Sampling of devices while tasks run: intervals, health, and GPU memory."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from aiogpu.accelerators.base import Health, Sample
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import Device, Request, Shape, TaskSpec
from aiogpu.core.model.units import BY_SHARE, GPU, UNIT
from aiogpu.core.resources.devices import Cause, DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.linux.procfs import Origin
from aiogpu.observe.status import OtherProcess
from aiogpu.runtime.devices import monitor as module
from aiogpu.runtime.devices import probe_thread as device_thread
from aiogpu.runtime.devices.memory_guard import (
    FOREIGN_IDS,
    ProcessAttribution,
    Sorted,
    Use,
)
from aiogpu.runtime.devices.monitor import (
    CALM,
    DEAREST,
    EACH,
    SOONEST,
    DeviceHealth,
    DeviceMonitor,
    DeviceSampler,
)
from aiogpu.runtime.devices.probe_thread import DeviceThread, Key, Look
from tests.support.waits import until
from tests.unit.runtime.fakes import FakeVendor, FakeWatch, HandLoop, PromptThread

pytestmark = pytest.mark.either_loop

FINE = Sample({}, used=0)
LOST = Sample(problem="GPU is lost", is_lost=True)
UNANSWERED = Sample(problem="Unknown Error")
CONTENT, SILENT = Health(action=""), Health()
XID = Health(("XID 79",), action="")
RESET = Health(action="GPU reset")
OLD_XID = Health(("XID 79",))


class HealthStory:
    """The health of one device, which is sampled every second."""

    def __init__(self) -> None:
        self.health = DeviceHealth()
        self.now = 100.0

    def look(self, health: Health, sample: Sample = FINE) -> str | None:
        """Sample once, assert that a change is reported, and return the reason."""
        before = self.health.reason
        is_changed = self.health.note(sample, health, self.now)
        assert is_changed == (self.health.reason != before)
        self.now += 1.0
        return self.health.reason

    def seconds_until_well(self, health: Health, sample: Sample = FINE) -> int | None:
        """Count the samples until the device is well; None if it never is."""
        for count in range(1, 10 * int(CALM)):
            if self.look(health, sample) is None:
                return count
        return None


@pytest.mark.parametrize(
    ("health", "sample", "reason"),
    [
        (XID, FINE, "XID 79"),
        (RESET, FINE, "the driver asks for this: GPU reset"),
        (SILENT, LOST, "the driver calls it lost"),
        (Health(is_lost=True), FINE, "the driver calls it lost"),
        (
            Health(("XID 79", "XID 48"), "node reboot"),
            FINE,
            "XID 79; XID 48; the driver asks for this: node reboot",
        ),
    ],
)
def test_bad_report_makes_device_sick(
    health: Health, sample: Sample, reason: str
) -> None:
    story = HealthStory()
    assert story.look(health, sample) == reason
    assert story.look(health, sample) == reason, "it is reported once"


WELL, SICK = [(CONTENT, FINE, CALM)], [(XID, FINE, "XID 79")]
AGAIN, OTHER = Health(("XID 79", "XID 63"), ""), Health(("XID 48",), "")
MANY = Health(tuple(f"XID {number}" for number in range(9)), "")
UNRESET, GONE = "the driver asks for this: GPU reset", "the driver calls it lost"
WAS_RESET, STILL = [(SILENT, FINE, CALM)], [(CONTENT, FINE, "XID 79")]
HISTORIES = {
    "content for a while": [*SICK, *WELL],
    "reset": [(RESET, FINE, UNRESET), *WELL],
    "another error": [*SICK, *STILL * 5, (AGAIN, FINE, "XID 79; XID 63"), *WELL],
    "no answer": [*SICK, (CONTENT, UNANSWERED, None), *WELL],
    "a driver without reports": [
        *[(OLD_XID, FINE, "XID 79"), (SILENT, FINE, None)],
        *[(SILENT, LOST, f"{GONE}; XID 79"), *WAS_RESET],
    ],
    "what has to be done is remembered": [
        *[(RESET, FINE, UNRESET), (SILENT, FINE, None)],
        *[(SILENT, LOST, f"{GONE}; {UNRESET}"), *WAS_RESET],
    ],
    "what it was sick of is forgotten": [*SICK, *WELL, (OTHER, FINE, "XID 48")],
    "many": [(MANY, FINE, "XID 0; XID 1; XID 2; XID 3; other errors")],
}


@pytest.mark.parametrize("looks", HISTORIES.values(), ids=HISTORIES)
def test_device_recovers_after_good_reports(
    looks: list[tuple[Health, Sample, str | float | None]],
) -> None:
    """`expected` is the reason, or the number of equal samples until it is well."""
    story = HealthStory()
    for health, sample, expected in looks:
        if isinstance(expected, str):
            assert story.look(health, sample) == expected
        else:
            assert story.seconds_until_well(health, sample) == expected
    assert repr(story.health) == f"<DeviceHealth {story.health.reason or 'well'}>"


ZERO, ONE = ("GPU", 0), ("GPU", 1)
PID = 100


class CostlyThread(PromptThread):
    """Samples devices when the test says so, at a cost that the test sets."""

    cost = 0.0

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self.orders: list[tuple[Sequence[Key], Callable[[Look], None], bool]] = []

    def look(
        self,
        keys: Sequence[Key],
        then: Callable[[Look], None],
        *,
        is_checked: bool = False,
    ) -> None:
        self.orders.append((keys, then, is_checked))

    def work(self) -> None:
        """Carry out the oldest order."""
        keys, then, is_checked = self.orders.pop(0)
        seen = self._look(keys, is_checked)
        then(Look(time.monotonic(), seen.samples, seen.health, {}, self.cost))


class SamplerStory:
    """The sampling of two devices, step by step."""

    def __init__(self) -> None:
        self.watch = FakeWatch(Sample({PID: 5}), Sample())
        self.loop = HandLoop()
        sets = [DeviceSet("GPU", [Device(index, uuid=f"u{index}") for index in (0, 1)])]
        self.thread = CostlyThread(self.loop, sets, [FakeVendor(self.watch)])
        self.seen: list[Look] = []
        self.rounds = DeviceSampler(self.loop, self.thread, self.seen.append)  # type: ignore[arg-type]
        self.rounds.begin()
        self.thread.work()
        self.first = self.seen.pop()

    def step(self) -> tuple[float, Look]:
        """Advance to the next round and make it; return the pause and the samples."""
        pause = self.loop.step()
        while not self.seen:
            self.thread.work()
        return pause, self.seen.pop()


def test_device_with_reserved_memory_is_sampled_more_often() -> None:
    story = SamplerStory()
    story.rounds.watch([ONE])
    pauses, seen = zip(*(story.step() for _ in range(22)), strict=True)
    assert pauses[0] == 0.0
    hot = [look for look in seen if set(look.samples) == {ONE}]
    full = [look for look in seen if set(look.samples) == {ZERO, ONE}]
    assert (len(hot), len(full)) == (20, 2)
    assert not any(look.health for look in hot)
    assert all(pause <= SOONEST + 1e-6 for pause in pauses)
    story.rounds.watch([])
    story.step()
    assert round(story.step()[0], 6) == EACH


def test_slow_samples_are_taken_less_often() -> None:
    story = SamplerStory()
    story.thread.cost = 0.5
    story.rounds.watch([ONE])
    _, seen = story.step()
    assert set(seen.samples) == {ONE}
    pause, seen = story.step()
    assert (set(seen.samples), pause < DEAREST * 0.5) == ({ZERO, ONE}, True)
    pause, _ = story.step()
    assert round(pause, 6) == DEAREST * 1.0


GIB = 1 << 30
UNUSED = Sample({}, reads_pids=True, used=0)
XORG = 7


class FakeThread:
    """A thread that samples nothing; the test provides the samples."""

    def __init__(self, devices: Mapping[Key, Device]) -> None:
        self.devices = devices
        self.waits: tuple[str, float] | None = None
        self.is_alive = True
        self.looks: list[tuple[Sequence[Key], bool]] = []

    def start(self, _on_failed: object) -> None:
        """There is no thread."""

    def name_of(self, key: Key) -> str:
        return f"{key[0]} {self.devices[key].id}"

    def look(
        self, keys: Sequence[Key], _then: object, *, is_checked: bool = False
    ) -> None:
        self.looks.append((keys, is_checked))

    def quit(self) -> None:
        """There is no thread."""

    def mute_for(self) -> tuple[str, float] | None:
        return self.waits


class MonitorStory:
    """A node with two GPUs and tasks on the first one; records what is reported."""

    def __init__(self, enforces: bool = False) -> None:
        devices = [Device(index, uuid=f"u{index}", memory=40 * GIB) for index in (0, 1)]
        ledger = Ledger({"CPU": 9 * UNIT}, [DeviceSet(GPU, devices)])
        self.scheduler = Scheduler(ledger)
        self.thread = FakeThread({(GPU, index): devices[index] for index in (0, 1)})
        self.reported: list[tuple[object, ...]] = []
        self.monitor = DeviceMonitor(
            asyncio.get_running_loop(),
            self.scheduler,
            self.thread,  # type: ignore[arg-type]
            lambda: {100 + worker.id: worker.id for worker in self.scheduler.workers},
            lambda *event: self.reported.append(event),
            lambda _key: {},
        )
        self.guard = self.monitor.guard
        self.guard.enforces = enforces
        self.watched: list[set[Key]] = []
        self.guard._on_hot = lambda keys: self.watched.append(set(keys))
        self.when = time.monotonic()

    def start(self, name: str, share: float = 0.25, memory: int = 0) -> None:
        """Start a task on worker n, which has process 100 + n."""
        number = len(list(self.scheduler.workers)) + 1
        request = Request.of({"CPU": UNIT}, {GPU: int(share * UNIT)}, gpu_memory=memory)
        spec = TaskSpec(name, Shape(request))
        self.scheduler.submit(0.0, TaskId(number), spec)
        self.scheduler.worker_started(0.0, WorkerId(number))
        worker: Any = self.scheduler.workers.get(WorkerId(number))
        self.guard.begin(worker.lease)

    def see(
        self,
        used: Mapping[int, int] | None = None,
        health: Health | None = None,
        sample: Sample | None = None,
    ) -> None:
        """Report the first GPU's memory by process, and its health."""
        used = used or {}
        sample = sample or Sample(used, frozenset(used), True, sum(used.values()), 87)
        samples = {ZERO: sample, ONE: UNUSED}
        healths = {ZERO: health or Health(action=""), ONE: Health(action="")}
        origins = {pid: Origin("python", ()) for pid in used} | {XORG: Origin("X", ())}
        self.when += 1.0
        self.monitor.on_round(Look(self.when, samples, healths, origins))


async def test_devices_of_hung_driver_are_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT", 0.03)
    story = MonitorStory()
    story.start("a")
    worker: Any = story.scheduler.workers.get(WorkerId(1))
    assert story.monitor.release.end(worker.id, worker.lease, [101])
    story.thread.waits = GPU, 0.01
    story.see()
    story.thread.waits = GPU, 0.05
    await until(lambda: story.reported)
    reason = "the driver has not answered for 0.03 s"
    assert story.reported.pop(0) == (Scheduler.devices_stuck, 1, f"GPU 0: {reason}")
    assert story.reported == [
        (Scheduler.device_changed, GPU, 0, Cause.SICK, reason),
        (Scheduler.device_changed, GPU, 1, Cause.SICK, reason),
    ]
    story.thread.waits = None
    story.see(health=Health(("XID 79",), ""))
    assert story.reported[2:] == [
        (Scheduler.device_changed, GPU, 0, Cause.SICK, "XID 79"),
        (Scheduler.device_changed, GPU, 1, Cause.SICK, None),
    ]
    story.monitor.quit()


async def test_task_that_exceeds_its_reserved_memory_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = MonitorStory()
    story.start("big", memory=6 * GIB)
    story.start("small")
    story.see({101: 7 * GIB, 102: 30 * GIB})
    assert story.monitor.observed[ZERO].outgrown == frozenset()
    for _ in range(2):
        story.see({101: 7 * GIB + 1, 102: 30 * GIB})
        assert story.monitor.observed[ZERO].outgrown == {1}
    assert [record.message for record in caplog.records] == [
        "! big uses 7.1GiB of GPU 0, but has asked for 6GiB (gpu_memory=); it shares "
        "the device with small. It goes on; init(gpu_memory_enforce=True) would end it."
    ]
    assert story.reported == []
    assert story.guard.explain(1, 1) is None
    assert (story.guard.peak_of(1), story.guard.peak_of(9)) == (7 * GIB + 1, 0)
    story.monitor.quit()


async def test_task_with_memory_by_share_can_exceed_its_share() -> None:
    story = MonitorStory()
    story.start("quarter", memory=BY_SHARE)
    story.start("whole", share=1.0, memory=BY_SHARE)
    story.see({101: 11 * GIB + 1})
    assert story.monitor.observed[ZERO].outgrown == {1}
    assert story.watched == [{ZERO}]
    story.monitor.quit()


KEEPER_PID, WORKER_PID, CHILD, ORPHAN, OTHER, ENDED = 50, 100, 101, 102, 200, 300
ROOTS = {KEEPER_PID: 1, WORKER_PID: 1}
ORIGINS = {
    WORKER_PID: Origin("python", (KEEPER_PID, 10)),
    CHILD: Origin("sh", (WORKER_PID, KEEPER_PID, 10)),
    ORPHAN: Origin("sh", (KEEPER_PID, 10)),
    OTHER: Origin("Xorg", (2,)),
    os.getpid(): Origin("python", (2,)),
}


def listed(*pids: int, reads_pids: bool = True) -> Sample:
    return Sample(dict.fromkeys(pids, GIB), frozenset(), reads_pids, 9 * GIB)


def attribute(owners: ProcessAttribution, sample: Sample) -> Sorted:
    return owners.sort("GPU", sample, ORIGINS, ROOTS)


def test_reused_process_id_is_attributed_again() -> None:
    owners = ProcessAttribution()
    attribute(owners, listed(WORKER_PID))
    sorted_ = owners.sort("GPU", listed(WORKER_PID), {WORKER_PID: Origin("x", ())}, {})
    assert sorted_.others == (OtherProcess(WORKER_PID, "x", GIB),)
    assert owners.sort("GPU", listed(WORKER_PID), {}, {}) == Sorted()


def test_foreign_process_ids_are_unknown_until_a_worker_is_listed() -> None:
    owners = ProcessAttribution()
    theirs, ours = (listed(pid, reads_pids=False) for pid in (OTHER, WORKER_PID))
    assert attribute(owners, theirs) == Sorted({}, None, FOREIGN_IDS)
    assert attribute(owners, ours) == Sorted({1: Use(GIB, 1)}, ())
    assert attribute(owners, theirs).others == (OtherProcess(OTHER, "Xorg", GIB),)
    assert owners.sort("TPU", theirs, ORIGINS, ROOTS).unknown == FOREIGN_IDS


def test_container_reports_an_unseen_process_after_the_round() -> None:
    owners = ProcessAttribution()
    sample = listed(WORKER_PID, ENDED, reads_pids=False)
    assert attribute(owners, sample).others == (), "it may have ended just now"
    owners.end_round({WORKER_PID, ENDED})
    assert attribute(owners, sample).others == (OtherProcess(ENDED, "", GIB),)


async def test_driver_that_fails_to_close_does_not_delay_the_node(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_thread, "CLOSE_LIMIT", 20.0)

    class Failing(FakeWatch):
        def close(self) -> None:
            raise RuntimeError("it has gone")

    loop, sets = asyncio.get_running_loop(), [DeviceSet("GPU", [Device(0, uuid="a")])]
    thread = DeviceThread(loop, sets, [FakeVendor(Failing(UNUSED))])
    thread.start(lambda: None)
    thread.look(list(thread.devices), lambda _look: None, is_checked=True)
    started = loop.time()
    await thread.close()
    assert loop.time() - started < 20.0
    assert "driver of GPU could not be shut down" in caplog.text
