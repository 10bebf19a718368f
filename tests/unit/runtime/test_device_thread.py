"""The thread that looks at devices while a node runs: what it brings to the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiogpu.accelerators.base import Health, Sample
from aiogpu.core.model.request import Device
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.runtime.devices import probe_thread as device_thread
from aiogpu.runtime.devices.probe_thread import DeviceThread, Look
from tests.support.until import until
from tests.unit.runtime.paper_watch import PaperVendor, PaperWatch

pytestmark = pytest.mark.either_loop

IDLE = Sample({}, reads_pids=True, used=0)
ZERO, ONE = ("GPU", 0), ("GPU", 1)


def listen(watch: PaperWatch, *ids: str | None) -> tuple[DeviceThread, list[Look]]:
    devices = [Device(index, uuid=uuid) for index, uuid in enumerate(ids)]
    loop = asyncio.get_running_loop()
    thread = DeviceThread(loop, [DeviceSet("GPU", devices)], [PaperVendor(watch)])
    return thread, []


def start(thread: DeviceThread, seen: list[Look]) -> None:
    thread.start(lambda: None)
    if thread.devices:
        thread.look(list(thread.devices), seen.append, is_checked=True)


async def test_looks_are_told_in_order() -> None:
    watch = PaperWatch(IDLE, IDLE)
    watch.health[1] = Health(("XID 79",))
    thread, seen = listen(watch, "a", "b")
    start(thread, seen)
    thread.look([ONE], seen.append)
    await until(lambda: len(seen) == 2)
    first, second = seen
    assert first.samples == {ZERO: IDLE, ONE: IDLE}
    assert first.health[ONE].errors == ("XID 79",)
    assert (second.samples, second.health) == ({ONE: IDLE}, {})
    assert first.when <= second.when
    await thread.close()
    assert watch.calls == ["open", "close"]


async def test_without_a_device_to_ask_there_is_no_thread() -> None:
    watch = PaperWatch()
    thread, seen = listen(watch, None)
    start(thread, seen)
    assert not thread.is_alive
    assert thread.mute_for() is None
    await thread.close()
    assert (watch.calls, seen) == ([], [])


async def test_a_driver_that_cannot_be_let_go_holds_nobody_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_thread, "CLOSE_LIMIT", 20.0)

    class Failing(PaperWatch):
        def close(self) -> None:
            raise RuntimeError("it has gone")

    thread, seen = listen(Failing(IDLE), "a")
    start(thread, seen)
    started = asyncio.get_running_loop().time()
    await thread.close()
    assert asyncio.get_running_loop().time() - started < 20.0
    assert "driver of GPU could not be let go" in caplog.text


class Hanging(PaperWatch):
    """A driver that hangs in a check, until the test lets it go."""

    is_free = threading.Event()

    def check(self, device: Device) -> Health:
        assert self.is_free.wait(20)
        return super().check(device)


async def test_it_says_which_driver_it_waits_for() -> None:
    watch = Hanging(IDLE)
    thread, seen = listen(watch, "a")
    start(thread, seen)
    await until(lambda: (thread.mute_for() or ("", 0.0))[1] > 0.01)
    waits = thread.mute_for()
    assert waits is not None
    assert waits[0] == "GPU"
    assert seen == []
    watch.is_free.set()
    await until(lambda: seen)
    await until(lambda: thread.mute_for() is None)
    await thread.close()
