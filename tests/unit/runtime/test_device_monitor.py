"""What is seen on devices while tasks run: when, and what follows."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence

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
from tests.support.until import until
from tests.unit.runtime.fakes import FakeVendor, FakeWatch, HandLoop, PromptThread

pytestmark = pytest.mark.either_loop

FINE = Sample({}, used=0)
LOST = Sample(problem="GPU is lost", is_lost=True)
MUTE = Sample(problem="Unknown Error")
CONTENT, SILENT = Health(action=""), Health()
XID = Health(("XID 79",), action="")
RESET = Health(action="GPU reset")
OLD_XID = Health(("XID 79",))


class HealthStory:
    """One device's health, told in order; a look each second."""

    def __init__(self) -> None:
        self.health = DeviceHealth()
        self.now = 100.0

    def look(self, health: Health, sample: Sample = FINE) -> str | None:
        """One look; gives the reason, having asserted that changes are told."""
        before = self.health.reason
        is_told = self.health.note(sample, health, self.now)
        assert is_told == (self.health.reason != before)
        self.now += 1.0
        return self.health.reason

    def seconds_until_well(self, health: Health, sample: Sample = FINE) -> int | None:
        """How often it must be said until the device is well, None for never."""
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
def test_each_bad_report_makes_a_device_sick(
    health: Health, sample: Sample, reason: str
) -> None:
    story = HealthStory()
    assert story.look(health, sample) == reason
    assert story.look(health, sample) == reason, "and is told once"


