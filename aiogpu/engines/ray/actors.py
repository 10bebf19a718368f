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
"""Seconds between two looks at whether an actor has ended that was told to."""
LOOK_SELDOM: Final = 0.5
"""The same for one that was not."""
PROCESS_LOOK: Final = 0.005
"""Seconds between two looks at whether a process is there."""
PROCESS_END: Final = 10.0
"""Seconds for the end of a process of which Ray says that it is dead."""
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
        reference: Ray's handle, its class, and how its calls are run.
        actors: all actors that this client reaches.
        is_made_here: whether it ends with this program at the latest.
        end: why it takes no calls, as far as this process knows.
        is_leaving: whether it was told to end after what it was sent.
        is_gone: whether there is none: its constructor has failed, or its place or the
            cluster has gone.
        needs: the values that its constructor is given, until that has returned.
        place: where it was when it was last asked.
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
        """Ray counts its own handles; see `ActorPort.holder`."""

    def pass_on(self, _hold: object) -> None:
        """Have Ray's handle go along with a handle that is being pickled.

        Raises:
            MisuseError: what is pickled is no call, and no result.
        """
        if not add_reference(self.reference):
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
        """Do something after all that is held back, or now.

        A call that is held back keeps the actor alive, by its `explain`.
        """
        # Plain code may end without a wait, and what it has sent goes on.
        if self._held is not None and asyncio._get_running_loop() is not None:
            self._held.append(do)
        else:
            do()

    def hold(self) -> None:
        """Hold its calls back until it is made.

        The question does not keep the actor alive. The constructor runs to its end all
        the same: Ray does what it was sent before.
        """
        self._held = []
        myself = ref(self)

        def explain(error: BaseException) -> Failed | None:
            actor = myself()
            return None if actor is None else actor.explain(error)

        receiver = _Answer(partial(_note_made, myself))
        self._ask(receiver, request=actor_request(self.func), explain=explain)

    def release(self) -> None:
        """Send what was held back: it was made, or never will be."""
        held, self._held = self._held or (), None
        for do in held:
            do()

    def _send(self, number: int, method: str, given: tuple[Any, ...]) -> None:
        calls = self._calls
        call = calls.live.get(number)
        if call is None:
            return
        if self.is_gone and self.end is not None:
            calls.end(number, self.end)
            return
        window = window_of(call.receiver)
        returns = given[2] if len(given) > 2 else 0
        remote = self._methods.get((method, returns, window))
        if remote is None:
            remote = self._method(method, returns, window)
        is_async = self.reference.terms[0] == ASYNC
        if len(given) == 1:
            made = remote(actor_process.encode_call(method.encode(), given[0]))
        else:
            made = remote(actor_process.encode_call(method.encode()), *given)
        if window:
            Stream(calls, number, made, window, may_wait=not is_async)
            return
        # Ray 2.60 loses the order of an actor's calls if it cancels a plain one that
        # waits: 30 pairs of calls, the first of each cancelled at once, had it hang.
        call.goes_on = not is_async
        calls.watch(number, made if returns > 1 else (made,))

    def _method(self, method: str, returns: int, window: int) -> Callable[..., Any]:
        """Return Ray's caller of a method; it is cached, as Ray would make another."""
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
        """Tell a receiver when the constructor has returned, or why it never will."""
        if self.end is not None and not self.is_leaving:
            receiver.settle(self.end)
        else:
            self._ask(receiver, result=NONE)

    def await_end(self, receiver: Receiver) -> None:
        """Tell a receiver when the actor's process has ended."""
        if self.is_gone:
            receiver.settle(NONE)
        else:
            self._ask(_Answer(partial(self._note_end, receiver)))

    def _ask(self, receiver: Receiver, **attributes: Any) -> None:
        """Ask where it is, which it answers when its constructor has returned."""
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
            self._calls.call_later(again, partial(self._ask_again, receiver))
        elif isinstance(answer, ActorDiedError):
            if self.is_leaving:
                error = died(self.name, "its `async with` block was left.")
                self.end = pack_own_error(error)
            node, pid = self.place
            is_here = bool(node) and node == cluster.process_ids()[0]
            self._await_process(receiver, pid if is_here else 0, PROCESS_END)
        else:
            receiver.settle(answer)

    def _ask_again(self, receiver: Receiver) -> None:
        try:
            self.await_end(receiver)
        except NodeError as error:
            receiver.settle(error)

    def _await_process(self, receiver: Receiver, pid: int, left: float) -> None:
        """Wait for the end of its process, of which Ray says that it is dead."""
        if pid and left > 0 and os.path.exists(f"/proc/{pid}"):
            look = partial(self._await_process, receiver, pid, left - PROCESS_LOOK)
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
        """Have it end after what it was sent."""
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
        # After what it was sent already, which is told the same.
        self._leave()

    def evict(self, error: Exception) -> None:
        """End the actor at once because its placement is gone; fail its calls."""
        self.lose(pack_own_error(actor_death(self.name, error)))
        cluster.kill(self.reference.handle)

    def lose(self, failed: Failed) -> None:
        """Note that the actor is gone, and why; Ray gets no further message."""
        self.end, self.is_gone, self.is_leaving = failed, True, False

    def explain(self, error: BaseException) -> Failed | None:
        """Return why the constructor never ran, if an argument of it is to blame.

        Ray tells so in words only, without the error itself.
        """
        if not isinstance(error, exceptions.RayActorError):
            return None
        needs, self.needs = self.needs, ()
        for given in [] if self.is_gone else [one.ref for one in needs if one.ref]:
            try:
                cluster.get(given, timeout=0)
            except exceptions.GetTimeoutError:
                continue  # it is there, but elsewhere
            except Exception as failure:  # noqa: BLE001 - whatever it failed with
                reason = outcome_of(f"an argument of {self.name}", failure)
                if isinstance(reason, Exception):
                    reason = pack_own_error(reason)
                self.lose(not_made(self.name, reason))
                break
        return self.end if self.is_gone else None


