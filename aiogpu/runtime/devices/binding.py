"""Builds a worker's assignment: devices, memory limits, CPUs, MPS.

This module knows accelerators and device sets, but no tasks. Sources:

- limits: the variables of JAX ("GPU memory allocation"; `jaxlib.xla_client`), of CuPy
  ("Environment variables"; read when a GPU's pool is first used, so they also work if
  CuPy is already imported) and of TensorFlow ("Use a GPU"). The worker itself sets
  PyTorch's limit, in `worker.gpu`.
- MPS: NVIDIA, "Multi-Process Service", sections "Environment Variables" and "Device
  Memory Limit". Devices must be named by UUID, because the MPS server numbers only the
  devices that it was given.
- CPUs near a device: the kernel's "sysfs-bus-pci" (`local_cpulist`),
  sched_setaffinity(2).
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.request import Device
from aiogpu.core.model.units import BY_SHARE, CPU, GPU, UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import BundleLedger, Lease, Ledger
from aiogpu.linux.cgroup import StrPath, read_cpus, unpinned_cpus
from aiogpu.linux.sockets import UnexpectedFileError, is_trusted, open_checked
from aiogpu.wire.messages import Bind

if TYPE_CHECKING:
    from aiogpu.accelerators.base import Accelerator


ROOT = ""


class Affinity:
    """The CPUs near each of a node's GPUs, read once.

    Attributes:
        usable: CPUs that this process may use.
    """

    def __init__(self, devices: Sequence[Device], root: StrPath | None = None) -> None:
        root = ROOT if root is None else root
        self.usable = frozenset(os.sched_getaffinity(0))
        self._near: tuple[frozenset[int], ...] = ()
        # If the user has pinned this process to some CPUs, its workers keep them all.
        if any(device.pci for device in devices) and self.usable >= unpinned_cpus(root):
            self._near = tuple(_cpus_near(device, root) for device in devices)

    def near(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Return the CPUs for a worker with these devices; empty for no restriction."""
        if not self._near:
            return ()
        each = [self._near[index] for index in indices]
        if not all(each):
            return ()  # unknown for one device
        near = self.usable.intersection(frozenset().union(*each))
        return () if near == self.usable else tuple(sorted(near))


def _cpus_near(device: Device, root: StrPath) -> frozenset[int]:
    """Return the CPUs near a device; empty if the kernel does not know them."""
    if device.pci is None:
        return frozenset()
    domain, _, rest = device.pci.lower().partition(":")
    # NVML writes eight digits of the domain, the kernel four at least.
    name = f"{domain[-8:].lstrip('0').zfill(4)}:{rest}"
    return read_cpus(f"{root}/sys/bus/pci/devices/{name}/local_cpulist")


PIPES: Final = "CUDA_MPS_PIPE_DIRECTORY"


THREADS: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


MEMORY: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


DEFAULT: Final = "/tmp/nvidia-mps"


PID_SIZE: Final = 64
"""Most bytes that are read of the daemon's pidfile."""


MIB: Final = 1 << 20


def runs(environ: Mapping[str, str], default: str = DEFAULT) -> bool:
    """Return True if workers would be clients of a running MPS control daemon.

    A container may have the daemon's pipes without seeing its process. Any user may
    make files in the default directory, so files of others are not used.
    """
    directory = environ.get(PIPES) or default
    path = f"{directory}/nvidia-cuda-mps-control.pid"
    try:
        descriptor = open_checked(path, os.O_RDONLY, stat.S_ISREG, is_trusted)
        with open(descriptor, "rb") as file:
            pid = int(file.read(PID_SIZE))
        if pid > 0:  # other numbers would address process groups
            os.kill(pid, 0)
            return True
    except UnexpectedFileError as error:
        _log.warning("mps='auto': %s is not used: %s", path, error.strerror)
    except PermissionError:
        # The daemon runs as root, or only root may read its file.
        return _has_trusted(path, stat.S_ISREG)
    except (OSError, ValueError, OverflowError):
        pass
    return _has_trusted(f"{directory}/control", stat.S_ISFIFO, stat.S_ISSOCK)


