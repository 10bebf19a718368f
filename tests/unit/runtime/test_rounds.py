"""When devices are looked at while tasks run, on paper drivers, by a clock by hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from aiogpu.accelerators.base import Health, Sample
from aiogpu.core.model.request import Device
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.runtime.devices.monitor import DEAREST, EACH, SOONEST, DeviceSampler
from aiogpu.runtime.devices.probe_thread import Key, Look
from tests.unit.runtime.hand_loop import HandLoop, PromptThread
from tests.unit.runtime.paper_watch import PaperVendor, PaperWatch

ZERO, ONE = ("GPU", 0), ("GPU", 1)
PID = 100


class SlowThread(PromptThread):
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


class Story:
    """The rounds to two devices, told in order."""

    def __init__(self) -> None:
        self.watch = PaperWatch(Sample({PID: 5}), Sample())
        self.loop = HandLoop()
        sets = [DeviceSet("GPU", [Device(index, uuid=f"u{index}") for index in (0, 1)])]
        self.thread = SlowThread(self.loop, sets, [PaperVendor(self.watch)])
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


def test_the_first_round_is_one_look_at_all() -> None:
    story = Story()
    assert story.first.samples.keys() == story.first.health.keys() == {ZERO, ONE}
    assert story.watch.looks == {0: 1, 1: 1}


def test_a_timer_that_rings_a_little_early_begins_the_round_all_the_same() -> None:
    """uvloop's timers count whole milliseconds."""
    story = Story()
    begin = story.loop.call_at
    story.loop.call_at = lambda when, *call: begin(when - 1e-3, *call)  # type: ignore[method-assign]
    story.step()
    for _ in range(2):
        _, seen = story.step()
        assert seen.samples.keys() == seen.health.keys() == {ZERO, ONE}


def test_each_second_all_are_looked_at_and_asked_whether_they_are_well() -> None:
    story = Story()
    story.watch.health[1] = Health(("XID 79",))
    for _ in range(2):
        pause, seen = story.step()
        assert round(pause, 6) == EACH
        assert seen.samples == dict(zip([ZERO, ONE], story.watch.on, strict=True))
        assert seen.health == {ZERO: Health(), ONE: Health(("XID 79",))}


def test_where_memory_is_reserved_looks_are_more_frequent() -> None:
    story = Story()
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


def test_dear_looks_are_rare() -> None:
    story = Story()
    story.thread.cost = 0.5
    story.rounds.watch([ONE])
    _, seen = story.step()
    assert set(seen.samples) == {ONE}
    pause, seen = story.step()
    assert (set(seen.samples), pause < DEAREST * 0.5) == ({ZERO, ONE}, True)
    pause, _ = story.step()
    assert round(pause, 6) == DEAREST * 1.0


def test_a_round_is_made_device_by_device() -> None:
    story = Story()
    story.loop.step()
    story.thread.work()
    assert story.watch.looks == {0: 2, 1: 1}
    assert story.seen == []
    story.thread.work()
    assert story.watch.looks == {0: 2, 1: 2}
    assert set(story.seen[0].samples) == {ZERO, ONE}


@pytest.mark.parametrize("is_amid", [False, True])
def test_after_the_end_nothing_is_looked_at(is_amid: bool) -> None:
    story = Story()
    if is_amid:
        story.loop.step()
    story.rounds.close()
    story.rounds.watch([ONE])
    if is_amid:
        story.thread.work()
    assert (story.loop.due, story.thread.orders, story.seen) == (None, [], [])
