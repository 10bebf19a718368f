"""When a node polls instead of sleeping: amid a burst, and between close messages."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aiogpu.runtime import node as node
from aiogpu.runtime.node import AWAKE, SHORT, BusyPoll
from aiogpu.runtime.workers import message_router as module
from aiogpu.runtime.workers.message_router import (
    EVERY,
    FEW,
    HEARING,
    LONGEST,
    SHARE,
    InlinePoller,
)


class FakeConnection:
    """A worker's connection, which may have something to say."""

    def __init__(self, burst: Burst) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.peer = self
        self.heard = 0
        self.takes = self.costs = self.sent_at = 0.0
        self.error: Exception | None = None
        self.then: Callable[[], object] = bool
        self.is_readable = True
        self.is_cut_off = False
        self._burst = burst

    def say(self) -> None:
        self.theirs.send(b"x")

    @property
    def readable(self) -> int:
        self._burst.now += self.costs
        return self.ours.fileno() if self.is_readable else -1

    def send_posted(self) -> None:
        self.sent_at = self._burst.now

    def read_now(self) -> None:
        self.heard += len(os.read(self.ours.fileno(), 100))
        self._burst.now += self.takes
        assert self._burst.poller.count < 0
        self.then()
        if self.error is not None:
            raise self.error
        # What is submitted by whoever is told of an answer.
        for _ in range(2 * FEW):
            self._burst.poller.note()

    def abort(self) -> None:
        self.is_cut_off = True


class Burst:
    """Speakers, and a clock that goes on when a test says so."""

    def __init__(self, count: int) -> None:
        self.now = 100.0
        self.speakers = [FakeConnection(self) for _ in range(count)]
        workers: Any = dict(enumerate(self.speakers))
        workers[-1] = SimpleNamespace(peer=None)  # one that starts
        self.tell: Callable[[], object] = list
        self.poller = InlinePoller(workers, lambda: self.tell())

    def submit(self, count: int = FEW + 1) -> None:
        for _ in range(count):
            self.poller.note()

    def all_say(self) -> None:
        for speaker in self.speakers:
            speaker.say()

    @property
    def heard(self) -> list[int]:
        return [speaker.heard for speaker in self.speakers]


@pytest.fixture
def burst(monkeypatch: pytest.MonkeyPatch) -> Iterator[Burst]:
    burst = Burst(3)
    monkeypatch.setattr(module, "perf_counter", lambda: burst.now)
    yield burst
    for speaker in burst.speakers:
        speaker.ours.close()
        speaker.theirs.close()


def test_a_few_submissions_are_no_burst(burst: Burst) -> None:
    burst.all_say()
    burst.submit(FEW)
    assert burst.heard == [0, 0, 0]
    burst.submit(1)
    assert burst.heard == [1, 1, 1]
    assert {speaker.sent_at for speaker in burst.speakers} == {burst.now}
    assert repr(burst.poller) == "<InlinePoller of 0>"


def test_not_again_before_it_is_time(burst: Burst) -> None:
    burst.submit()
    burst.all_say()
    burst.now += EVERY * 0.9
    burst.submit(100)
    assert burst.heard == [0, 0, 0]
    burst.now += EVERY * 0.2
    burst.submit()
    assert burst.heard == [1, 1, 1]


def test_submissions_are_passed_on_before_the_look(burst: Burst) -> None:
    """Else the next row would be longer, and take longer, and so on."""
    told: list[list[int]] = []

    def tell() -> None:
        told.append(burst.heard)
        burst.now += EVERY * 3

    burst.tell = tell
    burst.all_say()
    burst.submit()
    assert told == [[0, 0, 0]]
    burst.all_say()
    burst.now += EVERY * 1.1
    burst.submit()
    assert burst.heard == [2, 2, 2]


def test_looking_at_many_is_rare(burst: Burst) -> None:
    for speaker in burst.speakers:
        speaker.costs = EVERY / 6
        speaker.takes = LONGEST / 10  # which is work that is to be done
    burst.all_say()
    burst.submit()
    burst.all_say()
    burst.now += EVERY / 2 * (SHARE - 1)
    burst.submit()
    assert burst.heard == [1, 1, 1]
    burst.now += EVERY
    burst.submit()
    assert burst.heard == [2, 2, 2]


def test_one_submission_takes_in_no_more_than_it_may(burst: Burst) -> None:
    for speaker in burst.speakers:
        speaker.takes = LONGEST * 0.6
    seen = []
    for _ in range(3):
        burst.all_say()
        burst.now += 1.0
        burst.submit()
        seen.append(burst.heard)
    assert seen[0] == [1, 1, 0]
    assert seen[1][2] == 2, "who was not heard the last time is heard first"
    assert min(seen[2]) > 1, seen


def test_a_message_that_raises_costs_only_its_own_connection(
    burst: Burst, caplog: pytest.LogCaptureFixture
) -> None:
    burst.speakers[1].error = ValueError("a bug")
    burst.all_say()
    burst.submit()
    assert burst.heard == [1, 1, 1]
    assert [speaker.is_cut_off for speaker in burst.speakers] == [False, True, False]
    assert "a bug" in caplog.text
    assert burst.poller.count == 0


def test_a_connection_given_up_meanwhile_is_not_read(burst: Burst) -> None:
    first, second, _ = burst.speakers

    def give_up() -> None:
        second.is_readable = False

    first.then = give_up
    burst.all_say()
    burst.submit()
    assert burst.heard == [1, 0, 1]


def test_no_answer_is_read_while_another_is_handled(burst: Burst) -> None:
    burst.all_say()
    burst.poller.count = HEARING
    burst.submit(1000)
    assert burst.heard == [0, 0, 0]


class ManualClock:
    """A clock, and a loop that notes what it is to call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cpus: int = 2) -> None:
        self.now = 1.0
        self.soon: list[object] = []
        monkeypatch.setattr(node, "perf_counter", lambda: self.now)
        monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cpus)))
        self.it = BusyPoll(self)  # type: ignore[arg-type]

    def call_soon(self, call: object) -> None:
        self.soon.append(call)

    def turn(self, after: float) -> int:
        """Let the loop turn after so long; gives how many calls it has left."""
        self.now += after
        calls, self.soon = self.soon, []
        for call in calls:
            call()  # type: ignore[operator]
        return len(self.soon)


def test_it_stays_awake_while_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(monkeypatch)
    clock.it.note(1)
    assert not clock.soon
    clock.now += SHORT / 2
    clock.it.note(1)
    clock.it.note(1)
    assert len(clock.soon) == 1
    assert clock.turn(AWAKE / 2) == 1
    clock.it.note(1)
    assert clock.turn(AWAKE * 0.9) == 1
    assert clock.turn(AWAKE) == 0
    clock.now += SHORT
    clock.it.note(1)
    assert not clock.soon


def test_in_a_flood_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(monkeypatch)
    for _ in range(3):
        clock.it.note(1)
        clock.it.note(2)
    assert not clock.soon
    clock.it.note(1)
    clock.it.note(1)
    assert len(clock.soon) == 1
    clock.it.note(9)
    assert clock.turn(0) == 0


def test_with_one_cpu_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(monkeypatch, cpus=1)
    clock.it.note(1)
    clock.it.note(1)
    assert not clock.soon
