"""The actors of a cluster, as a program or a task reaches them.

Ray counts who holds a handle, in whichever process, and ends an actor with the last.
In this process its own handle goes with the ties that hold it, wherever these end: no
loop need run for that, since that of a plain task does not while nobody waits.

Ray tells by itself of neither begin nor end of an actor. Whether the constructor has
returned says a first call; that the process has ended, a call that fails. Calls that
are made before the first one has its answer are held back here, so that those that are
cancelled are never sent.

Ray begins the calls of an actor with coroutines as they come, which is nearly in their
order. So each has a number of its caller's, and waits for those before it (`Turns`). A
call goes in one piece of bytes, which Ray carries as it is (`spoken`): of anything else
it makes a pickle of its own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from secrets import randbits
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from aiogpu.client.function_spec import FunctionSpec, placeholder_func
from aiogpu.core.scheduler.placement_groups import REMOVED
from aiogpu.engines.ray import ray_api as ray
from aiogpu.engines.ray.cancellation import telling
from aiogpu.engines.ray.errors import died_of, failed_as
from aiogpu.engines.ray.options import (
    CALLS,
    Blueprint,
    options_of_actor,
    request_of_actor,
    terms_of,
)
from aiogpu.engines.ray.status import ClusterPort
from aiogpu.engines.ray.tasks import Inflow, Live, ahead_at_ray
from aiogpu.engines.ray.values import Carried, met, terms_met
from aiogpu.errors import ActorDiedError, MisuseError, NodeError
from aiogpu.runtime.actors.actor import ActorEnd, died, leaving, name_taken, not_made
from aiogpu.runtime.callers.leases import removed
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.serialization.references import add_reference
from aiogpu.serialization.serializer import dump_whole, load_result
from aiogpu.wire.messages import ASYNC, DEFAULT_GROUP, THREADED

if TYPE_CHECKING:
    from aiogpu.client.interface import Receiver
    from aiogpu.core.model.request import PlacementGroupSpec, Request
    from aiogpu.engines.ray.options import Place, RemoteCode
    from aiogpu.engines.ray.placement_groups import Placements
    from aiogpu.engines.ray.values import Shared, Terms
    from aiogpu.wire.messages import Failed


_HEAD: Final = struct.Struct(">QH")
"""The number among its caller's calls, and the bytes of the method's name."""


def spoken(number: int, method: bytes, payload: bytes = b"") -> bytes:
    """A call in one piece.

    Args:
        number: its caller's, see `turns`; 0 for none.
        method: the name, encoded.
        payload: the arguments, if they are a pickle and nothing else.
    """
    return b"".join((_HEAD.pack(number, len(method)), method, payload))


def understood(said: bytes) -> tuple[int, str, bytes]:
    """The number, the method and the payload of a call."""
    number, length = _HEAD.unpack_from(said)
    end = _HEAD.size + length
    return number, said[_HEAD.size : end].decode(), said[end:]


PATIENCE: Final = 0.25
"""Seconds in which a call comes that was sent before another that has come."""


CALLERS: Final = 10_000
"""Of so many callers it is known how far they are."""


_BITS: Final = 32


class Numbers:
    """The numbers of one caller's calls to one actor."""

    def __init__(self) -> None:
        self._next = count(randbits(31) << _BITS | 1)

    def __repr__(self) -> str:
        return f"<Numbers {self._next}>"

    def take(self) -> int:
        """The next one."""
        return next(self._next)


