"""When the share of an ended worker is free: the rule, and the sampling."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from aiogpu.accelerators.base import Sample
from aiogpu.core.model.ids import WorkerId
from aiogpu.core.model.request import Device
from aiogpu.core.model.units import UNIT
from aiogpu.core.resources.devices import Cause, DeviceSet
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.runtime.devices import probe_thread as device_thread
from aiogpu.runtime.devices import release as module
from aiogpu.runtime.devices.probe_thread import DeviceThread
from aiogpu.runtime.devices.release import (
    FREE,
    PAUSES,
    TOLERANCE,
    UNVERIFIED,
    DeviceRelease,
    ReleaseState,
    verdict,
)
from tests.unit.runtime.fakes import (
    FakeVendor,
    FakeWatch,
    HandLoop,
    PromptThread,
    lease_of,
)

MINE, CHILD, OTHER = 100, 101, 200
"""The worker, an unknown descendant of it, and another process, which lives."""
GIB = 1 << 30
IDLE = Sample({}, reads_pids=True, used=GIB)
HELD, LOST = ReleaseState.HELD, ReleaseState.LOST


def host(
    *pids: int, living: tuple[int, ...] = (OTHER,), used: int | None = 2 * GIB
) -> Sample:
    """A sample from a driver that reports the process ids of this namespace."""
    return Sample(dict.fromkeys(pids, GIB), frozenset(living), True, used)


def foreign(*pids: int, used: int | None = 2 * GIB) -> Sample:
    """A sample from a driver that reports process ids of another namespace."""
    return Sample(dict.fromkeys(pids, GIB), frozenset(), False, used)


@pytest.mark.parametrize(
    ("before", "now", "whole", "fraction"),
    [
        # Process ids can be read.
        (IDLE, host(), FREE, FREE),
        (IDLE, host(MINE), HELD, HELD),
        (IDLE, host(CHILD), HELD, HELD),
        (IDLE, host(OTHER), FREE, FREE),
        (IDLE, host(OTHER, CHILD), HELD, HELD),
        (IDLE, host(MINE, living=(MINE,)), HELD, HELD),  # its id was reused
        (host(CHILD, used=GIB), host(CHILD), FREE, FREE),  # listed earlier
        (host(MINE, used=GIB), host(MINE), HELD, HELD),  # an earlier process had its id
        (IDLE, host(MINE, used=GIB), FREE, HELD),
        (IDLE, host(MINE, used=GIB + TOLERANCE), FREE, HELD),
        (IDLE, host(MINE, used=GIB + TOLERANCE + 1), HELD, HELD),
        (IDLE, host(MINE, used=None), HELD, HELD),
        (Sample(), host(MINE), HELD, HELD),
        # Ids cannot be read, and a process is listed: the list is complete.
        (foreign(used=GIB), foreign(9001), HELD, UNVERIFIED),
        (foreign(9001, used=GIB), foreign(9001), FREE, FREE),
        (foreign(9001, used=GIB), foreign(), FREE, FREE),
        (foreign(9001, used=GIB), foreign(9001, 9002), HELD, UNVERIFIED),
        (foreign(used=GIB), foreign(9001, used=GIB), FREE, UNVERIFIED),
        # Ids cannot be read, and no process is ever listed: the list may be empty.
        (foreign(used=GIB), foreign(), HELD, UNVERIFIED),
        (foreign(used=GIB), foreign(used=GIB), FREE, UNVERIFIED),
        (foreign(used=None), foreign(used=None), UNVERIFIED, UNVERIFIED),
        # The driver has no list.
        (Sample(used=GIB), Sample(used=GIB), FREE, UNVERIFIED),
        (Sample(used=GIB), Sample(used=2 * GIB), HELD, UNVERIFIED),
        (Sample(used=GIB), Sample(), UNVERIFIED, UNVERIFIED),
        (Sample(), Sample(used=GIB), UNVERIFIED, UNVERIFIED),
        # The driver fails.
        (IDLE, Sample(problem="Unknown Error"), UNVERIFIED, UNVERIFIED),
        (IDLE, Sample(problem="GPU is lost", is_lost=True), LOST, LOST),
    ],
)
def test_verdict_follows_from_the_samples_before_and_after(
    before: Sample, now: Sample, whole: object, fraction: object
) -> None:
    for is_whole, expected in ((True, whole), (False, fraction)):
        result = verdict(before, now, {MINE}, is_whole=is_whole)
        assert (result if result.reason == "" else result.state) == expected, is_whole


def test_reason_names_processes_and_bytes() -> None:
    unknown = Sample({MINE: None}, reads_pids=True, used=2 * GIB)
    many = Sample(dict.fromkeys(range(300, 305)), reads_pids=True, used=2 * GIB)
    size = "with 1024 MiB (1073741824 bytes)"
    for sample, processes in (
        (host(MINE), f"pid 100 {size}"),
        (unknown, "pid 100"),
        (many, "pid 300, pid 301, pid 302 and 2 more"),
        (host(CHILD, MINE), f"pid 100 {size}"),  # the worker, not its child
    ):
        reason = verdict(IDLE, sample, {MINE}, is_whole=True).reason
        assert reason == f"the driver still lists ended processes: {processes}"


ZERO, ONE = ("GPU", 0), ("GPU", 1)
LIMIT = 10.0
RECOVERED = (Scheduler.device_changed, *ZERO, Cause.UNSETTLED, None)


def sample(*pids: int, used: int = GIB, reads_pids: bool = True) -> Sample:
    return Sample(dict.fromkeys(pids, GIB), frozenset(), reads_pids, used)


QUIET, BUSY = sample(), sample(MINE, used=2 * GIB)


def free(worker: int = 1, is_verified: bool = True) -> tuple[object, ...]:
    return Scheduler.devices_free, worker, is_verified


class ReleaseStory:
    """Two GPUs and a release; records what the release reports."""

    def __init__(
        self, zero: Sample = QUIET, one: Sample = QUIET, *, has_looked: bool = True
    ) -> None:
        self.watch = FakeWatch(zero, one)
        self.loop = HandLoop()
        sets = [DeviceSet("GPU", [Device(i, uuid=f"GPU-{i}") for i in range(2)])]
        thread = PromptThread(self.loop, sets, [FakeVendor(self.watch)])  # type: ignore[arg-type]
        self.reports: list[tuple[object, ...]] = []
        self.release = DeviceRelease(
            self.loop,  # type: ignore[arg-type]
            thread,
            lambda *event: self.reports.append(event),
            id,
            LIMIT,
        )
        self.thread = thread
        if has_looked:
            self.look_first()
        self.began = self.loop.now

    def look_first(self) -> None:
        """Take the samples of the first round."""
        self.thread.look(
            [ZERO, ONE], lambda look: self.release.note_first(look.samples)
        )

    @property
    def now(self) -> float:
        return round(self.loop.now - self.began, 6)

    def put(self, zero: Sample | None = None, one: Sample | None = None) -> None:
        for index, on in enumerate((zero, one)):
            if on is not None:
                self.watch.on[index] = on

    def begin(self, worker: int = 1, *keys: tuple[str, int]) -> None:
        self.release.begin(WorkerId(worker), lease_of(*[i for _, i in keys or (ZERO,)]))

    def news(self) -> list[tuple[object, ...]]:
        reports, self.reports = self.reports, []
        return reports

    def end(
        self,
        worker: int = 1,
        keys: tuple[tuple[str, int], ...] = (ZERO,),
        is_whole: bool = True,
        pid: int = MINE,
    ) -> list[tuple[object, ...]]:
        share = UNIT if is_whole else UNIT // 4
        lease = lease_of(*[index for _, index in keys], share=share)
        assert self.release.end(WorkerId(worker), lease, (pid,))
        return self.news()

    def step(self) -> list[tuple[object, ...]]:
        """Advance to the next sample and take it."""
        self.loop.step()
        return self.news()

    def until_told(self) -> list[tuple[object, ...]]:
        while not (reports := self.step()):
            assert self.now < 100
        return reports


def test_pauses_between_samples_grow() -> None:
    story = ReleaseStory()
    story.put(BUSY)
    assert story.end() == []
    moments = [0.0]
    while story.now < 2:
        assert story.step() == []
        moments.append(story.now)
    pauses = [b - a for a, b in pairwise(moments)]
    assert pauses[: len(PAUSES)] == pytest.approx(PAUSES)
    assert pauses[len(PAUSES) :] == pytest.approx(
        [PAUSES[-1]] * (len(pauses) - len(PAUSES))
    )
    story.put(QUIET)
    assert story.step() == [free()]
    assert story.loop.due is None


def test_each_device_of_a_worker_recovers_by_itself() -> None:
    story = ReleaseStory()
    story.begin(1, ZERO, ONE)
    story.put(one=BUSY)
    assert story.end(keys=(ZERO, ONE)) == []
    (step, _, reason), cleared = story.until_told()
    assert step is Scheduler.devices_stuck
    assert str(reason).startswith("GPU 1: ")
    assert cleared == RECOVERED
    assert story.watch.looks[0] == 3, "a free device is not sampled again"
    story.put(one=QUIET)
    assert story.step() == [(Scheduler.device_changed, *ONE, Cause.UNSETTLED, None)]


def test_late_sample_is_not_the_idle_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiogpu.runtime.devices.release.LATE", -1.0)
    story = ReleaseStory()
    story.put(Sample(used=2 * GIB))
    story.begin()
    assert story.end() == []


def test_first_sample_after_a_worker_began_is_not_the_idle_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow driver answers for the first time when a worker has allocated memory."""
    monkeypatch.setattr("aiogpu.runtime.devices.release.LATE", -1.0)
    story = ReleaseStory(has_looked=False)
    story.begin(1, ONE)
    story.put(one=sample(CHILD, used=2 * GIB))
    story.look_first()
    assert story.end(keys=(ONE,)) == []
    story.put(one=QUIET)
    assert story.step() == [free()]


