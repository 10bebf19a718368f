"""A vendor of the user, and files that describe machines of other vendors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiogpu.accelerators import Unwatched
from aiogpu.core.model.request import Device


class Fpga:
    """A vendor that a user adds."""

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


CHIP = {"nc_count": 2, "memory_size": 32 * GIB}
OTHER_FACTS = {"connected_to": None, "neuron_processes": []}
CHIPS = [
    CHIP | OTHER_FACTS | {"neuron_device": number, "bdf": f"00:1{number}.0"}
    for number in range(2)
]


def tool(folder: Path, script: str) -> dict[str, str]:
    """Write a `neuron-ls` into a folder; return an environment that finds it."""
    path = folder / "neuron-ls"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return {"PATH": f"/nowhere:{folder}"}


def listing(folder: Path, chips: object = CHIPS) -> dict[str, str]:
    text = chips if isinstance(chips, str) else json.dumps(chips)
    script = f'[ "$*" = --json-output ] || exit 9\ncat <<"END"\n{text}\nEND'
    return tool(folder, script)


def write(root: Path, files: dict[str, object]) -> None:
    """Write files with these contents and a newline."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def pci_card(root: Path, name: str, pci: str, driver: str = "", **facts: str) -> None:
    """Make a card below `sys/class` with a link to its PCI device."""
    device = root / "sys/devices/pci" / pci
    write(device, dict(facts))
    if driver:
        home = root / "sys/bus/pci/drivers" / driver
        home.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(home)
    entry = root / "sys/class" / name
    entry.mkdir(parents=True)
    (entry / "device").symlink_to(device)
