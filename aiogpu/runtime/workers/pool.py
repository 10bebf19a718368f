"""The live processes behind the core's worker ids. Carries out, decides nothing.

A worker has started when it has greeted, and is gone when its keeper has said that
it and all its descendants have ended *and* its connection has been read to its end:
so no answer is lost to a race between two sockets.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from aiogpu.core.model.request import Environment
from aiogpu.errors import NodeError
from aiogpu.linux.procfs import ExitEvidence
from aiogpu.runtime.connection import Peer
from aiogpu.runtime.objects.store import Store
from aiogpu.runtime.output.console import Console
from aiogpu.runtime.pending_tasks import EACH
from aiogpu.runtime.workers import death as cause
from aiogpu.runtime.workers.commands import WorkerCommands
from aiogpu.runtime.workers.death import Death, stillbirth
from aiogpu.runtime.workers.message_router import MessageRouter, WorkerEvents
from aiogpu.runtime.workers.slots import LiveWorker, Slot, Slots
from aiogpu.runtime.zygote.generations import Zygotes
from aiogpu.runtime.zygote.process import Zygote
from aiogpu.wire import messages as wire
from aiogpu.wire.connection import KEEPER, ZYGOTE

_log: Final = logging.getLogger(__name__)


LINGER: Final = 0.1
"""Seconds between the end of a worker's connection and that of the worker itself."""


START_LIMIT: Final = 60.0
"""Seconds from the moment when a worker can be forked until it must have connected."""


END_LIMIT: Final = 2.0
"""Seconds that a keeper gets to end its worker before the keeper itself is killed, and
after that the zygote to report it. Either may be stopped: by SIGSTOP, a debugger or the
freezer."""


CLOSE_LIMIT: Final = 3.0
"""Seconds in which none of the keepers ends until those that are left are killed."""