class Turns:
    """See above, in the actor's process; used on its loop alone."""

    def __init__(self) -> None:
        self._due: dict[int, int] = {}
        self._waiting: dict[int, dict[int, asyncio.Future[None]]] = {}

    def __repr__(self) -> str:
        return f"<Turns of {len(self._due)} callers>"

    async def come(self, number: int) -> None:
        """Wait until all calls have begun that its caller has sent before.

        `number` is the call's, 0 for one that waits for none.
        """
        if not number:
            return
        caller, place = number >> _BITS, number & ((1 << _BITS) - 1)
        while place > self._due.get(caller, 1):
            await self._wait(caller, place)
        self._pass(caller, place)

    def _pass(self, caller: int, place: int) -> None:
        """It begins: the next one may, unless that has begun already."""
        due = self._due.pop(caller, 1)
        self._due[caller] = due = max(due, place + 1)
        while len(self._due) > CALLERS:
            del self._due[next(iter(self._due))]
        waiting = self._waiting.get(caller)
        if waiting is not None and due in waiting and not waiting[due].done():
            waiting[due].set_result(None)

    async def _wait(self, caller: int, place: int) -> None:
        waiting = self._waiting.setdefault(caller, {})
        turn = waiting[place] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(PATIENCE):
                await turn
        except TimeoutError:
            # What is missing does not come: the first of those that have is next.
            first = min(waiting)
            self._due[caller] = max(self._due.get(caller, 1), first)
            if not waiting[first].done():
                waiting[first].set_result(None)
        finally:
            del waiting[place]
            if not waiting:
                self._waiting.pop(caller, None)


NONE: Final = dump_whole(None)
"""The payload of None."""


AGAIN: Final = 0.05
"""Seconds between two looks at whether an actor has ended that was told to."""


SELDOM: Final = 0.5
"""The same for one that was not."""


LOOKED: Final = 0.005
"""Seconds between two looks at whether a process is there."""


LEAVING: Final = 10.0
"""Seconds for a process to be gone of which Ray says that it is dead."""


class Made:
    """Hears whether an actor's constructor has returned; keeps nobody alive for that.

    The constructor runs to its end all the same: Ray does what it was sent before.
    """

    def __init__(self, actor: ClusterActor) -> None:
        self._actor = ref(actor)

    def receive(self, place: Any) -> None:
        """It has, in this place."""
        actor = self._actor()
        if actor is not None:
            actor.place, actor.needs = place, ()
            actor.begin()

    def reject(self, failed: Failed) -> None:
        """It has not."""
        actor = self._actor()
        if actor is not None:
            actor.fail(failed)

    def fail(self, _error: Exception) -> None:
        """Its process has ended first; whoever calls is told so by Ray."""
        actor = self._actor()
        if actor is not None:
            actor.begin()

    def knows(self, error: BaseException) -> Failed | None:
        """Return what its actor knows of an error of Ray's; see `Live.knows`."""
        actor = self._actor()
        return None if actor is None else actor.knows(error)


class Ended:
    """Asks an actor again and again, until it does not answer any more."""

    def __init__(self, actor: ClusterActor, receiver: Receiver) -> None:
        self._actor = actor
        self._receiver = receiver

    def receive(self, place: Any) -> None:
        """It lives, in this place."""
        self._actor.place = place
        again = AGAIN if self._actor.end is not None else SELDOM
        self._actor.engine.loop.call_later(again, self._ask)

    def _ask(self) -> None:
        try:
            self._actor.await_end(self._receiver)
        except NodeError as error:
            self._receiver.fail(error)

    def reject(self, _failed: Failed) -> None:
        """Its constructor has failed."""
        self._receiver.receive(NONE)

    def fail(self, error: Exception) -> None:
        """Ray says that it is dead: its process is gone in a moment."""
        if not isinstance(error, ActorDiedError):
            self._receiver.fail(error)
            return
        actor = self._actor
        if actor.is_left:
            actor.end = ActorEnd(died(actor.name, "its `async with` block was left."))
        node, pid = actor.place
        is_here = bool(node) and node == ray.facts()[0]
        tell = partial(self._receiver.receive, NONE)
        _when_gone(actor.engine.loop, pid if is_here else 0, tell, LEAVING)


def _when_gone(
    loop: asyncio.AbstractEventLoop, pid: int, tell: Callable[[], object], left: float
) -> None:
    """Tell when a process is there no more; Ray ends it, and need not be asked."""
    if pid and left > 0 and os.path.exists(f"/proc/{pid}"):
        loop.call_later(LOOKED, _when_gone, loop, pid, tell, left - LOOKED)
    else:
        tell()


_Way = tuple[bytes, Callable[..., Any]]
"""The name of a method, encoded, and what has Ray call it."""


