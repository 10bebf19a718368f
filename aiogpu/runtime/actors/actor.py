"""One actor as the driver knows it: its state, calls, process, and end.

To the core an actor is a task that holds its devices until it ends and is retried up to
`max_restarts` times. `Actor` is the receiver of that task. The calls of one caller
begin in the order in which they were made, so a call that waits for an argument delays
its caller's later calls. Calls of other callers go on: the argument may depend on them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Final, NamedTuple

from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import Outcome, Receiver
from aiogpu.core.mailbox import CallId, Mailbox
from aiogpu.core.model.ids import OWN, ClientId
from aiogpu.errors import (
    ActorDiedError,
    ActorNameError,
    AiogpuError,
    NodeClosedError,
)
from aiogpu.runtime.objects.segments import ActorHold
from aiogpu.runtime.objects.store import Borrower
from aiogpu.runtime.objects.values import Value, await_arguments, is_complete
from aiogpu.runtime.pending_tasks import EACH, Delay, internal_error, settle
from aiogpu.runtime.slices import Slices
from aiogpu.serialization.exceptions import DIED, LEFT, STOPPED
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.references import add_actor
from aiogpu.serialization.serializer import NONE_PAYLOAD, dump_whole
from aiogpu.wire import messages as wire

if TYPE_CHECKING:
    from aiogpu.observe.status import ActorStatus


class ActorState(Enum):
    """The state of an actor."""

    PENDING = "pending"
    """It waits for a worker, or its constructor runs; also during a restart."""
    ALIVE = "alive"
    EVICTED = "evicted"
    """It leaves or has left to let others start; its next call brings it back."""
    LEAVING = "leaving"
    """It ends once it has answered the calls that were sent to it."""
    DEAD = "dead"


@dataclass(slots=True, eq=False)
class ActorCall:
    """One unanswered call of a method.

    Attributes:
        receiver: None if the call was cancelled.
        retries_left: how often the call is retried when the process dies; -1 for no
            limit.
        limit: the number of items that a stream may yield in total; 0 for other calls.
        passed: the number of items received.
        known_as: the caller's number for the call, if it differs; else 0.
    """

    method: str
    payload: bytes
    receiver: Receiver | None
    retries_left: int
    mailbox: Mailbox
    limit: int = 0
    passed: int = 0
    known_as: CallId = 0

    def order(self, number: CallId, worker: Borrower) -> wire.Invoke:
        """Return the message for the process, with the references it borrows."""
        payload = self.payload
        if type(payload) is not bytes:
            payload = worker.borrow(payload)
        return wire.Invoke(number, self.method, payload, self.limit, self.passed)


def died(name: str, why: str) -> ActorDiedError:
    """Return the error of calls to a dead actor."""
    return ActorDiedError(f"{name} is dead: {why}", name)


def killed_for_good(name: str) -> ActorDiedError:
    """Return the error of an actor that was killed and may not restart again."""
    return died(name, "it was killed, and has no restarts left.")


def leaving(name: str) -> ActorDiedError:
    """Return the error of a call to an actor that is about to end."""
    return ActorDiedError(
        f"{name} takes no more calls: it ends after the calls that it already has.",
        name,
    )


def name_taken(name: str) -> ActorNameError:
    """Return the error for the name of a living actor."""
    return ActorNameError(
        f"an actor named {name!r} exists already. Choose another name, or pass "
        f"get_if_exists=True to get the existing actor."
    )


def not_made(name: str, failed: wire.Failed) -> wire.Failed:
    """Return the error of an actor whose constructor has failed."""
    return failed._replace(task=0, kind=f"{DIED}:{failed.kind}:{name}")


def _copy(error: Exception) -> Exception:
    """Return a copy of an error, since raising an error extends its traceback."""
    if not isinstance(error, ActorDiedError):
        return NodeClosedError(str(error))
    copy = ActorDiedError(str(error), error.actor)
    copy.__cause__ = error.__cause__
    return copy


class RunTimer(NamedTuple):
    """The timer of a running call that has a `run_timeout`.

    Attributes:
        handle: cancels it. uvloop returns a handle without `when()` if the delay rounds
            to zero milliseconds.
        due: loop time at which it fires.
    """

    handle: asyncio.Handle
    due: float


@dataclass(slots=True, eq=False)
class WaitingCall:
    """A call that waits for its arguments, or behind such a call.

    Attributes:
        number: the caller's number for the call.
        is_due: all arguments have arrived, or an argument has failed.
        failed: the argument that has failed, or None.
    """

    number: CallId
    is_due: bool = True
    failed: Value | None = None


class OrderedCallQueue:
    """The calls of one actor that wait for arguments, in a queue for each caller.

    Attributes:
        callers: the queue of each caller that has one.
    """

    def __init__(self, actor: Actor) -> None:
        self.callers: dict[int, deque[WaitingCall]] = {}
        self._actor = actor
        self._new_numbers: dict[CallId, CallId] = {}

    def number_of(self, known_as: CallId) -> CallId:
        """Translate the caller's number for a call to the current number."""
        return self._new_numbers.get(known_as, known_as)

    def forget(self, known_as: CallId) -> None:
        """Forget the caller's number for a call that has ended."""
        self._new_numbers.pop(known_as, None)

    def forget_all(self) -> None:
        """Forget all calls: the actor is dead."""
        self.callers.clear()
        self._new_numbers.clear()

    def holds_back(self, caller: int, payload: bytes) -> bool:
        """Return True if a call with this payload from this caller has to wait."""
        return caller in self.callers or not is_complete(payload)

    def join(self, caller: int, number: CallId, payload: bytes) -> None:
        """Queue a call behind the earlier calls of its caller."""
        waiting = WaitingCall(number)
        self.callers.setdefault(caller, deque()).append(waiting)
        if type(payload) is Payload:
            waiting.is_due = False
            await_arguments(payload, partial(self._on_arguments, caller, waiting))
        else:
            self._send_due(caller)

    def _on_arguments(
        self, caller: int, waiting: WaitingCall, failed: Value | None
    ) -> None:
        waiting.is_due, waiting.failed = True, failed
        self._send_due(caller)

    def _send_due(self, caller: int) -> None:
        """Send the calls that are due; fail the calls with a failed argument."""
        queue, actor = self.callers.get(caller), self._actor
        while queue and queue[0].is_due:
            waiting = queue.popleft()
            call = actor.calls.pop(waiting.number, None)
            if call is None:
                continue  # it was cancelled, or the actor has died
            if waiting.failed is None:
                # A new number: the call comes after the calls sent meanwhile.
                call.known_as = waiting.number
                later = self._new_numbers[waiting.number] = actor.owner.new_number()
                actor.calls[later] = call
                actor.post(later, call.mailbox)
            elif call.receiver is not None:
                waiting.failed.pass_to(call.receiver)
                actor.end_if_idle()
        if queue is not None and not queue:
            self.callers.pop(caller, None)


