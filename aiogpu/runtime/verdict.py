"""Whether a device is free of a worker that has ended: one rule, pure.

Asks nobody and waits for nothing; how often to look is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from aiogpu.accelerators.base import Sample

TOLERANCE: Final = 100 << 20
"""Bytes above the memory in use before that are not counted as a worker's: drivers
leave some behind for the next context."""


class State(Enum):
    """What may be done with the share."""

    FREE = auto()
    UNVERIFIED = auto()
    HELD = auto()
    LOST = auto()


@dataclass(frozen=True, slots=True)
class Verdict:
    """A state, and for a device that is not free the reason, for people."""

    state: State
    reason: str = ""


FREE: Final = Verdict(State.FREE)
UNVERIFIED: Final = Verdict(State.UNVERIFIED)


def verdict(
    before: Sample, now: Sample, pids: Collection[int], *, is_whole: bool
) -> Verdict:
    """Decide whether a device may be given to the next task.

    All processes of the worker have ended: `waitpid` has said so. But the driver
    takes their memory back after that, and lists them until it has. So:

    1. A lost device is LOST; nobody is to get it.
    2. A driver that fails to answer leaves it UNVERIFIED.
    3. A whole device whose memory in use is what it was, give or take `TOLERANCE`,
       is FREE, whatever is listed.
    4. What may be left of the worker is each listed id that is one of `pids`, or
       that neither lives nor was listed before: its descendants have ended and are
       not known by name. A live process is somebody else's.
    5. If nothing is left, it is FREE, provided that the list can be believed: the
       ids are those that we see, or it does list somebody. Elsewhere (a container)
       an empty list may be a blind one: then a whole device is HELD by the memory
       that is not back, a fraction is UNVERIFIED.
    6. If something is left, a whole device is HELD, and so is a fraction by a known
       id. By another id it is only where ids can be read: elsewhere it is as likely
       a neighbour's, and the fraction is UNVERIFIED.
    7. A device whose processes cannot be listed is judged by memory if it is whole,
       and is UNVERIFIED otherwise.

    Args:
        before: the device when the worker got it, or when it was idle last.
        now: the device now.
        pids: ids of the worker's processes, as far as they are known.
        is_whole: the worker had all of the device.
    """
    if now.is_lost:
        return Verdict(State.LOST, f"the driver calls it lost ({now.problem})")
    if now.problem is not None:
        return UNVERIFIED
    extra = _more(before, now) if is_whole else None
    if extra is not None and extra <= TOLERANCE:
        return FREE
    if now.processes is None:
        return _by_memory(extra)
    return _by_list(before, now, pids, is_whole) or _by_memory(extra)


def _by_list(
    before: Sample, now: Sample, pids: Collection[int], is_whole: bool
) -> Verdict | None:
    """Rules 4 to 6; None where the list may be a blind one."""
    processes, listed_before = now.processes or {}, before.processes or {}
    known = [pid for pid in processes if pid in pids]
    unknown = [
        pid for pid in processes if pid not in now.living and pid not in listed_before
    ]
    if known:
        return Verdict(State.HELD, _listing(processes, known))
    if unknown:
        if is_whole or now.reads_pids:
            return Verdict(State.HELD, _listing(processes, unknown))
        return UNVERIFIED
    is_blind = not (now.reads_pids or processes or listed_before)
    return None if is_blind else FREE


def _more(before: Sample, now: Sample) -> int | None:
    """How many bytes are in use beyond those before; None where unknown."""
    if before.used is None or now.used is None:
        return None
    return now.used - before.used


def _by_memory(extra: int | None) -> Verdict:
    if extra is None:
        return UNVERIFIED
    return Verdict(State.HELD, f"{_mib(extra)} more are in use than before the task")


def _listing(processes: Mapping[int, int | None], left: list[int]) -> str:
    told = ", ".join(_process(pid, processes[pid]) for pid in left[:3])
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    return f"of what has ended, the driver still lists {told}{more}"


def _process(pid: int, size: int | None) -> str:
    return f"pid {pid}" + (f" with {_mib(size)}" if size is not None else "")


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB ({size} bytes)"
