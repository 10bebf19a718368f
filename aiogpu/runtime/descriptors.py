"""The limit on this process's open descriptors: raised while a node is open.

A slot takes five: the connections of its keeper and of its worker, which has a second
one where there is shared memory, and two pipes for what is written straight to stdout
and stderr. 1024, which is usual, is soon used up.
What nodes start, and the program itself after the last node, has the limit that it
had: `select` takes no descriptor above 1023, and there is code that tries them all.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
from contextlib import suppress
from typing import Final

from aiogpu.errors import NodeStartError
from aiogpu.memory.control_page import SLOTS

_log: Final = logging.getLogger(__name__)


PER_SLOT: Final = 5
"""Descriptors that the driver holds for a slot: three connections and two pipes."""


RESERVE: Final = 32
"""Descriptors for a node itself, and for a program that opens few."""


FEW: Final = 8
"""Workers below which a program is told at once: a few actors would take them all."""


NOFILE: Final = resource.RLIMIT_NOFILE


def used_descriptors() -> int:
    """Return how many descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def soft_limit() -> int:
    """The number below which every descriptor of this process must be."""
    soft, _ = resource.getrlimit(NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def values_limit() -> int:
    """The number from which on no descriptor is kept for a value.

    An eighth of them is left to workers that are still to come, and to the program.
    """
    soft = soft_limit()
    return soft - RESERVE // 2 - soft // 8


def raised(soft: int, hard: int, used: int) -> int:
    """Return what a node raises a soft limit to, by the hard one and what is in use."""
    wanted = used + RESERVE + PER_SLOT * SLOTS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def slots_within(soft: int, used: int) -> int:
    """For how many slots there is room."""
    if soft == resource.RLIM_INFINITY:
        return SLOTS
    return min(SLOTS, max(0, soft - used - RESERVE) // PER_SLOT)


def warn_of_few(workers: int) -> None:
    """Log a warning where a node has room for very few workers."""
    if workers >= FEW:
        return
    soft, hard = resource.getrlimit(NOFILE)
    _log.warning(
        "! workers at a time: %d at most. Each actor has one for its life, and tasks "
        "that need more wait: %s",
        workers,
        _too_few(soft, used_descriptors(), hard),
    )


def _too_few(soft: int, used: int, hard: int) -> str:
    return (
        f"this process may have {soft} descriptors open and has {used}; a node needs "
        f"{RESERVE}, and {PER_SLOT} for each worker. Close some, or raise the hard "
        f"limit ({hard}): `ulimit -Hn`, LimitNOFILE= of systemd, --ulimit nofile= of a "
        f"container."
    )


class DescriptorLimit:
    """This process's soft limit, and what it was before nodes were opened."""

    def __init__(self) -> None:
        # Nodes are opened on loops, and loops run in threads.
        self._lock = threading.Lock()
        self._nodes = 0
        self._before: int | None = None
        self._ours = 0

    def __repr__(self) -> str:
        return f"<DescriptorLimit {self._before} -> {self._ours}, {self._nodes} nodes>"

    def acquire(self) -> int:
        """A node opens: raise the limit; gives for how many slots there is room.

        Raises:
            NodeStartError: there is no room for a single one.
        """
        with self._lock:
            used = used_descriptors()
            soft, hard = resource.getrlimit(NOFILE)
            limit = raised(soft, hard, used)
            if limit != soft and self._set(limit, hard):
                if self._before is None or soft != self._ours:
                    self._before = soft
                self._ours = soft = limit
            slots = slots_within(soft, used)
            if not slots:
                raise NodeStartError(_too_few(soft, used, hard))
            self._nodes += 1
            return slots

    def release(self) -> None:
        """A node has closed; after the last one the limit is what it was.

        Unless the program has changed it meanwhile.
        """
        with self._lock:
            self._nodes -= 1
            if self._nodes or self._before is None:
                return
            before, self._before = self._before, None
            soft, hard = resource.getrlimit(NOFILE)
            if soft == self._ours:
                self._set(before, hard)

    def hand_down(self, pid: int) -> None:
        """Give a child of ours the limit that this program had."""
        with self._lock:
            before = self._before
        if before is not None:
            _, hard = resource.getrlimit(NOFILE)
            with suppress(ProcessLookupError):
                resource.prlimit(pid, NOFILE, (before, hard))

    def _set(self, soft: int, hard: int) -> bool:
        try:
            resource.setrlimit(NOFILE, (soft, hard))
        except (OSError, ValueError) as error:
            _log.warning("! the limit on descriptors cannot be %d: %s", soft, error)
            return False
        return True


descriptor_limit: Final = DescriptorLimit()
"""There is one limit for the whole process, however many nodes it has."""
