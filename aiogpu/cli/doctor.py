"""`aiogpu doctor` and `aiogpu gpus`: checks of this machine, and its devices.

`doctor` prints one line for each mechanism; a failed check says what it means and what
to do (`aiogpu.cli.checks`). `gpus` prints the devices and the processes on them
(`aiogpu.engines.device_report`): as a table if the terminal is wide enough, else as
lines, or as JSON. The holders of shares come from the user's shared node, if one runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final, NamedTuple

import click
from rich.text import Text

import aiogpu
from aiogpu.cli import connect
from aiogpu.cli.checks import CHECKS, Check, Finding, Level, examine, import_checks
from aiogpu.cli.terminal import echo
from aiogpu.cli.views.status import data_of
from aiogpu.cli.views.tables import Column, Table, console, held_by, plain, text
from aiogpu.core.model.request import Device
from aiogpu.core.model.text import printable
from aiogpu.engines.device_report import DetectedDevice, DeviceReport, probe_devices
from aiogpu.observe.status import DeviceStatus, OtherProcess, amount, memory_use

STYLES: Final = {Level.OK: "green", Level.WARN: "yellow", Level.MISSING: "red"}


@click.command()
@click.option(
    "--imports",
    is_flag=True,
    help="Also import numpy, torch and similar, each in a separate process.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def doctor(imports: bool, as_json: bool) -> int:
    """Check the mechanisms that a node needs, and advise on failures.

    The checks change nothing and leave nothing behind. The exit code is 1 if no node
    can start on this machine, 0 otherwise.
    """
    return run([*CHECKS, *(import_checks() if imports else ())], as_json=as_json)


def run(checks: Sequence[Check], *, as_json: bool = False) -> int:
    """Run checks and print their findings; return the exit code."""
    # Checks report their warnings as findings, so they need not be logged as well.
    logging.getLogger("aiogpu").addHandler(logging.NullHandler())
    screen = console()
    findings = []
    for finding in examine(checks):
        findings.append(finding)
        if not as_json:
            screen.print(line(finding), soft_wrap=True)
    is_fatal = any(finding.is_fatal for finding in findings)
    if as_json:
        echo(json.dumps([asdict(finding) for finding in findings], indent=1))
        return int(is_fatal)
    counts = Counter(finding.level for finding in findings)
    summary = ", ".join(f"{counts[level]} {level.value}" for level in Level)
    verdict = "No node can start here" if is_fatal else "Nodes can start here"
    screen.print(f"{verdict}: {summary}.", soft_wrap=True)
    return int(is_fatal)


def line(finding: Finding) -> Text:
    """Return a finding as one line."""
    observation = finding.found.rstrip(".")
    details = [part for part in (finding.means, finding.advice) if part]
    return Text.assemble(
        (f"{finding.level.value:<8}", STYLES[finding.level]),
        (f"{finding.name:<14}  ", "bold"),
        " ".join([f"{observation}.", *details]) if details else observation,
    )


PATIENCE: Final = 5.0
"""Seconds that the node has to answer."""


class NodeDevices(NamedTuple):
    """The devices as the user's node reports them.

    Attributes:
        devices: the devices of the node.
        note: why the node did not answer; "" if it answered or no node runs.
    """

    devices: tuple[DeviceStatus, ...] = ()
    note: str = ""

    def of(self, kind: str, device: Device) -> DeviceStatus | None:
        """Return the node's status of a device; None if the node does not have it."""
        for status in self.devices:
            has_uuids = status.uuid is not None and device.uuid is not None
            is_same = (
                status.uuid == device.uuid if has_uuids else status.id == device.id
            )
            if status.kind == kind and is_same:
                return status
        return None

    def holders(self, kind: str, device: Device) -> str:
        """Describe the holders of a device and its free share."""
        status = self.of(kind, device)
        if status is None:
            return ""
        if status.aside is not None:
            return f"set aside: {status.aside}"
        holders = ", ".join(held_by(status, with_others=False))
        free = f"{status.free:g} free"
        return f"{holders}; {free}" if holders else free


