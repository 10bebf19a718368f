"""The live processes behind the core's worker ids. Makes no decisions.

A worker has started when it has sent `Hello`. It is gone when its keeper has reported
the end of the worker and all its descendants *and* its connection was read to the end,
so no answer is lost in a race between two sockets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from aiogpu.client.function_spec import Function
from aiogpu.core.model.request import Environment
from aiogpu.errors import NodeError
from aiogpu.linux.procfs import ExitEvidence, family_of
from aiogpu.runtime.connection import Peer, Recipient
from aiogpu.runtime.objects.store import Store
from aiogpu.runtime.output import Console
from aiogpu.runtime.pending_tasks import EACH
from aiogpu.runtime.slices import Slices
from aiogpu.runtime.workers import death as cause
from aiogpu.runtime.workers.commands import WorkerCommands
from aiogpu.runtime.workers.death import Death, NoCapacityError, start_failure
from aiogpu.runtime.workers.message_router import MessageRouter, WorkerEvents
from aiogpu.runtime.workers.slots import LiveWorker, Slot, Slots
from aiogpu.runtime.zygote.generations import ZygoteListener
from aiogpu.runtime.zygote.process import Zygote
from aiogpu.runtime.zygote.zygotes import Zygotes
from aiogpu.wire import messages as wire
from aiogpu.wire.connection import KEEPER, ZYGOTE

if TYPE_CHECKING:
    from aiogpu.observe.status import UnendedStatus
    from aiogpu.runtime.workers.remains import Remains

_log: Final = logging.getLogger(__name__)


SLOW_IMPORT: Final = 0.05
"""Seconds after which an import in a worker is slow: other workers should not pay for
the same module."""


LINGER: Final = 0.1
"""Seconds between the end of a worker's connection and the order to end the worker."""


START_LIMIT: Final = 60.0
"""Seconds in which a worker must connect, once it can be forked."""


END_LIMIT: Final = 2.0
"""Seconds that a keeper has to end its worker before the keeper is killed, and then the
zygote to report that. Both may have been stopped by SIGSTOP, a debugger or the freezer.
"""


CLOSE_LIMIT: Final = 3.0
"""Seconds without the end of a keeper after which a closing node kills the remaining
keepers."""


MANY: Final = 64
"""Live workers from which on their ends are spread over turns of the loop: all of them
may end in one turn, as when a program with a thousand actors leaves."""