class ActorEngine(ClusterPort, Protocol):
    """What actors ask of their engine."""

    code: RemoteCode
    placements: Placements

    @property
    def actors(self) -> ClusterActors:
        """All of them."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class ClusterActor:
    """One actor; see `ActorPort`.

    Attributes:
        id: its number, the same in all processes.
        func: its class.
        handle: Ray's own.
        engine: carries its calls.
        terms: how its calls are run.
        is_made_here: whether it ends with this program at the latest.
        end: why it is dead or takes no calls, as far as this process has ended it.
        why_failed: why its constructor did not return, once that is known.
        is_left: whether it was told to end after what it was sent.
        needs: the values that its constructor is given, until that has returned.
        place: where it was when it was last asked.
    """

    id: int
    func: FunctionSpec
    handle: Any
    engine: ActorEngine
    terms: Terms
    is_made_here: bool = False
    end: ActorEnd | None = None
    is_left: bool = False
    why_failed: Failed | None = None
    needs: tuple[Shared, ...] = ()
    place: Place = ("", 0)
    _numbers: Numbers = field(default_factory=Numbers)
    _ways: dict[tuple[str, int, int], _Way] = field(default_factory=dict)
    _held: list[Callable[[], object]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.handle, Nobody):
            self.why_failed = self.handle.why

    def __repr__(self) -> str:
        return f"<ClusterActor {self.name} {self.id}>"

    @property
    def name(self) -> str:
        """How errors call it."""
        return self.func.spec.name

    def pass_on(self) -> None:
        """A handle to it is being pickled: Ray's goes along.

        Raises:
            MisuseError: what is pickled is no call, and no result.
        """
        if not add_reference(Carried(self.id, self.handle, self.terms)):
            raise MisuseError(
                f"on a Ray cluster the handle of {self.name} can only be pickled as a "
                f"part of what a task or an actor is given, or of what it returns. "
                f"Give it as an argument."
            )

    def _live(self, receiver: Receiver) -> Live:
        live = Live(self.name, receiver, self.engine.loop.time(), actor=self.id)
        live.within = self.func.spec.shape.request.placement_group
        live.knows = self.knows
        return live

    def call(self, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method; gives the call's number."""
        engine = self.engine
        engine.check_open()
        live = self._live(receiver)
        number = engine.calls.begin(live)
        if self.why_failed is not None:
            engine.refuse(number, self.why_failed)
        elif self.end is not None:
            engine.calls.end(number, self.end.tell)
        else:
            send = partial(self._send, number, method)
            if self._held is None and type(payload) is bytes:
                send((payload,))
            else:
                self._when_ready(partial(engine.send, number, payload, send))
        return number

    def _when_ready(self, do: Callable[[], object]) -> None:
        """Do what is to be done after all that is held back, or now."""
        # Plain code's loop does not run while nobody waits.
        if self._held is not None and asyncio._get_running_loop() is not None:
            self._held.append(do)
            self.engine.actors.starting.add(self)
        else:
            do()

    def hold(self, request: Request) -> None:
        """It is being made: hold back its calls until that is done."""
        self._held = []
        made = Made(self)
        live = self._ask(made)
        live.told_as, live.request, live.knows = None, request, made.knows

    def begin(self) -> None:
        """It was made, or never will be: what was held back may go."""
        held, self._held = self._held or (), None
        for do in held:
            do()
        self.engine.actors.starting.discard(self)

    def _send(self, number: int, method: str, given: tuple[Any, ...]) -> None:
        calls, is_async = self.engine.calls, self.terms[0] == ASYNC
        live = calls.live.get(number)
        if live is None:
            return
        if self.why_failed is not None:
            self.engine.refuse(number, self.why_failed)
            return
        # Who waits for its arguments is waited for by nobody.
        place = self._numbers.take() if is_async and len(given) <= 3 else 0
        window = _window_of(live.receiver)
        returns = given[2] if len(given) > 2 else 0
        way = self._ways.get((method, returns, window))
        if way is None:
            way = self._find_way(method, returns, window)
        name, remote = way
        if len(given) == 1:
            made = remote(spoken(place, name, given[0]))
        else:
            made = remote(spoken(place, name), *given)
        if window:
            stop = None if is_async else self._cancel
            Inflow(calls, number, live, made, window).begin(stop)
            return
        refs = made if returns > 1 else (made,)
        live.stop = partial(self._cancel, refs[0])
        calls.watch(number, refs)

    def _find_way(self, method: str, returns: int, window: int) -> _Way:
        """Return what Ray is called by, which it would make anew each time."""
        mode, _, groups = self.terms
        options: dict[str, Any] = {}
        if mode == THREADED:
            options["concurrency_group"] = groups.get(method, DEFAULT_GROUP) or CALLS
        if window:
            options["num_returns"] = "streaming"
            options["_generator_backpressure_num_objects"] = ahead_at_ray(window)
        elif returns > 1:
            options["num_returns"] = returns
        called = self.handle.pour if window else self.handle.call
        remote = (called.options(**options) if options else called).remote
        way = self._ways[method, returns, window] = method.encode(), remote
        return way

    def _cancel(self, call: Any) -> None:
        """Nobody wants a call's answer any more: it does not begin, or is stopped."""
        if self.why_failed is None and (self.end is None or self.is_left):
            identity = ray.id_of(self.handle)
            telling.tell(identity, call, self.place[0])

    def kill(self, *, may_restart: bool) -> None:
        """End its process at once."""
        if self.why_failed is not None:
            return
        if not may_restart:
            killed = ActorDiedError(f"{self.name} was killed.", self.name)
            self.end, self.is_left = ActorEnd(killed), False
        ray.kill(self.handle, may_restart=may_restart)

    def evict(self, failed: Failed) -> None:
        """Its placement was removed: it ends at once, and calls are told why."""
        self.why_failed = failed
        ray.kill(self.handle, may_restart=False)

    def leave(self) -> None:
        """Have it end after what it was sent."""
        if self.why_failed is not None:
            return
        if self.end is None:
            self.end, self.is_left = ActorEnd(leaving(self.name)), True
        self._when_ready(self._leave)

    def _leave(self) -> None:
        mode, limits, _ = self.terms
        leave = self.handle.leave
        if mode == ASYNC:
            leave.remote(self._numbers.take())
        elif mode == THREADED:
            for group in limits:
                leave.options(concurrency_group=group or CALLS).remote(len(limits))
        else:
            leave.remote(1)

    def await_ready(self, receiver: Receiver) -> None:
        """Tell it when the constructor has returned, or why it never will."""
        if self.end is not None and not self.is_left:
            self.end.tell(receiver)
        else:
            self._ask(receiver)

    def await_end(self, receiver: Receiver) -> None:
        """Tell it when the actor's process has ended."""
        if self.why_failed is not None:
            receiver.receive(NONE)
        else:
            self._ask(Ended(self, receiver)).told_as = None

    def _ask(self, receiver: Receiver) -> Live:
        engine = self.engine
        engine.check_open()
        live = self._live(receiver)
        live.goes_on, live.told_as = True, NONE
        number = engine.calls.begin(live)
        if self.why_failed is not None:
            engine.refuse(number, self.why_failed)
        else:
            engine.calls.watch(number, (self.handle.ready.remote(),))
        return live

    def fail(self, failed: Failed) -> None:
        """Its constructor has failed: nobody need ask it, and its process may go."""
        self.why_failed = failed
        self.begin()
        # After what it was sent already, which is told the same.
        self._leave()

    def knows(self, error: BaseException) -> Failed | None:
        """Return why the constructor never ran, if an argument of it is to blame.

        Ray tells so in words only, and to whoever calls, without the error itself.
        """
        if not isinstance(error, ray.ActorGone):
            return None
        if self.why_failed is None and self.needs:
            self.why_failed = self._failed_need()
            self.needs = ()
        return self.why_failed

    def _failed_need(self) -> Failed | None:
        for given in [one.ref for one in self.needs if one.ref is not None]:
            try:
                ray.fetched(given, 0)
            except ray.TimedOut:
                continue  # it is there, but elsewhere
            except Exception as error:  # noqa: BLE001 - whatever it has failed with
                what = f"an argument of {self.name}"
                return not_made(self.name, failed_as(what, error))
        return None


