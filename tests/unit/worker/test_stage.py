"""What a worker's answers need of their process, with a paper channel."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from aiogpu.errors import SerializationError
from aiogpu.serialization.exceptions import RAISED, UNSENDABLE
from aiogpu.wire.messages import Done, Failed, Message
from aiogpu.worker.execute import Executor
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.zygote.preload import Imports
from tests.unit.worker.conftest import Unmoved

TOO_LONG = bytes(9)


class PaperChannel:
    """Carries no payload that is `TOO_LONG`."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.is_closed = False

    def send(self, message: Message) -> None:
        self.send_all([message])

    def send_all(self, messages: list[Message]) -> None:
        if any(getattr(one, "payload", None) == TOO_LONG for one in messages):
            raise SerializationError("too long")
        self.sent += messages


class Quiet:
    """Has printed nothing."""

    def end_lines(self) -> None: ...


class ForkEnded(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def sent_by(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> Callable[[PaperChannel], Executor]:
    def end_fork(_code: int) -> Any:
        raise ForkEnded

    def make(channel: PaperChannel) -> Executor:
        quiet: Any = Quiet()
        paper: Any = channel
        return Executor(paper, interrupts, Unmoved(), Imports(), quiet, quiet)

    monkeypatch.setattr(os, "_exit", end_fork)
    return make


def test_a_result_that_is_too_long_is_the_calls_failure(
    sent_by: Callable[[PaperChannel], Executor],
) -> None:
    channel = PaperChannel()
    sent_by(channel).answer(Done(1, TOO_LONG))
    (failed,) = channel.sent
    assert isinstance(failed, Failed)
    assert (failed.task, failed.kind) == (1, UNSENDABLE)
    assert "too long" in failed.message


def test_it_spoils_none_of_those_that_go_with_it(
    sent_by: Callable[[PaperChannel], Executor],
) -> None:
    channel = PaperChannel()
    sent_by(channel).answer_all([Done(1, b"a"), Done(2, TOO_LONG), Done(3, b"c")])
    kinds = [(type(one), one.task) for one in channel.sent]  # type: ignore[union-attr]
    assert kinds == [(Done, 1), (Failed, 2), (Done, 3)]


def test_a_fork_answers_nothing(
    sent_by: Callable[[PaperChannel], Executor],
) -> None:
    channel = PaperChannel()
    channel.is_closed = True
    with pytest.raises(ForkEnded):
        sent_by(channel).answer(Done(1, b"a"))
    assert channel.sent == []


def test_a_failure_too_long_to_send_still_says_what_it_said_of_the_process(
    sent_by: Callable[[PaperChannel], Executor],
) -> None:
    channel = PaperChannel()
    failed = Failed(1, RAISED, "E", "m", "", TOO_LONG, peak=7, is_spoilt=True)
    sent_by(channel).answer(failed)
    (sent,) = channel.sent
    assert isinstance(sent, Failed)
    assert (sent.kind, sent.peak, sent.is_spoilt) == (UNSENDABLE, 7, True)