class Pool:
    """Workers, keepers and slots of one node.

    Attributes:
        workers: live workers by id.
        slots: the slots of the workers.
        zygotes: fork the keepers.
        commands: sends commands to workers.
        autopsy: asks the kernel about deaths.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        make_zygotes: Callable[[ZygoteListener], Zygotes],
        console: Console,
        store: Store,
        slots: Slots,
        events: WorkerEvents,
        send_signal: Callable[[int, int], None] = os.kill,
    ) -> None:
        """Make an empty pool.

        Args:
            loop: runs the timers.
            make_zygotes: makes the zygotes, which report their events to this pool.
            console: shows the output of workers.
            store: keeps the values and shared memory of workers.
            slots: the slots of the workers.
            events: receives the events and messages of workers.
            send_signal: sends a signal to a process group.
        """
        self.workers = events.workers
        self.zygotes = make_zygotes(self)
        self.commands = WorkerCommands(self.workers, self.zygotes.page)
        self.autopsy = ExitEvidence()
        self._loop = loop
        self._events = events
        self._store = store
        self._router = MessageRouter(console, events, store, self._on_import)
        self._send_signal = send_signal
        self.slots = slots
        self._departures = Slices(loop)
        self._is_closing = False
        self._left: list[tuple[int, Remains]] = []
        self.is_busy: Final = self.slots.is_busy

    def __repr__(self) -> str:
        return f"<Pool {len(self.workers)} workers in {len(self.slots)} slots>"

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the live workers, and of those that are left, by worker id."""
        workers = [*self.workers.values(), *(worker for worker, _ in self._unended())]
        return {worker.id: worker.pid for worker in workers}

    @property
    def unended(self) -> dict[int, UnendedStatus]:
        """The killed processes that have not ended, by the id of their worker."""
        return {
            worker.id: remains.status(worker.id) for worker, remains in self._unended()
        }

    def _unended(self) -> Iterator[tuple[LiveWorker, Remains]]:
        for slot in self.slots:
            if slot.unended is not None and slot.remains is not None:
                yield slot.unended, slot.remains

    def on_hello(self, peer: Peer, hello: wire.Hello) -> Recipient | None:
        """Accept a connection that has sent `Hello`; None if refused."""
        if hello.role == ZYGOTE:
            return self.zygotes.on_hello(peer, hello)
        if hello.role == KEEPER:
            return self._on_new_keeper(peer, hello)
        return self._on_new_worker(peer, hello)

    # Start of workers

    def spawn(
        self,
        worker_id: int,
        environment: Environment = (),
        function: Function | None = None,
    ) -> None:
        """Fork a worker, in a free slot or a new slot.

        Args:
            worker_id: the id in the core.
            environment: the variables of `runtime_env` that its tasks will have.
            function: the function that it will run first; None for a spare.
        """
        try:
            slot = self.slots.take(self.zygotes.choose(environment, function))
        except (NodeError, OSError) as error:
            self._report_start_failure(worker_id, error)
            return
        timer = self._time_start(worker_id, START_LIMIT)
        worker = LiveWorker(
            worker_id, slot, timer, environment, first=function, store=self._store
        )
        slot.worker = self.workers[worker_id] = worker
        # The page may still describe the slot's previous worker.
        self.zygotes.page.note_import(slot.index, "")
        slot.output.begin()
        if slot.keeper is not None:
            slot.keeper.send(wire.Fork(worker_id))

    def give_up(self, worker_id: int, error: Exception) -> None:
        """Treat a worker as not started after aiogpu has failed to request it."""
        worker = self.workers.get(worker_id)
        if worker is None:
            self._report_start_failure(worker_id, error)
        else:
            worker.end = Death(reason=str(error), known=cause.NOT_STARTED)
            self._loop.call_soon(self._check_gone, worker, True)

    def _report_start_failure(self, worker_id: int, error: Exception) -> None:
        # Not at once: the core handles one event at a time.
        self._loop.call_soon(self._events.on_gone, worker_id, start_failure(error))

    def _time_start(self, worker_id: int, seconds: float) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, self._on_late_start, worker_id)

    def _on_late_start(self, worker_id: int) -> None:
        worker = self.workers[worker_id]
        began, remaining = worker.slot.zygote.ready_at, START_LIMIT
        if began is not None:
            remaining = began + START_LIMIT - self._loop.time()
        if remaining > 0:
            # The zygote is importing, or was until recently. Imports have their own
            # limit.
            worker.timer = self._time_start(worker_id, remaining)
            return
        reason = f"it did not connect within {START_LIMIT:g} s"
        worker.end = worker.end._replace(reason=reason)
        if worker.slot.keeper is not None:
            self._end(worker, cause.NOT_STARTED)
        else:
            worker.blame(cause.NOT_STARTED)
            self._check_gone(worker, is_certain=True)

    def importing(self, worker_id: int) -> str:
        """Return the module that a worker is importing, "" for none."""
        worker = self.workers.get(worker_id)
        return "" if worker is None else self.zygotes.page.importing(worker.slot.index)

    def _on_new_worker(self, peer: Peer, hello: wire.Hello) -> Recipient | None:
        worker = self.workers.get(hello.id)
        if worker is None or worker.peer is not None or worker.status is not None:
            peer.abort()
            return None
        worker.peer = peer
        worker.pid = hello.pid
        if not worker.is_ending:
            worker.timer.cancel()
        worker.slot.output.name(worker.id, worker.pid)
        worker.slot.output.listen_to(peer)
        self._events.on_started(worker.id)
        route = partial(self._router.route, worker)
        return Recipient(route, partial(self._on_worker_lost, worker))

    # End of workers

    def retire(self, worker_id: int) -> None:
        """Tell a worker to end in an orderly way."""
        worker = self.workers[worker_id]
        if worker.peer is not None:
            worker.peer.send(wire.Exit())

    def kill(self, worker_id: int) -> None:
        """End a worker and all its descendants at once."""
        worker = self.workers[worker_id]
        if worker.slot.keeper is None and not worker.pid:
            # The worker was not forked yet.
            self._loop.call_soon(self._check_gone, worker, True)
        self._end(worker, cause.ENDED)

    def end_for_fault(self, worker_id: int, reason: str) -> None:
        """Kill a worker because aiogpu itself has failed."""
        self.workers[worker_id].end = Death(reason=reason, known=cause.INTERNAL)
        self.kill(worker_id)

    def _end(self, worker: LiveWorker, why: str) -> None:
        if worker.slot.keeper is not None and worker.status is None:
            worker.blame(why)
            worker.slot.keeper.send(wire.End(worker.id))
            if not worker.is_ending:
                worker.killed_at = self._loop.time()
                self._time_end(worker, self._end_keeper)

    def _time_end(
        self, worker: LiveWorker, then: Callable[[LiveWorker, Slot], None]
    ) -> None:
        worker.is_ending = True
        worker.timer.cancel()
        worker.timer = self._loop.call_later(END_LIMIT, then, worker, worker.slot)

    def _end_keeper(self, worker: LiveWorker, slot: Slot) -> None:
        """Kill a keeper that has not ended its worker in time.

        The kernel kills the worker with the keeper; the zygote ends and reports the
        rest.
        """
        if worker.slot is not slot or worker.status is not None:
            return
        # Before the kill, after which the zygote adopts them.
        slot.remains = self._remains_of(slot)
        if slot.keeper is not None:
            _log.warning(
                "! keeper process %d has not ended worker %d (process %d) within "
                "%g s; both are killed",
                slot.keeper_pid,
                worker.id,
                worker.pid,
                END_LIMIT,
            )
            slot.keeper.kill()
        self._time_end(worker, self._end_slot)

    def _end_slot(self, worker: LiveWorker, slot: Slot) -> None:
        """End a slot whose zygote has not reported the end of the keeper."""
        if worker.slot is slot:
            self._end_orphans(slot, is_reused=False)

    def _on_worker_lost(self, worker: LiveWorker) -> None:
        worker.peer = worker.slot.output.peer = None
        self._check_gone(worker)
        if not worker.is_gone:
            # The worker may have closed its descriptors and live on. Or it is about to
            # end, which should not be disturbed.
            self._loop.call_later(LINGER, self._end, worker, cause.DISCONNECTED)

    def _check_gone(self, worker: LiveWorker, is_certain: bool = False) -> None:
        if worker.is_gone:
            return
        if not is_certain and (worker.status is None or worker.peer is not None):
            return
        if is_certain or len(self.workers) < MANY:
            self._leave(worker)
        else:
            self._departures.add(map(self._leave, (worker,)))

    def _leave(self, worker: LiveWorker) -> None:
        if worker.is_gone:
            return  # its keeper has died since
        try:
            self._take_leave(worker)
        except BaseException as error:
            self._events.on_cut_short(error)
            raise

    def _take_leave(self, worker: LiveWorker) -> None:
        """Remove an ended worker, and report its death."""
        worker.is_gone = True
        if worker.import_timer is not None:
            worker.import_timer.cancel()
        slot = worker.slot
        worker.timer.cancel()
        slot.output.catch_up()
        slot.output.end_progress()
        slot.worker = None
        if slot.keeper is not None and slot.remains is None:
            self.slots.put_back(slot)
        death = worker.death(self.zygotes.page.begun(slot.index), self.autopsy)
        module = self.zygotes.page.importing(slot.index)
        if module and not death.reason:
            death = death._replace(reason=f"it was importing the module {module}")
        self._router.delay(worker, EACH)
        del self.workers[worker.id]
        if worker.status:
            # Nothing receives the answers to its calls of actors. (A process that ends
            # in order may have sent calls without waiting for them.)
            for number in list(worker.actor_calls):
                self._events.requests.withdraw_call(worker, number)
        is_left = slot.unended is worker
        if not is_left:
            worker.return_loans()
        if death.known == cause.CROWDED:
            self.slots.make_room()
        self._events.on_gone(worker.id, death, is_left)

    # Keepers, and slots that end with their keepers

    def _on_new_keeper(self, peer: Peer, hello: wire.Hello) -> Recipient | None:
        slot = self.slots.get(hello.id)
        if slot is None or slot.keeper is not None or self._is_closing:
            peer.abort()
            return None
        slot.keeper, slot.keeper_pid = peer, hello.pid
        slot.output.unlink()
        if slot.worker is not None:
            peer.send(wire.Fork(slot.worker.id))
        else:
            self.slots.put_back(slot)
        handle = partial(self._on_keeper_messages, slot)
        return Recipient(handle, partial(self._on_keeper_lost, slot))

    def _on_keeper_messages(self, slot: Slot, messages: list[wire.Message]) -> None:
        for message in messages:
            worker = slot.worker
            if worker is None:
                continue
            match message:
                case wire.Forked(worker_id, pid) if worker.id == worker_id:
                    worker.pid = pid
                    slot.output.name(worker_id, pid)
                case wire.Unforked(worker_id, reason) if worker.id == worker_id:
                    worker.end = Death(reason=reason, known=cause.CROWDED)
                    self._check_gone(worker, is_certain=True)
                case wire.Ended(worker_id, status) if worker.id == worker_id:
                    worker.status = status
                    if worker.peer is not None:
                        # A paused connection would not show its end.
                        worker.peer.resume()
                    else:
                        self._explain_early_end(worker)
                    self._check_gone(worker)

    def _explain_early_end(self, worker: LiveWorker) -> None:
        """Let a worker start again that could not connect to a removed socket."""
        try:
            was_removed = self.slots.check_directory()
        except NoCapacityError as error:
            worker.end = Death(reason=str(error), known=cause.CROWDED)
            return
        if was_removed:
            reason = "the node's directory was removed while it started"
            worker.end = Death(reason=reason, known=cause.CROWDED)

    def _on_keeper_lost(self, slot: Slot) -> None:
        slot.keeper = None
        self.slots.withdraw(slot)
        if self._is_closing:
            self._remove_slot(slot)
        elif slot.zygote.is_over and self.slots.holds(slot):
            self._end_orphans(slot)
        elif slot.worker is not None:
            self._time_end(slot.worker, self._end_slot)

    def _end_orphans(self, slot: Slot, is_reused: bool = True) -> None:
        """End the processes that a keeper has left, after the end of its zygote.

        No other process adopts or reports them, also if the zygote is only stopped.
        Without a cgroup, only the worker's process group can be reached. The slot is
        forgotten when the processes have ended, however long that takes.
        """
        remains = slot.remains = slot.remains or self._remains_of(slot)
        if remains.is_watched:
            return
        if slot.worker is not None and slot.worker.pid:
            with suppress(ProcessLookupError):
                self._send_signal(-slot.worker.pid, signal.SIGKILL)
        on_gone = partial(self._forget_slot, slot, is_reused)
        remains.watch(partial(self._on_unended, slot), on_gone)

    def _remains_of(self, slot: Slot) -> Remains:
        # Imported late: most nodes have no such processes.
        from aiogpu.runtime.workers.remains import Remains

        pids = family_of(slot.keeper_pid) if slot.keeper is not None else []
        since = self._loop.time()
        if slot.worker is not None and slot.worker.pid:
            pids.append(slot.worker.pid)
            since = slot.worker.killed_at or since
        group, zygote = self.zygotes.cgroup.of_slot(slot.index), slot.zygote
        return Remains(self._loop, pids, group, lambda: zygote.can_report, since)

    def _on_unended(self, slot: Slot) -> None:
        """Let a worker count as gone whose processes do not end.

        Its code never runs again after SIGKILL, so its tasks can fail or be retried.
        It keeps what it holds until its processes have ended (`_forget_slot`).
        """
        worker, remains = slot.worker, slot.remains
        if worker is None or remains is None:
            return
        left = remains.status(worker.id)
        _log.warning("! worker %d keeps what it holds: %s", worker.id, left)
        slot.unended = worker
        worker.status = int(signal.SIGKILL)
        worker.blame(cause.KEEPER_DIED)
        worker.end = worker.end._replace(reason=worker.end.reason or str(left))
        if worker.peer is not None:
            worker.peer.cut_off()
        self._check_gone(worker, is_certain=True)

    def on_lost_slot(self, index: int, unforked: str = "") -> None:
        """Forget a slot whose keeper has died, was closed or could not be forked.

        All descendants of the keeper have ended. `unforked` says why the fork failed.
        """
        slot = self.slots.get(index)
        if slot is not None:
            if unforked and slot.worker is not None:
                slot.worker.end = Death(reason=unforked, known=cause.CROWDED)
            elif slot.worker is not None and slot.worker.peer is None:
                self._explain_early_end(slot.worker)
            self._forget_slot(slot)

    def _forget_slot(self, slot: Slot, is_reused: bool = True) -> None:
        # The keeper's connection may not have been read to the end yet.
        slot.keeper = None
        if not self.slots.holds(slot):
            return
        # Before `_check_gone`, which would put the slot back.
        self.slots.forget(slot)
        if slot.remains is not None:
            slot.remains.close()
        worker = slot.worker
        if worker is not None:
            if worker.pid:
                worker.status = int(signal.SIGKILL)
                worker.blame(cause.KEEPER_DIED)
            elif not worker.end.reason:
                problem = slot.zygote.problem
                worker.end = (
                    Death(reason="the keeper process of its slot died")
                    if problem is None
                    else start_failure(problem)
                )
            if worker.peer is not None:
                worker.peer.cut_off()
            self._check_gone(worker, is_certain=True)
        slot.output.close()
        if slot.unended is not None:
            self._on_ended(slot.unended)
        if is_reused:
            # Last, because the pipes of the next slot will have the same names.
            self.slots.reuse_index(slot)

    def _on_ended(self, worker: LiveWorker) -> None:
        """Release what a worker has held whose processes have ended at last."""
        _log.warning(
            "! process %d of worker %d has ended at last; its share is released",
            worker.pid,
            worker.id,
        )
        worker.return_loans()
        self._events.on_ended(worker.id, worker.pid)

    def _remove_slot(self, slot: Slot) -> None:
        """Forget a slot while the node closes."""
        if self.slots.holds(slot):
            if slot.remains is not None:
                slot.remains.close()
                self._left.append((slot.index, slot.remains))
            self.slots.forget(slot)
            slot.output.close()

    # Zygotes

    @property
    def awaited_imports(self) -> dict[int, str]:
        """What is imported before each worker that waits for a zygote, by worker."""
        return {
            slot.worker.id: text
            for slot in self.slots
            if slot.worker is not None and not slot.zygote.has_asked(slot.index)
            if (text := self.zygotes.describe_imports(slot.zygote))
        }

    def _on_import(
        self, worker: LiveWorker, message: wire.Importing | wire.Imported
    ) -> None:
        if worker.import_timer is not None:
            worker.import_timer.cancel()
            worker.import_timer = None
        zygote = worker.slot.zygote
        if isinstance(message, wire.Imported):
            worker.imported.update(message.names)
            self.zygotes.note_imports(zygote, message)
        elif message.module:
            # Only if all its tasks were of one function is it known which needs it.
            is_known = worker.first is not None and len(worker.functions) == 1
            function = worker.first.name if is_known and worker.first else ""
            worker.import_timer = self._loop.call_later(
                SLOW_IMPORT, self._on_slow_import, zygote, message.module, function
            )

    def _on_slow_import(self, zygote: Zygote, module: str, function: str) -> None:
        self.zygotes.note_slow_import(zygote, module, function)
        self._events.on_slow_import()

    def is_outdone(self, worker: LiveWorker, function: Function) -> bool:
        """Return True if a new worker need not import what a worker must import."""
        if function.id in worker.functions:
            return False
        return self.zygotes.have_more(worker.slot.zygote, worker.imported, function)

    def on_better_zygote(self, zygote: Zygote) -> None:
        """Choose again for the workers that a zygote was not yet asked to fork."""
        for slot in self.slots:
            if slot.zygote is zygote and slot.worker is not None:
                self._choose_again(slot, slot.worker)

    def unclaim(self, worker_id: int) -> None:
        """Note that a worker will not run the function for which it was requested."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            worker.first = None
            self._choose_again(worker.slot, worker)

    def _choose_again(self, slot: Slot, worker: LiveWorker) -> None:
        zygote = slot.zygote
        if zygote.has_asked(slot.index):
            return
        better = self.zygotes.choose(worker.environment, worker.first)
        if better is not zygote:
            slot.zygote = better
            zygote.release(slot.index)
            better.request_keeper(slot.index)

    def on_superseded(self, zygote: Zygote) -> None:
        """Replace spare workers and idle keepers of a zygote that forks no more.

        Running workers go on.
        """
        self.slots.close_free(zygote)
        workers = [slot.worker for slot in self.slots if slot.zygote is zygote]
        for environment in {worker.environment for worker in workers if worker}:
            self._events.on_outdated(environment)

    def on_zygote_death(self, zygote: Zygote) -> None:
        """Move workers whose keepers may never be forked to other slots."""
        self.slots.close_free(zygote)
        for slot in self.slots:
            if slot.zygote is not zygote or slot.keeper is not None:
                continue
            worker = slot.worker
            if worker is not None and not worker.pid and zygote.problem is None:
                self._move(worker)
            self._end_orphans(slot, is_reused=False)

    def _move(self, worker: LiveWorker) -> None:
        try:
            zygote = self.zygotes.choose(worker.environment, worker.first)
            slot = self.slots.add(zygote)
        except (NodeError, OSError) as error:
            worker.end = start_failure(error)
            self._check_gone(worker, is_certain=True)
        else:
            worker.slot.worker = None
            worker.slot, slot.worker = slot, worker
            worker.timer.cancel()
            worker.timer = self._time_start(worker.id, START_LIMIT)
            worker.is_ending = False

    async def close(self) -> None:
        """End all keepers with all their descendants, and wait."""
        self._is_closing = True
        self._store.serve({}, None, None)
        for worker in self.workers.values():
            worker.timer.cancel()
        for slot in self.slots:
            if slot.keeper is not None:
                slot.keeper.send(wire.Close())
            else:
                self._remove_slot(slot)
        await self.slots.gone(CLOSE_LIMIT)
        for slot in self.slots:
            # The keeper does not react. Its worker dies with it, and the zygote ends
            # the rest.
            if slot.keeper is not None:
                slot.remains = self._remains_of(slot)
                slot.keeper.kill()
        await self.slots.gone(CLOSE_LIMIT)

    def report_left(self) -> None:
        """Log the processes that the closed node could not end."""
        left = [*self._left, *((slot.index, slot.remains) for slot in self.slots)]
        for index, remains in left:
            if remains is not None and not remains.is_over:
                status = remains.status(index)
                if status.pids:
                    _log.error(
                        "! the node has closed, but could not end what it started: "
                        "%s. Its devices and its memory are in use until then",
                        status,
                    )
