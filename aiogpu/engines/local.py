"""An embedded node: the scheduler in this process, workers on this machine."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from dataclasses import replace
from itertools import count, islice
from time import perf_counter
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.ids import TaskId
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import NodeClosedError
from aiogpu.linux.sockets import keep_pages
from aiogpu.runtime.interrupts import interrupts
from aiogpu.runtime.node import Supervisor
from aiogpu.wire.messages import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.client.interface import Receiver
    from aiogpu.core.queue.fair_share import Limits
    from aiogpu.core.records import TaskRecord
    from aiogpu.core.scheduler.scheduler import Scheduler
    from aiogpu.notebook.cells import Cells
    from aiogpu.observe.status import EndedTask, NodeStatus, Observations, Program
    from aiogpu.observe.task_list import Candidate, TaskPage, TaskQuery
    from aiogpu.observe.trace import Span
    from aiogpu.observe.why import StopReport, Why
    from aiogpu.runtime.actors.actor import Actor
    from aiogpu.runtime.actors.registry import Actors
    from aiogpu.runtime.callers.leases import LeaseReceiver
    from aiogpu.runtime.callers.viewers import Answer, Viewers
    from aiogpu.runtime.devices.binding import Assignment
    from aiogpu.runtime.driver import Driver
    from aiogpu.runtime.objects.store import Store
    from aiogpu.runtime.workers.slots import LiveWorker
    from aiogpu.serialization.references import PickledValue
    from aiogpu.wire.messages import Halted, Inquire

LONG: Final = 0.1
"""Seconds after which an import is worth a word, since it may hang."""

IN_CODE: Final = frozenset({"running", "sent", "stopping"})
"""States of tasks whose workers may be running their code."""
TURN: Final = 1e-3
"""Seconds of one turn of the loop in which a list of tasks is searched."""
LOOK_EVERY: Final = 0.02
"""Seconds between two checks whether a stopping node is idle."""
REFILL_AFTER: Final = 2e-3
"""Seconds between a task's use of a spare worker and the fork of the next spare, which
would slow the task."""
UNCHECKED: Final = 1 << 20
"""Payload size in bytes up to which no check is needed."""
WARM: Final = 8
"""Idle workers kept, in addition to one per CPU."""


class LocalEngine:
    """An embedded node: the scheduler and all connections live on the loop."""

    remote_values = None
    has_gone = False
    runs_together = True
    waits = None

    def __init__(self, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> None:
        self._options = options
        self._loop = loop
        self._driver: Driver | None = None
        self._store: Store | None = None
        self._promised = count(1)
        self._supervisor = Supervisor(loop, self._make_viewers)
        self._cells: Cells | None = None
        # Marks functions that were found feasible; small, since functions outlive the
        # node.
        self._mark = object()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._driver!r}>"

    @property
    def node_socket(self) -> str:
        """The path of the node's own socket."""
        from aiogpu.wire.messages import socket_path

        return socket_path(self._supervisor.directory)

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

    async def open(self) -> None:
        """Detect resources while the zygote starts; see `Engine.open`."""
        options = self._options
        keep_pages()
        interrupts.add(self, self._loop)
        try:
            self._supervisor.start_zygote(
                options.preload, options.learns, options.spill_directory or ""
            )
            # Imported here, while the zygote starts on another core.
            from aiogpu.engines.base import (
                check_arguments,
                check_func,
                expected_modules,
            )

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
            if "IPython" in sys.modules:
                from aiogpu.notebook.cells import Cells

                self._cells = Cells(self._loop, self._next_task)
                self._supervisor.console.cell_of = self._cell_of
            self._driver.pool.zygotes.expect(expected_modules(options))
            await self._supervisor.guard_devices(
                options.gpu_memory_enforce, options.foreign
            )
        except BaseException:
            interrupts.discard(self)
            await self._supervisor.stop()
            raise

    def _next_task(self) -> int:
        return self._open_driver.last_task + 1

    def _cell_of(self, worker: int, task: int) -> object:
        """Return the cell of a notebook that has started the task that prints."""
        from aiogpu.runtime.output import root_of, task_printing

        assert self._cells is not None
        record = task_printing(self._open_driver.scheduler, worker, task)
        # The number of an ended task is enough, unless another task has started it.
        return self._cells.find(task if record is None else root_of(record))

    @property
    def home(self) -> str:
        """The node's name; see `Engine.home`."""
        return os.path.basename(self._supervisor.directory)

    @property
    def _open_driver(self) -> Driver:
        if self._driver is None:
            raise NodeClosedError("this node is not running.")
        self._driver.row.end()
        return self._driver

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
        driver.expect_imports(func.function)
        func.checked_by = self._mark
        return driver

    def take_lease(self, func: FunctionSpec, receiver: LeaseReceiver) -> int:
        """Request a lease; see `Engine.take_lease`."""
        return self.submit(func, b"", receiver)

    @property
    def actors(self) -> Actors:
        """The actors; see `Engine.actors`."""
        return self._open_driver.actors

    def promise_actor(self) -> int:
        """Return an id as workers choose them; see `Engine.promise_actor`."""
        return -next(self._promised)

    def demand(self, task: int, limit: int) -> None:
        """Set a stream's number of items; see `Engine.demand`."""
        if self._driver is not None:
            self._driver.demand(task, limit)

    def cancel(self, task: int) -> None:
        """Stop a task; see `Engine.cancel`."""
        driver = self._driver
        if driver is not None:
            driver.cancel(task)

    async def total(self) -> dict[str, float]:
        """Return all resources by name."""
        return self._open_driver.scheduler.ledger.totals()

    async def available(self) -> dict[str, float]:
        """Return the free amount of each resource."""
        return self._open_driver.scheduler.ledger.available()

    async def status(self) -> NodeStatus:
        """Return the held resources, the waiting tasks and the reasons."""
        from aiogpu.observe.snapshot import snapshot
        from aiogpu.observe.status import IdleEndStatus, Machine, TaskStatus
        from aiogpu.observe.why import Why, brief

        driver, now = self._open_driver, self._loop.time()
        pids, results = self._pids, driver.results
        unended = driver.unended
        seen = snapshot(
            driver.scheduler, pids, now, self._observed, self._programs, unended
        )
        awaited = driver.pool.awaited_imports

        def with_imports(task: TaskStatus) -> TaskStatus:
            imports = awaited.get(task.worker or 0)
            if imports is None or task.state != "starting":
                return task
            why_ = Why(task.name, task.id, task.state, imports=imports)
            return replace(task, reason=brief(why_))

        def with_debugger(task: TaskStatus) -> TaskStatus:
            halted = halted_of(driver.workers.get(task.worker or 0), task.id)
            if halted is None:
                return task
            why_ = Why(task.name, task.id, task.state, halted=halted.where)
            return replace(task, reason=brief(replace(why_, debugger=halted.path)))

        def place_of(actor: Actor) -> tuple[int, int] | None:
            worker = actor.worker
            return None if worker is None else (worker.id, pids.get(worker.id, 0))

        tasks = tuple(map(with_imports, seen.tasks)) if awaited else seen.tasks
        has_halted = any(worker.halted for worker in driver.workers.values())
        return replace(
            seen,
            tasks=tuple(map(with_debugger, tasks)) if has_halted else tasks,
            actors=driver.actors.listed(place_of, results.client_of),
            failures=results.history.failures(now),
            outcomes=results.history.outcomes,
            evictions=driver.actors.evictions,
            reloads=driver.actors.reloads,
            draining=self._draining(now),
            ended_idle=tuple(
                IdleEndStatus(worker, pid, used, now - when)
                for when, worker, pid, used in driver.guard.ended_idle
            ),
            nodes=(Machine(self.home, os.uname().nodename, True, seen.total),),
            departed={
                str(number): f"{name} {pid}"
                for number, (name, pid) in self._departed.items()
            },
        )

    async def why(self, task: int) -> Why | None:
        """Return why a task waits, or its outcome; see `Engine.why`."""
        reason = self._find(task)
        if reason is None or reason.worker is None or reason.state not in IN_CODE:
            return reason
        driver = self._open_driver
        module = driver.pool.importing(reason.worker)
        if module:
            await asyncio.sleep(LONG)
        if not module or driver.pool.importing(reason.worker) != module:
            return reason
        note = f"its worker is importing the module {module}"
        return replace(reason, notes=(*reason.notes, note))

    def _find(self, task: int) -> Why | None:
        """Return the state of a task from the books; None if it is unknown."""
        from aiogpu.observe.snapshot import why, why_ended

        driver, now = self._open_driver, self._loop.time()
        record = driver.scheduler.tasks.get(TaskId(task))
        if record is not None:
            others = self._programs, driver.unended
            found = why(driver.scheduler, record, self._pids, now, *others)
            imports = driver.pool.awaited_imports.get(found.worker or 0, "")
            halted = halted_of(driver.workers.get(found.worker or 0), task)
            if halted is None:
                return replace(found, imports=imports)
            return replace(found, halted=halted.where, debugger=halted.path)
        ended = driver.results.history.find(task, now)
        return None if ended is None else why_ended(ended)

    async def why_task(self, number: int) -> Why | None:
        """Return why any program's task waits; see `Engine.why_task`."""
        return await self.why(number)

    async def serve(
        self,
        listening: socket.socket,
        logs: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Let other programs of this user join the open node.

        Args:
            listening: a bound and listening Unix socket; the node closes it.
            logs: directory for the output of their tasks; None for no logs.
            limits: limits of each program; None for no limits.

        Raises:
            OptionError: `limits` names a resource that the node does not have.
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
        """The programs that have joined, by number."""
        from aiogpu.observe.status import Program

        clients = self._supervisor.clients
        joined = {} if clients is None else clients.programs
        return {number: Program(*facts) for number, facts in joined.items()}

    @property
    def _departed(self) -> Mapping[int, tuple[str, int]]:
        clients = self._supervisor.clients
        return {} if clients is None else clients.departed

    def _draining(self, now: float) -> float | None:
        """Return the seconds left for running tasks if the node is stopping."""
        clients = self._supervisor.clients
        ends_at = None if clients is None else clients.ends_at
        return None if ends_at is None else max(0.0, ends_at - now)

    def _make_viewers(self) -> Viewers | None:
        """Make the object that answers commands on the node's own socket."""
        if self._driver is None:
            return None
        from aiogpu.engines.server_info import pack_capacity
        from aiogpu.runtime.callers.viewers import Viewers

        capacity = pack_capacity(self._driver.scheduler.ledger, {})
        return Viewers(self._loop, self.home, capacity, self._answers())

    def _answers(self) -> Mapping[str, Answer]:
        """Return the queries that other programs can send to the node, by name."""
        from aiogpu.wire import messages as names

        requests = self._supervisor.requests
        cancel, kill, end_lease = requests.cancel, requests.kill, requests.end_lease
        return {
            names.RESOURCES: lambda _: self.total(),
            names.AVAILABLE: lambda _: self.available(),
            names.STATUS: lambda _: self.status(),
            names.WHY: lambda inquiry: self.why(inquiry.number),
            names.WHY_TASK: lambda inquiry: self.why(inquiry.number),
            names.TIMELINE: self._timeline,
            names.HISTORY: self._history,
            names.TASKS: self._page,
            names.CANCEL: lambda inquiry: self._stop_for_user(cancel, inquiry.number),
            names.KILL: lambda inquiry: self._stop_for_user(kill, inquiry.number),
            names.END_LEASE: lambda inquiry: self._stop_for_user(
                end_lease, inquiry.number
            ),
            names.CANCEL_NAMED: lambda inquiry: self._stop_named(cancel, inquiry.name),
            names.CANCEL_ALL: lambda inquiry: self._stop_named(
                cancel, inquiry.name, is_all=True
            ),
            names.KILL_NAMED: lambda inquiry: self._stop_named(kill, inquiry.name),
        }

    async def _timeline(self, inquiry: Inquire) -> object:
        return [tuple(span) for span in self.spans(inquiry.number)]

    async def _history(self, inquiry: Inquire) -> object:
        return self.ended(inquiry.number)

    async def _page(self, inquiry: Inquire) -> object:
        from aiogpu.observe.status_codec import status_codec
        from aiogpu.observe.task_list import TaskQuery

        query = status_codec.load(inquiry.query)
        if not isinstance(query, TaskQuery):
            raise ProtocolError("a list of tasks needs a TaskQuery")
        return await self.list_tasks(query)

    async def _stop_for_user(
        self, stop: Callable[[int], str], number: int
    ) -> tuple[str, Why | None]:
        """Stop a task or actor of any program: all belong to the node's user.

        Returns:
            The result of `stop`, and the state before.
        """
        before = await self.why(number)
        return stop(number), before

    async def _stop_named(
        self, stop: Callable[[int], str], name: str, is_all: bool = False
    ) -> StopReport:
        """Stop the task or actor with a name, or all of them."""
        from aiogpu.core.model.text import SHOWN
        from aiogpu.observe.why import StopReport

        requests = self._supervisor.requests
        numbers = await requests.named(name)
        report = StopReport(tuple(numbers[:SHOWN]), len(numbers))
        if len(numbers) > 1 and not is_all:
            return report
        before = {number: await self.why(number) for number in report.numbers}
        results = await requests.stop_all(stop, numbers)
        first = [
            (kind, why)
            for kind, stopped in results.items()
            for number in stopped[:SHOWN]
            if (why := before.get(number) or await self.why(number)) is not None
        ]
        counts = {kind: len(stopped) for kind, stopped in results.items()}
        return replace(report, counts=counts, first=tuple(first))

    def spans(self, most: int = 0) -> list[Span]:
        """Return the times and places of executed tasks; see `History.spans`."""
        driver, now = self._open_driver, self._loop.time()
        workers = driver.scheduler.workers
        return driver.results.history.spans(workers, now, time.time() - now, most)

    def ended(self, actor: int = 0) -> tuple[EndedTask, ...]:
        """Return the last ended tasks, or an actor's failed calls, latest first.

        For an actor, one call of each method, with its traceback.
        """
        history, now = self._open_driver.results.history, self._loop.time()
        return history.failed_calls(actor, now) if actor else history.ended(now)

    async def list_tasks(self, query: TaskQuery) -> TaskPage:
        """Return a page of a list of tasks; a search is spread over turns of the loop.

        Tasks that end meanwhile may be left out, or still be listed.
        """
        from aiogpu.observe.snapshot import reasons_of
        from aiogpu.observe.task_list import (
            PIECE,
            WAITING,
            TaskPage,
            TaskSearch,
            row_of,
        )

        scheduler, total = self._open_driver.scheduler, None
        if query.state == WAITING:
            total = len(scheduler.tasks) - len(self._held_records())
        search = TaskSearch(query, total)
        candidates = self._candidates(query.state)
        until = perf_counter() + TURN
        while not search.is_done and (piece := [*islice(candidates, PIECE)]):
            search.take(piece)
            if perf_counter() > until:
                await asyncio.sleep(0)
                until = perf_counter() + TURN
        found, now, pids = search.page(), self._loop.time(), self._pids
        records = [task.record for task in found if task.record is not None]
        reasons = iter(reasons_of(scheduler, records, pids, now))
        rows = []
        for task in found:
            worker = task.record and task.record.worker
            pid = pids.get(worker.id, 0) if worker else 0
            reason = "" if task.record is None else next(reasons)
            rows.append(row_of(task, now, reason, pid))
        return TaskPage(tuple(rows), search.total)

    def _held_records(self) -> list[TaskRecord]:
        from aiogpu.observe.snapshot import held_records

        return held_records(self._open_driver.scheduler)

    def _candidates(self, state: str) -> Iterator[Candidate]:
        """Yield the tasks that a list with a state may contain, in the natural order.

        The node may change between two steps.
        """
        from aiogpu.observe.task_list import FAILED, RUNNING, WAITING, living

        driver = self._open_driver
        if state == WAITING:
            for piece in driver.scheduler.tasks.pieces():
                waiting = (task for task in piece if task.worker is None)
                yield from living(waiting, lambda _: None)
        elif state == RUNNING:
            yield from living(self._held_records(), self._began)
        else:
            yield from driver.results.history.candidates(state == FAILED)

    def _began(self, record: TaskRecord) -> float | None:
        """Return when the code of a task with a worker began, if that is known."""
        worker, sites = record.worker, self._open_driver.results.history.sites
        if worker is None or worker.task is not record:
            return None
        site = sites[worker.id]
        if site.place is None:  # a lease, or a worker that is being forked
            return worker.watched_since if worker.watched is record else None
        return site.began

    async def seen(self) -> tuple[NodeStatus, Mapping[str, int]]:
        """Return the status, and counts of ended attempts by outcome."""
        outcomes = self._open_driver.results.history.outcomes
        return await self.status(), dict(outcomes)

    async def drain(self, patience: float) -> str:
        """Refuse new work of joined programs, and wait for their running tasks.

        Leases count as running tasks. Programs that only look may still join.

        Args:
            patience: seconds to wait.

        Returns:
            Their remaining work as text; "" for none.
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
        """Inform tasks that the node stops; see `Engine.announce_stop`."""
        if self._driver is not None:
            self._driver.announce_stop()

    async def close(self, on_wait: Callable[[float], object] | None = None) -> None:
        """Stop all tasks and release all resources.

        Args:
            on_wait: called with the seconds of each wait for the end of a task.
        """
        if self._cells is not None:
            self._cells.close()
        try:
            await self._supervisor.stop(on_wait)
            if self._store is not None:
                self._store.close()
        finally:
            interrupts.discard(self)

    def force_close(self) -> None:
        """Close without a grace period; see `Engine.force_close`."""
        from aiogpu.core.scheduler.scheduler import Scheduler

        if self._driver is not None:
            self._driver.feed(Scheduler.close, True)

    def close_now(self) -> None:
        """Close at once, without an event loop."""
        interrupts.discard(self)
        if self._cells is not None:
            self._cells.close()
        self._supervisor.close_now()

    def after_fork(self) -> None:
        """Disable the engine in a fork of the driver.

        Workers watch the driver's process, so they survive the fork's end.
        """
        if self._driver is not None:
            self._driver.after_fork()


async def build_node(options: NodeOptions) -> tuple[Scheduler, Assignment]:
    """Make the scheduler and the assignment of devices."""
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


def halted_of(worker: LiveWorker | None, task: int) -> Halted | None:
    """Return where a task, or a call of an actor, stands at a breakpoint.

    Of several calls of the actor, one that waits for a debugger goes first.
    """
    if worker is None or not worker.halted:
        return None
    actor = worker.actor
    if actor is None or actor.id != task:
        return worker.halted.get(task)
    found = [
        halted
        for number, halted in worker.halted.items()
        if number == task or number in actor.calls
    ]
    return max(found, key=lambda halted: bool(halted.path), default=None)
