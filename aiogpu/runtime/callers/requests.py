"""Handles the requests of workers and programs for tasks, actors and values.

A child's result goes from the child's worker to the parent's worker as bytes; the
driver unpickles nothing. A worker with handles to an actor counts as one holder, and so
does a payload that contains a handle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final, cast

from aiogpu.client.function_spec import Function, FunctionSpec, new_function_id
from aiogpu.client.spec_codec import load_spec
from aiogpu.core.model.ids import OWN, ClientId, TaskId
from aiogpu.core.model.request import Environment
from aiogpu.errors import (
    ActorNameError,
    AiogpuError,
    DeadlockError,
    DeserializationError,
    InternalError,
    TaskCancelledError,
)
from aiogpu.runtime.actors.actor import Actor
from aiogpu.runtime.actors.registry import WaitGraph
from aiogpu.runtime.callers.caller import (
    Caller,
    Child,
    LeaseChild,
    Question,
    check_claims,
    count_fresh,
)
from aiogpu.runtime.driver import Driver
from aiogpu.runtime.objects.segments import ActorHold
from aiogpu.runtime.objects.store import Store
from aiogpu.runtime.objects.values import Value
from aiogpu.runtime.pending_tasks import Call, internal_error, settle
from aiogpu.serialization.exceptions import (
    RAISED,
    STOPPED,
    pack_failure,
    unpack_failure,
)
from aiogpu.serialization.serializer import dump_whole
from aiogpu.wire import messages as wire
from aiogpu.wire.messages import ProtocolError

if TYPE_CHECKING:
    from aiogpu.client.interface import Receiver
    from aiogpu.runtime.callers.caller import Client
    from aiogpu.runtime.workers.slots import LiveWorker

_log: Final = logging.getLogger(__name__)


BY_CANCEL: Final = "cancelled by `aiogpu cancel`"
BY_USER: Final = "ended by the user of the node"
"""Part of the error of a task that the node's user has cancelled."""


KEPT: Final = 1024
"""Functions that are recognised when another worker declares them; also functions with
options, and declarations per caller."""