class _Answer(NamedTuple):
    """The receiver of a question to an actor: all that comes is noted alike."""

    note: Callable[[Any], object]

    def settle(self, outcome: Any) -> None:
        """Note the actor's place, or why it has none."""
        self.note(outcome)


def _note_made(actor: ref[RayActor], answer: Any) -> None:
    """Note whether an actor's constructor has returned."""
    made = actor()
    if made is None:
        return
    if isinstance(answer, Failed):
        made.fail(answer)
        return
    # If the process has ended first, Ray tells so whoever calls.
    if not isinstance(answer, Exception):
        made.place, made.needs = answer, ()
    made.release()


# All actors


class RayActors:
    """All actors that a client reaches; see `ActorsPort`.

    In this process Ray's handle goes with the handles that hold it, wherever these end.

    Attributes:
        calls: of the client.
        check_open: raises `NodeError` if the cluster is not there any more.
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
    ) -> RayActor:
        """Make an actor, or find the one of that name; see `ActorsPort.create`."""
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
            reference.func = func  # more than what a handle brings
        actor = self._actors.get(reference.id)
        if actor is None:
            actor = self._actors[reference.id] = RayActor(reference, self)
        return actor

    def find(self, key: tuple[str, str]) -> RayActor | None:
        """Return the living actor of that name; asks the cluster."""
        namespace, name = key
        handle = cluster.find_actor(name, namespace)
        if handle is None:
            return None
        described = cluster.load_bytes(f"{values.number_of(handle)}")
        if described is None:
            return None  # it is no actor of aiogpu's
        class_name, interface, terms = load_result(described)
        func = placeholder_func(class_name, interface)
        return self._note(values.refer_to(handle, terms), func)

    def held(self, actor: int, name: str = "actor") -> RayActor:
        """Return an actor that this process holds; see `ActorsPort.held`.

        Another thread's loop may have made it, or its handle has just come.
        """
        found = self._actors.get(actor)
        if found is None:
            reference = values.known_actors.get(actor)
            if reference is None:
                raise ActorDiedError(f"{name} is dead: nobody holds it any more.", name)
            found = self._note(reference, placeholder_func(name))
        return found

    def tell_room(self, actor: int, receiver: Receiver) -> None:
        """Tell how many of its kind can live at once; see `ActorsPort.tell_room`."""
        request = self.held(actor).func.spec.shape.request
        receiver.settle(dump_whole((self._overview.room_for(request), str(request))))

    def demand(self, _actor: int, number: int, limit: int) -> None:
        """Let a call that is a stream yield so many items in all."""
        self.calls.demand(number, limit)

    def cancel(self, _actor: int, number: int) -> None:
        """Cancel a call."""
        self.calls.cancel(number)

    def kill(self, actor: int, no_restart: bool = True) -> None:
        """End its process at once, and the actor unless it may restart."""
        with suppress(NodeError):
            self.check_open()
            self.held(actor).kill(may_restart=not no_restart)

    def terminate(self, actor: int) -> None:
        """Have it end after what it was sent."""
        with suppress(NodeError):
            self.check_open()
            self.held(actor).leave()

    def evict(self, group: PlacementGroupSpec) -> None:
        """End the actors that live in a placement group, which was removed."""
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
