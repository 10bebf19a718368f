"""Vendors whose variable lists devices by index: entries divided by commas.

Unset means all devices, empty means none. An entry that is ill-formed, repeated or
not there is an error here; the vendors' runtimes hide such entries or fail late.
CUDA's variable has rules of its own, in `visible`. Devices are detected in the files
of the kernel; no vendor's library is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, islice, takewhile
from typing import TYPE_CHECKING, ClassVar, Final

from aiogpu.core.model.request import Device
from aiogpu.core.model.units import UNIT, device_quantity, quantity
from aiogpu.errors import DeviceError, OptionError

if TYPE_CHECKING:
    from .base import DeviceWatch, Id


Listed = tuple[str, str, Sequence[int | str]]
"""A variable, its value, and the ids that the value names."""


NOSET: Final = "AIOGPU_NOSET_"
"""Prefix of the switch that leaves a variable to the user."""


NONE: Final = ("", "NoDevFiles")
"""Values that name no device; Slurm writes the second."""


ON: Final = frozenset({"1", "true", "yes", "on"})


MOST_DIGITS: Final = 9
"""More digits than the index of any device has, and always an `int` at once."""


class ListedAccelerator:
    """A vendor whose variable lists indices; subclasses define the differences.

    Attributes:
        kind, option, variable: see `Accelerator`.
        hide_all: the variable's value that gives a worker no device.
        singular: name of one device, if it cannot be shared; else "".

    Args:
        root: the directory under which the kernel's files are looked for.
    """

    kind: ClassVar[str]
    option: ClassVar[str]
    variable: ClassVar[str]
    hide_all: ClassVar[str] = ""
    singular: ClassVar[str] = ""

    def __init__(self, root: str = "/") -> None:
        self.root = root

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.kind}>"

    def detect(self, environ: Mapping[str, str]) -> Sequence[Device]:
        """Return the devices of this machine, in the order of their indices."""
        raise NotImplementedError

    def parse(self, entry: str) -> Sequence[Id]:
        """Return the ids that one entry of the variable names, none if ill-formed."""
        return index(entry)

    def listed(
        self, environ: Mapping[str, str], there: Sequence[Device]
    ) -> Listed | None:
        """Return the variable that restricts the node to some devices, or None.

        Args:
            environ: the environment of the process that starts the node.
            there: the detected devices.

        Raises:
            DeviceError: an entry is ill-formed or repeated.
        """
        del there
        text = environ.get(self.variable)
        if text is None:
            return None
        return self.variable, text, entries(self.variable, text, self.parse)

    def logical(self, id_: Id, environ: Mapping[str, str]) -> Device:
        """Return a device of this id that was not detected."""
        del environ
        return Device(id_)

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        """Return the devices that a node may share out.

        Args:
            environ: read for the variable.
            wanted: how many the user asked for, which may be more than there are
                unless the variable is set; None to detect them.

        Raises:
            DeviceError: the variable has an entry that is ill-formed, repeated or not
                there, or fewer entries than `wanted`.
        """
        if wanted == 0:
            return ()
        there = self.detect(environ)
        return choose(
            self.option,
            wanted,
            there,
            self.listed(environ, there),
            lambda id_: self.logical(id_, environ),
        )

    def assignment(
        self, ids: Sequence[Id], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the variables that give a worker these devices and no others.

        Empty if the user leaves the variable alone by `AIOGPU_NOSET_...=1`.
        """
        if is_left_alone(self.variable, environ):
            return {}
        return {self.variable: joined(ids) or self.hide_all}

    def quantity(self, value: object) -> int:
        """Convert a number of devices into units of 1/10 000.

        Raises:
            OptionError: `value` is not such a number, or not whole where devices
                cannot be shared.
        """
        if self.singular:
            return whole_devices(self.option, value, self.singular)
        return device_quantity(self.option, value)

    def type_of(self, name: str | None) -> str | None:
        """Return the type of the product of that name: the name itself."""
        return name or None

    def watch(self) -> DeviceWatch:
        """Return a watch that asks no driver and knows nothing."""
        # A worker needs no watch, but loads this module to read a request.
        from .base import Unwatched

        return Unwatched()


# The variable.


def is_left_alone(variable: str, environ: Mapping[str, str]) -> bool:
    """Return whether the user forbids aiogpu to set a variable."""
    return environ.get(NOSET + variable, "").strip().lower() in ON


def index(entry: str) -> Sequence[Id]:
    """Return the index that an entry names: "3" is 3; nothing if it is ill-formed."""
    is_number = entry.isascii() and entry.isdigit() and len(entry) <= MOST_DIGITS
    return (int(entry),) if is_number else ()


