"""A vendor of the user's own, and machines of other vendors as files of a test's."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiogpu.accelerators import Unwatched
from aiogpu.core.model.request import Device


class Fpga:
    """A vendor of the user's own."""

    kind = "FPGA"
    option = "resources['FPGA']"
    variable = "FPGA_VISIBLE"

    def __repr__(self) -> str:
        return "<Fpga>"

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        return tuple(
            Device(number) for number in range(2 if wanted is None else wanted)
        )

    def assignment(
        self, ids: Sequence[int | str], environ: Mapping[str, str]
    ) -> dict[str, str]:
        return {self.variable: ",".join(map(str, ids))}

    def quantity(self, value: object) -> Any:
        return value

    def type_of(self, name: str | None) -> str | None:
        return name

    def watch(self) -> Unwatched:
        return Unwatched()


GIB = 1 << 30


CHIPS = [
    {
        "neuron_device": number,
        "bdf": f"00:1{number}.0",
        "connected_to": None,
        "nc_count": 2,
        "memory_size": 32 * GIB,
        "neuron_processes": [],
    }
    for number in range(2)
]


def tool(folder: Path, script: str) -> dict[str, str]:
    """A `neuron-ls` in a folder, and the environment in which it is found."""
    path = folder / "neuron-ls"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"/nowhere:{folder}"}


def listing(folder: Path, chips: object = CHIPS) -> dict[str, str]:
    text = chips if isinstance(chips, str) else json.dumps(chips)
    script = f'[ "$*" = --json-output ] || exit 9\ncat <<"END"\n{text}\nEND'
    return tool(folder, script)


def write(root: Path, files: dict[str, object]) -> None:
    """Write files with these contents, each with a line's end."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def pci_card(root: Path, name: str, pci: str, driver: str = "", **facts: str) -> None:
    """A card below `sys/class` that leads to its PCI device."""
    place = root / "sys/devices/pci" / pci
    write(place, dict(facts))
    if driver:
        home = root / "sys/bus/pci/drivers" / driver
        home.mkdir(parents=True, exist_ok=True)
        (place / "driver").symlink_to(home)
    entry = root / "sys/class" / name
    entry.mkdir(parents=True)
    (entry / "device").symlink_to(place)
