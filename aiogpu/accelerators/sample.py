"""What a driver says is on a device at one moment; what could not be learnt is None.

Plain data, so that what follows from it can be decided without a driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one device.

    Attributes:
        processes: the processes that the driver lists on it, by their ids as it
            writes them, each with its bytes of device memory, None where the driver
            does not say; None for all where it lists none at all, by its nature.
        living: those of them that are ids of live processes here.
        reads_pids: whether the driver's process ids are surely those that this
            process sees too.
        used: bytes of device memory in use, by whomever; None where unknown.
        utilisation: percent of the last moments in which something ran on it; None
            where unknown.
        problem: why nothing could be learnt, in a few words; None if it could.
        is_lost: the device does not answer and will not before a reset.
    """

    processes: Mapping[int, int | None] | None = None
    living: frozenset[int] = frozenset()
    reads_pids: bool = False
    used: int | None = None
    utilisation: int | None = None
    problem: str | None = None
    is_lost: bool = False
