"""Asks a node once a second for its status, and keeps the last hour.

All tabs are drawn from one answer, so that a tab costs the node nothing. After the node
has ended, the collector looks for its successor.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from aiogpu.engines.base import NodeOptions
from aiogpu.engines.remote import RemoteEngine
from aiogpu.errors import AiogpuError, NodeError
from aiogpu.observe.owners import Owners
from aiogpu.observe.status import EndedTask, NodeStatus, held_tasks
from aiogpu.observe.task_list import TaskPage, TaskQuery
from aiogpu.observe.trace import Span, trace_of
from aiogpu.observe.why import Why
from aiogpu.wire.messages import CANCEL, END_LEASE, KILL

INTERVAL: Final = 1.0
"""Seconds between two questions."""
HOUR: Final = 3600
"""Samples that are kept, one for each interval."""
PATIENCE: Final = 15.0
"""Seconds that the node has to answer."""
SPANS: Final = 500
"""Ended tasks of a timeline. An answer takes the node's loop 1.1 ms, 2.6 ms at most;
with all 10 000 tasks it would take 28 ms."""
WINDOW: Final = 10
"""Samples over which a rate is measured."""

KINDS: Final = {CANCEL: "task", KILL: "actor", END_LEASE: "lease"}
"""What each request stops."""
DONE: Final = {CANCEL: "Cancelled", KILL: "Killed", END_LEASE: "Ended"}


class DeviceSample(NamedTuple):
    """The figures of a device at one moment.

    Attributes:
        shares: the share that each program holds, by its number.
        memory: the part of its memory that is used, from 0 to 1; None if unknown.
        utilisation: percent of the time in which it was busy; None if unknown.
        temperature: degrees Celsius; None if unknown.
    """

    shares: tuple[tuple[int, float], ...]
    memory: float | None
    utilisation: int | None
    temperature: int | None


class Sample(NamedTuple):
    """The figures of a node at one moment.

    Attributes:
        time: seconds since the epoch.
        running: the number of tasks with a worker, and of leases.
        waiting: the number of waiting tasks.
        ended: the number of attempts that have ended since the node began.
        devices: the devices, by their names.
    """

    time: float
    running: int
    waiting: int
    ended: int
    devices: Mapping[str, DeviceSample]


class Collector:
    """The last status of a node and the samples of an hour.

    Attributes:
        status: the last status; None before the first.
        seen: when it came, in seconds since the epoch.
        problem: why there is no newer status; "" while the node answers.
        samples: the last hour, the latest last.
        count: the number of statuses so far.
        address: the path of the node's socket; "" before a node was found.
        is_read_only: nothing is stopped.
    """

    def __init__(
        self, locate: Callable[[], str], *, is_read_only: bool = False
    ) -> None:
        """Make a collector.

        Args:
            locate: returns the address of the node, and raises `AiogpuError` if there
                is none; called in a thread, whenever a node is to be joined.
            is_read_only: refuse to stop anything.
        """
        self.address = ""
        self.is_read_only = is_read_only
        self._locate = locate
        self.status: NodeStatus | None = None
        self.seen = 0.0
        self.problem = "Joining the node."
        self.samples: deque[Sample] = deque(maxlen=HOUR)
        self.count = 0
        self._timeline: asyncio.Future[list[Span]] | None = None
        self._timeline_until = 0.0
        self._engine: RemoteEngine | None = None

    def __repr__(self) -> str:
        return f"<Collector of {len(self.samples)} samples>"

    async def run(self) -> None:
        """Follow the node, and the next node at its place, until cancelled."""
        while True:
            try:
                await self._follow()
            except TimeoutError:
                self.problem = f"The node has not answered for {PATIENCE:g} s."
            except (AiogpuError, OSError) as error:
                self.problem = str(error)
            await asyncio.sleep(INTERVAL)

    async def _follow(self) -> None:
        address = self.address = await asyncio.to_thread(self._locate)
        loop = asyncio.get_running_loop()
        options = NodeOptions(only_looks=True, log_to_driver=False)
        engine = RemoteEngine(address, options, loop)
        try:
            async with asyncio.timeout(PATIENCE):
                await engine.open()
            self._engine = engine
            due = loop.time()
            while True:
                async with asyncio.timeout(PATIENCE):
                    status = await engine.status()
                self.take(status, time.time())
                due = max(due + INTERVAL, loop.time())
                await asyncio.sleep(due - loop.time())
        finally:
            self._engine = None
            engine.force_close()
            with suppress(AiogpuError):  # the node has ended, and is left by that
                await engine.close()

    def take(self, status: NodeStatus, now: float) -> None:
        """Keep a status that came at a time in seconds since the epoch."""
        self.status, self.seen, self.problem = status, now, ""
        ended = sum(status.outcomes.values())
        running = len(held_tasks(status))
        # What has not changed is kept once: an hour of an unchanged node is small.
        before = self.samples[-1].devices if self.samples else {}
        devices: Mapping[str, DeviceSample] = _device_samples(status)
        if devices == before:
            devices = before
        self.samples.append(Sample(now, running, status.waiting_count, ended, devices))
        self.count += 1

    async def why(self, task: int) -> Why | None:
        """Return why a task waits, or how it has ended; None if it is unknown.

        Raises:
            NodeError: no node answers.
        """
        return await self._joined().why_task(task)

    async def timeline(self) -> list[Span]:
        """Return the running tasks and the last that have ended; see `SPANS`.

        Tabs that ask within a second share an answer.

        Raises:
            NodeError: no node answers.
        """
        if time.monotonic() >= self._timeline_until or self._timeline is None:
            engine = self._joined()
            self._timeline_until = time.monotonic() + INTERVAL / 2
            self._timeline = asyncio.ensure_future(engine.timeline(SPANS))
        return await asyncio.shield(self._timeline)

    async def trace(self) -> dict[str, Any]:
        """Return all spans that the node remembers, as Perfetto reads them.

        Raises:
            NodeError: no node answers.
        """
        return trace_of(await self._joined().timeline())

    async def failed_calls(self, actor: int) -> tuple[EndedTask, ...]:
        """Return the last failed call of each method of an actor, with traceback.

        Raises:
            NodeError: no node answers.
        """
        return await self._joined().ended(actor)

    async def list_tasks(self, query: TaskQuery) -> TaskPage:
        """Return a page of a list of tasks.

        Raises:
            NodeError: no node answers.
        """
        return await self._joined().list_tasks(query)

    async def stop(self, what: str, number: int) -> str:
        """Cancel a task, kill an actor or end a lease; return a sentence about it.

        Args:
            what: `CANCEL`, `KILL` or `END_LEASE`.
            number: its number on the node.

        Raises:
            NodeError: no node answers, or this dashboard changes nothing.
        """
        if self.is_read_only:
            raise NodeError(
                "this dashboard was started with --read-only, and stops nothing."
            )
        kind, _ = await self._joined().stop_task(what, number)
        if kind == KINDS[what]:
            return f"{DONE[what]} {kind} {number}."
        if kind in ("", "stopping"):
            state = "is already being stopped" if kind else "had already ended"
            return f"{KINDS[what]} {number} {state}.".capitalize()
        return f"Nothing was stopped: number {number} is of the kind {kind}."

    def _joined(self) -> RemoteEngine:
        if self._engine is None:
            raise NodeError(self.problem)
        return self._engine

    def throughput(self) -> float | None:
        """Return the tasks that ended per second, over ten seconds.

        None if that is not known yet, as after a restart of the node.
        """
        if len(self.samples) < 2:
            return None
        first, last = self.samples[max(-WINDOW, -len(self.samples))], self.samples[-1]
        seconds, count = last.time - first.time, last.ended - first.ended
        return count / seconds if seconds > 0 and count >= 0 else None


def _device_samples(status: NodeStatus) -> dict[str, DeviceSample]:
    owners = Owners(status)
    samples = {}
    for device in status.devices:
        shares: dict[int, float] = defaultdict(float)
        for holder in device.holders:
            shares[owners.client(holder)] += holder.share
        is_known = device.used is not None and device.memory
        samples[f"{device.kind} {device.id}"] = DeviceSample(
            tuple(sorted(shares.items())),
            (device.used or 0) / device.memory if is_known else None,
            device.utilisation,
            device.temperature,
        )
    return samples
