"""Finds the devices that `CUDA_VISIBLE_DEVICES` names.

The rules are those of the CUDA programming guide, "CUDA Environment Variables": unset
means all, empty means none; indices, UUIDs, unique prefixes of UUIDs and MIG ids may be
mixed; -1 ends the list. Two rules differ. An entry that CUDA does not know is an error
here; CUDA silently hides it and all entries after it. And all entries count, because a
node shares them out among workers; CUDA shows one process at most one MIG instance, and
no whole GPU with it.

This module asks no driver: an `Inventory` holds the existing devices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from aiogpu.core.model.request import Device
from aiogpu.errors import DeviceError

from .listed_devices import split

VISIBLE = "CUDA_VISIBLE_DEVICES"

# Nine digits are more than the index of any device has, and always an `int` at once.
_INDEX = r"[0-9]{1,9}"
_UUID = r"GPU-[0-9A-Fa-f-]*"
_MIG = r"MIG-\S+"
_OLD_MIG = r"MIG-(GPU-[0-9A-Fa-f-]+)/([0-9]+/[0-9]+)"

_CORRECT = "Name an existing device: CUDA itself hides the entry and all after it"


@dataclass(frozen=True, slots=True)
class MigGpu:
    """A GPU in MIG mode, whose instances are the devices.

    Attributes:
        gpu: the GPU; its id is its index, an `int`.
        instances: in NVML's order, each with its place: the ids of its GPU instance
            and its compute instance, "1/0".
    """

    gpu: Device
    instances: tuple[tuple[str, Device], ...] = ()

    @property
    def why_unused(self) -> str:
        """Explain in one sentence why no task can use a GPU without an instance."""
        return (
            f"GPU {_described(self.gpu)} is in MIG mode and has no instance, so no "
            f"task can use it; make some (`nvidia-smi mig -cgi`), or leave MIG mode"
        )


@dataclass(frozen=True, slots=True)
class Inventory:
    """The devices that NVML shows to this process.

    Attributes:
        devices: devices that answered. The id of a GPU is its index, an `int`; the id
            of a MIG instance is its UUID.
        count: number of GPUs, including GPUs that did not answer; None if NVML is
            missing or fails, so that nothing is known.
        problem: why something is unknown, in one sentence; None if all is known.
        mig: the GPUs in MIG mode. Their instances are among `devices`.
        sees_mig: all instances are certainly known.
    """

    devices: tuple[Device, ...] = ()
    count: int | None = None
    problem: str | None = None
    mig: tuple[MigGpu, ...] = ()
    sees_mig: bool = True

    @property
    def is_complete(self) -> bool:
        """True if every GPU has answered."""
        return self.count == self._answered

    @property
    def _answered(self) -> int:
        whole = sum(device.parent is None for device in self.devices)
        return whole + len(self.mig)

    def __str__(self) -> str:
        if self.count is None:
            return f"Which devices there are is unknown ({self.problem})."
        shown = [_described(device) for device in self.devices]
        shown += [
            f"{_described(mig.gpu)} in MIG mode without an instance"
            for mig in self.mig
            if not mig.instances
        ]
        description = ", ".join(shown)
        missing = self.count - self._answered
        if missing:
            description = (
                f"{description}, and {missing} that did not answer".removeprefix(", ")
            )
        return f"This machine has {description or 'no device'}."


def entries(text: str) -> tuple[int | str, ...]:
    """Split a value of the variable: indices become `int`, all else stays `str`.

    Entries are stripped; -1 ends the list, as for CUDA. `resolve` checks the entries.
    """
    return tuple(
        int(entry) if re.fullmatch(_INDEX, entry) else entry for entry in split(text)
    )


def resolve(text: str, there: Inventory, *, by_bus: bool = True) -> tuple[Device, ...]:
    """Find the devices that a value of the variable names, in its order.

    Args:
        text: the variable's value.
        there: the existing devices. Entries that it cannot verify are used as written.
        by_bus: the indices in `text` are those of `there`. If False
            (`CUDA_DEVICE_ORDER` is not PCI_BUS_ID), devices by index have no details.

    Returns:
        One device per entry. Its id is an `int` for an index, the full UUID for a UUID
        or a prefix, and the instance's UUID for a MIG id, either "MIG-<UUID>" or
        "MIG-GPU-<UUID>/<GI>/<CI>". An index or UUID of a GPU in MIG mode is the first
        of its instances, as it is to CUDA, which "will pick the first one available"
        (NVIDIA's MIG guide). If any GPU is in MIG mode, the id for an index is the UUID
        too, since CUDA's order is then unknown.

    Raises:
        DeviceError: an entry is ill-formed, missing, ambiguous or repeated, or a GPU in
            MIG mode without an instance.
    """
    chosen: list[Device] = []
    named: dict[int | str, int | str] = {}
    for entry in entries(text):
        device = _find(entry, text, there, by_bus)
        # An index and a UUID may name the same device: compare UUIDs if known.
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
    if re.fullmatch(_MIG, entry):
        return _by_mig_id(entry, text, there)
    if re.fullmatch(_UUID, entry):
        return _by_uuid(entry, text, there)
    raise _refusal(
        text,
        f"{entry!r} is neither an index (0), nor a UUID (GPU-...), nor a MIG id "
        f"(MIG-...)",
        "Correct or remove the entry",
        there,
    )


def _by_index(index: int, text: str, there: Inventory, by_bus: bool) -> Device:
    # An index past the last is wrong in any order.
    if there.count is not None and index >= there.count:
        raise _refusal(text, f"there is no device '{index}'", _CORRECT, there)
    if not by_bus:
        return Device(index)
    for mig in there.mig:
        if mig.gpu.id == index:
            return _first_of(mig, index, text, there)
    for device in there.devices:
        if device.id == index:
            return replace(device, id=device.uuid or index) if there.mig else device
    return Device(index)


def _by_uuid(prefix: str, text: str, there: Inventory) -> Device:
    split = {mig.gpu.uuid: mig for mig in there.mig}
    known = [*there.devices, *(mig.gpu for mig in there.mig)]
    matches = [d for d in known if d.uuid and d.uuid.startswith(prefix)]
    if len(matches) > 1:
        raise _refusal(
            text,
            f"{prefix!r} is a prefix of the UUIDs of {len(matches)} devices",
            "Give more digits of the UUID",
            there,
        )
    if matches:
        uuid = matches[0].uuid
        if uuid in split:
            return _first_of(split[uuid], prefix, text, there)
        return replace(matches[0], id=uuid or prefix)
    if there.is_complete and all(device.uuid for device in known):
        raise _refusal(text, f"there is no device {prefix!r}", _CORRECT, there)
    return Device(prefix)


def _by_mig_id(entry: str, text: str, there: Inventory) -> Device:
    for device in there.devices:
        if device.parent is not None and device.uuid == entry:
            return device
    old = re.fullmatch(_OLD_MIG, entry)
    for mig in there.mig:
        if old is not None and mig.gpu.uuid == old[1]:
            for place, device in mig.instances:
                if place == old[2]:
                    return device
    if there.is_complete and there.sees_mig:
        raise _refusal(text, f"there is no MIG instance {entry!r}", _CORRECT, there)
    return Device(entry)


def _first_of(mig: MigGpu, entry: int | str, text: str, there: Inventory) -> Device:
    if not mig.instances:
        raise _refusal(
            text,
            f"{str(entry)!r} is a GPU in MIG mode without an instance, which CUDA "
            f"cannot use",
            "Make instances (`nvidia-smi mig -cgi`), or remove the entry",
            there,
        )
    return mig.instances[0][1]


def _refusal(text: str, fault: str, advice: str, there: Inventory) -> DeviceError:
    return DeviceError(f"{VISIBLE}={text!r}: {fault}. {there} {advice}.")


def _described(device: Device) -> str:
    uuid = None if device.uuid == device.id else device.uuid
    details = [detail for detail in (uuid, device.name) if detail]
    return f"{device.id} ({', '.join(details)})" if details else str(device.id)
