"""Health of GPUs by NVML: XIDs, recovery actions, and lost devices.

An XID is NVIDIA's number for an error that the driver reports. NVML delivers the XIDs
of all GPUs in one queue. An event counts for all instances of its GPU, for one of
them, or, if NVML does not say for which GPU it is, for every device.
"""

from __future__ import annotations

from contextlib import suppress
from ctypes import c_void_p, cast
from dataclasses import dataclass
from logging import getLogger
from types import ModuleType
from typing import Any, Final, NamedTuple

from ..base import Health

APPLICATION: Final = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that programs cause on healthy GPUs: the list that NVIDIA's device plugin for
Kubernetes ignores (internal/rm/health.go)."""

RECOVERY_CHANGED: Final = 154
"""The XID which reports that the recovery action has changed, also to none."""

_XIDS: Final = {
    46: "the GPU has stopped processing",
    48: "a double-bit ECC error",
    61: "a breakpoint or warning of the internal micro-controller",
    62: "the internal micro-controller has halted",
    63: "a memory page or row is to be replaced",
    64: "a memory page or row could not be replaced",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    92: "a high rate of single-bit ECC errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "an error of the GPU's system processor",
    140: "an unrecovered memory error",
}
"""The best-known XIDs, from NVIDIA's catalogue."""

ACTION_FIELD: Final = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; older bindings have no name for it."""

RESET: Final = "GPU reset"

_ACTIONS: Final = (
    "",
    RESET,
    "node reboot",
    "drain P2P",
    "drain and reset",
    "recover the IMEX domain",
    "bus reset",
    "system reboot",
)
"""Words by nvmlDeviceGpuRecoveryAction_t."""

AT_ONCE: Final = 256
"""Events taken at once at most, so that a GPU that reports endlessly cannot block."""
WHOLE: Final = 0xFFFFFFFF
"""NVML's id of an instance for events that concern all instances."""

_log = getLogger(__name__)


def is_fault(xid: int, action: str | None) -> bool:
    """Return whether an XID means that the GPU, not a program, has failed.

    Args:
        xid: the number of the XID.
        action: the recovery action, None if NVML does not report it. If NVML does, the
            XID that reports its change adds nothing.
    """
    if xid == RECOVERY_CHANGED:
        return action is None
    return xid not in APPLICATION


def xid_in_words(xid: int) -> str:
    """Return an XID in words: "XID 79 (the GPU has fallen off the bus)"."""
    words = _XIDS.get(xid)
    return f"XID {xid} ({words})" if words else f"XID {xid}"


def action_in_words(action: int) -> str:
    """Return a recovery action in words, "" if nothing must be done."""
    if 0 <= action < len(_ACTIONS):
        return _ACTIONS[action]
    return f"recovery action {action}"  # An unknown action is still one.


@dataclass(frozen=True, slots=True)
class Xid:
    """One event.

    Attributes:
        number: the XID.
        gpu: UUID of its GPU; None if unknown.
        instance: ids of the GPU instance and the compute instance that it concerns,
            each `WHOLE` for all of them.
    """

    number: int
    gpu: str | None
    instance: tuple[int, int] = (WHOLE, WHOLE)

    def concerns(self, gpu: str, place: tuple[int, int] | None) -> bool:
        """Return whether it concerns a GPU, or its MIG instance at `place`."""
        if self.gpu is None:
            return True
        if self.gpu != gpu:
            return False
        return place is None or all(
            event_id in (WHOLE, device_id)
            for event_id, device_id in zip(self.instance, place, strict=True)
        )


