"""Actors as workers have them: made, found, called and held over a worker's socket.

A worker that has a handle counts as one holder. What carries a handle, arguments or
a result, counts as well for as long as it is under way.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Final

from aiogpu.core.model.ids import ClientId, TaskId
from aiogpu.errors import (
    ActorNameError,
    AiogpuError,
    DeadlockError,
    InternalError,
    ProtocolError,
)
from aiogpu.runtime.actor import Actor
from aiogpu.runtime.actors import Actors
from aiogpu.runtime.call import Receiver, Site
from aiogpu.runtime.caller import Caller
from aiogpu.runtime.child import Carrying, Child, Then
from aiogpu.serialization.exceptions import unpack_failure
from aiogpu.serialization.serializer import dump_whole
from aiogpu.wire.messages import (
    AFTER_ALL,
    AGAIN,
    CAPACITY,
    ENDED,
    READY,
    Ask,
    Carried,
    Carry,
    ChildDemand,
    Failed,
    Find,
    Hold,
    Make,
    Message,
    Release,
    Stop,
)

KINDS: Final = (Ask, Hold, Release, Carry, Make, Find, Stop)
"""The messages that concern actors."""


class Far:
    """Hears what workers say of actors."""

    def __init__(
        self,
        actors: Actors,
        receiver_of: Callable[[TaskId], Receiver | None],
        on_answered: Callable[[Caller, int], None],
        client_of: Callable[[Caller], ClientId],
    ) -> None:
        self._actors = actors
        self._client_of = client_of
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

    def on_message(self, caller: Caller, message: Message) -> None:
        """Take in one of their messages.

        Raises:
            ProtocolError: nobody may say that, or not here.
        """
        way = self._ways.get(type(message))
        if way is None:
            raise ProtocolError(f"{type(message).__name__} where it may not be")
        way(caller, message)

    def _hold(self, caller: Caller, message: Hold) -> None:
        self._count(caller, message.actor)

    def _count(self, caller: Caller, actor: int) -> None:
        if self._actors.hold(actor):
            self._note_hold(caller, actor)

    def _note_hold(self, caller: Caller, actor: int) -> None:
        caller.holds[actor] = caller.holds.get(actor, 0) + 1
        self._actors.holding[caller.id] = caller

    def _release(self, caller: Caller, message: Release) -> None:
        count = caller.holds.get(message.actor, 0)
        if count:
            caller.holds[message.actor] = count - 1
            self._actors.release(message.actor)

    def release_all(self, caller: Caller) -> None:
        """A worker has gone, and with it all its handles."""
        holds, caller.holds = caller.holds, {}
        for actor, count in holds.items():
            for _ in range(count):
                self._actors.release(actor)

    def _carry(self, caller: Caller, message: Carry) -> None:
        if not message.task:
            caller.carried = message.actors
            return
        receiver = self._receiver_of(TaskId(message.task))
        while isinstance(receiver, Carrying):
            receiver = receiver.receiver
        if isinstance(receiver, Child):
            # Its process holds them from here on, whether it looks or not.
            for actor in message.actors:
                self._count(receiver.caller, actor)
            if receiver.caller.peer is not None:
                receiver.caller.peer.post(Carried(receiver.number, message.actors))
            return
        for actor in message.actors:
            if receiver is not None and self._actors.hold(actor):
                # The handle whose result they are in: they live as long as it does.
                weakref.finalize(receiver, self._actors.release_soon, actor)

    def carrying(self, caller: Caller, receiver: Receiver) -> Receiver:
        """A receiver that holds what the message before has carried, until told."""
        held = self._take_carried(caller)
        if not held:
            return receiver
        return Carrying(receiver, partial(self._release_each, held))

    def _take_carried(self, caller: Caller) -> list[int]:
        carried, caller.carried = caller.carried, ()
        return [actor for actor in carried if self._actors.hold(actor)]

    def _release_each(self, actors: list[int]) -> None:
        for actor in actors:
            self._actors.release_soon(actor)

    def _ask(self, caller: Caller, message: Ask) -> None:
        child = message.child
        receiver = self.carrying(caller, Child(caller, child))
        actor = self._actors.get(message.actor)
        if actor is None:
            receiver.fail(self._actors.unknown(message.actor))
            return
        caller.asked[child] = message.actor, 0
        receiver = Carrying(receiver, partial(self._note_answer, caller, child))
        if message.method == READY:
            actor.await_ready(receiver)
            return
        if message.method == ENDED:
            actor.await_end(receiver)
            return
        if message.method == CAPACITY:
            self._actors.tell_room(actor.id, receiver)
            return
        number = actor.call(message.method, message.payload, receiver, caller.id)
        if child in caller.asked:
            caller.asked[child] = message.actor, number

    def _note_answer(self, caller: Caller, child: int) -> None:
        if caller.asked.pop(child, None) is not None:
            self._on_answered(caller, child)

    def refuse_self_waits(self, actor: Actor, caller: Caller) -> None:
        """Fail calls for which a process waits that would have to run them itself."""
        if not actor.is_serial:
            return
        for child in caller.waits_for:
            public, number = caller.asked.get(child, (0, 0))
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

    def _demand(self, caller: Caller, message: ChildDemand) -> None:
        asked = caller.asked.get(message.child)
        if asked is not None:
            self._actors.demand(*asked, message.limit)

    def withdraw(self, caller: Caller, child: int) -> bool:
        """Nobody wants the answer of a call any more; False if it is none."""
        asked = caller.asked.pop(child, None)
        if asked is None:
            return False
        caller.waits_elsewhere.discard(child)
        self._actors.cancel(*asked)
        return True

    def _make(self, caller: Caller, message: Make) -> None:
        site = caller.declared.get(message.site)
        key = (message.namespace, message.name) if message.name else None
        held = self._take_carried(caller)
        try:
            if not isinstance(site, Site):
                raise _refusal(site)
            if site.actor is None:
                raise InternalError(f"{site.spec.name} was declared as no actor")
            actor = self._actors.create(
                *(site, message.payload, key, message.get_if_exists, message.actor),
                self._client_of(caller),
            )
            actor.await_ready(Then(partial(self._release_each, held)))
        except AiogpuError as error:
            self._release_each(held)
            self._actors.refuse(message.actor, error)
        self._note_hold(caller, message.actor)

    def _find(self, caller: Caller, message: Find) -> None:
        receiver = Child(caller, message.child)
        actor = self._actors.find((message.namespace, message.name))
        if actor is None:
            receiver.fail(
                ActorNameError(f"no actor named {message.name!r} lives on this node.")
            )
            return
        self._note_hold(caller, actor.id)
        terms = actor.site.actor
        assert terms is not None, actor
        receiver.receive(dump_whole((actor.id, actor.name, terms.packed_face())))

    def _stop(self, _worker: Caller, message: Stop) -> None:
        if message.how == AFTER_ALL:
            self._actors.terminate(message.actor)
        else:
            self._actors.kill(message.actor, no_restart=message.how != AGAIN)


def _refusal(site: object) -> Exception:
    if isinstance(site, Failed):
        return unpack_failure(site, "the actor")
    return InternalError("the actor's class was never declared")
