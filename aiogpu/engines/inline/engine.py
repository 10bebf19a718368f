"""A node without processes: tasks and actors run in the program's own thread.

A test double: breakpoints, monkeypatches and coverage work in tasks, while arguments
and results are copied as on the way to a worker. Calls are served first come, first
served, on a node that is always idle: each gets the devices that an idle node would
give it, and none waits for resources.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from aiogpu.client.current import error_inside_task
from aiogpu.core.model.request import PlacementGroupSpec
from aiogpu.core.resources.placement_group import take_grouped
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.devices import take_inventory
from aiogpu.engines.inline.calls import (
    InlineNode,
    State,
    create_task,
    running_call,
)
from aiogpu.errors import NodeClosedError

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver
    from aiogpu.engines.inline.actors import InlineActor, InlineActors
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why
    from aiogpu.runtime.callers.leases import LeaseReceiver

_numbers: Final = count(1)


class InlineEngine(InlineNode):
    """A node in the program's thread; see `engines.base.Engine`."""

    runs_together = False
    node_socket = ""
    has_gone = False
    remote_values = None
    waits = None  # on the program's loop, everything goes on while code waits

    def __init__(self, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(options, loop)
        self.home = f"inline {next(_numbers)}"
        self._actors: InlineActors | None = None
        self._leases: dict[int, tuple[LeaseReceiver, str]] = {}
        self._promised = count(1)
        self._program_factory = loop.get_task_factory()
        self._factory: Any = partial(create_task, self._program_factory)
        self._is_forced = asyncio.Event()

    async def open(self) -> None:
        """Detect resources; see `Engine.open`."""
        from aiogpu.runtime.devices.binding import Assignment

        self.ledger, vendors = await take_inventory(self.options)
        self.assignment = Assignment(vendors, self.ledger, os.environ)
        self.loop.set_task_factory(self._factory)

    @property
    def actors(self) -> InlineActors:
        """The actors; see `Engine.actors`."""
        if self._actors is None:
            # Late, since it loads modules of the runtime.
            from aiogpu.engines.inline.actors import InlineActors

            self._actors = InlineActors(self)
        return self._actors

    def promise_actor(self) -> int:
        """Return an id as workers choose them; see `Engine.promise_actor`."""
        return -next(self._promised)

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Queue a task; see `Engine.submit`."""
        parent = running_call.get()
        if parent is not None and parent.state is State.ENDED:
            parent = None
        return self.start(func, payload, receiver, parent, self.program)

    def take_lease(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Grant a lease or a placement group at once; see `Engine.take_lease`."""
        self.check(func, b"")
        number, group = self.new_id(), func.spec.shape.request.placement_group
        if isinstance(group, PlacementGroupSpec):
            lease = take_grouped(self.ledger.emptied(), func.spec.shape.request)
            assert lease is not None, group  # `check` has found that it fits
            self.ledger.placement_groups[group.key] = lease.parts
            key, grant = group.key, b""
        else:
            from aiogpu.wire.codec import pack

            key, grant = "", pack(self.bind(func))
        self._leases[number] = receiver, key
        receiver.settle(grant)
        return number

    def find(self, number: int) -> Any:
        """Return a call, or its actor until it begins; None if it has ended."""
        call, owner = self.calls.get(number), self._owner_of(number)
        return call if call is not None or owner is None else owner.process

    def _owner_of(self, number: int) -> InlineActor | None:
        return None if self._actors is None else self._actors.owner_of(number)

    def cancel(self, number: int) -> None:
        """Stop a task or call, or end a lease; see `Engine.cancel`.

        Tasks and actors of a placement group that have not begun fail; others go on.
        """
        owner, call = self._owner_of(number), self.calls.get(number)
        if owner is not None:
            self.actors.cancel(owner.id, number)
        elif call is not None:
            call.stop()
        lease = self._leases.pop(number, None)
        if lease is not None:
            self.ledger.placement_groups.pop(lease[1], None)

    # What the program sees of the node.

    async def total(self) -> dict[str, float]:
        """Return all resources by name."""
        self._check_program("aiogpu.cluster_resources()")
        return self.ledger.totals()

    async def available(self) -> dict[str, float]:
        """Return the same as `total`: the node is always idle."""
        self._check_program("aiogpu.available_resources()")
        return self.ledger.totals()

    async def status(self) -> NodeStatus:
        """Return the unfinished calls; nothing is held."""
        from aiogpu.observe.status import Machine, NodeStatus, TaskStatus

        self._check_program("aiogpu.status()")
        total = self.ledger.totals()
        tasks = tuple(
            TaskStatus(
                call.id, call.name, call.state.value, call.func.resources, None, None
            )
            for call in self.calls.values()
        )
        return NodeStatus(
            total=total,
            available=total,
            devices=(),
            workers=(),
            tasks=tasks,
            waiting_count=sum(task.state == "waiting" for task in tasks),
            shapes=(),
            shape_count=0,
            reservation=None,
            nodes=(Machine(self.node_id, os.uname().nodename, True, total),),
        )

    async def why(self, task: int) -> Why | None:
        """Return the state of a task, actor or lease; None if it has ended."""
        from aiogpu.observe.why import Why

        self._check_program("handle.why()")
        call = self.calls.get(task)
        if call is not None:
            state = call.state.value
            return Why(call.name, task, state, request=call.func.resources)
        if task in self._leases:
            return Why("lease", task, "running")
        actor = None if self._actors is None else self._actors.get(task)
        if actor is None or actor.state.value == "dead":
            return None
        return Why(actor.name, task, "running", request=actor.func.resources)

    async def why_task(self, number: int) -> Why | None:
        """Return the same; see `Engine.why_task`."""
        return await self.why(number)

    def _check_program(self, what: str) -> None:
        if running_call.get() is not None:
            raise error_inside_task(what)

    # Its end.

    def announce_stop(self) -> None:
        """Inform tasks that their program stops; see `Engine.announce_stop`."""
        self.is_stop_announced = True

    async def close(self) -> None:
        """Stop all calls and actors; wait for them within the grace period."""
        self.is_closing = True
        for call in list(self.calls.values()):
            why = f"the node was shut down before {call.name} had ended."
            call.stop(NodeClosedError(why))
        if self._actors is not None:
            self._actors.close()
        for receiver, _ in self._leases.values():
            receiver.settle(NodeClosedError("the node was shut down."))
        forced = self.loop.create_task(self._is_forced.wait())
        until = self.loop.time() + self.options.cancel_grace
        while unended := self.program.tasks.keys() | self.closing:
            left = until - self.loop.time()
            if left <= 0 or forced.done():
                break
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait({*unended, forced}, timeout=left, return_when=first)
        forced.cancel()
        self.warn_of(unended)
        for task in unended:
            task.cancel()
        if self.loop.get_task_factory() is self._factory:
            self.loop.set_task_factory(self._program_factory)
        if self._store is not None:
            self._store.close()

    def force_close(self) -> None:
        """Close without a grace period; see `Engine.force_close`."""
        self._is_forced.set()

    def close_now(self) -> None:
        """Do nothing: outside of its steps, no code of a call changes the process."""

    def after_fork(self) -> None:
        """Do nothing: a fork has its own copy of the node."""
