"""Tasks in the calling process, one after the other, in the order of submission.

Actors are objects in this process, called as soon as the loop is free. For tests and
debuggers: breakpoints, monkeypatches and coverage work in tasks and actors. As far as
one process can, tasks behave as in a worker: copies of values, devices, variables,
errors, timeouts, retries, cancelling. A plain function blocks the loop and cannot be
interrupted; a coroutine is awaited on the loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from importlib import import_module
from itertools import count
from typing import Final, cast

from aiogpu.client.current import error_inside_task
from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import Receiver
from aiogpu.engines.base import NodeOptions
from aiogpu.engines.devices import take_inventory
from aiogpu.engines.inline.actors import InlineActors
from aiogpu.engines.inline.execution import InlineExecutor, LoopRunner
from aiogpu.engines.inline.jobs import actor_job, running_job
from aiogpu.engines.inline.node import InlineNode, MonotonicLoop, node_id
from aiogpu.engines.local import DriverEngine
from aiogpu.errors import PreloadError
from aiogpu.runtime.driver import Driver

_numbers: Final = count(1)
PATIENCE: Final = 3600.0
"""Seconds within which at least one task must end while the node closes."""


class InlineEngine(DriverEngine):
    """A node without processes."""

    runs_together = False

    def __init__(self, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            options, cast("asyncio.AbstractEventLoop", MonotonicLoop(loop))
        )
        self.home = f"inline {next(_numbers)}"

    async def open(self) -> None:
        """Import the modules of `preload`, and detect resources."""
        options = self._options
        for module in options.preload:
            try:
                import_module(module)
            except Exception as error:
                cause = f"{type(error).__name__}: {error}".rstrip(".")
                raise PreloadError(
                    f"init(preload=...) names {module!r}, which cannot be imported: "
                    f"{cause}. Install it, or leave it out."
                ) from error
        ledger, vendors = await take_inventory(options)
        node = InlineNode(
            self._loop,
            ledger,
            vendors,
            options.cancel_grace,
            self.pack,
        )
        loop = asyncio.get_running_loop()
        executor = InlineExecutor(is_silent=not options.log_to_driver)
        node.actors = InlineActors(loop, node, LoopRunner(loop, node, executor))
        self._driver = node

    @property
    def _node(self) -> InlineNode:
        return cast("InlineNode", self._open_driver)

    def _driver_for(self, what: str) -> Driver:
        """Return the driver to the program; refuse tasks, as in a worker."""
        if running_job.get() is not None or actor_job.get() is not None:
            raise error_inside_task(what)
        return self._open_driver

    @property
    def waits(self) -> InlineEngine:
        """The observer of waits: waiting tasks let others run."""
        return self

    def begin_wait(self, task: int) -> None:
        """Note that code waits for a task."""
        if self._driver is not None:
            self._node.begin_wait(task)

    def end_wait(self, task: int) -> None:
        """Note that a wait has ended before its task."""
        if self._driver is not None:
            self._node.end_wait(task)

    def settle(self, task: int) -> None:
        """Note that a task has ended."""
        if self._driver is not None:
            self._node.settle(task)

    def submit(self, func: FunctionSpec, payload: bytes, receiver: Receiver) -> int:
        """Queue a task; see `Engine.submit`."""
        return self._node.submit(func, payload, receiver)

    @property
    def _node_id(self) -> str:
        return node_id()

    @property
    def _pids(self) -> Mapping[int, int]:
        node = self._node
        return {**dict.fromkeys(node.pool.workers, os.getpid()), **node.holders}

    def announce_stop(self) -> None:
        """Inform tasks that their program stops; see `Engine.announce_stop`."""
        if self._driver is not None:
            self._driver.announce_stop()

    async def close(self) -> None:
        """Stop all tasks and release all resources."""
        if self._driver is not None:
            await self._driver.close(PATIENCE)
        if self._store is not None:
            self._store.close()

    def force_close(self) -> None:
        """Close without a grace period; see `Engine.force_close`."""
        if self._driver is not None:
            self._node.force_close()

    def close_now(self) -> None:
        """Close at once, without an event loop."""
        if self._driver is not None:
            self._node.stack.close_now()

    def after_fork(self) -> None:
        """Do nothing: a fork has its own copy of the node."""