class XidEvents:
    """NVML's queue of XIDs of the registered GPUs. Never waits for an event.

    If NVML delivers no events, this logs one warning and returns none.
    """

    def __init__(self) -> None:
        self._set: Any = None
        # UUIDs by the address of the handle, since a lost GPU keeps its handle.
        self._gpus: dict[int | None, str] = {}
        self._is_quiet = False

    def __repr__(self) -> str:
        return f"<XidEvents of {len(self._gpus)} GPUs>"

    def register(self, nvml: ModuleType, uuid: str, handle: object) -> None:
        """Register a GPU for events; does nothing if it is registered.

        Raises:
            NVMLError: NVML was shut down, or the GPU is lost.
        """
        address = _address(handle)
        if address in self._gpus:
            return
        try:
            if self._set is None:
                self._set = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(
                handle, nvml.nvmlEventTypeXidCriticalError, self._set
            )
        except (nvml.NVMLError_Uninitialized, nvml.NVMLError_GpuIsLost):
            raise
        except nvml.NVMLError as error:
            self._note(error)
        self._gpus[address] = uuid

    def withdraw(self, uuid: str) -> None:
        """Forget a lost GPU: it must be registered again when it is back."""
        self._gpus = {at: gpu for at, gpu in self._gpus.items() if gpu != uuid}

    def take(self, nvml: ModuleType) -> list[Xid]:
        """Return the events since the last call.

        Raises:
            NVMLError: NVML was shut down.
        """
        xids: list[Xid] = []
        while self._set is not None and len(xids) < AT_ONCE:
            try:
                event = nvml.nvmlEventSetWait_v2(self._set, 0)
            except nvml.NVMLError_Uninitialized:
                raise
            except (nvml.NVMLError_Timeout, nvml.NVMLError_GpuIsLost):
                break  # The queue is empty; a query of each GPU finds a lost one.
            except nvml.NVMLError as error:
                self._note(error)
                break
            if event.eventType == nvml.nvmlEventTypeXidCriticalError:
                place = (event.gpuInstanceId, event.computeInstanceId)
                xids.append(Xid(event.eventData, self._gpu(nvml, event.device), place))
        return xids

    def _gpu(self, nvml: ModuleType, handle: object) -> str | None:
        known = self._gpus.get(_address(handle))
        if known is not None:
            return known
        try:
            uuid: str = nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError:
            return None
        return uuid

    def forget(self) -> None:
        """Forget all GPUs, because other code has shut NVML down."""
        self._set = None
        self._gpus.clear()

    def close(self, nvml: ModuleType) -> None:
        """Free the queue."""
        events, self._set = self._set, None
        self._gpus.clear()
        if events is not None:
            with suppress(nvml.NVMLError):
                nvml.nvmlEventSetFree(events)

    def _note(self, error: Exception) -> None:
        if not self._is_quiet:
            self._is_quiet = True
            _log.warning(
                "! NVML reports no XIDs (%s); a failed GPU is noticed only if its "
                "driver reports it otherwise.",
                error,
            )


def _address(handle: Any) -> int | None:
    return cast(handle, c_void_p).value


class Part(NamedTuple):
    """The GPU that a device is, or is a part of.

    Attributes:
        gpu: UUID of the GPU; the device's own unless it is a MIG instance.
        handle: NVML's handle of the GPU; NVML reports no health of instances.
        place: ids of the GPU instance and the compute instance; None if the device is
            not an instance, or they are unknown.
    """

    gpu: str
    handle: object
    place: tuple[int, int] | None = None


class NvmlHealth:
    """The health of queried devices."""

    def __init__(self) -> None:
        self._events = XidEvents()
        self._parts: dict[str, Part] = {}
        # Each XID once, in order: a device may not be queried for a long time.
        self._xids: dict[str, dict[int, None]] = {}

    def __repr__(self) -> str:
        return f"<NvmlHealth of {len(self._parts)} devices>"

    def check(self, nvml: ModuleType, uuid: str, handle: object) -> Health:
        """Return NVML's reports about a device since the last call for this device.

        Args:
            nvml: the library, started.
            uuid: the device's UUID.
            handle: NVML's handle of the device.

        Raises:
            NVMLError: NVML was shut down, or the device is lost or missing and nothing
                else is known about it.
        """
        part = self._part(nvml, uuid, handle)
        with suppress(
            nvml.NVMLError_GpuIsLost
        ):  # Reported below, with the XIDs that led to it.
            self._events.register(nvml, part.gpu, part.handle)
        for xid in self._events.take(nvml):
            for known, part_of_known in self._parts.items():
                if xid.concerns(part_of_known.gpu, part_of_known.place):
                    self._xids.setdefault(known, {})[xid.number] = None
        action, is_lost = _action(nvml, part.handle)
        if is_lost:
            self._events.withdraw(part.gpu)
        xids = self._xids.pop(uuid, {})
        errors = tuple(xid_in_words(xid) for xid in xids if is_fault(xid, action))
        return Health(errors, action, is_lost)

    def _part(self, nvml: ModuleType, uuid: str, handle: object) -> Part:
        # Not cached: an instance that is created again may belong to another GPU.
        try:
            self._parts[uuid] = _part(nvml, uuid, handle)
        except nvml.NVMLError_GpuIsLost:
            if uuid not in self._parts:
                raise
        return self._parts[uuid]

    def forget(self) -> None:
        """Forget the registrations: NVML was shut down by other code."""
        self._events.forget()

    def close(self, nvml: ModuleType) -> None:
        """Free NVML's queue of events."""
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
    """Return the recovery action, and whether the GPU is lost."""
    action = None
    try:
        action = _recovery_action(nvml, handle)
        # Drivers without recovery actions still notice a GPU that does not answer.
        nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_GpuIsLost:
        return None, True
    except nvml.NVMLError_ResetRequired:
        return RESET, False
    except nvml.NVMLError_Uninitialized:
        raise
    except nvml.NVMLError:
        pass  # `look` reports why nothing more is known.
    return action, False


def _recovery_action(nvml: ModuleType, handle: object) -> str | None:
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
        return action_in_words(field.value.uiVal)
    if field.nvmlReturn == nvml.NVML_ERROR_GPU_IS_LOST:
        raise nvml.NVMLError_GpuIsLost
    return None
