"""One actor of a cluster: how it is called, and how its begin and its end are heard.

Ray tells of neither by itself. Whether the constructor has returned says a first call;
that the process has ended, a call that fails. Calls that are made before the first one
has its answer are held back here, so that those that are cancelled are never sent.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from aiogpu.engines import ray
from aiogpu.engines.cluster.actor_watch import NONE, Ended, Made
from aiogpu.engines.cluster.calls import Live
from aiogpu.engines.cluster.failure import failed_as
from aiogpu.engines.cluster.payload import Carried
from aiogpu.engines.cluster.spoken import spoken
from aiogpu.engines.cluster.streams import Inflow, ahead_at_ray
from aiogpu.engines.cluster.telling import telling
from aiogpu.engines.cluster.terms import CALLS
from aiogpu.engines.cluster.turns import Numbers
from aiogpu.errors import ActorDiedError, MisuseError
from aiogpu.runtime.actors.actor import ActorEnd, leaving, not_made
from aiogpu.serialization.references import add_reference
from aiogpu.wire.messages import ASYNC, DEFAULT_GROUP, THREADED

if TYPE_CHECKING:
    from aiogpu.client.function_spec import Site
    from aiogpu.client.interface import Receiver
    from aiogpu.core.model.request import Request
    from aiogpu.engines.cluster.actor_host import Place
    from aiogpu.engines.cluster.engine import RayEngine
    from aiogpu.engines.cluster.payload import Terms
    from aiogpu.engines.cluster.shared import Shared
    from aiogpu.wire.messages import Failed

_Way = tuple[bytes, Callable[..., Any]]
"""The name of a method, encoded, and what has Ray call it."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ClusterActor:
    """One actor; see `ActorPort`.

    Attributes:
        id: its number, the same in all processes.
        site: its class.
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
    site: Site
    handle: Any
    engine: RayEngine
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
        return self.site.spec.name

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
        live.within = self.site.spec.shape.request.placement_group
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
