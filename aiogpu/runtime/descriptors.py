"""The limit on this process's open descriptors, which is raised while a node is open.

A slot needs five descriptors: a connection for the keeper, one or (with shared memory)
two for the worker, and two pipes for raw output. The usual limit of 1024 is soon
reached. Child processes of nodes get the original limit, and so does the program after
its last node: `select` takes no descriptor above 1023, and some code loops over all.
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
"""Descriptors that the driver needs for a slot: three connections and two pipes."""


RESERVE: Final = 32
"""Descriptors for the node itself, and for a program that opens few."""


FEW: Final = 8
"""With fewer workers a warning is logged: a few actors would occupy them all."""


NOFILE: Final = resource.RLIMIT_NOFILE


def used_descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def soft_limit() -> int:
    """Return the soft limit: all descriptors of this process are below it."""
    soft, _ = resource.getrlimit(NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def values_limit() -> int:
    """Return the lowest descriptor number that is not kept open for a value.

    An eighth of all descriptors is reserved for future workers and the program.
    """
    soft = soft_limit()
    return soft - RESERVE // 2 - soft // 8


def raised(soft: int, hard: int, used: int) -> int:
    """Return the value to which a node raises a soft limit."""
    wanted = used + RESERVE + PER_SLOT * SLOTS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)


def slots_within(soft: int, used: int) -> int:
    """Return the number of slots that fit within a soft limit."""
    if soft == resource.RLIM_INFINITY:
        return SLOTS
    return min(SLOTS, max(0, soft - used - RESERVE) // PER_SLOT)


def warn_of_few(workers: int) -> None:
    """Log a warning if a node has room for very few workers."""
    if workers >= FEW:
        return
    soft, hard = resource.getrlimit(NOFILE)
    _log.warning(
        "! this node can have only %d workers at a time. An actor occupies one for its "
        "life, and further tasks wait: %s",
        workers,
        _too_few(soft, used_descriptors(), hard),
    )


def _too_few(soft: int, used: int, hard: int) -> str:
    return (
        f"this process may have {soft} descriptors open and has {used}; a node needs "
        f"{RESERVE}, and {PER_SLOT} for each worker. Close files, or raise the hard "
        f"limit ({hard}): `ulimit -Hn`, LimitNOFILE= of systemd, --ulimit nofile= of a "
        f"container."
    )


class DescriptorLimit:
    """The soft limit of this process, and its value before nodes were opened."""

    def __init__(self) -> None:
        # Nodes are opened on loops, and loops run in threads.
        self._lock = threading.Lock()
        self._nodes = 0
        self._before: int | None = None
        self._ours = 0

    def __repr__(self) -> str:
        return f"<DescriptorLimit {self._before} -> {self._ours}, {self._nodes} nodes>"

    def acquire(self) -> int:
        """Raise the limit for a node; return the number of slots that fit.

        Raises:
            NodeStartError: not a single slot fits.
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
        """Note that a node has closed; after the last one, restore the limit.

        A limit that the program has changed in the meantime stays.
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
        """Give a child process the original limit of this program."""
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
            _log.warning("! cannot set the limit on descriptors to %d: %s", soft, error)
            return False
        return True


descriptor_limit: Final = DescriptorLimit()
"""The limit concerns the whole process, however many nodes it has."""