def _window_of(receiver: Receiver | None) -> int:
    """How far a stream's consumer lets it be ahead; 0 if it is no stream."""
    # What is carried along has a receiver of its own around it.
    inner = getattr(receiver, "receiver", receiver)
    window = getattr(inner, "window", None)
    return 0 if window is None else int(window.size)


class Nobody:
    """In place of Ray's handle, that of an actor for which there was no place.

    Attributes:
        why: what is told to whoever calls it.
    """

    def __init__(self, why: Failed) -> None:
        self._actor_id = secrets.token_bytes(16)
        self.why = why


_funcs: Final[WeakKeyDictionary[Any, FunctionSpec]] = WeakKeyDictionary()
"""The classes of the actors that any thread or loop of this process holds."""


class ClusterActors:
    """All actors that this process can reach; see `ActorsPort`.

    Attributes:
        starting: those of which calls are held back until they are made.
    """

    def __init__(self, engine: ActorEngine) -> None:
        self.starting: set[ClusterActor] = set()
        self._engine = engine
        self._actors: WeakValueDictionary[int, ClusterActor] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<ClusterActors {len(self._actors)}>"

    def create(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
    ) -> ClusterActor:
        """Make an actor, or find the one of that name; see `ActorsPort.create`."""
        engine = self._engine
        if func.checked_by is not engine.mark:
            engine.admit(func)
        assert func.actor is not None, func
        terms = terms_of(func.actor)
        found = None if key is None else self.find(key)
        if found is not None and get_if_exists:
            return found
        if found is not None and key is not None:
            raise name_taken(key[1])
        try:
            refused = engine.placements.refusal(func)
            if refused is not None:
                nobody = Nobody(_death(func.spec.name, refused))
                return self._note(nobody, func, terms)
            handle = self._made(func, payload, key)
        except ValueError as error:
            if key is None:
                raise
            again = self.find(key)
            if again is not None and get_if_exists:
                return again
            raise name_taken(key[1]) from error
        actor = self._note(handle, func, terms)
        actor.is_made_here = not func.spec.is_detached
        actor.needs = getattr(payload, "needs", ())
        if key is not None:
            told = dump_whole((func.spec.name, func.actor.packed_interface(), terms))
            ray.remember(f"{actor.id}", told)
        actor.hold(request_of_actor(func))
        return actor

    def _made(
        self, func: FunctionSpec, payload: bytes, key: tuple[str, str] | None
    ) -> Any:
        assert func.actor is not None, func
        request = func.spec.shape.request
        options = options_of_actor(func, key)
        options = self._engine.placements.placed(options, request)
        blueprint = Blueprint(func, self._engine.overview.kinds())
        code = self._engine.code
        host = code.async_actor if func.actor.mode == ASYNC else code.plain_actor
        made = ray.actor(host, options)
        return made.remote(blueprint, *self._engine.given(payload))

    def _note(self, handle: Any, func: FunctionSpec, terms: Terms) -> ClusterActor:
        identity = identity_of(handle)
        handle = met.setdefault(identity, handle)
        _funcs.setdefault(handle, func)
        terms = terms_met.setdefault(handle, terms)
        actor = self._actors.get(identity)
        if actor is None:
            actor = ClusterActor(identity, func, handle, self._engine, terms)
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
        of_class, interface, terms = load_result(told)
        return self._note(handle, placeholder_func(of_class, interface), terms)

    def held(self, actor: int, name: str = "actor") -> ClusterActor:
        """An actor of which a handle has come; see `ActorsPort.held`."""
        known = self._actors.get(actor)
        if known is not None:
            return known
        handle = met.get(actor)
        if handle is None:
            raise ActorDiedError(f"{name} is dead: nobody holds it any more.", name)
        return self._note(handle, placeholder_func(name), terms_met[handle])

    def known(self, actor: int) -> ClusterActor:
        """An actor that somebody of this process holds, maybe another thread."""
        found = self._actors.get(actor)
        if found is None:
            handle = met[actor]
            found = self._note(handle, _funcs[handle], terms_met[handle])
        return found

    def tell_room(self, actor: int, receiver: Receiver) -> None:
        """Tell how many of its kind can live at once; see `ActorsPort.tell_room`."""
        request = self.known(actor).func.spec.shape.request
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
            within = actor.func.spec.shape.request.placement_group
            if within is None or within.key != placement_group.key or actor.why_failed:
                continue
            name = actor.func.spec.name
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
