"""What an actor's answers need of their process, with a paper channel."""

from __future__ import annotations

from typing import Any

import pytest

from aiogpu.errors import SerializationError
from aiogpu.serialization.exceptions import RAISED, UNSENDABLE
from aiogpu.wire.messages import Done, Failed, Message
from aiogpu.worker.actors.serial import ActorRuntime

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
    """Has printed nothing, and imported nothing."""

    found = ()

    def end_lines(self) -> None: ...


class ForkEnded(Exception):
    """Stands for the end of the process."""


def stage(channel: PaperChannel) -> ActorRuntime:
    def end_fork() -> Any:
        raise ForkEnded

    quiet: Any = Quiet()
    paper: Any = channel
    return ActorRuntime(paper, quiet, quiet, quiet, quiet, end_fork)


def test_a_result_that_is_too_long_is_the_calls_failure() -> None:
    channel = PaperChannel()
    stage(channel).answer(Done(1, TOO_LONG))
    (failed,) = channel.sent
    assert isinstance(failed, Failed)
    assert (failed.task, failed.kind) == (1, UNSENDABLE)
    assert "too long" in failed.message


def test_it_spoils_none_of_those_that_go_with_it() -> None:
    channel = PaperChannel()
    stage(channel).answer_all([Done(1, b"a"), Done(2, TOO_LONG), Done(3, b"c")])
    kinds = [(type(one), one.task) for one in channel.sent]  # type: ignore[union-attr]
    assert kinds == [(Done, 1), (Failed, 2), (Done, 3)]


def test_a_fork_answers_nothing() -> None:
    channel = PaperChannel()
    channel.is_closed = True
    with pytest.raises(ForkEnded):
        stage(channel).answer(Done(1, b"a"))
    assert channel.sent == []


def test_a_failure_too_long_to_send_still_says_what_it_said_of_the_process() -> None:
    channel = PaperChannel()
    failed = Failed(1, RAISED, "E", "m", "", TOO_LONG, peak=7, is_spoilt=True)
    stage(channel).answer(failed)
    (sent,) = channel.sent
    assert isinstance(sent, Failed)
    assert (sent.kind, sent.peak, sent.is_spoilt) == (UNSENDABLE, 7, True)
