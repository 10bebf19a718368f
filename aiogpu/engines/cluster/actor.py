"""One actor of a cluster: how it is called, and how its begin and its end are heard.

Ray tells of neither by itself. Whether the constructor has returned says a first call;
that the process has ended, a call that fails.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from aiogpu.engines import ray
from aiogpu.engines.cluster.calls import Live
from aiogpu.engines.cluster.failure import failed_as
from aiogpu.engines.cluster.payload import Carried
from aiogpu.engines.cluster.streams import Inflow, ahead_at_ray
from aiogpu.errors import MisuseError
from aiogpu.runtime.actor_end import not_made
from aiogpu.wire.acting import ASYNC, DEFAULT_GROUP
from aiogpu.wire.outgoing import attach
from aiogpu.wire.payload import dump_whole

if TYPE_CHECKING:
    from aiogpu.engines.cluster.engine import RayEngine
    from aiogpu.engines.cluster.shared import Shared
    from aiogpu.runtime.call import Receiver, Site
    from aiogpu.wire.messages import Failed

NONE: Final = dump_whole(None)
"""The payload of None."""
AGAIN: Final = 0.05
"""Seconds between two looks at whether an actor has ended that was told to."""
SELDOM: Final = 0.5
"""The same for one that was not."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class ClusterActor:
    """One actor; see `ActorPort`.

    Attributes:
        id: its number, the same in all processes.
        site: its class.
        handle: Ray's own.
        engine: carries its calls.
        is_made_here: whether it ends with this program at the latest.
        is_ending: whether this process has told it to end.
        is_soft: whether its methods interleave. Only then a call can be stopped: Ray
            2.60 loses an actor's order where a call of a plain method is cancelled,
            and the actor answers nothing any more.
        why_failed: why its constructor did not return, once that is known.
        needs: the values that its constructor is given, until that has returned.
    """

    id: int
    site: Site
    handle: Any
    engine: RayEngine
    is_made_here: bool = False
    is_ending: bool = False
    why_failed: Failed | None = None
    needs: tuple[Shared, ...] = ()
    is_soft: bool = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.handle, Nobody):
            self.why_failed = self.handle.why
        self.is_soft = hasattr(self.handle, "interleaves")

    def __repr__(self) -> str:
        return f"<ClusterActor {self.site.spec.name} {self.id}>"

    def pass_on(self) -> None:
        """A handle to it is being pickled: Ray's goes along.

        Raises:
            MisuseError: what is pickled is no call, and no result.
        """
        if not attach(Carried(self.id, self.handle)):
            raise MisuseError(
                f"on a Ray cluster the handle of {self.site.spec.name} can only be "
                f"pickled as a part of what a task or an actor is given, or of what it "
                f"returns. Give it as an argument."
            )

    def _live(self, receiver: Receiver) -> Live:
        spec = self.site.spec
        live = Live(spec.name, receiver, self.engine.loop.time(), is_of_actor=True)
        live.within = spec.shape.request.gang
        return live

    def call(self, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method; gives the call's number."""
        engine, terms = self.engine, self.site.actor
        assert terms is not None, self
        live = self._live(receiver)
        live.goes_on, live.knows = not self.is_soft, self._knows
        number = engine.calls.begin(live)
        if self.why_failed is not None:
            engine.refuse(number, self.why_failed)
            return number
        engine.send(number, payload, partial(self._send, number, method))
        return number

    def _send(self, number: int, method: str, given: tuple[Any, ...]) -> None:
        calls, terms = self.engine.calls, self.site.actor
        live = calls.live.get(number)
        assert terms is not None, self
        if live is None:
            return
        options: dict[str, Any] = {}
        group = terms.groups.get(method, DEFAULT_GROUP)
        if group and terms.mode != ASYNC:
            options["concurrency_group"] = group
        window = _window_of(live)
        if window:
            options["num_returns"] = "streaming"
            options["_generator_backpressure_num_objects"] = ahead_at_ray(window)
            items = self.handle.pour.options(**options).remote(method, *given)
            Inflow(calls, number, live, items, window).begin()
            return
        returns = given[2] if len(given) > 2 else 0
        if returns > 1:
            options["num_returns"] = returns
        call = self.handle.call.options(**options) if options else self.handle.call
        made = call.remote(method, *given)
        calls.watch(number, made if returns > 1 else (made,))

    def await_ready(self, receiver: Receiver) -> None:
        """Tell it when the constructor has returned, or why it never will."""
        self._ask(receiver, self.handle.ready)

    def _ask(self, receiver: Receiver, method: Any) -> None:
        engine = self.engine
        live = self._live(receiver)
        number = engine.calls.begin(live)
        if self.why_failed is not None:
            engine.refuse(number, self.why_failed)
        else:
            live.told_as, live.knows = NONE, self._knows
            engine.calls.watch(number, (method.remote(),))

    def await_end(self, receiver: Receiver) -> None:
        """Tell it when the actor's process has ended."""
        if self.why_failed is not None:
            receiver.receive(NONE)
        else:
            self._ask(_Ended(self, receiver), self.handle.ready)

    def fail(self, failed: Failed) -> None:
        """Its constructor has failed: nobody need ask it, and its process may go."""
        self.why_failed = failed
        # After what it was sent already, which is told the same.
        self.handle.leave.remote()

    def _knows(self, error: BaseException) -> Failed | None:
        """Why the constructor never ran, if an argument of it is to blame.

        Ray tells so in words only, and to whoever calls, without the error itself.
        """
        if not isinstance(error, ray.ActorGone):
            return None
        if self.why_failed is None and self.needs:
            self.why_failed = self._failed_need()
            self.needs = ()
        return self.why_failed

    def _failed_need(self) -> Failed | None:
        name = self.site.spec.name
        for given in [one.ref for one in self.needs if one.ref is not None]:
            try:
                ray.fetched(given, 0)
            except ray.TimedOut:
                continue  # it is there, but elsewhere
            except Exception as error:  # noqa: BLE001 - whatever it has failed with
                return not_made(name, failed_as(f"an argument of {name}", error))
        return None


def _window_of(live: Live) -> int:
    """How far a stream's consumer lets it be ahead; 0 if it is no stream."""
    # What is carried along has a receiver of its own around it.
    receiver = getattr(live.receiver, "receiver", live.receiver)
    window = getattr(receiver, "window", None)
    return 0 if window is None else int(window.size)


class Nobody:
    """In place of Ray's handle, that of an actor for which there was no place.

    Attributes:
        why: what is told to whoever calls it.
    """

    ready = None

    def __init__(self, why: Failed) -> None:
        self._actor_id = secrets.token_bytes(16)
        self.why = why


class _Ended:
    """Asks an actor again and again, until it does not answer any more."""

    def __init__(self, actor: ClusterActor, receiver: Receiver) -> None:
        self._actor = actor
        self._receiver = receiver

    def receive(self, _payload: bytes) -> None:
        """It lives."""
        actor = self._actor
        again = partial(actor.await_end, self._receiver)
        actor.engine.loop.call_later(AGAIN if actor.is_ending else SELDOM, again)

    def reject(self, _failed: Failed) -> None:
        """Its constructor has failed."""
        self._receiver.receive(NONE)

    def fail(self, _error: Exception) -> None:
        """It has ended."""
        self._receiver.receive(NONE)


class Made:
    """Hears whether an actor's constructor has returned."""

    def __init__(self, actor: ClusterActor) -> None:
        self._actor = ref(actor)

    def receive(self, _payload: bytes) -> None:
        """It has."""
        actor = self._actor()
        if actor is not None:
            actor.needs = ()

    def reject(self, failed: Failed) -> None:
        """It has not."""
        actor = self._actor()
        if actor is not None:
            actor.fail(failed)

    def fail(self, _error: Exception) -> None:
        """Its process has ended first; whoever calls is told so by Ray."""
