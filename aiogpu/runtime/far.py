"""Actors as workers have them: made, found, called and held over a worker's socket.

A worker that has a handle counts as one holder. What carries a handle, arguments or
a result, counts as well for as long as it is under way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Final

from aiogpu.core.ids import TaskId
from aiogpu.errors import (
    ActorNameError,
    AiogpuError,
    DeadlockError,
    InternalError,
)
from aiogpu.runtime.actor import Actor
from aiogpu.runtime.actors import Actors
from aiogpu.runtime.call import Receiver, Site
from aiogpu.runtime.child import Carrying, Child, Then
from aiogpu.runtime.slot import LiveWorker
from aiogpu.wire.acting import (
    AFTER_ALL,
    AGAIN,
    ENDED,
    READY,
    ROOM,
    Ask,
    Carry,
    Find,
    Hold,
    Make,
    Release,
    Stop,
)
from aiogpu.wire.failure import unpack_failure
from aiogpu.wire.messages import Failed, Message
from aiogpu.wire.payload import dump_whole
from aiogpu.wire.streaming import ChildDemand

KINDS: Final = (Ask, Hold, Release, Carry, Make, Find, Stop)
"""The messages that concern actors."""


class Far:
    """Hears what workers say of actors."""

    def __init__(
        self,
        actors: Actors,
        receiver_of: Callable[[TaskId], Receiver | None],
        on_answered: Callable[[LiveWorker], None],
    ) -> None:
        self._actors = actors
        self._receiver_of = receiver_of
        self._on_answered = on_answered
        self._ways: Final[dict[type[Message], Callable[..., None]]] = {
            Ask: self._ask,
            Hold: self._hold,
            Release: self._release,
            Carry: self._carry,
            Make: self._make,
            Find: self._find,
            Stop: self._stop,
            ChildDemand: self._demand,
        }

    def on_message(self, worker: LiveWorker, message: Message) -> None:
        """Take in one of their messages."""
        self._ways[type(message)](worker, message)

    def _hold(self, worker: LiveWorker, message: Hold) -> None:
        self._count(worker, message.actor)

    def _count(self, worker: LiveWorker, actor: int) -> None:
        if self._actors.hold(actor):
            self._note_hold(worker, actor)

    def _note_hold(self, worker: LiveWorker, actor: int) -> None:
        worker.holds[actor] = worker.holds.get(actor, 0) + 1
        self._actors.holding[worker.id] = worker

    def _release(self, worker: LiveWorker, message: Release) -> None:
        count = worker.holds.get(message.actor, 0)
        if count:
            worker.holds[message.actor] = count - 1
            self._actors.release(message.actor)

    def release_all(self, worker: LiveWorker) -> None:
        """A worker has gone, and with it all its handles."""
        holds, worker.holds = worker.holds, {}
        for actor, count in holds.items():
            for _ in range(count):
                self._actors.release(actor)

    def _carry(self, worker: LiveWorker, message: Carry) -> None:
        if not message.task:
            worker.carried = message.actors
            return
        receiver = self._receiver_of(TaskId(message.task))
        while isinstance(receiver, Carrying):
            receiver = receiver.receiver
        for actor in message.actors:
            if isinstance(receiver, Child):
                # Its worker holds them from here on, whether it looks or not.
                self._count(receiver.worker, actor)
            elif receiver is not None and self._actors.hold(actor):
                # The handle whose result they are in: they live as long as it does.
                weakref.finalize(receiver, self._actors.release_soon, actor)

    def carrying(self, worker: LiveWorker, receiver: Receiver) -> Receiver:
        """A receiver that holds what the message before has carried, until told."""
        held = self._take_carried(worker)
        if not held:
            return receiver
        return Carrying(receiver, partial(self._release_each, held))

    def _take_carried(self, worker: LiveWorker) -> list[int]:
        carried, worker.carried = worker.carried, ()
        return [actor for actor in carried if self._actors.hold(actor)]

    def _release_each(self, actors: list[int]) -> None:
        for actor in actors:
            self._actors.release_soon(actor)

    def _ask(self, worker: LiveWorker, message: Ask) -> None:
        child = message.child
        receiver = self.carrying(worker, Child(worker, child))
        actor = self._actors.get(message.actor)
        if actor is None:
            receiver.fail(self._actors.unknown(message.actor))
            return
        worker.asked[child] = message.actor, 0
        receiver = Carrying(receiver, partial(self._note_answer, worker, child))
        if message.method == READY:
            actor.await_ready(receiver)
            return
        if message.method == ENDED:
            actor.await_end(receiver)
            return
        if message.method == ROOM:
            receiver.receive(dump_whole(self._actors.room(actor.id)))
            return
        number = actor.call(message.method, message.payload, receiver, worker.id)
        if child in worker.asked:
            worker.asked[child] = message.actor, number

    def _note_answer(self, worker: LiveWorker, child: int) -> None:
        if worker.asked.pop(child, None) is not None and child in worker.waits_for:
            self._on_answered(worker)

    def refuse_self_waits(self, actor: Actor, worker: LiveWorker) -> None:
        """Fail calls for which a process waits that would have to run them itself."""
        if not actor.is_serial:
            return
        for child in worker.waits_for:
            public, number = worker.asked.get(child, (0, 0))
            call = actor.calls.get(number)
            if call is None or self._actors.get(public) is not actor:
                continue
            receiver = call.receiver
            self._actors.cancel(public, number)
            if receiver is not None:
                receiver.fail(
                    DeadlockError(
                        f"a method of {actor.name} waits for its own {call.method}, "
                        f"which runs one at a time. Call the method directly, by self, "
                        f"or give the actor max_concurrency=2 or more."
                    )
                )

    def _demand(self, worker: LiveWorker, message: ChildDemand) -> None:
        asked = worker.asked.get(message.child)
        if asked is not None:
            self._actors.demand(*asked, message.limit)

    def withdraw(self, worker: LiveWorker, child: int) -> bool:
        """Nobody wants the answer of a call any more; False if it is none."""
        asked = worker.asked.pop(child, None)
        if asked is None:
            return False
        self._actors.cancel(*asked)
        return True

    def _make(self, worker: LiveWorker, message: Make) -> None:
        site = worker.declared.get(message.site)
        key = (message.namespace, message.name) if message.name else None
        held = self._take_carried(worker)
        try:
            if not isinstance(site, Site):
                raise _refusal(site)
            actor = self._actors.create(
                site, message.payload, key, message.get_if_exists, message.actor
            )
            actor.await_ready(Then(partial(self._release_each, held)))
        except AiogpuError as error:
            self._release_each(held)
            self._actors.refuse(message.actor, error)
        self._note_hold(worker, message.actor)

    def _find(self, worker: LiveWorker, message: Find) -> None:
        receiver = Child(worker, message.child)
        actor = self._actors.find((message.namespace, message.name))
        if actor is None:
            receiver.fail(
                ActorNameError(f"no actor named {message.name!r} lives on this node.")
            )
            return
        self._note_hold(worker, actor.id)
        terms = actor.site.actor
        assert terms is not None, actor
        receiver.receive(dump_whole((actor.id, actor.name, terms.packed_face())))

    def _stop(self, _worker: LiveWorker, message: Stop) -> None:
        if message.how == AFTER_ALL:
            self._actors.terminate(message.actor)
        else:
            self._actors.kill(message.actor, no_restart=message.how != AGAIN)


def _refusal(site: object) -> Exception:
    if isinstance(site, Failed):
        return unpack_failure(site, "the actor")
    return InternalError("the actor's class was never declared")
