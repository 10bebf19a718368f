"""The node's slots: a keeper, its pipes, and the one worker that it keeps at a time.

Slots are made when they are wanted, reused, and forgotten with their keepers. A slot's
index is its place on the control page and in the names of its pipes, so one that may
still have a keeper is not given to another.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aiogpu.linux.procfs import ExitEvidence, Findings
from aiogpu.memory.control_page import SLOTS
from aiogpu.runtime.callers.caller import Caller
from aiogpu.runtime.connection import Peer
from aiogpu.runtime.descriptors import RESERVE, soft_limit
from aiogpu.runtime.output.console import Console
from aiogpu.runtime.output.pipes import Output
from aiogpu.runtime.workers.death import (
    SCARCE,
    Death,
    NoCapacityError,
    is_kernels,
    stillbirth,
)
from aiogpu.runtime.zygote.launch import program_of
from aiogpu.runtime.zygote.process import Zygote
from aiogpu.wire.messages import Close, Define, Forget, Message, output_path

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec


SITES_KEPT: Final = 1024
"""Sites that a worker remembers; a program that makes ever new ones is bounded."""


@dataclass(slots=True, eq=False)
class LiveWorker(Caller):
    """A worker process, as far as the driver can see it.

    Attributes:
        start_timer: rings if it has not connected in time.
        end_timer: rings if it was to be ended and has not ended in time.
        environment: variables of `runtime_env` for which it is wanted.
        funcs: ids of the functions that it knows.
        functions: ids of the functions that it knows.
        status: its wait status, once its keeper has said so.
        is_gone: all of it has ended; the core may not have been told yet.
        reason: what else is known of its end.
        cause: why it ended, where that is known from the start.
    """

    slot: Slot
    start_timer: asyncio.Handle
    environment: tuple[tuple[str, str], ...] = ()
    funcs: set[int] = field(default_factory=set)
    functions: set[int] = field(default_factory=set)
    end_timer: asyncio.TimerHandle | None = None
    status: int | None = None
    reason: str = ""
    cause: str = ""
    is_gone: bool = False

    def __post_init__(self) -> None:
        self.program = program_of(self.environment)

    def cancel_timers(self) -> None:
        """Neither its start nor its end is waited for any more."""
        self.start_timer.cancel()
        if self.end_timer is not None:
            self.end_timer.cancel()

    def fail(self, error: Exception) -> None:
        """Note why it cannot be started."""
        told = stillbirth(error)
        self.reason, self.cause = told.reason, told.known

    def death(self, begun: int, autopsy: ExitEvidence) -> Death:
        """How it ended, with what the kernel has to say where it may have had a hand.

        Args:
            begun: number of the task that it had begun last.
            autopsy: asks the kernel.
        """
        findings = Findings()
        if is_kernels(self.status, self.cause):
            findings = autopsy.examine(self.pid)
        return Death(
            self.pid,
            self.status,
            tuple(text for _, text in self.slot.output.last),
            self.reason,
            begun,
            self.cause,
            findings,
        )

    def introduce(self, func: FunctionSpec) -> list[Message]:
        """What a worker must hear before it can run a function; noted as heard."""
        messages: list[Message] = []
        if func.id in self.funcs:
            return messages
        if len(self.funcs) >= SITES_KEPT:
            messages.append(Forget())
            self.funcs.clear()
            self.functions.clear()
        function = func.function
        payload = b"" if function.id in self.functions else function.payload
        resources = dict(func.resources)
        name, retried = func.spec.name, func.retried
        messages.append(Define(func.id, function.id, name, resources, payload, retried))
        self.funcs.add(func.id)
        self.functions.add(function.id)
        return messages

    def unlearn(self, func: FunctionSpec) -> None:
        """The worker may not have heard of a function: introduce it again."""
        self.funcs.discard(func.id)
        self.functions.discard(func.function.id)


@dataclass(slots=True, eq=False)
class Slot:
    """One keeper and what belongs to it.

    Attributes:
        index: its place on the control page.
        zygote: the one that forks its keeper.
        keeper: its connection, None before the keeper has greeted and after.
        keeper_pid: its process id, 0 before it has greeted.
        worker: the worker that it keeps now.
    """

    index: int
    zygote: Zygote
    output: Output
    keeper: Peer | None = None
    keeper_pid: int = 0
    worker: LiveWorker | None = None

    @property
    def missing(self) -> int:
        """How many connections of it are still to come: its keeper's, its worker's."""
        has_peer = self.worker is not None and self.worker.peer is not None
        return (self.keeper is None) + (not has_peer)


_log: Final = logging.getLogger(__name__)


SPARE_SLOTS: Final = 16
"""Keepers without a worker that are kept for the next one."""


MARGIN: Final = RESERVE // 2
"""Descriptors that are left over when no other slot is made."""


def most_workers(slots: int) -> int:
    """How many of so many slots may have a worker; the others wait for one, or end."""
    return max(1, slots - _spare(slots))


def _spare(slots: int) -> int:
    return min(SPARE_SLOTS, 1 + slots // 4)


class Slots:
    """All slots, and which of them have a keeper but no worker.

    Attributes:
        most: how many there may be.
        most_workers: how many of them may have a worker.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        console: Console,
        directory: str,
    ) -> None:
        self.bound(SLOTS)
        self._loop = loop
        self._console = console
        self._directory = directory
        self._slots: dict[int, Slot] = {}
        self._free: list[Slot] = []
        self._next_index = 0
        self._is_removal_logged = False
        self._free_indices: list[int] = []
        self._gone: asyncio.Future[None] | None = None

    def bound(self, most: int) -> None:
        """Say how many slots there may be."""
        self.most = most
        self.most_workers = most_workers(most)
        self._spare = _spare(most)

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        """Over all slots as they are now; they may be forgotten meanwhile."""
        return iter(list(self._slots.values()))

    def get(self, index: int) -> Slot | None:
        """The slot of that index, None without one."""
        return self._slots.get(index)

    def holds(self, slot: Slot) -> bool:
        """Return whether this very slot has not been forgotten."""
        return self._slots.get(slot.index) is slot

    def is_busy(self, zygote: Zygote) -> bool:
        """Return whether a worker starts, or has had work, in a slot of this zygote.

        One that stands ready as a spare does not keep its zygote.
        """
        return any(
            slot.zygote is zygote
            and slot.worker is not None
            and (slot.worker.peer is None or bool(slot.worker.funcs))
            for slot in self._slots.values()
        )

    def take(self, zygote: Zygote) -> Slot:
        """A free slot of this zygote, or a new one.

        Raises:
            NoCapacityError: there is no room for another one now.
            OSError: none can be made.
        """
        if not os.path.exists(self._directory):
            # What is forked now could not connect.
            removed = _removed(self._directory)
            if not self._is_removal_logged:
                self._is_removal_logged = True
                _log.error("! %s", removed)
            raise NoCapacityError(removed)
        for slot in reversed(self._free):
            if slot.zygote is zygote:
                self._free.remove(slot)
                return slot
        return self.add(zygote)

    def add(self, zygote: Zygote) -> Slot:
        """Make a slot and ask the zygote for its keeper.

        Raises:
            NoCapacityError: there is no room for another one now.
            OSError: its pipes cannot be made.
        """
        index = self._take_index()
        try:
            output = self._open(index)
        except OSError:
            self._free_indices.append(index)
            raise
        slot = self._slots[index] = Slot(index, zygote, output)
        zygote.keep(index)
        return slot

    def _take_index(self) -> int:
        if len(self._slots) < self.most:
            if self._free_indices:
                return self._free_indices.pop()
            if self._next_index < SLOTS:
                self._next_index += 1
                return self._next_index - 1
        self.make_room()
        raise NoCapacityError(
            f"{len(self._slots)} slots of {self.most} are taken, by workers and "
            f"keepers that have ended or will"
        )

    def _open(self, index: int) -> Output:
        out, err = (output_path(self._directory, index, stream) for stream in (1, 2))
        try:
            output = Output(self._loop, self._console, (out, err))
        except OSError as error:
            if error.errno in SCARCE:
                raise NoCapacityError(_no_pipe(self._directory, error)) from error
            raise
        if self._is_short(output.descriptor):
            output.close()
            raise NoCapacityError(
                f"no room for another worker: {soft_limit()} descriptors may be open "
                f"in this process, and {output.descriptor} are. Raise the hard limit "
                f"(`ulimit -Hn`), or open fewer"
            )
        return output

    def _is_short(self, descriptor: int) -> bool:
        """Return whether too few are left for the connections that are to come.

        The kernel gives the lowest number that is free, so all below are in use.
        """
        left = soft_limit() - MARGIN - descriptor - 1
        if left >= 2 * len(self._slots) + 2:
            return False
        return left < 2 + sum(slot.missing for slot in self._slots.values())

    def put_back(self, slot: Slot) -> None:
        """Keep a slot whose worker has ended for the next one, or close its keeper."""
        if len(self._free) < self._spare and slot.zygote.takes_work:
            self._free.append(slot)
        else:
            self._close(slot)

    def _close(self, slot: Slot) -> None:
        if slot.keeper is not None:
            slot.keeper.send(Close())

    def make_room(self) -> None:
        """Close a keeper that has no worker, since there is no room for others."""
        if self._free:
            self._close(self._free.pop(0))

    def withdraw(self, slot: Slot) -> None:
        """Give this slot to no worker any more."""
        if slot in self._free:
            self._free.remove(slot)

    def close_free(self, zygote: Zygote) -> None:
        """Close the keepers of this zygote that have no worker.

        It serves no more. If it has died, nobody would adopt what they leave.
        """
        idle = [slot for slot in self._free if slot.zygote is zygote]
        self._free = [slot for slot in self._free if slot.zygote is not zygote]
        for slot in idle:
            self._close(slot)

    def forget(self, slot: Slot) -> None:
        """Remove a slot from all books; its index stays taken."""
        del self._slots[slot.index]
        self.withdraw(slot)
        slot.zygote.release(slot.index)
        if self._gone is not None and not self._slots and not self._gone.done():
            self._gone.set_result(None)

    async def gone(self, patience: float) -> None:
        """Wait until all slots are forgotten, or for so many seconds none was.

        A thousand keepers take their time, on a machine of two cores.
        """
        left = 0
        while self._slots and left != (left := len(self._slots)):
            self._gone = self._loop.create_future()
            await asyncio.wait([self._gone], timeout=patience)

    def reuse_index(self, slot: Slot) -> None:
        """A forgotten slot's pipes are closed: another may have its index."""
        self._free_indices.append(slot.index)


def _no_pipe(directory: str, error: OSError) -> str:
    """Return what is told where the pipes of another worker cannot be made."""
    if error.errno == errno.ENOENT:
        return _removed(directory)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no pipe for another worker: {directory}: {error.strerror}; free space or "
            f"inodes there (`df -i`), or set TMPDIR to a directory with room"
        )
    return f"no pipe for another worker: {error}"


def _removed(directory: str) -> str:
    return (
        f"the node's directory {directory} was removed while the node ran, and no "
        f"new worker can connect; close the node and open it again"
    )
