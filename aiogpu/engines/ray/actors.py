"""The actors of a cluster, for a program or a task.

Ray counts the handles in all processes, and ends an actor with its last handle. Ray
does not report that a constructor has returned or that a process has ended. So a first
call waits for the constructor, and a failing call shows the end. Calls before the first
answer are held back, so that cancelled calls are never sent.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakValueDictionary, ref

from aiogpu.client.function_spec import FunctionSpec, placeholder_func
from aiogpu.core.scheduler.placement_groups import REMOVED
from aiogpu.engines.ray import actor_process, cluster, values
from aiogpu.engines.ray.cluster import exceptions
from aiogpu.engines.ray.errors import actor_death, outcome_of, window_of
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
from aiogpu.errors import ActorDiedError, MisuseError, NodeError
from aiogpu.runtime.actors.actor import died, leaving, name_taken, not_made
from aiogpu.runtime.callers.leases import removed
from aiogpu.serialization.exceptions import pack_own_error
from aiogpu.serialization.references import add_reference
from aiogpu.serialization.serializer import dump_whole, load_result
from aiogpu.wire.messages import ASYNC, DEFAULT_GROUP, THREADED, Failed

if TYPE_CHECKING:
    from aiogpu.client.interface import Receiver
    from aiogpu.core.model.request import PlacementGroupSpec

# One actor

LOOK_AGAIN: Final = 0.05
"""Seconds between two checks whether an actor has ended that was told to end."""
LOOK_SELDOM: Final = 0.5
"""The same for an actor that was not told to end."""
PROCESS_LOOK: Final = 0.005
"""Seconds between two checks whether a process exists."""
PROCESS_END: Final = 10.0
"""Seconds to wait for the end of a process that Ray reports as dead."""
NONE: Final = dump_whole(None)
"""The payload of None."""


class NoActor:
    """Replaces Ray's handle for an actor that cannot be placed.

    Attributes:
        failed: the failure of all its calls.
    """

    def __init__(self, failed: Failed) -> None:
        self._actor_id = secrets.token_bytes(16)
        self.failed = failed


@dataclass(slots=True, eq=False, weakref_slot=True)
class RayActor:
    """One actor; see `ActorPort`.

    Attributes:
        reference: Ray's handle, its class, and the terms of its calls.
        actors: all actors of this client.
        is_made_here: it ends with this program at the latest.
        end: why it takes no calls, as far as this process knows.
        is_leaving: it was told to end after the calls sent before.
        is_gone: it does not exist: its constructor has failed, or its placement or the
            cluster has gone.
        needs: values for its constructor, until the constructor has returned.
        place: its last known node and process.
    """

    reference: values.ActorReference
    actors: RayActors
    is_made_here: bool = False
    end: Failed | None = None
    is_leaving: bool = False
    is_gone: bool = False
    needs: tuple[values.SharedValue, ...] = ()
    place: actor_process.Place = ("", 0)
    _methods: dict[tuple[str, int, int], Callable[..., Any]] = field(
        default_factory=dict
    )
    _held: list[Callable[[], object]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.reference.handle, NoActor):
            self.lose(self.reference.handle.failed)

    def __repr__(self) -> str:
        return f"<RayActor {self.name} {self.id}>"

    @property
    def id(self) -> int:
        """The actor's number, the same in all processes."""
        return self.reference.id

    @property
    def func(self) -> FunctionSpec:
        """Its class, as far as this process knows it."""
        assert self.reference.func is not None, self
        return self.reference.func

    @property
    def name(self) -> str:
        """The name in errors."""
        return self.func.spec.name

    @property
    def _calls(self) -> Calls:
        """The calls of the client."""
        return self.actors.calls

    def holder(self) -> None:
        """Return None: Ray counts its own handles; see `ActorPort.holder`."""

    def pass_on(self, _hold: object) -> None:
        """Attach Ray's handle to the value that is being pickled.

        Raises:
            MisuseError: the value is neither part of a call nor of a result.
        """
        if not add_reference(self.reference):
            raise MisuseError(
                f"on a Ray cluster the handle of {self.name} can only be pickled as a "
                f"part of arguments or results of tasks and actors. Pass it as an "
                f"argument."
            )

    # Calls

    def call(self, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method; return the call's number."""
        calls = self._calls
        number = calls.begin(self._new_call(receiver))
        if self.end is not None:
            calls.end(number, self.end)
        else:
            send = partial(self._send, number, method)
            self._when_made(partial(calls.when_ready, number, payload, send))
        return number

    def _new_call(self, receiver: Receiver, **attributes: Any) -> PendingCall:
        self.actors.check_open()
        return PendingCall(
            self.name,
            receiver,
            self._calls.loop.time(),
            actor=self.id,
            group=self.func.spec.shape.request.placement_group,
            **{"explain": self.explain, **attributes},
        )

    def _when_made(self, do: Callable[[], object]) -> None:
        """Call `do` after all calls that are held back, or now.

        A call that is held back keeps the actor alive, by its `explain`.
        """
        # Plain code may end without a wait, so its calls are sent at once.
        if self._held is not None and asyncio._get_running_loop() is not None:
            self._held.append(do)
        else:
            do()

    def hold(self) -> None:
        """Hold calls back until the constructor has returned.

        The query for this does not keep the actor alive. The constructor still runs to
        its end, since Ray runs everything sent before.
        """
        self._held = []
        myself = ref(self)

        def explain(error: BaseException) -> Failed | None:
            actor = myself()
            return None if actor is None else actor.explain(error)

        receiver = _Answer(partial(_note_made, myself))
        self.ask(receiver, request=actor_request(self.func), explain=explain)

    def release(self) -> None:
        """Send the held-back calls: the constructor has returned or failed."""
        callbacks, self._held = self._held or (), None
        for do in callbacks:
            do()

    def _send(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        calls = self._calls
        call = calls.live.get(number)
        if call is None:
            return
        if self.is_gone and self.end is not None:
            calls.end(number, self.end)
            return
        window = window_of(call.receiver)
        returns = arguments[2] if len(arguments) > 2 else 0
        remote = self._methods.get((method, returns, window))
        if remote is None:
            remote = self._method(method, returns, window)
        is_async = self.reference.terms[0] == ASYNC
        if len(arguments) == 1:
            made = remote(actor_process.encode_call(method.encode(), arguments[0]))
        else:
            made = remote(actor_process.encode_call(method.encode()), *arguments)
        if window:
            Stream(calls, number, made, window, may_wait=not is_async)
            return
        # Ray 2.60 loses the order of an actor's calls if a waiting plain call is
        # cancelled: it hung after 30 pairs of calls, with the first of each cancelled
        # at once.
        call.goes_on = not is_async
        calls.watch(number, made if returns > 1 else (made,))

    def _method(self, method: str, returns: int, window: int) -> Callable[..., Any]:
        """Return Ray's remote function for a method, from a cache."""
        mode, _, groups = self.reference.terms
        options = stream_options(window) if window else {}
        if mode == THREADED:
            group = groups.get(method, DEFAULT_GROUP) or METHODS_GROUP
            options["concurrency_group"] = group
        if returns > 1:
            options["num_returns"] = returns
        called = self.reference.handle.stream if window else self.reference.handle.call
        remote: Callable[..., Any] = (
            called.options(**options) if options else called
        ).remote
        self._methods[method, returns, window] = remote
        return remote

    # Begin and end

    def await_ready(self, receiver: Receiver) -> None:
        """Settle a receiver when the constructor has returned or failed."""
        if self.end is not None:
            receiver.settle(self.end)
        else:
            self.ask(_Answer(partial(self._note_ready, receiver)))

    def _note_ready(self, receiver: Receiver, answer: Any) -> None:
        """Ask again if the query was lost with a process that Ray replaces."""
        if isinstance(answer, ActorDiedError) and answer.is_restarting:
            again = partial(self._ask_again, self.await_ready, receiver)
            self._calls.call_later(LOOK_AGAIN, again)
        elif isinstance(answer, Failed | Exception):
            receiver.settle(answer)
        else:
            self.place = answer
            receiver.settle(NONE)

    def await_loss(self, receiver: Receiver) -> int:
        """Settle a receiver when the process is lost; see `ActorPort.await_loss`.

        Ray does not report this, so the actor is asked for its process now and then.
        """
        calls = self._calls
        number = calls.begin(self._new_call(receiver, explain=None))
        if self.end is not None:
            calls.end(number, NONE)
        else:
            _look_for_loss(ref(self), calls, number, self.place)
        return number

    def await_end(self, receiver: Receiver) -> None:
        """Settle a receiver when the actor's process has ended."""
        if self.is_gone:
            receiver.settle(NONE)
        else:
            self.ask(_Answer(partial(self._note_end, receiver)))

    def ask(self, receiver: Receiver, **attributes: Any) -> None:
        """Query the actor's place; it answers once its constructor has returned."""
        call = self._new_call(receiver, goes_on=True, **attributes)
        self._calls.watch(
            self._calls.begin(call), (self.reference.handle.ready.remote(),)
        )

    def _note_end(self, receiver: Receiver, answer: Any) -> None:
        """Poll until the actor does not answer."""
        if isinstance(answer, Failed):  # its constructor has failed
            receiver.settle(NONE)
        elif not isinstance(answer, Exception):
            self.place = answer
            again = LOOK_AGAIN if self.end is not None else LOOK_SELDOM
            ask_again = partial(self._ask_again, self.await_end, receiver)
            self._calls.call_later(again, ask_again)
        elif isinstance(answer, ActorDiedError):
            if self.is_leaving:
                error = died(self.name, "its `async with` block was left.")
                self.end = pack_own_error(error)
            node, pid = self.place
            is_here = bool(node) and node == cluster.process_ids()[0]
            self._await_process(receiver, pid if is_here else 0, PROCESS_END)
        else:
            receiver.settle(answer)

    def _ask_again(self, ask: Callable[[Receiver], None], receiver: Receiver) -> None:
        try:
            ask(receiver)
        except NodeError as error:
            receiver.settle(error)

    def _await_process(self, receiver: Receiver, pid: int, seconds: float) -> None:
        """Wait for the end of its process, which Ray reports as dead."""
        if pid and seconds > 0 and os.path.exists(f"/proc/{pid}"):
            look = partial(self._await_process, receiver, pid, seconds - PROCESS_LOOK)
            self._calls.call_later(PROCESS_LOOK, look)
        else:
            receiver.settle(NONE)

    def kill(self, *, may_restart: bool) -> None:
        """End its process at once."""
        if self.is_gone:
            return
        if not may_restart:
            killed = ActorDiedError(f"{self.name} was killed.", self.name)
            self.end, self.is_leaving = pack_own_error(killed), False
        cluster.kill(self.reference.handle, no_restart=not may_restart)

    def leave(self) -> None:
        """End the actor after the calls sent before."""
        if self.is_gone:
            return
        if self.end is None:
            self.end, self.is_leaving = pack_own_error(leaving(self.name)), True
        self._when_made(self._leave)

    def _leave(self) -> None:
        mode, limits, _ = self.reference.terms
        leave = self.reference.handle.leave
        if mode == ASYNC:
            leave.remote(self._calls.sent_to(self.id))
        elif mode == THREADED:
            for group in limits:
                options = {"concurrency_group": group or METHODS_GROUP}
                leave.options(**options).remote(len(limits))
        else:
            leave.remote(1)

    def fail(self, failed: Failed) -> None:
        """Note that the constructor has failed; end the process."""
        self.lose(failed)
        self.release()
        # After the calls that were already sent, which fail in the same way.
        self._leave()

    def evict(self, error: Exception) -> None:
        """End the actor at once because its placement has gone; fail its calls."""
        self.lose(pack_own_error(actor_death(self.name, error)))
        cluster.kill(self.reference.handle)

    def lose(self, failed: Failed) -> None:
        """Note that the actor is gone, and why; Ray gets no further message."""
        self.end, self.is_gone, self.is_leaving = failed, True, False

    def explain(self, error: BaseException) -> Failed | None:
        """Return why the constructor never ran, if one of its arguments has failed.

        Ray reports this only as text, without the error itself.
        """
        if not isinstance(error, exceptions.RayActorError):
            return None
        needs, self.needs = self.needs, ()
        for given in [] if self.is_gone else [one.ref for one in needs if one.ref]:
            try:
                cluster.get(given, timeout=0)
            except exceptions.GetTimeoutError:
                continue  # it exists, but on another node
            except Exception as failure:  # noqa: BLE001 - any failure of the argument
                reason = outcome_of(f"an argument of {self.name}", failure)
                if isinstance(reason, Exception):
                    reason = pack_own_error(reason)
                self.lose(not_made(self.name, reason))
                break
        return self.end if self.is_gone else None


class _Answer(NamedTuple):
    """The receiver of a query to an actor: passes every outcome to `note`."""

    note: Callable[[Any], object]

    def settle(self, outcome: Any) -> None:
        """Pass on the actor's place, or the failure."""
        self.note(outcome)


def _note_made(actor: ref[RayActor], answer: Any) -> None:
    """Note whether an actor's constructor has returned."""
    made = actor()
    if made is None:
        return
    if isinstance(answer, Failed):
        made.fail(answer)
        return
    # If the process has ended first, Ray reports this to callers.
    if not isinstance(answer, Exception):
        made.place, made.needs = answer, ()
    made.release()


def _look_for_loss(
    known: ref[RayActor], calls: Calls, number: int, place: actor_process.Place
) -> None:
    """Ask an actor for its place until it answers with another place, or not at all."""
    actor = known()
    if actor is None or number not in calls.live:
        return

    def note(answer: Any) -> None:
        is_other = bool(place[1]) and answer != place
        if is_other or isinstance(answer, Failed | Exception):
            calls.end(number, NONE)
        else:
            again = partial(_look_for_loss, known, calls, number, answer)
            calls.call_later(LOOK_SELDOM, again, number)

    try:
        actor.ask(_Answer(note))
    except NodeError as error:
        calls.end(number, error)


# All actors


class RayActors:
    """All actors of a client; see `ActorsPort`.

    In this process Ray's handle is released with the last handle that refers to it.

    Attributes:
        calls: the calls of the client.
        check_open: raises `NodeError` if the cluster has gone.
    """

    def __init__(
        self,
        calls: Calls,
        groups: PlacementGroups,
        overview: Overview,
        check_open: Callable[[], None],
        admit: Callable[[FunctionSpec], None],
        make_engine: EngineFactory,
    ) -> None:
        self.calls = calls
        self.check_open = check_open
        self._groups = groups
        self._overview = overview
        self._admit = admit
        self._make_engine = make_engine
        self._actors: WeakValueDictionary[int, RayActor] = WeakValueDictionary()

    def create(
        self,
        func: FunctionSpec,
        payload: bytes,
        key: tuple[str, str] | None = None,
        get_if_exists: bool = False,
        public: int = 0,
    ) -> RayActor:
        """Create an actor, or find it by its name; see `ActorsPort.create`."""
        assert not public, "Ray chooses the ids"
        self._admit(func)
        assert func.actor is not None, func
        terms = terms_of(func.actor)
        if key is not None and (found := self.find(key)) is not None:
            if get_if_exists:
                return found
            raise name_taken(key[1])
        error = self._groups.refusal(func)
        if error is not None:
            failed = pack_own_error(actor_death(func.spec.name, error))
            return self._note(values.refer_to(NoActor(failed), terms), func)
        options = self._groups.add_strategy(
            actor_options(func, key), func.spec.shape.request
        )
        process: type = actor_process.PlainActorProcess
        if func.actor.mode == ASYNC:
            process = actor_process.AsyncActorProcess
        code = RemoteCode(func, self._make_engine)
        try:
            made = cluster.remote(process, options)
            handle = made.remote(code, *values.to_arguments(payload))
        except ValueError as error:
            if key is None:
                raise
            if get_if_exists and (found := self.find(key)) is not None:
                return found
            raise name_taken(key[1]) from error
        actor = self._note(values.refer_to(handle, terms), func)
        actor.is_made_here = not func.spec.is_detached
        actor.needs = getattr(payload, "needs", ())
        if key is not None:
            described = func.spec.name, func.actor.packed_interface(), terms
            cluster.store_bytes(f"{actor.id}", dump_whole(described))
        actor.hold()
        return actor

    def _note(self, reference: values.ActorReference, func: FunctionSpec) -> RayActor:
        known = None if reference.func is None else reference.func.actor
        if known is None or known.interface is None:
            reference.func = func  # it has more facts than a received handle
        actor = self._actors.get(reference.id)
        if actor is None:
            actor = self._actors[reference.id] = RayActor(reference, self)
        return actor

    def find(self, key: tuple[str, str]) -> RayActor | None:
        """Find a living actor by its name, by a query of the cluster."""
        namespace, name = key
        handle = cluster.find_actor(name, namespace)
        if handle is None:
            return None
        described = cluster.load_bytes(f"{values.number_of(handle)}")
        if described is None:
            return None  # an actor that aiogpu did not make
        class_name, interface, terms = load_result(described)
        func = placeholder_func(class_name, interface)
        return self._note(values.refer_to(handle, terms), func)

    def held(self, actor: int, name: str = "actor") -> RayActor:
        """Return an actor that this process holds; see `ActorsPort.held`.

        Another thread's loop may have made it, or its handle was just received.
        """
        known = self._actors.get(actor)
        if known is None:
            reference = values.known_actors.get(actor)
            if reference is None:
                raise ActorDiedError(f"{name} is dead: it has no handle left.", name)
            known = self._note(reference, placeholder_func(name))
        return known

    def tell_room(self, actor: int, receiver: Receiver) -> None:
        """Report the number of such actors that fit; see `ActorsPort.tell_room`."""
        request = self.held(actor).func.spec.shape.request
        receiver.settle(dump_whole((self._overview.room_for(request), str(request))))

    def demand(self, _actor: int, number: int, limit: int) -> None:
        """Set the number of items that a call's stream may yield in all."""
        self.calls.demand(number, limit)

    def cancel(self, _actor: int, number: int) -> None:
        """Cancel a call."""
        self.calls.cancel(number)

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End an actor's process at once, and the actor unless it may restart."""
        with suppress(NodeError):
            self.check_open()
            self.held(actor).kill(may_restart=not no_restart)

    def terminate(self, actor: int) -> None:
        """End the actor after the calls sent before."""
        with suppress(NodeError):
            self.check_open()
            self.held(actor).leave()

    def evict(self, group: PlacementGroupSpec) -> None:
        """End the actors of a placement group that was removed."""
        for actor in list(self._actors.values()):
            within = actor.func.spec.shape.request.placement_group
            if within is None or within.key != group.key or actor.is_gone:
                continue
            actor.evict(removed(group.name, actor.name, REMOVED))

    def lose(self, failed: Failed) -> None:
        """Note that the cluster has gone: fail all calls without a message to Ray."""
        for actor in self._actors.values():
            actor.lose(failed)

    def close(self) -> None:
        """End the actors that this program has made."""
        for actor in list(self._actors.values()):
            if actor.is_made_here and not actor.is_gone:
                cluster.kill(actor.reference.handle)
        self._actors.clear()
