"""The actors of a cluster, as a program or a task reaches them.

Ray counts who holds a handle, in whichever process, and ends an actor with the last.
Ray tells nobody that a constructor has returned or that a process has ended. So a first
call asks for the one, and a call that fails tells the other. Calls made before the
first answer are held back, so that those that are cancelled are never sent.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

from aiogpu.client.function_spec import Site, placeholder_site
from aiogpu.core.scheduler.placement_groups import REMOVED
from aiogpu.engines.ray import cluster
from aiogpu.engines.ray.actor_process import (
    MAX_IDS,
    SEND_LIMIT,
    AsyncActorProcess,
    Place,
    PlainActorProcess,
    encode_call,
    send_cancels,
)
from aiogpu.engines.ray.cluster import Ref, SerialThread, exceptions
from aiogpu.engines.ray.errors import actor_death, unpack_error, window_of
from aiogpu.engines.ray.options import (
    METHODS_GROUP,
    actor_options,
    actor_request,
    stream_options,
    terms_of,
)
from aiogpu.engines.ray.placement_groups import PlacementGroups
from aiogpu.engines.ray.status import Overview
from aiogpu.engines.ray.task_worker import EngineFactory, RemoteCode
from aiogpu.engines.ray.tasks import Calls, PendingCall, Stream
from aiogpu.engines.ray.values import (
    ActorReference,
    SharedValue,
    Terms,
    actor_handles,
    actor_terms,
    to_arguments,
)
from aiogpu.errors import ActorDiedError, MisuseError, NodeError
from aiogpu.runtime.actors.actor import ActorEnd, died, leaving, name_taken, not_made
from aiogpu.runtime.callers.leases import removed
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.serialization.references import add_reference
from aiogpu.serialization.serializer import dump_whole, load_result
from aiogpu.wire.messages import ASYNC, DEFAULT_GROUP, THREADED

if TYPE_CHECKING:
    from aiogpu.client.interface import Receiver
    from aiogpu.core.model.request import PlacementGroupSpec
    from aiogpu.wire.messages import Failed

# Cancelled calls


class CancelSender:
    """Tells actors' processes which calls are cancelled; see `CancelReceiver`.

    On the same machine it tells them at once. On others a task of Ray's does so, which
    runs beside the actor.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, str], list[bytes]] = {}
        self._thread: SerialThread | None = None
        self._remote_sender: Any = None

    def __repr__(self) -> str:
        return f"<CancelSender for {len(self._waiting)} actors>"

    def send(self, actor: str, call: Ref, node: str) -> None:
        """Tell an actor's process that a call is cancelled, now or soon.

        Args:
            actor: its id.
            call: an object that the call makes.
            node: where the process is; "" if that is not known.
        """
        call_id, key = call.task_id().binary(), (actor, node)
        with self._lock:
            if key not in self._waiting:
                with suppress(BlockingIOError):
                    if self.sends_here(actor, call_id, 0):
                        return
                if self._thread is None:
                    self._thread = SerialThread("aiogpu-cancel")
                self._thread.submit(partial(self._send_waiting, key))
            self._waiting.setdefault(key, []).append(call_id)

    def sends_here(self, actor: str, calls: bytes, seconds: float) -> bool:
        """Tell a process on this machine; False if it is on another one."""
        return send_cancels(actor, calls, seconds)

    def _send_waiting(self, key: tuple[str, str]) -> None:
        actor, node = key
        with self._lock:
            ids = self._waiting.pop(key)
        # The process hangs, or has gone with the cluster, which Ray calls an exit.
        gone = (OSError, exceptions.RayError, RuntimeError, ValueError, SystemExit)
        with suppress(*gone):
            for start in range(0, len(ids), MAX_IDS):
                calls = b"".join(ids[start : start + MAX_IDS])
                if not self.sends_here(actor, calls, SEND_LIMIT):
                    self._send_elsewhere(actor, node, calls)

    def _send_elsewhere(self, actor: str, node: str, calls: bytes) -> None:
        if not cluster.is_connected():
            return  # the question would have Ray start a cluster
        if self._remote_sender is None:
            # Without CPUs: it has a place although others have taken them all.
            options = {"num_cpus": 0, "max_retries": 0, "name": "aiogpu.cancel"}
            self._remote_sender = cluster.remote(send_cancels, options)
        here = cluster.process_ids()[0]
        for other in [node] if node else [one.id for one in cluster.nodes()]:
            if other != here:
                strategy = cluster.on_node(other)
                sender = self._remote_sender.options(scheduling_strategy=strategy)
                sender.remote(actor, calls)


