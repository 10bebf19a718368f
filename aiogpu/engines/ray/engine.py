"""A Ray cluster as an engine: Ray places tasks, moves values, and heals.

What is asked goes to Ray at once, and the ends come back by `Calls`. What Ray does not
do by itself is done here: a handle that nobody awaits any more is cancelled on the
cluster, a timeout counts from `.remote()`, and what can never run is refused.
"""

from __future__ import annotations

import asyncio
import logging
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

from aiogpu.core.scheduler.placement_groups import REMOVED
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.ray import cluster, status
from aiogpu.engines.ray.actors import RayActors
from aiogpu.engines.ray.cluster import connection
from aiogpu.engines.ray.errors import actor_death
from aiogpu.engines.ray.options import check_possible, task_options
from aiogpu.engines.ray.placement_groups import PlacementGroups
from aiogpu.engines.ray.status import Overview
from aiogpu.engines.ray.task_worker import RemoteCode, make_runner
from aiogpu.engines.ray.tasks import Calls, PendingCall, RayValues, Stream
from aiogpu.engines.ray.values import forget_after_fork, pack_copy
from aiogpu.errors import (
    InfeasibleError,
    MisuseError,
    NodeClosedError,
    NodeDiedError,
    NodeError,
    NoSuchTaskError,
)
from aiogpu.runtime.callers.leases import removed
from aiogpu.runtime.pending_tasks import too_late
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.worker.nested import abandoned

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver
    from aiogpu.core.model.request import PlacementGroupSpec, Request
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why
    from aiogpu.runtime.callers.leases import LeaseReceiver
    from aiogpu.serialization.references import PickledValue

_log: Final = logging.getLogger(__name__)

LOOK_INTERVAL: Final = 2.0
"""Seconds between two looks at the cluster's head and its nodes."""
LOST_AFTER: Final = 30.0
"""Seconds without a head after which the cluster is given up; a head that restarts is
back by then. Ray ends the program after 60 s, and leaving takes up to 20 s."""
GIVE_UP_AFTER: Final = 300.0
"""Seconds without a node that fits, after which what waits for one fails."""
UNTOLD: Final = "its wait counts, and Ray does not tell how long that was"
"""How long a task has waited that a cluster runs, in the words of its timeout."""
FUNCTIONS: Final = 1024
"""Remote functions that are kept; Ray is told anew of those not used for longest."""


