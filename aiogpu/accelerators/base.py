"""The four answers that every vendor gives, as a Protocol.

What is it called, how is it detected, which variable assigns it, which quantities
are valid: all that the rest of aiogpu asks of an accelerator; and, where its driver
can tell, a `DeviceWatch` that says what is on a device now. To add a vendor,
write one file with a class of this shape and name it in `registry.KNOWN`;
nothing inherits from anything. This file decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from aiogpu.core.devices import Device

if TYPE_CHECKING:
    from .health import Health
    from .sample import Sample


class Accelerator(Protocol):
    """One vendor's devices. Implementations hold no state.

    Every method is an ordinary blocking function; `devices` may take a while (a
    driver is asked), so a caller with an event loop runs it in a thread.
    """

    @property
    def kind(self) -> str:
        """The resource's name, such as "GPU"."""
        ...

    @property
    def option(self) -> str:
        """What asks for it, such as "num_gpus" or "resources['TPU']"."""
        ...

    @property
    def variable(self) -> str:
        """The variable that assigns it, such as "CUDA_VISIBLE_DEVICES"."""
        ...

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        """Say which devices a node may share out.

        Args:
            environ: the environment of the process that starts the node.
            wanted: how many the user gave, at least 0; None to detect them.

        Raises:
            DeviceError: `environ` names a device that is not there, or too few.
        """
        ...

    def assignment(
        self, ids: Sequence[int | str], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Say which variables give a worker these devices and no others.

        Args:
            ids: the `Device.id`s of its devices, empty for none.
            environ: the environment that the worker has otherwise.
        """
        ...

    def quantity(self, value: object) -> int:
        """Turn the number given for `option` into parts of 1/10 000.

        Raises:
            OptionError: no such quantity of this kind can be asked for.
        """
        ...

    def type_of(self, name: str | None) -> str | None:
        """Derive the accelerator's type ("A100") from the product's name."""
        ...

    def watch(self) -> DeviceWatch:
        """Make what can be asked, later and often, what is on these devices."""
        ...


class DeviceWatch(Protocol):
    """One vendor's driver, asked again and again what is on a device.

    All but `knows` may block, and all are called by one thread alone.
    """

    def knows(self, device: Device) -> bool:
        """Whether the driver may be asked about a device; asks it nothing yet."""
        ...

    def open(self) -> None:
        """Start the vendor's library. Never raises: `look` tells what is wrong."""
        ...

    def look(self, device: Device) -> Sample:
        """Say what is on a device now. Never raises: the sample says what fails."""
        ...

    def check(self, device: Device) -> Health:
        """Say whether a device is well. Never raises; what is unknown is not told."""
        ...

    def close(self) -> None:
        """Let go of the vendor's library."""
        ...
