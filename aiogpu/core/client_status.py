"""The programs that share a node, as `status()` shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

from aiogpu.core.device_report import pid_of
from aiogpu.core.ids import OWN
from aiogpu.core.limits import Limits
from aiogpu.core.records import TaskRecord
from aiogpu.core.resources import number
from aiogpu.core.wording import SHOWN, aligned, rest, terms

if TYPE_CHECKING:
    from aiogpu.core.clients import Clients


class Program(NamedTuple):
    """Who a client is, as far as the core need not know.

    Attributes:
        name: what it is called by, "train.py".
        pid: its process id.
    """

    name: str
    pid: int


THE_NODES: Final = "the node's own program"
NOBODY: Final[Mapping[int, Program]] = MappingProxyType({})
"""Names of nobody."""


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """One of the programs that share a node.

    Attributes:
        id: its number; 0 for the program that the node belongs to, which is among
            them only where it has tasks.
        name: what it is called by; "" where that is not known.
        pid: its process id, 0 where that is not known.
        weight: how much it gets where a program of weight 1 gets 1.
        running: how many of its tasks have a worker, or were sent to one.
        waiting: how many have none.
        holds: what it holds now by resource, `{"CPU": 2.0, "GPU": 0.5}`.
        limits: what it may have.
        has_left: whether its process has gone, and only its tasks are there.
    """

    id: int
    name: str
    pid: int
    weight: float
    running: int
    waiting: int
    holds: Mapping[str, float]
    limits: Limits
    has_left: bool = False


def name_of(client: int, programs: Mapping[int, Program]) -> str:
    """What a program is called by."""
    program = programs.get(client)
    if program is not None and program.name:
        return program.name
    return THE_NODES if client == OWN else f"program {client}"


def clients_seen(
    clients: Clients | None,
    held: Iterable[TaskRecord],
    programs: Mapping[int, Program],
) -> tuple[ClientStatus, ...]:
    """All programs that share a node, by number; none where it is one's alone.

    Args:
        clients: what the node knows of them.
        held: the tasks that workers have.
        programs: names and process ids.
    """
    if clients is None:
        return ()
    running = Counter(record.client for record in held)
    known = {OWN: Program(THE_NODES, 0), **programs}
    nobody = Program("", 0)
    return tuple(
        ClientStatus(
            one.id,
            *known.get(one.id, nobody),
            weight=one.weight,
            running=running[one.id],
            waiting=one.unfinished - running[one.id],
            holds={name: number(parts) for name, parts in sorted(one.held.items())},
            limits=one.limits,
            has_left=one.has_left,
        )
        for one in sorted(clients, key=lambda one: one.id)
        if one.id != OWN or one.unfinished or one.held
    )


def client_rows(seen: Iterable[ClientStatus]) -> Iterator[str]:
    """The programs in a table, those first that run most; nothing if there is one."""
    told = [one for one in seen if one.id != OWN or one.running or one.waiting]
    if all(one.id == OWN for one in told):
        return
    yield "programs"
    told.sort(key=lambda one: (-one.running, -one.waiting, one.id))
    rows = [
        (
            name_of(one.id, {one.id: Program(one.name, one.pid)}),
            pid_of(one.pid) if one.pid else "",
            f"{one.running} run",
            f"{one.waiting} wait",
            "" if one.weight == 1 else f"weight {one.weight:g}",
            terms(one.holds.items()) if one.holds else "",
            "has left" if one.has_left else "",
        )
        for one in told[:SHOWN]
    ]
    yield from aligned(rows, indent="  ")
    yield from rest(len(told) - SHOWN)
