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
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from aiogpu.client.current import error_inside_task
from aiogpu.core.model.request import PlacementGroupSpec
from aiogpu.core.resources.placement_group import take_grouped
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.devices import take_inventory
from aiogpu.engines.inline.actors import InlineActors, Life
from aiogpu.engines.inline.calls import (
    Call,
    InlineNode,
    State,
    make_task,
    running_call,
)
from aiogpu.errors import NodeClosedError, PreloadError
from aiogpu.wire.messages import LEASE_MARK

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why
    from aiogpu.runtime.callers.leases import LeaseReceiver
    from aiogpu.serialization.references import PickledValue

_numbers: Final = count(1)


class InlineEngine:
    """A node in the program's thread; see `engines.base.Engine`."""

    runs_together = False
    has_gone = False
    remote_values = None
    waits = None  # on the program's loop, everything goes on while code waits

    def __init__(self, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.home = f"inline {next(_numbers)}"
        self._options = options
        self._loop = loop
        self._node: InlineNode | None = None
        self._groups: dict[int, str] = {}  # keys of placement groups, by lease
        self._promised = count(1)
        self._former_factory: Any = None
        self._is_forced = asyncio.Event()

    def __repr__(self) -> str:
        return f"<InlineEngine {self._node!r}>"

    async def open(self) -> None:
        """Import the modules of `preload`, and detect resources; see `Engine.open`."""
        from aiogpu.runtime.devices.binding import Assignment

        options = self._options
        for module in options.preload:
            try:
                import_module(module)
            except Exception as error:
                cause = f"{type(error).__name__}: {error}".rstrip(".")
                raise PreloadError(
                    f"init(preload=...) names {module!r}, which cannot be imported: "
                    f"{cause}. Install it, or leave it out."
                ) from error
        ledger, vendors = await take_inventory(options)
        node = InlineNode(
            self._loop,
            ledger,
            Assignment(vendors, ledger, os.environ),
            options.cancel_grace,
        )
        node.actors = InlineActors(node)
        self._former_factory = self._loop.get_task_factory()
        self._factory = partial(make_task, self._former_factory)
        self._loop.set_task_factory(self._factory)
        self._node = node

    @property
    def _open_node(self) -> InlineNode:
        if self._node is None:
            raise NodeClosedError("this node is not running.")
        return self._node

    def _node_for(self, what: str) -> InlineNode:
        """Return the node for a call of the program; refuse it in a task."""
        if running_call.get() is not None:
            raise error_inside_task(what)
        return self._open_node

    @property
    def actors(self) -> InlineActors:
        """The actors; see `Engine.actors`."""
        return self._open_node.actors

    def promise_actor(self) -> int:
        """Return an id as workers choose them; see `Engine.promise_actor`."""
        return -next(self._promised)

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload; see `Engine.pack`."""
        return InlineNode.pack(outgoing)

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Queue a task; see `Engine.submit`."""
        node = self._open_node
        parent = running_call.get()
        if parent is not None and parent.state is State.ENDED:
            parent = None
        return node.submit(func, payload, receiver, parent, node.program)

    def take_lease(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Grant a lease or a placement group at once; see `Engine.take_lease`."""
        node = self._open_node
        node.check(func, b"")
        number, request = node.new_id(), func.spec.shape.request
        if isinstance(request.placement_group, PlacementGroupSpec):
            group = request.placement_group
            lease = take_grouped(node.ledger.emptied(), request)
            assert lease is not None, request  # `check` has found that it fits
            node.ledger.placement_groups[group.key] = lease.parts
            self._groups[number] = group.key
            receiver.settle(b"")
            return number
        from aiogpu.wire.codec import pack

        bind = node.bind(func)
        environ = {**bind.environ, LEASE_MARK: f"inline.{number}"}
        receiver.settle(pack(bind._replace(environ=environ)))
        return number

    def demand(self, task: int, limit: int) -> None:
        """Set a stream's number of items; see `Engine.demand`."""
        if self._node is not None:
            self._node.demand(task, limit)

    def cancel(self, task: int) -> None:
        """Stop a task, or remove a placement group; see `Engine.cancel`."""
        node = self._node
        if node is None:
            return
        node.cancel(task)
        if task not in self._groups:
            return
        # Its tasks and actors that have not begun fail; what runs goes on.
        del node.ledger.placement_groups[self._groups.pop(task)]

    # What the program sees of the node.

    async def total(self) -> dict[str, float]:
        """Return all resources by name."""
        return self._node_for("aiogpu.cluster_resources()").ledger.totals()

    async def available(self) -> dict[str, float]:
        """Return the same as `total`: the node is always idle."""
        return self._node_for("aiogpu.available_resources()").ledger.totals()

    async def status(self) -> NodeStatus:
        """Return the unfinished calls; nothing is held."""
        from aiogpu.observe.status import Machine, NodeStatus, TaskStatus

        node = self._node_for("aiogpu.status()")
        total = node.ledger.totals()
        tasks = [
            TaskStatus(
                id=call.id,
                name=call.name,
                state=_state_of(call),
                request=call.func.resources,
                worker=None if call.state is State.WAITING else call.id,
                reason=None,
                pid=os.getpid(),
            )
            for call in node.calls.values()
        ]
        return NodeStatus(
            total=total,
            available=total,
            devices=(),
            workers=(),
            tasks=tuple(tasks),
            waiting_count=sum(
                call.state is State.WAITING for call in node.calls.values()
            ),
            shapes=(),
            shape_count=0,
            reservation=None,
            nodes=(Machine(self.home, os.uname().nodename, True, total),),
        )

    async def why(self, task: int) -> Why | None:
        """Return the state of a task; None if it has ended."""
        from aiogpu.observe.why import Why

        node = self._node_for("handle.why()")
        call = node.calls.get(task)
        if call is not None:
            return Why(call.name, task, _state_of(call), request=call.func.resources)
        living = [actor for actor in node.actors.all() if actor.life is not Life.DEAD]
        for actor in living:
            if actor.id == task:
                return Why(actor.name, task, "running", request=actor.func.resources)
        return None

    async def why_task(self, number: int) -> Why | None:
        """Return the same; see `Engine.why_task`."""
        return await self.why(number)

    # Its end.

    def announce_stop(self) -> None:
        """Inform tasks that their program stops; see `Engine.announce_stop`."""
        if self._node is not None:
            self._node.is_stop_announced = True

    async def close(self) -> None:
        """Stop all calls and actors, for at most the grace period."""
        node = self._node
        if node is None:
            return
        node.is_closing = True
        for call in list(node.calls.values()):
            closed = NodeClosedError(
                f"the node was shut down before {call.name} had ended."
            )
            call.stop(closed)
        for actor in node.actors.all():
            actor.close_with_node()
        forced = asyncio.create_task(self._is_forced.wait())
        loop, until = self._loop, self._loop.time() + node.grace
        while unended := node.program.tasks | node.actors.closing:
            left = until - loop.time()
            if left <= 0 or forced.done():
                break
            first = asyncio.FIRST_COMPLETED
            await asyncio.wait({*unended, forced}, timeout=left, return_when=first)
        forced.cancel()
        if unended:
            node.warn_of(unended)
            for task in unended:
                task.cancel()
        if loop.get_task_factory() is self._factory:
            loop.set_task_factory(self._former_factory)
        self._node = None

    def force_close(self) -> None:
        """Close without a grace period; see `Engine.force_close`."""
        self._is_forced.set()

    def close_now(self) -> None:
        """Do nothing: outside of its steps, no code of a call changes the process."""

    def after_fork(self) -> None:
        """Do nothing: a fork has its own copy of the node."""


def _state_of(call: Call) -> str:
    if call.state is not State.WAITING:
        return "stopping" if call.receiver is None else "running"
    return "waiting" if call.is_ready else "expecting"
