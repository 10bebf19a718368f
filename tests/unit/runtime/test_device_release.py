"""When the share of an ended worker is free: the rule, and the looks."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from aiogpu.accelerators.base import Sample
from aiogpu.core.model.ids import LeaseId, WorkerId
from aiogpu.core.model.request import Device, Request
from aiogpu.core.model.units import UNIT
from aiogpu.core.resources.devices import Cause, DeviceSet
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.runtime.devices import probe_thread as device_thread
from aiogpu.runtime.devices import release as module
from aiogpu.runtime.devices.probe_thread import DeviceThread, Look
from aiogpu.runtime.devices.release import (
    FREE,
    PAUSES,
    TOLERANCE,
    UNVERIFIED,
    DeviceRelease,
    State,
    verdict,
)
from tests.unit.runtime.fakes import FakeVendor, FakeWatch, HandLoop, PromptThread

MINE, CHILD, OTHER = 100, 101, 200
"""The worker, a descendant that nobody knows by name, and somebody who lives."""
GIB = 1 << 30
IDLE = Sample({}, reads_pids=True, used=GIB)
HELD, LOST = State.HELD, State.LOST


def host(
    *pids: int, living: tuple[int, ...] = (OTHER,), used: int | None = 2 * GIB
) -> Sample:
    """What a driver says whose process ids are ours."""
    return Sample(dict.fromkeys(pids, GIB), frozenset(living), True, used)


def foreign(*pids: int, used: int | None = 2 * GIB) -> Sample:
    """What a driver says from out of another namespace."""
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
        (IDLE, host(MINE, living=(MINE,)), HELD, HELD),  # its id was given anew
        (host(CHILD, used=GIB), host(CHILD), FREE, FREE),  # a phantom of earlier
        (host(MINE, used=GIB), host(MINE), HELD, HELD),  # an earlier one of that id
        (IDLE, host(MINE, used=GIB), FREE, HELD),
        (IDLE, host(MINE, used=GIB + TOLERANCE), FREE, HELD),
        (IDLE, host(MINE, used=GIB + TOLERANCE + 1), HELD, HELD),
        (IDLE, host(MINE, used=None), HELD, HELD),
        (Sample(), host(MINE), HELD, HELD),
        # They cannot, and somebody is listed: the list is complete.
        (foreign(used=GIB), foreign(9001), HELD, UNVERIFIED),
        (foreign(9001, used=GIB), foreign(9001), FREE, FREE),
        (foreign(9001, used=GIB), foreign(), FREE, FREE),
        (foreign(9001, used=GIB), foreign(9001, 9002), HELD, UNVERIFIED),
        (foreign(used=GIB), foreign(9001, used=GIB), FREE, UNVERIFIED),
        # They cannot, and nobody is ever listed: the list may be blind.
        (foreign(used=GIB), foreign(), HELD, UNVERIFIED),
        (foreign(used=GIB), foreign(used=GIB), FREE, UNVERIFIED),
        (foreign(used=None), foreign(used=None), UNVERIFIED, UNVERIFIED),
        # There is no list.
        (Sample(used=GIB), Sample(used=GIB), FREE, UNVERIFIED),
        (Sample(used=GIB), Sample(used=2 * GIB), HELD, UNVERIFIED),
        (Sample(used=GIB), Sample(), UNVERIFIED, UNVERIFIED),
        (Sample(), Sample(used=GIB), UNVERIFIED, UNVERIFIED),
        # The driver fails.
        (IDLE, Sample(problem="Unknown Error"), UNVERIFIED, UNVERIFIED),
        (IDLE, Sample(problem="GPU is lost", is_lost=True), LOST, LOST),
    ],
)
def test_the_rule(before: Sample, now: Sample, whole: object, fraction: object) -> None:
    for is_whole, expected in ((True, whole), (False, fraction)):
        found = verdict(before, now, {MINE}, is_whole=is_whole)
        assert (found if found.reason == "" else found.state) == expected, is_whole


def reason(before: Sample, now: Sample, *, is_whole: bool = True) -> str:
    return verdict(before, now, {MINE}, is_whole=is_whole).reason


def test_a_reason_names_processes_and_bytes() -> None:
    still = "of what has ended, the driver still lists "
    assert (
        reason(IDLE, host(MINE)) == f"{still}pid 100 with 1024 MiB (1073741824 bytes)"
    )
    unknown = Sample({MINE: None}, reads_pids=True, used=2 * GIB)
    assert reason(IDLE, unknown) == f"{still}pid 100"
    many = Sample(dict.fromkeys(range(300, 305)), reads_pids=True, used=2 * GIB)
    assert reason(IDLE, many) == f"{still}pid 300, pid 301, pid 302 and 2 more"
    # Of its own process and others that have ended, its own is told of.
    assert reason(IDLE, host(CHILD, MINE)).startswith(f"{still}pid 100 with")


ZERO, ONE = ("GPU", 0), ("GPU", 1)
LIMIT = 10.0
RECOVERED = (Scheduler.device_changed, *ZERO, Cause.UNSETTLED, None)


def sample(*pids: int, used: int = GIB, reads_pids: bool = True) -> Sample:
    return Sample(dict.fromkeys(pids, GIB), frozenset(), reads_pids, used)


QUIET, BUSY = sample(), sample(MINE, used=2 * GIB)


def lease_of(keys: tuple[tuple[str, int], ...], part: int) -> Lease:
    shares = tuple((index, part) for _, index in keys)
    request = Request.of({"CPU": UNIT}, {"GPU": part * len(keys)})
    return Lease(LeaseId(1), request, (shares,), Ledger({}))


def free(worker: int = 1, is_verified: bool = True) -> tuple[object, ...]:
    return Scheduler.devices_free, worker, is_verified


class ReleaseStory:
    """Two GPUs, told in order."""

    def __init__(self, zero: Sample = QUIET, one: Sample = QUIET) -> None:
        self.watch = FakeWatch(zero, one)
        self.loop = HandLoop()
        sets = [DeviceSet("GPU", [Device(i, uuid=f"GPU-{i}") for i in range(2)])]
        thread = PromptThread(self.loop, sets, [FakeVendor(self.watch)])  # type: ignore[arg-type]
        self.told: list[tuple[object, ...]] = []
        self.release = DeviceRelease(
            self.loop,  # type: ignore[arg-type]
            thread,
            lambda *event: self.told.append(event),
            id,
            LIMIT,
        )
        thread.look([ZERO, ONE], lambda look: self.release.idle.update(look.samples))
        self.began = self.loop.now

    @property
    def now(self) -> float:
        return round(self.loop.now - self.began, 6)

    def put(self, zero: Sample | None = None, one: Sample | None = None) -> None:
        for index, on in enumerate((zero, one)):
            if on is not None:
                self.watch.on[index] = on

    def begin(self, worker: int = 1, *keys: tuple[str, int]) -> None:
        self.release.begin(WorkerId(worker), lease_of(keys or (ZERO,), UNIT))

    def news(self) -> list[tuple[object, ...]]:
        told, self.told = self.told, []
        return told

    def end(
        self,
        worker: int = 1,
        keys: tuple[tuple[str, int], ...] = (ZERO,),
        is_whole: bool = True,
        pid: int = MINE,
    ) -> list[tuple[object, ...]]:
        held = lease_of(keys, UNIT if is_whole else UNIT // 4)
        assert self.release.end(WorkerId(worker), held, (pid,))
        return self.news()

    def step(self) -> list[tuple[object, ...]]:
        """Go to when the next look is due, and look."""
        self.loop.step()
        return self.news()

    def until_told(self) -> list[tuple[object, ...]]:
        while not (told := self.step()):
            assert self.now < 100
        return told


def test_looks_come_soon_first_and_then_more_slowly() -> None:
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


def test_of_several_devices_each_recovers_by_itself() -> None:
    story = ReleaseStory()
    story.begin(1, ZERO, ONE)
    story.put(one=BUSY)
    assert story.end(keys=(ZERO, ONE)) == []
    (step, _, reason), cleared = story.until_told()
    assert step is Scheduler.devices_stuck
    assert str(reason).startswith("GPU 1: ")
    assert cleared == RECOVERED
    assert story.watch.looks[0] == 3, "one that is free is not looked at again"
    story.put(one=QUIET)
    assert story.step() == [(Scheduler.device_changed, *ONE, Cause.UNSETTLED, None)]


def test_a_late_look_before_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiogpu.runtime.devices.release.LATE", -1.0)
    story = ReleaseStory()
    story.put(Sample(used=2 * GIB))
    story.begin()
    assert story.end() == []


def test_a_look_before_that_shows_the_worker_itself_is_corrected() -> None:
    story = ReleaseStory()
    story.put(sample(MINE, used=2 * GIB))
    story.begin()
    assert story.end() == []


def test_a_driver_that_cannot_be_asked_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = Sample(problem="NVML does not start: Driver Not Loaded")
    story = ReleaseStory(failing, failing)
    assert story.end() == [free(1, False)]
    assert story.end(keys=(ZERO, ONE), is_whole=False) == [free(1, False)]
    (record,) = caplog.records
    assert record.getMessage() == (
        "! GPU 0 cannot be asked what is on it: NVML does not start: Driver Not "
        "Loaded. While that is so, its shares come back when their processes have "
        "ended, and nobody verifies it."
    )


def test_ids_are_believed_once_a_workers_own_was_seen() -> None:
    """In a container: the driver may write ids of either namespace."""
    quiet = sample(reads_pids=False)
    story = ReleaseStory(quiet, quiet)
    assert story.end(is_whole=False) == [free(1, False)]
    story.put(sample(MINE, used=2 * GIB, reads_pids=False))
    assert story.end(is_whole=False) == []
    story.put(quiet)
    assert story.step() == [free()]
    assert story.end(2, (ONE,), is_whole=False) == [free(2)]


FIRST, SECOND = WorkerId(1), WorkerId(2)
UNUSED = Sample({}, reads_pids=True, used=0)


def lease(*shares: tuple[int, int], kind: str = "GPU") -> Lease:
    amount = sum(part for _, part in shares)
    return Lease(
        LeaseId(1), Request.of({"CPU": UNIT}, {kind: amount}), (shares,), Ledger({})
    )


WHOLE, PART = lease((0, UNIT)), lease((0, UNIT // 4))


@dataclass
class RealRelease:
    """What a clearance has told, one thing after the other."""

    thread: DeviceThread
    limit: float
    told: asyncio.Queue[tuple[object, ...]] = field(default_factory=asyncio.Queue)
    device_release: DeviceRelease = field(init=False)

    def __post_init__(self) -> None:
        self.device_release = begin(self.thread, self.tell, self.limit)

    def tell(self, step: object, *told: object) -> None:
        self.told.put_nowait((STEPS[step], *told))

    async def close(self) -> None:
        self.device_release.close()
        await self.thread.close()

    async def next(self) -> tuple[object, ...]:
        async with asyncio.timeout(60):
            return await self.told.get()


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

    def note(look: Look) -> None:
        release.idle = dict(look.samples)

    thread.start(release.give_up)
    thread.look(list(thread.devices), note)
    return release


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "aiogpu-devices"]


def join_all() -> None:
    for thread in threading.enumerate():
        if thread.name == "aiogpu-devices":
            thread.join(20)


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    assert threads() == []
    yield
    assert threads() == []


@pytest.fixture(autouse=True)
def no_look_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the thread begins later than a look is of use.

    That such a look is not taken is a matter of `test_inspection`.
    """
    monkeypatch.setattr(module, "LATE", math.inf)


