"""The interface of an accelerator vendor, and the plain data in its answers.

A vendor defines: the name of its devices, their detection, the variable that assigns
them, valid quantities, and, if its driver reports it, the load of a device. To add a
vendor, write one module with a class of the shape `Accelerator` and name it in
`registry.KNOWN`; most derive from `listed_devices.ListedAccelerator`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from aiogpu.core.model.request import Device

Id = int | str
"""The id of a device: an index, or a UUID where an index would be ambiguous."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The load of a device at one moment, as its driver reports it; None for unknown.

    Attributes:
        processes: bytes of device memory by process id, as the driver lists them;
            None for one process if the driver does not say its bytes, None for all if
            the driver lists no processes.
        living: the listed process ids that belong to live processes here.
        reads_pids: whether the driver's process ids are surely those of this
            process's pid namespace.
        used: bytes of device memory in use by all processes.
        utilisation: percent of the last moments in which code ran on it.
        temperature: degrees Celsius.
        power: watts that it draws.
        problem: why nothing is known, in a few words; None if the sample is valid.
        is_lost: the device does not answer and will not before a reset.
    """

    processes: Mapping[int, int | None] | None = None
    living: frozenset[int] = frozenset()
    reads_pids: bool = False
    used: int | None = None
    utilisation: int | None = None
    temperature: int | None = None
    power: float | None = None
    problem: str | None = None
    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Health:
    """Reports of a driver about a device since the last query.

    Attributes:
        errors: errors that make the device unfit, each in a few words: "XID 79".
            Errors that a program has caused by itself are left out.
        action: what must be done before the device can be relied on, such as "GPU
            reset"; "" if nothing, None where the driver cannot tell.
        is_lost: the device does not answer and will not before a reset.
    """

    errors: tuple[str, ...] = ()
    action: str | None = None
    is_lost: bool = False


class Accelerator(Protocol):
    """One vendor's devices. Implementations hold no state.

    All methods may block. `devices` may take seconds, because it asks a driver; code
    on an event loop calls it in a thread.
    """

    @property
    def kind(self) -> str:
        """The resource's name, such as "GPU"."""
        ...

    @property
    def option(self) -> str:
        """The option that requests it, such as "num_gpus" or "resources['TPU']"."""
        ...

    @property
    def variable(self) -> str:
        """The variable that assigns it, such as "CUDA_VISIBLE_DEVICES"."""
        ...

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        """Return the devices that a node may share out.

        Args:
            environ: the environment of the process that starts the node.
            wanted: how many the user asked for, at least 0; None to detect them.

        Raises:
            DeviceError: `environ` names a device that is not there, or too few.
        """
        ...

    def assignment(
        self, ids: Sequence[Id], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the variables that give a worker these devices and no others.

        Args:
            ids: the `Device.id`s of its devices, empty for none.
            environ: the worker's environment otherwise.
        """
        ...

    def quantity(self, value: object) -> int:
        """Convert the number given for `option` into units of 1/10 000 device.

        Raises:
            OptionError: no such quantity of this kind can be requested.
        """
        ...

    def type_of(self, name: str | None) -> str | None:
        """Derive the accelerator's type ("A100") from the product's name."""
        ...

    def watch(self) -> DeviceWatch:
        """Return an object that samples devices by the driver."""
        ...


class DeviceWatch(Protocol):
    """Samples devices by a vendor's driver.

    All methods but `knows` may block. One thread alone calls them.
    """

    def knows(self, device: Device) -> bool:
        """Return whether the driver can be asked about a device; does not ask it."""
        ...

    def open(self) -> None:
        """Start the vendor's library. Never raises: `look` reports problems."""
        ...

    def look(self, device: Device) -> Sample:
        """Return the current load of a device. Never raises; see `Sample.problem`."""
        ...

    def check(self, device: Device) -> Health:
        """Return whether a device is well. Never raises."""
        ...

    def close(self) -> None:
        """Shut down the vendor's library."""
        ...


@final
class Unwatched:
    """The watch of a vendor whose driver is not asked while a node runs.

    Its devices are free as soon as the processes that used them have ended.
    """

    def knows(self, device: Device) -> bool:
        """Return False for every device."""
        del device
        return False

    def open(self) -> None:
        """Do nothing: there is no library."""

    def look(self, device: Device) -> Sample:
        """Return a sample in which nothing is known."""
        return Sample(problem=f"the driver of {device.id} is not asked")

    def check(self, device: Device) -> Health:
        """Return an empty report: nothing is known."""
        del device
        return Health()

    def close(self) -> None:
        """Do nothing: there is no library."""
