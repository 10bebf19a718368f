"""One actor with its calls, their callers and its process, in random histories."""

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
from aiogpu.wire.messages import ASYNC, DEFAULT_GROUP, SERIAL, Done, Failed, Invoke
from tests.support.sampling import examples
from tests.unit.runtime import fakes
from tests.unit.runtime.fakes import FakePeer


def test_each_caller_gets_its_own_error_object() -> None:
    """A shared error object would grow with each traceback when it is raised again."""
    func = fakes.func()
    func.actor = ActorTerms(SERIAL, {DEFAULT_GROUP: 2}, {}, 0)
    for death in (ActorDiedError("it is dead"), NodeClosedError("closed")):
        node: Any = SimpleNamespace(on_dead=id)
        actor = Actor(func, node, None)
        actor.die(death)
        errors: list[Exception] = []
        receiver: Any = SimpleNamespace(settle=errors.append)
        for _ in range(2):
            actor.call("add", b"", receiver)
        assert type(errors[0]) is type(errors[1]) is type(death)
        assert len({*map(id, errors), id(death)}) == 3
        assert str(errors[0]) == str(death)


class Caller:
    """The caller of one call.

    Attributes:
        outcomes: the results and errors that the caller got.
        has_cancelled: the caller waits no longer.
        starts: how often a process started the call.
    """

    def __init__(self) -> None:
        self.outcomes: list[object] = []
        self.has_cancelled = False
        self.starts = 0

    @property
    def waits(self) -> bool:
        return not (self.outcomes or self.has_cancelled)

    def settle(self, outcome: bytes | Failed | Exception) -> None:
        if isinstance(outcome, Failed):
            self.outcomes.append(outcome.kind.partition(":")[0])  # or a death's reason
        elif isinstance(outcome, bytes):
            self.outcomes.append(outcome)
        else:
            assert isinstance(outcome, ActorDiedError), outcome
            self.outcomes.append("died")


class Process:
    """A process with its unanswered calls in order, and the calls that it started."""

    def __init__(self, is_serial: bool) -> None:
        self.peer = FakePeer()
        self.sent: list[int] = []
        self.started: list[int] = []
        self.is_serial = is_serial
        self.has_lived = self.is_to_leave = False