class RayEngine:
    """The engine of a program on a Ray cluster, or of a process in it that Ray runs.

    Attributes:
        calls: what runs.
        overview: the nodes of the cluster.
        actors: its actors.
        lost: why the cluster is taken for lost; None while it is not.
    """

    waits = None
    home = ""

    def __init__(self, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> None:
        self.calls = Calls(loop)
        self.remote_values = RayValues(self.calls)
        self.overview = Overview()
        self.lost: str | None = None
        self._loop = loop
        self._options = options
        self._grace = options.cancel_grace
        self._groups = PlacementGroups(self.calls, self.overview, self._evict)
        self.actors = RayActors(
            self.calls,
            self._groups,
            self.overview,
            self._check_open,
            self._admit,
            RayEngine.inside,
        )
        self._function = lru_cache(FUNCTIONS)(self._new_function)
        self._is_open = self._is_hasty = False
        self._is_head_missed = False
        self._watch_task: asyncio.Task[None] | None = None
        self._mark = object()  # left on functions that were checked

    @classmethod
    def inside(cls, loop: asyncio.AbstractEventLoop) -> RayEngine:
        """Make the engine of a process that Ray has started."""
        engine = cls(NodeOptions(), loop)
        engine._is_open = True
        return engine

    def __repr__(self) -> str:
        return f"<RayEngine {self.calls!r}>"

    @property
    def has_gone(self) -> bool:
        """True if the cluster has gone; see `Engine.has_gone`."""
        return self.lost is not None

    # Opening and watching

    async def open(self) -> None:
        """Join the cluster, or start one."""
        await connection.open(self, self._options)
        try:
            await self.overview.look()
        except BaseException:
            await connection.close(self)
            raise
        self._watch_task = self._loop.create_task(self._watch(cluster.head_address()))
        self._is_open = True

    async def _watch(self, head: str) -> None:
        """Look at the head and the nodes, and leave a cluster that has lost its head.

        Ray's own calls wait for a head that has gone, without end; and after a minute
        Ray ends the program.
        """
        seen = self._loop.time()
        while self._loop.time() - seen < LOST_AFTER:
            try:
                await cluster.check_reachable(head, LOST_AFTER / 3)
            except NodeError:
                self._is_head_missed = True
            else:
                self._is_head_missed = False
                seen = self._loop.time()
                await self._look()
            await asyncio.sleep(LOOK_INTERVAL)
        self._watch_task = None
        self._lose()

    async def _look(self) -> None:
        try:
            has_lost = await self.overview.look(LOOK_INTERVAL)
        except NodeDiedError:
            return  # the next look at the head tells whether it has gone
        if has_lost:
            self._mark = object()
            self._warn_of_unfit()

    def _warn_of_unfit(self) -> None:
        """Warn of requests that no node fits any more, and fail them if that stays so.

        Ray lets it wait without a word. A node often comes back, after a restart say.
        """
        unfit = [
            (number, call.name, call.request)
            for number, call in self.calls.live.items()
            if call.request is not None and not self.overview.may_run(call.request)
        ]
        for name, request in {one[1:] for one in unfit}:
            _log.warning(
                "%s asks for %s, and the last node of the Ray cluster that could give "
                "it has left. It fails after %g s unless such a node joins.",
                *(name, request, GIVE_UP_AFTER),
            )
        for number, _, request in unfit:
            self._loop.call_later(GIVE_UP_AFTER, self._give_up, number, request)

    def _give_up(self, number: int, request: Request) -> None:
        call = self.calls.live.get(number)
        if call is None or self.overview.may_run(request):
            return
        error = InfeasibleError(
            f"{call.name} asks for {request}, and no node of this Ray cluster could "
            f"give it for {GIVE_UP_AFTER:g} s, since the last one that could has left. "
            f"Ask for less, or add a node."
        )
        if call.actor:
            self.actors.held(call.actor).evict(error)
            return
        self.calls.revoke(number, error)

    def _lose(self) -> None:
        """Fail all calls: nothing of them will ever end."""
        self._is_open = False
        self._mark = object()
        self.lost = message = (
            f"the head of the Ray cluster has not answered for {LOST_AFTER:g} s, and "
            f"what ran there is lost. aiogpu.shutdown(), and init() once it is back."
        )
        error = NodeDiedError(message)
        self.actors.lose(pack_own_error(error))
        for number in list(self.calls.live):
            self.calls.end(number, NodeDiedError(message))
        self.calls.ending.clear()
        self._groups.fail(error)
        connection.lose(self)

    def _check_open(self) -> None:
        """Raise the error of a cluster that has gone.

        Raises:
            NodeDiedError: it has gone.
            NodeClosedError: it was left.
        """
        if self.lost is not None:
            raise NodeDiedError(self.lost)
        if not self._is_open:
            raise NodeClosedError("this program has shut down its tie to the cluster.")

    # Tasks

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload; see `Engine.pack`.

        What is large goes into Ray's store at once, so that it is what it was now.
        """
        return pack_copy(outgoing, may_store=self._is_open)

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a task; see `Engine.submit`."""
        self._admit(func)
        spec, calls = func.spec, self.calls
        request = spec.shape.request
        call = PendingCall(
            *(spec.name, receiver, self._loop.time()),
            request=request,
            group=request.placement_group,
            grace=self._grace if spec.cancel_grace is None else spec.cancel_grace,
        )
        number = calls.begin(call)
        if spec.is_grouped and (error := self._groups.refusal(func)):
            calls.end(number, error)
            return number
        if spec.timeout is not None:
            late = partial(calls.revoke, number, too_late(spec, UNTOLD))
            calls.call_later(spec.timeout, late, number)
        calls.when_ready(number, payload, partial(self._send, number, func))
        return number

    def _admit(self, func: FunctionSpec) -> None:
        """Check what is the same for all calls of a function, once.

        Raises:
            OptionError: it asks for what Ray cannot do.
            InfeasibleError: the cluster can never give what it asks for.
            NodeError: the cluster is not there any more.
        """
        if func.checked_by is self._mark:
            return
        self._check_open()
        check_possible(func)
        self.overview.check_request(func.spec.name, func.spec.shape.request)
        func.checked_by = self._mark

    def _new_function(self, func: FunctionSpec) -> Any:
        """Make what Ray knows a function by."""
        run = make_runner(
            RemoteCode(func, RayEngine.inside), is_stream=bool(func.window)
        )
        request = func.spec.shape.request
        options = self._groups.add_strategy(task_options(func), request)
        return cluster.remote(run, options)

    def _send(self, number: int, func: FunctionSpec, given: tuple[Any, ...]) -> None:
        if number not in self.calls.live:
            return
        function = self._function(func)
        if func.window:
            Stream(self.calls, number, function.remote(*given), func.window)
        elif len(given) > 2 and given[2] > 1:
            refs = function.options(num_returns=given[2]).remote(*given)
            self.calls.watch(number, refs)
        else:
            self.calls.watch(number, (function.remote(*given),))

    def demand(self, task: int, limit: int) -> None:
        """Let a stream yield so many items in all; see `Engine.demand`."""
        self.calls.demand(task, limit)

    def cancel(self, task: int) -> None:
        """Stop a task; see `Engine.cancel`."""
        self.calls.cancel(task)
        self._groups.remove(task)

    def end_children(self) -> None:
        """Stop the tasks that an ended task has left; calls of actors go on."""
        for number, call in list(self.calls.live.items()):
            goes_on = call.actor and call.refs
            stop = self.calls.end if goes_on else self.calls.cancel
            stop(number, abandoned(call.name))

    # Placement groups

    def take_lease(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Ask for a placement group; see `Engine.take_lease`.

        Raises:
            MisuseError: it is a lease, which a Ray cluster cannot give.
        """
        if not func.spec.is_grouped:
            raise MisuseError(
                "aiogpu.lease() hands devices to processes that are not aiogpu's, "
                "which a Ray cluster cannot do. Use a node, or have a task start the "
                "process."
            )
        self._check_open()
        return self._groups.create(func, receiver)

    def _evict(self, group: PlacementGroupSpec) -> None:
        """Tell all that run in a group that it is being removed, and stop them."""
        self.actors.evict(group)
        for number, call in list(self.calls.live.items()):
            if call.group is None or call.group.key != group.key:
                continue
            error: Exception = removed(group.name, call.name, REMOVED)
            if call.actor:
                error = actor_death(call.name, error)
            self.calls.cancel(number, error)

    # Questions

    async def total(self) -> dict[str, float]:
        """Return all resources by name."""
        self._check_asked()
        await self.overview.look()
        return await status.total_resources()

    async def available(self) -> dict[str, float]:
        """Return what is free of each."""
        self._check_asked()
        return await status.free_resources(await status.total_resources())

    async def status(self) -> NodeStatus:
        """Return what the cluster has, and what this program has running."""
        self._check_asked()
        return await status.status(self.calls)

    async def why(self, task: int) -> Why | None:
        """Return what is known of a call, an actor or a group; see `Engine.why`."""
        self._check_asked()
        of_actor = (n for n, call in self.calls.live.items() if call.actor == task)
        number = next(of_actor, task)
        return self._groups.why(number) or self.calls.why(number)

    async def why_task(self, number: int) -> Why | None:
        """Return the same for a number of `status()`; see `Engine.why_task`.

        Raises:
            NoSuchTaskError: it has ended, or never was.
        """
        told = await self.why(number)
        if told is None:
            raise NoSuchTaskError(
                f"this program has no task {number} on the Ray cluster that waits or "
                f"runs. What has become of tasks that have ended is not kept there: "
                f"their handles know it."
            )
        return told

    def _check_asked(self) -> None:
        self._check_open()
        if self._is_head_missed:
            # A question without an answer would have Ray end this program.
            raise NodeDiedError("the head of the Ray cluster does not answer now.")

    # Closing

    def announce_stop(self) -> None:
        """Do nothing: tasks on Ray hear of it when they are cancelled."""

    async def close(self) -> None:
        """Stop what this program has running, and leave the cluster."""
        if self._watch_task is not None:
            self._watch_task.cancel()
        if self._is_open:
            self._is_open = False
            self.actors.close()
            shut = NodeClosedError("the node of this placement was shut down.")
            self._groups.fail(shut)
            for number, call in list(self.calls.live.items()):
                message = f"the node was shut down before {call.name} had ended."
                self.calls.cancel(number, NodeClosedError(message))
            await self._stopped()
            self._groups.close()
        await connection.close(self)

    async def _stopped(self) -> None:
        """Wait until what was stopped has ended, or its grace has passed."""
        changed = asyncio.Event()
        self.calls.on_delivered = changed.set
        try:
            async with asyncio.timeout(0 if self._is_hasty else self._grace + 1):
                while self.calls.ending:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            self.force_close()
        finally:
            self.calls.on_delivered = None

    def force_close(self) -> None:
        """Close without a grace period; see `Engine.force_close`."""
        self._is_hasty = True
        for task in list(self.calls.ending):
            self.calls.kill(task)

    def close_now(self) -> None:
        """Leave the cluster without an event loop; see `Engine.close_now`."""
        connection.close_now(self)

    def after_fork(self) -> None:
        """Forget the cluster in a fork, which has none of Ray's threads."""
        self._is_open = False
        forget_after_fork()
