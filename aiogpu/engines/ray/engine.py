"""A Ray cluster as an engine: Ray places tasks, moves values, and handles failures.

Requests go to Ray at once, and outcomes come back by `Calls`. This module adds features
that Ray lacks: a dropped handle cancels its task on the cluster, a timeout counts from
`.remote()`, and requests that no node can meet are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from aiogpu.core.model.request import (
    STRICT_PACK,
    STRICT_SPREAD,
    BundleRef,
    PlacementGroupSpec,
    Request,
)
from aiogpu.core.scheduler.placement_groups import REMOVED, UNKNOWN
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.ray import cluster, resources, values
from aiogpu.engines.ray.actor_process import process_class
from aiogpu.engines.ray.actors import RayActors, describe
from aiogpu.engines.ray.calls import Calls, PendingCall, RayValues, Stream
from aiogpu.engines.ray.cluster import Handle, connection
from aiogpu.engines.ray.process import RemoteCode, make_runner
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

LOOK_INTERVAL: Final = 2.0
"""Seconds between two checks of the cluster's head and its nodes."""
LOST_AFTER: Final = 30.0
"""Seconds without a head after which the cluster counts as lost; a restarted head is
back by then. Ray ends the program after 60 s, and leaving takes up to 20 s."""
CACHED: Final = 1024
"""Cached remote functions and groups; evicted functions are registered at Ray again."""
NOT_TOLD: Final = "it was sent to Ray, and `ray list tasks` shows whether it runs"
"""The reason of each call in `status`."""


