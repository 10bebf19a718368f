"""What the kernel tells of devices, in files; what cannot be read is empty."""

from __future__ import annotations

import os


def read(*path: str) -> str:
    """A file's text without what surrounds it; "" where there is none to be read."""
    try:
        with open(os.path.join(*path), encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def numbered(prefix: str, *folder: str) -> list[tuple[int, str]]:
    """The entries of a folder that are a prefix and a number, by that number.

    Returns:
        Number and path of each: `(0, "/dev/davinci0")`.
    """
    place = os.path.join(*folder)
    try:
        names = os.listdir(place)
    except OSError:
        return []
    found = (
        (name.removeprefix(prefix), name) for name in names if name.startswith(prefix)
    )
    return sorted(
        (int(digits), os.path.join(place, name))
        for digits, name in found
        if digits.isascii() and digits.isdigit()
    )


def pci_address(device: str) -> str | None:
    """The address on the PCI bus of the device that a path leads to."""
    name = os.path.basename(os.path.realpath(device))
    return name if name.count(":") == 2 else None
