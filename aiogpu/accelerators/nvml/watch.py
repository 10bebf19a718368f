"""Samples a GPU by NVML: processes, memory in use, utilisation, temperature and power.

NVML blocks, so one thread alone uses this module. NVML stays open until `close`,
because starting it may take seconds. Drivers back to 440 are supported: if a call is
missing, refused or fails, less is known, as `Sample` shows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from logging import getLogger
from types import ModuleType
from typing import Any, Final, TypeVar

from aiogpu.core.model.request import Device

from ..base import Health, Sample
from .health import NvmlHealth

_log = getLogger(__name__)

T = TypeVar("T")
Question = Callable[[ModuleType, str, object], T]
"""Asks NVML about a device: takes the library, the device's UUID and its handle."""

COMPUTE: Final = "nvmlDeviceGetComputeRunningProcesses"
LISTS: Final = (
    COMPUTE,
    "nvmlDeviceGetMPSComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
)
METERS: Final[dict[str, Callable[[Any, object], float]]] = {
    "utilisation": lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
    "temperature": lambda nvml, handle: nvml.nvmlDeviceGetTemperature(
        handle, nvml.NVML_TEMPERATURE_GPU
    ),
    "power": lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
}
"""Readers of percent, degrees Celsius and watts, in the order of `Sample`."""
VERSIONS: Final = ("_v3", "_v2")
"""Versions of each list, newest first; drivers before 510 and 450 lack them."""
ATTEMPTS: Final = 3
"""Attempts to read a list that grows while it is read."""
SELDOM: Final = 64
"""NVML is restarted at the latest after this many reports of a lost device."""
HOST_NAMESPACE: Final = 0xEFFFFFFC
"""Inode of the initial pid namespace (the kernel's include/linux/proc_ns.h)."""


