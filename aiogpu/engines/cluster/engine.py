"""A Ray cluster as an engine: Ray places, moves and heals; the faces stay as they are.

What is asked goes to Ray at once, and its ends come back by `calls`. What Ray does not
do by itself is done here: a handle that nobody awaits any more is cancelled on the
cluster, a timeout counts from `.remote()`, and what can never run is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiogpu.engines import ray
from aiogpu.engines.base import NodeOptions, error_inside_task
from aiogpu.engines.cluster.calls import Calls, Live
from aiogpu.engines.cluster.host import take_passed
from aiogpu.engines.cluster.membership import Membership
from aiogpu.engines.cluster.overview import Overview
from aiogpu.engines.cluster.payload import kept_in, stored
from aiogpu.engines.cluster.pulse import LOST_AFTER, Pulse
from aiogpu.engines.cluster.streams import Inflow
from aiogpu.engines.cluster.terms import check_possible, options_of_task
from aiogpu.engines.cluster.values import ClusterValues
from aiogpu.engines.cluster.work import Work, runner, streamer
from aiogpu.errors import MisuseError, NodeClosedError, NodeDiedError
from aiogpu.runtime.call import Call

if TYPE_CHECKING:
    from aiogpu.core.snapshot import NodeStatus
    from aiogpu.core.why import Why
    from aiogpu.engines.cluster.actors import ClusterActors
    from aiogpu.runtime.call import Receiver, Site
    from aiogpu.runtime.leases import LeaseReceiver
    from aiogpu.wire.messages import Failed
    from aiogpu.wire.outgoing import Outgoing

SITES: Final = 1024
"""Functions that are kept ready; beyond, Ray is told of the oldest anew."""


class RayEngine:
    """See above.

    Attributes:
        loop: the event loop that it is for.
        calls: what runs.
        is_open: whether Ray can be asked.
        is_inside: whether this is the code of a task, in a worker of Ray's.
    """

    waits = None

    def __init__(
        self,
        address: str | None,
        options: NodeOptions,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.loop = loop
        self.calls = Calls(loop)
        self.is_open = self.is_inside = False
        self._far = ClusterValues(self)
        self._membership = Membership(address, options)
        self._grace = options.cancel_grace
        self._mark = object()
        self._sent: dict[int, Any] = {}
        self._overview = Overview(self.calls)
        self._actors: ClusterActors | None = None
        self._pulse: Pulse | None = None
        self._is_hasty = False
        self._lost: str | None = None

    @classmethod
    def inside(cls, loop: asyncio.AbstractEventLoop) -> RayEngine:
        """The engine of a task's own code, in a process that Ray has started."""
        engine = cls(None, NodeOptions(), loop)
        engine.is_open = engine.is_inside = True
        return engine

    def __repr__(self) -> str:
        return f"<RayEngine {self._membership!r} {self.calls!r}>"

    @property
    def far(self) -> ClusterValues:
        """Who knows values that are not here; see `Engine.far`."""
        return self._far

    @property
    def actors(self) -> ClusterActors:
        """The cluster's actors; see `Engine.actors`."""
        if self._actors is None:
            from aiogpu.engines.cluster.actors import ClusterActors

            self._actors = ClusterActors(self)
        return self._actors

    async def open(self) -> None:
        """Join the cluster, or start one."""
        await self._membership.enter()
        try:
            await self._overview.open()
        except BaseException:
            await self._membership.leave()
            raise
        self._pulse = Pulse(*self._membership.place(), self._lose)
        self._pulse.begin()
        self.is_open = True

    def pack(self, outgoing: Outgoing) -> bytes:
        """Make a payload; see `Engine.pack`."""
        return self._far.pack(outgoing)

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Start a task; see `Engine.submit`."""
        if site.checked_by is not self._mark:
            self.admit(site)
        spec = site.spec
        request = spec.shape.request
        live = Live(spec.name, receiver, self.loop.time(), request=request)
        number = self.calls.begin(live)
        self._time(number, live, site, payload)
        if type(payload) is bytes and not site.window:
            self.calls.watch(number, (self._sent_as(site).remote(payload),))
        else:
            self.send(number, payload, partial(self._send, number, site))
        return number

    def admit(self, site: Site) -> None:
        """Check what is the same for all calls of a site.

        Raises:
            OptionError: it asks for what Ray cannot do.
            InfeasibleError: the cluster can never give what it asks for.
            NodeClosedError: the cluster was left.
        """
        if self._lost is not None:
            raise NodeDiedError(self._lost)
        if not self.is_open:
            raise NodeClosedError("this program has left its cluster.")
        check_possible(site)
        self._overview.check_feasible(site)
        site.checked_by = self._mark

    def _sent_as(self, site: Site) -> Any:
        """What Ray knows a site by."""
        found = self._sent.get(site.id)
        if found is None:
            work = Work(
                site.spec.name, site.function.payload, site.resources, site.retried
            )
            run = streamer(work) if site.window else runner(work)
            if len(self._sent) >= SITES:
                del self._sent[next(iter(self._sent))]
            found = self._sent[site.id] = ray.function(run, options_of_task(site))
        return found

    def send(
        self, number: int, payload: bytes, send: Callable[[tuple[Any, ...]], None]
    ) -> None:
        """Send a call as soon as all that it refers to is known to Ray.

        Args:
            number: of the call.
            payload: its arguments.
            send: is given what Ray is to be given.
        """
        kept = kept_in(payload)
        needs: tuple[Any, ...] = () if kept is None else payload.needs  # type: ignore[attr-defined]
        shared = needs if kept is None else (*needs, *kept.references)
        for one in shared:
            if one.is_promised:
                one.when_known(partial(self.send, number, payload, send))
                return
        for one in needs:
            if one.failed is not None:
                self.calls.end(number, partial(_reject, one.failed))
                return
        passed = take_passed()
        if kept is None:
            send((stored(payload, passed),))
            return
        head = (
            kept.ref if kept.ref is not None and not passed else stored(payload, passed)
        )
        contents = payload.contents  # type: ignore[attr-defined]
        values = [one.as_argument() for one in needs]
        send((head, contents.places, contents.returns, *values))

    def _send(self, number: int, site: Site, given: tuple[Any, ...]) -> None:
        live = self.calls.live.get(number)
        if live is None:
            return
        sent = self._sent_as(site)
        if site.window:
            Inflow(self.calls, number, live, sent.remote(*given)).begin()
            return
        returns = given[2] if len(given) > 2 else 0
        if returns > 1:
            refs = sent.options(num_returns=returns).remote(*given)
            self.calls.watch(number, refs)
        else:
            self.calls.watch(number, (sent.remote(*given),))

    def _time(self, number: int, live: Live, site: Site, payload: bytes) -> None:
        spec = site.spec
        if spec.timeout is not None:
            late = partial(self._on_late, number, Call(site, payload, live.receiver))
            live.timer = self.loop.call_later(spec.timeout, late)

    def _on_late(self, number: int, call: Call) -> None:
        self.cancel(number)
        call.tell_timeout()

    def take_lease(self, site: Site, receiver: LeaseReceiver) -> int:
        """Refuse; see `Engine.take_lease`.

        Raises:
            MisuseError: always.
        """
        raise MisuseError(
            "aiogpu.lease() hands devices of this machine to processes that are not "
            "aiogpu's, which a Ray cluster cannot do. Use a node of aiogpu's own, or "
            "have a task start the process."
        )

    def demand(self, task: int, limit: int) -> None:
        """Let a stream yield so many items in all; see `Engine.demand`."""
        live = self.calls.live.get(task)
        if live is not None and isinstance(live.stop, Inflow):
            live.stop.rise(limit)

    def cancel(self, task: int) -> None:
        """Stop a task; see `Engine.cancel`."""
        live = self.calls.let_go(task)
        if live is None:
            return
        if live.is_borrowed:
            self.calls.ending.pop(task, None)
        elif live.stop is not None:
            live.stop()
        elif live.refs:
            ray.cancel(live.refs[0])
            if not live.is_of_actor:
                live.timer = self.loop.call_later(self._grace, self._insist, task)

    def _insist(self, task: int) -> None:
        """It has not stopped in the time that it was given."""
        live = self.calls.ending.get(task)
        if live is not None and live.refs:
            ray.cancel(live.refs[0], at_once=True)

    async def total(self) -> dict[str, float]:
        """All resources by name."""
        self._check_asked("aiogpu.cluster_resources()")
        return await self._overview.total()

    async def available(self) -> dict[str, float]:
        """What is free of each."""
        self._check_asked("aiogpu.available_resources()")
        return await self._overview.available()

    async def status(self) -> NodeStatus:
        """What there is on the cluster, and what this program has running."""
        self._check_asked("aiogpu.status()")
        return await self._overview.status(self.loop.time())

    async def why(self, task: int) -> Why | None:
        """Why a task waits; see `Engine.why`."""
        self._check_asked("handle.why()")
        return await self._overview.why(task, self.loop.time())

    async def why_task(self, number: int) -> Why | None:
        """The same; see `Engine.why_task`."""
        return await self.why(number)

    def _check_asked(self, what: str) -> None:
        if self.is_inside:
            raise error_inside_task(what)
        if self._lost is not None:
            raise NodeDiedError(self._lost)
        if not self.is_open:
            raise NodeClosedError("this program has left its cluster.")
        if self._pulse is not None and self._pulse.is_missed:
            # A question without an answer would have Ray end this program.
            raise NodeDiedError("the head of the Ray cluster does not answer now.")

    def end_children(self) -> None:
        """The task has ended whose code made these calls; they end with it."""
        for number in list(self.calls.live):
            self.cancel(number)

    async def close(self) -> None:
        """Stop what this program has running, and leave the cluster."""
        if self._pulse is not None:
            self._pulse.end()
        if self.is_open:
            self.is_open = False
            if self._actors is not None:
                self._actors.close()
            for number, live in list(self.calls.live.items()):
                receiver = live.receiver
                self.cancel(number)
                if receiver is not None:
                    error = f"the cluster was left before {live.name} had ended."
                    receiver.fail(NodeClosedError(error))
            await self._stopped()
        await self._membership.leave()

    def _lose(self) -> None:
        """The cluster has gone: nothing of it will ever end."""
        self.is_open = False
        self._mark = object()
        self._lost = (
            f"the head of the Ray cluster has not answered for {LOST_AFTER:g} s, and "
            f"what ran there is lost. aiogpu.shutdown(), and init() once it is back."
        )
        if self._actors is not None:
            self._actors.close()
        for number in list(self.calls.live):
            self.calls.end(number, lambda one: one.fail(NodeDiedError(self._lost)))
        self.calls.ending.clear()
        self._membership.lose()

    async def _stopped(self) -> None:
        """Until all that was stopped has ended, within the time that it is given."""
        until = self.loop.time() + (0 if self._is_hasty else self._grace + 1)
        gone = self.loop.create_future()

        def look() -> None:
            if not gone.done() and not self.calls.ending:
                gone.set_result(None)

        self.calls.on_delivered = look
        look()
        try:
            async with asyncio.timeout_at(until):
                await gone
        except TimeoutError:
            for task in list(self.calls.ending):
                self._insist(task)
        finally:
            self.calls.on_delivered = None

    def hasten(self) -> None:
        """Give nobody time to stop; see `Engine.hasten`."""
        self._is_hasty = True
        for task in list(self.calls.ending):
            self._insist(task)

    def abandon(self) -> None:
        """The same in haste, where no loop runs any more."""
        self._membership.abandon()

    def disown(self) -> None:
        """This process is a fork of the program: Ray's threads did not come along."""
        self.is_open = False
        self._membership.disown()


def _reject(failed: Failed, receiver: Receiver) -> None:
    receiver.reject(failed)
