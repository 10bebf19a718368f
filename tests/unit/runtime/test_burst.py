"""Answers are taken in while a program submits, as often as pays, none amid others."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aiogpu.runtime.workers import message_router as module
from aiogpu.runtime.workers.message_router import (
    EVERY,
    FEW,
    HEARING,
    LONGEST,
    SHARE,
    InlinePoller,
)


class Speaker:
    """A worker's connection, which may have something to say."""

    def __init__(self, house: House) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.peer = self
        self.heard = 0
        self.takes = self.costs = self.sent_at = 0.0
        self.error: Exception | None = None
        self.then: Callable[[], object] = bool
        self.is_readable = True
        self.is_cut_off = False
        self._house = house

    def say(self) -> None:
        self.theirs.send(b"x")

    @property
    def readable(self) -> int:
        self._house.now += self.costs
        return self.ours.fileno() if self.is_readable else -1

    def send_posted(self) -> None:
        self.sent_at = self._house.now

    def read_now(self) -> None:
        self.heard += len(os.read(self.ours.fileno(), 100))
        self._house.now += self.takes
        assert self._house.burst.count < 0
        self.then()
        if self.error is not None:
            raise self.error
        # What is submitted by whoever is told of an answer.
        for _ in range(2 * FEW):
            self._house.burst.note()

    def abort(self) -> None:
        self.is_cut_off = True


class House:
    """Speakers, and a clock that goes on when a test says so."""

    def __init__(self, count: int) -> None:
        self.now = 100.0
        self.speakers = [Speaker(self) for _ in range(count)]
        workers: Any = dict(enumerate(self.speakers))
        workers[-1] = SimpleNamespace(peer=None)  # one that starts
        self.tell: Callable[[], object] = list
        self.burst = InlinePoller(workers, lambda: self.tell())

    def submit(self, count: int = FEW + 1) -> None:
        for _ in range(count):
            self.burst.note()

    def all_say(self) -> None:
        for speaker in self.speakers:
            speaker.say()

    @property
    def heard(self) -> list[int]:
        return [speaker.heard for speaker in self.speakers]


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    house = House(3)
    monkeypatch.setattr(module, "perf_counter", lambda: house.now)
    yield house
    for speaker in house.speakers:
        speaker.ours.close()
        speaker.theirs.close()


def test_a_few_submissions_are_no_burst(house: House) -> None:
    house.all_say()
    house.submit(FEW)
    assert house.heard == [0, 0, 0]
    house.submit(1)
    assert house.heard == [1, 1, 1]
    assert {speaker.sent_at for speaker in house.speakers} == {house.now}
    assert repr(house.burst) == "<InlinePoller of 0>"


def test_not_again_before_it_is_time(house: House) -> None:
    house.submit()
    house.all_say()
    house.now += EVERY * 0.9
    house.submit(100)
    assert house.heard == [0, 0, 0]
    house.now += EVERY * 0.2
    house.submit()
    assert house.heard == [1, 1, 1]


def test_what_was_submitted_is_told_first_and_is_no_look(house: House) -> None:
    """Else the next row would be longer, and take longer, and so on."""
    told: list[list[int]] = []

    def tell() -> None:
        told.append(house.heard)
        house.now += EVERY * 3

    house.tell = tell
    house.all_say()
    house.submit()
    assert told == [[0, 0, 0]]
    house.all_say()
    house.now += EVERY * 1.1
    house.submit()
    assert house.heard == [2, 2, 2]


def test_looking_at_many_is_rare(house: House) -> None:
    for speaker in house.speakers:
        speaker.costs = EVERY / 6
        speaker.takes = LONGEST / 10  # which is work that is to be done
    house.all_say()
    house.submit()
    house.all_say()
    house.now += EVERY / 2 * (SHARE - 1)
    house.submit()
    assert house.heard == [1, 1, 1]
    house.now += EVERY
    house.submit()
    assert house.heard == [2, 2, 2]


def test_one_submission_takes_in_no_more_than_it_may(house: House) -> None:
    for speaker in house.speakers:
        speaker.takes = LONGEST * 0.6
    seen = []
    for _ in range(3):
        house.all_say()
        house.now += 1.0
        house.submit()
        seen.append(house.heard)
    assert seen[0] == [1, 1, 0]
    assert seen[1][2] == 2, "who was not heard the last time is heard first"
    assert min(seen[2]) > 1, seen


def test_one_that_cannot_be_understood_harms_no_other(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    house.speakers[1].error = ValueError("a bug")
    house.all_say()
    house.submit()
    assert house.heard == [1, 1, 1]
    assert [speaker.is_cut_off for speaker in house.speakers] == [False, True, False]
    assert "a bug" in caplog.text
    assert house.burst.count == 0


def test_one_that_may_not_be_read_now_is_left_to_the_loop(house: House) -> None:
    house.speakers[0].is_readable = False
    house.all_say()
    house.submit()
    assert house.heard == [0, 1, 1]


def test_one_that_is_given_up_for_what_another_says_is_not_read(house: House) -> None:
    first, second, _ = house.speakers

    def give_up() -> None:
        second.is_readable = False

    first.then = give_up
    house.all_say()
    house.submit()
    assert house.heard == [1, 0, 1]


def test_none_are_heard_amid_others(house: House) -> None:
    house.all_say()
    house.burst.count = HEARING
    house.submit(1000)
    assert house.heard == [0, 0, 0]
