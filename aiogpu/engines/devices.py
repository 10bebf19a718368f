"""The devices of a node: declared in `init`, or detected on this machine.

Drivers block, so each vendor is asked in its own thread. If a driver hangs, the node
waits for a limited time and abandons the thread. A node has the GPUs of one vendor;
`detect` chooses it.
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
from aiogpu.errors import AiogpuError, DeviceError, OptionError
from aiogpu.linux.cgroup import usable_cpus
from aiogpu.linux.procfs import MemoryBounds

if TYPE_CHECKING:
    from aiogpu.accelerators.base import Accelerator


T = TypeVar("T")


LIMIT: Final = 30.0
"""Seconds that a vendor may take; NVML has needed 20 to wake eight GPUs."""


_log: Final = logging.getLogger(__name__)


class Detection(NamedTuple):
    """The result of a vendor's detection: its devices, or an error."""

    vendor: Accelerator
    devices: tuple[Device, ...] = ()
    error: BaseException | None = None

    @property
    def is_seen(self) -> bool:
        """True if a device was detected, not only named by the user."""
        return any(device != Device(device.id) for device in self.devices)


async def detect(
    vendors: Sequence[Accelerator],
    environ: Mapping[str, str],
    wanted: Mapping[str, int],
    limit: float = LIMIT,
) -> list[Detection]:
    """Ask all vendors for their devices.

    Args:
        vendors: the vendors in order. The first GPU vendor with GPUs provides the
            node's GPUs; if none has any, the first GPU vendor does.
        environ: the environment of the program.
        wanted: number of devices that the user requests, by kind.
        limit: seconds that each vendor may take.

    Returns:
        The detections with devices, and always the detection of GPUs, first.

    Raises:
        DeviceError: requested devices do not exist.
    """
    first = next((vendor for vendor in vendors if vendor.kind == GPU), None)

    def wanted_of(vendor: Accelerator) -> int | None:
        number = wanted.get(vendor.kind)
        # A second GPU vendor must detect GPUs, not make logical ones.
        is_first = vendor.kind != GPU or vendor is first
        return number if is_first or not number else None

    detections = await asyncio.gather(
        *(_ask(vendor, environ, wanted_of(vendor), limit) for vendor in vendors)
    )
    others = [detection for detection in detections if detection.vendor.kind != GPU]
    chosen = _owner(
        [detection for detection in detections if detection.vendor.kind == GPU]
    )
    if chosen.vendor is not first and wanted.get(GPU):
        chosen = await _ask(chosen.vendor, environ, wanted[GPU], limit)
    for detection in (chosen, *others):
        if detection.error is not None:
            raise detection.error
    return [chosen, *(detection for detection in others if detection.devices)]


def _owner(detections: Sequence[Detection]) -> Detection:
    """Return the vendor of the node's GPUs; errors of later vendors are ignored."""
    in_order = (
        detection for detection in detections if detection.is_seen or detection.error
    )
    owner = next(in_order, None)
    if owner is None:
        return next(
            (detection for detection in detections if detection.devices), detections[0]
        )
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
) -> Detection:
    try:
        async with asyncio.timeout(limit) as clock:
            devices = await in_thread(lambda: _devices(vendor, environ, wanted))
    except AiogpuError as error:
        return Detection(vendor, error=error)
    except Exception as error:  # noqa: BLE001 - reported as the vendor's error
        if not clock.expired():
            what = f"{type(error).__name__}: {error}"
            failed = DeviceError(f"{vendor!r} cannot list its devices: {what}")
            failed.__cause__ = error
            return Detection(vendor, error=failed)
    else:
        return Detection(vendor, devices)
    if wanted:
        return Detection(
            vendor,
            error=DeviceError(
                f"{vendor.option}={wanted}, but {vendor!r} has not listed its devices "
                f"within {limit:g} seconds. Check whether its driver and tools answer."
            ),
        )
    _log.warning(
        "! %r has not listed its devices within %g s; none is shared out.",
        vendor,
        limit,
    )
    return Detection(vendor)


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
    """Check the answers of a user's vendor, which would fail later in tasks."""
    if not all(isinstance(device, Device) for device in devices):
        raise TypeError(f"devices() returned {devices!r}, which are no Devices")
    ids = [device.id for device in devices]
    if len(set(ids)) < len(ids):
        raise ValueError(f"devices() returned the ids {ids!r}, one of them twice")
    if wanted is not None and len(ids) != wanted:
        raise ValueError(f"devices() returned {len(ids)} devices instead of {wanted}")
    for assigned in (ids, ids[:0]):
        variables = vendor.assignment(assigned, environ)
        if not isinstance(variables, dict) or not all(
            isinstance(text, str) for pair in variables.items() for text in pair
        ):
            raise TypeError(
                f"assignment({assigned!r}) returned {variables!r}, no dict of str"
            )