_log: Final = logging.getLogger(__name__)


AHEAD: Final = 256
"""Calls that may be queued in the process of a serial actor."""


NO_HANDLE: Final = "its last handle was released."


FIRST_CALL: Final = 1 << 40
"""Number of a node's first call. It is above the numbers of tasks and of `Run`s."""


Check = Callable[[FunctionSpec, bytes], None]
"""Raises if a function's calls with these arguments can never be served."""


class Register:
    """The actors of a node that are alive or have handles; see `ActorsPort`.

    A subclass runs them, in processes or in the program's thread.

    Attributes:
        check: raises if this node can never serve a class with these arguments.
        slices: fails the calls of dead actors.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, check: Check, slices: Slices
    ) -> None:
        self._loop = loop
        self.check = check
        self.slices = slices
        self._actors: dict[int, Actor] = {}
        self._named: dict[tuple[str, str], Actor] = {}
        self._refused: dict[int, Exception] = {}
        self.new_number: Final = count(FIRST_CALL).__next__

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._actors)}>"

    def create(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
        public: int = 0,
        client: ClientId = OWN,
    ) -> Actor:
        """Make an actor, or find it by its name.

        The caller holds one handle to the actor; see `ActorsPort.create`. `public` is
        the id that the creating process has chosen for the actor, 0 for none.
        """
        try:
            self.check(func, payload)
            if get_if_exists and key is not None and (existing := self.find(key)):
                self._add(existing, public)
                return existing
            if key is not None and key in self._named:
                raise name_taken(key[1])
        except AiogpuError as error:
            if public:  # the caller may have passed it on already
                self.refuse(public, error)
            raise
        actor = self.new_actor(func, key)
        if key is not None:
            self._named[key] = actor
        if func.spec.is_detached:
            actor.holders += 1  # the node's own handle, until the actor is killed
        actor.id = self.start(actor, payload, client)
        self._add(actor, public)
        return actor

    def _add(self, actor: Actor, public: int) -> None:
        """Register an actor under its id and under its creator's id for it."""
        self._actors[actor.id] = actor
        if public:
            self._actors[public] = actor
            actor.aliases.append(public)

    def cancel(self, actor: int, number: int) -> None:
        """Cancel a call."""
        found = self._actors.get(actor)
        if found is None:
            return
        number = found.waiting.number_of(number)
        if found.cancel(number):
            self.drop(found, number)
        found.end_if_idle()

    def demand(self, actor: int, number: int, limit: int) -> None:
        """Let a stream yield `limit` items in total."""
        found = self._actors.get(actor)
        if found is not None:
            found.demand(number, limit)

    def stop(self, actor: int, how: str) -> None:
        """End an actor; see `ActorsPort.stop`."""
        if how != wire.AFTER_ALL:
            self.kill(actor, no_restart=how != wire.AGAIN)
            return
        found = self._actors.get(actor)
        if found is not None:
            found.refuse_calls()
            found.end_if_idle()

    def get(self, actor: int) -> Actor | None:
        """Return an actor by id; None if it is dead and has no handles."""
        return self._actors.get(actor)

    def all(self) -> list[Actor]:
        """Return all actors that are alive or have handles, each once."""
        return [actor for key, actor in self._actors.items() if key == actor.id]

    def listed(
        self,
        place_of: Callable[[Actor], tuple[int, int] | None],
        client_of: Callable[[int], int],
    ) -> tuple[ActorStatus, ...]:
        """Return the actors for `status()`.

        Actors with a process come first, by number; then the first actors that wait
        for a process.

        Args:
            place_of: returns an actor's worker and its process id; None for none.
            client_of: returns the program that owns an actor, by the actor's number.
        """
        from aiogpu.observe.snapshot import LISTED

        placed: list[ActorStatus] = []
        pending: list[Actor] = []
        for actor in self.all():
            place = place_of(actor)
            if actor.state is ActorState.DEAD:
                continue
            if place is None:
                pending.append(actor)
            else:
                placed.append(_status(actor, place, client_of(actor.id)))
        placed.sort(key=lambda status: status.id)
        waiting = [
            _status(actor, None, client_of(actor.id))
            for actor in islice(pending, LISTED)
        ]
        return (*placed, *waiting)

    def held(self, actor: int, _name: str = "") -> Actor:
        """See `ActorsPort.held`."""
        if not self.hold(actor):
            raise self.unknown(actor)
        return self._actors[actor]

    def unknown(self, actor: int) -> Exception:
        """Return the error for an actor that is unknown or was never made."""
        refused = self._refused.get(actor)
        return refused or ActorDiedError(
            f"the actor {actor} has ended, since its last handle was released."
        )

    def refuse(self, public: int, error: Exception) -> None:
        """Note why a caller's actor was not made."""
        self._refused[public] = error

    def find(self, key: tuple[str, str]) -> Actor | None:
        """Return the living actor with this name, and count one more handle."""
        actor = self._named.get(key)
        if actor is not None:
            actor.holders += 1
        return actor

    def hold(self, actor: int) -> bool:
        """Count one more handle; return False if the actor is not known."""
        found = self._actors.get(actor)
        if found is None:
            return False
        found.holders += 1
        return True

    def release(self, actor: int) -> None:
        """Count one handle less."""
        found = self._actors.get(actor)
        if found is None:
            self._refused.pop(actor, None)
        else:
            found.release()
            self.forget(found)

    def release_soon(self, actor: int) -> None:
        """Release a handle from any thread or finalizer."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._release_one, actor)

    def _release_one(self, actor: int) -> None:
        # A thousand handles may be dropped at once.
        self.slices.add(map(self.release, (actor,)))

    def forget(self, actor: Actor) -> None:
        """Forget the actor if it is dead, has told so, and has no handles."""
        if actor.holders or actor.untold:
            return
        if actor.state is ActorState.DEAD:
            for key in (actor.id, *actor.aliases):
                self._actors.pop(key, None)

    def free_name(self, actor: Actor) -> None:
        """Free the actor's name for another actor."""
        if actor.key is not None and self._named.get(actor.key) is actor:
            del self._named[actor.key]

    def pass_on(self, actor: int, hold: object) -> None:
        """Note that a handle is being pickled; see `ActorsPort.pass_on`."""
        add_actor(actor, hold)

    def new_actor(self, func: FunctionSpec, key: tuple[str, str] | None) -> Actor:
        """Return an actor that is not started yet."""
        return Actor(func, self, key)

    def start(self, actor: Actor, payload: bytes, client: ClientId) -> int:
        """Queue an actor for its resources, for a program; return its id."""
        raise NotImplementedError

    def drop(self, actor: Actor, number: CallId) -> None:
        """Stop a call that was sent, and whose caller has cancelled it."""
        raise NotImplementedError

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """Kill an actor's process, and the actor too unless it may restart."""
        raise NotImplementedError

    def room(self, actor: int) -> tuple[int | None, str]:
        """Return how many such actors fit on the node, and the request of each."""
        raise NotImplementedError

    def on_idle(self, actor: Actor) -> None:
        """Handle that an actor has no handles and no unanswered calls."""
        raise NotImplementedError

    def on_leaving(self, actor: Actor) -> None:
        """Handle that an actor was told to end."""
        self.free_name(actor)

    def on_dead(self, actor: Actor) -> None:
        """Handle that an actor is dead."""
        self.free_name(actor)
        self.forget(actor)


