"""The actors of a cluster, as a program or a task reaches them.

Ray counts who holds a handle, in whichever process, and ends an actor with the last.
In this process its own handle goes with the ties that hold it, wherever these end: no
loop need run for that, since that of a plain task does not while nobody waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from aiogpu.client.function_spec import Site
from aiogpu.core.scheduler.placement_groups import REMOVED
from aiogpu.engines import ray
from aiogpu.engines.cluster.actor import ClusterActor, Nobody
from aiogpu.engines.cluster.actor_host import Blueprint, PlainHost
from aiogpu.engines.cluster.failure import died_of
from aiogpu.engines.cluster.shared import met, terms_met
from aiogpu.engines.cluster.soft_host import SoftHost
from aiogpu.engines.cluster.terms import options_of_actor, request_of_actor, terms_of
from aiogpu.engines.placeholder_spec import site_of
from aiogpu.errors import ActorDiedError
from aiogpu.runtime.actors.actor import name_taken
from aiogpu.runtime.callers.leases import removed
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.serialization.serializer import dump_whole, load_result
from aiogpu.wire.messages import ASYNC

if TYPE_CHECKING:
    from aiogpu.client.interface import Receiver
    from aiogpu.core.model.request import PlacementGroupSpec
    from aiogpu.engines.cluster.engine import RayEngine
    from aiogpu.engines.cluster.payload import Terms
    from aiogpu.wire.messages import Failed

_sites: Final[WeakKeyDictionary[Any, Site]] = WeakKeyDictionary()
"""The classes of the actors that any thread or loop of this process holds."""


class ClusterActors:
    """All actors that this process can reach; see `ActorsPort`.

    Attributes:
        starting: those of which calls are held back until they are made.
    """

    def __init__(self, engine: RayEngine) -> None:
        self.starting: set[ClusterActor] = set()
        self._engine = engine
        self._actors: WeakValueDictionary[int, ClusterActor] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<ClusterActors {len(self._actors)}>"

    def create(
        self,
        site: Site,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
    ) -> ClusterActor:
        """Make an actor, or find the one of that name; see `ActorsPort.create`."""
        engine = self._engine
        if site.checked_by is not engine.mark:
            engine.admit(site)
        assert site.actor is not None, site
        terms = terms_of(site.actor)
        found = None if key is None else self.find(key)
        if found is not None and get_if_exists:
            return found
        if found is not None and key is not None:
            raise name_taken(key[1])
        try:
            refused = engine.placements.refusal(site)
            if refused is not None:
                nobody = Nobody(_death(site.spec.name, refused))
                return self._note(nobody, site, terms)
            handle = self._made(site, payload, key)
        except ValueError as error:
            if key is None:
                raise
            again = self.find(key)
            if again is not None and get_if_exists:
                return again
            raise name_taken(key[1]) from error
        actor = self._note(handle, site, terms)
        actor.is_made_here = not site.spec.is_detached
        actor.needs = getattr(payload, "needs", ())
        if key is not None:
            told = dump_whole((site.spec.name, site.actor.packed_face(), terms))
            ray.remember(f"{actor.id}", told)
        actor.hold(request_of_actor(site))
        return actor

    def _made(self, site: Site, payload: bytes, key: tuple[str, str] | None) -> Any:
        assert site.actor is not None, site
        request = site.spec.shape.request
        options = options_of_actor(site, key)
        options = self._engine.placements.placed(options, request)
        blueprint = Blueprint(site, self._engine.overview.kinds())
        host = SoftHost if site.actor.mode == ASYNC else PlainHost
        made = ray.actor(host, options)
        return made.remote(blueprint, *self._engine.given(payload))

    def _note(self, handle: Any, site: Site, terms: Terms) -> ClusterActor:
        identity = identity_of(handle)
        handle = met.setdefault(identity, handle)
        _sites.setdefault(handle, site)
        terms = terms_met.setdefault(handle, terms)
        actor = self._actors.get(identity)
        if actor is None:
            actor = ClusterActor(identity, site, handle, self._engine, terms)
            self._actors[identity] = actor
        return actor

    def find(self, key: tuple[str, str]) -> ClusterActor | None:
        """The living actor of that name; asks the cluster."""
        namespace, name = key
        handle = ray.find_actor(name, namespace)
        if handle is None:
            return None
        told = ray.recall(f"{identity_of(handle)}")
        if told is None:
            return None  # somebody else's than aiogpu's
        of_class, face, terms = load_result(told)
        return self._note(handle, site_of(of_class, face), terms)

    def held(self, actor: int, name: str = "actor") -> ClusterActor:
        """An actor of which a handle has come; see `ActorsPort.held`."""
        known = self._actors.get(actor)
        if known is not None:
            return known
        handle = met.get(actor)
        if handle is None:
            raise ActorDiedError(f"{name} is dead: nobody holds it any more.", name)
        return self._note(handle, site_of(name), terms_met[handle])

    def known(self, actor: int) -> ClusterActor:
        """An actor that somebody of this process holds, maybe another thread."""
        found = self._actors.get(actor)
        if found is None:
            handle = met[actor]
            found = self._note(handle, _sites[handle], terms_met[handle])
        return found

    def tell_room(self, actor: int, receiver: Receiver) -> None:
        """Tell how many of its kind can live at once; see `ActorsPort.tell_room`."""
        request = self.known(actor).site.spec.shape.request
        room = self._engine.overview.room_for(request), str(request)
        receiver.receive(dump_whole(room))

    def demand(self, _actor: int, number: int, limit: int) -> None:
        """Let a call that is a stream yield so many items in all."""
        self._engine.demand(number, limit)

    def cancel(self, _actor: int, number: int) -> None:
        """Nobody wants a call's answer any more."""
        self._engine.cancel(number)

    def release(self, _actor: int) -> None:
        """A handle has gone, and with the last of them Ray's own."""

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End its process at once, and the actor unless it may restart."""
        if self._engine.is_open:
            self.known(actor).kill(may_restart=not no_restart)

    def terminate(self, actor: int) -> None:
        """Have it end after what it was sent."""
        if self._engine.is_open:
            self.known(actor).leave()

    def evict(self, placement_group: PlacementGroupSpec) -> None:
        """A placement was removed: who lives in it ends."""
        for actor in list(self._actors.values()):
            within = actor.site.spec.shape.request.placement_group
            if within is None or within.key != placement_group.key or actor.why_failed:
                continue
            name = actor.site.spec.name
            actor.evict(_death(name, removed(placement_group.name, name, REMOVED)))

    def give_up(self, actor: int, error: Exception) -> None:
        """One waits for a place that the cluster does not have any more."""
        waiting = self.known(actor)
        waiting.evict(_death(waiting.name, error))

    def lose(self, failed: Failed) -> None:
        """The cluster has gone: who calls one of them is told so, and Ray nothing."""
        for actor in self._actors.values():
            actor.why_failed = failed

    def close(self) -> None:
        """The program leaves its cluster: what is its own ends."""
        for actor in list(self._actors.values()):
            if actor.is_made_here and actor.why_failed is None:
                ray.kill(actor.handle, may_restart=False)
        self._actors.clear()
        self.starting.clear()


def identity_of(handle: Any) -> int:
    """The number of an actor, the same in all processes."""
    return int(ray.id_of(handle)[:15], 16)


def _death(name: str, error: Exception) -> Failed:
    return pack_own_error(died_of(name, error))
