"""One actor with paper receivers: who is told what, and once."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from aiogpu.client.function_spec import ActorTerms
from aiogpu.errors import ActorDiedError, NodeClosedError
from aiogpu.runtime.actors.actor import Actor, ActorState
from aiogpu.serialization.exceptions import LEFT, RAISED
from aiogpu.wire.messages import (
    ASYNC,
    DEFAULT_GROUP,
    SERIAL,
    Done,
    Failed,
    Invoke,
    Leave,
)
from tests.unit.runtime import funcs
from tests.unit.runtime.paper import PaperPeer


class PaperReceiver:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def settle(self, outcome: bytes | Failed | Exception) -> None:
        if isinstance(outcome, Failed):
            self.told.append(outcome.kind)
        else:
            is_error = isinstance(outcome, Exception)
            self.told.append(type(outcome) if is_error else outcome)


class Stage:
    """An actor, its peer, and what its node hears of it."""

    def __init__(self, mode: str = SERIAL, retries: int = 0, limit: int = 2) -> None:
        func = funcs.func()
        func.actor = ActorTerms(mode, {DEFAULT_GROUP: limit}, {}, retries)
        self.peer = PaperPeer()
        self.new_number = count(1).__next__
        self.actor = Actor(func, self, None)
        self.heard: list[str] = []

    def caller_here(self) -> int:
        return 0

    def on_idle(self, _actor: Actor) -> None:
        self.heard.append("idle")

    def on_leaving(self, _actor: Actor) -> None:
        self.heard.append("leaving")

    def on_dead(self, _actor: Actor) -> None:
        self.heard.append("dead")

    def begin(self) -> None:
        """A process takes it on, and its constructor returns."""
        worker: Any = SimpleNamespace(peer=self.peer, holds={})
        self.actor.worker = worker
        self.actor.on_created()

    def call(self) -> PaperReceiver:
        receiver = PaperReceiver()
        self.actor.call("add", b"args", receiver)
        return receiver

    @property
    def sent(self) -> list[int | str]:
        """The numbers of calls that were sent since the last look, and other words."""
        return [
            message.call if isinstance(message, Invoke) else type(message).__name__
            for message in self.peer.taken()
        ]


def test_calls_wait_for_the_process_and_go_in_order() -> None:
    stage = Stage()
    ready = PaperReceiver()
    stage.actor.await_ready(ready)
    receivers = [stage.call() for _ in range(2)]
    assert (stage.sent, ready.told) == ([], [])
    stage.begin()
    receivers.append(stage.call())
    assert stage.sent == [1, 2, 3]
    assert len(ready.told) == 1
    stage.actor.on_answer(Done(2, b"b"))
    stage.actor.on_answer(Failed(1, RAISED, "ValueError", "", "", None))
    stage.actor.on_answer(Done(1, b"late"))
    assert [receiver.told for receiver in receivers] == [[RAISED], [b"b"], []]
    assert "alive" in repr(stage.actor)


def test_no_more_are_sent_than_may_run() -> None:
    stage = Stage(ASYNC, limit=2)
    stage.begin()
    for _ in range(4):
        stage.call()
    assert stage.sent == [1, 2]
    stage.actor.on_answer(Done(2, b""))
    assert stage.sent == [3]
    assert stage.actor.cancel(1), "its process must know"
    assert not stage.actor.cancel(1)
    assert not stage.actor.cancel(4), "it was never sent"
    assert not stage.actor.cancel(99)
    assert stage.sent == []


def test_it_is_idle_when_nobody_waits_for_an_answer() -> None:
    stage = Stage()
    stage.begin()
    stage.call()
    stage.call()
    stage.actor.release()
    assert stage.heard == []
    stage.actor.on_answer(Done(1, b""))
    assert stage.heard == []
    stage.actor.cancel(2)
    stage.actor.look_if_idle()
    assert stage.heard == ["idle"]
    stage.actor.leave("over.")
    stage.actor.leave("over.")
    assert stage.sent[2:] == [Leave.__name__]
    assert stage.heard == ["idle", "leaving"]


def test_what_its_processs_end_takes_along() -> None:
    for retries, lost in ((0, 1), (1, 0)):
        stage = Stage(retries=retries)
        stage.begin()
        receivers = [stage.call() for _ in range(4)]
        stage.actor.on_answer(Done(1, b"a"))
        stage.actor.cancel(3)
        assert stage.sent == [1, 2, 3, 4]
        assert len(stage.actor.lose(begun=2)) == lost
        late = stage.call()
        stage.begin()
        assert stage.sent == [2, 4, 5][lost:]
        for number in (2, 4, 5):
            stage.actor.on_answer(Done(number, b"b"))
        told = [receiver.told for receiver in (*receivers, late)]
        assert told == [[b"a"], [] if lost else [b"b"], [], [b"b"], [b"b"]]
        assert stage.actor.calls == {}


def test_a_call_made_after_the_connection_is_lost_waits() -> None:
    stage = Stage(ASYNC)
    stage.begin()
    assert stage.actor.worker is not None
    stage.actor.worker.peer = None
    receiver = stage.call()
    assert stage.actor.lose(begun=0) == []
    stage.begin()
    assert stage.sent == [1]
    assert receiver.told == []


def test_the_dead_stay_dead() -> None:
    stage = Stage()
    ready, call, ended = PaperReceiver(), stage.call(), PaperReceiver()
    stage.actor.await_ready(ready)
    stage.actor.await_end(ended)
    stage.actor.die(ActorDiedError("killed"))
    stage.actor.die(ActorDiedError("again"))
    stage.begin()
    stage.actor.leave("late.")
    assert stage.actor.state is ActorState.DEAD
    late = stage.call()
    stage.actor.await_ready(late)
    assert [call.told, ready.told, late.told] == [
        [ActorDiedError],
        [ActorDiedError],
        [ActorDiedError] * 2,
    ]
    assert (stage.heard, ended.told) == (["dead"], [])
    stage.actor.note_gone()
    stage.actor.note_gone()
    assert len(ended.told) == 1


def test_each_is_told_by_an_error_of_his_own() -> None:
    """Raised again and again, one would grow without bound."""
    for end in (ActorDiedError("it is dead"), NodeClosedError("closed")):
        stage = Stage()
        stage.actor.die(end)
        errors: list[Exception] = []
        receiver: Any = SimpleNamespace(settle=errors.append)
        for _ in range(2):
            stage.actor.call("add", b"", receiver)
        assert type(errors[0]) is type(errors[1]) is type(end)
        assert len({*map(id, errors), id(end)}) == 3
        assert str(errors[0]) == str(end)


@pytest.mark.parametrize("is_wanted", [True, False])
def test_exit_actor_ends_it_also_where_the_call_was_cancelled(is_wanted: bool) -> None:
    stage = Stage()
    stage.begin()
    leaving, behind = stage.call(), stage.call()
    if not is_wanted:
        stage.actor.cancel(1)
    stage.actor.on_answer(Failed(1, LEFT, "", "", "", None))
    assert stage.actor.state is ActorState.LEAVING
    stage.actor.settle(b"")
    assert leaving.told == [ActorDiedError] * is_wanted
    assert behind.told == [ActorDiedError]


def test_one_that_is_to_end_takes_no_more_calls() -> None:
    stage = Stage()
    stage.begin()
    before = stage.call()
    stage.actor.is_ending = True
    assert stage.call().told == [ActorDiedError]
    stage.actor.on_answer(Done(1, b"a"))
    assert (before.told, stage.heard) == ([b"a"], ["idle"])
