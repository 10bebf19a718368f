"""The node's slots: each a keeper, its pipes, and one worker at a time.

Slots are made on demand, reused, and forgotten when their keepers end. The index of a
slot is its place on the control page and part of the names of its pipes, so an index is
not reused while a keeper with this index may exist.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aiogpu.errors import NodeStartError
from aiogpu.linux.procfs import ExitEvidence
from aiogpu.memory.control_page import SLOTS
from aiogpu.runtime.callers.caller import Caller
from aiogpu.runtime.connection import Peer
from aiogpu.runtime.descriptors import RESERVE, soft_limit
from aiogpu.runtime.directories import NodeDirectory, no_room
from aiogpu.runtime.output import Console, Output
from aiogpu.runtime.workers.death import (
    SCARCE,
    UNKNOWN,
    Death,
    NoCapacityError,
    may_be_kernels,
)
from aiogpu.runtime.zygote.config import program_variables
from aiogpu.runtime.zygote.process import Zygote
from aiogpu.wire.messages import (
    Close,
    Define,
    Forget,
    Halted,
    Message,
    output_path,
)

if TYPE_CHECKING:
    from aiogpu.client.function_spec import Function, FunctionSpec
    from aiogpu.runtime.workers.remains import Remains


SITES_KEPT: Final = 1024
"""Most functions that a worker remembers, since programs may define new functions
forever."""


@dataclass(slots=True, eq=False)
class LiveWorker(Caller):
    """A worker process as the driver sees it.

    Attributes:
        timer: the time limit of its start, or of its end once the keeper was told to
            end it.
        environment: the variables of `runtime_env` that it was started for.
        funcs: ids of the `FunctionSpec`s that it knows.
        functions: ids of the pickled functions that it knows.
        imported: the modules that it has reported to have imported itself.
        first: the function for which it was forked; None for a spare.
        import_timer: reports that the import of a module takes long.
        status: the wait status, once the keeper has reported it.
        end: the reason and cause of the end, as far as the driver itself knows.
        is_ending: the keeper was told to end it.
        killed_at: loop time at which the keeper was told that.
        is_gone: it has ended and its messages were read; the core may not know yet.
        halted: its tasks or calls that stand at a breakpoint, by number; None if none
            ever has.
    """

    slot: Slot
    timer: asyncio.Handle
    environment: tuple[tuple[str, str], ...] = ()
    funcs: set[int] = field(default_factory=set)
    functions: set[int] = field(default_factory=set)
    imported: set[str] = field(default_factory=set)
    first: Function | None = None
    import_timer: asyncio.Handle | None = None
    status: int | None = None
    end: Death = UNKNOWN
    is_ending: bool = False
    killed_at: float = 0.0
    is_gone: bool = False
    halted: dict[int, Halted] | None = None

    def __post_init__(self) -> None:
        self.program = program_variables(self.environment)

    def blame(self, cause: str) -> None:
        """Note the cause of the end; the first cause stands."""
        if not self.end.known:
            self.end = self.end._replace(known=cause)

    def death(self, begun: int, evidence: ExitEvidence) -> Death:
        """Return the death, with the kernel's findings if the kernel may be involved.

        Args:
            begun: the number of the task or call that the worker began last.
            evidence: asks the kernel.
        """
        death = self.end._replace(
            pid=self.pid,
            status=self.status,
            last_output=tuple(text for _, text in self.slot.output.last),
            begun=begun,
        )
        if may_be_kernels(death.status, death.known):
            death = death._replace(findings=evidence.examine(self.pid))
        return death

    def introduce(self, func: FunctionSpec) -> list[Message]:
        """Return the messages that teach the worker a function, and note them."""
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
        is_timed = func.spec.run_timeout is not None
        messages.append(
            Define(func.id, function.id, name, resources, payload, retried, is_timed)
        )
        self.funcs.add(func.id)
        self.functions.add(function.id)
        return messages

    def unlearn(self, func: FunctionSpec) -> None:
        """Note that the worker may not know a function."""
        self.funcs.discard(func.id)
        self.functions.discard(func.function.id)


@dataclass(slots=True, eq=False)
class Slot:
    """One keeper with its pipes and its worker.

    Attributes:
        index: the place on the control page.
        zygote: the zygote that forks the keeper.
        output: the pipes of the workers.
        keeper: the keeper's connection, None before its `Hello` and after its end.
        keeper_pid: the keeper's process id, 0 before its `Hello`.
        worker: the current worker.
        remains: the killed processes whose end was not reported yet; None if there are
            none.
        unended: the last worker, if it was killed and counts as gone, but has
            processes that have not ended.
    """

    index: int
    zygote: Zygote
    output: Output
    keeper: Peer | None = None
    keeper_pid: int = 0
    worker: LiveWorker | None = None
    remains: Remains | None = None
    unended: LiveWorker | None = None

    @property
    def missing(self) -> int:
        """The number of connections still missing: the keeper's and the worker's."""
        has_peer = self.worker is not None and self.worker.peer is not None
        return (self.keeper is None) + (not has_peer)


_log: Final = logging.getLogger(__name__)


CHECKS: Final = 1.0
"""Least seconds between two checks of the directory. A worker that cannot connect
meanwhile is started again."""


SPARE_SLOTS: Final = 16
"""Most keepers without a worker that are kept for later workers."""


MARGIN: Final = RESERVE // 2
"""Descriptors that must be free to make another slot."""


def most_workers(slots: int) -> int:
    """Return how many of these slots may have a worker; the others are a reserve."""
    return max(1, slots - _spare(slots))


def _spare(slots: int) -> int:
    return min(SPARE_SLOTS, 1 + slots // 4)


class Slots:
    """All slots of a node, and the free slots, which have a keeper but no worker.

    Attributes:
        most: the most slots.
        most_workers: the most slots with a worker.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        console: Console,
        directory: NodeDirectory,
        most: int = SLOTS,
    ) -> None:
        self.most = most
        self.most_workers = most_workers(most)
        self._spare = _spare(most)
        self._loop = loop
        self._console = console
        self._directory = directory
        self._slots: dict[int, Slot] = {}
        self._free: list[Slot] = []
        self._next_index = 0
        self._is_short_of_room = False
        self._checked = -CHECKS
        self._free_indices: list[int] = []
        self._gone: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        """Iterate over a copy, since slots may be forgotten in the loop."""
        return iter(list(self._slots.values()))

    def get(self, index: int) -> Slot | None:
        """Return the slot with this index, None if there is none."""
        return self._slots.get(index)

    def holds(self, slot: Slot) -> bool:
        """Return True if this slot object has not been forgotten."""
        return self._slots.get(slot.index) is slot

    def is_busy(self, zygote: Zygote) -> bool:
        """Return True if a worker of this zygote is starting or has had work.

        A spare worker does not keep its zygote.
        """
        return any(
            slot.zygote is zygote
            and slot.worker is not None
            and (slot.worker.peer is None or bool(slot.worker.funcs))
            for slot in self._slots.values()
        )

    def take(self, zygote: Zygote) -> Slot:
        """Return a free slot of this zygote, or a new one.

        Raises:
            NoCapacityError: there is no room for another slot now.
            OSError: no slot can be made.
        """
        now = self._loop.time()
        if now >= self._checked + CHECKS:
            self._checked = now
            self.check_directory()
        for slot in reversed(self._free):
            if slot.zygote is zygote:
                self._free.remove(slot)
                return slot
        return self.add(zygote)

    def check_directory(self) -> bool:
        """Make the node's directory anew if it was removed; return True if it was.

        Raises:
            NoCapacityError: it cannot be made anew now.
        """
        try:
            return self._directory.check()
        except NodeStartError as error:
            raise NoCapacityError(str(error)) from error

    def add(self, zygote: Zygote) -> Slot:
        """Make a slot and ask the zygote for its keeper.

        Raises:
            NoCapacityError: there is no room for another slot now.
            OSError: its pipes cannot be made.
        """
        index = self._take_index()
        try:
            output = self._open(index)
        except OSError:
            self._free_indices.append(index)
            raise
        slot = self._slots[index] = Slot(index, zygote, output)
        zygote.request_keeper(index)
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
            f"{len(self._slots)} of {self.most} slots are taken, by workers and by "
            f"keepers that are ending"
        )

    def _open(self, index: int) -> Output:
        directory = self._directory.path
        out, err = (output_path(directory, index, stream) for stream in (1, 2))
        try:
            output = Output(self._loop, self._console, (out, err))
        except OSError as error:
            if error.errno in SCARCE:
                why = f"no pipe for another worker: {no_room(directory, error)}"
                if not self._is_short_of_room:
                    self._is_short_of_room = True
                    _log.warning("! %s; it is tried again", why)
                raise NoCapacityError(why) from error
            raise
        self._is_short_of_room = False
        if self._is_short(output.descriptor):
            output.close()
            raise NoCapacityError(
                f"no room for another worker: this process may have {soft_limit()} "
                f"open descriptors, and has {output.descriptor}. Raise the hard limit "
                f"(`ulimit -Hn`), or open fewer"
            )
        return output

    def _is_short(self, descriptor: int) -> bool:
        """Return True if too few descriptors are free for the missing connections.

        The kernel returns the lowest free number, so all numbers below are in use.
        """
        free = soft_limit() - MARGIN - descriptor - 1
        if free >= 2 * len(self._slots) + 2:
            return False
        return free < 2 + sum(slot.missing for slot in self._slots.values())

    def put_back(self, slot: Slot) -> None:
        """Keep a slot without a worker for the next worker, or close its keeper."""
        if len(self._free) < self._spare and slot.zygote.takes_work:
            self._free.append(slot)
        else:
            self._close(slot)

    def _close(self, slot: Slot) -> None:
        if slot.keeper is not None:
            slot.keeper.send(Close())

    def make_room(self) -> None:
        """Close a keeper that has no worker, to make room for another slot."""
        if self._free:
            self._close(self._free.pop(0))

    def withdraw(self, slot: Slot) -> None:
        """Remove a slot from the free slots."""
        if slot in self._free:
            self._free.remove(slot)

    def close_free(self, zygote: Zygote) -> None:
        """Close the idle keepers of a zygote that forks no more.

        If the zygote has died, no process would adopt orphans of these keepers.
        """
        idle = [slot for slot in self._free if slot.zygote is zygote]
        self._free = [slot for slot in self._free if slot.zygote is not zygote]
        for slot in idle:
            self._close(slot)

    def forget(self, slot: Slot) -> None:
        """Forget a slot; its index stays taken."""
        del self._slots[slot.index]
        self.withdraw(slot)
        slot.zygote.release(slot.index)
        if self._gone is not None and not self._slots and not self._gone.done():
            self._gone.set_result(None)

    async def gone(self, patience: float) -> None:
        """Wait until all slots are forgotten, or until none was for `patience` seconds.

        A thousand keepers need a while to end on a machine with two cores.
        """
        count = 0
        while self._slots and count != (count := len(self._slots)):
            self._gone = self._loop.create_future()
            await asyncio.wait([self._gone], timeout=patience)

    def reuse_index(self, slot: Slot) -> None:
        """Free the index of a forgotten slot, once its pipes are closed."""
        self._free_indices.append(slot.index)
