"""A node of another process, which this program has joined.

What is asked of it goes over a Unix socket as a worker's own requests do. Requests are
checked here against what the node has, so that what it can never give is refused at
`.remote()`, as everywhere.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from aiogpu.engines.base import NodeOptions
from aiogpu.engines.membership import Membership
from aiogpu.engines.remote_leases import RemoteLeases
from aiogpu.engines.remote_link import RemoteLink, Told
from aiogpu.errors import NodeError
from aiogpu.runtime.callers.requests import Terms, load_gang
from aiogpu.wire.messages import (
    AVAILABLE,
    RESOURCES,
    STATUS,
    TIMELINE,
    WHY,
    WHY_TASK,
    ChildDemand,
    ChildFailed,
    Declare,
    FindPlacement,
    Inquire,
    Submit,
    Withdraw,
)

if TYPE_CHECKING:
    from aiogpu.core.model.request import PlacementGroupSpec
    from aiogpu.engines.remote_actors import RemoteActors
    from aiogpu.observe.recorder import Span
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why
    from aiogpu.runtime.callers.leases import LeaseReceiver
    from aiogpu.runtime.calls import Receiver, Site
    from aiogpu.serialization.references import PickledValue

DECLARED: Final = 512
"""Sites that the node is taken to know; then all are declared anew. It keeps more."""
UNCHECKED: Final = 1 << 20
"""Bytes that any call may carry."""


class RemoteEngine(Membership):
    """See above."""

    waits = None

    def __init__(
        self, path: str, options: NodeOptions, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(path, options, loop)
        self.leases = RemoteLeases(self)
        self._mark = object()
        self._declared = 0
        self._actors: RemoteActors | None = None

    @property
    def far(self) -> RemoteEngine:
        """Who knows values that have come from elsewhere; see `Engine.far`."""
        return self

    @property
    def link(self) -> RemoteLink:
        """The way to them."""
        return RemoteLink(self)

    @property
    def mark(self) -> object:
        """Left on sites that the node knows."""
        return self._mark

    @property
    def actors(self) -> RemoteActors:
        """The node's actors; see `Engine.actors`."""
        if self._actors is None:
            from aiogpu.engines.remote_actors import RemoteActors

            self._actors = RemoteActors(self)
        return self._actors

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload; see `Engine.pack`."""
        return self.loans.pack(outgoing)

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Start a task; see `Engine.submit`."""
        if site.checked_by is not self._mark:
            self.admit(site)
        if len(payload) > UNCHECKED:
            from aiogpu.engines.admission import check_arguments

            check_arguments(site, payload)
        self._last = child = self._last + 1
        self._receivers[child] = receiver
        message = Submit(0, child, site.id, payload)
        if self.loans.unnamed:
            self.loans.name(message)
        self._line.send(message)
        return child

    def admit(self, site: Site) -> None:
        """Check what is the same for all calls of a site, and declare it.

        Raises:
            InfeasibleError: the node can never give what it asks for.
            NodeError: the node has gone.
        """
        from aiogpu.engines.admission import check_site

        self.check_open()
        assert self._ledger is not None, self
        check_site(site, self._ledger)
        if self._declared >= DECLARED:
            self._mark, self._declared = object(), 0
        site.checked_by = self._mark
        self._declared += 1
        terms = Terms.of(site).pack()
        self.send(Declare(site.id, site.spec.name, terms, site.function.payload))

    def take_lease(self, site: Site, receiver: LeaseReceiver) -> int:
        """Ask for a lease; see `Engine.take_lease`."""
        return self.leases.take(site, receiver)

    take_placement = take_lease

    def find_placement(self, name: str) -> asyncio.Future[PlacementGroupSpec]:
        """One that outlives its program; see `Engine.find_placement`."""
        self.check_open()
        found: asyncio.Future[PlacementGroupSpec] = self.loop.create_future()
        self.send(FindPlacement(self.expect(Told(found, load_gang)), name))
        return found

    def demand(self, task: int, limit: int) -> None:
        """Let a stream yield so many items in all; see `Engine.demand`."""
        if task in self._receivers:
            self.send(ChildDemand(task, limit))

    def cancel(self, task: int) -> None:
        """Stop a task; see `Engine.cancel`."""
        if self._receivers.pop(task, None) is not None:
            self.shares.withdraw(task)
            self.send(Withdraw(0, task))
        else:
            self.leases.give_back(task)

    async def total(self) -> dict[str, float]:
        """All resources by name."""
        found: dict[str, float] = await self._inquire(RESOURCES)
        return found

    async def available(self) -> dict[str, float]:
        """What is free of each."""
        found: dict[str, float] = await self._inquire(AVAILABLE)
        return found

    async def status(self) -> NodeStatus:
        """Who holds what, what waits and why, whosever it is."""
        found: NodeStatus = await self._inquire(STATUS)
        return found

    async def why(self, task: int) -> Why | None:
        """Why a task of this program waits; see `Engine.why`."""
        found: Why | None = await self._inquire(WHY, task)
        return found

    async def timeline(self) -> list[Span]:
        """What has run on the node, where and when; see `observe.recorder`."""
        from aiogpu.observe.recorder import Span

        return [Span(*one) for one in await self._inquire(TIMELINE)]

    async def why_task(self, number: int) -> Why | None:
        """Why a task waits, whosever it is; see `Engine.why_task`."""
        found: Why | None = await self._inquire(WHY_TASK, number)
        return found

    async def _inquire(self, what: str, number: int = 0) -> Any:
        self.check_open()
        told = Told(self.loop.create_future())
        self.send(Inquire(self.expect(told), what, number))
        return await told.future

    def _on_stray(self, failed: ChildFailed) -> None:
        """It was granted, and is no more."""
        self.leases.lose(failed)

    def _end(self, error: NodeError) -> None:
        self._mark = object()
        super()._end(error)
        self.leases.end(error)
