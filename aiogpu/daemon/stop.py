"""Stops a shared node and waits for its end.

The pidfile names the process. The signal is sent by pidfd, and only to a process of
this user that has the pidfile open, so never to another process that has got the same
pid meanwhile.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from aiogpu.daemon.place import (
    PidfileLock,
    Place,
    Record,
    extended_for,
    holds_pidfile,
    living_node,
)
from aiogpu.daemon.process import remove
from aiogpu.errors import NodeError, NodeRunningError
from aiogpu.linux.sockets import user
from aiogpu.runtime.directories import check_meeting

SLACK: Final = 5.0
"""Seconds to wait beyond the time that the node's record gives."""
KILLED_WITHIN: Final = 10.0
"""Most seconds that the kernel needs to end a killed process."""


class Stopped(NamedTuple):
    """A node that has ended.

    Attributes:
        record: the content of the node's pidfile.
        seconds: the time that the end took.
        is_forced: True if the node was killed.
    """

    record: Record
    seconds: float
    is_forced: bool


def stop(
    place: Place,
    *,
    force: bool = False,
    drain: float | None = None,
    on_wait: Callable[[Record, float], None] = lambda _record, _seconds: None,
) -> Stopped | None:
    """End the node; return None without a node.

    Args:
        place: the files of the node.
        force: True to kill the node; otherwise running tasks have time to end.
        drain: seconds for that; None for the seconds given at the start.
        on_wait: called with the record and the seconds that tasks have.

    Raises:
        NodeError: the node has not ended, it or its files belong to another user, or
            the pidfile names a process that is not the node.
    """
    check_meeting(place.pidfile)
    try:
        record = living_node(place.pidfile)
        if record is None:
            return None
        node = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return None
    except PermissionError as error:
        raise NodeError(
            f"the pidfile {place.pidfile} is another user's, and this is "
            f"{user(os.geteuid())}; a node is stopped by the user who has started it."
        ) from error
    try:
        # The pidfd refers to the process that has the pid now.
        if not record.is_alive or not _is_node(node, record, place):
            return None
        begun = time.monotonic()
        within = KILLED_WITHIN
        if not force:
            if drain is not None:
                _write_drain_seconds(place, drain)
            within = record.drain if drain is None else drain
            on_wait(record, within)
            within += record.ends_within + SLACK
        _signal(node, record, signal.SIGKILL if force else signal.SIGTERM)
        if not _ends_within(node, within, place):
            next_step = "Kill it by `aiogpu stop --force`"
            if force:
                next_step = "It sleeps in the kernel, maybe in a driver"
            raise NodeError(
                f"the node at {record.socket} (pid {record.pid}) has not ended within "
                f"{time.monotonic() - begun:.0f} s. {next_step}; what it did is told "
                f"in {record.logs}."
            )
        if force:
            _clear(place)
        return Stopped(record, time.monotonic() - begun, force)
    finally:
        os.close(node)


def _ends_within(node: int, seconds: float, place: Place) -> bool:
    """Wait for the end of a node; return False if it has not ended in time.

    The node extends the time while its tasks end: a million may wait.
    """
    while not select.select([node], [], [], max(0.0, seconds))[0]:
        seconds = extended_for(place.pidfile)
        if seconds <= 0:
            return False
    return True


def _is_node(node: int, record: Record, place: Place) -> bool:
    """Return whether the pidfile's process is the node; False if it has just ended.

    Raises:
        NodeError: the process is not the node, and must not be signalled.
    """
    if holds_pidfile(record.pid, place.pidfile):
        return True
    # A node releases its lock just before its process ends.
    if select.select([node], [], [], SLACK)[0]:
        return False
    raise NodeError(
        f"the pidfile {place.pidfile} names process {record.pid}, which is not the "
        f"node of {place.socket}: a node belongs to {user(os.geteuid())} and holds its "
        f"pidfile open. The process was not signalled; remove the pidfile if no node "
        f"runs there."
    )


def _signal(node: int, record: Record, number: signal.Signals) -> None:
    try:
        signal.pidfd_send_signal(node, number)
    except ProcessLookupError:
        pass  # the node has ended by itself meanwhile
    except PermissionError as error:
        raise NodeError(
            f"the node at {record.socket} (pid {record.pid}) is another user's; only "
            f"that user may stop it."
        ) from error


def _write_drain_seconds(place: Place, drain: float) -> None:
    """Write the seconds of the drain to a file, as a signal cannot carry them."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(
            os.open(place.drain_file, flags, 0o600), "w", encoding="ascii"
        ) as file:
            file.write(repr(drain))
    except OSError as error:
        raise NodeError(
            f"the node cannot be told to drain for {drain:g} s: {place.drain_file} "
            f"cannot be written: {error.strerror}. Leave --drain out, or make room "
            f"there."
        ) from error


def _clear(place: Place) -> None:
    """Remove the files of a killed node, unless another node has started there."""
    with suppress(NodeRunningError), PidfileLock.take(place):
        remove(place.socket)
        remove(place.drain_file)