class ActorMachine(RuleBasedStateMachine):
    """Random rules for the process and for the callers, with invariants."""

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
        self.callers: dict[int, Caller] = {}
        self.was_ended = False
        # Most cases need these steps, and random rules seldom begin with them.
        self.place(is_quick=True)
        self.call(2)
        self.begin()

    def on_leaving(self, _actor: Actor) -> None:
        """The machine keeps no names of actors."""

    on_dead = forget = on_leaving
    slices = SimpleNamespace(add=list)
    """Does all work at once."""

    def on_idle(self, actor: Actor) -> None:
        """Do the same as `Actors`."""
        if actor.state is ActorState.PENDING:
            actor.settle(b"")
        else:
            actor.leave("nobody has a handle.")

    def teardown(self) -> None:
        """At the end, no caller waits."""
        if hasattr(self, "actor"):
            self.actor.die(ActorDiedError("the end"))
            assert not self.has_waiting_callers

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
            if number not in self.process.started and len(self.process.started) < most:
                self.process.started.append(number)
                self.callers[number].starts += 1

    @precondition(lambda self: self.process and self.process.sent)
    @rule(data=st.data(), is_well=st.booleans(), answers=st.integers(1, 9))
    def work(self, data: Any, is_well: bool, answers: int) -> None:
        for _ in range(answers):
            self.begin()
            if self.process is not None and self.process.started:
                self.answer(data.draw(st.sampled_from(self.process.started)), is_well)

    def answer(self, number: int, is_well: bool) -> None:
        process = self.process
        assert process is not None
        process.started.remove(number)
        process.sent.remove(number)
        failed = Failed(number, RAISED, "ValueError", "", "", None)
        self.actor.on_answer(Done(number, b"%d" % number) if is_well else failed)
        self.read()

    @precondition(lambda self: self.process and self.process.sent)
    @rule(deaths=st.integers(1, 3))
    def crash_repeatedly(self, deaths: int) -> None:
        """Let the process die with the calls that it starts, several times."""
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
        self.actor.end_if_idle()

    @precondition(lambda self: self.process and self.process.is_to_leave)
    @rule()
    def leave(self) -> None:
        if self.process is not None and not self.process.sent:
            self.actor.settle(b"")
            self.lose()

    def lose(self) -> None:
        assert self.process is not None
        last_started = max(self.process.started, default=0)
        was_leaving = self.state is ActorState.LEAVING
        for receiver in self.actor.lose(last_started):
            receiver.settle(ActorDiedError("it went with its process"))
        self.process = None
        if was_leaving:
            self.actor.settle(b"")

    def read(self) -> None:
        """Let the process read its messages."""
        process = self.process
        if process is None:
            return
        for message in process.peer.taken():
            if isinstance(message, Invoke):
                assert not process.is_to_leave, "a call after the order to leave"
                process.sent.append(message.call)
            else:
                process.is_to_leave = True

    # The callers, who have handles.

    @precondition(lambda self: self.holders)
    @rule(calls=st.integers(1, 4))
    def call(self, calls: int) -> None:
        for _ in range(calls):
            caller = Caller()
            number = self.actor.call("add", b"", caller)
            if number:
                self.callers[number] = caller
            else:
                assert caller.outcomes == ["died"]
        self.read()

    @precondition(lambda self: self.callers)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.callers)))
        self.callers[number].has_cancelled = not self.callers[number].outcomes
        must_tell = self.actor.cancel(number)
        assert not must_tell or (self.process and number in self.process.sent)
        self.actor.end_if_idle()
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
        self.actor.end_if_idle()
        self.read()

    @precondition(lambda self: self.is_late)
    @rule()
    def kill(self) -> None:
        self.was_ended = True
        self.actor.die(ActorDiedError("killed"))

    # Invariants.

    @property
    def state(self) -> ActorState:
        return self.actor.state

    @property
    def is_late(self) -> bool:
        """Allow rules that end the actor: most cases come before its end."""
        return len(self.callers) > self.lifetime

    @property
    def is_held(self) -> bool:
        return bool(self.holders) and not self.actor.is_ending

    @property
    def has_waiting_callers(self) -> bool:
        return any(caller.waits for caller in self.callers.values())

    @invariant()
    def no_caller_gets_two_outcomes(self) -> None:
        for caller in self.callers.values():
            assert len(caller.outcomes) + caller.has_cancelled <= 1

    @invariant()
    def each_result_belongs_to_its_call(self) -> None:
        for number, caller in self.callers.items():
            assert caller.outcomes in ([], [b"%d" % number], [RAISED], ["died"])

    @invariant()
    def no_caller_waits_for_a_dead_actor(self) -> None:
        if self.state is ActorState.DEAD:
            assert not self.has_waiting_callers

    @invariant()
    def actor_lives_while_a_handle_exists(self) -> None:
        if self.is_held and not self.was_ended:
            assert self.state in (ActorState.PENDING, ActorState.ALIVE)

    @invariant()
    def actor_ends_without_handles_and_waiting_callers(self) -> None:
        if not self.is_held and not self.has_waiting_callers:
            assert self.state is not ActorState.ALIVE

    @invariant()
    def waiting_caller_keeps_the_actor_alive(self) -> None:
        if self.has_waiting_callers:
            assert self.state in (ActorState.PENDING, ActorState.ALIVE)

    @invariant()
    def at_most_limit_calls_are_sent(self) -> None:
        if self.process is not None and not self.process.is_serial:
            assert len(self.process.sent) <= self.limit

    @invariant()
    def serial_calls_are_sent_in_order(self) -> None:
        if self.process is not None and self.process.is_serial:
            assert self.process.sent == sorted(self.process.sent)

    @invariant()
    def started_calls_run_again_at_most_retries_times(self) -> None:
        if self.retries >= 0:
            assert all(c.starts <= 1 + self.retries for c in self.callers.values())


TestActor = seed(1)(ActorMachine).TestCase
TestActor.settings = settings(
    database=None,
    deadline=None,
    max_examples=examples(400),
    stateful_step_count=50,
    suppress_health_check=list(HealthCheck),
)
