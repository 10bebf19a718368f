"""A Ray cluster as an engine: Ray places tasks, moves values, and handles failures.

Requests go to Ray at once, and outcomes come back by `Calls`. This module adds features
that Ray lacks: a dropped handle cancels its task on the cluster, a timeout counts from
`.remote()`, and infeasible requests are refused.
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
"""Seconds between two checks of the cluster's head and its nodes."""
LOST_AFTER: Final = 30.0
"""Seconds without a head after which the cluster counts as lost; a restarted head is
back by then. Ray ends the program after 60 s, and leaving takes up to 20 s."""
GIVE_UP_AFTER: Final = 300.0
"""Seconds without a fitting node after which the waiting tasks fail."""
UNTOLD: Final = "its wait counts, and Ray does not tell how long that was"
"""Text about the waiting time in the timeout error of a task on a cluster."""
FUNCTIONS: Final = 1024
"""Cached remote functions; evicted functions are registered at Ray again."""


class RayEngine:
    """The engine of a program on a Ray cluster, or of a process that Ray runs.

    Attributes:
        calls: the unfinished calls.
        overview: the nodes of the cluster.
        actors: the actors of the cluster.
        lost: why the cluster counts as lost; None while it does not.
    """

    waits = None
    runs_together = False
    home = ""

    def promise_actor(self) -> int:
        """Return 0: Ray chooses the ids; see `Engine.promise_actor`."""
        return 0

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
        self._mark = object()  # marks functions that were checked

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
        """Check the head and the nodes, and leave a cluster that has lost its head.

        Ray's own calls wait for a lost head without end, and after a minute Ray ends
        the program.
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
            return  # the next check of the head shows whether it has gone
        if has_lost:
            self._mark = object()
            self._warn_of_unfit()

    def _warn_of_unfit(self) -> None:
        """Warn about requests that no longer fit a node, and fail them after a while.

        Ray lets them wait silently. A node often comes back, for example after a
        restart.
        """
        unfit = [
            (number, call.name, call.request)
            for number, call in self.calls.live.items()
            if call.request is not None and not self.overview.may_run(call.request)
        ]
        for name, request in {(name, request) for _, name, request in unfit}:
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
        """Fail all calls: none of them will ever end."""
        self._is_open = False
        self._mark = object()
        self.lost = message = (
            f"the head of the Ray cluster has not answered for {LOST_AFTER:g} s, and "
            f"all its tasks are lost. Call aiogpu.shutdown(), and init() again once it "
            f"is back."
        )
        error = NodeDiedError(message)
        self.actors.lose(pack_own_error(error))
        for number in list(self.calls.live):
            self.calls.end(number, NodeDiedError(message))
        self.calls.ending.clear()
        self._groups.fail(error)
        connection.lose(self)

    def _check_open(self) -> None:
        """Check that the cluster is usable.

        Raises:
            NodeDiedError: the cluster has gone.
            NodeClosedError: this program has left the cluster.
        """
        if self.lost is not None:
            raise NodeDiedError(self.lost)
        if not self._is_open:
            raise NodeClosedError("this program has left the Ray cluster.")

    # Tasks

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload; see `Engine.pack`.

        A large value is put into Ray's store at once, so later changes do not affect
        it.
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
        """Check a function once for all its calls.

        Raises:
            OptionError: Ray does not support an option of the function.
            InfeasibleError: the cluster can never meet the request.
            NodeError: the cluster has gone.
        """
        if func.checked_by is self._mark:
            return
        self._check_open()
        check_possible(func)
        self.overview.check_request(func.spec.name, func.spec.shape.request)
        func.checked_by = self._mark

    def _new_function(self, func: FunctionSpec) -> Any:
        """Make Ray's remote function for a function."""
        run = make_runner(
            RemoteCode(func, RayEngine.inside), is_stream=bool(func.window)
        )
        request = func.spec.shape.request
        options = self._groups.add_strategy(task_options(func), request)
        return cluster.remote(run, options)

    def _send(
        self, number: int, func: FunctionSpec, arguments: tuple[Any, ...]
    ) -> None:
        if number not in self.calls.live:
            return
        function = self._function(func)
        if func.window:
            Stream(self.calls, number, function.remote(*arguments), func.window)
        elif len(arguments) > 2 and arguments[2] > 1:
            refs = function.options(num_returns=arguments[2]).remote(*arguments)
            self.calls.watch(number, refs)
        else:
            self.calls.watch(number, (function.remote(*arguments),))

    def demand(self, task: int, limit: int) -> None:
        """Set a stream's number of items; see `Engine.demand`."""
        self.calls.demand(task, limit)

    def cancel(self, task: int) -> None:
        """Stop a task; see `Engine.cancel`."""
        self.calls.cancel(task)
        self._groups.remove(task)

    def end_children(self) -> None:
        """Stop the children of an ended task; calls of actors go on."""
        for number, call in list(self.calls.live.items()):
            goes_on = call.actor and call.refs
            stop = self.calls.end if goes_on else self.calls.cancel
            stop(number, abandoned(call.name))

    # Placement groups

    def take_lease(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Request a placement group; see `Engine.take_lease`.

        Raises:
            MisuseError: the request is a lease, which a Ray cluster does not support.
        """
        if not func.spec.is_grouped:
            raise MisuseError(
                "aiogpu.lease() gives devices to processes that aiogpu did not start, "
                "which a Ray cluster cannot do. Use an aiogpu node, or start the "
                "process in a task."
            )
        self._check_open()
        return self._groups.create(func, receiver)

    def _evict(self, group: PlacementGroupSpec) -> None:
        """Stop and fail all calls and actors in a group that is being removed."""
        self.actors.evict(group)
        for number, call in list(self.calls.live.items()):
            if call.group is None or call.group.key != group.key:
                continue
            error: Exception = removed(group.name, call.name, REMOVED)
            if call.actor:
                error = actor_death(call.name, error)
            self.calls.cancel(number, error)

    # Queries

    async def total(self) -> dict[str, float]:
        """Return all resources by name."""
        self._check_answering()
        await self.overview.look()
        return await status.total_resources()

    async def available(self) -> dict[str, float]:
        """Return the free amount of each resource."""
        self._check_answering()
        return await status.free_resources(await status.total_resources())

    async def status(self) -> NodeStatus:
        """Return the cluster's resources, and this program's calls."""
        self._check_answering()
        return await status.status(self.calls)

    async def why(self, task: int) -> Why | None:
        """Return the state of a call, an actor or a group; see `Engine.why`."""
        self._check_answering()
        of_actor = (n for n, call in self.calls.live.items() if call.actor == task)
        number = next(of_actor, task)
        return self._groups.why(number) or self.calls.why(number)

    async def why_task(self, number: int) -> Why | None:
        """Return the same for a number of `status()`; see `Engine.why_task`.

        Raises:
            NoSuchTaskError: the task has ended or never existed.
        """
        state = await self.why(number)
        if state is None:
            raise NoSuchTaskError(
                f"this program has no task {number} on the Ray cluster that waits or "
                f"runs. The cluster keeps no outcomes of ended tasks: ask their "
                f"handles."
            )
        return state

    def _check_answering(self) -> None:
        self._check_open()
        if self._is_head_missed:
            # After a query without an answer, Ray would end this program.
            raise NodeDiedError("the head of the Ray cluster does not answer now.")

    # Closing

    def announce_stop(self) -> None:
        """Do nothing: tasks on Ray are informed by their cancellation."""

    async def close(self) -> None:
        """Stop this program's calls and actors, and leave the cluster."""
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
        """Wait until stopped calls have ended, or their grace period is over."""
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