def _status(actor: Actor, place: tuple[int, int] | None, client: int) -> ActorStatus:
    from aiogpu.observe.status import ActorStatus  # late: few programs need it

    namespace, name = actor.key or ("", None)
    worker, pid = place or (None, 0)
    suffix = f" {name!r}" if name is not None else ""
    return ActorStatus(
        id=actor.id,
        name=name,
        namespace=namespace,
        class_name=actor.name.removesuffix(suffix),
        state=actor.state.value,
        holders=actor.holders,
        worker=worker,
        pid=pid,
        calls=len(actor.calls),
        is_detached=actor.func.spec.is_detached,
        client=client,
        evictions=actor.evictions,
    )


class Actor:
    """One actor, which is the receiver of its task in the core.

    Attributes:
        id: the id of the actor's task; 0 before the task is submitted.
        aliases: the ids that the creating workers and programs chose for the actor.
        func: the class.
        key: the namespace and name, or None.
        holders: the number of handles; the actor ends with the last handle.
        is_ending: the actor ends after the calls that it was sent, even with handles.
        is_serial: the process runs one call at a time.
        state: see `ActorState`; only methods of this class change it.
        is_gone: the actor is dead, and its process has ended.
        has_lived: the constructor has returned at least once.
        evictions: how often it has left so that others could start.
        worker: the process, None while there is none.
        drops: the number of sent calls that were dropped in this process.
        is_killed: `kill` has ended this process, and the actor restarts.
        calls: the unanswered calls, by number.
        untold: the calls that were unanswered when the actor died, until all are told.
        mailboxes: the queue of each concurrency group.
        terms: how the calls are run.
        timers: the timers of running calls that have a `run_timeout`.
        paused: the seconds left to such calls that stand at a breakpoint.
        waiting: the calls that wait for their arguments.
        owner: the register of this actor.
    """

    def __init__(
        self, func: FunctionSpec, owner: Register, key: tuple[str, str] | None
    ) -> None:
        assert func.actor is not None, func
        self.id = 0
        self.aliases: list[int] = []
        self.func = func
        self.key = key
        self.holders = 1
        self.is_ending = False
        self.state = ActorState.PENDING
        self.worker: Borrower | None = None
        self.drops = 0
        self.is_killed = False
        self.has_lived = False
        self.evictions = 0
        self.is_gone = False
        self.calls: dict[CallId, ActorCall] = {}
        self.untold: dict[CallId, ActorCall] = {}
        terms = func.actor
        self.is_serial = terms.mode == wire.SERIAL
        self.mailboxes = {
            group: Mailbox(AHEAD if self.is_serial else limit, self.is_serial)
            for group, limit in terms.limits.items()
        }
        self.owner = owner
        self._unwanted = 0
        self.waiting = OrderedCallQueue(self)
        self.terms = terms
        self.timers: dict[CallId, RunTimer] = {}
        self.paused: dict[CallId, float] = {}
        self._awaited_by: list[Receiver] = []
        self._end_awaited_by: list[Receiver] = []
        self._loss_awaited_by: dict[CallId, Receiver] = {}
        self._end: Exception | wire.Failed | None = None
        self._why_left = NO_HANDLE

    def __repr__(self) -> str:
        return f"<Actor {self.name} {self.id} {self.state.value}>"

    @property
    def name(self) -> str:
        """The name in logs and errors."""
        return self.func.spec.name

    def holder(self) -> ActorHold:
        """Return an object that counts as one handle; see `ActorPort.holder`."""
        return ActorHold(self.id, self.owner)

    def call(
        self,
        method: str,
        payload: bytes,
        receiver: Receiver,
        caller: int = 0,
    ) -> CallId:
        """Call a method and return the call's number, 0 if the actor is ending.

        `caller` is the id of the calling worker; 0 for code of this process.
        """
        if self._end is not None or self.is_ending:
            self._refuse(receiver)
            return 0
        terms = self.terms
        groups = terms.groups
        mailbox = self.mailboxes[
            groups.get(method, wire.DEFAULT_GROUP) if groups else wire.DEFAULT_GROUP
        ]
        number = self.owner.new_number()
        limit = terms.windows.get(method, 0) if terms.windows else 0
        self.calls[number] = ActorCall(
            method, payload, receiver, terms.max_task_retries, mailbox, limit
        )
        may_wait = self.waiting.callers or type(payload) is not bytes
        if may_wait and self.waiting.holds_back(caller, payload):
            self.waiting.join(caller, number, payload)
            return number
        self.post(number, mailbox)
        return number

    def post(self, number: CallId, mailbox: Mailbox) -> None:
        """Send a call, or queue it until there is a process."""
        if self.worker is None or self.worker.peer is None:
            # The call was not sent, so it is not lost with the last process.
            mailbox.is_open = False
            mailbox.post(number)
        elif mailbox.post(number):
            try:
                self.worker.peer.post(self.calls[number].order(number, self.worker))
            except Exception as error:  # noqa: BLE001 - passed to the receiver
                self._fail_call(number, error)
                self._send(mailbox.take())

    def demand(self, number: CallId, limit: int) -> None:
        """Let a stream yield `limit` items in total."""
        number = self.waiting.number_of(number)
        call = self.calls.get(number)
        if call is None or not call.limit:
            return
        call.limit = limit
        if number in call.mailbox.sent and self.worker and self.worker.peer:
            self.worker.peer.post(wire.Demand(number, limit))

    def ask(self, query: str, receiver: Receiver) -> CallId:
        """Settle a receiver with the answer to a query; see `ActorPort.ask`."""
        if query == wire.LOST:
            return self._await_loss(receiver)
        if query == wire.READY:
            self._await_ready(receiver)
        elif query == wire.ENDED:
            self._await_end(receiver)
        else:
            receiver.settle(dump_whole(self.owner.room(self.id)))
        return 0

    def _await_ready(self, receiver: Receiver) -> None:
        """Settle the receiver when the constructor has returned or has failed."""
        if self._takes_no_calls:
            self._refuse(receiver)
        elif self.state is ActorState.PENDING:
            self._awaited_by.append(receiver)
        else:
            receiver.settle(NONE_PAYLOAD)

    def _await_loss(self, receiver: Receiver) -> CallId:
        """Settle the receiver when `_await_ready` would wait or fail again."""
        if self._takes_no_calls or self.state is ActorState.PENDING:
            receiver.settle(NONE_PAYLOAD)
            return 0
        number = self.owner.new_number()
        self._loss_awaited_by[number] = receiver
        return number

    def _tell_loss(self) -> None:
        waiting, self._loss_awaited_by = self._loss_awaited_by, {}
        for receiver in waiting.values():
            receiver.settle(NONE_PAYLOAD)

    @property
    def _takes_no_calls(self) -> bool:
        is_leaving = self.is_ending or self.state is ActorState.LEAVING
        return is_leaving or self._end is not None

    def refuse_calls(self) -> None:
        """Take no more calls: the actor ends after the calls that it was sent."""
        self.is_ending = True
        self._tell_loss()

    def _await_end(self, receiver: Receiver) -> None:
        """Settle the receiver when the actor is dead and its process has ended."""
        if self.is_gone:
            receiver.settle(NONE_PAYLOAD)
        else:
            self._end_awaited_by.append(receiver)

    def note_gone(self) -> None:
        """Note that the last process of the actor has ended."""
        self.is_gone = True
        waiting, self._end_awaited_by = self._end_awaited_by, []
        for receiver in waiting:
            receiver.settle(NONE_PAYLOAD)

    def delay(self, number: CallId, delay: Delay) -> None:
        """Wrap the receiver of a call, or all receivers of the actor, in `delay`."""
        calls = [self.calls[number]] if number in self.calls else []
        is_for_all = number in (self.id, EACH)
        for call in self.calls.values() if is_for_all else calls:
            if call.receiver is not None:
                call.receiver = delay(call.receiver)
        if is_for_all:
            self._awaited_by = [*map(delay, self._awaited_by)]
            self._end_awaited_by = [*map(delay, self._end_awaited_by)]
            waiting = self._loss_awaited_by.items()
            self._loss_awaited_by = {number: delay(one) for number, one in waiting}

    def on_created(self) -> None:
        """Handle that the constructor has returned."""
        if self.state is not ActorState.PENDING or self.is_killed:
            return  # the actor or this process was killed meanwhile
        self.has_lived = True
        self.state = ActorState.ALIVE
        waiting, self._awaited_by = self._awaited_by, []
        for receiver in waiting:
            receiver.settle(NONE_PAYLOAD)
        for mailbox in self.mailboxes.values():
            self._send(mailbox.open())
        self.end_if_idle()

    def on_answer(self, answer: wire.Done | wire.Failed) -> None:
        """Handle the answer to a call."""
        call = self.calls.pop(answer.task, None)
        if call is None:
            return
        if call.known_as:
            self.waiting.forget(call.known_as)
        if self.timers and (timer := self.timers.pop(answer.task, None)):
            timer.handle.cancel()
        mailbox, receiver = call.mailbox, call.receiver
        mailbox.sent.pop(answer.task, None)
        if receiver is None:
            self._unwanted -= 1
        if mailbox.waiting and len(mailbox.sent) <= mailbox.low:
            self._send(mailbox.take())
        if type(answer) is wire.Done:
            if receiver is not None:
                receiver.settle(answer.payload)
        elif type(answer) is wire.Failed:
            self._reject(receiver, answer)
        if not self.holders or self.is_ending:
            self.end_if_idle()

    def _reject(self, receiver: Receiver | None, failed: wire.Failed) -> None:
        if failed.kind == LEFT:
            self.leave("a call ended it by exit_actor().")
        if receiver is None:
            return
        if failed.kind == LEFT:
            receiver.settle(died(self.name, "this call ended it by exit_actor()."))
        elif failed.kind == STOPPED and self.state is ActorState.LEAVING:
            # The call was stopped with its process, not cancelled by its caller.
            receiver.settle(died(self.name, self._why_left))
        else:
            receiver.settle(failed)

    def _send(self, numbers: list[CallId]) -> None:
        while numbers and self.worker is not None and self.worker.peer is not None:
            worker, post = self.worker, self.worker.peer.post
            failed: list[Mailbox] = []
            for number in numbers:
                try:
                    post(self.calls[number].order(number, worker))
                except Exception as error:  # noqa: BLE001 - passed to the receiver
                    failed.append(self.calls[number].mailbox)
                    self._fail_call(number, error)
            # No answer will free these places, so send other calls now.
            numbers = [number for mailbox in failed for number in mailbox.take()]

    def _fail_call(self, number: CallId, error: Exception) -> None:
        """Fail a call that aiogpu itself has failed to send."""
        call = self._remove(number)
        call.mailbox.sent.pop(number, None)
        _log.error("! failed to send %s.%s", self.name, call.method, exc_info=error)
        if call.receiver is not None:
            doing = f"sent a call of {self.name}.{call.method}"
            settle(call.receiver, internal_error(doing, error))
        self.end_if_idle()

    def cancel(self, number: CallId) -> bool:
        """Cancel a call; return True if its process must be notified."""
        if number in self.untold:
            self.untold[number].receiver = None
        call = self.calls.get(number)
        if call is None or call.receiver is None:
            self._loss_awaited_by.pop(number, None)
            return False
        call.receiver = None
        if call.mailbox.cancel(number):
            self._unwanted += 1
            return True
        self._remove(number)
        return False

    def _remove(self, number: CallId) -> ActorCall:
        """Remove a call that gets no answer; `on_answer` removes the others."""
        call = self.calls.pop(number)
        if call.known_as:
            self.waiting.forget(call.known_as)
        return call

    def release(self) -> None:
        """Count one handle less."""
        self.holders -= 1
        self.end_if_idle()

    def end_if_idle(self) -> None:
        """End the actor if it has no handles and no unanswered calls."""
        if (self.holders and not self.is_ending) or len(self.calls) > self._unwanted:
            return
        # During its first constructor an actor is left alone; `on_created` checks it.
        is_waiting = self.state is ActorState.PENDING and (
            self.has_lived or self.worker is None
        )
        if self.state in (ActorState.ALIVE, ActorState.EVICTED) or is_waiting:
            self.owner.on_idle(self)

    @property
    def why_idle(self) -> str:
        """The reason why no more calls can come."""
        return "its `async with` block was left." if self.holders else NO_HANDLE

    def leave(self, why: str) -> None:
        """Tell the process to end after the calls that it was sent."""
        if self.state is not ActorState.ALIVE:
            return
        self.state, self._why_left = ActorState.LEAVING, why
        self._tell_loss()
        if self.worker is not None and self.worker.peer is not None:
            self.worker.peer.send(wire.Leave())
        self.owner.on_leaving(self)

    def on_killed(self) -> None:
        """Note that the process was killed, and that the actor restarts.

        From now on the actor waits for its next process: the messages of this one that
        arrive late change nothing.
        """
        self.is_killed = True
        if self.state is ActorState.ALIVE:
            self.state = ActorState.PENDING
        for mailbox in self.mailboxes.values():
            mailbox.is_open = False  # later calls are for the next process
        self._tell_loss()

    def lose(self, begun: CallId) -> list[Receiver]:
        """Note that the process has ended; return the receivers of its lost calls.

        Args:
            begun: the highest number of a call that the process had begun.
        """
        self._stop_timers()
        self.worker = None
        if self.state is not ActorState.DEAD:
            self.state = ActorState.PENDING
        self._tell_loss()
        receivers: list[Receiver] = []
        for mailbox in self.mailboxes.values():
            again = set()
            for number, is_wanted in mailbox.sent.items():
                call = self.calls[number]
                has_begun = not mailbox.is_serial or number <= begun
                if not is_wanted:
                    self._remove(number)
                    self._unwanted -= 1
                elif has_begun and call.retries_left:
                    call.retries_left -= call.retries_left > 0
                    again.add(number)
            for number in mailbox.lose(begun, again):
                receiver = self._remove(number).receiver
                if receiver is not None:
                    receivers.append(receiver)
        return receivers

    def _stop_timers(self) -> None:
        timers, self.timers = self.timers, {}
        self.paused.clear()
        for timer in timers.values():
            timer.handle.cancel()

    # The actor as the receiver of its task

    def settle(self, outcome: Outcome) -> None:
        """Note the end: an orderly end, a failed constructor, or an error."""
        if isinstance(outcome, bytes):
            self.die(died(self.name, self._why_left))
        elif isinstance(outcome, wire.Failed):
            self.die(not_made(self.name, outcome))
        else:
            self.die(self._death_by(outcome))

    def _death_by(self, error: Exception) -> Exception:
        if isinstance(error, NodeClosedError | ActorDiedError):
            return error
        notes = getattr(error, "__notes__", [])
        why = " ".join([str(error), *notes])
        death = killed_for_good(self.name) if self.is_killed else died(self.name, why)
        death.__cause__ = error
        return death

    def die(self, why: Exception | wire.Failed) -> None:
        """Mark the actor as dead, and fail all present and later calls."""
        if self._end is not None:
            return
        self._end, self.state = why, ActorState.DEAD
        self._stop_timers()
        self.untold, self.calls = self.calls, {}
        waiting, self._awaited_by = self._awaited_by, []
        for mailbox in self.mailboxes.values():
            mailbox.close()
        self._tell_loss()
        self.waiting.forget_all()
        self.owner.on_dead(self)
        for receiver in waiting:
            self._tell_end(receiver)
        if self.untold:
            self.owner.slices.add(self._tell_calls())

    def _tell_calls(self) -> Iterator[None]:
        """Fail the calls that were unanswered at the end, in order; may be many."""
        for call in list(self.untold.values()):
            if call.receiver is not None:
                receiver, call.receiver = call.receiver, None
                self._tell_end(receiver)
            yield
        self.untold = {}
        self.owner.forget(self)

    def _refuse(self, receiver: Receiver) -> None:
        if self._end is None:
            receiver.settle(leaving(self.name))
        else:
            self._tell_end(receiver)

    def _tell_end(self, receiver: Receiver) -> None:
        """Settle a receiver with the reason why this actor is dead.

        A failed constructor's exception stays pickled: only the receiver unpickles it.
        """
        if isinstance(self._end, wire.Failed):
            receiver.settle(self._end)
        elif self._end is not None:
            receiver.settle(_copy(self._end))
