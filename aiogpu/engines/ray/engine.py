"""A Ray cluster as an engine: Ray places, moves and heals; the API stays as it is.

What is asked goes to Ray at once, and its ends come back by `Calls`. What Ray does not
do by itself is done here: a handle that nobody awaits any more is cancelled on the
cluster, a timeout counts from `.remote()`, and what can never run is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from aiogpu.engines.base import NodeOptions
from aiogpu.engines.ray import ray_api as ray
from aiogpu.engines.ray.cluster import BEAT, LOST_AFTER, Membership, Pulse
from aiogpu.engines.ray.errors import packed
from aiogpu.engines.ray.options import RemoteCode, Work, check_possible, options_of_task
from aiogpu.engines.ray.placement_groups import Placements
from aiogpu.engines.ray.status import Overview, Questions
from aiogpu.engines.ray.tasks import Calls, Inflow, Live
from aiogpu.engines.ray.values import (
    IN_STORE,
    Shared,
    kept_in,
    known,
    outlive,
    packed_here,
    shared_of,
    stored,
)
from aiogpu.errors import (
    InfeasibleError,
    MisuseError,
    NodeClosedError,
    NodeDiedError,
    TaskCancelledError,
)
from aiogpu.runtime.pending_tasks import Call
from aiogpu.serialization.exceptions import RAISED, pack_own_error
from aiogpu.serialization.references import PickledValue

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver
    from aiogpu.core.model.request import Request
    from aiogpu.engines.ray.actors import ClusterActors
    from aiogpu.observe.why import Why
    from aiogpu.runtime.callers.leases import LeaseReceiver
    from aiogpu.wire.messages import Failed


SITES: Final = 1024
"""Functions that are kept ready; beyond, Ray is told of the oldest anew."""


class Functions:
    """See above, for one engine."""

    def __init__(
        self, placements: Placements, overview: Overview, code: RemoteCode
    ) -> None:
        self._code = code
        self._placements = placements
        self._overview = overview
        self._sent: dict[int, Any] = {}

    def __repr__(self) -> str:
        return f"<Functions {len(self._sent)}>"

    def of(self, func: FunctionSpec) -> Any:
        """Return what Ray knows a function by."""
        found = self._sent.get(func.id)
        if found is None:
            work = Work(func, self._overview.kinds())
            run = (self._code.streamer if func.window else self._code.runner)(work)
            if len(self._sent) >= SITES:
                del self._sent[next(iter(self._sent))]
            request = func.spec.shape.request
            options = self._placements.placed(options_of_task(func), request)
            found = self._sent[func.id] = ray.function(run, options)
        return found


GIVE_UP_AFTER: Final = 300.0
"""Seconds without a node that fits, after which waiting calls fail."""


_log: Final = logging.getLogger(__name__)


class InfeasibleCalls:
    """The calls of one engine that no node fits any more, and since when."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine
        self._since: dict[int, float] = {}

    def __repr__(self) -> str:
        return f"<InfeasibleCalls {len(self._since)}>"

    def check(self, *, has_lost: bool) -> None:
        """Warn of calls that no node fits any more; fail those that waited too long.

        Args:
            has_lost: whether a node has left since the last check.
        """
        if not has_lost and not self._since:
            return
        engine = self._engine
        now, overview = engine.loop.time(), engine.overview
        fitting: dict[Request, bool] = {}
        since: dict[int, float] = {}
        warned: set[tuple[str, Request]] = set()
        for number, live in list(engine.calls.live.items()):
            request = live.request
            if request is None:
                continue
            if request not in fitting:
                fitting[request] = overview.fits(request)
            if fitting[request]:
                continue
            since[number] = self._since.get(number, now)
            if number not in self._since and (live.name, request) not in warned:
                warned.add((live.name, request))
                self._warn(live.name, request)
        self._since = since
        if not overview.grows:
            for number in [one for one in since if now - since[one] >= GIVE_UP_AFTER]:
                self._fail(number)

    def _warn(self, name: str, request: Request) -> None:
        overview = self._engine.overview
        then = f"It fails after {GIVE_UP_AFTER:g} s unless such a node joins."
        if overview.grows:
            then = "It waits for the cluster's autoscaler to start one."
        _log.warning(
            "%s asks for %s, and the last node of the Ray cluster that could give it "
            "has left: %s. %s",
            *(name, request, overview.lacking(request), then),
        )

    def _fail(self, number: int) -> None:
        engine = self._engine
        del self._since[number]
        live = engine.calls.live.get(number)
        if live is None or live.request is None:
            return
        error = InfeasibleError(
            f"{live.name} asks for {live.request}, and no node of this Ray cluster "
            f"could give it for {GIVE_UP_AFTER:g} s, since the last one that could has "
            f"left: {engine.overview.lacking(live.request)}. Ask for less, or add a "
            f"node."
        )
        if live.actor:
            engine.actors.give_up(live.actor, error)
            return
        receiver = live.receiver
        engine.cancel(number)
        if receiver is not None:
            receiver.fail(error)
        engine.remote_values.forsake(live, error)


