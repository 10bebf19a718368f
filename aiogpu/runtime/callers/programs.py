"""The programs that have joined a node: admission, messages, and departure.

To the rest of the node a program is a `Caller`, like a worker that starts child tasks.
When its connection ends, its own tasks and actors are stopped, and no others. On an
orderly `Depart`, the node replies once the program's tasks have stopped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from aiogpu.core.model.ids import ClientId, TaskId
from aiogpu.core.model.text import in_words
from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.records import TaskState
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.errors import AiogpuError, NodeClosedError
from aiogpu.observe.status_codec import status_codec
from aiogpu.runtime.callers.caller import Child, Client, check_claims
from aiogpu.runtime.callers.requests import Requests
from aiogpu.runtime.callers.viewers import Answer, unknown_question
from aiogpu.runtime.connection import Peer, Recipient
from aiogpu.runtime.directories import BACKLOG
from aiogpu.runtime.driver import Driver
from aiogpu.runtime.objects.store import Store
from aiogpu.runtime.output import Routes, TaskLog
from aiogpu.runtime.pending_tasks import internal_error
from aiogpu.runtime.zygote.config import ProgramEnvironment, program_of
from aiogpu.runtime.zygote.zygotes import Zygotes
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.serialization.payload import MARK
from aiogpu.wire import messages as wire
from aiogpu.wire.connection import CLIENT
from aiogpu.wire.messages import ProtocolError


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The facts about a node that clients receive.

    Attributes:
        node: the id of the node.
        descriptors: path of the socket for shared memory.
        spill: directory for values that do not fit into memory, "" for the default.
        ledger: the node's resources, packed.
        release: the version of aiogpu.
        limits: the limits of each program.
    """

    node: str
    descriptors: str
    spill: str
    ledger: bytes
    release: str
    limits: Limits = field(default_factory=Limits)


WITHIN: Final = 10.0
"""Seconds in which a program must identify itself; it takes so long only if stopped."""


FIRST_LOOK: Final = 1e-3


LONGEST_LOOK: Final = 0.02
"""Most seconds between two checks if a departing client's tasks have stopped."""


_log: Final = logging.getLogger(__name__)


_CARRIERS: Final = frozenset(
    {wire.Submit, wire.Ask, wire.Make, wire.Put, wire.PutFailed}
)


_NEW_WORK: Final = frozenset({wire.Submit, wire.Ask, wire.Make, wire.TakeLease})


BACKLOG_OF_RESULTS: Final = 16 << 20
"""No tasks of a program are started while it has more than this many unread bytes."""


BACKLOG_EVERY: Final = 0.1
"""Seconds between two checks of a program that reads too slowly."""


REMEMBERED: Final = 256
"""Programs that have left whose names are kept."""


