"""The devices of a node: declared in `init`, or detected on this machine.

Vendors block by nature, so each has a thread for as long as it answers. One that hangs
costs a node nothing but the wait: its thread is left behind. Of the vendors of GPUs one
has a node's; which one is decided here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from aiogpu.accelerators.registry import is_registered, kinds, vendors
from aiogpu.core.model.request import Device
from aiogpu.core.model.units import CPU, GPU, MEMORY, TYPE_PREFIX, UNIT, quantity, size
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import AiogpuError, DeviceError
from aiogpu.linux.cgroup import usable_cpus
from aiogpu.linux.procfs import MemoryBounds

if TYPE_CHECKING:
    from aiogpu.accelerators.base import Accelerator


T = TypeVar("T")


LIMIT: Final = 30.0
"""Seconds that a vendor may take; NVML has taken 20 to wake eight GPUs."""


_log: Final = logging.getLogger(__name__)


class Found(NamedTuple):
    """The result of a vendor's detection: its devices, or why there are none."""

    vendor: Accelerator
    devices: tuple[Device, ...] = ()
    error: BaseException | None = None

    @property
    def is_seen(self) -> bool:
        """True if a device was met, not only spoken of."""
        return any(device != Device(device.id) for device in self.devices)


async def detect(
    vendors: Sequence[Accelerator],
    environ: Mapping[str, str],
    wanted: Mapping[str, int],
    limit: float = LIMIT,
) -> list[Found]:
    """Ask all vendors for their devices.

    Args:
        vendors: whom to ask, in order; of those of GPUs the first that has any has the
            node's, and the first of all if none has.
        environ: the environment of the program.
        wanted: how many the user gave, by kind.
        limit: seconds that each may take.

    Returns:
        Who has devices to share out, the one of the GPUs in any case.

    Raises:
        DeviceError: the devices asked for are not there.
    """
    first = next((vendor for vendor in vendors if vendor.kind == GPU), None)

    def asked(vendor: Accelerator) -> int | None:
        number = wanted.get(vendor.kind)
        # What others would make of a number says nothing of what there is.
        is_first = vendor.kind != GPU or vendor is first
        return number if is_first or not number else None

    found = await asyncio.gather(
        *(_ask(vendor, environ, asked(vendor), limit) for vendor in vendors)
    )
    others = [each for each in found if each.vendor.kind != GPU]
    chosen = _owner([each for each in found if each.vendor.kind == GPU])
    if chosen.vendor is not first and wanted.get(GPU):
        chosen = await _ask(chosen.vendor, environ, wanted[GPU], limit)
    for each in (chosen, *others):
        if each.error is not None:
            raise each.error
    return [chosen, *(each for each in others if each.devices)]


def _owner(found: Sequence[Found]) -> Found:
    """Return the vendor of the node's GPUs; errors of later vendors are ignored."""
    in_order = (each for each in found if each.is_seen or each.error)
    owner = next(in_order, None)
    if owner is None:
        return next((each for each in found if each.devices), found[0])
    for other in in_order:
        if other.is_seen:
            _log.warning(
                "! the GPUs of this node are those of %r; %d of %r are not shared out.",
                owner.vendor,
                len(other.devices),
                other.vendor,
            )
    return owner


async def _ask(
    vendor: Accelerator, environ: Mapping[str, str], wanted: int | None, limit: float
) -> Found:
    try:
        async with asyncio.timeout(limit) as clock:
            devices = await in_thread(lambda: _devices(vendor, environ, wanted))
    except AiogpuError as error:
        return Found(vendor, error=error)
    except Exception as error:  # noqa: BLE001 - told as the vendor's, whatever it is
        if not clock.expired():
            what = f"{type(error).__name__}: {error}"
            told = DeviceError(f"{vendor!r} cannot say which devices there are: {what}")
            told.__cause__ = error
            return Found(vendor, error=told)
    else:
        return Found(vendor, devices)
    if wanted:
        return Found(
            vendor,
            error=DeviceError(
                f"{vendor.option}={wanted}, but {vendor!r} has not said for {limit:g} "
                f"seconds which there are. See whether its driver and its tools answer."
            ),
        )
    _log.warning(
        "! %r has not said for %g s which devices there are; none is shared out.",
        vendor,
        limit,
    )
    return Found(vendor)


def _devices(
    vendor: Accelerator, environ: Mapping[str, str], wanted: int | None
) -> tuple[Device, ...]:
    devices = tuple(vendor.devices(environ, wanted))
    if is_registered(vendor.kind):
        _check(vendor, environ, wanted, devices)
    return devices


