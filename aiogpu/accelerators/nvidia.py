"""NVIDIA GPUs: detected by NVML, assigned by `CUDA_VISIBLE_DEVICES`.

One of pynvml's two doors; the other, `nvml_watch`, asks what is on a device while a
node runs. Decides what a missing, broken or half-answering NVML
means: less is known, a reason is kept, and nothing is raised. NVML is started and
shut down again within each detection, for a caller may fork later.

Indices are CUDA's under `CUDA_DEVICE_ORDER=PCI_BUS_ID`, which is how NVML and
nvidia-smi count. CUDA's own default, FASTEST_FIRST, counts otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, islice
from logging import getLogger
from operator import itemgetter
from types import ModuleType
from typing import Any, Final

from aiogpu.core.devices import Device
from aiogpu.core.resources import GPU, device_quantity

from .nvml_watch import NvmlWatch
from .visible import VISIBLE, Inventory, entries, require, resolve

ORDER: Final = "CUDA_DEVICE_ORDER"
BY_BUS: Final = "PCI_BUS_ID"
NOSET: Final = "AIOGPU_NOSET_CUDA_VISIBLE_DEVICES"
LIBRARY: Final = "libnvidia-ml.so.1"

_TRUE = frozenset({"1", "true", "yes", "on"})

# "NVIDIA A100-SXM4-40GB" is an A100, "NVIDIA RTX PRO 6000 ..." an RTX-PRO-6000: a
# word, then capital words, then the first token of capitals that has a digit.
_PRODUCT = re.compile(r"\w+\s+((?:[A-Z]+\s+)*[A-Z0-9]*[0-9][A-Z0-9]*)")

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
            The devices, with type, UUID, name and memory where NVML says so. Ids
            are indices, or UUID strings where an index would be ambiguous: the
            user wrote UUIDs, chose another order, or a device does not answer.

        Raises:
            DeviceError: `CUDA_VISIBLE_DEVICES` has an entry that is ill-formed,
                not there, ambiguous or repeated, or fewer entries than `wanted`.
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
        return resolve(text, inventory(), by_bus=by_bus)[:wanted]

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

        "NVIDIA A100-SXM4-40GB" is "A100", "NVIDIA GeForce RTX 5090" is
        "GeForce-RTX-5090"; no name has no type.
        """
        return _type_of(name)

    def watch(self) -> NvmlWatch:
        """Make what asks NVML which processes and how much memory are on a GPU."""
        return NvmlWatch()


def _type_of(name: str | None) -> str | None:
    words = (name or "").split()
    product = " ".join(words)
    match = _PRODUCT.match(product)
    if match is not None and len(match[1]) > 1:
        return match[1].replace(" ", "-")
    return product.removeprefix("NVIDIA ").replace(" ", "-") or None


def _order(environ: Mapping[str, str]) -> str:
    return environ.get(ORDER) or BY_BUS


def _all_of(there: Inventory, wanted: int | None, by_bus: bool) -> tuple[Device, ...]:
    # If a device does not answer, CUDA may or may not count it: then an index says
    # too little, as it does under an order that NVML cannot tell.
    indexed = by_bus and (there.count is None or there.is_complete)
    found = [
        device if indexed else replace(device, id=device.uuid or device.id)
        for device in there.devices
    ]
    if wanted is None:
        return tuple(found)
    taken = {device.id for device in there.devices}
    logical = (Device(index) for index in count() if index not in taken)
    found += islice(logical, max(0, wanted - len(found)))
    return tuple(found[:wanted])


def inventory() -> Inventory:
    """Ask NVML which GPUs this process may use. Never raises.

    Without NVML nothing is known. If NVML is there but fails, what it did say is
    kept, `problem` holds the first reason, and one warning is logged.
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
    survey = _Survey()
    survey.run()
    if survey.problem is not None:
        _warn(survey.problem)
    return Inventory(tuple(survey.devices), survey.count, survey.problem)


def _warn(problem: str) -> None:
    _log.warning("! %s; GPUs are known only in part, or not at all.", problem)


@dataclass(slots=True)
class _Survey:
    """One conversation with NVML, and what has been learnt by its end."""

    devices: list[Device] = field(default_factory=list)
    count: int | None = None
    problem: str | None = None

    def run(self) -> None:
        try:
            import pynvml as nvml
        except ImportError as error:
            self._note("pynvml cannot be imported", error)
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._note("NVML does not start", error)
            return
        try:
            self._look(nvml)
        finally:
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _look(self, nvml: ModuleType) -> None:
        try:
            total = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            self._note("NVML cannot count the GPUs", error)
            return
        buses: list[tuple[int, int, int] | None] = []
        self.count = 0
        for index in range(total):
            try:
                device, bus = self._describe(nvml, index, self.count)
            except nvml.NVMLError_NoPermission:
                # Kept from us, by a cgroup say: NVML counts it, CUDA does not.
                continue
            except nvml.NVMLError as error:
                self._note(f"GPU {index} does not answer", error)
            else:
                self.devices.append(device)
                buses.append(bus)
            self.count += 1
        self._sort(buses)

    def _describe(
        self, nvml: ModuleType, index: int, position: int
    ) -> tuple[Device, tuple[int, int, int] | None]:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = self._ask(nvml, nvml.nvmlDeviceGetUUID, handle)
        name = self._ask(nvml, nvml.nvmlDeviceGetName, handle)
        memory = self._ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        pci = self._ask(nvml, nvml.nvmlDeviceGetPciInfo, handle)
        total = memory.total if memory else 0
        device = Device(position, _type_of(name), uuid, name, total)
        return device, (pci.domain, pci.bus, pci.device) if pci else None

    def _ask(
        self, nvml: ModuleType, question: Callable[[object], Any], handle: object
    ) -> Any | None:
        try:
            return question(handle)
        except nvml.NVMLError_GpuIsLost:
            raise
        except nvml.NVMLError_NotSupported:
            return None  # Not every product has memory of its own, say.
        except (nvml.NVMLError, UnicodeDecodeError) as error:
            self._note(f"{question.__name__} fails", error)
            return None

    def _sort(self, buses: Sequence[tuple[int, int, int] | None]) -> None:
        # NVML's manual promises no order. CUDA is told to count by bus, so count
        # likewise, unless a gap leaves open what the indices mean.
        known = [bus for bus in buses if bus is not None]
        if len(known) == self.count and known != sorted(known):
            pairs = sorted(zip(known, self.devices, strict=True), key=itemgetter(0))
            self.devices = [
                replace(device, id=position)
                for position, (_, device) in enumerate(pairs)
            ]

    def _note(self, what: str, error: Exception) -> None:
        if self.problem is None:
            self.problem = f"{what}: {error}"
