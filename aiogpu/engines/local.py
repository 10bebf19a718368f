"""This machine, in this process: an embedded node."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from aiogpu.accelerators.base import Accelerator
from aiogpu.accelerators.registry import INSTALLED
from aiogpu.core.devices import DeviceSet
from aiogpu.core.ledger import Ledger
from aiogpu.core.policy import Patience
from aiogpu.core.resources import CPU, TYPE_PREFIX, UNIT, quantity
from aiogpu.core.scheduler import Scheduler
from aiogpu.core.snapshot import NodeStatus, snapshot
from aiogpu.core.specs import TaskSpec
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import InfeasibleError, NodeClosedError, SerializationError
from aiogpu.runtime.assignment import Assignment
from aiogpu.runtime.call import Receiver, Site
from aiogpu.runtime.cpus import usable_cpus
from aiogpu.runtime.driver import Driver
from aiogpu.runtime.supervisor import Supervisor
from aiogpu.wire.frames import LIMIT

T = TypeVar("T")

LARGEST_PAYLOAD: Final = LIMIT - 4096
"""Bytes that a call's arguments may have; the rest of a frame is small."""
WARM: Final = 8
"""Idle workers kept beside one for each CPU."""


class LocalEngine:
    """An embedded node: the scheduler and all connections live on the loop."""

    def __init__(self, options: NodeOptions, loop: asyncio.AbstractEventLoop) -> None:
        self._options = options
        self._loop = loop
        self._supervisor = Supervisor(loop)
        self._driver: Driver | None = None
        # Left on sites that were found feasible; it outlives the node, so is small.
        self._mark = object()

    def __repr__(self) -> str:
        return f"<LocalEngine {self._driver!r}>"

    async def open(self) -> None:
        """Detect what there is while the zygote starts; see `Engine.open`."""
        options = self._options
        try:
            await self._supervisor.start_zygote(options.preload, options.log_to_driver)
            ledger = build_ledger(
                options, [await self._detect(vendor) for vendor in INSTALLED]
            )
            patience = Patience(
                cancel_grace=options.cancel_grace,
                idle_workers=WARM + ledger.capacity[CPU] // UNIT,
            )
            self._driver = await self._supervisor.start_driver(
                Scheduler(ledger, patience), Assignment(INSTALLED, ledger, os.environ)
            )
        except BaseException:
            await self._supervisor.stop()
            raise

    async def _detect(self, vendor: Accelerator) -> DeviceSet:
        wanted = self._options.num_gpus
        environ = dict(os.environ)
        devices = await in_thread(lambda: vendor.devices(environ, wanted))
        return DeviceSet(vendor.kind, devices)

    @property
    def _open_driver(self) -> Driver:
        if self._driver is None:
            raise NodeClosedError("this node is not running.")
        return self._driver

    def submit(self, site: Site, payload: bytes, receiver: Receiver) -> int:
        """Start a task; see `Engine.submit`."""
        driver = self._driver
        if driver is None or site.checked_by is not self._mark:
            driver = self._open_driver
            reason = driver.scheduler.ledger.why_infeasible(site.spec.shape.request)
            if reason is not None:
                raise _infeasible(site.spec, reason, self.total())
            _check_size(f"the function {site.spec.name}", site.function.payload)
            site.checked_by = self._mark
        if len(payload) > LARGEST_PAYLOAD:
            _check_size(f"the arguments of {site.spec.name}.remote()", payload)
        return driver.submit(site, payload, receiver)

    def cancel(self, task: int) -> None:
        """Stop a task; see `Engine.cancel`."""
        if self._driver is not None:
            self._driver.cancel(task)

    def total(self) -> dict[str, float]:
        """All resources by name."""
        return self._open_driver.scheduler.ledger.totals()

    def available(self) -> dict[str, float]:
        """What is free of each."""
        return self._open_driver.scheduler.ledger.available()

    def status(self) -> NodeStatus:
        """Who holds what, what waits and why."""
        return snapshot(self._open_driver.scheduler, self._supervisor.pids)

    async def close(self) -> None:
        """Stop all tasks and leave nothing behind."""
        await self._supervisor.stop()

    def abandon(self) -> None:
        """The same in haste."""
        self._supervisor.abandon()


def _check_size(what: str, payload: bytes) -> None:
    if len(payload) > LARGEST_PAYLOAD:
        raise SerializationError(
            f"{what}: {len(payload)} bytes when pickled; a call carries at most "
            f"{LARGEST_PAYLOAD}. Pass the path of a file, or split it over several "
            f"calls."
        )


def build_ledger(options: NodeOptions, device_sets: list[DeviceSet]) -> Ledger:
    """The node's resources from what was declared and what was detected.

    A type declared by `accelerator_type=`, or by one custom resource
    `accelerator_type:X`, is that of all devices whose type is not known.
    """
    cpus = usable_cpus() if options.num_cpus is None else options.num_cpus
    scalars = {CPU: quantity("num_cpus", cpus)}
    for name, amount in options.resources.items():
        scalars[name] = quantity(f"resources[{name!r}]", amount)
    declared = options.accelerator_type
    types = [name for name in scalars if name.startswith(TYPE_PREFIX)]
    if declared is None and len(types) == 1:
        declared = types[0].removeprefix(TYPE_PREFIX)
    typed = [
        DeviceSet(
            devices.kind,
            [
                replace(device, type=device.type or declared)
                for device in devices.devices
            ],
        )
        for devices in device_sets
    ]
    for devices in typed:
        for device in devices.devices:
            if device.type is not None:
                scalars.setdefault(TYPE_PREFIX + device.type, UNIT)
    return Ledger(scalars, typed)


def _infeasible(
    spec: TaskSpec, reason: str, total: dict[str, float]
) -> InfeasibleError:
    has = ", ".join(f"{name}: {amount:g}" for name, amount in total.items())
    return InfeasibleError(
        f"{spec.name} asks for {spec.shape.request}, which this node can never "
        f"give: it lacks {reason}. It has {{{has}}}. Ask for less, or start the node "
        f"with more."
    )


async def in_thread(function: Callable[[], T]) -> T:
    """Await a blocking function in a thread that ends with it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - it is raised at the await
            _hand_over(loop, future, None, error)
        else:
            _hand_over(loop, future, result, None)

    threading.Thread(target=run, name="aiogpu-detect", daemon=True).start()
    return await future


def _hand_over(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[T],
    result: T | None,
    error: BaseException | None,
) -> None:
    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        return  # the loop has closed; nobody waits any more
