"""Tasks in the calling process, one after the other, in the order of submission.

Actors are objects there, called as soon as the loop is free. For tests and debuggers:
breakpoints, monkeypatches and coverage reach into both. All that one process can keep
is kept as in a worker: copies of values, devices, variables, errors, timeouts, retries,
cancelling. A plain function blocks the loop while it runs and cannot be interrupted; a
coroutine is awaited on the loop.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from importlib import import_module
from itertools import count
from typing import Final

from aiogpu.client.current import error_inside_task
from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import Receiver
from aiogpu.core.model.ids import OWN, TaskId
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.devices import take_inventory
from aiogpu.engines.inline.actors import Residents
from aiogpu.engines.inline.tasks import (
    Executor,
    InlineNode,
    Runner,
    acting_job,
    running_job,
)
from aiogpu.errors import NodeClosedError, PreloadError
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.observe.status import NodeStatus
from aiogpu.observe.why import Why
from aiogpu.runtime.actors.actor import Actor
from aiogpu.runtime.callers.leases import LeaseReceiver
from aiogpu.runtime.devices.binding import Assignment
from aiogpu.runtime.objects.segments import ObjectMemory
from aiogpu.runtime.objects.store import Store
from aiogpu.serialization.references import PickledValue

_numbers: Final = count(1)


class InlineEngine:
    """A node without processes."""

    remote_values = None
    has_gone = False

    def __init__(self, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.home = f"inline {next(_numbers)}"
        self._options = options
        self._loop = loop
        self._runner: Runner | None = None
        self._actors: Residents | None = None
        self._store: Store | None = None

    def __repr__(self) -> str:
        return f"<InlineEngine {self._runner!r}>"

    @property
    def actors(self) -> Residents:
        """Its actors, in this process; see `Engine.actors`."""
        if self._actors is None:
            raise NodeClosedError("this node is not running.")
        return self._actors

    async def open(self) -> None:
        """Import what is to be preloaded, and detect what there is."""
        options = self._options
        for module in options.preload:
            try:
                import_module(module)
            except Exception as error:
                told = f"{type(error).__name__}: {error}".rstrip(".")
                raise PreloadError(
                    f"init(preload=...) names {module!r}, which cannot be imported: "
                    f"{told}. Install it, or leave it out."
                ) from error
        ledger, vendors = await take_inventory(options)
        node = InlineNode(
            self._loop,
            ledger,
            Assignment(vendors, ledger, os.environ),
            Executor(is_silent=not options.log_to_driver),
            options.cancel_grace,
            self.pack,
        )
        self._runner = Runner(self._loop, node)
        node.actors = self._actors = Residents(node, self._runner)

    @property
    def _node(self) -> InlineNode:
        return self._open_runner.node

    @property
    def _open_runner(self) -> Runner:
        if self._runner is None:
            raise NodeClosedError("this node is not running.")
        return self._runner

    def _asked(self, what: str) -> InlineNode:
        """The node, for the program; tasks are refused as in a worker."""
        if running_job.get() is not None or acting_job.get() is not None:
            raise error_inside_task(what)
        return self._node

    @property
    def waits(self) -> InlineEngine:
        """A task that waits for another has to be told from one that does not."""
        return self

    @property
    def store(self) -> Store:
        """The values' shared memory; made when it is first needed."""
        if self._store is None:
            options = self._options
            memory = ObjectMemory(options.object_memory, options.spill_directory)
            self._store = Store(self._loop, memory)
        return self._store

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload; see `Engine.pack`."""
        return self.store.pack(outgoing)

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Let a task wait for its turn; see `Engine.submit`."""
        return self._open_runner.submit(func, payload, receiver)

    def take_lease(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Ask for a lease; see `Engine.take_lease`."""
        return self._open_runner.submit(func, b"", receiver)

    def demand(self, task: int, limit: int) -> None:
        """Let a stream yield so many items in all; see `Engine.demand`."""
        if self._runner is not None:
            self._node.demand(task, limit)

    def cancel(self, task: int) -> None:
        """Stop a task; see `Engine.cancel`."""
        if self._runner is not None:
            self._node.cancel(task)

    def begin_wait(self, task: int) -> None:
        """Some code waits for a task now."""
        if self._runner is not None:
            self._node.begin_wait(task)

    def end_wait(self, task: int) -> None:
        """It waits no longer, although the task has not ended."""
        if self._runner is not None:
            self._node.end_wait(task)

    def settle(self, task: int) -> None:
        """A task has ended; nobody waits for it any more."""
        if self._runner is not None:
            self._node.settle(task)

    async def total(self) -> dict[str, float]:
        """All resources by name."""
        return self._asked("aiogpu.cluster_resources()").scheduler.ledger.totals()

    async def available(self) -> dict[str, float]:
        """Return what is free of each."""
        return self._asked("aiogpu.available_resources()").scheduler.ledger.available()

    async def status(self) -> NodeStatus:
        """Who holds what, what waits; each running task counts as a worker."""
        node = self._asked("aiogpu.status()")
        seen = snapshot(node.scheduler, self._pids(node), time.monotonic())

        def place_of(actor: Actor) -> tuple[int, int] | None:
            life = self.actors.life(actor.id)
            return None if life is None else (life.id, os.getpid())

        return replace(
            seen,
            actors=self.actors.listed(place_of, lambda _: OWN),
            failures=node.results.failures.at(time.monotonic()),
        )

    def _pids(self, node: InlineNode) -> dict[int, int]:
        workers = {int(worker.id): os.getpid() for worker in node.scheduler.workers}
        return workers | node.leases.pids

    async def why(self, task: int) -> Why | None:
        """Return why a task waits; see `Engine.why`."""
        node = self._asked("handle.why()")
        record = node.scheduler.tasks.get(TaskId(task))
        if record is None:
            return None
        return why(node.scheduler, record, self._pids(node), time.monotonic())

    async def why_task(self, number: int) -> Why | None:
        """The same; see `Engine.why_task`."""
        return await self.why(number)

    async def close(self) -> None:
        """Stop all tasks and leave nothing behind."""
        if self._runner is not None:
            await self._node.close()
        if self._store is not None:
            self._store.close()

    def hasten(self) -> None:
        """Give nobody time to stop; see `Engine.hasten`."""
        if self._runner is not None:
            self._node.hasten()

    def abandon(self) -> None:
        """The same in haste."""
        if self._runner is not None:
            self._node.stack.abandon()

    def disown(self) -> None:
        """This process is a fork of the program, and has all of it once more."""
