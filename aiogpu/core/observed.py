"""What was last seen on a device, as far as people are told of it: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process on a device that is none of the node's workers, nor below one.

    Attributes:
        pid: its process id, as the driver writes it.
        name: of its program, "" where it cannot be seen from here.
        memory: bytes of device memory that it uses, None where the driver does not
            say.
    """

    pid: int
    name: str = ""
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """One device, when it was last looked at.

    Attributes:
        seen: when that was, by the scheduler's clock.
        used: bytes of its memory in use, by whomever; None where unknown.
        utilisation: percent of the last moments in which something ran on it; None
            where unknown.
        others: processes that are not ours; None where that cannot be told.
        workers: bytes of it that workers use, with all below them, by worker id.
        outgrown: those of them that use more than was reserved for them.
        unknown: what of this could not be learnt and why, None if nothing.
    """

    seen: float
    used: int | None = None
    utilisation: int | None = None
    others: tuple[OtherProcess, ...] | None = None
    workers: Mapping[int, int] = field(default_factory=dict)
    outgrown: frozenset[int] = frozenset()
    unknown: str | None = None


Observations = Mapping[tuple[str, int], Observed]
"""By the device's kind, and its index among those."""