class ClusterValues:
    """See above."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine

    def __repr__(self) -> str:
        return f"<ClusterValues of {self._engine!r}>"

    @property
    def remote_values(self) -> ClusterValues:
        """Whose way to values this is."""
        return self

    @property
    def loans(self) -> ClusterValues:
        """What was lent to this process."""
        return self

    @property
    def shares(self) -> ClusterValues:
        """What it gives to others."""
        return self

    @property
    def link(self) -> ClusterValues:
        """The way to values."""
        return self

    @property
    def loop(self) -> AbstractEventLoop:
        """The event loop."""
        return self._engine.loop

    def loan(self, identity: int) -> Shared:
        """The value to which a handle is being unpickled."""
        return known(identity)

    def share(self, handle: Any) -> Shared:
        """Return what others refer to who are given a handle."""
        calls = self._engine.calls
        shared = shared_of(handle, calls.ref_of)
        self._note(handle, shared)
        if shared.is_promised:
            # It waits itself for what it was given.
            def settle() -> None:
                shared.take_over(shared_of(handle, calls.ref_of))

            calls.when_sent(handle.child, settle)
        return shared

    def promise(self) -> Shared:
        """The same before its task is started."""
        return Shared()

    def keep(self, shared: Shared, handle: Any) -> None:
        """The task of what was promised is started."""
        known_by_now = self.share(handle)
        self._note(handle, shared)
        known_by_now.when_known(lambda: shared.take_over(known_by_now))

    def _note(self, handle: Any, shared: Shared) -> None:
        """Have it forsaken with its call."""
        live = self._engine.calls.live.get(handle.child)
        if live is not None:
            live.shares.append(shared)

    def fail(self, shared: Shared, error: BaseException) -> None:
        """The task of what was promised is never started."""
        shared.fail(error)

    def drop(self, child: int, shared: Shared) -> None:
        """One of several results is cancelled: who needs it is told.

        Calls of other processes that were sent it already are given it.
        """
        error = TaskCancelledError("one of several results was cancelled.")
        shared.forsake(error)
        live = self._engine.calls.live.get(child)
        if live is not None:
            self.forsake(live, error, shared.part)

    def forsake(self, live: Live, error: Exception, part: int = -1) -> None:
        """A call's results will not be wanted any more, or one of them.

        What was sent to Ray and needs them is told at once, and stopped: Ray would
        tell it in other words, or not at all.
        """
        failed = pack_own_error(error)
        forsaken = [(live, part)]
        while forsaken:
            one, part = forsaken.pop()
            for shared in one.shares:
                if part in (-1, shared.part):
                    shared.forsake(error)
            for number, needed in one.needed_by:
                dependent = self._engine.calls.live.get(number)
                if dependent is None or part not in (-1, needed):
                    continue
                forsaken.append((dependent, -1))
                receiver = dependent.receiver
                self._engine.cancel(number)
                if receiver is not None:
                    receiver.reject(failed)

    def put(self, payload: bytes) -> Shared:
        """Have a value kept."""
        shared = Shared()
        shared.take(payload)
        return shared

    def fetch(self, value: int, receiver: Any) -> int:
        """Ask for a value; gives the question's number."""
        shared, calls = known(value), self._engine.calls
        live = Live("a value", receiver, self.loop.time())
        number = calls.begin(live)
        fetch = partial(self._fetch, shared, number)
        if shared.failed is None and shared.payload is None and shared.ref is not None:
            fetch()
        else:
            # Not at once: whoever asks notes the number first.
            calls.post(lambda: shared.when_known(fetch))
        return number

    def _fetch(self, shared: Shared, number: int) -> None:
        calls = self._engine.calls
        live = calls.live.get(number)
        if live is None:
            return
        failed, payload = shared.failed, shared.payload
        if failed is not None:
            calls.end(number, lambda receiver: receiver.reject(failed))
        elif payload is not None:
            calls.end(number, lambda receiver: receiver.receive(payload))
        else:
            live.is_borrowed = True
            calls.watch(number, (shared.as_ref(),))

    def discard(self, value: int) -> None:
        """Nobody wants a value any more: stop whoever makes it."""
        shared = known(value)
        if shared.ref is not None:
            self._engine.calls.cancelling.cancel(shared.ref)

    def cancel(self, task: int) -> None:
        """Nobody wants an answer any more."""
        self._engine.cancel(task)

    async def why(self, name: str, task: int) -> Why:
        """Say why a task waits."""
        from aiogpu.observe.why import Why

        return await self._engine.why(task) or Why(name, task, "ended")

    def begin_wait(self, task: int) -> None:
        """Some code waits for a task: the loop itself tells Ray so, when it is idle."""

    def end_wait(self, task: int) -> None:
        """It waits no longer."""

    def settle(self, task: int) -> None:
        """A task has ended."""

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make the payload of what this process sends; see `Engine.pack`.

        What is large goes into Ray's store at once, so that it is what it was now.
        """
        payload = packed_here(outgoing)
        kept = kept_in(payload)
        assert kept is not None, payload
        is_late = any(one.is_promised for one in kept.references)
        if outgoing.is_large and self._engine.is_open and not is_late:
            kept.ref = ray.keep(stored(payload))
            contents = payload.contents._replace(
                stream=b"", buffers=(), segment=IN_STORE
            )
            payload.contents = contents
        elif outgoing.buffers:
            copied = tuple(map(bytes, outgoing.buffers))
            payload.contents = payload.contents._replace(buffers=copied)
        return payload


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
        code: RemoteCode,
    ) -> None:
        self.code = code
        self.calls = Calls(loop)
        self._remote_values = ClusterValues(self)
        self._membership = Membership(options)
        self.grace = options.cancel_grace
        self._mark = object()
        super().__init__(Overview(self.calls), loop)
        self.placements = Placements(self)
        self._functions = Functions(self.placements, self.overview, code)
        self._actors: ClusterActors | None = None
        self._is_hasty = False
        self._infeasible = InfeasibleCalls(self)

    @classmethod
    def inside(cls, loop: asyncio.AbstractEventLoop, code: RemoteCode) -> RayEngine:
        """The engine of a task's own code, in a process that Ray has started."""
        engine = cls(NodeOptions(), loop, code)
        engine.is_open = engine.is_inside = True
        return engine

    def __repr__(self) -> str:
        return f"<RayEngine {self._membership!r} {self.calls!r}>"

    @property
    def remote_values(self) -> ClusterValues:
        """Who knows values that are not here; see `Engine.remote_values`."""
        return self._remote_values

    @property
    def actors(self) -> ClusterActors:
        """The cluster's actors; see `Engine.actors`."""
        if self._actors is None:
            from aiogpu.engines.ray.actors import ClusterActors

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
        """Left on functions that were checked."""
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
        return self._remote_values.pack(outgoing)

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a task; see `Engine.submit`."""
        if func.checked_by is not self._mark:
            self.admit(func)
        name, request = func.spec.name, func.spec.shape.request
        live = Live(name, receiver, self.loop.time(), request=request)
        grace = func.spec.cancel_grace
        live.grace = self.grace if grace is None else grace
        number = self.calls.begin(live)
        if func.spec.is_grouped and (error := self.placements.refusal(func)):
            self.calls.fail(number, error)
            return number
        self._time(number, live, func, payload)
        if type(payload) is bytes and not func.window:
            self.calls.watch(number, (self._functions.of(func).remote(payload),))
        else:
            self.send(number, payload, partial(self._send, number, func))
        return number

    def admit(self, func: FunctionSpec) -> None:
        """Check what is the same for all calls of a function.

        Raises:
            OptionError: it asks for what Ray cannot do.
            InfeasibleError: the cluster can never give what it asks for.
            NodeClosedError: the cluster was left.
        """
        self.check_open()
        check_possible(func)
        self.overview.check_feasible(func)
        func.checked_by = self._mark

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

    def _send(self, number: int, func: FunctionSpec, given: tuple[Any, ...]) -> None:
        live = self.calls.live.get(number)
        if live is None:
            return
        sent = self._functions.of(func)
        if func.window:
            Inflow(self.calls, number, live, sent.remote(*given), func.window).begin()
        elif len(given) > 2 and given[2] > 1:
            refs = sent.options(num_returns=given[2]).remote(*given)
            self.calls.watch(number, refs)
        else:
            self.calls.watch(number, (sent.remote(*given),))

    def _time(
        self, number: int, live: Live, func: FunctionSpec, payload: bytes
    ) -> None:
        spec = func.spec
        if spec.timeout is not None:
            late = partial(self._on_late, number, Call(func, payload, live.receiver))
            self.calls.ring(number, spec.timeout, late)

    def _on_late(self, number: int, call: Call) -> None:
        live = self.calls.live[number]
        self.cancel(number)
        self._remote_values.forsake(live, call.tell_timeout())

    def take_lease(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Ask for a placement; see `Engine.take_lease`.

        Raises:
            MisuseError: it is a lease, which a Ray cluster cannot give.
        """
        if not func.spec.is_grouped:
            raise MisuseError(
                "aiogpu.lease() hands devices to processes that are not aiogpu's, "
                "which a Ray cluster cannot do. Use a node, or have a task start the "
                "process."
            )
        self.check_open()
        return self.placements.take(func, receiver)

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
