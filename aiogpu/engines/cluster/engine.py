"""A Ray cluster as an engine: Ray places, moves and heals; the faces stay as they are.

What is asked goes to Ray at once, and its ends come back by `calls`. What Ray does not
do by itself is done here: a handle that nobody awaits any more is cancelled on the
cluster, a timeout counts from `.remote()`, and what can never run is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from aiogpu.engines.base import NodeOptions
from aiogpu.engines.cluster.calls import Calls, Live
from aiogpu.engines.cluster.failure import packed
from aiogpu.engines.cluster.functions import Functions
from aiogpu.engines.cluster.infeasible import InfeasibleCalls
from aiogpu.engines.cluster.membership import Membership
from aiogpu.engines.cluster.overview import Overview
from aiogpu.engines.cluster.payload import kept_in, stored
from aiogpu.engines.cluster.placements import Placements
from aiogpu.engines.cluster.pulse import BEAT, LOST_AFTER, Pulse
from aiogpu.engines.cluster.questions import Questions
from aiogpu.engines.cluster.shared import outlive
from aiogpu.engines.cluster.streams import Inflow
from aiogpu.engines.cluster.terms import check_possible
from aiogpu.engines.cluster.values import ClusterValues
from aiogpu.errors import MisuseError, NodeClosedError, NodeDiedError
from aiogpu.runtime.pending_tasks import Call
from aiogpu.serialization.exceptions import RAISED

if TYPE_CHECKING:
    from aiogpu.client.function_spec import Site
    from aiogpu.client.interface import Receiver
    from aiogpu.engines.cluster.actors import ClusterActors
    from aiogpu.observe.why import Why
    from aiogpu.runtime.callers.leases import LeaseReceiver
    from aiogpu.serialization.references import PickledValue
    from aiogpu.wire.messages import Failed


class RayEngine(Questions):
    """See above.

    Attributes:
        calls: what runs.
        grace: seconds in which what is cancelled may end.
        overview: what there is on the cluster.
        placements: its placement groups, as placements.
    """

    waits = None
    home = ""

    def __init__(
        self,
        options: NodeOptions,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.calls = Calls(loop)
        self._far = ClusterValues(self)
        self._membership = Membership(options)
        self.grace = options.cancel_grace
        self._mark = object()
        super().__init__(Overview(self.calls), loop)
        self.placements = Placements(self)
        self._functions = Functions(self.placements, self.overview)
        self._actors: ClusterActors | None = None
        self._is_hasty = False
        self._infeasible = InfeasibleCalls(self)

    @classmethod
    def inside(cls, loop: asyncio.AbstractEventLoop) -> RayEngine:
        """The engine of a task's own code, in a process that Ray has started."""
        engine = cls(NodeOptions(), loop)
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

    @property
    def has_actors(self) -> bool:
        """True if anybody has asked for its actors."""
        return self._actors is not None

    @property
    def has_gone(self) -> bool:
        """True if the cluster has gone; see `Engine.has_gone`."""
        return self.lost is not None

    @property
    def mark(self) -> object:
        """Left on sites that were checked."""
        return self._mark

    async def open(self) -> None:
        """Join the cluster, or start one."""
        await self._membership.enter()
        try:
            await self.overview.open()
        except BaseException:
            await self._membership.leave()
            raise
        self.pulse = Pulse(*self._membership.place(), self._lose, self._look)
        self.pulse.begin()
        self.is_open = True

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload; see `Engine.pack`."""
        return self._far.pack(outgoing)

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Start a task; see `Engine.submit`."""
        if site.checked_by is not self._mark:
            self.admit(site)
        name, request = site.spec.name, site.spec.shape.request
        live = Live(name, receiver, self.loop.time(), request=request)
        grace = site.spec.cancel_grace
        live.grace = self.grace if grace is None else grace
        number = self.calls.begin(live)
        if site.spec.is_grouped and (error := self.placements.refusal(site)):
            self.calls.fail(number, error)
            return number
        self._time(number, live, site, payload)
        if type(payload) is bytes and not site.window:
            self.calls.watch(number, (self._functions.of(site).remote(payload),))
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
        self.check_open()
        check_possible(site)
        self.overview.check_feasible(site)
        site.checked_by = self._mark

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
                self.refuse(number, one.failed)
                return
        self.calls.note_needs(number, needs)
        send(self.given(payload))

    def given(self, payload: bytes) -> tuple[Any, ...]:
        """A payload as the arguments that Ray is given."""
        kept = kept_in(payload)
        if kept is None:
            return (payload,)
        head = stored(payload) if kept.ref is None else kept.ref
        contents = payload.contents  # type: ignore[attr-defined]
        values = [one.as_argument() for one in payload.needs]  # type: ignore[attr-defined]
        return head, contents.places, contents.returns, *values

    def refuse(self, number: int, failed: Failed) -> None:
        """A call is not sent: its receiver is told why."""
        self.calls.end(number, lambda receiver: receiver.reject(failed))

    def _send(self, number: int, site: Site, given: tuple[Any, ...]) -> None:
        live = self.calls.live.get(number)
        if live is None:
            return
        sent = self._functions.of(site)
        if site.window:
            Inflow(self.calls, number, live, sent.remote(*given), site.window).begin()
        elif len(given) > 2 and given[2] > 1:
            refs = sent.options(num_returns=given[2]).remote(*given)
            self.calls.watch(number, refs)
        else:
            self.calls.watch(number, (sent.remote(*given),))

    def _time(self, number: int, live: Live, site: Site, payload: bytes) -> None:
        spec = site.spec
        if spec.timeout is not None:
            late = partial(self._on_late, number, Call(site, payload, live.receiver))
            self.calls.ring(number, spec.timeout, late)

    def _on_late(self, number: int, call: Call) -> None:
        live = self.calls.live[number]
        self.cancel(number)
        self._far.forsake(live, call.tell_timeout())

    def take_lease(self, site: Site, receiver: LeaseReceiver) -> int:
        """Ask for a placement; see `Engine.take_lease`.

        Raises:
            MisuseError: it is a lease, which a Ray cluster cannot give.
        """
        if not site.spec.is_grouped:
            raise MisuseError(
                "aiogpu.lease() hands devices to processes that are not aiogpu's, "
                "which a Ray cluster cannot do. Use a node, or have a task start the "
                "process."
            )
        self.check_open()
        return self.placements.take(site, receiver)

    def demand(self, task: int, limit: int) -> None:
        """Let a stream yield so many items in all; see `Engine.demand`."""
        live = self.calls.live.get(task)
        if live is not None and isinstance(live.stop, Inflow):
            live.stop.rise(limit)

    def cancel(self, task: int) -> None:
        """Stop a task; see `Engine.cancel`."""
        live = self.calls.let_go(task)
        if live is None:
            self.placements.release(task)
        elif live.is_borrowed or live.goes_on:
            self.calls.ending.pop(task, None)
        elif live.stop is not None:
            stop, live.stop = live.stop, None
            stop()
        elif live.refs:
            self.calls.cancelling.cancel(live.refs[0])
            self.calls.ring(task, live.grace, partial(self._insist, task))

    def _insist(self, task: int) -> None:
        """It has not stopped in the time that it was given."""
        live = self.calls.ending.get(task)
        if live is not None and live.refs and not live.actor:
            self.calls.cancelling.cancel(live.refs[0], at_once=True)

    async def why(self, task: int) -> Why | None:
        """Return why a task waits; see `Engine.why`."""
        number = self.calls.of_actor(task)
        return await self.placements.why(number) or await super().why(number)

    def end_children(self) -> None:
        """The task has ended whose calls these are; all but those of actors end."""
        for number, live in list(self.calls.live.items()):
            (self.calls.forget if live.actor and live.refs else self.cancel)(number)

    async def close(self) -> None:
        """Stop what this program has running, and leave the cluster."""
        if self.pulse is not None:
            self.pulse.end()
        if self.is_open:
            self.is_open = False
            if self._actors is not None:
                self._actors.close()
            shut = NodeClosedError("the node of this placement was shut down.")
            self.placements.fail(shut)
            for number, live in list(self.calls.live.items()):
                receiver = live.receiver
                self.cancel(number)
                if receiver is not None:
                    error = f"the node was shut down before {live.name} had ended."
                    receiver.fail(NodeClosedError(error))
            await self._stopped()
            self.placements.close()
        await self._membership.leave()

    async def _look(self) -> None:
        """Look at the nodes: what has left may have been the last one that fits."""
        try:
            has_lost = await self.overview.look(BEAT)
        except NodeDiedError:
            return  # the next look at the head tells whether it has gone
        if has_lost:
            self._mark = object()
        self._infeasible.check(has_lost=has_lost)

    def _lose(self) -> None:
        """The cluster has gone: nothing of it will ever end."""
        self.is_open = False
        self._mark = object()
        self.lost = said = (
            f"the head of the Ray cluster has not answered for {LOST_AFTER:g} s, and "
            f"what ran there is lost. aiogpu.shutdown(), and init() once it is back."
        )
        if self._actors is not None:
            self._actors.lose(packed(RAISED, NodeDiedError(said)).failed)
        for number in list(self.calls.live):
            self.calls.fail(number, NodeDiedError(said))
        self.calls.ending.clear()
        self.placements.fail(NodeDiedError(said))
        self._membership.lose()

    async def _stopped(self) -> None:
        """Until all that was stopped has ended, within the time that it is given."""
        until = self.loop.time() + (0 if self._is_hasty else self.grace + 1)
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
            self.hasten()
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
        outlive()
        self._membership.disown()