def _has_trusted(path: str, *kinds: Callable[[int], bool]) -> bool:
    """Return whether a file of one of these kinds is there, of root or this user."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    is_kind = any(is_kind(status.st_mode) for is_kind in kinds)
    return is_kind and is_trusted(status.st_uid)


def mps_variables(
    parts: int, limits: Sequence[int], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that limit a worker's use of its GPUs through MPS.

    Args:
        parts: its share of a GPU in 1/`UNIT`; `UNIT` or more, or 0, for no limit.
        limits: bytes of each of its GPUs, 0 for no limit.
        environ: the worker's other variables, which take precedence.
    """
    wanted = {}
    if 0 < parts < UNIT:
        wanted[THREADS] = str(max(parts * 100 // UNIT, 1))
    if any(limits):
        wanted[MEMORY] = ",".join(
            f"{ordinal}={max(limit // MIB, 1)}M"
            for ordinal, limit in enumerate(limits)
            if limit
        )
    return {name: value for name, value in wanted.items() if name not in environ}


JAX_FRACTION: Final = "XLA_PYTHON_CLIENT_MEM_FRACTION"


JAX_FRACTION_TOO: Final = "XLA_CLIENT_MEM_FRACTION"


JAX_PREALLOCATES: Final = "XLA_PYTHON_CLIENT_PREALLOCATE"


CUPY_LIMIT: Final = "CUPY_GPU_MEMORY_LIMIT"


TENSORFLOW_GROWS: Final = "TF_FORCE_GPU_ALLOW_GROWTH"


def held_of(lease: Lease, kind: str) -> dict[int, int]:
    """Return a lease's part of each device of one kind: index to amount, in order."""
    for (each, _), shares in zip(lease.request.devices, lease.shares, strict=True):
        if each == kind:
            return {share[0]: share[1] for share in shares}
    return {}


def limits_of(lease: Lease, gpus: DeviceSet | None) -> tuple[int, ...]:
    """Return the bytes that a worker may use of each of its GPUs, in order.

    Empty if there is no limit: no memory was requested, or a share of GPUs of unknown
    memory. A share of a whole GPU includes all its memory.

    Args:
        lease: the worker's lease.
        gpus: all GPUs of the node, None if it has none.
    """
    asked = lease.request.gpu_memory
    if not asked or gpus is None:
        return ()
    if isinstance(lease.home, BundleLedger):
        # In a bundle that reserves bytes, a share means that part of the bytes.
        gpus = lease.home.device_sets[GPU]
    held = held_of(lease, GPU)
    if asked != BY_SHARE:
        return (asked,) * len(held)
    limits = tuple(
        gpus.devices[index].memory * part // UNIT if part < UNIT else 0
        for index, part in held.items()
    )
    return limits if any(limits) else ()


def variables_of(
    limits: Sequence[int], capacities: Sequence[int], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that limit frameworks other than PyTorch.

    Variables that the user has set stay. JAX takes one fraction for all GPUs and CuPy
    one number of bytes, so both get the smallest limit. TensorFlow has no such
    variable; it is set to allocate no more than it needs.

    Args:
        limits: bytes of each of the worker's GPUs, 0 for no limit.
        capacities: total bytes of each of these GPUs, 0 if unknown.
        environ: the worker's other variables.
    """
    least = min((limit for limit in limits if limit), default=0)
    if not least:
        return {}
    wanted = {
        JAX_PREALLOCATES: "false",
        CUPY_LIMIT: str(least),
        TENSORFLOW_GROWS: "true",
    }
    # JAX refuses to start if both names of this variable are set.
    if all(capacities) and not environ.get(JAX_FRACTION_TOO):
        pairs = zip(limits, capacities, strict=True)
        parts = min(limit * UNIT // total for limit, total in pairs if limit)
        wanted[JAX_FRACTION] = f"{min(max(parts, 1), UNIT) / UNIT:g}"
    return {name: value for name, value in wanted.items() if name not in environ}


_log: Final = logging.getLogger(__name__)


AUTO: Final = "auto"


class Assignment:
    """Assigns the devices of a node's accelerators to workers.

    Attributes:
        accelerators: one for each kind of device.
    """

    def __init__(
        self,
        accelerators: Sequence[Accelerator],
        ledger: Ledger,
        environ: Mapping[str, str],
        *,
        cpu_affinity: str = "off",
        mps: str = "off",
    ) -> None:
        self.accelerators = tuple(accelerators)
        self._ledger = ledger
        self._environ = dict(environ)
        self._gpus = ledger.device_sets.get(GPU)
        devices = self._gpus.devices if self._gpus is not None else ()
        self._affinity = Affinity(devices if cpu_affinity == AUTO else ())
        self._has_mps = mps == AUTO and _has_mps(devices, environ)

    def bind(self, lease: Lease, environ: Mapping[str, str]) -> Bind:
        """Return the first message to a worker that serves a lease.

        Args:
            lease: the worker's lease.
            environ: the task's own variables, which are set too.
        """
        assigned: dict[str, tuple[int | str, ...]] = {
            kind: tuple(
                self._ledger.device_sets[kind].devices[share[0]].id for share in shares
            )
            for (kind, _), shares in zip(
                lease.request.devices, lease.shares, strict=True
            )
        }
        shares = held_of(lease, GPU) if assigned else {}
        variables = dict(environ)
        seen = {**self._environ, **environ}
        for accelerator in self.accelerators:
            kind = accelerator.kind
            ids = assigned.setdefault(kind, ())
            if self._has_mps and kind == GPU:
                ids = tuple(gpu.uuid or gpu.id for gpu in self._devices_at(shares))
            variables |= accelerator.assignment(ids, seen)
        if not shares:
            return Bind(variables, assigned)
        limits = limits_of(lease, self._gpus)
        if limits:
            capacities = [gpu.memory for gpu in self._devices_at(shares)]
            variables |= variables_of(limits, capacities, seen)
        if self._has_mps:
            part = min(shares.values())
            variables |= mps_variables(part, limits, seen)
        return Bind(variables, assigned, limits, self._cpus_for(lease, shares))

    def _cpus_for(self, lease: Lease, gpus: Iterable[int]) -> tuple[int, ...]:
        """Return the CPUs near a worker's GPUs, unless its task requests more CPUs."""
        cpus = self._affinity.near(gpus)
        if not cpus:
            return ()
        asked = dict(lease.request.scalars).get(CPU, 0)
        return cpus if asked <= len(cpus) * UNIT else ()

    def _devices_at(self, indices: Iterable[int]) -> list[Device]:
        devices = self._ledger.device_sets[GPU].devices
        return [devices[index] for index in indices]


def _has_mps(devices: Sequence[Device], environ: Mapping[str, str]) -> bool:
    if not devices:
        return False
    if not runs(environ):
        _log.info("mps='auto': no MPS server runs here; shares of GPUs are not limited")
        return False
    return True
