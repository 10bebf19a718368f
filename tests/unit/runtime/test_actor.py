"""One actor: its calls, its owners and its process, in stories and by chance."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from aiogpu.client.function_spec import ActorTerms
from aiogpu.errors import ActorDiedError, NodeClosedError
from aiogpu.runtime.actors.actor import Actor, ActorState
from aiogpu.serialization.exceptions import RAISED
from aiogpu.wire.messages import (
    ASYNC,
    DEFAULT_GROUP,
    SERIAL,
    Done,
    Failed,
    Invoke,
)
from tests.support.sampling import examples
from tests.unit.runtime import fakes
from tests.unit.runtime.fakes import FakePeer


class FakeReceiver:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def settle(self, outcome: bytes | Failed | Exception) -> None:
        if isinstance(outcome, Failed):
            self.told.append(outcome.kind)
        else:
            is_error = isinstance(outcome, Exception)
            self.told.append(type(outcome) if is_error else outcome)


class ActorStory:
    """An actor, its peer, and what its node hears of it."""

    def __init__(self, mode: str = SERIAL, retries: int = 0, limit: int = 2) -> None:
        func = fakes.func()
        func.actor = ActorTerms(mode, {DEFAULT_GROUP: limit}, {}, retries)
        self.peer = FakePeer()
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

    def call(self) -> FakeReceiver:
        receiver = FakeReceiver()
        self.actor.call("add", b"args", receiver)
        return receiver

    @property
    def sent(self) -> list[int | str]:
        """The numbers of calls that were sent since the last look, and other words."""
        return [
            message.call if isinstance(message, Invoke) else type(message).__name__
            for message in self.peer.taken()
        ]


def test_each_caller_gets_an_error_object_of_its_own() -> None:
    """Raised again and again, one would grow without bound."""
    for end in (ActorDiedError("it is dead"), NodeClosedError("closed")):
        stage = ActorStory()
        stage.actor.die(end)
        errors: list[Exception] = []
        receiver: Any = SimpleNamespace(settle=errors.append)
        for _ in range(2):
            stage.actor.call("add", b"", receiver)
        assert type(errors[0]) is type(errors[1]) is type(end)
        assert len({*map(id, errors), id(end)}) == 3
        assert str(errors[0]) == str(end)


class Owner:
    """Waits for one call.

    Attributes:
        told: what it was told.
        has_cancelled: whether it waits no more.
        begun: how often a process has begun the call.
    """

    def __init__(self) -> None:
        self.told: list[object] = []
        self.has_cancelled = False
        self.begun = 0

    def settle(self, outcome: bytes | Failed | Exception) -> None:
        if isinstance(outcome, Failed):
            # Or that it is dead, and why.
            self.told.append(outcome.kind.partition(":")[0])
        elif isinstance(outcome, bytes):
            self.told.append(outcome)
        else:
            assert isinstance(outcome, ActorDiedError), outcome
            self.told.append("died")


class Process:
    """What was sent to it and not answered, in that order; and what it has begun."""

    def __init__(self, is_serial: bool) -> None:
        self.peer = FakePeer()
        self.sent: list[int] = []
        self.begun: list[int] = []
        self.is_serial = is_serial
        self.has_lived = self.is_to_leave = False


class ActorMachine(RuleBasedStateMachine):
    """See above."""

    @initialize(
        mode=st.sampled_from([SERIAL, ASYNC]),
        limit=st.integers(1, 3),
        retries=st.sampled_from([0, 1, -1]),
        restarts=st.integers(0, 5),
        lifetime=st.sampled_from([2, 4, 8]),
    )
    def make(
        self, mode: str, limit: int, retries: int, restarts: int, lifetime: int
    ) -> None:
        func = fakes.func()
        func.actor = ActorTerms(mode, {DEFAULT_GROUP: limit}, {}, retries)
        self.new_number = count(1).__next__
        self.actor = Actor(func, self, None)
        self.limit, self.lifetime, self.holders = limit, lifetime, 1
        self.retries, self.restarts = retries, restarts
        self.process: Process | None = None
        self.owners: dict[int, Owner] = {}
        self.was_ended = False
        # Most that is to be seen needs these, and chance seldom begins with them.
        self.place(is_quick=True)
        self.call(2)
        self.begin()

    def caller_here(self) -> int:
        return 0

    def on_leaving(self, _actor: Actor) -> None:
        """Nobody counts its names here."""

    on_dead = on_leaving

    def on_idle(self, actor: Actor) -> None:
        """As `Actors` does."""
        if actor.state is ActorState.PENDING:
            actor.settle(b"")
        else:
            actor.leave("nobody has a handle.")

    def teardown(self) -> None:
        """Whatever has been: in the end everybody knows."""
        if hasattr(self, "actor"):
            self.actor.die(ActorDiedError("the end"))
            assert all(o.told or o.has_cancelled for o in self.owners.values())

    # The process.

    @precondition(lambda self: not self.process and self.state is ActorState.PENDING)
    @rule(is_quick=st.sampled_from([True, True, False]))
    def place(self, is_quick: bool) -> None:
        self.process = Process(self.actor.is_serial)
        self.actor.worker = SimpleNamespace(peer=self.process.peer)  # type: ignore[assignment]
        if is_quick:
            self.construct()

    @precondition(lambda self: self.process and not self.process.has_lived)
    @rule()
    def construct(self) -> None:
        assert self.process is not None
        self.process.has_lived = True
        self.actor.on_created()
        self.read()

    @precondition(
        lambda self: self.process and not self.process.has_lived and self.is_late
    )
    @rule()
    def fail_to_construct(self) -> None:
        self.was_ended = True
        self.actor.settle(Failed(0, RAISED, "ValueError", "no", "", None))
        self.lose()

    @precondition(lambda self: self.process and self.process.has_lived)
    @rule()
    def begin(self) -> None:
        if self.process is None or not self.process.has_lived:
            return
        most = 1 if self.process.is_serial else self.limit
        for number in self.process.sent:
            if number not in self.process.begun and len(self.process.begun) < most:
                self.process.begun.append(number)
                self.owners[number].begun += 1

    @precondition(lambda self: self.process and self.process.sent)
    @rule(data=st.data(), is_well=st.booleans(), answers=st.integers(1, 9))
    def work(self, data: Any, is_well: bool, answers: int) -> None:
        for _ in range(answers):
            self.begin()
            if self.process is not None and self.process.begun:
                self.answer(data.draw(st.sampled_from(self.process.begun)), is_well)

    def answer(self, number: int, is_well: bool) -> None:
        process = self.process
        assert process is not None
        process.begun.remove(number)
        process.sent.remove(number)
        failed = Failed(number, RAISED, "ValueError", "", "", None)
        self.actor.on_answer(Done(number, b"%d" % number) if is_well else failed)
        self.read()

    @precondition(lambda self: self.process and self.process.sent)
    @rule(deaths=st.integers(1, 3))
    def crash_loop(self, deaths: int) -> None:
        """It dies over what it begins, again and again."""
        for _ in range(deaths):
            if self.process is None and self.state is ActorState.PENDING:
                self.place(is_quick=True)
            self.begin()
            self.crash()

    def crash(self) -> None:
        if self.process is None:
            return
        self.lose()
        if self.state is ActorState.PENDING:
            if self.restarts:
                self.restarts -= 1
            else:
                self.was_ended = True
                self.actor.settle(RuntimeError("it has crashed"))
        self.actor.look_if_idle()

    @precondition(lambda self: self.process and self.process.is_to_leave)
    @rule()
    def leave(self) -> None:
        if self.process is not None and not self.process.sent:
            self.actor.settle(b"")
            self.lose()

    def lose(self) -> None:
        assert self.process is not None
        begun = max(self.process.begun, default=0)
        was_leaving = self.state is ActorState.LEAVING
        for receiver in self.actor.lose(begun):
            receiver.settle(ActorDiedError("it went with its process"))
        self.process = None
        if was_leaving:
            self.actor.settle(b"")

    def read(self) -> None:
        """The process reads what it was sent."""
        process = self.process
        if process is None:
            return
        for message in process.peer.taken():
            if isinstance(message, Invoke):
                assert not process.is_to_leave, "a call after the order to leave"
                process.sent.append(message.call)
            else:
                process.is_to_leave = True

    # Those who have handles.

    @precondition(lambda self: self.holders)
    @rule(calls=st.integers(1, 4))
    def call(self, calls: int) -> None:
        for _ in range(calls):
            owner = Owner()
            number = self.actor.call("add", b"", owner)
            if number:
                self.owners[number] = owner
            else:
                assert owner.told == ["died"]
        self.read()

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.owners)))
        self.owners[number].has_cancelled = not self.owners[number].told
        must_tell = self.actor.cancel(number)
        assert not must_tell or (self.process and number in self.process.sent)
        self.actor.look_if_idle()
        self.read()

    @precondition(lambda self: 0 < self.holders < 3)
    @rule()
    def hold(self) -> None:
        self.holders += 1
        self.actor.holders += 1

    @precondition(lambda self: self.holders > (not self.is_late))
    @rule()
    def release(self) -> None:
        self.holders -= 1
        self.actor.release()
        self.read()

    @precondition(lambda self: self.is_late)
    @rule()
    def terminate(self) -> None:
        self.actor.is_ending = True
        self.actor.look_if_idle()
        self.read()

    @precondition(lambda self: self.is_late)
    @rule()
    def kill(self) -> None:
        self.was_ended = True
        self.actor.die(ActorDiedError("killed"))

    # What always holds.

    @property
    def state(self) -> ActorState:
        return self.actor.state

    @property
    def is_late(self) -> bool:
        """What ends it comes late: most that is to be seen comes before."""
        return len(self.owners) > self.lifetime

    @invariant()
    def no_owner_has_two_outcomes(self) -> None:
        for owner in self.owners.values():
            assert len(owner.told) + owner.has_cancelled <= 1

    @invariant()
    def an_answer_is_for_its_call(self) -> None:
        for number, owner in self.owners.items():
            assert owner.told in ([], [b"%d" % number], [RAISED], ["died"])

    @invariant()
    def no_owner_waits_for_a_dead_actor(self) -> None:
        if self.state is ActorState.DEAD:
            assert all(o.told or o.has_cancelled for o in self.owners.values())

    @invariant()
    def it_lives_while_a_handle_exists(self) -> None:
        is_held = self.holders and not self.actor.is_ending
        if is_held and not self.was_ended:
            assert self.state in (ActorState.PENDING, ActorState.ALIVE)

    @invariant()
    def it_ends_without_handles_and_waiting_owners(self) -> None:
        is_held = self.holders and not self.actor.is_ending
        waits = any(not (o.told or o.has_cancelled) for o in self.owners.values())
        if not is_held and not waits:
            assert self.state is not ActorState.ALIVE

    @invariant()
    def an_owner_that_waits_keeps_it_alive(self) -> None:
        waits = any(not (o.told or o.has_cancelled) for o in self.owners.values())
        assert not waits or self.state in (ActorState.PENDING, ActorState.ALIVE)

    @invariant()
    def no_more_are_sent_than_may_run(self) -> None:
        if self.process is not None and not self.process.is_serial:
            assert len(self.process.sent) <= self.limit

    @invariant()
    def calls_are_sent_in_their_order(self) -> None:
        if self.process is not None and self.process.is_serial:
            assert self.process.sent == sorted(self.process.sent)

    @invariant()
    def what_has_begun_runs_again_only_if_it_may(self) -> None:
        if self.retries >= 0:
            assert all(o.begun <= 1 + self.retries for o in self.owners.values())


TestActor = seed(1)(ActorMachine).TestCase
TestActor.settings = settings(
    database=None,
    deadline=None,
    max_examples=examples(400),
    stateful_step_count=50,
    suppress_health_check=list(HealthCheck),
)
