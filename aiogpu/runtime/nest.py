"""Tasks that tasks have started: from a worker's messages to the driver and back.

A child's result goes from its worker to its parent's as bytes; nothing of it is
unpickled here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from aiogpu.core.ids import TaskId
from aiogpu.errors import AiogpuError, InternalError
from aiogpu.runtime.call import Function, Site
from aiogpu.runtime.child import Child
from aiogpu.runtime.driver import Driver
from aiogpu.runtime.exchange import KINDS, Exchange
from aiogpu.runtime.far import Far
from aiogpu.runtime.slot import LiveWorker
from aiogpu.runtime.store import Store
from aiogpu.runtime.terms import Terms, new_function
from aiogpu.wire.failure import RAISED, pack_failure
from aiogpu.wire.messages import (
    Declare,
    Failed,
    Message,
    Submit,
    Wait,
    Withdraw,
)
from aiogpu.wire.streaming import ChildDemand

KEPT: Final = 1024
"""Functions and sites that are recognised when another worker declares them."""

Check = Callable[[Site], None]
"""Raises if calls of a site can never be served."""


class Nest:
    """Hears what workers say of their tasks' children."""

    def __init__(self, driver: Driver, store: Store, check: Check) -> None:
        self._exchange = Exchange(driver, store, self._tell_waits)
        self._far = Far(driver.actors, driver.receiver_of, self._tell_waits)
        driver.actors.on_holder_gone = self._far.release_all
        self._driver = driver
        self._check = check
        self._functions: dict[bytes, Function] = {}
        self._sites: dict[tuple[int, Terms], Site] = {}

    def on_message(self, worker: LiveWorker, message: Message) -> None:
        """Take in one of their messages."""
        if type(message) is Submit:
            self._submit(worker, message)
        elif type(message) is Wait:
            worker.waits_for = message.children
            if worker.actor is None:
                self._tell_waits(worker, message.task)
            else:
                self._far.refuse_self_waits(worker.actor, worker)
        elif type(message) is Withdraw:
            self._withdraw(worker, message.child)
        elif type(message) is Declare:
            self._note_declared(worker, message)
        elif type(message) in KINDS:
            self._exchange.on_message(worker, message)
        elif type(message) is ChildDemand and message.child in worker.children:
            child = worker.children[message.child]
            self._driver.streams.demand(child, message.limit)
        else:
            self._far.on_message(worker, message)

    def _withdraw(self, worker: LiveWorker, number: int) -> None:
        child = worker.children.pop(number, None)
        if child is not None:
            self._driver.cancel(child)
        elif worker.fetched.pop(number, None) is None:
            self._far.withdraw(worker, number)

    def _note_declared(self, worker: LiveWorker, message: Declare) -> None:
        declared = worker.declared
        declared.pop(message.site, None)
        declared[message.site] = self._declare(message)
        if len(declared) > KEPT:
            # The oldest; by now the worker would declare it anew.
            del declared[next(iter(declared))]

    def _tell_waits(self, worker: LiveWorker, task: int = 0) -> None:
        """Tell the core for whom a task waits; what actors do it cannot see."""
        task = task or self._driver.task_of(worker.id)
        if worker.actor is not None or not task:
            return  # an actor holds nothing that it could lend
        waits = worker.waits_for
        known = map(worker.children.get, waits)
        children = tuple(TaskId(child) for child in known if child is not None)
        elsewhere = worker.asked, worker.fetched
        is_elsewhere = any(child in due for child in waits for due in elsewhere)
        self._driver.wait(TaskId(task), children, is_elsewhere)

    def _declare(self, message: Declare) -> Site | Failed:
        try:
            site = self._find(message)
            self._check(site)
        except AiogpuError as error:
            return pack_failure(0, RAISED, error, "")
        return site

    def _find(self, message: Declare) -> Site:
        """The site that another worker may have declared before, or a new one."""
        if len(self._functions) + len(self._sites) > 2 * KEPT:
            self._functions.clear()
            self._sites.clear()
        function = self._functions.get(message.payload)
        if function is None:
            function = self._functions[message.payload] = new_function(message.payload)
        terms = Terms.unpack(message.terms)
        key = function.id, terms
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = terms.site(function)
        return site

    def _submit(self, worker: LiveWorker, message: Submit) -> None:
        child = Child(worker, message.child)
        site = worker.declared.get(message.site)
        if isinstance(site, Site):
            receiver = self._far.carrying(worker, child)
            task = self._driver.submit(
                site, message.payload, receiver, TaskId(message.task)
            )
            if self._driver.knows(task):
                worker.children[message.child] = task
        elif site is not None:
            child.reject(site)
        else:
            child.fail(InternalError(f"worker {worker.id} never declared this task"))