async def ask_node() -> NodeDevices:
    """Ask the user's node for its devices; return no devices without a node."""
    address = connect.default_address()
    try:
        connect.check_there(address)
    except click.ClickException:
        return NodeDevices()
    except aiogpu.errors.NodeError as error:
        message = str(error)
    else:
        try:
            async with connect.joined(address, PATIENCE) as node:
                return NodeDevices((await node.status()).devices)
        except click.ClickException as error:
            message = error.message
        except aiogpu.AiogpuError as error:
            message = str(error)
    reason = message.partition(". ")[0].rstrip(".")
    return NodeDevices(note=f"The holders of devices are unknown: {reason}.")


SHOWN: Final = 4
"""Most processes of a device that are listed."""
NOTHING: Final = NodeDevices()


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def gpus(as_json: bool) -> int:
    """Show the GPUs and other devices that a node would use.

    If there are no devices, the reason is printed and the exit code is 0. The exit code
    is 2 if a variable such as CUDA_VISIBLE_DEVICES names a device that does not exist.
    If a node of `aiogpu start` runs, the holders of each device are shown.

    \b
    Examples:
      aiogpu gpus
      aiogpu gpus --json
    """  # noqa: D301 - click's mark for lines to be left as they are
    log = logging.getLogger("aiogpu")
    warnings = Warnings()
    log.addHandler(warnings)
    try:
        report = warnings.added_to(asyncio.run(probe_devices()))
        node = asyncio.run(ask_node()) if report.seen else NOTHING
        if node.note:
            report = report._replace(notes=(*report.notes, node.note))
    finally:
        log.removeHandler(warnings)
    if as_json:
        echo(json.dumps(as_data(report, node), indent=1))
        return 0
    screen, table = console(), device_table(report, node)
    has_room = max(map(len, plain(table)), default=0) <= screen.width
    if not (screen.is_terminal and has_room):
        echo("\n".join(lines(report, node)))
        return 0
    if report.seen:
        screen.print(table)
    for seen in report.seen:
        state = health(seen)
        style = "green" if state in ("well", "answers") else "red"
        screen.print(text(f"{seen.kind} {seen.device.id}: {state}", style))
    for note in report.notes:
        screen.print(note, markup=False)
    return 0


class Warnings(logging.Handler):
    """Collects the warnings of detection, each once, to show them as notes.

    Attributes:
        lines: the texts of the warnings.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning."""
        self.lines[record.getMessage().removeprefix("! ")] = None

    def added_to(self, report: DeviceReport) -> DeviceReport:
        """Return the report with the warnings that its notes do not contain."""
        notes = "\n".join(report.notes)
        fresh = [line for line in self.lines if line.partition(";")[0] not in notes]
        return report._replace(notes=(*fresh, *report.notes))


def as_data(report: DeviceReport, node: NodeDevices = NOTHING) -> dict[str, Any]:
    """Return the report as JSON data: sizes in bytes, None for unknown values."""
    devices = []
    for seen in report.seen:
        data = _device_data(seen)
        if status := node.of(seen.kind, seen.device):
            data["free"], data["aside"] = status.free, status.aside
            data["holders"] = data_of(status.holders)
        devices.append(data)
    return {"devices": devices, "notes": list(report.notes)}


def _device_data(seen: DetectedDevice) -> dict[str, Any]:
    device, sample, health = seen.device, seen.sample, seen.health
    return {
        "kind": seen.kind,
        "id": device.id,
        "uuid": device.uuid,
        "name": device.name,
        "type": device.type,
        "compute_capability": device.compute_capability,
        "pci": device.pci,
        "parent": device.parent,
        "links": sorted(device.links),
        "numa_node": seen.numa_node,
        "cpus": seen.cpus or None,
        "memory": device.memory or None,
        "used": None if sample is None else sample.used,
        "utilisation": None if sample is None else sample.utilisation,
        "processes": None
        if seen.processes is None
        else [
            {"pid": other.pid, "name": other.name or None, "memory": other.memory}
            for other in seen.processes
        ],
        "problem": None if sample is None else sample.problem,
        "errors": [] if health is None else list(health.errors),
        "action": None if health is None else health.action,
        "is_lost": bool(health and health.is_lost),
    }