def _check(
    vendor: Accelerator,
    environ: Mapping[str, str],
    wanted: int | None,
    devices: tuple[Device, ...],
) -> None:
    """Refuse answers of a user's vendor that would fail in the midst of a task."""
    if not all(isinstance(device, Device) for device in devices):
        raise TypeError(f"devices() gave {devices!r}, which are no Devices")
    ids = [device.id for device in devices]
    if len(set(ids)) < len(ids):
        raise ValueError(f"devices() gave the ids {ids!r}, one of them twice")
    if wanted is not None and len(ids) != wanted:
        raise ValueError(f"devices() gave {len(ids)} where {wanted} were wanted")
    for some in (ids, ids[:0]):
        given = vendor.assignment(some, environ)
        if not isinstance(given, dict) or not all(
            isinstance(text, str) for pair in given.items() for text in pair
        ):
            raise TypeError(f"assignment({some!r}) gave {given!r}, no dict of texts")


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


NEARLY: Final = 1 / 16
"""By how much a declared memory may be off: the driver keeps some of "80 GB"."""


async def take_inventory(
    options: NodeOptions,
) -> tuple[Ledger, tuple[Accelerator, ...]]:
    """Detect what was not declared; drivers are asked in threads, for they block.

    Returns:
        What there is, and the vendors that are in use: the one of the GPUs, and those
        of other kinds that have devices here. The variables of the rest are nobody's
        affair.

    Raises:
        DeviceError: the devices asked for are not there.
    """
    found = await detect(
        await in_thread(vendors), dict(os.environ), _declared_devices(options)
    )
    device_sets = [DeviceSet(each.vendor.kind, each.devices) for each in found]
    in_use = tuple(each.vendor for each in found)
    return build_ledger(options, device_sets), in_use


def _declared_devices(options: NodeOptions) -> dict[str, int]:
    known = kinds()
    wanted = {
        name: int(amount) for name, amount in options.resources.items() if name in known
    }
    if options.num_gpus is not None:
        wanted[GPU] = options.num_gpus
    return wanted


def build_ledger(options: NodeOptions, device_sets: Sequence[DeviceSet]) -> Ledger:
    """The node's resources from what was declared and what was detected.

    A type declared by `accelerator_type=`, or by one custom resource
    `accelerator_type:X`, is that of all GPUs whose type is not known; so is the memory
    declared by `gpu_memory=`. What was detected is never overruled.
    """
    cpus = usable_cpus() if options.num_cpus is None else options.num_cpus
    memory = MemoryBounds().safe_limit() if options.memory is None else options.memory
    scalars = {CPU: quantity("num_cpus", cpus), MEMORY: memory * UNIT}
    known = {*kinds(), *(devices.kind for devices in device_sets)}
    for name, amount in options.resources.items():
        if name not in known:
            scalars[name] = quantity(f"resources[{name!r}]", amount)
    others = {
        device.type
        for devices in device_sets
        if devices.kind != GPU
        for device in devices.devices
    }
    declared = options.accelerator_type
    types = [name for name in scalars if name.startswith(TYPE_PREFIX)]
    types = [name for name in types if name.removeprefix(TYPE_PREFIX) not in others]
    if declared is None and len(types) == 1:
        declared = types[0].removeprefix(TYPE_PREFIX)
    completed = [
        _completed(devices, declared, options) if devices.kind == GPU else devices
        for devices in device_sets
    ]
    for devices in completed:
        for device in devices.devices:
            if device.type is not None:
                scalars.setdefault(TYPE_PREFIX + device.type, UNIT)
    return Ledger(scalars, completed)


def _completed(
    gpus: DeviceSet, declared: str | None, options: NodeOptions
) -> DeviceSet:
    """GPUs with what was declared of them, where it was not detected."""
    memory = options.gpu_memory or 0
    given = {
        "accelerator_type": options.accelerator_type,
        "gpu_memory": options.gpu_memory and size(options.gpu_memory),
    }
    idle = [f"{name}={value!r}" for name, value in given.items() if value]
    if idle and not gpus.devices:
        _log.warning(
            "! init(%s) is said of GPUs, and this node has none; say num_gpus= as "
            "well for logical ones.",
            ", ".join(idle),
        )
    wrong = [device for device in gpus.devices if _contradicts(memory, device)]
    if wrong:
        _log.warning(
            "! init(gpu_memory=%r) is said of GPUs whose memory is not detected; GPU "
            "%s has %s, and that counts.",
            size(memory),
            wrong[0].id,
            size(wrong[0].memory),
        )
    told = options.accelerator_type
    if (
        told
        and gpus.devices
        and all(one.type not in (None, told) for one in gpus.devices)
    ):
        _log.warning(
            "! init(accelerator_type=%r) is said of GPUs whose type is not detected; "
            "GPU %s is of type %r, and that counts.",
            told,
            gpus.devices[0].id,
            gpus.devices[0].type,
        )
    return DeviceSet(
        gpus.kind,
        [
            replace(
                device, type=device.type or declared, memory=device.memory or memory
            )
            for device in gpus.devices
        ],
    )


def _contradicts(memory: int, device: Device) -> bool:
    off = abs(memory - device.memory)
    return bool(memory and device.memory) and off > NEARLY * device.memory
