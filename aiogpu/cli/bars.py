"""Devices as bars: how much is held by whom, how full and how busy each of them is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from aiogpu.cli.grid import GAP, Line, cut, within
from aiogpu.cli.tables import device_name, held_by, memory
from aiogpu.core.model.text import printable
from aiogpu.observe.status import DeviceStatus

COLORS: Final = ("cyan", "magenta", "green", "yellow", "blue")
"""Of holders, one after the other."""
FULL, EMPTY = "█", "░"
NARROW: Final = 60
"""Columns below which there is one bar."""
WIDE: Final = 110
"""Columns from which on bars are long, and the device's name stands beside them."""


def device_lines(devices: Sequence[DeviceStatus], width: int) -> Iterator[Line]:
    """A line of bars for each device, and one for who holds it."""
    names = [device_name(device) for device in devices]
    margin = min(max(map(len, names), default=0), max(8, width // 4))
    for name, device in zip(names, devices, strict=True):
        head = cut(name, margin).ljust(margin + GAP)
        if device.aside is not None:
            told = f"set aside: {printable(device.aside)}"
            yield [(head, "bold"), (cut(told, width - margin - GAP), "bold red")]
        else:
            yield within([(head, "bold"), *_bars(device, width)], width)
        told = printable("  ".join(held_by(device)))
        if told:
            yield [(" " * (margin + GAP), ""), (cut(told, width - margin - GAP), "dim")]


def _bars(device: DeviceStatus, width: int) -> Iterator[tuple[str, str]]:
    long = 24 if width >= WIDE else 12 if width >= NARROW else 8
    yield from share_bar(device, long)
    yield (f" {1 - device.free:>4.2g} held", "")
    if device.used is not None and device.memory:
        if width >= NARROW:
            part = device.used / device.memory
            yield ("  ", "")
            yield from part_bar(part, long // 2, "red" if part > 0.9 else "blue")
        yield (f" {memory(device)}", "")
    if device.utilisation is not None:
        if width >= WIDE:
            yield ("  ", "")
            yield from part_bar(device.utilisation / 100, long // 2, "green")
        yield (f" {device.utilisation:>3} % busy", "")
    if width >= WIDE and (device.name or device.type):
        yield (f"  {printable(device.name or device.type or '')}", "dim")


def share_bar(device: DeviceStatus, width: int) -> Iterator[tuple[str, str]]:
    """One holder after the other, each in its colour; then what is free."""
    at, held = 0, 0.0
    for number, holder in enumerate(device.holders):
        held += holder.share
        end = min(width, max(at + (holder.share > 0), round(held * width)))
        yield (FULL * (end - at), COLORS[number % len(COLORS)])
        at = end
    yield (EMPTY * (width - at), "dim")


def part_bar(part: float, width: int, style: str) -> Iterator[tuple[str, str]]:
    """Return how much of something is used."""
    full = round(min(max(part, 0.0), 1.0) * width)
    yield (FULL * full, style)
    yield (EMPTY * (width - full), "dim")