class Requests:
    """Handles the requests of workers and programs to one node."""

    def __init__(self, driver: Driver, store: Store) -> None:
        self._driver = driver
        self._actors = driver.actors
        self._store = store
        self._functions: dict[bytes, Function] = {}
        self._funcs: dict[tuple[int, bytes, Environment], FunctionSpec] = {}
        self._handlers: Final[dict[type[wire.Message], Callable[..., object]]] = {
            wire.Declare: self._declare,
            wire.Submit: self.submit,
            wire.Wait: self._wait,
            wire.Withdraw: self._withdraw,
            wire.ChildDemand: self._demand,
            wire.Returned: self._take_back,
            wire.Put: self._put,
            wire.PutFailed: self._put_failed,
            wire.Share: self._share,
            wire.Fetch: self._fetch,
            wire.Discard: self._discard,
            wire.Sync: self._sync,
            wire.Report: self._report,
            wire.Ask: self._ask,
            wire.Hold: self._hold,
            wire.Make: self._make,
            wire.Find: self._find_actor,
            wire.Stop: self._stop,
        }

    def on_message(self, caller: Caller, message: wire.Message) -> None:
        """Handle one message.

        Raises:
            ProtocolError: callers may not send such a message.
        """
        kind = type(message)
        if kind not in self._handlers:
            raise ProtocolError(f"unexpected {kind.__name__} message")
        self._handlers[kind](caller, message)

    # Tasks

    def _declare(self, caller: Caller, message: wire.Declare) -> None:
        func: FunctionSpec | wire.Failed
        try:
            func = self._func_of(message, caller.program)
            self._actors.check(func, b"")
        except AiogpuError as error:
            func = pack_failure(0, RAISED, error, "")
        declared = caller.declared
        declared.pop(message.func, None)
        declared[message.func] = func
        if len(declared) > KEPT:
            # Drop the oldest. By now the caller would declare it again.
            del declared[next(iter(declared))]

    def _func_of(self, message: wire.Declare, program: Environment) -> FunctionSpec:
        """Return a declared function; the same object if declared before."""
        functions, funcs = self._functions, self._funcs
        if len(functions) + len(funcs) > 2 * KEPT:
            functions.clear()
            funcs.clear()
        function = functions.get(message.payload)
        if function is None:
            function = Function(
                id=new_function_id(),
                payload=message.payload,
                modules=tuple(message.modules),
                name=f"{program}:{message.name}",
            )
            functions[message.payload] = function
        key = function.id, message.terms, program
        func = funcs.get(key)
        if func is None:
            func = funcs[key] = load_spec(message.terms, function, program)
            self._driver.expect_imports(function)
        return func

    def submit_all(self, client: Client, messages: Sequence[wire.Submit]) -> None:
        """Start tasks for a client; their payloads contain no references.

        Raises:
            ProtocolError: a number was used before.
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
                if (
                    len(row) - start > 1
                    and isinstance(func, FunctionSpec)
                    and self._driver.accepts_row(func, client.client)
                ):
                    self._submit_row(client, func, row[start:])
                    break
                self.submit(client, row[start])
                start += 1
        if fresh < len(messages):
            check_claims(client, messages[fresh])

    def _submit_row(
        self, client: Client, func: FunctionSpec, row: Sequence[wire.Submit]
    ) -> None:
        """Start tasks that queue behind others of their kind."""
        numbers = [message.child for message in row]
        calls = [
            Call(func, message.payload, Child(client, message.child), client.client)
            for message in row
        ]
        tasks = self._driver.submit_row(func, calls, client.client)
        client.children.update(zip(numbers, tasks, strict=True))

    def submit(self, caller: Caller, message: wire.Submit) -> None:
        """Start a task for a caller."""
        parent = None if caller.client else TaskId(message.task)
        child = Child(caller, message.child)
        self._start(child, message.func, message.payload, parent)

    def take_lease(self, client: Client, message: wire.TakeLease) -> None:
        """Request a lease for a program."""
        client.leases.add(message.child)
        self._start(LeaseChild(client, message.child), message.func, b"", None)

    def _start(
        self, child: Child, number: int, payload: bytes, parent: TaskId | None
    ) -> None:
        caller, driver = child.caller, self._driver
        func = caller.declared.get(number)
        is_lease = type(child) is LeaseChild
        if isinstance(func, wire.Failed):
            child.settle(func)
            return
        if func is None:
            error = f"the caller {caller.id} never declared this task"
            child.settle(InternalError(error))
            return
        if func.actor is not None or func.spec.is_lease is not is_lease:
            kind = "lease" if is_lease else "task"
            child.settle(
                InternalError(f"{func.spec.name} was not declared as a {kind}")
            )
            return
        client = caller.client
        if driver.scheduler.clients is not None:
            client = self._client_of(caller)
        try:
            task = driver.submit(func, payload, child, parent, client)
        except AiogpuError as error:
            child.settle(error)
            return
        except Exception as error:  # noqa: BLE001 - passed to the caller
            _log.exception("! failed to start a child")
            settle(child, internal_error("started the task", error))
            return
        if driver.knows(task):
            caller.children[child.number] = task

    def _client_of(self, caller: Caller) -> ClientId:
        """Return the program that owns the tasks and actors that a caller starts."""
        if caller.client:
            return caller.client
        task = TaskId(self._driver.task_of(caller.id))
        record = self._driver.scheduler.tasks.get(task)
        return OWN if record is None else record.client

    def _demand(self, caller: Caller, message: wire.ChildDemand) -> None:
        number = message.child
        if number in caller.children:
            self._driver.demand(caller.children[number], message.limit)
        elif number in caller.actor_calls:
            self._actors.demand(*caller.actor_calls[number], message.limit)

    def _withdraw(self, caller: Caller, message: wire.Withdraw) -> None:
        number = message.child
        child = caller.children.pop(number, None)
        if child is not None:
            self._driver.cancel(child)
        elif caller.fetched.pop(number, None) is not None:
            caller.waits_elsewhere.discard(number)
        else:
            self.withdraw_call(caller, number)

    # Waits

    def _wait(self, caller: Caller, message: wire.Wait) -> None:
        if caller.actor is None:
            self._pass_on_waits(caller, message)
        else:
            self._refuse_self_waits(caller.actor, caller, message.children)
        if message.is_more:
            return  # the waits of a loop, which bind no thread
        caller.bound = message.children[: message.bound]
        if caller.bound and self._actors.workers:
            driver = self._driver
            graph = WaitGraph(self._actors, driver.scheduler, driver.worker)
            graph.end_deadlock(caller)

    def _pass_on_waits(self, caller: Caller, message: wire.Wait) -> None:
        """Tell the core which children a task waits for, and if it waits for others.

        The core does not know calls of actors and values.
        """
        task = message.task or self._driver.task_of(caller.id)
        if not task:
            return  # clients have no CPUs to lend while they wait
        waits = message.children
        known = map(caller.children.get, waits)
        children = tuple(TaskId(child) for child in known if child is not None)
        elsewhere = {
            child
            for child in waits
            if child in caller.actor_calls or child in caller.fetched
        }
        if message.is_more:
            caller.waits_elsewhere |= elsewhere
        else:
            caller.waits_elsewhere = elsewhere
        is_elsewhere = bool(caller.waits_elsewhere)
        self._driver.wait(TaskId(task), children, is_elsewhere, message.is_more)

    def _note_answer(self, caller: Caller, child: int) -> None:
        """Note that a call or value was answered; notify the core after the last.

        One event per wait suffices, even if a task waits for ten thousand calls.
        """
        caller.actor_calls.pop(child, None)
        elsewhere = caller.waits_elsewhere
        if child in elsewhere:
            elsewhere.discard(child)
            task = self._driver.task_of(caller.id)
            if not elsewhere and task:
                self._driver.wait(TaskId(task), (), is_more=True)

    def _refuse_self_waits(
        self, actor: Actor, caller: Caller, waits: tuple[int, ...]
    ) -> None:
        """Fail awaited calls that the waiting process would have to run itself."""
        if not actor.is_serial:
            return
        for child in waits:
            public, number = caller.actor_calls.get(child, (0, 0))
            call = actor.calls.get(number)
            if call is None or self._actors.get(public) is not actor:
                continue
            receiver = call.receiver
            self._actors.cancel(public, number)
            if receiver is not None:
                receiver.settle(
                    DeadlockError(
                        f"a method of {actor.name} waits for its own {call.method}, "
                        f"which runs one at a time. Call the method directly, by self, "
                        f"or give the actor max_concurrency=2 or more."
                    )
                )

    # Values

    def _take_back(self, caller: Caller, message: wire.Returned) -> None:
        self._store.take_back(caller, message.things, message.counts)

    def _value(self, caller: Caller, identity: int) -> Value:
        """Return the value that a worker names, which may be new."""
        self._store.announce(caller, identity)
        return self._store.known(identity)

    def _put(self, caller: Caller, message: wire.Put) -> None:
        self._value(caller, message.value).settle(message.payload)

    def _put_failed(self, caller: Caller, message: wire.PutFailed) -> None:
        self._value(caller, message.value).settle(wire.Failed(0, *message[1:]))

    def _share(self, caller: Caller, message: wire.Share) -> None:
        value = self._value(caller, message.value)
        child = caller.children.get(message.child)
        if child is not None:
            value.task = child
            receiver_of = partial(self._driver.receiver_of, TaskId(child))
            stop = partial(self._driver.cancel, child)
        else:
            actor, number = caller.actor_calls.get(message.child, (0, 0))
            receiver_of = partial(self._actors.receiver_of, actor, number)
            stop = partial(self._actors.cancel, actor, number)
        if child is None and not number:
            # The child has ended and its answer is on the way to the caller, which
            # will send the result as a `Put`. No worker ends before that; see `Sync`.
            return
        value.stop = partial(self._stop_shared, receiver_of, stop)
        receiver = receiver_of()
        if isinstance(receiver, Child):
            receiver.values = [*(receiver.values or ()), (value, message.part)]

    def _stop_shared(
        self, receiver_of: Callable[[], Receiver | None], stop: Callable[[], object]
    ) -> None:
        """Cancel a shared task or call for a borrower, and fail it for its owner."""
        receiver = receiver_of()
        stop()
        if receiver is not None:
            error = TaskCancelledError(
                "it was cancelled by a task or program that had received its handle."
            )
            failed = pack_failure(0, RAISED, error, "")
            receiver.settle(failed._replace(kind=STOPPED))

    def cancel(self, number: int) -> str:
        """Cancel a task of any program for the node's user, and fail it for its owner.

        Returns:
            The kind of `number`: "task"; "stopping" for a task that is already being
            stopped; "actor" or "lease", which are left alone; "" if there is none.
        """
        driver, task = self._driver, TaskId(number)
        record, call = driver.scheduler.tasks.get(task), driver.call_of(task)
        if record is None or call is None:
            return ""
        if call.func.actor is not None:
            return "actor"
        if record.spec.is_lease:
            return "lease"
        reason = f"{record.spec.name} was {BY_CANCEL}."
        return "task" if self._stop_for_user(task, call, reason) else "stopping"

    def _stop_for_user(self, task: TaskId, call: Call, reason: str) -> bool:
        """Stop a task or lease and fail it for its owner; False if it is stopping."""
        driver, receiver = self._driver, call.receiver
        if receiver is None:
            return False
        driver.results.note_stop(task, TaskCancelledError.__name__, reason)
        driver.cancel(int(task))
        # A CancelledError would end the code that awaits the task.
        settle(receiver, TaskCancelledError(reason))
        return True

    def end_lease(self, number: int) -> str:
        """End a lease of any program for the node's user: withdraw it, or take it back.

        The resources of a held lease are free when its processes have ended; nothing
        ends them.

        Returns:
            The kind of `number`: "lease"; "stopping" for a lease that is already being
            returned; "actor", "task" or "placement", which are left alone; "" if there
            is none.
        """
        driver, task = self._driver, TaskId(number)
        record, call = driver.scheduler.tasks.get(task), driver.call_of(task)
        if record is None or call is None:
            return ""
        if not record.spec.is_lease:
            return "task" if call.func.actor is None else "actor"
        if record.spec.is_grouped:
            return "placement"
        reason = f"the lease {record.spec.name} was {BY_USER}."
        return "lease" if self._stop_for_user(task, call, reason) else "stopping"

    async def named(self, name: str) -> list[int]:
        """Return the numbers of all tasks, actors and leases with a name, in order.

        An actor has two names, of its task and its own, with or without its namespace.
        """
        numbers = {
            actor.id
            for actor in self._actors.all()
            if actor.key is not None and name in (actor.key[1], "/".join(actor.key))
        }
        for piece in self._driver.scheduler.tasks.pieces():
            numbers.update(record.id for record in piece if record.spec.name == name)
            await asyncio.sleep(0)
        living = self._driver.scheduler.tasks
        return sorted(number for number in numbers if living.get(TaskId(number)))

    async def stop_all(
        self, stop: Callable[[int], str], numbers: Sequence[int]
    ) -> dict[str, list[int]]:
        """Stop tasks by `cancel` or `kill`; return their numbers by its results.

        The latest go first. They wait, so that no waiting task starts only because an
        earlier one has ended.
        """
        results: dict[str, list[int]] = {}

        def steps() -> Iterator[None]:
            for number in reversed(numbers):
                results.setdefault(stop(number), []).append(number)
                yield

        await self._actors.slices.run(steps())
        for stopped in results.values():
            stopped.reverse()
        return results

    def kill(self, number: int) -> str:
        """Kill an actor of any program for the node's user.

        Returns:
            The kind of `number`: "actor"; "task" or "lease", which are left alone; ""
            if there is none.
        """
        driver, task = self._driver, TaskId(number)
        record, call = driver.scheduler.tasks.get(task), driver.call_of(task)
        if record is None or call is None:
            return ""
        if call.func.actor is None:
            return "lease" if record.spec.is_lease else "task"
        self._actors.kill(number)
        return "actor"

    def _fetch(self, caller: Caller, message: wire.Fetch) -> None:
        receiver = Question(caller, message.child, self._note_answer)
        try:
            value = self._store.known(message.value)
        except ProtocolError as error:
            receiver.settle(DeserializationError(str(error)))
            return
        if value.is_pending:
            caller.fetched[message.child] = value
        value.watch(lambda settled: settled.pass_to(receiver))

    def _discard(self, _caller: Caller, message: wire.Discard) -> None:
        value = self._store.find(message.value)
        if value is not None and value.stop is not None:
            value.stop()

    def _sync(self, caller: Caller, _message: wire.Sync) -> None:
        if caller.peer is not None:
            caller.peer.send_one(wire.Synced())

    def _report(self, caller: Caller, message: wire.Report) -> None:
        self._driver.on_report(cast("LiveWorker", caller), message)

    # Actors

    def _hold(self, caller: Caller, message: wire.Hold) -> None:
        self._store.lend_actor(caller, message.actor)

    def _ask(self, caller: Caller, message: wire.Ask) -> None:
        child = message.child
        receiver = Question(caller, child, self._note_answer)
        actor = self._actors.get(message.actor)
        if actor is None:
            receiver.settle(self._actors.unknown(message.actor))
            return
        caller.actor_calls[child] = message.actor, 0
        if message.method in wire.QUERIES:
            number = actor.ask(message.method, receiver)
        else:
            number = actor.call(message.method, message.payload, receiver, caller.id)
        if child in caller.actor_calls:
            caller.actor_calls[child] = message.actor, number

    def withdraw_call(self, caller: Caller, child: int) -> None:
        """Cancel a call of an actor."""
        call = caller.actor_calls.pop(child, None)
        if call is not None:
            caller.waits_elsewhere.discard(child)
            self._actors.cancel(*call)

    def _make(self, caller: Caller, message: wire.Make) -> None:
        func = caller.declared.get(message.func)
        key = (message.namespace, message.name) if message.name else None
        try:
            if isinstance(func, wire.Failed):
                raise unpack_failure(func, "the actor")
            if func is None:
                raise InternalError("the actor's class was never declared")
            if func.actor is None:
                raise InternalError(f"{func.spec.name} was not declared as an actor")
            self._actors.create(
                func,
                message.payload,
                key,
                message.get_if_exists,
                message.actor,
                self._client_of(caller),
            )
        except AiogpuError as error:
            self._actors.refuse(message.actor, error)
        self._lend(caller, message.actor)

    def _find_actor(self, caller: Caller, message: wire.Find) -> None:
        receiver = Child(caller, message.child)
        actor = self._actors.find((message.namespace, message.name))
        if actor is None:
            receiver.settle(
                ActorNameError(
                    f"there is no actor named {message.name!r} on this node."
                )
            )
            return
        self._lend(caller, actor.id)
        terms = actor.func.actor
        assert terms is not None, actor
        receiver.settle(dump_whole((actor.id, actor.name, terms.packed_interface())))

    def _lend(self, caller: Caller, actor: int) -> None:
        """Note that a caller has a handle to an actor, which is counted already."""
        hold = ActorHold(actor, self._actors)
        self._store.borrowers(caller).lend(hold)

    def _stop(self, _caller: Caller, message: wire.Stop) -> None:
        self._actors.stop(message.actor, message.how)