class Clients:
    """The programs that have joined one node.

    Attributes:
        routes: sends the programs the output of their tasks.
        is_draining: new work is refused.
        by_id: the programs by number.
        departed: names and process ids of the last programs that have left, by number:
            their ended tasks are still listed.
        ends_at: the loop time at which running tasks are ended if the node drains.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        driver: Driver,
        requests: Requests,
        zygotes: Zygotes,
        store: Store,
        server_info: ServerInfo,
        answers: Mapping[str, Answer],
        log: TaskLog | None,
    ) -> None:
        """Prepare; `listen` lets programs join.

        Args:
            loop: the event loop of the node.
            driver: runs the programs' tasks.
            requests: handles the requests that workers can send too.
            zygotes: forks the programs' workers.
            store: keeps the programs' values.
            server_info: the facts sent to each program.
            answers: the questions about the node that programs may ask, by name.
            log: stores all output of tasks; None for no log.
        """
        self.is_draining = False
        self.ends_at: float | None = None
        self.by_id: dict[int, Client] = {}
        self.routes = Routes(driver.scheduler, self.by_id, log, self._number_of)
        self._loop = loop
        self._driver = driver
        self._slices = driver.actors.slices
        self._requests = requests
        self._zygotes = zygotes
        self._store = store
        self._server_info = server_info
        self._answers = answers
        self._server: asyncio.AbstractServer | None = None
        self._replies: set[asyncio.Task[None]] = set()
        self._unnamed: dict[Peer, asyncio.TimerHandle] = {}
        self._left: dict[int, Client] = {}
        self.departed: dict[int, tuple[str, int]] = {}

    def __repr__(self) -> str:
        return f"<Clients {len(self.by_id)}>"

    def _number_of(self, task: int) -> int:
        """Return the program's own number of a task; 0 if the task has ended."""
        call = self._driver.call_of(TaskId(task))
        receiver = None if call is None else call.receiver
        return receiver.number if isinstance(receiver, Child) else 0

    async def listen(
        self, listening: socket.socket, on_data: Callable[[int], object]
    ) -> None:
        """Let programs join over a socket that is bound and listens.

        `on_data` is called when data has arrived, with the number of messages.
        """

        def accept() -> Peer:
            peer = Peer(self._on_hello, on_data)
            late = self._loop.call_later(WITHIN, self._turn_away, peer)
            self._unnamed[peer] = late
            return peer

        # asyncio calls listen(2) again, by default with a backlog of 100.
        self._server = await self._loop.create_unix_server(
            accept, sock=listening, backlog=BACKLOG
        )

    def _turn_away(self, peer: Peer) -> None:
        """Disconnect a client that has not identified itself in time."""
        del self._unnamed[peer]
        peer.refuse(f"the program did not identify itself within {WITHIN:g} s")
        for client in list(self.by_id.values()):
            if client.peer is peer:
                self._on_lost(client)

    def _note_named(self, peer: Peer) -> None:
        """Note that a client has identified itself, or was refused."""
        late = self._unnamed.pop(peer, None)
        if late is not None:
            late.cancel()

    def _on_hello(self, peer: Peer, hello: wire.Hello) -> Recipient | None:
        is_client = (
            hello.role == CLIENT and wire.FIRST_CLIENT <= hello.id < wire.END_OF_CLIENTS
        )
        if not is_client or hello.id in self.by_id:
            self._note_named(peer)
            peer.refuse(
                f"this socket is for programs with a free number, and {hello.id} is "
                f"taken or reserved"
            )
            return None
        client = Client(
            hello.id,
            pid=peer.pid,
            client=ClientId(hello.id),
            store=self._store,
            peer=peer,
        )
        self.by_id[client.id] = self._store.clients[client.id] = client
        # A fork of the program may keep the connection open; see pidfd_open(2).
        with suppress(OSError):
            client.pidfd = os.pidfd_open(client.pid)
            self._loop.add_reader(client.pidfd, peer.abort)
        return Recipient(
            partial(self._on_messages, client),
            partial(self._on_lost, client),
            partial(self._on_slow, client),
        )

    def _on_slow(self, client: Client, is_slow: bool) -> None:
        """Note if a client reads too slowly; pause or resume its output."""
        client.is_slow = is_slow
        if is_slow:
            self._watch_backlog(client)
        else:
            self.routes.resume(client.id)
            self._set_behind(client, False)
        if client.peer is None:
            return
        if is_slow:
            client.peer.pause()
        else:
            client.peer.resume()

    def _watch_backlog(self, client: Client) -> None:
        """Check the unread bytes of a slow program at intervals."""
        if client.is_slow and client.peer is not None:
            if client.peer.unsent > BACKLOG_OF_RESULTS:
                self._set_behind(client, True)
            else:
                self._loop.call_later(BACKLOG_EVERY, self._watch_backlog, client)

    def _set_behind(self, client: Client, is_behind: bool) -> None:
        if client.is_behind is not is_behind:
            client.is_behind = is_behind
            self._driver.feed(Scheduler.set_behind, client.client, is_behind)

    def _on_messages(self, client: Client, messages: list[wire.Message]) -> None:
        is_open = client.is_joined and not self.is_draining
        row: list[wire.Submit] = []
        try:
            for message in messages:
                # By far the most frequent message of a busy program.
                if (
                    is_open
                    and type(message) is wire.Submit
                    and message.payload[:1] != MARK
                ):
                    row.append(message)
                    continue
                self._requests.submit_all(client, row)
                row = []
                try:
                    self._handle(client, message)
                except (AiogpuError, OSError):
                    raise
                except Exception as error:
                    from aiogpu.runtime.internal_faults import fail_request

                    doing = f"handled {type(message).__name__} of a program"
                    if not fail_request(client, message, internal_error(doing, error)):
                        raise
                    _log.exception("! failed to handle %s", type(message).__name__)
            self._requests.submit_all(client, row)
        except Exception as error:  # noqa: BLE001 - other programs go on
            is_expected = isinstance(error, ProtocolError | OSError | AiogpuError)
            kind = type(error).__name__
            _log.warning(
                "! cut off %s (pid %d): %r",
                client.name or client.id,
                client.pid,
                error,
                exc_info=not is_expected,
            )
            if client.peer is not None:
                why = "it broke the protocol"
                if not is_expected:
                    why = f"aiogpu itself has failed, please report it: {kind}"
                client.peer.drop(f"{why}: {error}")

    def _handle(self, client: Client, message: wire.Message) -> None:
        kind = type(message)
        check_claims(client, message)
        if kind in _CARRIERS:
            payload = message.payload  # type: ignore[union-attr]
            if payload is not None and payload[:1] == MARK:
                payload = self._store.admit(client, payload)
                message = message._replace(payload=payload)  # type: ignore[call-arg]
        if self.is_draining and kind in _NEW_WORK:
            self._refuse(client, message)
            return
        if client.is_joined is not (kind is not wire.Join):
            raise ProtocolError(f"unexpected {kind.__name__} message")
        if kind is wire.Join:
            self._join(client, message)  # type: ignore[arg-type]
        elif kind is wire.Inquire:
            self._reply_with(self._answer(client, message))  # type: ignore[arg-type]
        elif kind is wire.Stopping:
            self._driver.announce_stop(client.client)
        elif kind is wire.Depart:
            self._driver.announce_stop(client.client)
            self._slices.add(self._depart(client))
        elif kind is wire.TakeLease:
            if client.pending_join is not None:
                # From now on the core treats it like any other program.
                self._driver.feed(Scheduler.join, *client.pending_join)
                client.pending_join = None
            self._requests.take_lease(client, message)  # type: ignore[arg-type]
        else:
            if kind is wire.Withdraw:
                client.leases.discard(message.child)  # type: ignore[union-attr]
            self._requests.on_message(client, message)

    def _refuse(self, client: Client, message: wire.Message) -> None:
        is_lease = isinstance(message, wire.TakeLease)
        what = "grants no new leases" if is_lease else "takes no new work"
        error = NodeClosedError(f"the node is being stopped, and {what}.")
        if isinstance(message, wire.Make):
            self._driver.actors.refuse(message.actor, error)
        else:
            Child(client, message.child).settle(error)  # type: ignore[union-attr]

    def _join(self, client: Client, join: wire.Join) -> None:
        info = self._server_info
        peer = client.peer
        assert peer is not None, client
        self._note_named(peer)
        if join.release != info.release:
            peer.refuse(
                f"the node runs aiogpu {info.release}, the program {join.release}; use "
                f"the same version in both, or restart the node"
            )
            self._on_lost(client)
            return
        if self.is_draining and not join.only_looks:
            peer.refuse("this node is being stopped, and no program can join")
            self._on_lost(client)
            return
        program = ProgramEnvironment(
            join.executable,
            join.sys_path,
            join.directory,
            join.environ,
            join.preload,
            join.flags,
            join.argv,
        )
        client.name, client.shows = join.name, join.shows
        client.only_looks = join.only_looks
        joined = (client.client, join.weight, info.limits)
        if client.only_looks:
            client.pending_join = joined
        else:
            client.program = program.variables
            self._zygotes.join(program.key, program)
            self._driver.feed(Scheduler.join, *joined)
        client.is_joined = True
        self._reply_with(self._welcome(client, join.expected))

    async def _welcome(self, client: Client, expected: Sequence[str]) -> None:
        """Send a program its `Welcome` once workers can be forked for it."""
        info, peer = self._server_info, client.peer
        if peer is None:
            return  # the program has disconnected
        try:
            if not client.only_looks:
                key = program_of(client.program)
                await self._zygotes.joined(key)
                self._zygotes.expect(expected, key)
        except Exception as error:  # noqa: BLE001 - sent to the program
            peer.send_one(wire.ChildFailed(0, *pack_own_error(error).why))
            return
        page = f"/proc/{os.getpid()}/fd/{self._zygotes.config.page}"
        peer.send_one(
            wire.Welcome(info.node, info.descriptors, page, info.spill, info.ledger)
        )

    def _reply_with(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that sends a reply; `close` cancels it."""
        reply = self._loop.create_task(coroutine)
        self._replies.add(reply)
        reply.add_done_callback(self._replies.discard)

    async def _answer(self, client: Client, inquiry: wire.Inquire) -> None:
        """Answer a client's question about the node."""
        child = Child(client, inquiry.child)
        if inquiry.what == wire.WHY:
            task = self._task_of(client, inquiry.number)
            inquiry = inquiry._replace(number=task)
        answer = self._answers.get(inquiry.what)
        if answer is None:
            child.settle(unknown_question(inquiry))
            return
        try:
            child.settle(status_codec.dump(await answer(inquiry)))
        except Exception as error:  # noqa: BLE001 - sent to the program
            child.settle(error)

    def _task_of(self, client: Client, number: int) -> int:
        """Return the task of a client's child, or of an actor (negative numbers)."""
        if number > 0:
            return client.children.get(number, 0)
        actor = self._driver.actors.get(number)
        return 0 if actor is None else actor.id

    def _on_lost(self, client: Client) -> None:
        """Handle a lost connection: the program counts as ended."""
        if self.by_id.pop(client.id, None) is None:
            return
        self._store.clients.pop(client.id, None)
        if client.name:
            self.departed[client.id] = client.name, client.pid
            if len(self.departed) > REMEMBERED:
                del self.departed[next(iter(self.departed))]
        client.peer = None
        if client.pidfd >= 0:
            self._loop.remove_reader(client.pidfd)
            os.close(client.pidfd)
            client.pidfd = -1
        self._slices.add(self._end(client))
        self.routes.resume(client.id)
        if client.is_joined and client.pending_join is None:
            self._driver.feed(Scheduler.leave, client.client)
        if client.program:
            # Its detached actors live on, and their processes may be restarted.
            client.declared.clear()
            self._left[client.client] = client
            self._zygotes.leave(program_of(client.program))

    def _end(self, client: Client) -> Iterator[None]:
        """Give up a client's work and return what it has borrowed, a step at a time."""
        yield from self._give_up(client)
        client.return_loans()

    def _give_up(self, client: Client) -> Iterator[None]:
        """Stop a client's tasks and actors, one a step; note which still run.

        Processes with its leases may go on.
        """
        driver, actors = self._driver, self._driver.actors
        for number in list(client.actor_calls):
            self._requests.withdraw_call(client, number)
            yield
        client.fetched.clear()
        leases, client.leases = client.leases, set()
        children, client.children = client.children, {}
        for number, task in children.items():
            driver.cancel(task)
            if number not in leases and driver.knows(task):
                client.departing.add(TaskId(task))
            yield
        for hold in client.borrowers.take_actors() if client.borrowers else ():
            hold.end()
            actor = actors.get(hold.id)
            if actor is not None and not actor.holders:
                client.departing.add(TaskId(actor.id))
            yield
        why = (
            f"the program that had started it ({client.name}, pid {client.pid}) ended. "
            f"An actor with lifetime='detached' outlives its program."
        )
        for task in actors.end_of_client(client.client, why):
            client.departing.add(task)
            yield

    def _depart(self, client: Client) -> Iterator[None]:
        """Handle a client's request to leave, a step at a time."""
        yield from self._give_up(client)
        scheduler = self._driver.scheduler
        for worker in scheduler.workers:
            task = worker.task
            if task is None or task.client != client.client:
                continue
            if task.state is TaskState.STOPPING:  # cancelled before the `Depart`
                client.departing.add(task.id)
        departing = map(scheduler.tasks.get, client.departing)
        graces = [task.spec.stop_grace for task in departing if task is not None]
        config = scheduler.config
        within = config.cancel_grace + config.exit_grace + max(graces, default=0.0)
        self._confirm(client, FIRST_LOOK, self._loop.time() + within)

    def _confirm(self, client: Client, pause: float, until: float) -> None:
        """Confirm a client's departure once its tasks have stopped."""
        if client.peer is None:
            return
        knows = self._driver.knows
        client.departing = {task for task in client.departing if knows(task)}
        if client.departing and self._loop.time() < until:
            longer = min(2 * pause, LONGEST_LOOK)
            self._loop.call_later(pause, self._confirm, client, longer, until)
            return
        client.peer.send_one(wire.Departed())

    def _survived(self) -> dict[int, Client]:
        """Return the programs that have left, but whose actors or leases live on."""
        alive = {client.id for client in self._driver.scheduler.clients or ()}
        self._left = {id_: left for id_, left in self._left.items() if id_ in alive}
        return self._left

    def wants(self, program: str) -> bool:
        """Return True if a detached actor still needs the zygote of a program."""
        left = self._survived().values()
        return any(program_of(client.program) == program for client in left)

    @property
    def programs(self) -> dict[int, tuple[str, int]]:
        """Names and process ids, also of programs that left actors or leases behind."""
        clients = {**self._survived(), **self.by_id}
        return {number: (client.name, client.pid) for number, client in clients.items()}

    @property
    def remains(self) -> str:
        """The clients' unfinished work in words; "" for none."""
        clients = self.by_id.values()
        calls = (
            number for client in clients for _, number in client.actor_calls.values()
        )
        counts = {
            "task": sum(
                len(client.children) - len(client.leases) for client in clients
            ),
            "call": sum(number > 0 for number in calls),
            "lease": sum(len(client.leases) for client in clients),
        }
        return in_words(
            [f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts.items() if n]
        )

    def drain(self, patience: float) -> None:
        """Refuse new work and programs, except commands that only look."""
        self.is_draining = True
        self.ends_at = self._loop.time() + patience
        _log.info("no new work is taken; unfinished: %s", self.remains or "nothing")

    def stop_listening(self) -> None:
        """Accept no more clients."""
        self.is_draining = True
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """Disconnect the remaining clients after the node has ended all tasks."""
        self.stop_listening()
        for late in self._unnamed.values():
            late.cancel()
        self._unnamed.clear()
        for reply in self._replies:
            reply.cancel()
        for client in list(self.by_id.values()):
            peer = client.peer
            self._on_lost(client)
            if peer is not None:
                peer.send_one(wire.Close())
                peer.end()