def lines(report: DeviceReport, node: NodeDevices = NOTHING) -> Iterator[str]:
    """Yield a heading for each device and a line for each of its facts."""
    for seen in report.seen:
        name = seen.device.name or seen.device.type or "without a name"
        yield f"{seen.kind} {seen.device.id}  {name}"
        for name, fact in facts(seen, report, node):
            yield f"  {name:<11} {fact}"
    yield from report.notes


def facts(
    seen: DetectedDevice, report: DeviceReport, node: NodeDevices = NOTHING
) -> Iterator[tuple[str, str]]:
    """Yield the known facts of a device as (name, text)."""
    device, sample = seen.device, seen.sample
    busy = None if sample is None else sample.utilisation
    capability = device.compute_capability
    known = (
        ("uuid", device.uuid if device.uuid != device.id else None),
        ("type", device.type),
        ("capability", capability and ".".join(map(str, capability))),
        ("pci", device.pci),
        ("part of", device.parent),
        ("held", printable(node.holders(seen.kind, device))),
        ("memory", memory_use(None if sample is None else sample.used, device.memory)),
        ("busy", None if busy is None else f"{busy} %"),
        (
            "linked to",
            ", ".join(
                str(other.device.id)
                for other in report.seen
                if other.device.uuid in device.links
            ),
        ),
        ("near", near(seen)),
        ("health", health(seen)),
        ("processes", processes(seen)),
    )
    for name, fact in known:
        if fact:
            yield name, fact


def near(seen: DetectedDevice) -> str:
    """Describe the NUMA node and the CPUs near a device."""
    node = "" if seen.numa_node is None else f"NUMA node {seen.numa_node}"
    cpus = f"CPUs {seen.cpus}" if seen.cpus else ""
    return ", ".join(filter(None, (node, cpus)))


def health(seen: DetectedDevice) -> str:
    """Describe the health of a device as its driver reports it."""
    if seen.sample is None or seen.health is None:
        return "unknown: aiogpu does not ask its driver"
    problem = seen.sample.problem
    parts = [*seen.health.errors]
    if seen.sample.is_lost or seen.health.is_lost:
        parts.append(f"lost ({problem})" if problem else "lost")
    elif problem is not None:
        parts.append(f"the driver does not report its use ({problem})")
    if seen.health.action:
        parts.append(f"the driver asks for this: {seen.health.action}")
    if parts:
        return "; ".join(parts)
    return "well" if seen.health.action is not None else "answers"


def processes(seen: DetectedDevice) -> str:
    """List the processes on a device."""
    if seen.sample is None or seen.sample.problem is not None:
        return ""
    if seen.processes is None:
        return "not listed by its driver"
    listed = [_process(process) for process in seen.processes[:SHOWN]]
    if len(seen.processes) > SHOWN:
        listed.append(f"and {len(seen.processes) - SHOWN} more")
    return ", ".join(listed) or "none"


def _process(process: OtherProcess) -> str:
    name = " ".join(filter(None, (process.name, f"pid {process.pid}")))
    return name if process.memory is None else f"{name} {amount(process.memory, '0')}"


def device_table(report: DeviceReport, node: NodeDevices) -> Table:
    """Build a table with a row for each device and its short facts."""

    def fact(name: str) -> Column[DetectedDevice]:
        return Column(name, lambda seen: dict(facts(seen, report, node)).get(name, ""))

    return Table(
        report.seen,
        Column("device", lambda seen: f"{seen.kind} {seen.device.id}"),
        Column("name", lambda seen: seen.device.name or seen.device.type or ""),
        *map(fact, ("held", "memory", "busy", "linked to", "near", "processes")),
    )
