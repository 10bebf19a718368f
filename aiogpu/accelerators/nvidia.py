"""NVIDIA GPUs: detected by NVML, assigned by `CUDA_VISIBLE_DEVICES`.

The id of a device is its index if CUDA certainly counts the same way, else its UUID.
`nvml.survey` asks NVML, `visible` reads the variable.

Indices are CUDA's under `CUDA_DEVICE_ORDER=PCI_BUS_ID`, which is how NVML and
nvidia-smi count. CUDA's own default, FASTEST_FIRST, counts otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from logging import getLogger
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.request import Device
from aiogpu.core.model.units import GPU

from .listed_devices import ListedAccelerator, require
from .visible import VISIBLE, Inventory, entries, resolve

if TYPE_CHECKING:
    from .base import DeviceWatch, Id

ORDER: Final = "CUDA_DEVICE_ORDER"
BY_BUS: Final = "PCI_BUS_ID"
LIBRARY: Final = "libnvidia-ml.so.1"

_log = getLogger(__name__)


class Nvidia(ListedAccelerator):
    """NVIDIA GPUs, the accelerator behind `num_gpus`."""

    kind = GPU
    option = "num_gpus"
    variable = VISIBLE

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        """Return the GPUs that a node may share out.

        Blocks while NVML starts, up to seconds if no persistence daemon runs.

        Args:
            environ: read for `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER`.
            wanted: how many the user asked for, at least 0; None to detect them. May
                exceed what there is if `CUDA_VISIBLE_DEVICES` is unset: such devices
                are logical. With 0, or an empty list, NVML is not asked.

        Returns:
            The devices with their facts from NVML: type, UUID, name, memory, compute
                capability, PCI address, and the devices that NVLink joins with it. A
                GPU in MIG mode is not a device; each of its instances is.

            Ids are indices, or UUID strings where an index would be ambiguous: the
            user wrote UUIDs or chose another order, a device does not answer, or a GPU
            is in MIG mode, where the GPUs that CUDA counts depend on what else it sees
            ("CUDA Device Enumeration" in NVIDIA's MIG guide). By the same page a
            process uses one MIG instance at most, and no whole GPU beside it.

        Raises:
            DeviceError: `CUDA_VISIBLE_DEVICES` has an entry that is ill-formed, not
                there, ambiguous, repeated, or a GPU in MIG mode without an instance;
                or it has fewer entries than `wanted`.
        """
        if wanted == 0:
            return ()
        by_bus = _order(environ) == BY_BUS
        text = environ.get(VISIBLE)
        if text is None:
            return _all_of(inventory(), wanted, by_bus)
        named = entries(text)
        require(self.option, wanted, VISIBLE, text, len(named))
        if not named:
            return ()
        return _among(resolve(text, inventory(), by_bus=by_bus)[:wanted])

    def assignment(
        self, ids: Sequence[Id], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the variables that give a worker these GPUs and no others.

        Args:
            ids: the `Device.id`s of its GPUs, empty to hide them all.
            environ: the worker's environment otherwise. A `CUDA_DEVICE_ORDER` in it
                stays; `AIOGPU_NOSET_CUDA_VISIBLE_DEVICES` (1, true, yes or on) leaves
                all variables to the user.
        """
        variables = super().assignment(ids, environ)
        if variables and ids and not environ.get(ORDER):
            variables[ORDER] = BY_BUS
        return variables

    def type_of(self, name: str | None) -> str | None:
        """Derive the type from the product's name, by Ray's rule.

        "NVIDIA A100-SXM4-40GB" is "A100", as are its MIG instances; "NVIDIA GeForce
        RTX 5090" is "GeForce-RTX-5090". Without a name there is no type.
        """
        from .nvml.survey import type_of

        return type_of(name)

    def watch(self) -> DeviceWatch:
        """Return the watch that samples GPUs by NVML."""
        from .nvml.watch import NvmlWatch  # only where there is a GPU

        return NvmlWatch()


def _order(environ: Mapping[str, str]) -> str:
    return environ.get(ORDER) or BY_BUS


def _all_of(there: Inventory, wanted: int | None, by_bus: bool) -> tuple[Device, ...]:
    # An index is ambiguous if a device does not answer (CUDA may or may not count it),
    # beside MIG, and under an order that NVML does not know.
    indexed = by_bus and not there.mig and (there.count is None or there.is_complete)
    devices = [
        device if indexed else replace(device, id=device.uuid or device.id)
        for device in there.devices
    ]
    if wanted is None:
        return _among(devices)
    taken = {device.id for device in (*there.devices, *(mig.gpu for mig in there.mig))}
    logical = (Device(index) for index in count() if index not in taken)
    devices += islice(logical, max(0, wanted - len(devices)))
    return _among(devices[:wanted])


def _among(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the devices without links to devices that are not among them."""
    uuids = frozenset(device.uuid for device in devices if device.uuid is not None)
    return tuple(
        device if device.links <= uuids else replace(device, links=device.links & uuids)
        for device in devices
    )


def inventory() -> Inventory:
    """Ask NVML which GPUs this process may use. Never raises.

    Without NVML nothing is known. If NVML fails, the facts known so far are kept,
    `problem` holds the first reason, and one warning is logged. A warning is logged as
    well for each GPU in MIG mode that has no instance.
    """
    from ctypes import CDLL

    try:
        CDLL(LIBRARY)  # Cheap, whereas importing pynvml takes some 20 ms.
    except OSError as error:
        problem = f"NVML cannot be loaded: {error}"
        # A missing library is no failure; a damaged library is.
        if "No such file" not in str(error):
            _warn(problem)
        return Inventory(problem=problem)
    from .nvml.survey import Survey

    there = Survey().run()
    if there.problem is not None:
        _warn(there.problem)
    for mig in there.mig:
        if not mig.instances:
            _log.warning("! %s", mig.why_unused)
    return there


def _warn(problem: str) -> None:
    _log.warning("! %s; GPUs are known only in part, or not at all.", problem)