async def in_thread(function: Callable[[], T]) -> T:
    """Await a blocking function in a thread that ends with it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 - raised at the await
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
        return  # the loop has closed


NEARLY: Final = 1 / 16
"""Tolerance of declared memory, as a fraction: the driver keeps some of "80 GB"."""


async def take_inventory(
    options: NodeOptions,
) -> tuple[Ledger, tuple[Accelerator, ...]]:
    """Detect the resources that were not declared.

    Returns:
        The node's resources, and the vendors in use: the vendor of the GPUs, and
        vendors of other kinds that have devices here. Variables of other vendors are
        not changed.

    Raises:
        DeviceError: requested devices do not exist.
    """
    detections = await detect(
        await in_thread(vendors), dict(os.environ), _declared_devices(options)
    )
    device_sets = [
        DeviceSet(detection.vendor.kind, detection.devices) for detection in detections
    ]
    in_use = tuple(detection.vendor for detection in detections)
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
    """Combine declared and detected resources.

    A type declared by `accelerator_type=`, or by one custom resource
    `accelerator_type:X`, applies to all GPUs of unknown type; `gpu_memory=` applies to
    GPUs of unknown memory. Detected facts take precedence.
    """
    cpus = usable_cpus() if options.num_cpus is None else options.num_cpus
    memory = _main_memory(device_sets, options)
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


def _main_memory(device_sets: Sequence[DeviceSet], options: NodeOptions) -> int:
    """Return the main memory of the node in bytes.

    A GPU that NVML knows by its name, but without memory, uses that of the machine
    (GB10, Jetson). What `gpu_memory=` declares for such GPUs is not counted twice.

    Raises:
        OptionError: the machine has less than is declared for its GPUs.
    """
    if options.memory is not None:
        return options.memory
    memory = MemoryBounds().safe_limit()
    sharing = [
        device
        for devices in device_sets
        if devices.kind == GPU
        for device in devices.devices
        if device.name and not device.memory
    ]
    declared = len(sharing) * (options.gpu_memory or 0)
    if declared >= memory:
        names = ", ".join(f"GPU {device.id} ({device.name})" for device in sharing)
        raise OptionError(
            f"init(gpu_memory={size(options.gpu_memory or 0)!r}): the memory of "
            f"{names} is that of the machine, which has {size(memory)} for all of them "
            f"and for tasks without a GPU. Declare less, or give memory= as well."
        )
    return memory - declared


def _completed(
    gpus: DeviceSet, declared: str | None, options: NodeOptions
) -> DeviceSet:
    """Return the GPUs with declared facts where detection found none."""
    memory = options.gpu_memory or 0
    declared_options = {
        "accelerator_type": options.accelerator_type,
        "gpu_memory": options.gpu_memory and size(options.gpu_memory),
    }
    unused = [f"{name}={value!r}" for name, value in declared_options.items() if value]
    if unused and not gpus.devices:
        _log.warning(
            "! init(%s) has no effect, since this node has no GPUs; pass num_gpus= "
            "as well for logical GPUs.",
            ", ".join(unused),
        )
    wrong = [device for device in gpus.devices if _contradicts(memory, device)]
    if wrong:
        _log.warning(
            "! init(gpu_memory=%r) applies only to GPUs whose memory is not detected; "
            "GPU %s has %s, which is used.",
            size(memory),
            wrong[0].id,
            size(wrong[0].memory),
        )
    declared_type = options.accelerator_type
    if (
        declared_type
        and gpus.devices
        and all(gpu.type not in (None, declared_type) for gpu in gpus.devices)
    ):
        _log.warning(
            "! init(accelerator_type=%r) applies only to GPUs whose type is not "
            "detected; GPU %s is of type %r, which is used.",
            declared_type,
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
    difference = abs(memory - device.memory)
    return bool(memory and device.memory) and difference > NEARLY * device.memory