class NvmlWatch:
    """NVML, open while a node runs; a `DeviceWatch`."""

    def __init__(self) -> None:
        self._nvml: ModuleType | None = None
        self._is_started = False
        self._problem = "NVML is not open"
        self._handles: dict[str, Any] = {}
        # The version of a list that a device supports; None if it supports none.
        self._versions: dict[tuple[str, str], str | None] = {}
        self._not_metered: set[tuple[str, str]] = set()
        self._looked_at: set[str] = set()
        self._losses: dict[str, int] = {}  # consecutive reports that a device is lost
        self._is_foreign = False
        self._health = NvmlHealth()
        self._reads_pids = is_host_namespace()

    def __repr__(self) -> str:
        return f"<NvmlWatch {self._problem if self._nvml is None else 'open'}>"

    def knows(self, device: Device) -> bool:
        """Return whether NVML can be asked about a device: it has a UUID or MIG id.

        Logical devices, and devices that NVML did not show before, have neither.
        """
        return _uuid(device) is not None

    def open(self) -> None:
        """Start NVML; if this fails, every sample holds the reason."""
        try:
            import pynvml as nvml

            nvml.nvmlInit()
        except ImportError as error:
            self._problem = f"pynvml cannot be imported: {error}"
        except nvml.NVMLError as error:
            self._problem = f"NVML does not start: {error}"
        else:
            self._nvml, self._is_started = nvml, True

    @property
    def driver_version(self) -> str | None:
        """The driver's version, such as "570.86.15"; None if unknown."""
        nvml = self._nvml
        if nvml is None:
            return None
        try:
            version: str = nvml.nvmlSystemGetDriverVersion()
        except nvml.NVMLError:
            return None
        return version

    def close(self) -> None:
        """Shut NVML down if it is open."""
        nvml, self._nvml = self._nvml, None
        self._problem = "NVML was closed"
        if nvml is not None:
            self._shut_down(nvml)

    def look(self, device: Device) -> Sample:
        """Return the processes and the memory of a device; see `DeviceWatch`.

        A MIG instance is queried by itself. A call that a device does not support is
        not repeated.
        """
        nvml, uuid = self._nvml, _uuid(device)
        if nvml is None or uuid is None:
            return Sample(problem=self._problem)
        try:
            sample = self._ask(nvml, uuid, self._look)
        except nvml.NVMLError_GpuIsLost as error:
            sample = Sample(problem=str(error), is_lost=True)
        except nvml.NVMLError as error:
            return Sample(problem=str(error))
        self._count_losses(nvml, uuid, sample.is_lost)
        return sample

    def check(self, device: Device) -> Health:
        """Return whether a device is well; see `DeviceWatch`.

        Errors are XIDs since the last call for this device; the first call starts to
        collect them. A device that is gone, such as a MIG instance that was destroyed,
        counts as lost.
        """
        nvml, uuid = self._nvml, _uuid(device)
        if nvml is None or uuid is None:
            return Health()
        try:
            health = self._ask(nvml, uuid, self._health.check)
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_NotFound):
            health = Health(is_lost=True)
        except nvml.NVMLError:
            return Health()
        self._count_losses(nvml, uuid, health.is_lost)
        return health

    def _ask(self, nvml: ModuleType, uuid: str, question: Question[T]) -> T:
        if not self._is_started:
            nvml.nvmlInit()
            self._is_started = True
        try:
            return question(nvml, uuid, self._handle(nvml, uuid))
        except nvml.NVMLError_Uninitialized:
            # The user's program uses NVML too and has shut it down for both.
            self._handles.clear()
            self._health.forget()
            self._is_started = False
            nvml.nvmlInit()
            self._is_started = True
            return question(nvml, uuid, self._handle(nvml, uuid))

    def _count_losses(self, nvml: ModuleType, uuid: str, is_lost: bool) -> None:
        """Restart NVML for a lost device, at growing intervals.

        NVML never finds a lost device again, even after a reset; only a restart of NVML
        does, and it may take seconds.
        """
        if not is_lost:
            self._losses.pop(uuid, None)
            return
        self._handles.pop(uuid, None)
        times = self._losses[uuid] = self._losses.get(uuid, 0) + 1
        if times & (times - 1) == 0 or times % SELDOM == 0:
            self._shut_down(nvml)

    def _shut_down(self, nvml: ModuleType) -> None:
        self._handles.clear()
        self._health.close(nvml)
        if (
            self._is_started
        ):  # NVML counts starts; do not undo a start by the user's program.
            self._is_started = False
            with suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _handle(self, nvml: ModuleType, uuid: str) -> object:
        handle = self._handles.get(uuid)
        if handle is None:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            # The handle of an instance may refer to another instance after changes.
            if not uuid.startswith("MIG-"):
                self._handles[uuid] = handle
        return handle

    def _look(self, nvml: ModuleType, uuid: str, handle: object) -> Sample:
        processes: dict[int, int | None] = {}
        is_listed = False
        for name in LISTS:
            listed = self._list(nvml, name, uuid, handle)
            if listed is not None:
                is_listed = is_listed or name == COMPUTE
                _merge(processes, listed)
        living = frozenset(pid for pid in processes if is_alive(pid))
        if uuid not in self._looked_at:
            self._looked_at.add(uuid)
            self._note_foreign(uuid, processes, living)
        return Sample(
            processes if is_listed else None,
            living,
            self._reads_pids,
            self._used(nvml, handle),
            *(self._metered(nvml, uuid, name, handle) for name in METERS),
        )

    def _note_foreign(
        self, uuid: str, processes: Collection[int], living: Collection[int]
    ) -> None:
        """Warn once if the driver's process ids seem to be those of the host.

        Called at the first look, before a process of this node can have ended on the
        GPU.
        """
        if self._is_foreign or self._reads_pids or living or not processes:
            return
        self._is_foreign = True
        _log.warning(
            "! NVML lists processes on %s by ids that do not exist here, as in a "
            "container. Until NVML lists a task by a known id, shares are free when "
            "their processes have ended, without a check by NVML. Start the container "
            "with `--pid=host` to enable the check.",
            uuid,
        )

    def _list(
        self, nvml: ModuleType, name: str, uuid: str, handle: object
    ) -> Iterable[Any] | None:
        """Return the processes of one list; None if the device has no such list."""
        key = (uuid, name)
        known = self._versions.get(key, "")
        if known is None:
            return None
        for version in [known] if known else VERSIONS:
            try:
                processes = _read(nvml, getattr(nvml, name + version), handle)
            except (
                nvml.NVMLError_FunctionNotFound,
                nvml.NVMLError_NotSupported,
                nvml.NVMLError_NoPermission,
            ):
                continue
            self._versions[key] = version
            return processes
        self._versions[key] = None
        return None

    def _used(self, nvml: ModuleType, handle: object) -> int | None:
        try:
            used: int = nvml.nvmlDeviceGetMemoryInfo(handle).used
        except (
            nvml.NVMLError_FunctionNotFound,
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_NoPermission,
        ):
            return None
        return used

    def _metered(self, nvml: ModuleType, uuid: str, name: str, handle: object) -> Any:
        """Return an optional reading; None if there is none."""
        if (uuid, name) in self._not_metered:
            return None
        try:
            return METERS[name](nvml, handle)
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_Uninitialized):
            raise
        except (
            nvml.NVMLError_FunctionNotFound,
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_NoPermission,
        ):
            self._not_metered.add((uuid, name))  # MIG instances, and GPUs in MIG mode
            return None
        except nvml.NVMLError:
            return None


def _read(
    nvml: ModuleType, question: Callable[[object], Iterable[Any]], handle: object
) -> Iterable[Any]:
    for _ in range(ATTEMPTS - 1):
        with suppress(nvml.NVMLError_InsufficientSize):
            return question(handle)
    return question(handle)


def _merge(processes: dict[int, int | None], listed: Iterable[Any]) -> None:
    """Merge one list into `processes`; a process may be on several lists."""
    for process in listed:
        size = process.usedGpuMemory
        before = processes.get(process.pid)
        if before is not None and (size is None or size < before):
            size = before
        processes[process.pid] = size


def _uuid(device: Device) -> str | None:
    if device.uuid is not None:
        return device.uuid
    is_mig = isinstance(device.id, str) and device.id.startswith("MIG-")
    return str(device.id) if is_mig else None


def is_alive(pid: int) -> bool:
    """Return whether a process of this id exists here, of any user."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def is_host_namespace() -> bool:
    """Return whether this process certainly sees the driver's process ids.

    In a container's pid namespace, older drivers report the host's ids and newer
    drivers the container's. Only a search for a known GPU process shows which.
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino == HOST_NAMESPACE
    except OSError:
        return False
