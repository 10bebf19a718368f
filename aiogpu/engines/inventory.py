"""What a node has to share out: declared in `init`, or detected on this machine."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from aiogpu.accelerators.base import Accelerator
from aiogpu.accelerators.registry import INSTALLED
from aiogpu.core.devices import DeviceSet
from aiogpu.core.ledger import Ledger
from aiogpu.core.resources import CPU, MEMORY, TYPE_PREFIX, UNIT, quantity
from aiogpu.engines.base import NodeOptions
from aiogpu.runtime.cpus import usable_cpus
from aiogpu.runtime.memory_bounds import MemoryBounds

T = TypeVar("T")


async def take_inventory(options: NodeOptions) -> Ledger:
    """Detect what was not declared; drivers are asked in a thread, for they block.

    Raises:
        DeviceError: the devices asked for are not there.
    """
    found = [await _detect(vendor, options.num_gpus) for vendor in INSTALLED]
    return build_ledger(options, found)


async def _detect(vendor: Accelerator, wanted: int | None) -> DeviceSet:
    environ = dict(os.environ)
    devices = await in_thread(lambda: vendor.devices(environ, wanted))
    return DeviceSet(vendor.kind, devices)


def build_ledger(options: NodeOptions, device_sets: list[DeviceSet]) -> Ledger:
    """The node's resources from what was declared and what was detected.

    A type declared by `accelerator_type=`, or by one custom resource
    `accelerator_type:X`, is that of all devices whose type is not known.
    """
    cpus = usable_cpus() if options.num_cpus is None else options.num_cpus
    memory = MemoryBounds().safe_limit() if options.memory is None else options.memory
    scalars = {CPU: quantity("num_cpus", cpus), MEMORY: memory * UNIT}
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
