"""All actors of a node: made, called, found by name, counted, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final, Protocol

from aiogpu.client.function_spec import Site
from aiogpu.client.interface import Receiver
from aiogpu.core.model.ids import OWN, ClientId, TaskId
from aiogpu.core.resources.placement_group import room_for
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.errors import ActorDiedError
from aiogpu.runtime.actors.actor import Actor, ActorState, died, name_taken
from aiogpu.runtime.callers.caller import Caller
from aiogpu.runtime.pending_tasks import Call
from aiogpu.runtime.workers.death import Death, describe_loss
from aiogpu.runtime.workers.pool import Pool
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.serialization.exceptions import LEFT
from aiogpu.serialization.serializer import dump_whole
from aiogpu.wire.messages import Create, Created, Done, Failed

if TYPE_CHECKING:
    from aiogpu.core.scheduler.scheduler import Feed
    from aiogpu.runtime.devices.memory_shortage import Shortages
    from aiogpu.runtime.results import OwnerNotifier


class AnswersPort(Protocol):
    """Takes what workers say of the ends of tasks."""

    def on_answer(self, worker: int, answer: Done | Failed) -> None:
        """A worker has ended a task."""


class DriverPort(Protocol):
    """What actors need of the driver."""

    scheduler: Scheduler
    shortages: Shortages
    notifier: OwnerNotifier

    @property
    def answers(self) -> AnswersPort:
        """Takes what workers say of the ends of tasks."""

    @property
    def feed(self) -> Feed:
        """Tells the core what happened."""

    def submit(
        self,
        site: Site,
        payload: bytes,
        receiver: Receiver,
        parent: TaskId | None = None,
        client: ClientId = OWN,
    ) -> int:
        """Start a task; gives its id."""

    def cancel(self, task: int) -> None:
        """Stop a task."""


class Register:
    """The actors that live, or of which somebody has a handle."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._actors: dict[int, Actor] = {}
        self._named: dict[tuple[str, str], Actor] = {}
        self._refused: dict[int, Exception] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {len(self._actors)}>"

    def check_name(self, key: tuple[str, str] | None) -> None:
        """Raise `ActorNameError` if a living actor has that name."""
        if key is not None and key in self._named:
            raise name_taken(key[1])

    def name(self, actor: Actor) -> None:
        """Let it be found by its name, if it has one."""
        if actor.key is not None:
            self._named[actor.key] = actor

    def add(self, actor: Actor, public: int) -> None:
        """Let it be found by its id, and by the one that a worker has given it."""
        self._actors[actor.id] = actor
        if public:
            self._actors[public] = actor
            actor.aliases.append(public)

    def get(self, actor: int) -> Actor | None:
        """An actor to which somebody holds a handle."""
        return self._actors.get(actor)

    def all(self) -> list[Actor]:
        """All that live, or to which somebody holds a handle, each once."""
        return [one for known_as, one in self._actors.items() if known_as == one.id]

    def held(self, actor: int, _name: str = "") -> Actor:
        """See `ActorsPort.held`."""
        if not self.hold(actor):
            raise self.unknown(actor)
        return self._actors[actor]

    def unknown(self, actor: int) -> Exception:
        """The error for one that never was, or to which nobody has a handle."""
        refused = self._refused.get(actor)
        return refused or ActorDiedError(
            f"the actor {actor} has ended with its last handle."
        )

    def refuse(self, public: int, error: Exception) -> None:
        """Note why one is not made that a worker wanted."""
        self._refused[public] = error

    def find(self, key: tuple[str, str]) -> Actor | None:
        """The actor of that name, if it lives; whoever asks holds one handle more."""
        actor = self._named.get(key)
        if actor is not None:
            actor.holders += 1
        return actor

    def hold(self, actor: int) -> bool:
        """One more holds a handle; False if nobody has until now."""
        found = self._actors.get(actor)
        if found is None:
            return False
        found.holders += 1
        return True

    def release(self, actor: int) -> None:
        """One who held a handle has gone."""
        found = self._actors.get(actor)
        if found is None:
            self._refused.pop(actor, None)
        else:
            found.release()
            self.forget(found)

    def release_soon(self, actor: int) -> None:
        """The same from wherever objects are dropped."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.release, actor)

    def forget(self, actor: Actor) -> None:
        """Keep it no more, if it is dead and nobody has a handle."""
        if not actor.holders and actor.state is ActorState.DEAD:
            for known_as in (actor.id, *actor.aliases):
                self._actors.pop(known_as, None)

    def free_name(self, actor: Actor) -> None:
        """Another one may have its name."""
        if actor.key is not None and self._named.get(actor.key) is actor:
            del self._named[actor.key]


FIRST_CALL: Final = 1 << 40
"""Number of a node's first call: above those of tasks and of what they are sent."""


