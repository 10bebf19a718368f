"""A Ray cluster as an engine: Ray places tasks, moves values, and handles failures.

Requests go to Ray at once, and outcomes come back by `Calls`. This module adds features
that Ray lacks: a dropped handle cancels its task on the cluster, a timeout counts from
`.remote()`, and infeasible requests are refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiogpu.core.model.request import (
    STRICT_PACK,
    STRICT_SPREAD,
    BundleRef,
    PlacementGroupSpec,
    Request,
)
from aiogpu.core.model.text import span
from aiogpu.core.model.units import TYPE_PREFIX, TYPE_SHARE
from aiogpu.core.scheduler.placement_groups import REMOVED, UNKNOWN
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.ray import cluster, values
from aiogpu.engines.ray.actor_process import process_class
from aiogpu.engines.ray.actors import RayActors, describe
from aiogpu.engines.ray.calls import Calls, PendingCall, RayValues, Stream
from aiogpu.engines.ray.cluster import Handle, connection
from aiogpu.engines.ray.process import RemoteCode, make_runner
from aiogpu.engines.ray.resources import (
    Overview,
    actor_options,
    bundle_of,
    check_possible,
    public_resources,
    refuse,
    task_options,
    with_gpu_share,
)
from aiogpu.errors import (
    InfeasibleError,
    MisuseError,
    NodeClosedError,
    NodeDiedError,
    NodeError,
    TaskTimeoutError,
)
from aiogpu.observe.snapshot import LISTED
from aiogpu.observe.status import Machine, NodeStatus, TaskStatus
from aiogpu.observe.why import Why
from aiogpu.runtime.callers.leases import removed
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.worker.nested import abandoned

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver
    from aiogpu.core.model.request import TaskSpec
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
CACHED: Final = 1024
"""Cached remote functions and groups; evicted functions are registered at Ray again."""


class _Group(NamedTuple):
    """A placement group that this program has requested and not removed."""

    spec: PlacementGroupSpec
    receiver: Receiver
    creation: asyncio.Task[None]


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
    node_socket = ""
    home = ""

    def __init__(
        self,
        options: NodeOptions,
        loop: asyncio.AbstractEventLoop,
        *,
        is_in_task: bool = False,
    ) -> None:
        self.calls = Calls(loop)
        self.remote_values = RayValues(self.calls)
        self.overview = Overview(is_in_task=is_in_task)
        self.lost: str | None = None
        self._loop = loop
        self._options = options
        self._own: dict[int, _Group] = {}
        self._groups: dict[str, Any] = {}  # Ray's placement groups, by key
        self.actors = RayActors(self.calls, self)
        self._function = lru_cache(CACHED)(self._new_function)
        self._class = lru_cache(CACHED)(self._new_class)
        self._is_open = is_in_task
        self._is_hasty = self._is_head_missed = False
        self._watch_task: asyncio.Task[None] | None = None
        self._mark = object()  # marks functions that were checked

    @classmethod
    def inside(cls, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> RayEngine:
        """Make the engine of a process that Ray has started."""
        return cls(options, loop, is_in_task=True)

    def __repr__(self) -> str:
        return f"<RayEngine {self.calls!r}>"

    @property
    def has_gone(self) -> bool:
        """True if the cluster has gone; see `Engine.has_gone`."""
        return self.lost is not None

    def promise_actor(self) -> int:
        """Return 0: Ray chooses the ids; see `Engine.promise_actor`."""
        return 0

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
                self._is_head_missed = False
                seen = self._loop.time()
                if await self.overview.look(LOOK_INTERVAL):
                    self._mark = object()
                self._give_up_unfit()
            except NodeDiedError:
                pass  # the next check of the head shows whether it has gone
            except NodeError:
                self._is_head_missed = True
            await asyncio.sleep(LOOK_INTERVAL)
        self._watch_task = None
        self._lose()

    def _give_up_unfit(self) -> None:
        """Warn about calls that no longer fit a node, and fail them after a while.

        Ray lets them wait silently. A node often comes back, for example after a
        restart.
        """
        now, warned = self._loop.time(), set()
        for number, call in list(self.calls.live.items()):
            request = call.request
            if request is None or self.overview.may_run(request):
                call.unfit_since = 0.0
            elif not call.unfit_since:
                call.unfit_since = now
                if (call.name, request) not in warned:
                    warned.add((call.name, request))
                    _log.warning(
                        "%s asks for %s, and the last node of the Ray cluster that "
                        "could give it has left. It fails after %g s unless such a "
                        "node joins.",
                        call.name,
                        request,
                        GIVE_UP_AFTER,
                    )
            elif now - call.unfit_since >= GIVE_UP_AFTER:
                error = InfeasibleError(
                    f"{call.name} asks for {request}, and no node of this Ray cluster "
                    f"could give it for {GIVE_UP_AFTER:g} s, since the last one that "
                    f"could has left. Ask for less, or add a node."
                )
                if call.actor:
                    self.actors.held(call.actor).evict(error)
                else:
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
        self._fail_groups(error)
        connection.lose(self)

    def check_open(self) -> None:
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
        return values.pack_copy(outgoing, may_store=self._is_open)

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a task; see `Engine.submit`."""
        request = self._admit(func)
        spec, calls = func.spec, self.calls
        call = PendingCall(
            name=spec.name,
            receiver=receiver,
            since=self._loop.time(),
            request=request,
            group=request.placement_group,
            grace=self._options.cancel_grace
            if spec.cancel_grace is None
            else spec.cancel_grace,
        )
        number = calls.begin(call)
        if spec.timeout is not None:
            late = partial(calls.revoke, number, _too_late(spec))
            call.timer = self._loop.call_later(spec.timeout, late)
        send = partial(self._send, number, func)
        if self.needs_lookup(func):
            later = self._send_in_group(number, func, payload, send)
            call.sending = self._loop.create_task(later)
        else:
            calls.when_ready(number, payload, send)
        return number

    def _admit(self, func: FunctionSpec) -> Request:
        """Check a function once for all its calls; return its request for Ray.

        Raises:
            OptionError: Ray does not support an option of the function.
            InfeasibleError: the cluster can never meet the request.
            NodeError: the cluster has gone.
        """
        request = func.spec.shape.request
        if request.gpu_memory:
            request = with_gpu_share(request, self._options.gpu_memory)
        if func.checked_by is not self._mark:
            self.check_open()
            check_possible(func, self._options.gpu_memory)
            self.overview.check_request(func.spec.name, request)
            func.checked_by = self._mark
        return request

    def _code(self, func: FunctionSpec) -> RemoteCode:
        resources = func.resources
        if func.spec.shape.request.gpu_memory:
            resources = self._admit(func).as_numbers()
        options = NodeOptions(gpu_memory=self._options.gpu_memory)
        inside = partial(RayEngine.inside, options)
        return RemoteCode(func, resources, self.overview.kinds, inside)

    def _new_function(self, func: FunctionSpec) -> Any:
        """Make Ray's remote function for a function."""
        run = make_runner(self._code(func), is_stream=bool(func.window))
        request = self._admit(func)
        return cluster.remote(run, self._in_group(task_options(func, request), request))

    def _send(
        self, number: int, func: FunctionSpec, arguments: tuple[Any, ...]
    ) -> None:
        function = self._function(func)
        if func.window:
            Stream(self.calls, number, function.remote(*arguments), func.window)
        elif len(arguments) > 2 and arguments[2] > 1:
            refs = function.options(num_returns=arguments[2]).remote(*arguments)
            self.calls.watch(number, refs)
        else:
            self.calls.watch(number, (function.remote(*arguments),))

    async def _send_in_group(
        self, number: int, func: FunctionSpec, payload: bytes, send: Any
    ) -> None:
        try:
            await self.look_up_group(func)
        except Exception as error:  # noqa: BLE001 - reported as the outcome of the call
            self.calls.end(number, error)
        else:
            self.calls.when_ready(number, payload, send)

    def demand(self, task: int, limit: int) -> None:
        """Set a stream's number of items; see `Engine.demand`."""
        self.calls.demand(task, limit)

    def cancel(self, task: int) -> None:
        """Stop a task; see `Engine.cancel`."""
        self.calls.cancel(task)
        self._remove_group(task)

    def end_children(self) -> None:
        """Stop the children of an ended task; calls of actors go on."""
        for number, call in list(self.calls.live.items()):
            goes_on = call.actor and call.refs
            stop = self.calls.end if goes_on else self.calls.cancel
            stop(number, abandoned(call.name))

    # Actors

    def check_actor(self, func: FunctionSpec) -> None:
        """Check that the cluster can make actors of a class; raises like `submit`."""
        self._admit(func)

    def _new_class(self, func: FunctionSpec) -> Any:
        """Make Ray's actor class for a class."""
        assert func.actor is not None, func
        methods = tuple(getattr(func.actor.interface, "methods", ()))
        request = self._admit(func)
        options = self._in_group(actor_options(func, request, None), request)
        return cluster.remote(process_class(func.actor.mode, methods), options)

    def new_actor(
        self, func: FunctionSpec, key: tuple[str, str] | None, arguments: Any
    ) -> Handle:
        """Make an actor; return Ray's handle. Blocks if it has a name."""
        made = self._class(func)
        if key is not None:
            named = {"name": key[1], "namespace": key[0] or cluster.NAMESPACE}
            made = made.options(**named)
        handle = made.remote(self._code(func), *arguments)
        if key is not None:
            describe(func, handle)
        return handle

    def room_for(self, func: FunctionSpec) -> int | None:
        """Return how many such actors fit at the same time; None for any number."""
        return self.overview.room_for(func.spec.shape.request)

    # Placement groups, which have aiogpu's keys as their names in Ray

    def take_lease(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Request a placement group; see `Engine.take_lease`.

        Raises:
            MisuseError: the request is a lease, which a Ray cluster does not support.
        """
        spec = func.spec.shape.request.placement_group
        if not isinstance(spec, PlacementGroupSpec):
            raise MisuseError(
                "aiogpu.lease() gives devices to processes that aiogpu did not start, "
                "which a Ray cluster cannot do. Use an aiogpu node, or start the "
                "process in a task."
            )
        self.check_open()
        if func.spec.priority:
            refuse(func.spec, "priority")
        if any(bundle.gpu_memory for bundle in spec.bundles):
            refuse(func.spec, "gpu_memory")
        self._check_group(spec)
        call = PendingCall(spec.name, receiver, self._loop.time(), goes_on=True)
        call.convert = _pack_nothing
        number = self.calls.begin(call)
        task = self._loop.create_task(self._create_group(number, spec))
        self._own[number] = _Group(spec, receiver, task)
        return number

    def _check_group(self, spec: PlacementGroupSpec) -> None:
        overview = self.overview
        bundles = [Request(each.scalars, each.devices) for each in spec.bundles]
        for bundle in bundles:
            overview.check_request(f"a bundle of {spec.name}", bundle)
        if spec.strategy == STRICT_PACK:
            whole = spec.request()
            scalars = {
                name: TYPE_SHARE if name.startswith(TYPE_PREFIX) else parts
                for name, parts in whole.scalars
            }
            together = Request.of(scalars, dict(whole.devices))
            overview.check_request(f"{spec.name}, packed strictly,", together)
        overview.check_together(spec.name, bundles)
        nodes = len(overview.nodes)
        if (
            spec.strategy == STRICT_SPREAD
            and len(bundles) > nodes
            and not overview.grows
        ):
            raise InfeasibleError(
                f"{spec.name} asks for {len(bundles)} bundles, each on a machine of "
                f"its own (STRICT_SPREAD), and this cluster has {nodes}. Add nodes, or "
                f"use strategy='SPREAD'."
            )

    async def _create_group(self, number: int, spec: PlacementGroupSpec) -> None:
        bundles = [bundle_of(bundle) for bundle in spec.bundles]
        create = partial(
            cluster.create_placement_group, bundles, spec.strategy, spec.key
        )
        try:
            group = await cluster.in_thread(create)
        except Exception as error:  # noqa: BLE001 - reported as the outcome
            self.calls.end(number, values.outcome_of(spec.name, error))
            return
        if number not in self._own:  # removed meanwhile
            cluster.remove_placement_group(group)
            return
        self._groups[spec.key] = group
        if number in self.calls.live:
            self.calls.watch(number, (group.ready(),))

    def _remove_group(self, number: int) -> None:
        """Remove a group that this program has requested; ignore other numbers.

        Ray ends all tasks and actors in it at once.
        """
        own = self._own.pop(number, None)
        if own is None:
            return
        group = self._groups.pop(own.spec.key, None)
        # Ray ends the processes by an exception, which the tasks would report.
        self.actors.evict(own.spec)
        for other, call in list(self.calls.live.items()):
            if call.group is not None and call.group.key == own.spec.key:
                gone: Exception = removed(own.spec.name, call.name, REMOVED)
                if call.actor:
                    gone = values.actor_death(call.name, gone)
                self.calls.cancel(other, gone)
        if group is not None:
            cluster.remove_placement_group(group)

    def needs_lookup(self, func: FunctionSpec) -> bool:
        """Return whether the group of a function was not looked up yet."""
        within = func.spec.shape.request.placement_group
        return isinstance(within, BundleRef) and within.key not in self._groups

    async def look_up_group(self, func: FunctionSpec) -> None:
        """Look the group of a function up, by a query of the cluster.

        Raises:
            PlacementRemovedError: the group was removed.
        """
        within = func.spec.shape.request.placement_group
        if not isinstance(within, BundleRef):
            return
        creations = [
            own.creation for own in self._own.values() if own.spec.key == within.key
        ]
        if creations:
            await asyncio.wait(creations)
        group = self._groups.get(within.key)
        if group is None:
            group = await cluster.ask(partial(cluster.find_placement_group, within.key))
            if group is None:
                raise removed(within.name, func.spec.name, UNKNOWN)
            if len(self._groups) >= CACHED:
                own = {each.spec.key for each in self._own.values()}
                self._groups = {k: g for k, g in self._groups.items() if k in own}
            self._groups[within.key] = group

    def _in_group(self, options: dict[str, Any], request: Request) -> dict[str, Any]:
        """Return Ray's options with the bundle in which the task runs."""
        within = request.placement_group
        if not isinstance(within, BundleRef):
            return options
        strategy = cluster.in_bundle(self._groups[within.key], within.bundle)
        return {**options, "scheduling_strategy": strategy}

    def _fail_groups(self, error: Exception) -> None:
        for number, own in self._own.items():
            if number not in self.calls.live:
                own.receiver.settle(error)

    # Queries

    async def total(self) -> dict[str, float]:
        """Return all resources by name."""
        self._check_answering()
        await self.overview.look()
        return public_resources(await cluster.ask(cluster.total_resources))

    async def available(self) -> dict[str, float]:
        """Return the free amount of each resource."""
        return await self._free(await self.total())

    async def _free(self, total: Mapping[str, float]) -> dict[str, float]:
        free = public_resources(await cluster.ask(cluster.free_resources))
        return dict.fromkeys(total, 0.0) | free

    async def status(self) -> NodeStatus:
        """Return the cluster's resources, and this program's calls.

        For tasks that wait on the cluster, see `ray status`.
        """
        total, live = await self.total(), self.calls.live
        nodes = await cluster.ask(cluster.all_nodes)
        now = self._loop.time()
        return NodeStatus(
            total=total,
            available=await self._free(total),
            devices=(),
            workers=(),
            tasks=tuple(_task(*item, now) for item in islice(live.items(), LISTED)),
            waiting_count=sum(not call.is_sent for call in live.values()),
            shapes=(),
            shape_count=0,
            reservation=None,
            nodes=tuple(
                Machine(node.id, node.host, node.is_alive, public_resources(node.total))
                for node in nodes
            ),
        )

    async def why(self, task: int) -> Why | None:
        """Return the state of a call, an actor or a group; see `Engine.why`."""
        self._check_answering()
        own = self._own.get(task)
        if own is not None:
            call, request = self.calls.live.get(task), own.spec.request().as_numbers()
            if call is None:
                return Why(own.spec.name, task, "running", request=request)
            seconds = self._loop.time() - call.since
            return Why(own.spec.name, task, "waiting", seconds, request)
        of_actor = (n for n, call in self.calls.live.items() if call.actor == task)
        return self.calls.why(next(of_actor, task))

    async def why_task(self, number: int) -> Why | None:
        """Return the same for a number of `status()`; see `Engine.why_task`."""
        return await self.why(number)

    def _check_answering(self) -> None:
        self.check_open()
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
            self._fail_groups(
                NodeClosedError("the node of this placement was shut down.")
            )
            for number, call in list(self.calls.live.items()):
                message = f"the node was shut down before {call.name} had ended."
                self.calls.cancel(number, NodeClosedError(message))
            await self._await_stopped()
            for own in self._own.values():
                group = self._groups.get(own.spec.key)
                if group is not None:
                    cluster.remove_placement_group(group)
            self._own.clear()
        await connection.close(self)

    async def _await_stopped(self) -> None:
        """Wait until stopped calls have ended, or their grace period is over."""
        if not self.calls.ending:
            return
        try:
            grace = 0 if self._is_hasty else self._options.cancel_grace + 1
            async with asyncio.timeout(grace):
                await self.calls.idle.wait()
        except TimeoutError:
            self.calls.kill_ending()

    def force_close(self) -> None:
        """Close without a grace period; see `Engine.force_close`."""
        self._is_hasty = True
        self.calls.kill_ending()

    def close_now(self) -> None:
        """Leave the cluster without an event loop; see `Engine.close_now`."""
        connection.close_now(self)

    def after_fork(self) -> None:
        """Forget the cluster in a fork, which has none of Ray's threads."""
        self._is_open = False
        values.forget_after_fork()


def _too_late(spec: TaskSpec) -> TaskTimeoutError:
    return TaskTimeoutError(
        f"{spec.name} did not end within its timeout of {spec.timeout:g} s after "
        f".remote(); its wait counts, and Ray does not tell how long that was. It is "
        f"being stopped. Give it more time, or start fewer tasks at once."
    )


def _pack_nothing(_value: Any, _ref: object) -> bytes:
    return b""


def _task(task: int, call: PendingCall, now: float) -> TaskStatus:
    request = {} if call.request is None else call.request.as_numbers()
    age = span(now - call.since)
    if call.is_sent:
        reason = f"sent to Ray {age} ago, which does not tell whether it runs"
        return TaskStatus(task, call.name, "sent", request, None, reason)
    reason = f"waits for its arguments: {age}"
    return TaskStatus(task, call.name, "expecting", request, None, reason)
