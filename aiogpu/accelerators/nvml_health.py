"""Whether GPUs are well, by NVML: XIDs, the action to recover, and who is lost.

Decides which device an event concerns: all instances of a GPU, one of them, or, where
it cannot be told whose it is, all devices. What follows from it is decided elsewhere.
"""

from __future__ import annotations

from contextlib import suppress
from types import ModuleType
from typing import NamedTuple

from .health import Health
from .nvml_events import XidEvents
from .nvml_faults import ACTION_FIELD, RESET, is_fault, told_action, told_xid


class Part(NamedTuple):
    """What a device is of.

    Attributes:
        gpu: UUID of its GPU, its own unless it is a MIG instance.
        handle: NVML's, of the GPU; of instances NVML tells no health.
        place: ids of the GPU instance and the compute instance, None if it is none or
            they are unknown.
    """

    gpu: str
    handle: object
    place: tuple[int, int] | None = None


class NvmlHealth:
    """What has happened to the devices that are asked about."""

    def __init__(self) -> None:
        self._events = XidEvents()
        self._parts: dict[str, Part] = {}
        # Each once, in order; nobody may ask for long.
        self._xids: dict[str, dict[int, None]] = {}

    def __repr__(self) -> str:
        return f"<NvmlHealth of {len(self._parts)} devices>"

    def check(self, nvml: ModuleType, uuid: str, handle: object) -> Health:
        """Say what was learnt of a device since it was asked about last.

        Args:
            nvml: the library, started.
            uuid: of the device.
            handle: NVML's.

        Raises:
            NVMLError: NVML was shut down, or the device is lost or not there, and
                nothing else is known of it.
        """
        part = self._part(nvml, uuid, handle)
        with suppress(nvml.NVMLError_GpuIsLost):  # Said below, with what led to it.
            self._events.register(nvml, part.gpu, part.handle)
        for xid in self._events.take(nvml):
            for known, its in self._parts.items():
                if xid.concerns(its.gpu, its.place):
                    self._xids.setdefault(known, {})[xid.number] = None
        action, is_lost = _action(nvml, part.handle)
        if is_lost:
            self._events.withdraw(part.gpu)
        xids = self._xids.pop(uuid, {})
        errors = tuple(told_xid(xid) for xid in xids if is_fault(xid, action))
        return Health(errors, action, is_lost)

    def _part(self, nvml: ModuleType, uuid: str, handle: object) -> Part:
        # Not kept for good: what an instance is of changes when it is made anew.
        try:
            self._parts[uuid] = _part(nvml, uuid, handle)
        except nvml.NVMLError_GpuIsLost:
            if uuid not in self._parts:
                raise
        return self._parts[uuid]

    def forget(self) -> None:
        """NVML was shut down by others and started again."""
        self._events.forget()

    def close(self, nvml: ModuleType) -> None:
        """Want no more events."""
        self._events.close(nvml)


def _part(nvml: ModuleType, uuid: str, handle: object) -> Part:
    if not uuid.startswith("MIG-"):
        return Part(uuid, handle)
    gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    try:
        place = (
            nvml.nvmlDeviceGetGpuInstanceId(handle),
            nvml.nvmlDeviceGetComputeInstanceId(handle),
        )
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return Part(nvml.nvmlDeviceGetUUID(gpu), gpu)
    return Part(nvml.nvmlDeviceGetUUID(gpu), gpu, place)


def _action(nvml: ModuleType, handle: object) -> tuple[str | None, bool]:
    """What has to be done to recover, and whether the GPU is lost."""
    told = None
    try:
        told = _told_action(nvml, handle)
        # Drivers that know no action still know a GPU that does not answer.
        nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_GpuIsLost:
        return None, True
    except nvml.NVMLError_ResetRequired:
        return RESET, False
    except nvml.NVMLError_Uninitialized:
        raise
    except nvml.NVMLError:
        pass  # Nothing more is known; `look` says why.
    return told, False


def _told_action(nvml: ModuleType, handle: object) -> str | None:
    try:
        [field] = nvml.nvmlDeviceGetFieldValues(handle, [ACTION_FIELD])
    except (
        nvml.NVMLError_GpuIsLost,
        nvml.NVMLError_ResetRequired,
        nvml.NVMLError_Uninitialized,
    ):
        raise
    except nvml.NVMLError:
        return None
    if field.nvmlReturn == nvml.NVML_SUCCESS:
        return told_action(field.value.uiVal)
    if field.nvmlReturn == nvml.NVML_ERROR_GPU_IS_LOST:
        raise nvml.NVMLError_GpuIsLost
    return None