WELL, SICK = [(CONTENT, FINE, CALM)], [(XID, FINE, "XID 79")]
AGAIN, OTHER = Health(("XID 79", "XID 63"), ""), Health(("XID 48",), "")
MANY = Health(tuple(f"XID {number}" for number in range(9)), "")
UNRESET, GONE = "the driver asks for this: GPU reset", "the driver calls it lost"
WAS_RESET, STILL = [(SILENT, FINE, CALM)], [(CONTENT, FINE, "XID 79")]
HISTORIES = {
    "content for a while": [*SICK, *WELL],
    "reset": [(RESET, FINE, UNRESET), *WELL],
    "another error": [*SICK, *STILL * 5, (AGAIN, FINE, "XID 79; XID 63"), *WELL],
    "no answer": [*SICK, (CONTENT, MUTE, None), *WELL],
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
def test_it_is_sick_or_well_after_each_look(
    looks: list[tuple[Health, Sample, str | float | None]],
) -> None:
    """Each gives the reason, or how many alike it takes until the device is well."""
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
    """Looks cost what a test says; they are made when it says so."""

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
        """Look at what was asked for first."""
        keys, then, is_checked = self.orders.pop(0)
        seen = self._look(keys, is_checked)
        then(Look(time.monotonic(), seen.samples, seen.health, {}, self.cost))


class SamplerStory:
    """The rounds to two devices, told in order."""

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
        """Go to when the next round is due, and make it; gives how long that was."""
        pause = self.loop.step()
        while not self.seen:
            self.thread.work()
        return pause, self.seen.pop()


def test_where_memory_is_reserved_looks_are_more_frequent() -> None:
    story = SamplerStory()
    story.rounds.watch([ONE])
    pauses, seen = zip(*(story.step() for _ in range(22)), strict=True)
    assert pauses[0] == 0.0
    hot = [one for one in seen if set(one.samples) == {ONE}]
    full = [one for one in seen if set(one.samples) == {ZERO, ONE}]
    assert (len(hot), len(full)) == (20, 2)
    assert all(not one.health for one in hot)
    assert all(pause <= SOONEST + 1e-6 for pause in pauses)
    story.rounds.watch([])
    story.step()
    assert round(story.step()[0], 6) == EACH


def test_costly_looks_are_rare() -> None:
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


class MonitorStory:
    """A node with two GPUs, of which the first one has tasks, and what is told."""

    def __init__(self, enforces: bool = False) -> None:
        devices = [Device(index, uuid=f"u{index}", memory=40 * GIB) for index in (0, 1)]
        ledger = Ledger({"CPU": 9 * UNIT}, [DeviceSet(GPU, devices)])
        self.scheduler = Scheduler(ledger)
        self.thread = FakeThread({(GPU, index): devices[index] for index in (0, 1)})
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

    def see(
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
        self.monitor.on_round(
            Look(self.when, {ZERO: found, ONE: UNUSED}, told, origins)
        )


async def test_the_devices_of_a_driver_that_hangs_are_sick_until_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "SILENT", 0.03)
    story = MonitorStory()
    story.start("a")
    worker = story.scheduler.workers.get(WorkerId(1))
    assert worker is not None
    assert worker.lease is not None
    assert story.monitor.release.end(worker.id, worker.lease, [101])
    story.thread.waits = GPU, 0.01
    story.see()
    story.thread.waits = GPU, 0.05
    await until(lambda: story.told)
    reason = "the driver has not answered for 0.03 s"
    assert story.told.pop(0) == (Scheduler.devices_stuck, 1, f"GPU 0: {reason}")
    assert story.told == [
        (Scheduler.device_changed, GPU, 0, Cause.SICK, reason),
        (Scheduler.device_changed, GPU, 1, Cause.SICK, reason),
    ]
    story.thread.waits = None
    story.see(health=Health(("XID 79",), ""))
    assert story.told[2:] == [
        (Scheduler.device_changed, GPU, 0, Cause.SICK, "XID 79"),
        (Scheduler.device_changed, GPU, 1, Cause.SICK, None),
    ]
    story.monitor.quit()


async def test_a_task_that_outgrows_what_it_reserved_is_named_once(
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
        "! big uses 7.1GiB of GPU 0, and had asked for 6GiB (gpu_memory=); beside it "
        "there: small. It goes on; init(gpu_memory_enforce=True) would end it."
    ]
    assert story.told == []
    assert story.guard.explain(1, 1) is None
    assert (story.guard.peak_of(1), story.guard.peak_of(9)) == (7 * GIB + 1, 0)
    story.monitor.quit()


async def test_the_part_that_a_share_is_may_be_outgrown_too() -> None:
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


def test_an_id_that_is_used_again_is_looked_at_anew() -> None:
    owners = ProcessAttribution()
    attribute(owners, listed(WORKER_PID))
    found = owners.sort("GPU", listed(WORKER_PID), {WORKER_PID: Origin("x", ())}, {})
    assert found.others == (OtherProcess(WORKER_PID, "x", GIB),)
    assert owners.sort("GPU", listed(WORKER_PID), {}, {}) == Sorted()


def test_foreign_ids_are_called_that_until_one_of_ours_is_listed() -> None:
    owners = ProcessAttribution()
    theirs, ours = (listed(pid, reads_pids=False) for pid in (OTHER, WORKER_PID))
    assert attribute(owners, theirs) == Sorted({}, None, FOREIGN_IDS)
    assert attribute(owners, ours) == Sorted({1: Use(GIB, 1)}, ())
    assert attribute(owners, theirs).others == (OtherProcess(OTHER, "Xorg", GIB),)
    assert owners.sort("TPU", theirs, ORIGINS, ROOTS).unknown == FOREIGN_IDS


def test_in_a_container_one_that_is_not_seen_may_live_elsewhere() -> None:
    owners = ProcessAttribution()
    sample = listed(WORKER_PID, ENDED, reads_pids=False)
    assert attribute(owners, sample).others == (), "or has ended just now"
    owners.end_round({WORKER_PID, ENDED})
    assert attribute(owners, sample).others == (OtherProcess(ENDED, "", GIB),)


def make_thread(watch: FakeWatch, *ids: str | None) -> tuple[DeviceThread, list[Look]]:
    devices = [Device(index, uuid=uuid) for index, uuid in enumerate(ids)]
    loop = asyncio.get_running_loop()
    thread = DeviceThread(loop, [DeviceSet("GPU", devices)], [FakeVendor(watch)])
    return thread, []


def start(thread: DeviceThread, seen: list[Look]) -> None:
    thread.start(lambda: None)
    if thread.devices:
        thread.look(list(thread.devices), seen.append, is_checked=True)


async def test_a_driver_that_fails_to_close_delays_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_thread, "CLOSE_LIMIT", 20.0)

    class Failing(FakeWatch):
        def close(self) -> None:
            raise RuntimeError("it has gone")

    thread, seen = make_thread(Failing(UNUSED), "a")
    start(thread, seen)
    started = asyncio.get_running_loop().time()
    await thread.close()
    assert asyncio.get_running_loop().time() - started < 20.0
    assert "driver of GPU could not be let go" in caplog.text
