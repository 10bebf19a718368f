"""NVIDIA GPUs: detected by NVML, assigned by `CUDA_VISIBLE_DEVICES`.

Decides what of all that NVML shows a node may share out, and by which id: an index
where CUDA surely counts likewise, else a UUID. `nvml_survey` asks NVML, `visible`
reads the variable.

Indices are CUDA's under `CUDA_DEVICE_ORDER=PCI_BUS_ID`, which is how NVML and
nvidia-smi count. CUDA's own default, FASTEST_FIRST, counts otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, islice
from logging import getLogger
from typing import TYPE_CHECKING, Final

from aiogpu.core.devices import Device
from aiogpu.core.resources import GPU, device_quantity

from .visible import VISIBLE, Inventory, entries, require, resolve

if TYPE_CHECKING:
    from .nvml_watch import NvmlWatch

ORDER: Final = "CUDA_DEVICE_ORDER"
BY_BUS: Final = "PCI_BUS_ID"
NOSET: Final = "AIOGPU_NOSET_CUDA_VISIBLE_DEVICES"
LIBRARY: Final = "libnvidia-ml.so.1"

_TRUE = frozenset({"1", "true", "yes", "on"})

_log = getLogger(__name__)


class Nvidia:
    """NVIDIA GPUs, the accelerator behind `num_gpus`. Holds no state."""

    kind: Final = GPU
    option: Final = "num_gpus"
    variable: Final = VISIBLE

    def __repr__(self) -> str:
        return "<Nvidia GPU>"

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        """Say which GPUs a node may share out.

        Blocks while NVML starts, up to seconds where no persistence daemon runs.

        Args:
            environ: read for `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER`.
            wanted: how many the user gave, at least 0; None to detect them. May
                exceed what there is if `CUDA_VISIBLE_DEVICES` is unset: such
                devices are logical. 0 asks nobody anything, nor does an empty list.

        Returns:
            The devices, with all that NVML says of them: type, UUID, name, memory,
            compute capability, PCI address, and the other devices among them that
            NVLink joins with each. A GPU in MIG mode is none; its instances are, each
            one a device.

            Ids are indices, or UUID strings where an index would be ambiguous: the
            user wrote UUIDs, chose another order, a device does not answer, or a
            GPU is in MIG mode: which GPUs CUDA counts then depends on what else it
            sees ("CUDA Device Enumeration" in NVIDIA's MIG guide). By the same page
            a process uses one MIG instance at most, and no whole GPU beside it.

        Raises:
            DeviceError: `CUDA_VISIBLE_DEVICES` has an entry that is ill-formed,
                not there, ambiguous or repeated, or fewer entries than `wanted`; or
                one that is a GPU in MIG mode without an instance.
        """
        if wanted == 0:
            return ()
        by_bus = _order(environ) == BY_BUS
        text = environ.get(VISIBLE)
        if text is None:
            return _all_of(inventory(), wanted, by_bus)
        if wanted is not None:
            require(self.option, wanted, text)
        if not entries(text):
            return ()
        return _among(resolve(text, inventory(), by_bus=by_bus)[:wanted])

    def assignment(
        self, ids: Sequence[int | str], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Say which variables give a worker these GPUs and no others.

        Args:
            ids: the `Device.id`s of its GPUs, empty to hide them all.
            environ: the worker's environment otherwise. With `CUDA_DEVICE_ORDER`
                set in it the order stays the user's; with
                `AIOGPU_NOSET_CUDA_VISIBLE_DEVICES` on (1, true, yes or on) all
                variables do.
        """
        if environ.get(NOSET, "").strip().lower() in _TRUE:
            return {}
        variables = {VISIBLE: ",".join(map(str, ids))}
        if ids and not environ.get(ORDER):
            variables[ORDER] = BY_BUS
        return variables

    def quantity(self, value: object) -> int:
        """Turn a `num_gpus` into parts: a share below 1, above it whole GPUs.

        Raises:
            OptionError: `value` is no such number.
        """
        return device_quantity(self.option, value)

    def type_of(self, name: str | None) -> str | None:
        """Derive the type from the product's name, by Ray's rule.

        "NVIDIA A100-SXM4-40GB" is "A100", as are its MIG instances; "NVIDIA GeForce
        RTX 5090" is "GeForce-RTX-5090"; no name has no type.
        """
        from .nvml_survey import type_of

        return type_of(name)

    def watch(self) -> NvmlWatch:
        """Make what asks NVML which processes and how much memory are on a GPU."""
        from .nvml_watch import NvmlWatch  # only where there is a GPU

        return NvmlWatch()


def _order(environ: Mapping[str, str]) -> str:
    return environ.get(ORDER) or BY_BUS


def _all_of(there: Inventory, wanted: int | None, by_bus: bool) -> tuple[Device, ...]:
    # If a device does not answer, CUDA may or may not count it: then an index says
    # too little, as it does beside MIG, or under an order that NVML cannot tell.
    indexed = by_bus and not there.mig and (there.count is None or there.is_complete)
    found = [
        device if indexed else replace(device, id=device.uuid or device.id)
        for device in there.devices
    ]
    if wanted is None:
        return _among(found)
    taken = {device.id for device in (*there.devices, *(mig.gpu for mig in there.mig))}
    logical = (Device(index) for index in count() if index not in taken)
    found += islice(logical, max(0, wanted - len(found)))
    return _among(found[:wanted])


def _among(devices: Sequence[Device]) -> tuple[Device, ...]:
    """These devices, linked with none but each other."""
    uuids = frozenset(device.uuid for device in devices if device.uuid is not None)
    return tuple(
        device if device.links <= uuids else replace(device, links=device.links & uuids)
        for device in devices
    )


def inventory() -> Inventory:
    """Ask NVML which GPUs this process may use. Never raises.

    Without NVML nothing is known. If NVML is there but fails, what it did say is
    kept, `problem` holds the first reason, and one warning is logged; so it is for
    each GPU in MIG mode that nobody can use for want of an instance.
    """
    from ctypes import CDLL

    try:
        CDLL(LIBRARY)  # Cheap, where importing pynvml costs some 20 ms.
    except OSError as error:
        problem = f"NVML cannot be loaded: {error}"
        # Not installed is no failure; a damaged library is.
        if "No such file" not in str(error):
            _warn(problem)
        return Inventory(problem=problem)
    from .nvml_survey import Survey

    there = Survey().run()
    if there.problem is not None:
        _warn(there.problem)
    for mig in there.mig:
        if not mig.instances:
            _log.warning("! %s", mig.why_unused)
    return there


def _warn(problem: str) -> None:
    _log.warning("! %s; GPUs are known only in part, or not at all.", problem)
