"""All actors of a node without processes: made, found by name, called, ended."""

from __future__ import annotations

import asyncio
import gc
from contextvars import Context
from itertools import count
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.resources.placement_group import room_for
from aiogpu.engines.inline.async_resident import AsyncResident
from aiogpu.engines.inline.call_waits import CallWaits
from aiogpu.engines.inline.creation import Creation
from aiogpu.engines.inline.invocation import Invocation
from aiogpu.engines.inline.job import id_of_caller
from aiogpu.engines.inline.resident import Resident
from aiogpu.errors import (
    ActorDiedError,
    NodeClosedError,
    NodeError,
)
from aiogpu.runtime.actors.actor import Actor, ActorState, died
from aiogpu.runtime.actors.registry import FIRST_CALL, Register
from aiogpu.runtime.pending_tasks import Call
from aiogpu.runtime.workers.death import describe_loss
from aiogpu.serialization.serializer import dump_whole
from aiogpu.wire.messages import ASYNC, THREADED

if TYPE_CHECKING:
    from aiogpu.client.function_spec import Site
    from aiogpu.client.interface import Receiver
    from aiogpu.core.resources.ledger import Lease
    from aiogpu.engines.base import Room
    from aiogpu.engines.inline.node import InlineNode
    from aiogpu.engines.inline.runner import Runner

FIRST_WORKER: Final = 1000
"""Number of the first of them in `status()`: tasks never lie as deep as that."""


