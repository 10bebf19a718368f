"""The devices of a `NodeStatus` as text: what is on each, and who holds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from aiogpu.core.sizes import size
from aiogpu.core.wording import SHOWN, aligned, listing, rest, span

if TYPE_CHECKING:
    from aiogpu.core.holding import DeviceStatus, Holder
    from aiogpu.core.observed import OtherProcess

WIDEST: Final = 100
"""Columns of a line from which on what is seen stands on a line of its own."""
STALE: Final = 5.0
"""Seconds after which it is said how old a look is."""

_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20))


def device_rows(devices: Sequence[DeviceStatus]) -> Iterator[str]:
    """All devices: a line for each, and below it those who are there."""
    for device, lines in zip(devices, _lines(devices), strict=True):
        yield from lines
        if device.aside is not None:
            yield f"  set aside: {device.aside}"
        if device.is_unverified:
            yield "  unverified: whether ended tasks left something on it is not known"
        rows = [_holder(holder) for holder in device.holders[:SHOWN]]
        yield from aligned(rows, indent="  ")
        yield from rest(len(device.holders) - SHOWN)
        if device.others:
            told = listing(map(_other, device.others), len(device.others))
            yield f"  not ours: {told}"
    yield from _unknown(devices)


def _lines(devices: Sequence[DeviceStatus]) -> Iterator[list[str]]:
    """One line a device, or two where it would be too wide."""
    identities = [
        (f"{device.kind} {device.id}", f"{device.free:g} free", _name(device))
        for device in devices
    ]
    seen = [_seen(device) for device in devices]
    rows = [(*who, *what) for who, what in zip(identities, seen, strict=True)]
    used = [any(column) for column in zip(*rows, strict=True)]
    joined = aligned(
        [cell for cell, is_used in zip(row, used, strict=True) if is_used]
        for row in rows
    )
    short = aligned(identities)
    for whole, who, what in zip(joined, short, seen, strict=True):
        if len(whole) <= WIDEST:
            yield [whole]
        else:
            yield [who, "  " + "  ".join(filter(None, what))]


def _name(device: DeviceStatus) -> str:
    return device.name or device.type or ""


def _seen(device: DeviceStatus) -> Sequence[str]:
    busy = "" if device.utilisation is None else f"{device.utilisation} % busy"
    is_stale = device.seen is not None and device.seen > STALE
    return (
        _memory(device),
        f"{amount(device.memory_reserved)} reserved" if device.memory_reserved else "",
        busy,
        f"seen {span(device.seen or 0.0)} ago" if is_stale else "",
    )


def _memory(device: DeviceStatus) -> str:
    there = amount(device.memory)
    if device.used is None:
        return there
    return f"{amount(device.used, '0')} used" + (f" of {there}" if there else "")


def amount(count: int, none: str = "") -> str:
    """Bytes as people read them, "3.2 GiB"; `none` for less than a MiB."""
    for unit, one in _UNITS:
        if count >= one:
            units = count / one
            return f"{units:.0f} {unit}" if units >= 100 else f"{units:.3g} {unit}"
    return none


def _holder(holder: Holder) -> Sequence[str]:
    held = f"{holder.share:g}" if holder.share else size(holder.memory)
    if holder.is_settling:
        return (held, "(ended)", "", "until its driver agrees", "")
    used = "" if holder.used is None else f"{amount(holder.used, '0')} used"
    if holder.has_outgrown:
        used += ", more than was reserved for it"
    return (
        held,
        holder.task or "(ending)",
        pid_of(holder.pid),
        "without end" if holder.is_endless else _for(holder.seconds),
        used,
    )


def pid_of(pid: int) -> str:
    """A worker's process, which may not be there yet."""
    return f"pid {pid}" if pid else "(starting)"


def _for(seconds: float | None) -> str:
    return "" if seconds is None else span(seconds)


def _other(process: OtherProcess) -> str:
    told = " ".join(filter(None, (process.name, f"pid {process.pid}")))
    size = "" if process.memory is None else amount(process.memory, "0")
    return f"{told} with {size}" if size else told


def _unknown(devices: Sequence[DeviceStatus]) -> Iterator[str]:
    """Each thing that is not known, once for all devices that it is not known of."""
    told: dict[str, list[str]] = {}
    for device in devices:
        if device.unknown is not None:
            told.setdefault(device.unknown, []).append(f"{device.kind} {device.id}")
    for what, names in told.items():
        yield f"not known of {listing(names, len(names))}: {what}"
