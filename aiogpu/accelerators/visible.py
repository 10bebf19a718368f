"""Which devices a `CUDA_VISIBLE_DEVICES` names, of those that there are.

The rules are those of the CUDA programming guide, "CUDA Environment Variables":
unset means all, empty means none, indices, UUIDs, unique beginnings of UUIDs and
MIG ids may be mixed, and -1 ends the list. One rule is ours: CUDA silently hides
an entry that it does not know and all after it, here that is an error.

This file asks no driver: what there is comes as an `Inventory`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from aiogpu.core.devices import Device
from aiogpu.errors import DeviceError

VISIBLE = "CUDA_VISIBLE_DEVICES"

NONE = ("", "NoDevFiles")
"""Values that name no device; Slurm writes the second."""

# Nine digits are more than any box has devices, and always an `int` at once.
_INDEX = re.compile(r"[0-9]{1,9}")
_UUID = re.compile(r"GPU-[0-9A-Fa-f-]*")
_MIG = re.compile(r"MIG-\S+")

_CORRECT = "Name one that is there: CUDA itself hides the entry and all after it"


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices that the vendor's library shows to this process.

    Attributes:
        devices: those that answered. The id of each is its index, an `int`.
        count: how many there are, those that did not answer included; None where
            the library is missing or fails, so that nothing is known.
        problem: why something is unknown, in one sentence; None if nothing is.
    """

    devices: tuple[Device, ...] = ()
    count: int | None = None
    problem: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every device that there is has answered."""
        return self.count == len(self.devices)

    def __str__(self) -> str:
        if self.count is None:
            return f"Which devices there are is unknown ({self.problem})."
        shown = ", ".join(_described(device) for device in self.devices)
        missing = self.count - len(self.devices)
        if missing:
            shown = f"{shown}, and {missing} that did not answer".removeprefix(", ")
        return f"This machine has {shown or 'no device'}."


def entries(text: str) -> tuple[int | str, ...]:
    """Split a value of the variable: indices become `int`, all else stays `str`.

    Entries are stripped; -1 and what follows it are left out, as CUDA does.
    Whether an entry makes sense is for `resolve` to say.
    """
    if text.strip() in NONE:
        return ()
    found: list[int | str] = []
    for raw in text.split(","):
        entry = raw.strip()
        if entry == "-1":
            break
        found.append(int(entry) if _INDEX.fullmatch(entry) else entry)
    return tuple(found)


def require(option: str, wanted: int, text: str) -> None:
    """Check that the variable names as many devices as the user wants.

    Raises:
        DeviceError: it names fewer than `wanted`.
    """
    there = len(entries(text))
    if wanted <= there:
        return
    if there == 0:
        raise DeviceError(
            f"{option}={wanted}, but {VISIBLE}={text!r} names no device; ask for "
            f"{option}=0, or name some."
        )
    raise DeviceError(
        f"{option}={wanted}, but {VISIBLE}={text!r} names {there} "
        f"device{'s' if there > 1 else ''}; ask for at most {there}, or name more."
    )


def resolve(text: str, there: Inventory, *, by_bus: bool = True) -> tuple[Device, ...]:
    """Find the devices that a value of the variable names, in its order.

    Args:
        text: the variable's value.
        there: what there is. What it leaves open is taken as the user wrote it.
        by_bus: whether the indices in `text` are those of `there`. If not
            (`CUDA_DEVICE_ORDER` is not PCI_BUS_ID), they stay without details.

    Returns:
        One device per entry. Its id is an `int` for an index, the full UUID for a
        UUID or the beginning of one, and the entry itself for a MIG id.

    Raises:
        DeviceError: an entry is ill-formed, not there, ambiguous or a repetition.
    """
    chosen: list[Device] = []
    named: dict[int | str, int | str] = {}
    for entry in entries(text):
        device = _find(entry, text, there, by_bus)
        # An index and a UUID may name one device: the UUID, where known, tells.
        key = device.uuid or device.id
        if key in named:
            raise _refusal(
                text,
                f"{str(entry)!r} names the same device as {str(named[key])!r} before "
                f"it",
                "Name each device once",
                there,
            )
        named[key] = entry
        chosen.append(device)
    return tuple(chosen)


def _find(entry: int | str, text: str, there: Inventory, by_bus: bool) -> Device:
    if isinstance(entry, int):
        return _by_index(entry, text, there, by_bus)
    if _MIG.fullmatch(entry):
        return Device(entry)
    if _UUID.fullmatch(entry):
        return _by_uuid(entry, text, there)
    raise _refusal(
        text,
        f"{entry!r} is neither an index (0), nor a UUID (GPU-...), nor a MIG id "
        f"(MIG-...)",
        "Correct the entry, or take it out",
        there,
    )


def _by_index(index: int, text: str, there: Inventory, by_bus: bool) -> Device:
    # An index past the last is wrong in any order.
    if there.count is not None and index >= there.count:
        raise _refusal(text, f"there is no device '{index}'", _CORRECT, there)
    known = there.devices if by_bus else ()
    return next((device for device in known if device.id == index), Device(index))


def _by_uuid(beginning: str, text: str, there: Inventory) -> Device:
    matches = [d for d in there.devices if d.uuid and d.uuid.startswith(beginning)]
    if len(matches) > 1:
        raise _refusal(
            text,
            f"{beginning!r} is how the UUIDs of {len(matches)} devices begin",
            "Give more digits of the UUID",
            there,
        )
    if matches:
        return replace(matches[0], id=matches[0].uuid or beginning)
    if there.is_complete and all(device.uuid for device in there.devices):
        raise _refusal(text, f"there is no device {beginning!r}", _CORRECT, there)
    return Device(beginning)


def _refusal(text: str, fault: str, advice: str, there: Inventory) -> DeviceError:
    return DeviceError(f"{VISIBLE}={text!r}: {fault}. {there} {advice}.")


def _described(device: Device) -> str:
    details = [d for d in (device.uuid, device.name) if d]
    return f"{device.id} ({', '.join(details)})" if details else str(device.id)