def test_idle_sample_that_lists_the_worker_is_corrected() -> None:
    story = ReleaseStory()
    story.put(sample(MINE, used=2 * GIB))
    story.begin()
    assert story.end() == []


def test_driver_without_answer_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    failing = Sample(problem="NVML does not start: Driver Not Loaded")
    story = ReleaseStory(failing, failing)
    assert story.end() == [free(1, False)]
    assert story.end(keys=(ZERO, ONE), is_whole=False) == [free(1, False)]
    (record,) = caplog.records
    assert record.getMessage() == (
        "! GPU 0 cannot be inspected: NVML does not start: Driver Not Loaded. Until it "
        "can, its shares are free as soon as their processes have ended, without a "
        "check of the device."
    )


def test_process_ids_are_trusted_after_a_worker_was_listed() -> None:
    """In a container, the driver may list process ids of either namespace."""
    quiet = sample(reads_pids=False)
    story = ReleaseStory(quiet, quiet)
    assert story.end(is_whole=False) == [free(1, False)]
    story.put(sample(MINE, used=2 * GIB, reads_pids=False))
    assert story.end(is_whole=False) == []
    story.put(quiet)
    assert story.step() == [free()]
    assert story.end(2, (ONE,), is_whole=False) == [free(2)]


WORKER_1, WORKER_2 = WorkerId(1), WorkerId(2)
UNUSED = Sample({}, reads_pids=True, used=0)