class Residents(Register):
    """The actors of one node; see `ActorsPort`.

    Attributes:
        runner: carries what they start, on the program's loop.
        waits: who waits for their calls.
    """

    def __init__(self, node: InlineNode, runner: Runner) -> None:
        super().__init__(runner.loop)
        self.runner = runner
        self.waits = CallWaits(node, self)
        self._node = node
        self._living: dict[int, Resident] = {}
        self._with_calls: dict[Resident, None] = {}
        self._new_worker = count(FIRST_WORKER).__next__
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __repr__(self) -> str:
        return f"<Residents {len(self._living)}>"

    @property
    def are_there(self) -> bool:
        """True if there is any that has not ended."""
        return bool(self._living)

    def living(self) -> list[Resident]:
        """Those that have not ended, in the order in which they were wanted."""
        return list(self._living.values())

    def life(self, actor: int) -> Resident | None:
        """That of an actor which has not ended."""
        return self._living.get(actor)

    def create(
        self,
        site: Site,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
    ) -> Actor:
        """Make an actor; see `ActorsPort.create`.

        Raises:
            NodeError: it would need threads, or the node is being shut down.
        """
        _refuse_threads(site)
        refusal = self._node.refusal(Call(site, payload, None), None)
        if get_if_exists and key is not None and (found := self.find(key)):
            return found
        self.check_name(key)
        actor = Actor(site, self, key)
        self.name(actor)
        if site.spec.is_detached:
            actor.holders += 1  # the node's own, until it is killed
        self._make(actor, payload, site.spec.max_retries)
        if refusal is not None:
            actor.fail(refusal)
            self._living[actor.id].kill()
        return actor

    def _make(self, actor: Actor, payload: bytes, restarts_left: int) -> None:
        node, site = self._node, actor.site
        record = node.new_record(site)
        if actor.id:
            record.id = TaskId(actor.id)
        actor.id, actor.is_killed = record.id, False
        kind = AsyncResident if site.actor and site.actor.mode == ASYNC else Resident
        worker = WorkerId(self._new_worker())
        resident = kind(actor, self, worker, restarts_left)
        resident.creation = Creation(
            record,
            Call(site, payload, actor),
            self.runner,
            is_urgent=True,
            resident=resident,
        )
        self.add(actor, 0)
        self._living[actor.id] = resident
        self._is_empty.clear()
        self.runner.add(resident.creation)
        node.wake()

    def known(self, actor: int) -> Actor:
        """An actor that lives, or to which somebody has a handle.

        Raises:
            ActorDiedError: nobody has one any more.
        """
        found = self.get(actor)
        if found is None:
            raise self.unknown(actor)
        return found

    def room(self, actor: int) -> Room:
        """See `ActorsPort.room`."""
        site = self.known(actor).site
        assert site.actor is not None, site
        request = site.spec.shape.request
        room = room_for(self._node.ledger, request, not site.actor.keeps_cpus)
        return room, str(request)

    def tell_room(self, actor: int, receiver: Receiver) -> None:
        """See `ActorsPort.tell_room`."""
        receiver.receive(dump_whole(self.room(actor)))

    # Calls.

    def note_calls(self, resident: Resident) -> None:
        """One has calls that may run now."""
        self._with_calls[resident] = None
        self._node.wake()

    def next_call(self) -> Invocation | None:
        """The call whose turn it is, None without one."""
        while self._with_calls:
            resident = next(iter(self._with_calls))
            del self._with_calls[resident]
            call = resident.next_call()
            if call is not None:
                return call
        return None

    def cancel(self, actor: int, number: int) -> None:
        """Nobody wants a call's answer any more."""
        found = self._actors.get(actor)
        if found is None:
            return
        self.waits.end(number)
        resident = self._living.get(actor)
        if found.cancel(number) and resident is not None:
            resident.drop(number)
        found.look_if_idle()

    def demand(self, actor: int, number: int, limit: int) -> None:
        """Let a call that is a stream yield so many items in all."""
        found = self.get(actor)
        if found is not None:
            found.demand(number, limit)

    def demand_call(self, number: int, limit: int) -> None:
        """The same, where it is not said of which actor."""
        found = self.called_by(number)
        if found is not None:
            found.demand(number, limit)

    def cancel_call(self, number: int) -> None:
        """The same where the actor is not known."""
        actor = self.called_by(number)
        if actor is not None:
            self.cancel(actor.id, number)

    def called_by(self, number: int) -> Actor | None:
        """The living actor that has this call before it."""
        if number < FIRST_CALL:
            return None
        residents = self._living.values()
        actors = (one.actor for one in residents if number in one.actor.calls)
        return next(actors, None)

    # Their ends.

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End an actor at once, or have it made anew if it may be."""
        found, resident = self._actors.get(actor), self._living.get(actor)
        if found is None or resident is None or found.state is ActorState.DEAD:
            return
        if no_restart:
            found.die(ActorDiedError(f"{found.name} was killed.", found.name))
            resident.kill()
        elif resident.peer is not None and found.state is ActorState.ALIVE:
            self._restart(found, resident)

    def _restart(self, actor: Actor, resident: Resident) -> None:
        lost = actor.lose(resident.begun)
        actor.is_killed = True
        if not resident.restarts_left:
            actor.fail(ActorDiedError(f"{actor.name} was killed.", actor.name))
        is_restarting = actor.state is not ActorState.DEAD
        for receiver in lost:
            receiver.fail(describe_loss(actor.name, None, is_restarting))
        resident.kill()

    def on_gone(self, resident: Resident) -> None:
        """Nothing is left of an actor's life; another one may follow."""
        actor = resident.actor
        del self._living[actor.id]
        self._with_calls.pop(resident, None)
        if actor.state is ActorState.LEAVING:
            actor.receive(b"")
        if actor.state is ActorState.DEAD:
            actor.note_gone()
            self.forget(actor)
        else:
            left, payload = resident.restarts_left, resident.creation.call.payload
            self._make(actor, payload, left - (left > 0))
            actor.look_if_idle()
        if not self._living:
            self._is_empty.set()

    def give_back(self, lease: Lease) -> None:
        """An actor holds no longer what it held."""
        self._node.ledger.give_back(lease)
        self._node.wake()

    def collect_soon(self) -> None:
        """Have what refers to itself let go, so that its `__del__` is called."""
        self.runner.loop.call_soon(gc.collect, context=Context())

    def terminate(self, actor: int) -> None:
        """Have an actor end after what it was sent, whoever still holds a handle."""
        found = self._actors.get(actor)
        if found is not None:
            found.is_ending = True
            found.look_if_idle()

    def caller_here(self) -> int:
        """Tell the callers of this process apart."""
        return id_of_caller()

    def on_leaving(self, actor: Actor) -> None:
        """An actor was told to end."""
        self.free_name(actor)

    def on_idle(self, actor: Actor) -> None:
        """Nobody can call an actor any more, and all its calls were answered."""
        if actor.state is ActorState.PENDING:
            # It waits to be made, for nobody.
            actor.die(died(actor.name, actor.why_idle))
            self._living[actor.id].kill()
        else:
            actor.leave(actor.why_idle)

    def on_dead(self, actor: Actor) -> None:
        """An actor is dead."""
        self.free_name(actor)
        self.forget(actor)

    def close_down(self) -> None:
        """End all in an orderly way; nobody gets an answer any more."""
        for resident in self.living():
            actor = resident.actor
            actor.fail(
                NodeClosedError(
                    f"the node was shut down before {actor.name} had ended."
                )
            )
            resident.close_down(self._node.cancel_grace)

    def hasten(self) -> None:
        """Leave those behind that would take their time."""
        for resident in self.living():
            resident.hasten()

    async def closed(self) -> None:
        """Wait until nothing is left of any."""
        await self._is_empty.wait()


def _refuse_threads(site: Site) -> None:
    if site.actor is not None and site.actor.mode == THREADED:
        raise NodeError(
            f"{site.spec.name} asks for plain methods that run at once, by "
            f"max_concurrency or concurrency_groups. A node of init(address='inline') "
            f"runs all code in one thread: leave these out, make the methods "
            f"`async def`, or open a node with address='local'."
        )
