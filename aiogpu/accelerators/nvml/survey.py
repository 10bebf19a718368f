"""Lists the GPUs of the machine with their properties, by NVML.

If a call is missing, refused or fails, less is known: the first reason is kept and
nothing is raised. A survey starts NVML and shuts it down again, because the caller may
fork later.

Indices are CUDA's under `CUDA_DEVICE_ORDER=PCI_BUS_ID`, which is how NVML and
nvidia-smi count. A GPU in MIG mode is not a device: its instances are, identified by
UUID.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations
from types import ModuleType
from typing import Any, Final

from aiogpu.core.model.request import Device

from ..visible import Inventory, MigGpu

# "NVIDIA A100-SXM4-40GB" is an A100, "NVIDIA RTX PRO 6000 ..." an RTX-PRO-6000: a
# word, then capital words, then the first token of capitals that has a digit.
_PRODUCT: Final = re.compile(r"\w+\s+((?:[A-Z]+\s+)*[A-Z0-9]*[0-9][A-Z0-9]*)")
_INSTANCE: Final = re.compile(r"\s+MIG\s+\S+$")

Bus = tuple[int, int, int]
"""PCI domain, bus and device of a GPU."""


def type_of(name: str | None) -> str | None:
    """Derive the type from the product's name, by Ray's rule.

    "NVIDIA A100-SXM4-40GB" is "A100". The name of a MIG instance gives the type of its
    GPU. Without a name there is no type.
    """
    words = (name or "").split()
    product = _INSTANCE.sub("", " ".join(words))
    match = _PRODUCT.match(product)
    if match is not None and len(match[1]) > 1:
        return match[1].replace(" ", "-")
    return product.removeprefix("NVIDIA ").replace(" ", "-") or None


@dataclass(slots=True)
class _Gpu:
    """One GPU that has answered.

    Attributes:
        device: its facts; its id is its index.
        handle: NVML's handle.
        bus: its PCI bus; None if NVML does not report it.
        instances: its MIG instances by "GI/CI"; None if it is not in MIG mode.
    """

    device: Device
    handle: object
    bus: Bus | None
    instances: dict[str, Device] | None


@dataclass(slots=True)
class Survey:
    """One survey and its findings.

    Attributes:
        count: number of GPUs, including GPUs that did not answer; None if NVML does not
            report it.
        problem: the first reason why something is unknown; None if all is known.
        sees_mig: the MIG instances of every GPU are certainly known.
    """

    count: int | None = None
    problem: str | None = None
    sees_mig: bool = True
    _gpus: list[_Gpu] = field(default_factory=list)

    def run(self) -> Inventory:
        """Start NVML, ask, and shut it down. Never raises."""
        try:
            import pynvml as nvml
        except ImportError as error:
            self._note("pynvml cannot be imported", error)
            return self._inventory()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._note("NVML does not start", error)
            return self._inventory()
        try:
            self._look(nvml)
        finally:
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()
        return self._inventory()

    def _look(self, nvml: ModuleType) -> None:
        try:
            total = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            self._note("NVML cannot count the GPUs", error)
            return
        self.count = 0
        for index in range(total):
            try:
                self._gpus.append(self._describe(nvml, index, self.count))
            except nvml.NVMLError_NoPermission:
                # Hidden from this process, as by a cgroup. NVML counts it, CUDA does
                # not.
                continue
            except nvml.NVMLError as error:
                self._note(f"GPU {index} does not answer", error)
            self.count += 1
        self._sort()
        self._link(nvml)

    def _describe(self, nvml: ModuleType, index: int, position: int) -> _Gpu:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = self._ask(nvml, nvml.nvmlDeviceGetUUID, handle)
        name = self._ask(nvml, nvml.nvmlDeviceGetName, handle)
        memory = self._ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        pci = self._ask(nvml, nvml.nvmlDeviceGetPciInfo, handle)
        capability = self._ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
        bus = (pci.domain, pci.bus, pci.device) if pci else None
        device = Device(
            position,
            type_of(name),
            uuid,
            name,
            memory.total if memory else 0,
            compute_capability=capability,
            pci=_address(*bus) if bus else None,
        )
        return _Gpu(device, handle, bus, self._instances(nvml, handle, device))

    def _ask(
        self, nvml: ModuleType, question: Callable[..., Any], *about: object
    ) -> Any | None:
        try:
            return question(*about)
        except nvml.NVMLError_GpuIsLost:
            raise
        except nvml.NVMLError_NotSupported:
            return None  # Not every product has, for example, its own memory.
        except (nvml.NVMLError, UnicodeDecodeError) as error:
            self._note(f"{question.__name__} fails", error)
            return None

    def _instances(
        self, nvml: ModuleType, handle: object, gpu: Device
    ) -> dict[str, Device] | None:
        """Return the MIG instances of a GPU; None if it is not in MIG mode."""
        try:
            current, _ = nvml.nvmlDeviceGetMigMode(handle)
            if current != nvml.NVML_DEVICE_MIG_ENABLE:
                return None
            room = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
            return None  # The product or the driver has no MIG.
        except nvml.NVMLError_GpuIsLost:
            raise
        except nvml.NVMLError as error:
            self.sees_mig = False
            self._note(f"whether GPU {gpu.id} is in MIG mode is unknown", error)
            return None
        instances = {}
        for index in range(room):
            try:
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            except (
                nvml.NVMLError_NotFound,
                nvml.NVMLError_InvalidArgument,
                nvml.NVMLError_NoPermission,
            ):
                continue  # No instance of this number, or it is hidden from us.
            except nvml.NVMLError_GpuIsLost:
                raise
            except nvml.NVMLError as error:
                self.sees_mig = False
                self._note(f"MIG instance {index} of GPU {gpu.id} is unknown", error)
                continue
            place, device = self._describe_instance(nvml, instance, gpu)
            if device is not None:
                instances[place or f"?/{index}"] = device
        return instances

    def _describe_instance(
        self, nvml: ModuleType, handle: object, gpu: Device
    ) -> tuple[str | None, Device | None]:
        """Return an instance's place on its GPU and its device; None if unknown."""
        uuid = self._ask(nvml, nvml.nvmlDeviceGetUUID, handle)
        if uuid is None:
            self.sees_mig = False  # An instance has no other name than its UUID.
            return None, None
        name = self._ask(nvml, nvml.nvmlDeviceGetName, handle)
        memory = self._ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        ids = [
            self._ask(nvml, nvml.nvmlDeviceGetGpuInstanceId, handle),
            self._ask(nvml, nvml.nvmlDeviceGetComputeInstanceId, handle),
        ]
        place = None if None in ids else "/".join(map(str, ids))
        return place, replace(
            gpu,
            id=uuid,
            uuid=uuid,
            name=name or gpu.name,
            memory=memory.total if memory else 0,
            parent=gpu.uuid or str(gpu.id),
        )

    def _sort(self) -> None:
        # NVML's manual promises no order. aiogpu makes CUDA count by bus, so count by
        # bus here, unless a GPU that did not answer makes the indices uncertain.
        buses = [gpu.bus for gpu in self._gpus if gpu.bus is not None]
        if len(buses) == self.count:
            self._gpus.sort(key=lambda gpu: gpu.bus or (0, 0, 0))
            for position, gpu in enumerate(self._gpus):
                gpu.device = replace(gpu.device, id=position)

    def _link(self, nvml: ModuleType) -> None:
        """Find the pairs of GPUs that NVLink joins.

        Query pairs, not links: behind an NVSwitch every link ends at a switch.
        """
        whole = [gpu for gpu in self._gpus if gpu.instances is None and gpu.device.uuid]
        for first, second in combinations(whole, 2):
            try:
                status = nvml.nvmlDeviceGetP2PStatus(
                    first.handle, second.handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK
                )
            except (nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotSupported):
                return
            except nvml.NVMLError as error:
                self._note("nvmlDeviceGetP2PStatus fails", error)
                continue
            if status == nvml.NVML_P2P_STATUS_OK:
                _join(first, second)
                _join(second, first)

    def _inventory(self) -> Inventory:
        devices: list[Device] = []
        mig = []
        for gpu in self._gpus:
            if gpu.instances is None:
                devices.append(gpu.device)
                continue
            devices += gpu.instances.values()
            mig.append(MigGpu(gpu.device, tuple(gpu.instances.items())))
        return Inventory(
            tuple(devices), self.count, self.problem, tuple(mig), self.sees_mig
        )

    def _note(self, what: str, error: Exception) -> None:
        if self.problem is None:
            self.problem = f"{what}: {error}"


def _join(gpu: _Gpu, other: _Gpu) -> None:
    peer = other.device.uuid
    assert peer is not None
    gpu.device = replace(gpu.device, links=gpu.device.links | {peer})


def _address(domain: int, bus: int, device: int) -> str:
    return f"{domain:08X}:{bus:02X}:{device:02X}.0"