def split(text: str) -> list[str]:
    """Split a variable's value into its entries, stripped. "-1" ends the list."""
    if text.strip() in NONE:
        return []
    items = [entry.strip() for entry in text.split(",")]
    return list(takewhile(lambda entry: entry != "-1", items))


def require(
    option: str, wanted: int | None, variable: str, text: str, count: int
) -> None:
    """Check that a variable names as many devices as the user asked for.

    Args:
        option: the option that asks for them, for the message.
        wanted: number that the user asked for; None for all that exist.
        variable: the variable.
        text: its value.
        count: how many devices the value names.

    Raises:
        DeviceError: the value names fewer than `wanted`.
    """
    if wanted is None or wanted <= count:
        return
    if count == 0:
        raise DeviceError(
            f"{option}={wanted}, but {variable}={text!r} names no device; ask for "
            f"{option}=0, or name some."
        )
    raise DeviceError(
        f"{option}={wanted}, but {variable}={text!r} names {count} "
        f"device{'s' if count > 1 else ''}; ask for at most {count}, or name more."
    )


def entries(
    variable: str, text: str, parse: Callable[[str], Sequence[Id]] = index
) -> tuple[Id, ...]:
    """Read a variable's value. "-1" ends the list, as it does for the runtimes.

    Raises:
        DeviceError: an entry is ill-formed, or names a device for the second time.
    """
    ids: dict[Id, None] = {}
    for entry in split(text):
        named = parse(entry)
        if not named:
            raise DeviceError(
                f"{variable}={text!r}: {entry!r} names no device. Correct or remove "
                f"the entry."
            )
        for id_ in named:
            if id_ in ids:
                raise DeviceError(
                    f"{variable}={text!r}: {entry!r} names the device {id_} for the "
                    f"second time. Name each device once."
                )
            ids[id_] = None
    return tuple(ids)


def joined(ids: Iterable[Id]) -> str:
    """Return the value of a variable that names these devices."""
    return ",".join(map(str, ids))


def choose(
    option: str,
    wanted: int | None,
    there: Sequence[Device],
    listed: Listed | None,
    logical: Callable[[Id], Device] = Device,
) -> tuple[Device, ...]:
    """Return the devices that a node may share out.

    Args:
        option: the option that asks for them, for the messages.
        wanted: number that the user asked for; None for all that exist.
        there: the detected devices.
        listed: the variable that restricts them; None if it is not set.
        logical: makes a device that was not detected.

    Raises:
        DeviceError: the variable names a device that is not there, or fewer than
            `wanted`.
    """
    if listed is None:
        if wanted is None:
            return tuple(there)
        taken = {device.id for device in there}
        others = (logical(number) for number in count() if number not in taken)
        more = islice(others, max(0, wanted - len(there)))
        return (*there, *more)[:wanted]
    variable, text, ids = listed
    require(option, wanted, variable, text, len(ids))
    if wanted is None and not there:
        return ()
    known = {device.id: device for device in there}
    for id_ in ids:
        if known and id_ not in known:
            raise DeviceError(
                f"{variable}={text!r}: there is no device {str(id_)!r}. This machine "
                f"has {', '.join(map(str, known))}. Name one of these."
            )
    return tuple(known.get(id_) or logical(id_) for id_ in ids)[:wanted]


def whole_devices(option: str, value: object, singular: str) -> int:
    """Convert a number of whole devices into units of 1/10 000.

    Args:
        option: the option's name, for the message.
        value: a whole number, at least 0; 2.0 is one too.
        singular: name of one device, "NeuronCore".

    Raises:
        OptionError: `value` is not such a number.
    """
    parts = quantity(option, value)
    if isinstance(value, float) and not value.is_integer():
        raise OptionError(
            f"{option}={value!r}: a {singular} cannot be shared; give a whole number "
            f"of them, such as {max(1, -(-parts // UNIT))}."
        )
    return parts


# The kernel's files.


def read(*path: str) -> str:
    """Return a file's text, stripped; "" if it cannot be read."""
    try:
        with open(os.path.join(*path), encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def numbered(prefix: str, *folder: str) -> list[tuple[int, str]]:
    """Return the entries of a folder that are a prefix and a number.

    Returns:
        Number and path of each, by number: `(0, "/dev/davinci0")`.
    """
    place = os.path.join(*folder)
    try:
        names = os.listdir(place)
    except OSError:
        return []
    numbers = (
        (name.removeprefix(prefix), name) for name in names if name.startswith(prefix)
    )
    return sorted(
        (int(digits), os.path.join(place, name))
        for digits, name in numbers
        if digits.isascii() and digits.isdigit()
    )


def pci_address(device: str) -> str | None:
    """Return the PCI address of the device that a path in sysfs leads to."""
    name = os.path.basename(os.path.realpath(device))
    return name if name.count(":") == 2 else None
