"""AWS Neuron (Inferentia, Trainium): one device for each NeuronCore.

Detected by `neuron-ls --json-output`, assigned by `NEURON_RT_VISIBLE_CORES`. As the
Neuron runtime does, aiogpu reads ranges in that variable: "0-3". A core cannot be
shared. All cores have one type, as in Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from aiogpu.core.model.request import Device

from .listed_devices import NONE, ListedAccelerator, index
from .types import AWS_NEURON_CORE

if TYPE_CHECKING:
    from .base import Id

FOLDER: Final = "/opt/aws/neuron/bin"
"""Folder of the tools of AWS's packages; PATH is searched as well."""
TOOL: Final = "neuron-ls"
TOOL_LIMIT: Final = 10.0
"""Seconds after which the tool counts as hung."""
WIDEST: Final = 4096
"""Most cores in one range; more than any instance has."""


class Neuron(ListedAccelerator):
    """NeuronCores, the devices behind `resources={"neuron_cores": n}`.

    Args:
        folder: the folder of its tools.
    """

    kind = "neuron_cores"
    option = "resources['neuron_cores']"
    variable = "NEURON_RT_VISIBLE_CORES"
    singular = "NeuronCore"

    def __init__(self, folder: str = FOLDER) -> None:
        super().__init__()
        self._folder = folder

    def parse(self, entry: str) -> Sequence[Id]:
        """Return the cores that "2" or "0-3" names; nothing if it is ill-formed."""
        first, dash, last = entry.partition("-")
        if not dash:
            return index(entry)
        begin, end = index(first), index(last)
        if not begin or not end:
            return ()
        cores = range(int(begin[0]), int(end[0]) + 1)
        return cores if len(cores) <= WIDEST else ()

    def logical(self, id_: Id, environ: Mapping[str, str]) -> Device:
        """Return the core with this id."""
        del environ
        return Device(id_, type=AWS_NEURON_CORE)

    def type_of(self, name: str | None) -> str:
        """Return the one type of all cores."""
        del name
        return AWS_NEURON_CORE

    def detect(self, environ: Mapping[str, str]) -> list[Device]:
        """Return the cores that `neuron-ls` lists.

        Blocks for `TOOL_LIMIT` seconds at most. If the tool fails, a warning says so
        and no core is detected. The tool does not run if the variable names no core.
        """
        if environ.get(self.variable, "all").strip() in NONE:
            return []
        tool = self._tool(environ.get("PATH", ""))
        if tool is None:
            return []
        try:
            return _cores(_run(tool))
        except (OSError, ValueError) as error:
            from logging import getLogger

            getLogger(__name__).warning(
                "! %s: %s; no NeuronCore is detected.", tool, error
            )
            return []

    def _tool(self, path: str) -> str | None:
        for folder in (self._folder, *path.split(os.pathsep)):
            tool = os.path.join(folder, TOOL)
            if folder and os.path.isfile(tool) and os.access(tool, os.X_OK):
                return tool
        return None


def _run(tool: str) -> str:
    """Return the tool's output.

    Raises:
        OSError: the tool cannot be started, fails, or does not answer.
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
        lines = ran.stderr.decode(errors="replace").strip().splitlines()
        because = f": {lines[-1][:200]}" if lines else ""
        raise OSError(f"it ended with status {ran.returncode}{because}")
    return ran.stdout.decode()


def _cores(output: str) -> list[Device]:
    """Return the cores of all chips in the tool's output.

    Raises:
        ValueError: the output is not a list of chips.
    """
    from json import loads

    chips: Any = loads(output) if output.strip() else []
    if not isinstance(chips, list) or not all(isinstance(chip, dict) for chip in chips):
        raise ValueError("it wrote no list of chips")
    devices: list[Device] = []
    for chip in chips:
        cores, memory = chip.get("nc_count", 0), chip.get("memory_size", 0)
        if not all(type(number) is int and number >= 0 for number in (cores, memory)):
            raise ValueError(f"it wrote {cores!r} cores with {memory!r} bytes")
        pci, first = chip.get("bdf"), len(devices)
        devices += (
            Device(
                number,
                type=AWS_NEURON_CORE,
                memory=memory // cores,
                pci=pci if isinstance(pci, str) else None,
            )
            for number in range(first, first + cores)
        )
    return devices
