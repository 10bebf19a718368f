"""When devices are looked at while tasks run, on paper drivers, by a clock by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aiogpu.accelerators.base import Health, Sample
from aiogpu.core.model.request import Device
from aiogpu.linux.procfs import Origin
from aiogpu.runtime.devices.probe_thread import (
    DEAREST,
    EACH,
    SOONEST,
    DeviceProbe,
    DeviceSampler,
    Round,
)
from tests.runtime.paper_watch import PaperWatch

ZERO, ONE = ("GPU", 0), ("GPU", 1)
PID = 100


class SlowWatch(PaperWatch):
    """A driver that takes its time."""

    now, cost = 1000.0, 0.0

    def look(self, device: Device) -> Sample:
        self.now += self.cost
        return super().look(device)


class Story:
    """The rounds to two devices, told in order."""

    def __init__(self) -> None:
        self.watch = SlowWatch(Sample({PID: 5}, frozenset({PID})), Sample())
        devices = {("GPU", index): Device(index, uuid=f"u{index}") for index in (0, 1)}
        self.probe = DeviceProbe({"GPU": self.watch}, devices)
        self.rounds = DeviceSampler(self.probe, lambda: self.watch.now, self.find)
        samples = {key: self.probe.look(key) for key in devices}
        self.first = self.rounds.begin(samples)

    def find(self, pids: Iterable[int]) -> Mapping[int, Origin]:
        return {pid: Origin("python", ()) for pid in pids}

    def step(self) -> tuple[float, Round]:
        """Go to when the next round is due, and make it; gives how long that was."""
        before, due = self.watch.now, self.rounds.due
        assert due is not None
        self.watch.now = due - 1e-6
        assert self.rounds.turn() is None, "it is not due yet"
        self.watch.now = due
        while (seen := self.rounds.turn()) is None:
            assert self.rounds.due == due, "it goes on at once"
        return due - before, seen


def test_the_first_round_takes_in_what_was_seen_on_opening() -> None:
    story = Story()
    assert story.first.samples.keys() == story.first.health.keys() == {ZERO, ONE}
    assert story.first.origins == {PID: Origin("python", ())}
    assert story.watch.looks == {0: 1, 1: 1}
    assert "2 devices, 0 hot" in repr(story.rounds)


def test_nothing_is_due_before_it_begins() -> None:
    rounds = DeviceSampler(Story().probe)
    assert rounds.due is None
    assert rounds.turn() is None


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
    assert hot[0].origins == {}, "nobody lives there"
    story.rounds.watch([])
    story.step()
    assert round(story.step()[0], 6) == EACH


def test_dear_looks_are_rare() -> None:
    story = Story()
    story.watch.cost = 0.5
    story.rounds.watch([ONE])
    _, seen = story.step()
    assert set(seen.samples) == {ONE}
    pause, seen = story.step()
    assert (set(seen.samples), pause < DEAREST * 0.5) == ({ZERO, ONE}, True)
    pause, _ = story.step()
    assert round(pause, 6) == DEAREST * 1.0


def test_a_round_is_made_device_by_device() -> None:
    story = Story()
    assert story.rounds.due is not None
    story.watch.now = story.rounds.due
    assert story.rounds.turn() is None
    assert story.watch.looks == {0: 2, 1: 1}
    assert story.rounds.turn() is not None
    assert story.watch.looks == {0: 2, 1: 2}