class Hanging(FakeWatch):
    """A driver that hangs in a look, until the test lets it go."""

    def __init__(self) -> None:
        super().__init__(UNUSED, UNUSED)
        self.is_free = threading.Event()

    def look(self, device: Device) -> Sample:
        if device.id == 0:
            assert self.is_free.wait(20)
        return super().look(device)


async def test_a_driver_that_hangs_holds_up_no_other_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_thread, "CLOSE_LIMIT", 0.02)
    watch = Hanging()
    heard = start_release(watch, limit=0.01)
    assert heard.device_release.end(FIRST, WHOLE, [MINE])
    heard.device_release.on_mute("TPU", 15.0)
    heard.device_release.on_mute("GPU", 15.0)
    assert await heard.next() == (
        "set aside",
        FIRST,
        "GPU 0: the driver has not answered for 15 s",
    )
    assert heard.device_release.end(SECOND, PART, [MINE])
    heard.device_release.on_mute("GPU", 15.0)
    assert (await heard.next())[:2] == ("set aside", SECOND)
    watch.is_free.set()
    assert await heard.next() == RECOVERED_BY_THREAD
    await heard.close()


async def test_closing_does_not_wait_for_a_driver_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_thread, "CLOSE_LIMIT", 0.02)
    watch = Hanging()
    heard = start_release(watch)
    assert heard.device_release.end(FIRST, WHOLE, [MINE])
    (thread,) = [t for t in threading.enumerate() if t.name == "aiogpu-devices"]
    await heard.close()
    assert thread.is_alive()
    watch.is_free.set()
    await asyncio.get_running_loop().run_in_executor(None, thread.join, 60)
    assert heard.told.empty(), "what comes after the end is not told"
    assert watch.calls == ["open", "close"]


class Broken(FakeWatch):
    """A driver whose code has a bug."""

    def look(self, device: Device) -> Sample:
        if self.looks[device.id]:
            raise ZeroDivisionError
        return super().look(device)


async def test_an_error_ends_the_watch_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard = start_release(Broken(UNUSED, UNUSED))
    assert heard.device_release.end(FIRST, WHOLE, [MINE])
    assert await heard.next() == ("settled", FIRST, False)
    await asyncio.get_running_loop().run_in_executor(None, join_all)
    assert not heard.device_release.end(SECOND, PART, [MINE]), (
        "nobody is there to be asked"
    )
    assert "devices are not watched any more" in caplog.text
    await heard.close()


def test_a_closed_loop_gets_no_event() -> None:
    loop = asyncio.new_event_loop()
    sets = [DeviceSet("GPU", [Device(0, uuid="a")])]
    asking = DeviceThread(loop, sets, [FakeVendor(FakeWatch(UNUSED))])
    device_release = begin(asking, print)
    (thread,) = [t for t in threading.enumerate() if t.name == "aiogpu-devices"]
    assert device_release.end(FIRST, WHOLE, [MINE])
    loop.close()
    device_release.close()
    asking.quit()
    thread.join(20)
    assert not thread.is_alive()
