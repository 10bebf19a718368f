"""The thread that asks drivers: what it tells the loop, and that it harms nobody."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
from aiogpu.runtime.devices.release import DeviceRelease
from tests.support.until import until
from tests.unit.runtime.paper_watch import PaperVendor, PaperWatch

ONE, TWO = WorkerId(1), WorkerId(2)
PID = 100
IDLE = Sample({}, reads_pids=True, used=0)
BUSY = Sample({PID: 1 << 30}, reads_pids=True, used=1 << 30)


def lease(*shares: tuple[int, int], kind: str = "GPU") -> Lease:
    amount = sum(part for _, part in shares)
    return Lease(
        LeaseId(1), Request.of({"CPU": UNIT}, {kind: amount}), (shares,), Ledger({})
    )


WHOLE, PART = lease((0, UNIT)), lease((0, UNIT // 4))


@dataclass
class Heard:
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


def listen(
    watch: PaperWatch, limit: float = 20.0, devices: tuple[Device, ...] | None = None
) -> Heard:
    given = (Device(0, uuid="a"), Device(1, uuid="b")) if devices is None else devices
    sets = [DeviceSet("GPU", given), DeviceSet("TPU", [Device(0, uuid="t")])]
    loop = asyncio.get_running_loop()
    thread = DeviceThread(loop, sets, [PaperVendor(watch)])
    return Heard(thread, limit)


STEPS = {
    Scheduler.devices_free: "settled",
    Scheduler.devices_stuck: "set aside",
    Scheduler.device_changed: "recovered",
}
RECOVERED = ("recovered", "GPU", 0, Cause.UNSETTLED, None)


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


async def test_a_free_device_settles() -> None:
    watch = PaperWatch(IDLE, IDLE)
    heard = listen(watch)
    heard.device_release.begin(ONE, WHOLE)
    assert heard.device_release.end(ONE, WHOLE, [PID])
    assert await heard.next() == ("settled", ONE, True)
    assert heard.device_release.end(TWO, PART, [PID])
    assert await heard.next() == ("settled", TWO, True)
    # Each was looked at on opening; a part is not looked at when it begins.
    assert watch.looks == {0: 4, 1: 1}
    await heard.close()
    assert watch.calls == ["open", "close"]


async def test_of_a_worker_that_ends_without_a_lease_nothing_is_kept() -> None:
    """As those do that were reused, and idle: a node may have millions in its life."""
    heard = listen(PaperWatch(IDLE, IDLE))
    heard.device_release.begin(ONE, WHOLE)
    heard.device_release.begin(TWO, PART)
    kept = heard.device_release._before
    await until(lambda: kept == {ONE: {("GPU", 0): IDLE}})
    heard.device_release.forget(ONE)
    heard.device_release.forget(TWO)
    assert kept == {}
    await heard.close()


async def test_a_busy_device_settles_when_it_is_free() -> None:
    watch = PaperWatch(IDLE, IDLE)
    heard = listen(watch)
    watch.on[0] = BUSY
    assert heard.device_release.end(ONE, PART, [PID])
    assert heard.device_release.end(TWO, lease((1, UNIT)), [PID])
    assert await heard.next() == ("settled", TWO, True)
    watch.on[0] = IDLE
    assert await heard.next() == ("settled", ONE, True)
    await heard.close()


async def test_past_the_limit_it_is_set_aside_and_recovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiogpu.runtime.devices.release.ASIDE", 0.01)
    watch = PaperWatch(BUSY, IDLE)
    heard = listen(watch, limit=0.05)
    assert heard.device_release.end(ONE, PART, [PID])
    assert heard.device_release.end(TWO, PART, [PID])
    reason = (
        "GPU 0: of what has ended, the driver still lists pid 100 with 1024 MiB "
        "(1073741824 bytes)"
    )
    told = {await heard.next(), await heard.next()}
    assert told == {("set aside", ONE, reason), ("set aside", TWO, reason)}
    watch.on[0] = IDLE
    assert await heard.next() == RECOVERED, "once, though two held it"
    await heard.close()
    assert heard.told.empty()


async def test_nobody_is_asked_about_logical_devices() -> None:
    watch = PaperWatch()
    heard = listen(watch, devices=(Device(0), Device(1)))
    assert threads() == []
    heard.device_release.begin(ONE, WHOLE)
    assert not heard.device_release.end(ONE, WHOLE, [PID])
    await heard.close()
    assert watch.calls == []


async def test_of_a_mixed_lease_the_logical_devices_are_not_asked_about() -> None:
    watch = PaperWatch(IDLE, IDLE)
    heard = listen(watch, devices=(Device(0, uuid="a"), Device(1)))
    assert heard.device_release.end(ONE, lease((0, UNIT), (1, UNIT)), [PID])
    assert await heard.next() == ("settled", ONE, True)
    assert not heard.device_release.end(TWO, lease((1, UNIT)), [PID])
    await heard.close()


async def test_what_holds_no_device_is_not_asked_about() -> None:
    heard = listen(PaperWatch(IDLE, IDLE))
    cpu = Lease(LeaseId(1), Request.of({"CPU": UNIT}, {}), (), Ledger({}))
    heard.device_release.begin(ONE, cpu)
    assert not heard.device_release.end(ONE, cpu, [PID])
    await heard.close()


class Hanging(PaperWatch):
    """A driver that hangs in a look, until the test lets it go."""

    def __init__(self) -> None:
        super().__init__(IDLE, IDLE)
        self.is_free = threading.Event()

    def look(self, device: Device) -> Sample:
        if device.id == 0:
            assert self.is_free.wait(20)
        return super().look(device)


async def test_a_driver_that_hangs_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_thread, "CLOSE_LIMIT", 0.02)
    watch = Hanging()
    heard = listen(watch, limit=0.01)
    assert heard.device_release.end(ONE, WHOLE, [PID])
    heard.device_release.on_mute("TPU", 15.0)
    heard.device_release.on_mute("GPU", 15.0)
    assert await heard.next() == (
        "set aside",
        ONE,
        "GPU 0: the driver has not answered for 15 s",
    )
    assert heard.device_release.end(TWO, PART, [PID])
    heard.device_release.on_mute("GPU", 15.0)
    assert (await heard.next())[:2] == ("set aside", TWO)
    watch.is_free.set()
    assert await heard.next() == RECOVERED
    await heard.close()


async def test_closing_does_not_wait_for_a_driver_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_thread, "CLOSE_LIMIT", 0.02)
    watch = Hanging()
    heard = listen(watch)
    assert heard.device_release.end(ONE, WHOLE, [PID])
    (thread,) = [t for t in threading.enumerate() if t.name == "aiogpu-devices"]
    await heard.close()
    assert thread.is_alive()
    watch.is_free.set()
    await asyncio.get_running_loop().run_in_executor(None, thread.join, 60)
    assert heard.told.empty(), "what comes after the end is not told"
    assert watch.calls == ["open", "close"]


class Broken(PaperWatch):
    """A driver whose code has a bug."""

    def look(self, device: Device) -> Sample:
        if self.looks[device.id]:
            raise ZeroDivisionError
        return super().look(device)


async def test_a_bug_ends_the_watch_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard = listen(Broken(IDLE, IDLE))
    assert heard.device_release.end(ONE, WHOLE, [PID])
    assert await heard.next() == ("settled", ONE, False)
    await asyncio.get_running_loop().run_in_executor(None, join_all)
    assert not heard.device_release.end(TWO, PART, [PID]), "nobody is there to be asked"
    assert "devices are not watched any more" in caplog.text
    await heard.close()


def test_a_loop_that_was_closed_is_told_nothing() -> None:
    loop = asyncio.new_event_loop()
    sets = [DeviceSet("GPU", [Device(0, uuid="a")])]
    asking = DeviceThread(loop, sets, [PaperVendor(PaperWatch(IDLE))])
    device_release = begin(asking, print)
    (thread,) = [t for t in threading.enumerate() if t.name == "aiogpu-devices"]
    assert device_release.end(ONE, WHOLE, [PID])
    loop.close()
    device_release.close()
    asking.quit()
    thread.join(20)
    assert not thread.is_alive()
