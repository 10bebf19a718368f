"""The thread that looks at devices while a node runs: what it brings to the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from aiogpu.accelerators.base import Health, Sample
from aiogpu.core.model.request import Device
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.runtime.devices import probe_thread as device_thread
from aiogpu.runtime.devices import probe_thread as rounds_module
from aiogpu.runtime.devices.probe_thread import DeviceThread, Round
from tests.runtime.paper_watch import PaperVendor, PaperWatch
from tests.until import until

pytestmark = pytest.mark.either_loop

IDLE = Sample({}, reads_pids=True, used=0)
ZERO, ONE = ("GPU", 0), ("GPU", 1)


def listen(watch: PaperWatch, *ids: str | None) -> tuple[DeviceThread, list[Round]]:
    devices = [Device(index, uuid=uuid) for index, uuid in enumerate(ids)]
    loop = asyncio.get_running_loop()
    thread = DeviceThread(loop, [DeviceSet("GPU", devices)], [PaperVendor(watch)])
    seen: list[Round] = []
    thread.on_round = seen.append
    return thread, seen


async def test_rounds_come_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "EACH", 0.01)
    watch = PaperWatch(IDLE, IDLE)
    watch.health[1] = Health(("XID 79",))
    thread, seen = listen(watch, "a", "b")
    thread.start(10.0)
    await until(lambda: len(seen) >= 3)
    assert all(one.samples == {ZERO: IDLE, ONE: IDLE} for one in seen)
    assert all(one.health[ONE].errors == ("XID 79",) for one in seen)
    assert [one.when for one in seen] == sorted(one.when for one in seen)
    await thread.close()
    told = len(seen)
    await asyncio.sleep(0)
    assert len(seen) == told, "after its end nothing is told"
    assert watch.calls == ["open", "close"]


async def test_devices_of_which_memory_is_reserved_are_looked_at_often() -> None:
    thread, seen = listen(PaperWatch(IDLE, IDLE), "a", "b")
    thread.start(10.0)
    thread.order(lambda desk: desk.rounds.watch([ONE]))
    await until(lambda: len(seen) >= 2)
    assert (set(seen[0].samples), set(seen[1].samples)) == ({ZERO, ONE}, {ONE})
    await thread.close()


async def test_without_a_device_to_ask_there_is_no_thread() -> None:
    watch = PaperWatch()
    thread, seen = listen(watch, None)
    thread.start(10.0)
    assert not thread.is_alive
    assert "off, 0 devices" in repr(thread)
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

    thread, _ = listen(Failing(IDLE), "a")
    thread.start(10.0)
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
    thread.start(10.0)
    await until(lambda: (thread.mute_for() or ("", 0.0))[1] > 0.01)
    waits = thread.mute_for()
    assert waits is not None
    assert waits[0] == "GPU"
    assert seen == []
    watch.is_free.set()
    await until(lambda: seen)
    await until(lambda: thread.mute_for() is None)
    await thread.close()
