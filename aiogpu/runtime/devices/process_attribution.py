"""Whose the processes are that drivers list: our workers', or somebody else's.

Pure: it is told what was listed, where those processes come from, and which
processes are the roots of which worker.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from aiogpu.accelerators.base import Sample
from aiogpu.linux.procfs import Origin
from aiogpu.observe.status import OtherProcess

FOREIGN_IDS: Final = (
    "whose its processes are (the driver's process ids are not those seen here)"
)


UNLISTED: Final = "which processes are on it (its driver lists none)"


THIS_PROGRAM: Final = "this program"


@dataclass(frozen=True, slots=True)
class Use:
    """What one worker has of a device's memory, with all below it.

    Attributes:
        memory: bytes.
        processes: how many processes these belong to.
    """

    memory: int
    processes: int


@dataclass(frozen=True, slots=True)
class Sorted:
    """The processes of one look at a device, by whose they are.

    Attributes:
        workers: by worker id; without those of which the driver tells no memory.
        others: processes that are not ours; None where that cannot be told.
        unknown: what cannot be told and why, None if nothing.
    """

    workers: Mapping[int, Use] = field(default_factory=dict)
    others: tuple[OtherProcess, ...] | None = ()
    unknown: str | None = None


class ProcessAttribution:
    """Whose processes were seen on one node's devices.

    The driver's process ids are believed to be those seen here if that is certain
    (`Sample.reads_pids`), or once one of ours was listed by such an id.
    """

    def __init__(self) -> None:
        self._ours: dict[int, int] = {}
        self._read: set[str] = set()
        self._unseen: set[int] = set()
        self._unseen_before: set[int] = set()

    def __repr__(self) -> str:
        return f"<ProcessAttribution of {len(self._ours)} processes>"

    def sort(
        self,
        kind: str,
        sample: Sample,
        origins: Mapping[int, Origin],
        roots: Mapping[int, int],
    ) -> Sorted:
        """Say whose the processes are of one look at a device.

        Args:
            kind: of the device.
            sample: what was seen on it.
            origins: of the live processes among those.
            roots: the processes whose descendants are a worker's, itself among
                them, each with the worker's id.
        """
        if sample.problem is not None:
            return Sorted({}, None, f"what is on it ({sample.problem})")
        if sample.processes is None:
            return Sorted({}, None, UNLISTED)
        workers: dict[int, Use] = {}
        others: list[OtherProcess] = []
        for pid, memory in sample.processes.items():
            origin = origins.get(pid)
            worker = self._worker(pid, origin, roots)
            if worker is not None:
                self._read.add(kind)
                if memory:
                    before = workers.get(worker, Use(0, 0))
                    workers[worker] = Use(before.memory + memory, before.processes + 1)
            elif origin is not None or self._is_elsewhere(pid, sample):
                others.append(OtherProcess(pid, _name(pid, origin), memory))
        if others and not sample.reads_pids and kind not in self._read:
            return Sorted(workers, None, FOREIGN_IDS)
        return Sorted(workers, tuple(others))

    def _worker(
        self, pid: int, origin: Origin | None, roots: Mapping[int, int]
    ) -> int | None:
        """Whose a process is; one that has ended is whose it was when it lived."""
        if origin is None:
            return self._ours.get(pid)
        for each in (pid, *origin.ancestors):
            worker = roots.get(each)
            if worker is not None:
                self._ours[pid] = worker
                return worker
        self._ours.pop(pid, None)
        return None

    def _is_elsewhere(self, pid: int, sample: Sample) -> bool:
        """Return whether a process that cannot be seen from here lives all the same.

        The driver lists one that has ended for some moments more; so it must have
        been listed in the round before, and ids of other namespaces must be possible.
        """
        if sample.reads_pids:
            return False
        self._unseen.add(pid)
        return pid in self._unseen_before

    def end_round(self, listed: Collection[int]) -> None:
        """All devices were looked at; only these are still listed by any driver."""
        self._ours = {pid: one for pid, one in self._ours.items() if pid in listed}
        self._unseen_before, self._unseen = self._unseen, set()


def _name(pid: int, origin: Origin | None) -> str:
    if origin is None:
        return ""
    return THIS_PROGRAM if pid == os.getpid() else origin.name