LEAVE_LIMIT: Final = 5.0
"""Seconds that an actor gets to end by itself: `close()`, `__del__`, `atexit`."""


SPOILT: Final = 0.1
"""Seconds in which a process that is unfit to go on may tell its last answer."""


INTERRUPT_EVERY: Final = 0.05
"""Seconds between two interrupts of a method that has not heard the first."""


class Actors(Register):
    """The actors of one node.

    Attributes:
        workers: those that are actors, by id.
        holding: workers and clients that have handles.
        on_holder_gone: told of one of them that has gone.
        check: refuses a class and arguments that this node can never serve.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, driver: DriverPort, pool: Pool
    ) -> None:
        super().__init__(loop)
        self.check: Callable[[Site, bytes], None]
        self.holding: dict[int, Caller] = {}
        self.on_holder_gone: Callable[[Caller], None]
        self._driver = driver
        self._pool = pool
        self._commands = pool.commands
        self.workers: dict[int, LiveWorker] = {}
        self._new_number = count(FIRST_CALL).__next__
        pool.hearing.on_acting = self._on_message

    def create(
        self,
        site: Site,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
        public: int = 0,
        client: ClientId = OWN,
    ) -> Actor:
        """Make an actor, which waits for its place as a task does.

        Whoever asks holds one handle to it. See `ActorsPort.create`. `public` is
        the id by which a worker or a client calls it who has it made.
        """
        self.check(site, payload)
        if get_if_exists and key is not None and (found := self.find(key)):
            self.add(found, public)
            return found
        self.check_name(key)
        actor = Actor(site, self._new_number, key)
        actor.on_idle, actor.on_dead = self._on_idle, self._on_dead
        actor.on_leaving = self._on_leaving
        self.name(actor)
        if site.spec.is_detached:
            actor.holders += 1  # the node's own, until it is killed
        actor.id = self._driver.submit(site, payload, actor, None, client)
        self.add(actor, public)
        return actor

    def room(self, actor: int) -> tuple[int | None, str]:
        """Return how many actors like it can live at once, and what each asks for."""
        found = self.get(actor)
        if found is None:
            raise self.unknown(actor)
        assert found.site.actor is not None, found
        request = found.site.spec.shape.request
        ledger = self._driver.scheduler.ledger
        lends = not found.site.actor.keeps_cpus
        return room_for(ledger, request, lends), str(request)

    def tell_room(self, actor: int, receiver: Receiver) -> None:
        """See `ActorsPort.tell_room`."""
        receiver.receive(dump_whole(self.room(actor)))

    def begun(self, worker: int) -> int:
        """Number of the last call that a serial actor's process has begun."""
        return self._commands.begun(worker)

    def receiver_of(self, number: int) -> Receiver | None:
        """Who waits for a call."""
        actors = (worker.actor for worker in self.workers.values())
        found = (actor.calls.get(number) for actor in actors if actor is not None)
        return next((call.receiver for call in found if call is not None), None)

    def cancel(self, actor: int, number: int) -> None:
        """Nobody wants a call's answer any more."""
        found = self._actors.get(actor)
        if found is None:
            return
        sent = found.worker
        worker = None if sent is None else self.workers.get(sent.id)
        number = found.lines.number_of(number)
        if found.cancel(number) and worker is not None and worker.peer is not None:
            found.drops += 1
            self._commands.drop(worker, number, found.drops)
            if found.is_serial:
                self._interrupt(found, worker, number, is_first=True)
        found.look_if_idle()

    def demand(self, actor: int, number: int, limit: int) -> None:
        """A stream's consumer has taken items: it may yield so many in all."""
        found = self._actors.get(actor)
        if found is not None:
            found.demand(number, limit)

    def _interrupt(
        self, actor: Actor, worker: LiveWorker, number: int, is_first: bool = False
    ) -> None:
        """Interrupt the one call that runs, if it is that one, until it has heard.

        One that has not begun a while after it was dropped never will.
        """
        if actor.worker is not worker or number not in actor.calls:
            return
        has_begun = self._commands.begun(worker.id) == number
        if has_begun:
            self._commands.interrupt(worker.id, number, attempt=1, is_coroutine=False)
        if has_begun or is_first:
            self._loop.call_later(
                INTERRUPT_EVERY, self._interrupt, actor, worker, number
            )

    def call_off(self, worker_id: int, attempt: int) -> int:
        """Have an actor end with its node; gives the call to interrupt, 0 for none."""
        worker = self.workers.get(worker_id)
        if worker is None:
            return 0
        if attempt == 0:
            self._commands.call_off(worker)
        begun = self._commands.begun(worker_id)
        return begun if begun >= FIRST_CALL else 0

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End an actor's process at once, and the actor too unless it may restart."""
        found = self._actors.get(actor)
        if found is None or found.state is ActorState.DEAD:
            return
        if no_restart:
            found.die(ActorDiedError(f"{found.name} was killed.", found.name))
            self._driver.cancel(found.id)
        elif found.worker is not None:
            found.is_killed = True
            for mailbox in found.mailboxes.values():
                mailbox.is_open = False  # what comes from now on is for the next one
            self._pool.kill(found.worker.id)

    def on_spoilt(self, worker: int) -> bool:
        """An actor's process is unfit to go on; False if that worker is no actor's."""
        known = self.workers.get(worker)
        if known is None or known.actor is None:
            return False
        # Not before the answer that follows is here.
        self._loop.call_later(SPOILT, self._end_spoilt, known)
        return True

    def _end_spoilt(self, worker: LiveWorker) -> None:
        """End that process, unless it has ended by itself and another is the actor."""
        actor = worker.actor
        if actor is not None and actor.worker is worker:
            self.kill(actor.id, no_restart=False)

    def disown(self, worker: int) -> None:
        """A worker runs tasks: it was to be an actor, and that was taken back."""
        self.workers.pop(worker).actor = None

    def terminate(self, actor: int) -> None:
        """Have an actor end after what it was sent, whoever still holds a handle."""
        found = self._actors.get(actor)
        if found is not None:
            found.is_ending = True
            found.look_if_idle()

    def creation(self, worker: LiveWorker, task: TaskId, call: Call) -> Create:
        """Return what a worker is told that becomes an actor now."""
        actor = call.receiver
        assert isinstance(actor, Actor), call
        actor.id = task  # it may be placed before it is submitted for good
        actor.worker, worker.actor = worker, actor
        actor.drops, actor.is_killed = 0, False
        self.workers[worker.id] = worker
        self._commands.expect_actor(worker)
        terms = call.site.actor
        assert terms is not None, call
        if not terms.keeps_cpus:
            # Later, not now: the core is told of events one at a time.
            self._loop.call_soon(
                self._driver.feed, Scheduler.release_cpus, TaskId(actor.id)
            )
        return Create(
            actor.id,
            call.site.id,
            call.payload,
            call.number,
            terms.mode,
            dict(terms.limits),
            dict(terms.groups),
        )

    def on_gone(self, worker_id: int, death: Death) -> Callable[[], None]:
        """A process has ended; the core is told of it next.

        Returns:
            What is to be done when the core has said whether another one follows.
        """
        holder = self.holding.pop(worker_id, None)
        if holder is not None:
            self._loop.call_soon(self.on_holder_gone, holder)
        worker = self.workers.pop(worker_id, None)
        if worker is None or worker.actor is None:
            return _nothing
        actor = worker.actor
        was_leaving, was_killed = actor.state is ActorState.LEAVING, actor.is_killed
        lost = actor.lose(death.begun)
        cause = None
        if lost and not was_killed:
            cause = self._driver.notifier.cause_of(
                *(actor.id, actor.name, worker_id, death)
            )
        if was_leaving:
            actor.receive(b"")
            self._driver.cancel(actor.id)

        def tell() -> None:
            for receiver in lost:
                is_restarting = actor.state is not ActorState.DEAD
                receiver.fail(describe_loss(actor.name, cause, is_restarting))
            if actor.state is ActorState.DEAD:
                actor.note_gone()
            actor.look_if_idle()

        return tell

    def _on_message(self, worker_id: int, message: Done | Failed | Created) -> None:
        """What an actor's process says."""
        worker = self.workers.get(worker_id)
        actor = worker.actor if worker is not None else None
        if actor is None or actor.worker is not worker:
            return
        if type(message) is Created:
            actor.on_created()
        elif message.task == actor.id:
            self._driver.answers.on_answer(worker_id, message)  # type: ignore[arg-type]
        else:
            if type(message) is Failed:
                message = self._told_of(worker_id, actor, message)
            actor.on_answer(message)  # type: ignore[arg-type]

    def _told_of(self, worker: int, actor: Actor, failed: Failed) -> Failed:
        """Return what is told of a call that has failed."""
        shortages, call = self._driver.shortages, actor.calls.get(failed.task)
        name = f"{actor.name}.{call.method}" if call is not None else actor.name
        if shortages and shortages.concerns(worker, failed):
            failed = shortages.told(worker, name, failed)
        if call is not None and call.receiver is not None and failed.kind != LEFT:
            self._driver.notifier.note_call(actor.id, name, failed)
        return failed

    def end_of_client(self, client: ClientId, why: str) -> list[TaskId]:
        """End the actors that a program has made, whoever else holds them.

        Detached ones live on.

        Returns:
            The tasks that those actors are which were told to end.
        """
        found = []
        for actor in self.all():
            record = self._driver.scheduler.tasks.get(TaskId(actor.id))
            if (
                record is not None
                and record.client == client
                and not record.spec.is_detached
            ):
                actor.is_ending = True  # others may not call it any more
                self._leave(actor, why)
                found.append(record.id)
        return found

    def _on_idle(self, actor: Actor) -> None:
        self._leave(actor, actor.why_idle)

    def _leave(self, actor: Actor, why: str) -> None:
        """End an actor after what it was sent; at once if it waits for its process."""
        if actor.state is ActorState.PENDING:
            self._driver.cancel(actor.id)
            actor.die(died(actor.name, why))
        else:
            actor.leave(why)

    def _on_leaving(self, actor: Actor) -> None:
        self.free_name(actor)
        self._loop.call_later(LEAVE_LIMIT, self._end, actor)

    def _end(self, actor: Actor) -> None:
        if actor.state is not ActorState.DEAD:
            self._driver.cancel(actor.id)
            actor.receive(b"")

    def _on_dead(self, actor: Actor) -> None:
        self.free_name(actor)
        if actor.worker is None:
            actor.note_gone()
        self.forget(actor)


def _nothing() -> None:
    """The worker was no actor's."""
