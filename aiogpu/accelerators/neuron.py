"""AWS Neuron (Inferentia, Trainium): one device for each NeuronCore.

Detected by `neuron-ls --json-output`, assigned by `NEURON_RT_VISIBLE_CORES`. Its
runtime takes ranges in that variable, "0-3", so they are understood here as well.
Cores cannot be shared. Their type is that of Ray, one for all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiogpu.core.devices import Device

from .listing import Id, choose, index, is_left_alone, joined, listed_in
from .quantities import whole_devices
from .types import AWS_NEURON_CORE
from .unwatched import Unwatched

FOLDER: Final = "/opt/aws/neuron/bin"
"""Where AWS's packages put their tools; they are looked for on PATH as well."""
TOOL: Final = "neuron-ls"
TOOL_LIMIT: Final = 10.0
"""Seconds after which the tool counts as one that does not answer."""
WIDEST: Final = 4096
"""Cores in one range; more than any instance has."""


class Neuron:
    """NeuronCores, the devices behind `resources={"neuron_cores": n}`.

    Args:
        folder: where its tools are.
    """

    kind: Final = "neuron_cores"
    option: Final = "resources['neuron_cores']"
    variable: Final = "NEURON_RT_VISIBLE_CORES"

    def __init__(self, folder: str = FOLDER) -> None:
        self._folder = folder

    def __repr__(self) -> str:
        return "<Neuron neuron_cores>"

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        """Say which cores a node may share out.

        Blocks while `neuron-ls` runs, for `TOOL_LIMIT` seconds at most. Where it fails
        a warning says so, and no core is detected.

        Args:
            environ: read for `NEURON_RT_VISIBLE_CORES` and `PATH`.
            wanted: how many the user gave, maybe more than there are unless the
                variable is set; None to detect them.

        Raises:
            DeviceError: the variable has an entry that is ill-formed, repeated or not
                there, or fewer entries than `wanted`.
        """
        if wanted == 0:
            return ()
        listed = listed_in(environ, self.variable, _cores)
        there = self._detect(environ) if listed is None or listed[2] else ()
        return choose(self.option, wanted, there, listed, _core)

    def assignment(
        self, ids: Sequence[Id], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Say which variable gives a worker these cores and no others."""
        if is_left_alone(self.variable, environ):
            return {}
        return {self.variable: joined(ids)}

    def quantity(self, value: object) -> int:
        """Turn a number of whole cores into parts; raises `OptionError`."""
        return whole_devices(self.option, value, "NeuronCore")

    def type_of(self, name: str | None) -> str:
        """One type for all of them, as in Ray."""
        del name
        return AWS_NEURON_CORE

    def watch(self) -> Unwatched:
        """Nobody is asked what is on a core."""
        return Unwatched()

    def _detect(self, environ: Mapping[str, str]) -> tuple[Device, ...]:
        tool = self._tool(environ.get("PATH", ""))
        if tool is None:
            return ()
        try:
            return tuple(_read(_run(tool)))
        except (OSError, ValueError) as error:
            from logging import getLogger

            getLogger(__name__).warning(
                "! %s: %s; no NeuronCore is detected.", tool, error
            )
            return ()

    def _tool(self, path: str) -> str | None:
        for folder in (self._folder, *path.split(os.pathsep)):
            tool = os.path.join(folder, TOOL)
            if folder and os.path.isfile(tool) and os.access(tool, os.X_OK):
                return tool
        return None


def _core(id_: Id) -> Device:
    return Device(id_, type=AWS_NEURON_CORE)


def _cores(entry: str) -> Sequence[Id]:
    """What "2" or "0-3" names; nothing where it is ill-formed."""
    first, dash, last = entry.partition("-")
    if not dash:
        return index(entry)
    begin, end = index(first), index(last)
    if not begin or not end:
        return ()
    cores = range(int(begin[0]), int(end[0]) + 1)
    return cores if len(cores) <= WIDEST else ()


def _run(tool: str) -> str:
    """What the tool writes.

    Raises:
        OSError: it cannot be started, fails, or does not answer.
    """
    from subprocess import DEVNULL, TimeoutExpired, run

    try:
        ran = run(
            [tool, "--json-output"],
            stdin=DEVNULL,
            capture_output=True,
            timeout=TOOL_LIMIT,
            check=False,
        )
    except TimeoutExpired:
        raise OSError(f"it has not answered for {TOOL_LIMIT:g} s") from None
    if ran.returncode:
        said = ran.stderr.decode(errors="replace").strip().splitlines()
        because = f": {said[-1][:200]}" if said else ""
        raise OSError(f"it ended with status {ran.returncode}{because}")
    return ran.stdout.decode()


def _read(output: str) -> list[Device]:
    """The cores of all chips that the tool lists.

    Raises:
        ValueError: it is no such list.
    """
    from json import loads

    chips: Any = loads(output) if output.strip() else []
    if not isinstance(chips, list) or not all(isinstance(chip, dict) for chip in chips):
        raise ValueError("it wrote no list of chips")
    found: list[Device] = []
    for chip in chips:
        cores, memory = chip.get("nc_count", 0), chip.get("memory_size", 0)
        if not all(type(number) is int and number >= 0 for number in (cores, memory)):
            raise ValueError(f"it wrote {cores!r} cores with {memory!r} bytes")
        pci, first = chip.get("bdf"), len(found)
        found += (
            Device(
                number,
                type=AWS_NEURON_CORE,
                memory=memory // cores,
                pci=pci if isinstance(pci, str) else None,
            )
            for number in range(first, first + cores)
        )
    return found
