"""What callers ask for: tasks, actors and values, from their messages to the driver.

A child's result goes from its worker to its parent's as bytes; nothing of it is
unpickled here. A worker that has a handle to an actor counts as one holder; a message
that contains a handle holds a reference until it is delivered. Only plain values travel
in `Terms`, since a worker's hashes mean nothing in the driver; what is the user's stays
pickled on its own: its exception classes, the description of its actors.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from aiogpu.client.function_spec import Function, FunctionSpec, new_function_id
from aiogpu.client.spec_codec import Terms
from aiogpu.core.model.ids import OWN, ClientId, TaskId
from aiogpu.errors import (
    ActorNameError,
    AiogpuError,
    DeadlockError,
    DeserializationError,
    InternalError,
    ProtocolError,
    TaskCancelledError,
)
from aiogpu.runtime.actors.actor import Actor
from aiogpu.runtime.actors.registry import WaitGraph
from aiogpu.runtime.callers.caller import (
    Caller,
    Carrying,
    Child,
    HoldingChild,
    Then,
    check_claims,
    count_fresh,
)
from aiogpu.runtime.driver import Driver
from aiogpu.runtime.objects.store import Store
from aiogpu.runtime.objects.values import Value, find, known
from aiogpu.runtime.pending_tasks import Call, internal_error, tell_safely
from aiogpu.serialization.exceptions import (
    RAISED,
    STOPPED,
    pack_failure,
    unpack_failure,
)
from aiogpu.serialization.serializer import dump_whole
from aiogpu.wire.messages import (
    AFTER_ALL,
    AGAIN,
    CAPACITY,
    ENDED,
    READY,
    Ask,
    Carried,
    Carry,
    ChildDemand,
    Declare,
    Discard,
    Failed,
    Fetch,
    Find,
    Hold,
    Make,
    Message,
    Put,
    PutFailed,
    Release,
    Returned,
    Share,
    Stop,
    Submit,
    Sync,
    Synced,
    Wait,
    Withdraw,
)

if TYPE_CHECKING:
    from aiogpu.runtime.callers.caller import Client

_log: Final = logging.getLogger(__name__)


KEPT: Final = 1024
"""Functions and functions that are recognised when another worker declares them."""


class Requests:
    """Takes in what workers and programs ask of a node."""

    def __init__(self, driver: Driver, store: Store) -> None:
        self._driver = driver
        self._actors = driver.actors
        self._store = store
        self._functions: dict[bytes, Function] = {}
        self._funcs: dict[tuple[int, Terms], FunctionSpec] = {}
        self._handlers: Final[dict[type[Message], Callable[..., object]]] = {
            Declare: self._note_declared,
            Submit: self.submit,
            Wait: self._wait,
            Withdraw: self._withdraw,
            ChildDemand: self._demand,
            Returned: self._take_back,
            Put: self._put,
            PutFailed: self._put_failed,
            Share: self._share,
            Fetch: self._fetch,
            Discard: self._discard,
            Sync: self._sync,
            Ask: self._ask,
            Hold: self._hold,
            Release: self._release,
            Carry: self._carry,
            Make: self._make,
            Find: self._find_actor,
            Stop: self._stop,
        }

    def on_message(self, caller: Caller, message: Message) -> None:
        """Take in one message.

        Raises:
            ProtocolError: nobody may say that, or not here.
        """
        kind = type(message)
        if kind not in self._handlers:
            raise ProtocolError(f"{kind.__name__} where it may not be")
        self._handlers[kind](caller, message)

    # Tasks

    def _note_declared(self, caller: Caller, message: Declare) -> None:
        declared = caller.declared
        declared.pop(message.func, None)
        declared[message.func] = self._declare(message, caller.program)
        if len(declared) > KEPT:
            # The oldest; by now the worker would declare it anew.
            del declared[next(iter(declared))]

    def _declare(self, message: Declare, program: str) -> FunctionSpec | Failed:
        try:
            func = self._find_site(message, program)
            self._actors.check(func, b"")
        except AiogpuError as error:
            return pack_failure(0, RAISED, error, "")
        return func

    def _find_site(self, message: Declare, program: str) -> FunctionSpec:
        """The function that another caller may have declared before, or a new one."""
        if len(self._functions) + len(self._funcs) > 2 * KEPT:
            self._functions.clear()
            self._funcs.clear()
        function = self._functions.get(message.payload)
        if function is None:
            function = Function(new_function_id(), message.payload)
            self._functions[message.payload] = function
        terms = Terms.unpack(message.terms)
        if program:
            terms = terms.of_program(program)
        key = function.id, terms
        func = self._funcs.get(key)
        if func is None:
            func = self._funcs[key] = terms.func(function)
        return func

    def submit_all(self, client: Client, messages: Sequence[Submit]) -> None:
        """Start tasks for a client; their payloads refer to nothing.

        Raises:
            ProtocolError: it has given one of them a number before.
        """
        if len(messages) < 2:
            for message in messages:
                check_claims(client, message)
                self.submit(client, message)
            return
        fresh = count_fresh(client, messages)
        for number, group in groupby(messages[:fresh], attrgetter("func")):
            row, start = [*group], 0
            func = client.declared.get(number)
            while start < len(row):
                rest = row[start:]
                if (
                    len(rest) > 1
                    and isinstance(func, FunctionSpec)
                    and not client.carried
                ):
                    start += self._submit_row(client, func, rest)
                if start < len(row):
                    self.submit(client, row[start])
                    start += 1
        if fresh < len(messages):
            check_claims(client, messages[fresh])

    def _submit_row(
        self, client: Client, func: FunctionSpec, row: Sequence[Submit]
    ) -> int:
        """Start tasks that wait behind others like them; gives how many."""
        if func.actor is not None or func.spec.is_lease:
            return 0
        numbers = [message.child for message in row]
        calls = [
            Call(func, one.payload, Child(client, one.child), client.client)
            for one in row
        ]
        tasks = self._driver.submit_row(func, calls, client.client)
        client.children.update(zip(numbers, tasks, strict=False))
        return len(tasks)

    def submit(self, caller: Caller, message: Submit) -> None:
        """Start a task for whoever asks."""
        number, driver = message.child, self._driver
        child = Child(caller, number)
        func = caller.declared.get(message.func)
        if not isinstance(func, FunctionSpec):
            if func is not None:
                child.reject(func)
            else:
                child.fail(
                    InternalError(f"worker {caller.id} never declared this task")
                )
            return
        if func.actor is not None or func.spec.is_lease:
            child.fail(InternalError(f"{func.spec.name} was declared as no task"))
            return
        if caller.carried and (held := self._take_carried(caller)):
            let_go = partial(self._release_each, held)
            child = HoldingChild(caller, number, let_go)
        client = caller.client
        parent = None if client else TaskId(message.task)
        if driver.scheduler.clients is not None:
            client = self._client_of(caller)
        try:
            task = driver.submit(func, message.payload, child, parent, client)
        except AiogpuError as error:
            child.fail(error)
            return
        except Exception as error:  # noqa: BLE001 - it is told to who waits
            _log.exception("! failed to start a child")
            tell_safely(child, internal_error("started the task", error))
            return
        if driver.knows(task):
            caller.children[number] = task

    def _client_of(self, caller: Caller) -> ClientId:
        """The program to which the tasks and actors belong that a caller starts."""
        if caller.client:
            return caller.client
        task = TaskId(self._driver.task_of(caller.id))
        record = self._driver.scheduler.tasks.get(task)
        return OWN if record is None else record.client

    def _demand(self, caller: Caller, message: ChildDemand) -> None:
        number = message.child
        if number in caller.children:
            self._driver.demand(caller.children[number], message.limit)
        elif number in caller.asked:
            self._actors.demand(*caller.asked[number], message.limit)

    def _withdraw(self, caller: Caller, message: Withdraw) -> None:
        number = message.child
        child = caller.children.pop(number, None)
        if child is not None:
            self._driver.cancel(child)
        elif caller.fetched.pop(number, None) is not None:
            caller.waits_elsewhere.discard(number)
        else:
            self.withdraw_call(caller, number)

    # Waits

    def _wait(self, caller: Caller, message: Wait) -> None:
        caller.waits_for = message.children
        if caller.actor is None:
            self._tell_waits(caller, message.task)
        else:
            self._refuse_self_waits(caller.actor, caller)
        caller.bound = message.children[: message.bound]
        if caller.bound and self._actors.workers:
            driver = self._driver
            graph = WaitGraph(self._actors, driver.scheduler, driver.worker)
            graph.end_deadlock(caller)

    def _tell_waits(self, caller: Caller, task: int = 0) -> None:
        """Tell the core for whom a task waits; what actors do it cannot see."""
        task = task or self._driver.task_of(caller.id)
        if caller.actor is not None or not task:
            return  # an actor or a client holds nothing that it could lend
        waits = caller.waits_for
        known = map(caller.children.get, waits)
        children = tuple(TaskId(child) for child in known if child is not None)
        caller.waits_elsewhere = {
            child for child in waits if child in caller.asked or child in caller.fetched
        }
        is_elsewhere = bool(caller.waits_elsewhere)
        self._driver.wait(TaskId(task), children, is_elsewhere)

    def _note_answer(self, caller: Caller, child: int) -> None:
        """A call or a value has come; the core learns when it was the last one.

        Not of each: a task that waits for ten thousand calls tells it once.
        """
        elsewhere = caller.waits_elsewhere
        if child in elsewhere:
            elsewhere.discard(child)
            if not elsewhere:
                self._tell_waits(caller)

    def _refuse_self_waits(self, actor: Actor, caller: Caller) -> None:
        """Fail calls for which a process waits that would have to run them itself."""
        if not actor.is_serial:
            return
        for child in caller.waits_for:
            public, number = caller.asked.get(child, (0, 0))
            call = actor.calls.get(number)
            if call is None or self._actors.get(public) is not actor:
                continue
            receiver = call.receiver
            self._actors.cancel(public, number)
            if receiver is not None:
                receiver.fail(
                    DeadlockError(
                        f"a method of {actor.name} waits for its own {call.method}, "
                        f"which runs one at a time. Call the method directly, by self, "
                        f"or give the actor max_concurrency=2 or more."
                    )
                )

    # Values

    def _take_back(self, caller: Caller, message: Returned) -> None:
        self._store.take_back(caller, message.things, message.counts)

    def _value(self, caller: Caller, identity: int) -> Value:
        """The value that a worker speaks of, which it may just have put."""
        self._store.announce(caller, identity)
        return known(identity)

    def _put(self, caller: Caller, message: Put) -> None:
        self._value(caller, message.value).receive(message.payload)

    def _put_failed(self, caller: Caller, message: PutFailed) -> None:
        self._value(caller, message.value).reject(Failed(0, *message[1:]))

    def _share(self, caller: Caller, message: Share) -> None:
        value = self._value(caller, message.value)
        child = caller.children.get(message.child)
        if child is not None:
            value.task = number = child
            stop = partial(self._driver.cancel, child)
        else:
            actor, number = caller.asked.get(message.child, (0, 0))
            stop = partial(self._actors.cancel, actor, number)
        if not number:
            # The child has ended and its answer is on the way to the caller, which
            # sends the result as a `Put`. A worker does not end before: see `Sync`.
            return
        value.stop = partial(self._stop_shared, number, stop)
        receiver = self._driver.receiver_of(TaskId(number))
        if isinstance(receiver, Child):
            receiver.values = [*(receiver.values or ()), (value, message.part)]

    def _stop_shared(self, number: int, stop: Callable[[], object]) -> None:
        """Somebody else cancels what it was given; who has started it is told."""
        receiver = self._driver.receiver_of(TaskId(number))
        stop()
        if receiver is not None:
            error = TaskCancelledError("it was cancelled by who was given its handle.")
            failed = pack_failure(0, RAISED, error, "")
            receiver.reject(failed._replace(kind=STOPPED))

    def _fetch(self, caller: Caller, message: Fetch) -> None:
        receiver = Child(caller, message.child)
        try:
            value = known(message.value)
        except ProtocolError as error:
            receiver.fail(DeserializationError(str(error)))
            return
        if value.is_pending:
            caller.fetched[message.child] = value
        value.watch(partial(self._tell, caller, message.child, receiver))

    def _tell(self, caller: Caller, child: int, receiver: Child, value: Value) -> None:
        was_due = caller.fetched.pop(child, None) is not None
        value.tell(receiver)
        if was_due:
            self._note_answer(caller, child)

    def _discard(self, _caller: Caller, message: Discard) -> None:
        value = find(message.value)
        if value is not None and value.stop is not None:
            value.stop()

    def _sync(self, caller: Caller, _message: Sync) -> None:
        if caller.peer is not None:
            caller.peer.send_one(Synced())

    # Actors

    def _hold(self, caller: Caller, message: Hold) -> None:
        self._actors.hold_for(caller, message.actor)

    def _release(self, caller: Caller, message: Release) -> None:
        count = caller.holds.get(message.actor, 0)
        if count:
            caller.holds[message.actor] = count - 1
            self._actors.release(message.actor)

    def _carry(self, caller: Caller, message: Carry) -> None:
        if not message.task:
            caller.carried = message.actors
            return
        receiver = self._driver.receiver_of(TaskId(message.task))
        while isinstance(receiver, Carrying):
            receiver = receiver.receiver
        if isinstance(receiver, Child):
            # Its process holds them from here on, whether it looks or not.
            for actor in message.actors:
                self._actors.hold_for(receiver.caller, actor)
            if receiver.caller.peer is not None:
                receiver.caller.peer.post(Carried(receiver.number, message.actors))
            return
        for actor in message.actors:
            if receiver is not None and self._actors.hold(actor):
                # The handle whose result they are in: they live as long as it does.
                weakref.finalize(receiver, self._actors.release_soon, actor)

    def _take_carried(self, caller: Caller) -> list[int]:
        """Hold what the message before has carried; gives which actors are held."""
        carried, caller.carried = caller.carried, ()
        return [actor for actor in carried if self._actors.hold(actor)]

    def _release_each(self, actors: list[int]) -> None:
        for actor in actors:
            self._actors.release_soon(actor)

    def _ask(self, caller: Caller, message: Ask) -> None:
        child, held = message.child, self._take_carried(caller)
        let_go = partial(self._on_call_end, caller, child, held)
        receiver = HoldingChild(caller, child, let_go)
        actor = self._actors.get(message.actor)
        if actor is None:
            receiver.fail(self._actors.unknown(message.actor))
            return
        caller.asked[child] = message.actor, 0
        if message.method == READY:
            actor.await_ready(receiver)
            return
        if message.method == ENDED:
            actor.await_end(receiver)
            return
        if message.method == CAPACITY:
            self._actors.tell_room(actor.id, receiver)
            return
        number = actor.call(message.method, message.payload, receiver, caller.id)
        if child in caller.asked:
            caller.asked[child] = message.actor, number

    def _on_call_end(self, caller: Caller, child: int, held: list[int]) -> None:
        """A call was answered, or dropped since nobody wants its answer."""
        for actor in held:
            self._actors.release_soon(actor)
        if caller.asked.pop(child, None) is not None:
            self._note_answer(caller, child)

    def withdraw_call(self, caller: Caller, child: int) -> None:
        """Nobody wants the answer of a call any more."""
        asked = caller.asked.pop(child, None)
        if asked is not None:
            caller.waits_elsewhere.discard(child)
            self._actors.cancel(*asked)

    def _make(self, caller: Caller, message: Make) -> None:
        func = caller.declared.get(message.func)
        key = (message.namespace, message.name) if message.name else None
        held = self._take_carried(caller)
        try:
            if isinstance(func, Failed):
                raise unpack_failure(func, "the actor")
            if func is None:
                raise InternalError("the actor's class was never declared")
            if func.actor is None:
                raise InternalError(f"{func.spec.name} was declared as no actor")
            actor = self._actors.create(
                *(func, message.payload, key, message.get_if_exists, message.actor),
                self._client_of(caller),
            )
            actor.await_ready(Then(partial(self._release_each, held)))
        except AiogpuError as error:
            self._release_each(held)
            self._actors.refuse(message.actor, error)
        self._actors.note_hold(caller, message.actor)

    def _find_actor(self, caller: Caller, message: Find) -> None:
        receiver = Child(caller, message.child)
        actor = self._actors.find((message.namespace, message.name))
        if actor is None:
            receiver.fail(
                ActorNameError(f"no actor named {message.name!r} lives on this node.")
            )
            return
        self._actors.note_hold(caller, actor.id)
        terms = actor.func.actor
        assert terms is not None, actor
        receiver.receive(dump_whole((actor.id, actor.name, terms.packed_interface())))

    def _stop(self, _caller: Caller, message: Stop) -> None:
        if message.how == AFTER_ALL:
            self._actors.terminate(message.actor)
        else:
            self._actors.kill(message.actor, no_restart=message.how != AGAIN)