WHOLE, PART = lease_of(0), lease_of(0, share=UNIT // 4)


@dataclass
class RealRelease:
    """A release with a real thread; its reports are in a queue."""

    thread: DeviceThread
    limit: float
    reports: asyncio.Queue[tuple[object, ...]] = field(default_factory=asyncio.Queue)
    device_release: DeviceRelease = field(init=False)

    def __post_init__(self) -> None:
        self.device_release = begin(self.thread, self.tell, self.limit)

    def tell(self, step: object, *arguments: object) -> None:
        self.reports.put_nowait((STEPS[step], *arguments))

    async def close(self) -> None:
        self.device_release.close()
        await self.thread.close()

    async def next(self) -> tuple[object, ...]:
        async with asyncio.timeout(60):
            return await self.reports.get()


def start_release(
    watch: FakeWatch, limit: float = 20.0, devices: tuple[Device, ...] | None = None
) -> RealRelease:
    given = (Device(0, uuid="a"), Device(1, uuid="b")) if devices is None else devices
    sets = [DeviceSet("GPU", given), DeviceSet("TPU", [Device(0, uuid="t")])]
    loop = asyncio.get_running_loop()
    thread = DeviceThread(loop, sets, [FakeVendor(watch)])
    return RealRelease(thread, limit)


STEPS = {
    Scheduler.devices_free: "settled",
    Scheduler.devices_stuck: "set aside",
    Scheduler.device_changed: "recovered",
}
RECOVERED_BY_THREAD = ("recovered", "GPU", 0, Cause.UNSETTLED, None)


def begin(
    thread: DeviceThread, feed: Callable[..., None], limit: float = 20.0
) -> DeviceRelease:
    release = DeviceRelease(thread._loop, thread, feed, id, limit)  # type: ignore[arg-type]
    thread.start(release.give_up)
    thread.look(list(thread.devices), lambda look: release.note_first(look.samples))
    return release


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "aiogpu-devices"]


