"""This machine, in this process: an embedded node."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.ids import TaskId
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import NodeClosedError
from aiogpu.linux.sockets import keep_pages
from aiogpu.runtime.node import Supervisor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver
    from aiogpu.core.queue.fair_share import Limits
    from aiogpu.core.scheduler.scheduler import Scheduler
    from aiogpu.observe.status import EndedTask, NodeStatus, Observations, Program
    from aiogpu.observe.trace import Span
    from aiogpu.observe.why import Why
    from aiogpu.runtime.actors.actor import Actor
    from aiogpu.runtime.actors.registry import Actors
    from aiogpu.runtime.callers.leases import LeaseReceiver
    from aiogpu.runtime.callers.viewers import Answer, Viewers
    from aiogpu.runtime.devices.binding import Assignment
    from aiogpu.runtime.driver import Driver
    from aiogpu.runtime.objects.store import Store
    from aiogpu.serialization.references import PickledValue

LOOK_EVERY: Final = 0.02
"""Seconds between two looks at whether a node that is being stopped is idle."""
REFILL_AFTER: Final = 2e-3
"""Seconds in which a task that has taken a spare is let alone by the next fork."""
UNCHECKED: Final = 1 << 20
"""Bytes that any call may carry."""
WARM: Final = 8
"""Idle workers kept beside one for each CPU."""


class DriverEngine:
    """The common base of engines with a driver on this process's event loop."""

    remote_values = None
    has_gone = False

    def __init__(self, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> None:
        self._options = options
        self._loop = loop
        self._driver: Driver | None = None
        self._store: Store | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._driver!r}>"

    @property
    def store(self) -> Store:
        """The shared memory of values; created at first use."""
        if self._store is None:
            from aiogpu.runtime.objects.segments import ObjectMemory
            from aiogpu.runtime.objects.store import Store

            options = self._options
            memory = ObjectMemory(options.object_memory, options.spill_directory)
            self._store = Store(self._loop, memory)
        return self._store

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make a payload; see `Engine.pack`."""
        return self.store.pack(outgoing)

    @property
    def _open_driver(self) -> Driver:
        if self._driver is None:
            raise NodeClosedError("this node is not running.")
        self._driver.row.end()
        return self._driver

    def _asked(self, _what: str) -> Driver:
        """The driver, for the program that asks `_what`."""
        return self._open_driver

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a task; see `Engine.submit`."""
        raise NotImplementedError

    def take_lease(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Ask for a lease; see `Engine.take_lease`."""
        return self.submit(func, b"", receiver)

    @property
    def actors(self) -> Actors:
        """The actors; see `Engine.actors`."""
        return self._open_driver.actors

    def demand(self, task: int, limit: int) -> None:
        """Let a stream yield so many items in all; see `Engine.demand`."""
        if self._driver is not None:
            self._driver.demand(task, limit)

    def cancel(self, task: int) -> None:
        """Stop a task; see `Engine.cancel`."""
        driver = self._driver
        if driver is not None:
            driver.cancel(task)

    async def total(self) -> dict[str, float]:
        """All resources by name."""
        return self._asked("aiogpu.cluster_resources()").scheduler.ledger.totals()

    async def available(self) -> dict[str, float]:
        """Return what is free of each."""
        return self._asked("aiogpu.available_resources()").scheduler.ledger.available()

    @property
    def _pids(self) -> Mapping[int, int]:
        """Process ids by worker, and by holder of a lease."""
        raise NotImplementedError

    @property
    def _node_id(self) -> str:
        """Return the node's id, as tasks find it."""
        raise NotImplementedError

    @property
    def _observed(self) -> Observations:
        """Return the latest samples of the devices."""
        return {}

    @property
    def _programs(self) -> Mapping[int, Program]:
        """Return the programs that have joined, by their numbers."""
        return {}

    def _draining(self, _now: float) -> float | None:
        """Seconds that what runs has, if the node is being stopped; None if not."""
        return None

    async def status(self) -> NodeStatus:
        """Return who holds what, what waits and why."""
        from aiogpu.observe.snapshot import snapshot
        from aiogpu.observe.status import Machine

        driver, now = self._asked("aiogpu.status()"), self._loop.time()
        pids, results = self._pids, driver.results
        seen = snapshot(driver.scheduler, pids, now, self._observed, self._programs)

        def place_of(actor: Actor) -> tuple[int, int] | None:
            worker = actor.worker
            return None if worker is None else (worker.id, pids.get(worker.id, 0))

        return replace(
            seen,
            actors=driver.actors.listed(place_of, results.client_of),
            failures=results.history.failures(now),
            draining=self._draining(now),
            nodes=(Machine(self._node_id, os.uname().nodename, True, seen.total),),
        )

    async def why(self, task: int) -> Why | None:
        """Return why a task waits, or how it has ended; see `Engine.why`."""
        from aiogpu.observe.snapshot import why, why_ended

        driver, now = self._asked("handle.why()"), self._loop.time()
        record = driver.scheduler.tasks.get(TaskId(task))
        if record is not None:
            return why(driver.scheduler, record, self._pids, now, self._programs)
        ended = driver.results.history.find(task, now)
        return None if ended is None else why_ended(ended)

    async def why_task(self, number: int) -> Why | None:
        """Return why any program's task waits; see `Engine.why_task`."""
        return await self.why(number)


class LocalEngine(DriverEngine):
    """An embedded node: the scheduler and all connections live on the loop."""

    waits = None

    def __init__(self, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(options, loop)
        self._supervisor = Supervisor(loop, self._make_viewers)
        # Left on functions that were found feasible; it outlives the node, so is small.
        self._mark = object()

    async def open(self) -> None:
        """Detect what there is while the zygote starts; see `Engine.open`."""
        options = self._options
        keep_pages()
        try:
            self._supervisor.start_zygote(
                options.preload, options.learns, options.spill_directory or ""
            )
            # Imported here, since the zygote starts meanwhile on another core.
            from aiogpu.engines.base import check_arguments, check_func

            scheduler, assignment = await build_node(options)

            def check(func: FunctionSpec, payload: bytes) -> None:
                check_func(func, scheduler.ledger)
                check_arguments(func, payload)

            self._driver = await self._supervisor.start_driver(
                scheduler,
                assignment,
                self.store,
                check,
                options.log_to_driver,
            )
            self._driver.guard.is_on = options.memory_guard
            await self._supervisor.guard_devices(
                options.gpu_memory_enforce, options.foreign
            )
        except BaseException:
            await self._supervisor.stop()
            raise

    @property
    def home(self) -> str:
        """Tells this node from others; see `Engine.home`."""
        return os.path.basename(self._supervisor.directory)

    @property
    def _node_id(self) -> str:
        return self.home

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Start a task; see `Engine.submit`."""
        driver = self._driver
        if driver is None or func.checked_by is not self._mark:
            driver = self._admit(func)
        # A pickle alone is smaller; see `wire.payload.dump_arguments`.
        if type(payload) is not bytes and len(payload) > UNCHECKED:
            from aiogpu.engines.base import check_arguments

            check_arguments(func, payload)
        driver.burst.note()
        row = driver.row
        if row.func is func and type(payload) is bytes:
            task = row.add(payload, receiver)
            if task:
                return task
        return driver.submit(func, payload, receiver)

    def _admit(self, func: FunctionSpec) -> Driver:
        from aiogpu.engines.base import check_func

        driver = self._open_driver
        check_func(func, driver.scheduler.ledger)
        func.checked_by = self._mark
        return driver

    async def serve(
        self,
        listening: socket.socket,
        logs: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Let other programs of this user join the node, which is open.

        Args:
            listening: a Unix socket that is bound, and listens; the node closes it.
            logs: directory in which all that their tasks print is logged; None for
                nowhere.
            limits: what each of them may have at once; None for no limits.

        Raises:
            OptionError: a resource is limited that the node does not have.
        """
        from aiogpu.engines.server_info import server_info

        supervisor = self._supervisor
        ledger = self._open_driver.scheduler.ledger
        await supervisor.welcome(
            listening,
            server_info(
                supervisor.directory,
                ledger,
                self._options,
                self.store.memory.total,
                limits,
            ),
            self._answers(),
            logs,
        )

    @property
    def _pids(self) -> Mapping[int, int]:
        return self._supervisor.pids

    @property
    def _observed(self) -> Observations:
        return self._supervisor.observed

    @property
    def _programs(self) -> Mapping[int, Program]:
        """Return the programs that have joined, by their numbers."""
        from aiogpu.observe.status import Program

        clients = self._supervisor.clients
        found = {} if clients is None else clients.programs
        return {number: Program(*who) for number, who in found.items()}

    def _draining(self, now: float) -> float | None:
        """Seconds that what runs has, if the node is being stopped; None if not."""
        clients = self._supervisor.clients
        ends_at = None if clients is None else clients.ends_at
        return None if ends_at is None else max(0.0, ends_at - now)

    def _make_viewers(self) -> Viewers | None:
        """Return what answers commands on the node's own socket."""
        if self._driver is None:
            return None
        from aiogpu.engines.server_info import pack_capacity
        from aiogpu.runtime.callers.viewers import Viewers

        capacity = pack_capacity(self._driver.scheduler.ledger, {})
        return Viewers(self._loop, self.home, capacity, self._answers())

    def _answers(self) -> Mapping[str, Answer]:
        """Return the queries that other programs can send to the node, by name."""
        from aiogpu.wire import messages as names

        async def total(_number: int) -> object:
            return await self.total()

        async def available(_number: int) -> object:
            return await self.available()

        async def status(_number: int) -> object:
            return await self.status()

        async def timeline(_number: int) -> object:
            return [tuple(span) for span in self.spans()]

        async def ended(number: int) -> object:
            return self.ended(number)

        async def cancel(number: int) -> object:
            return await self._cancel_for_user(number)

        async def kill(number: int) -> object:
            return await self._kill_for_user(number)

        return {
            names.RESOURCES: total,
            names.AVAILABLE: available,
            names.STATUS: status,
            names.WHY: self.why,
            names.WHY_TASK: self.why,
            names.TIMELINE: timeline,
            names.HISTORY: ended,
            names.CANCEL: cancel,
            names.KILL: kill,
        }

    async def _cancel_for_user(self, number: int) -> tuple[str, Why | None]:
        """Cancel a task, whosever it is: who may join the node is its user.

        Returns:
            What `Requests.cancel` does, and what was to be said of it before.
        """
        told = await self.why(number)
        return self._supervisor.requests.cancel(number), told

    async def _kill_for_user(self, number: int) -> tuple[str, Why | None]:
        """Kill an actor, likewise."""
        told = await self.why(number)
        return self._supervisor.requests.kill(number), told

    def spans(self) -> list[Span]:
        """Return what has run where and when."""
        driver, now = self._open_driver, self._loop.time()
        workers = driver.scheduler.workers
        return driver.results.history.spans(workers, now, time.time() - now)

    def ended(self, actor: int = 0) -> tuple[EndedTask, ...]:
        """Return the last tasks that have ended, or an actor's calls that failed.

        The latest first; with `actor` one of each method, and with the traceback.
        """
        history, now = self._open_driver.results.history, self._loop.time()
        return history.failed_calls(actor, now) if actor else history.ended(now)

    async def seen(self) -> tuple[NodeStatus, Mapping[str, int]]:
        """Return the status, and counts of ended attempts by outcome."""
        outcomes = self._open_driver.results.history.outcomes
        return await self.status(), dict(outcomes)

    async def drain(self, patience: float) -> str:
        """Take no more work of those that have joined, and let what runs end.

        Leases count as what runs. Who only looks may join meanwhile.

        Args:
            patience: seconds to wait for it.

        Returns:
            What is left of theirs, in words; "" for nothing.
        """
        clients = self._supervisor.clients
        if clients is None:
            return ""
        clients.drain(patience)
        self.announce_stop()
        until = self._loop.time() + patience
        while (remains := clients.remains) and self._loop.time() < until:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY)
        return remains

    def announce_stop(self) -> None:
        """Let tasks know that the node stops; see `Engine.announce_stop`."""
        if self._driver is not None:
            self._driver.announce_stop()

    async def close(self) -> None:
        """Stop all tasks and leave nothing behind."""
        await self._supervisor.stop()
        if self._store is not None:
            self._store.close()

    def force_close(self) -> None:
        """Close without a grace period; see `Engine.force_close`."""
        from aiogpu.core.scheduler.scheduler import Scheduler

        if self._driver is not None:
            self._driver.feed(Scheduler.close, True)

    def close_now(self) -> None:
        """Close at once, without an event loop."""
        self._supervisor.close_now()

    def after_fork(self) -> None:
        """Disable the engine in a fork of the driver.

        Workers watch the driver's process, and so outlive this one.
        """
        if self._driver is not None:
            self._driver.after_fork()


async def build_node(options: NodeOptions) -> tuple[Scheduler, Assignment]:
    """Return the scheduler, and the binder of devices."""
    from aiogpu.core.model.config import SchedulerConfig
    from aiogpu.core.model.units import CPU, UNIT
    from aiogpu.core.scheduler.scheduler import Scheduler
    from aiogpu.engines.devices import take_inventory
    from aiogpu.runtime.devices.binding import Assignment

    ledger, vendors = await take_inventory(options)
    config = SchedulerConfig(
        cancel_grace=options.cancel_grace,
        idle_workers=WARM + ledger.capacity[CPU] // UNIT,
        spare_workers=options.spare_workers,
        refill_after=REFILL_AFTER,
    )
    assignment = Assignment(
        vendors,
        ledger,
        os.environ,
        cpu_affinity=options.cpu_affinity,
        mps=options.mps,
    )
    return Scheduler(ledger, config), assignment
