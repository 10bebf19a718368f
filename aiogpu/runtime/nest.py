"""Tasks that tasks have started: from a worker's messages to the driver and back.

A child's result goes from its worker to its parent's as bytes; nothing of it is
unpickled here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.ids import OWN, ClientId, TaskId
from aiogpu.errors import AiogpuError, InternalError
from aiogpu.runtime.call import Call, Function, Receiver, Site
from aiogpu.runtime.caller import Caller
from aiogpu.runtime.child import Child
from aiogpu.runtime.claims import check_claims, count_fresh
from aiogpu.runtime.driver import Driver
from aiogpu.runtime.exchange import KINDS, Exchange
from aiogpu.runtime.far import Far
from aiogpu.runtime.receiver import internal_error, tell_safely
from aiogpu.runtime.store import Store
from aiogpu.runtime.terms import Terms, new_function
from aiogpu.serialization.exceptions import RAISED, pack_failure
from aiogpu.wire.messages import (
    ChildDemand,
    Declare,
    Failed,
    Message,
    Submit,
    Wait,
    Withdraw,
)

if TYPE_CHECKING:
    from aiogpu.runtime.client import Client
    from aiogpu.runtime.wait_graph import WaitGraph

_log: Final = logging.getLogger(__name__)
KEPT: Final = 1024
"""Functions and sites that are recognised when another worker declares them."""

Check = Callable[[Site], None]
"""Raises if calls of a site can never be served."""


class Nest:
    """Hears what workers say of their tasks' children."""

    def __init__(self, driver: Driver, store: Store, check: Check) -> None:
        self._exchange = Exchange(driver, store, self._note_answer)
        self.far = self._far = Far(
            driver.actors, driver.receiver_of, self._note_answer, self._client_of
        )
        driver.actors.on_holder_gone = self._far.release_all
        self._store = store
        self._wait_graph: WaitGraph | None = None
        self._driver = driver
        self._check = check
        self._functions: dict[bytes, Function] = {}
        self._sites: dict[tuple[int, Terms], Site] = {}

    def on_message(self, caller: Caller, message: Message) -> None:
        """Take in one of their messages."""
        if type(message) is Submit:
            self.submit(caller, message)
        elif type(message) is Wait:
            caller.waits_for = message.children
            if caller.actor is None:
                self._tell_waits(caller, message.task)
            else:
                self._far.refuse_self_waits(caller.actor, caller)
            caller.bound = message.children[: message.bound]
            if caller.bound and self._driver.actors.workers:
                self._end_deadlock(caller)
        elif type(message) is Withdraw:
            self._withdraw(caller, message.child)
        elif type(message) is Declare:
            self._note_declared(caller, message)
        elif type(message) in KINDS:
            self._exchange.on_message(caller, message)
        elif type(message) is ChildDemand and message.child in caller.children:
            child = caller.children[message.child]
            self._driver.streams.demand(child, message.limit)
        else:
            self._far.on_message(caller, message)

    def _end_deadlock(self, caller: Caller) -> None:
        """Fail a call if a wait that begins now could never end."""
        if self._wait_graph is None:
            # Where code waits on a node that has actors.
            from aiogpu.runtime.wait_graph import WaitGraph

            driver, caller_of = self._driver, self._store.caller
            self._wait_graph = WaitGraph(driver.actors, driver.scheduler, caller_of)
        self._wait_graph.end_deadlock(caller)

    def _withdraw(self, caller: Caller, number: int) -> None:
        child = caller.children.pop(number, None)
        if child is not None:
            self._driver.cancel(child)
        elif caller.fetched.pop(number, None) is not None:
            caller.waits_elsewhere.discard(number)
        else:
            self._far.withdraw(caller, number)

    def _note_declared(self, caller: Caller, message: Declare) -> None:
        declared = caller.declared
        declared.pop(message.site, None)
        declared[message.site] = self._declare(message, caller.program)
        if len(declared) > KEPT:
            # The oldest; by now the worker would declare it anew.
            del declared[next(iter(declared))]

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

    def _declare(self, message: Declare, program: str) -> Site | Failed:
        try:
            site = self._find(message, program)
            self._check(site)
        except AiogpuError as error:
            return pack_failure(0, RAISED, error, "")
        return site

    def _find(self, message: Declare, program: str) -> Site:
        """The site that another one may have declared before, or a new one."""
        if len(self._functions) + len(self._sites) > 2 * KEPT:
            self._functions.clear()
            self._sites.clear()
        function = self._functions.get(message.payload)
        if function is None:
            function = self._functions[message.payload] = new_function(message.payload)
        terms = Terms.unpack(message.terms)
        if program:
            terms = terms.of_program(program)
        key = function.id, terms
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = terms.site(function)
        return site

    def _client_of(self, caller: Caller) -> ClientId:
        """Whose the actors are that it has made."""
        if caller.client:
            return caller.client
        record = self._driver.scheduler.tasks.get(
            TaskId(self._driver.task_of(caller.id))
        )
        return OWN if record is None else record.client

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
        for number, group in groupby(messages[:fresh], attrgetter("site")):
            row, start = [*group], 0
            site = client.declared.get(number)
            while start < len(row):
                rest = row[start:]
                if len(rest) > 1 and isinstance(site, Site) and not client.carried:
                    start += self._submit_row(client, site, rest)
                if start < len(row):
                    self.submit(client, row[start])
                    start += 1
        if fresh < len(messages):
            check_claims(client, messages[fresh])

    def _submit_row(self, client: Client, site: Site, row: Sequence[Submit]) -> int:
        """Start tasks that wait behind others like them; gives how many."""
        if site.actor is not None or site.spec.is_lease:
            return 0
        numbers = [message.child for message in row]
        calls = [
            Call(site, one.payload, Child(client, one.child), client.client)
            for one in row
        ]
        tasks = self._driver.submit_row(site, calls, client.client)
        client.children.update(zip(numbers, tasks, strict=False))
        return len(tasks)

    def submit(self, caller: Caller, message: Submit) -> None:
        """Start a task for whoever asks."""
        child = Child(caller, message.child)
        site = caller.declared.get(message.site)
        if isinstance(site, Site):
            if site.actor is not None or site.spec.is_lease:
                child.fail(InternalError(f"{site.spec.name} was declared as no task"))
                return
            receiver: Receiver = child
            if caller.carried:
                receiver = self._far.carrying(caller, child)
            driver, client = self._driver, caller.client
            parent = None if client else TaskId(message.task)
            if driver.scheduler.clients is not None:
                client = self._client_of(caller)
            try:
                task = driver.submit(site, message.payload, receiver, parent, client)
            except AiogpuError as error:
                receiver.fail(error)
                return
            except Exception as error:  # noqa: BLE001 - it is told to who waits
                _log.exception("! failed to start a child")
                tell_safely(receiver, internal_error("started the task", error))
                return
            if driver.knows(task):
                caller.children[message.child] = task
        elif site is not None:
            child.reject(site)
        else:
            child.fail(InternalError(f"worker {caller.id} never declared this task"))