@dataclass(eq=False)
class _Placement:
    """A placement that this program has requested and not removed.

    Attributes:
        spec: its bundles.
        receiver: is settled once Ray holds all bundles.
        group: makes Ray's placement group.
        is_placed: Ray holds all bundles.
    """

    spec: PlacementGroupSpec
    receiver: Receiver
    group: asyncio.Task[Any]
    is_placed: bool = False


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
        self.overview = resources.Overview(is_in_task=is_in_task)
        self.lost: str | None = None
        self._loop = loop
        self._options = options
        self._own: dict[int, _Placement] = {}
        self._groups: dict[str, asyncio.Future[Any]] = {}  # of Ray's, by key
        self._tasks: set[asyncio.Task[Any]] = set()
        self.actors = RayActors(self.calls, self)
        self._function = lru_cache(CACHED)(self._new_function)
        self._class = lru_cache(CACHED)(self._new_class)
        self._is_open = is_in_task
        self._is_hasty = self._is_head_missed = False
        self._mark = object()  # marks functions that were checked

    def __repr__(self) -> str:
        return f"<RayEngine {self.calls!r}>"

    @property
    def has_gone(self) -> bool:
        """True if the cluster has gone; see `Engine.has_gone`."""
        return self.lost is not None

    def promise_actor(self) -> int:
        """Return 0: Ray chooses the ids; see `Engine.promise_actor`."""
        return 0

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine until it ends, or the engine is closed."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Opening and watching

    async def open(self) -> None:
        """Join the cluster, or start one."""
        await connection.open(self, self._options)
        try:
            await self.overview.look()
        except BaseException:
            await connection.close(self)
            raise
        self._start(self._watch(cluster.head_address()))
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
            except NodeDiedError:
                pass  # the next check of the head shows whether it has gone
            except NodeError:
                self._is_head_missed = True
            await asyncio.sleep(LOOK_INTERVAL)
        self._lose()

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
        self._fail_placements(error)
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
        request = self.admit(func)
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
            late = partial(calls.cancel, number, _too_late(spec))
            call.timer = self._loop.call_later(spec.timeout, late)
        send = partial(self._send, number, func)
        if self.needs_group(func):
            self._start(self._send_in_group(number, func, payload, send))
        else:
            calls.when_ready(number, payload, send)
        return number

    def admit(self, func: FunctionSpec) -> Request:
        """Check a function once for all its calls; return its request for Ray.

        Raises:
            OptionError: Ray does not support an option of the function.
            InfeasibleError: the cluster can never meet the request.
            NodeError: the cluster has gone.
        """
        request = func.spec.shape.request
        if request.gpu_memory:
            request = resources.with_gpu_share(request, self._options.gpu_memory)
        if func.checked_by is not self._mark:
            self.check_open()
            resources.check_possible(func, self._options.gpu_memory)
            self.overview.check(func.spec.name, request)
            func.checked_by = self._mark
        return request

    def _code(self, func: FunctionSpec) -> RemoteCode:
        given = func.resources
        if func.spec.shape.request.gpu_memory:
            given = self.admit(func).as_numbers()
        options = NodeOptions(gpu_memory=self._options.gpu_memory)
        make_engine = partial(RayEngine, options, is_in_task=True)
        return RemoteCode(func, given, make_engine)

    def _new_function(self, func: FunctionSpec) -> Any:
        """Make Ray's remote function for a function."""
        run = make_runner(self._code(func), is_stream=bool(func.window))
        request = self.admit(func)
        return cluster.remote(
            run, self._in_group(resources.task_options(func, request), request)
        )

    def _send(
        self, number: int, func: FunctionSpec, arguments: tuple[Any, ...]
    ) -> None:
        function = self._function(func)
        if len(arguments) > 2 and arguments[2] > 1:
            function = function.options(num_returns=arguments[2])
        made = function.remote(*arguments)
        if func.window:
            Stream(self.calls, number, made, func.window)
        else:
            self.calls.watch(number, made)

    async def _send_in_group(
        self, number: int, func: FunctionSpec, payload: bytes, send: Any
    ) -> None:
        try:
            await self.find_group(func)
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
        self._remove_placement(task)

    def end_children(self) -> None:
        """Stop the children of an ended task; calls of actors go on."""
        for number, call in list(self.calls.live.items()):
            goes_on = call.actor and call.refs
            stop = self.calls.end if goes_on else self.calls.cancel
            stop(number, abandoned(call.name))

    # Actors

    def _new_class(self, func: FunctionSpec) -> Any:
        """Make Ray's actor class for a class."""
        assert func.actor is not None, func
        methods = tuple(getattr(func.actor.interface, "methods", ()))
        request = self.admit(func)
        options = self._in_group(resources.actor_options(func, request, None), request)
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
            resources.refuse(spec.name, "priority")
        if any(bundle.gpu_memory for bundle in spec.bundles):
            resources.refuse(spec.name, "gpu_memory")
        self._check_placement(spec)
        bundles = [resources.bundle_of(bundle) for bundle in spec.bundles]
        create = partial(
            cluster.create_placement_group, bundles, spec.strategy, spec.key
        )
        group = self._groups[spec.key] = self._start(cluster.in_thread(create))
        number = self.calls.new_number()
        own = self._own[number] = _Placement(spec, receiver, group)
        self._start(self._await_placed(own))
        return number

    def _check_placement(self, spec: PlacementGroupSpec) -> None:
        overview, count = self.overview, len(spec.bundles)
        for bundle in spec.bundles:
            overview.check(f"a bundle of {spec.name}", bundle)
        packed = spec.strategy == STRICT_PACK
        together = f"{spec.name}, all {count} bundles together,"
        overview.check(together, spec.request(), on_one_node=packed)
        nodes = len(overview.nodes)
        if spec.strategy == STRICT_SPREAD and count > nodes and not overview.grows:
            raise InfeasibleError(
                f"{spec.name} asks for {count} bundles, each on a machine of its own "
                f"(STRICT_SPREAD), and this cluster has {nodes}. Add nodes, or use "
                f"strategy='SPREAD'."
            )

    async def _await_placed(self, own: _Placement) -> None:
        try:
            await (await asyncio.shield(own.group)).ready()
        except Exception as error:  # noqa: BLE001 - reported as the outcome
            self._groups.pop(own.spec.key, None)
            own.receiver.settle(values.outcome_of(own.spec.name, error))
        else:
            own.is_placed = True
            own.receiver.settle(b"")

    def _remove_placement(self, number: int) -> None:
        """Remove a placement of this program; ignore other numbers.

        Ray ends all tasks and actors in it at once.
        """
        own = self._own.pop(number, None)
        if own is None:
            return
        self._groups.pop(own.spec.key, None)
        # Ray ends the processes by an exception, which the tasks would report.
        self.actors.evict(own.spec)
        for other, call in list(self.calls.live.items()):
            if call.group is not None and call.group.key == own.spec.key:
                gone: Exception = removed(own.spec.name, call.name, REMOVED)
                if call.actor:
                    gone = values.actor_death(call.name, gone)
                self.calls.cancel(other, gone)
        own.group.add_done_callback(_remove_group)

    def needs_group(self, func: FunctionSpec) -> bool:
        """Return whether the group of a function is still to be made or found."""
        within = func.spec.shape.request.placement_group
        if not isinstance(within, BundleRef):
            return False
        group = self._groups.get(within.key)
        return group is None or not group.done()

    async def find_group(self, func: FunctionSpec) -> None:
        """Wait until the group of a function is made, or find it on the cluster.

        Raises:
            PlacementRemovedError: the group was removed.
        """
        within = func.spec.shape.request.placement_group
        if not isinstance(within, BundleRef):
            return
        group = self._groups.get(within.key)
        if group is None:
            find = partial(cluster.find_placement_group, within.key)
            found = await cluster.ask(find)
            if found is None:
                raise removed(within.name, func.spec.name, UNKNOWN)
            if len(self._groups) >= CACHED:
                self._groups.pop(next(iter(self._groups)))
            group = self._groups[within.key] = self._loop.create_future()
            group.set_result(found)
        await asyncio.wait([group])
        failure = group.exception()
        if failure is not None:
            raise removed(within.name, func.spec.name, UNKNOWN) from failure

    def _in_group(self, options: dict[str, Any], request: Request) -> dict[str, Any]:
        """Return Ray's options with the bundle in which the task runs."""
        within = request.placement_group
        if not isinstance(within, BundleRef):
            return options
        group = self._groups[within.key].result()
        strategy = cluster.in_bundle(group, within.bundle)
        return {**options, "scheduling_strategy": strategy}

    def _fail_placements(self, error: Exception) -> None:
        for own in self._own.values():
            own.receiver.settle(error)

    # Queries

    async def total(self) -> dict[str, float]:
        """Return all resources by name."""
        self._check_answering()
        await self.overview.look()
        return resources.public_resources(self.overview.total())

    async def available(self) -> dict[str, float]:
        """Return the free amount of each resource."""
        total = await self.total()
        free = resources.public_resources(await cluster.ask(cluster.free_resources))
        return dict.fromkeys(total, 0.0) | free

    async def status(self) -> NodeStatus:
        """Return the cluster's resources and nodes, and this program's calls.

        Ray does not report whether a call runs; `ray list tasks` does.
        """
        total, nodes = await self.total(), await cluster.ask(cluster.all_nodes)
        return NodeStatus(
            total=total,
            available=await self.available(),
            devices=(),
            workers=(),
            tasks=tuple(
                TaskStatus(number, call.name, "sent", call.requested, None, NOT_TOLD)
                for number, call in islice(self.calls.live.items(), LISTED)
            ),
            waiting_count=0,
            shapes=(),
            shape_count=0,
            reservation=None,
            nodes=tuple(
                Machine(
                    node.id,
                    node.host,
                    node.is_alive,
                    resources.public_resources(node.total),
                )
                for node in nodes
            ),
        )

    async def why(self, task: int) -> Why | None:
        """Return the state of a call, an actor or a placement; see `Engine.why`."""
        own = self._own.get(task)
        if own is not None:
            state = "running" if own.is_placed else "waiting"
            request = own.spec.request().as_numbers()
            return Why(own.spec.name, task, state, request=request)
        for number, call in self.calls.live.items():
            if task in (number, call.actor):
                seconds = self._loop.time() - call.since
                notes = [] if call.group is None else [f"in {call.group}"]
                if call.stream is not None and call.stream.is_held:
                    notes.append("it runs, and waits for its consumer to take items")
                return Why(
                    call.name,
                    task,
                    "sent",
                    seconds,
                    request=call.requested,
                    notes=tuple(notes),
                )
        return None

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
        for task in list(self._tasks):
            task.cancel()
        if self._is_open:
            self._is_open = False
            self.actors.close()
            self._fail_placements(
                NodeClosedError("the node of this placement was shut down.")
            )
            for number, call in list(self.calls.live.items()):
                message = f"the node was shut down before {call.name} had ended."
                self.calls.cancel(number, NodeClosedError(message))
            await self._await_stopped()
            for own in self._own.values():
                if own.group.done():
                    _remove_group(own.group)
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


def _remove_group(group: asyncio.Future[Any]) -> None:
    if not group.cancelled() and group.exception() is None:
        cluster.remove_placement_group(group.result())