_cancel_sender: Final = CancelSender()
"""That of this process."""

# One actor

NONE: Final = dump_whole(None)
"""The payload of None."""


class NoActor:
    """Stands for Ray's handle of an actor for which there is no place.

    Attributes:
        failed: what is told to whoever calls it.
    """

    def __init__(self, failed: Failed) -> None:
        self._actor_id = secrets.token_bytes(16)
        self.failed = failed


@dataclass(slots=True, eq=False, weakref_slot=True)
class RayActor:
    """One actor; see `ActorPort`.

    Attributes:
        id: its number, the same in all processes.
        site: its class.
        handle: Ray's.
        terms: how its calls are run.
        actors: all actors that this event loop reaches.
        is_made_here: whether it ends with this program at the latest.
        end: why it takes no calls, if this process has ended it.
        is_leaving: whether it was told to end after what it was sent.
        failed: why there is none: its constructor has failed, or its place has gone.
        needs: the values that its constructor is given, until that has returned.
        place: where it was when it was last asked.
    """

    id: int
    site: Site
    handle: Any
    terms: Terms
    actors: RayActors
    is_made_here: bool = False
    end: ActorEnd | None = None
    is_leaving: bool = False
    failed: Failed | None = None
    needs: tuple[SharedValue, ...] = ()
    place: Place = ("", 0)
    _methods: dict[tuple[str, int, int], Callable[..., Any]] = field(
        default_factory=dict
    )
    _held: list[Callable[[], object]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.handle, NoActor):
            self.failed = self.handle.failed

    def __repr__(self) -> str:
        return f"<RayActor {self.name} {self.id}>"

    @property
    def name(self) -> str:
        """How errors call it."""
        return self.site.spec.name

    @property
    def _calls(self) -> Calls:
        """The calls of the event loop."""
        return self.actors.calls

    def pass_on(self) -> None:
        """Have Ray's handle go along with a handle that is being pickled.

        Raises:
            MisuseError: what is pickled is no call, and no result.
        """
        if not add_reference(ActorReference(self.id, self.handle, self.terms)):
            raise MisuseError(
                f"on a Ray cluster the handle of {self.name} can only be pickled as a "
                f"part of what a task or an actor is given, or of what it returns. "
                f"Give it as an argument."
            )

    # Calls

    def call(self, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method; return the call's number."""
        calls = self._calls
        number = calls.begin(self._new_call(receiver))
        if self.failed is not None:
            calls.reject(number, self.failed)
        elif self.end is not None:
            calls.end(number, self.end.tell)
        else:
            send = partial(self._send, number, method)
            if self._held is None and type(payload) is bytes:
                send((payload,))
            else:
                self._when_made(partial(calls.when_ready, number, payload, send))
        return number

    def _new_call(self, receiver: Receiver, **attributes: Any) -> PendingCall:
        self.actors.check_open()
        return PendingCall(
            self.name,
            receiver,
            self._calls.loop.time(),
            actor=self.id,
            group=self.site.spec.shape.request.placement_group,
            **{"explain": self.explain, **attributes},
        )

    def _when_made(self, do: Callable[[], object]) -> None:
        """Do something after all that is held back, or now."""
        # Plain code's loop does not run while nobody waits.
        if self._held is not None and asyncio._get_running_loop() is not None:
            self._held.append(do)
            self.actors.starting.add(self)
        else:
            do()

    def hold(self) -> None:
        """Hold its calls back until it is made."""
        self._held = []
        receiver = _ConstructorReceiver(self)
        request, explain = actor_request(self.site), receiver.explain
        self._ask(receiver, request=request, explain=explain)

    def release(self) -> None:
        """Send what was held back: it was made, or never will be."""
        held, self._held = self._held or (), None
        for do in held:
            do()
        self.actors.starting.discard(self)

    def _send(self, number: int, method: str, given: tuple[Any, ...]) -> None:
        calls = self._calls
        call = calls.live.get(number)
        if call is None:
            return
        if self.failed is not None:
            calls.reject(number, self.failed)
            return
        window = window_of(call.receiver)
        returns = given[2] if len(given) > 2 else 0
        remote = self._methods.get((method, returns, window))
        if remote is None:
            remote = self._method(method, returns, window)
        if len(given) == 1:
            made = remote(encode_call(method.encode(), given[0]))
        else:
            made = remote(encode_call(method.encode()), *given)
        if window:
            stop = None if self.terms[0] == ASYNC else self._cancel
            Stream(calls, number, made, window, stop)
            return
        refs = made if returns > 1 else (made,)
        call.stop = partial(self._cancel, refs[0])
        calls.watch(number, refs)

    def _method(self, method: str, returns: int, window: int) -> Callable[..., Any]:
        """Return what has Ray call a method, which Ray would make anew each time."""
        mode, _, groups = self.terms
        options = stream_options(window) if window else {}
        if mode == THREADED:
            group = groups.get(method, DEFAULT_GROUP) or METHODS_GROUP
            options["concurrency_group"] = group
        if returns > 1:
            options["num_returns"] = returns
        called = self.handle.stream if window else self.handle.call
        remote: Callable[..., Any] = (
            called.options(**options) if options else called
        ).remote
        self._methods[method, returns, window] = remote
        return remote

    def _cancel(self, call: Any) -> None:
        """Have a call not begin, whose answer nobody wants; a coroutine is stopped."""
        if self.failed is None and (self.end is None or self.is_leaving):
            _cancel_sender.send(cluster.actor_id(self.handle), call, self.place[0])

    # Begin and end

    def await_ready(self, receiver: Receiver) -> None:
        """Tell a receiver when the constructor has returned, or why it never will."""
        if self.end is not None and not self.is_leaving:
            self.end.tell(receiver)
        else:
            self._ask(receiver, result=NONE)

    def await_end(self, receiver: Receiver) -> None:
        """Tell a receiver when the actor's process has ended."""
        if self.failed is not None:
            receiver.receive(NONE)
        else:
            self._ask(_EndReceiver(self, receiver))

    def _ask(self, receiver: Receiver, **attributes: Any) -> None:
        """Ask where it is, which it answers when its constructor has returned."""
        call = self._new_call(receiver, goes_on=True, **attributes)
        number = self._calls.begin(call)
        if self.failed is not None:
            self._calls.reject(number, self.failed)
        else:
            self._calls.watch(number, (self.handle.ready.remote(),))

    def kill(self, *, may_restart: bool) -> None:
        """End its process at once."""
        if self.failed is not None:
            return
        if not may_restart:
            killed = ActorDiedError(f"{self.name} was killed.", self.name)
            self.end, self.is_leaving = ActorEnd(killed), False
        cluster.kill(self.handle, may_restart=may_restart)

    def leave(self) -> None:
        """Have it end after what it was sent."""
        if self.failed is not None:
            return
        if self.end is None:
            self.end, self.is_leaving = ActorEnd(leaving(self.name)), True
        self._when_made(self._leave)

    def _leave(self) -> None:
        mode, limits, _ = self.terms
        leave = self.handle.leave
        if mode == ASYNC:
            leave.remote()
        elif mode == THREADED:
            for group in limits:
                options = {"concurrency_group": group or METHODS_GROUP}
                leave.options(**options).remote(len(limits))
        else:
            leave.remote(1)

    def fail(self, failed: Failed) -> None:
        """Note that the constructor has failed; end the process."""
        self.failed = failed
        self.release()
        # After what it was sent already, which is told the same.
        self._leave()

    def evict(self, error: Exception) -> None:
        """End it at once, since its place has gone, and tell callers why."""
        self.failed = pack_own_error(actor_death(self.name, error))
        cluster.kill(self.handle, may_restart=False)

    def explain(self, error: BaseException) -> Failed | None:
        """Return why the constructor never ran, if an argument of it is to blame.

        Ray tells so in words only, without the error itself.
        """
        if not isinstance(error, exceptions.RayActorError):
            return None
        needs, self.needs = self.needs, ()
        if self.failed is None:
            for given in [one.ref for one in needs if one.ref is not None]:
                try:
                    cluster.get(given, 0)
                except exceptions.GetTimeoutError:
                    continue  # it is there, but elsewhere
                except Exception as failure:  # noqa: BLE001 - whatever it failed with
                    reason = unpack_error(f"an argument of {self.name}", failure)
                    self.failed = not_made(self.name, reason)
                    break
        return self.failed


class _ConstructorReceiver:
    """Is told whether a constructor has returned; does not keep the actor alive.

    The constructor runs to its end all the same: Ray does what it was sent before.
    """

    def __init__(self, actor: RayActor) -> None:
        self._actor = ref(actor)

    def receive(self, place: Any) -> None:
        """Note that it has returned, in this place."""
        actor = self._actor()
        if actor is not None:
            actor.place, actor.needs = place, ()
            actor.release()

    def reject(self, failed: Failed) -> None:
        """Note that it has failed."""
        actor = self._actor()
        if actor is not None:
            actor.fail(failed)

    def fail(self, _error: Exception) -> None:
        """Note that the process has ended first; Ray tells so whoever calls."""
        actor = self._actor()
        if actor is not None:
            actor.release()

    def explain(self, error: BaseException) -> Failed | None:
        """Return what the actor knows of an error; see `PendingCall.explain`."""
        actor = self._actor()
        return None if actor is None else actor.explain(error)


LOOK_AGAIN: Final = 0.05
"""Seconds between two looks at whether an actor has ended that was told to."""
LOOK_SELDOM: Final = 0.5
"""The same for one that was not."""
PROCESS_LOOK: Final = 0.005
"""Seconds between two looks at whether a process is there."""
PROCESS_END: Final = 10.0
"""Seconds for the end of a process of which Ray says that it is dead."""


class _EndReceiver:
    """Asks an actor again and again, until it does not answer any more."""

    def __init__(self, actor: RayActor, receiver: Receiver) -> None:
        self._actor = actor
        self._receiver = receiver

    def receive(self, place: Any) -> None:
        """Ask again later: it lives, in this place."""
        self._actor.place = place
        again = LOOK_AGAIN if self._actor.end is not None else LOOK_SELDOM
        self._actor._calls.loop.call_later(again, self._ask)

    def _ask(self) -> None:
        try:
            self._actor.await_end(self._receiver)
        except NodeError as error:
            self._receiver.fail(error)

    def reject(self, _failed: Failed) -> None:
        """Tell that it has ended: its constructor has failed."""
        self._receiver.receive(NONE)

    def fail(self, error: Exception) -> None:
        """Wait for the end of its process, if Ray says that it is dead."""
        if not isinstance(error, ActorDiedError):
            self._receiver.fail(error)
            return
        actor = self._actor
        if actor.is_leaving:
            actor.end = ActorEnd(died(actor.name, "its `async with` block was left."))
        node, pid = actor.place
        is_here = bool(node) and node == cluster.process_ids()[0]
        self._look(pid if is_here else 0, PROCESS_END)

    def _look(self, pid: int, left: float) -> None:
        if pid and left > 0 and os.path.exists(f"/proc/{pid}"):
            loop = self._actor._calls.loop
            loop.call_later(PROCESS_LOOK, self._look, pid, left - PROCESS_LOOK)
        else:
            self._receiver.receive(NONE)


# All actors


def number_of(handle: Any) -> int:
    """Return the number of an actor, the same in all processes."""
    return int(cluster.actor_id(handle)[:15], 16)


_sites: Final[WeakKeyDictionary[Any, Site]] = WeakKeyDictionary()
"""The classes of the actors that any thread or loop of this process holds."""


class RayActors:
    """All actors that an event loop reaches; see `ActorsPort`.

    In this process Ray's handle goes with the handles that hold it, wherever these end.
    No loop need run for that: that of a plain task does not while nobody waits.

    Attributes:
        calls: of the event loop.
        check_open: raises `NodeError` if the cluster is not there any more.
        starting: actors whose calls are held back until they are made.
    """

    def __init__(
        self,
        calls: Calls,
        groups: PlacementGroups,
        overview: Overview,
        check_open: Callable[[], None],
        admit: Callable[[Site], None],
        make_engine: EngineFactory,
    ) -> None:
        self.calls = calls
        self.check_open = check_open
        self.starting: set[RayActor] = set()
        self._groups = groups
        self._overview = overview
        self._admit = admit
        self._make_engine = make_engine
        self._actors: WeakValueDictionary[int, RayActor] = WeakValueDictionary()

    def __repr__(self) -> str:
        return f"<RayActors {len(self._actors)}>"

    def create(
        self,
        site: Site,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
    ) -> RayActor:
        """Make an actor, or find the one of that name; see `ActorsPort.create`."""
        self._admit(site)
        assert site.actor is not None, site
        terms = terms_of(site.actor)
        if key is not None and (found := self.find(key)) is not None:
            if get_if_exists:
                return found
            raise name_taken(key[1])
        error = self._groups.refusal(site)
        if error is not None:
            failed = pack_own_error(actor_death(site.spec.name, error))
            return self._note(NoActor(failed), site, terms)
        options = self._groups.add_strategy(
            actor_options(site, key), site.spec.shape.request
        )
        is_async = site.actor.mode == ASYNC
        process = AsyncActorProcess if is_async else PlainActorProcess
        code = RemoteCode(site, self._make_engine)
        try:
            made = cluster.remote(process, options)
            handle = made.remote(code, *to_arguments(payload))
        except ValueError as error:
            if key is None:
                raise
            if get_if_exists and (found := self.find(key)) is not None:
                return found
            raise name_taken(key[1]) from error
        actor = self._note(handle, site, terms)
        actor.is_made_here = not site.spec.is_detached
        actor.needs = getattr(payload, "needs", ())
        if key is not None:
            described = site.spec.name, site.actor.packed_face(), terms
            cluster.store_bytes(f"{actor.id}", dump_whole(described))
        actor.hold()
        return actor

    def _note(self, handle: Any, site: Site, terms: Terms) -> RayActor:
        number = number_of(handle)
        handle = actor_handles.setdefault(number, handle)
        _sites.setdefault(handle, site)
        terms = actor_terms.setdefault(handle, terms)
        actor = self._actors.get(number)
        if actor is None:
            actor = self._actors[number] = RayActor(number, site, handle, terms, self)
        return actor

    def find(self, key: tuple[str, str]) -> RayActor | None:
        """Return the living actor of that name; asks the cluster."""
        namespace, name = key
        handle = cluster.find_actor(name, namespace)
        if handle is None:
            return None
        described = cluster.load_bytes(f"{number_of(handle)}")
        if described is None:
            return None  # it is no actor of aiogpu's
        class_name, face, terms = load_result(described)
        return self._note(handle, placeholder_site(class_name, face), terms)

    def held(self, actor: int, name: str = "actor") -> RayActor:
        """Return an actor of which a handle has come; see `ActorsPort.held`."""
        known = self._actors.get(actor)
        if known is not None:
            return known
        handle = actor_handles.get(actor)
        if handle is None:
            raise ActorDiedError(f"{name} is dead: nobody holds it any more.", name)
        return self._note(handle, placeholder_site(name), actor_terms[handle])

    def known(self, actor: int) -> RayActor:
        """Return an actor that this process holds, maybe another thread of it."""
        found = self._actors.get(actor)
        if found is None:
            handle = actor_handles[actor]
            found = self._note(handle, _sites[handle], actor_terms[handle])
        return found

    def tell_room(self, actor: int, receiver: Receiver) -> None:
        """Tell how many of its kind can live at once; see `ActorsPort.tell_room`."""
        request = self.known(actor).site.spec.shape.request
        receiver.receive(dump_whole((self._overview.room_for(request), str(request))))

    def demand(self, _actor: int, number: int, limit: int) -> None:
        """Let a call that is a stream yield so many items in all."""
        self.calls.demand(number, limit)

    def cancel(self, _actor: int, number: int) -> None:
        """Stop a call whose answer nobody wants."""
        self.calls.cancel(number)

    def release(self, _actor: int) -> None:
        """Do nothing: with the last of our handles Ray's own goes."""

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End its process at once, and the actor unless it may restart."""
        with suppress(NodeError):
            self.check_open()
            self.known(actor).kill(may_restart=not no_restart)

    def terminate(self, actor: int) -> None:
        """Have it end after what it was sent."""
        with suppress(NodeError):
            self.check_open()
            self.known(actor).leave()

    def evict(self, group: PlacementGroupSpec) -> None:
        """End the actors that live in a placement group, which was removed."""
        for actor in list(self._actors.values()):
            within = actor.site.spec.shape.request.placement_group
            if within is None or within.key != group.key or actor.failed is not None:
                continue
            actor.evict(removed(group.name, actor.name, REMOVED))

    def lose(self, failed: Failed) -> None:
        """Note that the cluster has gone; callers are told so, and Ray nothing."""
        for actor in self._actors.values():
            actor.failed = failed

    def close(self) -> None:
        """End the actors that this program has made."""
        for actor in list(self._actors.values()):
            if actor.is_made_here and actor.failed is None:
                cluster.kill(actor.handle, may_restart=False)
        self._actors.clear()
        self.starting.clear()