def join_all() -> None:
    for thread in threads():
        thread.join(20)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    assert threads() == []
    yield
    assert threads() == []


@pytest.fixture(autouse=True)
def no_look_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, the thread may start too late for a sample to count."""
    monkeypatch.setattr(module, "LATE", math.inf)


class Hanging(FakeWatch):
    """A driver that hangs in `look` until the test sets `is_free`."""

    def __init__(self) -> None:
        super().__init__(UNUSED, UNUSED)
        self.is_free = threading.Event()

    def look(self, device: Device) -> Sample:
        if device.id == 0:
            assert self.is_free.wait(20)
        return super().look(device)


async def test_hung_driver_delays_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_thread, "CLOSE_LIMIT", 0.02)
    watch = Hanging()
    story = start_release(watch, limit=0.01)
    assert story.device_release.end(WORKER_1, WHOLE, [MINE])
    story.device_release.on_mute("TPU", 15.0)
    story.device_release.on_mute("GPU", 15.0)
    assert await story.next() == (
        "set aside",
        WORKER_1,
        "GPU 0: the driver has not answered for 15 s",
    )
    assert story.device_release.end(WORKER_2, PART, [MINE])
    story.device_release.on_mute("GPU", 15.0)
    assert (await story.next())[:2] == ("set aside", WORKER_2)
    watch.is_free.set()
    assert await story.next() == RECOVERED_BY_THREAD
    await story.close()


async def test_close_does_not_wait_for_hung_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_thread, "CLOSE_LIMIT", 0.02)
    watch = Hanging()
    story = start_release(watch)
    assert story.device_release.end(WORKER_1, WHOLE, [MINE])
    (thread,) = threads()
    await story.close()
    assert thread.is_alive()
    watch.is_free.set()
    await asyncio.get_running_loop().run_in_executor(None, thread.join, 60)
    assert story.reports.empty(), "after the close, nothing is reported"
    assert watch.calls == ["open", "close"]


class Broken(FakeWatch):
    """A driver whose code has a bug."""

    def look(self, device: Device) -> Sample:
        if self.looks[device.id]:
            raise ZeroDivisionError
        return super().look(device)


async def test_error_in_a_driver_is_logged_and_ends_the_sampling(
    caplog: pytest.LogCaptureFixture,
) -> None:
    story = start_release(Broken(UNUSED, UNUSED))
    assert story.device_release.end(WORKER_1, WHOLE, [MINE])
    assert await story.next() == ("settled", WORKER_1, False)
    await asyncio.get_running_loop().run_in_executor(None, join_all)
    assert not story.device_release.end(WORKER_2, PART, [MINE]), "no thread samples"
    assert "devices are no longer monitored" in caplog.text
    await story.close()


def test_closed_loop_gets_no_event() -> None:
    loop = asyncio.new_event_loop()
    sets = [DeviceSet("GPU", [Device(0, uuid="a")])]
    sampler = DeviceThread(loop, sets, [FakeVendor(FakeWatch(UNUSED))])
    device_release = begin(sampler, print)
    (thread,) = threads()
    assert device_release.end(WORKER_1, WHOLE, [MINE])
    loop.close()
    device_release.close()
    sampler.quit()
    thread.join(20)
    assert not thread.is_alive()