class Pool:
    """Workers, keepers and slots of one node.

    Attributes:
        workers: live workers by id.
        slots: where they run.
        commands: tells workers what to do.
        autopsy: finds out what the kernel knows of a death.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        zygotes: Zygotes,
        console: Console,
        directory: str,
        send_signal: Callable[[int, int], None] = os.kill,
    ) -> None:
        self.workers: dict[int, LiveWorker] = {}
        self._events: WorkerEvents
        self._router: MessageRouter
        self.commands = WorkerCommands(self.workers, zygotes.page)
        self.autopsy = ExitEvidence()
        self._loop = loop
        self._zygotes = zygotes
        self._console = console
        self._send_signal = send_signal
        self.slots = Slots(loop, console, directory)
        self._is_closing = False
        self._store: Store | None = None
        self.is_busy: Final = self.slots.is_busy

    def __repr__(self) -> str:
        return f"<Pool {len(self.workers)} workers in {len(self.slots)} slots>"

    def begin(self, events: WorkerEvents, store: Store) -> None:
        """From here on workers can be spawned.

        Args:
            events: told of what becomes of them, and what they say.
            store: keeps their values and shared memory.
        """
        self._events, self._store = events, store
        self._router = MessageRouter(self._console, events, store, self._on_imported)
        store.serve(self.workers, self._zygotes.page, events.actors)

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the live workers."""
        return {worker.id: worker.pid for worker in self.workers.values()}

    def greeted(self, peer: Peer, hello: wire.Hello) -> None:
        """Route a connection that has said what it is."""
        if hello.role == ZYGOTE:
            self._zygotes.greeted(peer, hello)
        elif hello.role == KEEPER:
            self._on_new_keeper(peer, hello)
        else:
            self._on_worker(peer, hello)

    def spawn(self, worker_id: int, environment: Environment = ()) -> None:
        """Have a worker forked, in a free slot or a new one.

        Args:
            worker_id: how the core calls it.
            environment: variables of `runtime_env` that its tasks will have.
        """
        try:
            slot = self.slots.take(self._zygotes.serving(environment))
        except (NodeError, OSError) as error:
            # Later, not now: the core is told of events one at a time.
            self._loop.call_soon(self._events.on_gone, worker_id, stillbirth(error))
            return
        timer = self._time_start(worker_id, START_LIMIT)
        worker = LiveWorker(worker_id, slot, timer, environment, store=self._store)
        slot.worker = self.workers[worker_id] = worker
        slot.output.last.clear()
        slot.output.number = 0  # what the worker before has printed concerns others
        if slot.keeper is not None:
            slot.keeper.send(wire.Fork(worker_id))

    def _time_start(self, worker_id: int, seconds: float) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, self._on_late_start, worker_id)

    def _on_late_start(self, worker_id: int) -> None:
        worker = self.workers[worker_id]
        began, left = worker.slot.zygote.ready_at, START_LIMIT
        if began is not None:
            left = began + START_LIMIT - self._loop.time()
        if left > 0:
            # Its zygote imports, which has a limit of its own, or did so until lately.
            worker.start_timer = self._time_start(worker_id, left)
            return
        worker.reason = f"it did not connect within {START_LIMIT:g} s"
        if worker.slot.keeper is not None:
            self._end(worker, cause.NOT_STARTED)
        else:
            worker.cause = cause.NOT_STARTED
            self._check_gone(worker, is_certain=True)

    def give_up(self, worker_id: int, error: Exception) -> None:
        """A worker could not be asked for: it counts as one that never started."""
        worker = self.workers.get(worker_id)
        if worker is None:
            self._loop.call_soon(self._events.on_gone, worker_id, stillbirth(error))
        else:
            worker.reason, worker.cause = str(error), cause.NOT_STARTED
            self._loop.call_soon(self._check_gone, worker, True)

    def retire(self, worker_id: int) -> None:
        """Tell a worker to end in an orderly way."""
        worker = self.workers[worker_id]
        if worker.peer is not None:
            worker.peer.send(wire.Exit())

    def kill(self, worker_id: int) -> None:
        """End a worker and all that it has started, at once."""
        worker = self.workers[worker_id]
        if worker.slot.keeper is None and not worker.pid:
            # Nobody has been asked to fork it yet.
            self._loop.call_soon(self._check_gone, worker, True)
        self._end(worker, cause.ENDED)

    def end_for_fault(self, worker_id: int, reason: str) -> None:
        """The same, since aiogpu itself has failed, and in which way."""
        worker = self.workers[worker_id]
        worker.cause, worker.reason = cause.INTERNAL, reason
        self.kill(worker_id)

    def _end(self, worker: LiveWorker, why: str) -> None:
        if worker.slot.keeper is not None and worker.status is None:
            worker.cause = worker.cause or why
            worker.slot.keeper.send(wire.End(worker.id))
            if worker.end_timer is None:
                self._time_end(worker, self._end_keeper)

    def _time_end(
        self, worker: LiveWorker, then: Callable[[LiveWorker, Slot], None]
    ) -> None:
        if worker.end_timer is not None:
            worker.end_timer.cancel()
        worker.end_timer = self._loop.call_later(END_LIMIT, then, worker, worker.slot)

    def _end_keeper(self, worker: LiveWorker, slot: Slot) -> None:
        """Kill a keeper that has not ended its worker in time.

        The kernel kills the worker with it, and the zygote ends and reports the rest.
        """
        if worker.slot is not slot or worker.status is not None:
            return
        if slot.keeper is not None:
            _log.warning(
                "! keeper process %d has not ended worker %d (process %d) within "
                "%g s; it is killed, with the worker",
                *(slot.keeper_pid, worker.id, worker.pid, END_LIMIT),
            )
            slot.keeper.kill()
        self._time_end(worker, self._end_slot)

    def _end_slot(self, worker: LiveWorker, slot: Slot) -> None:
        """End what is left of a slot whose keeper was killed; the zygote has not."""
        if worker.slot is slot:
            self._end_orphans(slot, is_reused=False)

    def _on_new_keeper(self, peer: Peer, hello: wire.Hello) -> None:
        slot = self.slots.get(hello.id)
        if slot is None or slot.keeper is not None or self._is_closing:
            peer.abort()
            return
        slot.keeper, slot.keeper_pid = peer, hello.pid
        slot.output.unlink()
        peer.on_messages = partial(self._on_keeper, slot)
        peer.on_lost = partial(self._on_keeper_lost, slot)
        if slot.worker is not None:
            peer.send(wire.Fork(slot.worker.id))
        else:
            self.slots.put_back(slot)

    def _on_keeper(self, slot: Slot, messages: list[wire.Message]) -> None:
        for message in messages:
            worker = slot.worker
            match message:
                case wire.Forked(worker_id, pid) if worker and worker.id == worker_id:
                    worker.pid = pid
                    slot.output.name(worker_id, pid)
                case wire.Unforked(worker_id, reason) if (
                    worker and worker.id == worker_id
                ):
                    worker.reason, worker.cause = reason, cause.CROWDED
                    self._check_gone(worker, is_certain=True)
                case wire.Ended(worker_id, status) if worker and worker.id == worker_id:
                    worker.status = status
                    if worker.peer is not None:
                        # A paused connection would not show its end.
                        worker.peer.resume()
                    self._check_gone(worker)

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
        """End what a slot's keeper has left, whose zygote has died or is stopped.

        Nobody else will report it, and nobody adopts it. Where there is no cgroup the
        worker's process group is all we can reach.
        """
        if slot.worker is not None and slot.worker.pid:
            with suppress(ProcessLookupError):
                self._send_signal(-slot.worker.pid, signal.SIGKILL)
        lose = partial(self._lose, slot, is_reused)
        self._zygotes.cgroup.end_slot(slot.index, lose)

    def on_lost_slot(self, index: int, unforked: str = "") -> None:
        """The slot's keeper has died, was closed or not forked; all below it ended."""
        slot = self.slots.get(index)
        if slot is not None:
            if unforked and slot.worker is not None:
                slot.worker.reason, slot.worker.cause = unforked, cause.CROWDED
            self._lose(slot)

    def _lose(self, slot: Slot, is_reused: bool = True) -> None:
        # Maybe its connection has not been read to the end yet.
        slot.keeper = None
        if not self.slots.holds(slot):
            return
        # First forget it, so that nobody who is told of its worker's end takes it.
        self.slots.forget(slot)
        worker = slot.worker
        if worker is not None:
            if worker.pid:
                worker.status = int(signal.SIGKILL)
                worker.cause = worker.cause or cause.KEEPER_DIED
            elif not worker.reason:
                problem = slot.zygote.problem
                if problem is not None:
                    worker.fail(problem)
                else:
                    worker.reason = "the keeper process of its slot died"
            if worker.peer is not None:
                worker.peer.cut_off()
            self._check_gone(worker, is_certain=True)
        slot.output.close()
        if is_reused:
            # Last, since its successor's pipes will have the same names.
            self.slots.reuse_index(slot)

    def _remove_slot(self, slot: Slot) -> None:
        """Forget a slot while the node closes."""
        if self.slots.holds(slot):
            self.slots.forget(slot)
            slot.output.close()

    def _on_worker(self, peer: Peer, hello: wire.Hello) -> None:
        worker = self.workers.get(hello.id)
        if worker is None or worker.peer is not None or worker.status is not None:
            peer.abort()
            return
        worker.peer = peer
        worker.pid = hello.pid
        worker.start_timer.cancel()
        worker.slot.output.name(worker.id, worker.pid)
        worker.slot.output.listen_to(peer)
        peer.on_messages = partial(self._router.hear, worker)
        peer.on_lost = partial(self._on_worker_lost, worker)
        self._events.on_started(worker.id)

    def _on_worker_lost(self, worker: LiveWorker) -> None:
        worker.peer = worker.slot.output.peer = None
        self._check_gone(worker)
        if not worker.is_gone:
            # It may have closed its descriptors and live on; or be about to end, and
            # then it is better not to have ended it.
            self._loop.call_later(LINGER, self._end, worker, cause.DISCONNECTED)

    def _check_gone(self, worker: LiveWorker, is_certain: bool = False) -> None:
        if worker.is_gone:
            return
        if not is_certain and (worker.status is None or worker.peer is not None):
            return
        worker.is_gone = True
        slot = worker.slot
        worker.start_timer.cancel()
        if worker.end_timer is not None:
            worker.end_timer.cancel()
        slot.output.catch_up()
        slot.output.end_progress()
        slot.worker = None
        if slot.keeper is not None:
            self.slots.put_back(slot)
        death = worker.death(self._zygotes.page.begun(slot.index), self.autopsy)
        self._router.delay(worker, EACH)
        self._tell_gone(worker.id, death)

    def _tell_gone(self, worker_id: int, death: Death) -> None:
        self.workers.pop(worker_id).return_loans()
        if death.known == cause.CROWDED:
            self.slots.make_room()
        self._events.on_gone(worker_id, death)

    def _on_imported(self, worker: LiveWorker, imported: wire.Imported) -> None:
        self._zygotes.hear(worker.slot.zygote, imported)

    def on_superseded(self, zygote: Zygote) -> None:
        """Workers that wait in slots of this zygote are not as fresh as they could be.

        Those that run go on.
        """
        self.slots.close_free(zygote)
        workers = [slot.worker for slot in self.slots if slot.zygote is zygote]
        for environment in {worker.environment for worker in workers if worker}:
            self._events.on_outdated(environment)

    def on_zygote_death(self, zygote: Zygote) -> None:
        """Have the workers whose keepers may never come forked in other slots."""
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
            slot = self.slots.add(self._zygotes.serving(worker.environment))
        except (NodeError, OSError) as error:
            worker.fail(error)
            self._check_gone(worker, is_certain=True)
        else:
            worker.slot.worker = None
            worker.slot, slot.worker = slot, worker
            worker.cancel_timers()
            worker.end_timer = None
            worker.start_timer = self._time_start(worker.id, START_LIMIT)

    async def close(self) -> None:
        """End all keepers, and with them whatever is left; wait for it."""
        self._is_closing = True
        if self._store is not None:
            self._store.serve({}, None, None)
        for worker in self.workers.values():
            worker.cancel_timers()
        for slot in self.slots:
            if slot.keeper is not None:
                slot.keeper.send(wire.Close())
            else:
                self._remove_slot(slot)
        await self.slots.gone(CLOSE_LIMIT)
        for slot in self.slots:
            # It does not answer. Its worker dies with it, and the zygote ends the rest.
            if slot.keeper is not None:
                slot.keeper.kill()
        await self.slots.gone(CLOSE_LIMIT)
