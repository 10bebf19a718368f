"""Starts a node's parts in order, and stops them in reverse.

The parts are: directory, socket, zygote, pool, driver. A failed start undoes its steps;
a stop is bounded in time and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from time import perf_counter
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from aiogpu.runtime.descriptors import descriptor_limit, warn_of_few
from aiogpu.runtime.node_cgroup import NodeCgroup
from aiogpu.runtime.zygote.config import Bootstrap
from aiogpu.wire.messages import socket_path

if TYPE_CHECKING:
    from aiogpu.core.scheduler.scheduler import Scheduler
    from aiogpu.observe.status import Observations
    from aiogpu.runtime.actors.actor import Check
    from aiogpu.runtime.callers.programs import Clients, ServerInfo
    from aiogpu.runtime.callers.requests import Requests
    from aiogpu.runtime.callers.viewers import Answer, Viewers
    from aiogpu.runtime.connection import OnHello, Peer, Recipient
    from aiogpu.runtime.devices.binding import Assignment
    from aiogpu.runtime.driver import DeviceFactory, Driver
    from aiogpu.runtime.objects.store import DescriptorServer, Store
    from aiogpu.runtime.output import Console
    from aiogpu.runtime.workers.pool import Pool
    from aiogpu.wire.messages import Hello


SHORT: Final = 300e-6
"""Most seconds between two messages after which the loop stays awake."""


AWAKE: Final = 100e-6
"""Seconds for which the loop stays awake after a message."""


class BusyPoll:
    """Keeps a service's loop awake for a moment while messages follow each other.

    Between a client and a worker a node is idle for some tens of microseconds, and
    waking it takes longer: measured on two cores, a call through the service takes 102
    to 130 us with this class and 290 us without. It uses CPU only while messages come
    at short intervals. A node inside a program, on the program's loop, never uses it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._last = 0.0
        self._is_awake = False
        # With one CPU, polling would only delay the other processes.
        self._may = len(os.sched_getaffinity(0)) > 1

    def note(self, count: int) -> None:
        """Note that `count` messages arrived together.

        If several did, the sender is busy and needs the CPU more than this process.
        """
        if count != 1:
            self._last = 0.0
            return
        before, self._last = self._last, perf_counter()
        if not self._is_awake and self._may and self._last - before < SHORT:
            self._is_awake = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Keep the loop from sleeping until `AWAKE` has passed."""
        if perf_counter() - self._last < AWAKE:
            self._loop.call_soon(self._look)
        else:
            self._is_awake = False


SLACK: Final = 5.0
"""Seconds that a stop may take beyond the grace of its tasks."""


@dataclass(slots=True, eq=False)
class Parts:
    """The parts of a running node."""

    console: Console
    driver: Driver
    store: Store
    servers: list[asyncio.AbstractServer] = field(default_factory=list)
    descriptor_server: DescriptorServer | None = None


class Supervisor:
    """Starts and stops the processes and sockets of one node.

    Args:
        loop: the event loop of the node.
        make_viewers: makes the `Viewers` of the node, for the first command; returns
            None while the node is starting.

    Attributes:
        clients: the programs that have joined; None if programs cannot join.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        make_viewers: Callable[[], Viewers | None],
    ) -> None:
        self._loop = loop
        self._make_viewers = make_viewers
        self._viewers: Viewers | None = None
        self._bootstrap: Bootstrap | None = None
        self._undo_start = ExitStack()
        self._slots = 0
        self._parts: Parts | None = None
        self._peers: WeakSet[Peer] = WeakSet()
        self.clients: Clients | None = None
        self._poll: BusyPoll | None = None
        self._serving: asyncio.Task[None] | None = None
        self._is_ending = False
        self._is_over = False

    def start_zygote(
        self, preload: Sequence[str], learns: bool = False, spill: str = ""
    ) -> None:
        """Make the directory and the socket, and start the zygote.

        Does not wait for the zygote, so the caller can detect resources meanwhile.
        After a failure, `stop` undoes the start.

        Raises:
            NodeStartError: there is no place for the directory, or no interpreter.
        """
        with ExitStack() as undo:
            self._bootstrap = Bootstrap(NodeCgroup(self._loop), preload, learns, spill)
            undo.callback(self._bootstrap.clear)
            self._slots = descriptor_limit.acquire()
            undo.callback(descriptor_limit.release)
            self._undo_start = undo.pop_all()

    async def start_driver(
        self,
        scheduler: Scheduler,
        assignment: Assignment,
        store: Store,
        check: Check,
        log_to_driver: bool,
    ) -> Driver:
        """Make the driver and wait for the zygote; then tasks can run.

        Args:
            scheduler: makes the decisions.
            assignment: builds the `Bind` that tells a worker its devices.
            store: keeps values and shared memory.
            check: raises if a call can never be served.
            log_to_driver: True to show the output of workers.

        Raises:
            PreloadError: a module to preload cannot be imported.
            NodeStartError: the zygote ended before it was ready.
        """
        # Imported while the zygote starts, not before.
        from aiogpu.runtime.driver import Driver
        from aiogpu.runtime.objects.store import DescriptorServer
        from aiogpu.runtime.output import Console
        from aiogpu.runtime.workers.pool import Pool
        from aiogpu.runtime.workers.slots import Slots
        from aiogpu.runtime.zygote.zygotes import Zygotes

        assert self._bootstrap is not None
        config, launched = self._bootstrap.config, self._bootstrap.first
        console = Console(self._loop, log_to_driver)
        slots = Slots(self._loop, console, config.directory, self._slots)
        warn_of_few(slots.most_workers)
        scheduler.worker_limit.bound(slots.most_workers)
        shared = (self._loop, console, config, launched, self._bootstrap.preload)
        make_zygotes = partial(Zygotes, *shared, self._wants_program)
        make_pool = partial(Pool, self._loop, make_zygotes, console, store, slots)
        watch: DeviceFactory | None = None
        if any(each.devices for each in scheduler.ledger.device_sets.values()):
            from aiogpu.runtime.devices.monitor import DeviceMonitor
            from aiogpu.runtime.devices.probe_thread import DeviceThread

            sets = scheduler.ledger.device_sets.values()
            thread = DeviceThread(self._loop, sets, assignment.accelerators)
            # Before the zygote is ready, since NVML may take seconds to start.
            watch = partial(DeviceMonitor, self._loop, scheduler, thread, self._roots)
        driver = Driver(
            loop=self._loop,
            scheduler=scheduler,
            assignment=assignment,
            check=check,
            make_pool=make_pool,
            nested=lambda: self.requests,
            warn_owner=self._warn_owner,
            log_failure=self._log_failure,
            watch=watch,
        )
        pool = driver.pool
        store.serve(driver.workers, pool.zygotes.page, driver.actors)
        parts = self._parts = Parts(console, driver, store)
        self._undo_start.pop_all()
        await self._serve(pool, self._bootstrap.listening)
        # While the zygote starts: no worker can have died yet.
        pool.autopsy.begin()
        parts.descriptor_server = DescriptorServer(self._loop, config.directory, store)
        config.directory.renew(
            socket_path(self.directory), partial(self._serve_anew, pool)
        )
        if pool.zygotes.plain.current.ready is None:
            # Import it now, while the zygote starts: the first function needs it.
            import aiogpu.serialization.pickler  # noqa: F401
        await pool.zygotes.plain.ready()
        return driver

    async def _serve(self, pool: Pool, listening: socket.socket) -> None:
        """Accept the node's own processes at a socket."""
        accept = partial(self._accept, partial(self._on_hello, pool))
        server = await self._loop.create_unix_server(accept, sock=listening)
        self._open_parts.servers.append(server)

    def _serve_anew(self, pool: Pool, listening: socket.socket) -> None:
        self._serving = self._loop.create_task(self._serve(pool, listening))

    def _accept(self, on_hello: OnHello) -> Peer:
        from aiogpu.runtime.connection import Peer

        poll = self._poll
        peer = Peer(on_hello, None if poll is None else poll.note)
        self._peers.add(peer)
        if self._is_over:
            peer.abort()
        return peer

    def _on_hello(self, pool: Pool, peer: Peer, hello: Hello) -> Recipient | None:
        # Late, as all frame code: the start of the zygote need not wait for it.
        from aiogpu.wire.connection import CLIENT

        if hello.role != CLIENT:
            try:
                return pool.on_hello(peer, hello)
            except BaseException as error:
                # A worker half taken in would never be missed.
                self._open_parts.driver.on_cut_short(error)
                raise
        self._viewers = self._viewers or self._make_viewers()
        if self._viewers is None:
            peer.refuse("the node is still starting; try again in a moment")
            return None
        return self._viewers.on_hello(peer)

    def _wants_program(self, program: str) -> bool:
        """Return True if a detached actor of a departed program lives on."""
        return self.clients is not None and self.clients.wants(program)

    def _warn_owner(self, client: int, text: str) -> bool:
        """Send another program a warning; False if it is not connected."""
        return self.clients is not None and self.clients.routes.warn(client, text)

    def _log_failure(self, client: int, task: int, label: str, text: str) -> None:
        """Write a failure of another program's task to the log, if there is one."""
        log = None if self.clients is None else self.clients.routes.log
        if log is not None:
            from aiogpu.core.model.text import printable

            for line in text.splitlines():
                log.write(client, task, 2, printable(label), line)

    @cached_property
    def requests(self) -> Requests:
        """The handler of requests; made on first use, since few programs need it."""
        from aiogpu.runtime.callers.requests import Requests

        parts = self._open_parts
        return Requests(parts.driver, parts.store)

    @property
    def _open_parts(self) -> Parts:
        assert self._parts is not None
        return self._parts

    async def welcome(
        self,
        listening: socket.socket,
        server_info: ServerInfo,
        answers: Mapping[str, Answer],
        logs: str | None = None,
    ) -> Clients:
        """Let other programs join over a socket.

        Args:
            listening: the socket, which is bound and listens.
            server_info: the facts sent to each program.
            answers: the questions about the node that programs may ask, by name.
            logs: directory for the log of tasks' output; None for no log.
        """
        from aiogpu.runtime.callers.programs import Clients
        from aiogpu.runtime.output import TaskLog

        parts = self._open_parts
        self._poll = BusyPoll(self._loop)
        self.clients = Clients(
            self._loop,
            parts.driver,
            self.requests,
            parts.driver.pool.zygotes,
            parts.store,
            server_info,
            answers,
            None if logs is None else TaskLog(logs),
        )
        parts.console.routes = self.clients.routes
        await self.clients.listen(listening, self._poll.note)
        return self.clients

    @property
    def console(self) -> Console:
        """The terminal on which the output of tasks is shown."""
        return self._open_parts.console

    @property
    def directory(self) -> str:
        """The directory of the node's sockets."""
        assert self._bootstrap is not None
        return self._bootstrap.config.directory.path

    def _remove_directory(self) -> None:
        assert self._bootstrap is not None
        self._bootstrap.config.directory.remove()

    async def stop(self, on_wait: Callable[[float], object] | None = None) -> None:
        """End tasks, workers, keepers, socket, directory and zygote, in that order.

        Args:
            on_wait: called with the seconds of each wait for the end of a task; see
                `Driver.close`.
        """
        self._undo_start.close()
        parts = self._parts
        if parts is None or self._is_ending:
            return
        self._is_ending = True
        console, driver, pool = parts.console, parts.driver, parts.driver.pool
        console.hold_nothing()
        if self.clients is not None:
            self.clients.stop_listening()
        if driver.devices is not None:
            driver.devices.stop_reporting()
        config = driver.scheduler.config
        timeout = config.cancel_grace + config.exit_grace + SLACK
        await driver.close(timeout, on_wait)
        if driver.devices is not None:
            await driver.devices.close()
        await pool.close()
        if self._viewers is not None:
            self._viewers.close()
        if self.clients is not None:
            # Programs have received the outcomes of all their tasks by now.
            self.clients.close()
            await driver.actors.slices.finish()
            await self.clients.routes.close()
        descriptor_limit.release()
        pool.autopsy.close()
        if parts.descriptor_server is not None:
            parts.descriptor_server.close()
        # Before the zygote ends: if this process is killed now, the zygote cleans up.
        # From here on no process can connect.
        self._remove_directory()
        # A process such as a late keeper may have connected without sending `Hello`.
        # The loop may have accepted it, but not have called `_accept` yet.
        self._is_over = True
        await pool.zygotes.close()
        for peer in list(self._peers):
            peer.abort()
        # Last, because a closing asyncio server loses connections just accepted.
        for server in parts.servers:
            server.close()
        await pool.zygotes.cgroup.remove()
        pool.report_left()
        await console.drain(SLACK)
        console.close()

    def close_now(self) -> None:
        """Close without an event loop; workers end when they notice it."""
        self._undo_start.close()
        parts = self._parts
        if parts is None or self._is_ending:
            return
        self._is_ending = True
        parts.driver.pool.autopsy.close()
        self._remove_directory()
        descriptor_limit.release()
        if parts.driver.devices is not None:
            parts.driver.devices.quit()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of live workers and of holders of leases, by id."""
        if self._parts is None:
            return {}
        driver = self._parts.driver
        return {**driver.holders, **driver.pool.pids}

    async def guard_devices(self, enforces: bool, foreign: str) -> None:
        """Set the reactions to the state of devices; see `NodeOptions`.

        Args:
            enforces: end workers that use more device memory than they reserved.
            foreign: the use of devices with foreign processes.
        """
        devices = self._open_parts.driver.devices
        if devices is not None:
            devices.guard.enforces = enforces
            await devices.set_foreign(foreign)

    def _roots(self) -> dict[int, int]:
        """Return the root processes of workers: process id to worker id."""
        if self._parts is None:
            return {}
        pool = self._parts.driver.pool
        workers, unended = pool.workers.values(), pool.unended
        # A keeper adopts the orphans of its worker.
        keepers = {w.slot.keeper_pid: int(w.id) for w in workers if w.slot.keeper_pid}
        left = {pid: worker for worker in unended for pid in unended[worker].pids}
        return keepers | left | {w.pid: int(w.id) for w in workers if w.pid}

    @property
    def observed(self) -> Observations:
        """The latest samples of the devices."""
        devices = None if self._parts is None else self._parts.driver.devices
        return {} if devices is None else devices.observed
