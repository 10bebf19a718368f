"""Starts a node's parts in order, and stops them in reverse.

Directory, socket, zygote, pool, driver. A start that fails half-way takes back what it
has made; a stop is bounded in time and leaves nothing behind.

A service stays awake for a moment where the next message is about to come
(`BusyPoll`). Between a client and a worker a node has nothing to do for some tens of
microseconds, and waking it costs more than that: measured on two cores, a call through
the service takes 102 to 130 us with this and 290 us without. It costs CPU only while
messages follow each other so closely that it pays, and a node of a program's own, on a
loop that is not ours, never does it.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from aiogpu.runtime.descriptors import descriptor_limit, warn_of_few
from aiogpu.runtime.directories import remove_directory
from aiogpu.runtime.node_cgroup import NodeCgroup
from aiogpu.runtime.zygote.config import Bootstrap
from aiogpu.wire.messages import descriptor_path

if TYPE_CHECKING:
    from aiogpu.core.scheduler.scheduler import Scheduler
    from aiogpu.observe.status import Observations
    from aiogpu.runtime.actors.registry import Check
    from aiogpu.runtime.callers.programs import Clients, ServerInfo
    from aiogpu.runtime.callers.requests import Requests
    from aiogpu.runtime.callers.viewers import Answer, Viewers
    from aiogpu.runtime.connection import Greeted, Peer, Recipient
    from aiogpu.runtime.devices.binding import Assignment
    from aiogpu.runtime.driver import DeviceFactory, Driver
    from aiogpu.runtime.objects.store import DescriptorServer, Store
    from aiogpu.runtime.output import Console
    from aiogpu.runtime.workers.pool import Pool
    from aiogpu.wire.messages import Hello


SHORT: Final = 300e-6
"""Seconds; after a pause between two messages that was no longer, it stays awake."""


AWAKE: Final = 100e-6
"""Seconds for which it does, from the last message on."""


class BusyPoll:
    """Keeps the loop awake where the next message is about to come."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._last = 0.0
        self._is_awake = False
        # With one CPU it would only keep the others from running.
        self._may = len(os.sched_getaffinity(0)) > 1

    def note(self, count: int) -> None:
        """Note that `count` messages came together.

        Several are a flood: there the next ones are long under way, and whoever sends
        them needs the CPU.
        """
        if count != 1:
            self._last = 0.0
            return
        before, self._last = self._last, perf_counter()
        if not self._is_awake and self._may and self._last - before < SHORT:
            self._is_awake = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Have the loop look again at once, instead of sleeping."""
        if perf_counter() - self._last < AWAKE:
            self._loop.call_soon(self._look)
        else:
            self._is_awake = False


SLACK: Final = 5.0
"""Seconds that a stop may take beyond the grace that the core gives."""


@dataclass(slots=True, eq=False)
class Parts:
    """All that a node is made of while it runs."""

    console: Console
    driver: Driver
    store: Store
    server: asyncio.AbstractServer | None = None
    descriptor_server: DescriptorServer | None = None


class Supervisor:
    """The life of one node's processes and sockets.

    Args:
        loop: runs it.
        make_viewers: makes what answers commands on the node's own socket, when the
            first one comes; returns None while the node is only starting.

    Attributes:
        clients: the programs that have joined; None where none can.
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
        self._is_ending = False
        self._is_over = False

    def start_zygote(
        self, preload: Sequence[str], learns: bool = False, spill: str = ""
    ) -> None:
        """Make the directory and the socket, and start the zygote.

        It is not waited for: the caller has a ledger to find out meanwhile. After
        a failure, `stop` takes back what was made.

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
        """Wait for the zygote; from here on tasks can run.

        Args:
            scheduler: decides.
            assignment: tells workers their devices.
            store: keeps values and shared memory.
            check: raises where a call can never be served.
            log_to_driver: whether what workers print is shown.

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
        from aiogpu.runtime.zygote.generations import Zygotes

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
        if any(held.devices for held in scheduler.ledger.device_sets.values()):
            from aiogpu.runtime.devices.monitor import DeviceMonitor
            from aiogpu.runtime.devices.probe_thread import DeviceThread

            sets = scheduler.ledger.device_sets.values()
            thread = DeviceThread(self._loop, sets, assignment.accelerators)
            # Before the zygote is ready: a driver may take seconds to start.
            watch = partial(DeviceMonitor, self._loop, scheduler, thread, self._roots)
        driver = Driver(
            *(self._loop, scheduler, assignment, check, make_pool),
            *(lambda: self.requests, self._warn_owner, self._log_failure, watch),
        )
        pool = driver.pool
        store.serve(driver.workers, pool.zygotes.page, driver.actors)
        parts = self._parts = Parts(console, driver, store)
        self._undo_start.pop_all()
        parts.server = await self._loop.create_unix_server(
            partial(self._accept, partial(self._greeted, pool)),
            sock=self._bootstrap.listening,
        )
        # While the zygote starts: nothing can have died yet.
        pool.autopsy.begin()
        parts.descriptor_server = DescriptorServer(
            self._loop, descriptor_path(self.directory), store
        )
        if pool.zygotes.plain.current.ready is None:
            # A program's first function needs it, and now there is time.
            import aiogpu.serialization.pickler  # noqa: F401
        await pool.zygotes.plain.ready()
        return driver

    def _accept(self, greeted: Greeted) -> Peer:
        from aiogpu.runtime.connection import Peer

        poll = self._poll
        peer = Peer(greeted, None if poll is None else poll.note)
        self._peers.add(peer)
        if self._is_over:
            peer.abort()
        return peer

    def _greeted(self, pool: Pool, peer: Peer, hello: Hello) -> Recipient | None:
        # Late, like all that reads frames: the zygote's start need not wait for it.
        from aiogpu.wire.connection import CLIENT

        if hello.role != CLIENT:
            return pool.greeted(peer, hello)
        self._viewers = self._viewers or self._make_viewers()
        if self._viewers is None:
            peer.refuse("the node is only starting; ask in a moment")
            return None
        return self._viewers.greeted(peer)

    def _wants_program(self, program: str) -> bool:
        """Return whether anything lives of a program that has left."""
        return self.clients is not None and self.clients.wants(program)

    def _warn_owner(self, client: int, text: str) -> bool:
        """Have another program log a warning; False if it is this one or has gone."""
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
        """Takes in what tasks and programs ask; few programs have tasks that do."""
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
            listening: it is bound, and listens.
            server_info: what they find here.
            answers: what they can ask of the node.
            logs: directory for what their tasks print; None for no log of it.
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
    def directory(self) -> str:
        """The directory of the node's sockets."""
        assert self._bootstrap is not None
        return self._bootstrap.config.directory

    async def stop(self) -> None:
        """End tasks, workers, keepers, socket, directory and zygote, in that order."""
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
            driver.devices.quiet()
        config = driver.scheduler.config
        await driver.close(config.cancel_grace + config.exit_grace + SLACK)
        if driver.devices is not None:
            await driver.devices.close()
        await pool.close()
        if self._viewers is not None:
            self._viewers.close()
        if self.clients is not None:
            # Told by now how all of theirs has ended.
            self.clients.close()
            await self.clients.routes.close()
        descriptor_limit.release()
        pool.autopsy.close()
        if parts.descriptor_server is not None:
            parts.descriptor_server.close()
        # Before the zygote is asked to end: if we are killed now, it does this. From
        # here on nobody can come.
        remove_directory(self.directory)
        # Whoever has connected and not said who it is, such as a late keeper; the loop
        # may have let it in, and not have made its connection yet.
        self._is_over = True
        await pool.zygotes.close()
        for peer in list(self._peers):
            peer.abort()
        # Not before: asyncio loses whom a server has let in as it closes.
        if parts.server is not None:
            parts.server.close()
        await pool.zygotes.cgroup.remove()
        await console.drain(SLACK)
        console.close()

    def close_now(self) -> None:
        """Close without an event loop; workers notice by themselves."""
        self._undo_start.close()
        parts = self._parts
        if parts is None or self._is_ending:
            return
        self._is_ending = True
        parts.driver.pool.autopsy.close()
        remove_directory(self.directory)
        descriptor_limit.release()
        if parts.driver.devices is not None:
            parts.driver.devices.quit()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the live workers, by worker id, and of holders of leases."""
        if self._parts is None:
            return {}
        driver = self._parts.driver
        return {**driver.holders, **driver.pool.pids}

    async def guard_devices(self, enforces: bool, foreign: str) -> None:
        """Say what follows from what is seen on devices; see `NodeOptions`.

        Args:
            enforces: whether to end who uses more device memory than it reserved.
            foreign: what becomes of devices with others' processes.
        """
        devices = self._open_parts.driver.devices
        if devices is not None:
            devices.guard.enforces = enforces
            await devices.mind_foreign(foreign)

    def _roots(self) -> dict[int, int]:
        """The processes whose descendants are a worker's, with the worker's id."""
        live = self._parts.driver.workers if self._parts is not None else {}
        workers = live.values()
        # A keeper adopts what its worker orphans.
        keepers = {w.slot.keeper_pid: int(w.id) for w in workers if w.slot.keeper_pid}
        return keepers | {w.pid: int(w.id) for w in workers if w.pid}

    @property
    def observed(self) -> Observations:
        """The latest samples of the devices."""
        devices = None if self._parts is None else self._parts.driver.devices
        return {} if devices is None else devices.observed
