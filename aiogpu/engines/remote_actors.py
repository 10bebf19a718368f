"""The actors of a node that this program has joined."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiogpu.engines.acquaintance import site_of
from aiogpu.engines.remote_link import Told
from aiogpu.errors import ActorNameError
from aiogpu.serialization.exceptions import unpack_failure
from aiogpu.serialization.serializer import NONE_PAYLOAD, load_result
from aiogpu.wire.messages import (
    AFTER_ALL,
    AGAIN,
    AT_ONCE,
    CAPACITY,
    ENDED,
    NUMBER_BITS,
    READY,
    Ask,
    ChildDemand,
    Find,
    Hold,
    Make,
    Release,
    Stop,
)

if TYPE_CHECKING:
    from aiogpu.engines.remote import RemoteEngine
    from aiogpu.runtime.call import Receiver, Site
    from aiogpu.wire.messages import Failed


class RemoteActor:
    """One actor, as its calls reach it from here; see `ActorPort`."""

    def __init__(self, engine: RemoteEngine, identity: int, site: Site) -> None:
        self.id = identity
        self.site = site
        self._engine = engine

    def __repr__(self) -> str:
        return f"<RemoteActor {self.site.spec.name} {self.id}>"

    def pass_on(self) -> None:
        """A handle to it is being pickled: its id says enough; see `ActorPort`."""

    def call(self, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method; gives the call's number."""
        self._engine.check_open()
        number = self._engine.expect(receiver)
        self._engine.send(Ask(0, number, self.id, method, payload))
        return number

    def await_ready(self, receiver: Receiver) -> None:
        """Tell it when the constructor has returned, or why it never will."""
        self.call(READY, NONE_PAYLOAD, receiver)

    def await_end(self, receiver: Receiver) -> None:
        """Tell it when the actor's process has ended."""
        self.call(ENDED, NONE_PAYLOAD, receiver)


class RemoteActors:
    """All actors that can be reached; see `ActorsPort`."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    def create(
        self,
        site: Site,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
    ) -> RemoteActor | asyncio.Future[RemoteActor]:
        """Make an actor, or find the one of that name; see `ActorsPort.create`.

        The node refuses a name that is taken, and the actor's calls tell.
        """
        from aiogpu.engines.admission import check_arguments

        engine = self._engine
        engine.check_open()
        if site.checked_by is not engine.mark:
            engine.admit(site)
        check_arguments(site, payload)
        if key is not None and get_if_exists:
            return engine.loop.create_task(self._find_or_make(site, payload, key))
        return self._make(site, payload, key or ("", ""), False)

    async def _find_or_make(
        self, site: Site, payload: bytes, key: tuple[str, str]
    ) -> RemoteActor:
        found = await self.find(key)
        if found is not None:
            return found
        self._engine.check_open()
        if site.checked_by is not self._engine.mark:
            self._engine.admit(site)
        return self._make(site, payload, key, True)

    def _make(
        self, site: Site, payload: bytes, key: tuple[str, str], get_if_exists: bool
    ) -> RemoteActor:
        engine = self._engine
        namespace, name = key
        identity = -((engine.client << NUMBER_BITS) + engine.new_number())
        engine.send(Make(identity, site.id, payload, name, namespace, get_if_exists))
        return RemoteActor(engine, identity, site)

    def find(self, key: tuple[str, str]) -> asyncio.Future[RemoteActor | None]:
        """The living actor of that name; asks the node."""
        engine = self._engine
        engine.check_open()
        namespace, name = key
        found: asyncio.Future[RemoteActor | None] = engine.loop.create_future()
        engine.send(Find(engine.expect(_Sought(engine, found)), name, namespace))
        return found

    def held(self, actor: int, name: str = "actor") -> RemoteActor:
        """An actor of which a handle has come; see `ActorsPort.held`."""
        self._engine.check_open()
        self._engine.send(Hold(actor))
        return RemoteActor(self._engine, actor, site_of(name))

    def tell_room(self, actor: int, receiver: Receiver) -> None:
        """Tell how many of its kind can live at once; see `ActorsPort.tell_room`."""
        number = self._engine.expect(receiver)
        self._engine.send(Ask(0, number, actor, CAPACITY, NONE_PAYLOAD))

    def demand(self, _actor: int, number: int, limit: int) -> None:
        """Let a call that is a stream yield so many items in all."""
        self._engine.send(ChildDemand(number, limit))

    def cancel(self, _actor: int, number: int) -> None:
        """Nobody wants a call's answer any more."""
        self._engine.cancel(number)

    def release(self, actor: int) -> None:
        """A handle has gone."""
        self._engine.send(Release(actor))

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End its process at once, and the actor unless it may restart."""
        self._engine.send(Stop(actor, AT_ONCE if no_restart else AGAIN))

    def terminate(self, actor: int) -> None:
        """Have it end after what it was sent."""
        self._engine.send(Stop(actor, AFTER_ALL))


class _Sought(Told):
    """Waits for the actor of a name; None is for nobody."""

    def __init__(
        self, engine: RemoteEngine, future: asyncio.Future[RemoteActor | None]
    ) -> None:
        super().__init__(future, self._read)
        self._engine = engine

    def _read(self, payload: bytes) -> RemoteActor:
        identity, of_class, face = load_result(payload)
        return RemoteActor(self._engine, identity, site_of(of_class, face))

    def reject(self, failed: Failed) -> None:
        """Nobody has the name, or the node cannot tell."""
        error = unpack_failure(failed, "the node")
        if not isinstance(error, ActorNameError):
            self.fail(error)
        elif not self.future.done():
            self.future.set_result(None)
