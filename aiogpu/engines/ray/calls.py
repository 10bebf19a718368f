"""The calls of one client on the cluster, their streams, and the values that it shares.

Ray reports each object in one of its threads. Everything else here runs on the client's
event loop: a program's own, or that of a thread in a task.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast

from aiogpu.engines.ray import cluster, values
from aiogpu.engines.ray.cluster import Ref
from aiogpu.engines.ray.resources import step_of
from aiogpu.errors import InfeasibleError, TaskCancelledError
from aiogpu.runtime.pending_tasks import settle
from aiogpu.serialization.payload import Contents, Payload
from aiogpu.wire.messages import Failed

if TYPE_CHECKING:
    from aiogpu.client.interface import ItemReceiver, Outcome, Receiver, Shareable
    from aiogpu.core.model.request import BundleRef, PlacementGroupSpec, Request

_log: Final = logging.getLogger(__name__)


# Cancelling

ATTEMPTS: Final = 100
"""Queries to Ray until an answer arrives in Ray's own thread."""
LOST_AFTER: Final = 1.0
"""Seconds after which cancels that were handed to Ray's thread count as lost."""


class Canceller:
    """Cancels tasks at safe moments, without blocking an event loop.

    Ray 2.60 ends this process in two cases, both reproduced with Ray alone:

    - A task is cancelled between its reply and its completion (a failed check "it !=
      submissible_tasks_.end()"). Ray's core handles replies in its own thread, and
      releases its lock in between. Cancels of many short tasks soon hit this moment; a
      cancel in the same thread never does.
    - A task is cancelled right after it was sent, before its arguments exist. Ray
      handles submissions and queries in order. So the answer to a query shows that all
      earlier submissions were handled, and it arrives in Ray's own thread.

    So cancels run in Ray's thread, in the callback of a query.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[partial[None]] = []
        self._lost_at = 0.0
        self._marker: Ref | None = None

    def cancel(self, ref: Ref, *, force: bool = False) -> None:
        """Cancel a task soon, from any thread; see `cluster.cancel`."""
        request = partial(cluster.cancel, ref, force=force)
        with self._lock:
            self._requests.append(request)
        self._post(time.monotonic())

    def _post(self, now: float) -> None:
        """Hand all requests to Ray's thread, unless earlier ones are in flight."""
        with self._lock:
            if now < self._lost_at or not self._requests:
                return
            requests, self._requests = self._requests, []
            self._lost_at = now + LOST_AFTER
        run = partial(self._run, requests)
        for _ in range(ATTEMPTS):
            if self._run_in_rays_thread(run):
                return
        run()

    def _run_in_rays_thread(self, run: Callable[[], object]) -> bool:
        """Call `run` in the callback of a query.

        Returns False, without calling it, if the answer came at once in this thread.
        """
        if self._marker is None:
            self._marker = cluster.put(b"")
        here, asking = threading.get_ident(), [True]
        was_here = False

        def on_answer(_: object) -> None:
            nonlocal was_here
            if asking and threading.get_ident() == here:
                was_here = True
            else:
                run()

        cluster.add_done_callback(self._marker, on_answer)
        asking.clear()
        return not was_here

    def _run(self, requests: list[partial[None]]) -> None:
        for request in requests:
            if not cluster.is_connected():
                return  # the call would make Ray start a cluster
            try:
                request()
            except Exception:  # noqa: BLE001 - the other requests must not be lost
                _log.exception("! a cancel has failed")
        with self._lock:
            self._lost_at = 0.0
        # Later requests need a new query.
        self._post(time.monotonic())


# Calls

AWAITED: Final = 1000
"""Objects of one wait, at most."""
_numbers: Final = count(1)


@dataclass(slots=True, eq=False)
class PendingCall:
    """An unfinished task, method call or query.

    Attributes:
        name: name of the function or method.
        receiver: gets the outcome; None once it is not needed.
        since: the loop's time of the call.
        actor: number of the actor whose method it calls; 0 for a task.
        request: its resources; None if it holds none of its own.
        group: the placement group in which it, or its actor, runs.
        grace: for a task, seconds from its cancel to the end of its process.
        goes_on: it cannot be stopped, even if its answer is not needed.
        explain: returns the failure behind an error of Ray's, if it is known.
        refs: the objects that it produces; empty until it is sent, and for a stream.
        stream: takes its items once it is sent; None if it is no stream.
        found: received values, by the index of their object.
        timer: ends its timeout or its grace period.
        results: shared values for its results.
    """

    name: str
    receiver: Receiver | None
    since: float
    actor: int = 0
    request: Request | None = None
    group: PlacementGroupSpec | BundleRef | None = None
    grace: float = 0.0
    goes_on: bool = False
    explain: Callable[[Failed | Exception], Failed | Exception] | None = None
    refs: Sequence[Ref] = ()
    stream: Stream | None = None
    found: dict[int, Any] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    results: list[values.SharedValue] = field(default_factory=list)

    @property
    def requested(self) -> dict[str, float]:
        """Its resources by name."""
        return {} if self.request is None else self.request.as_numbers()

    @property
    def is_sent(self) -> bool:
        """True once it was sent to Ray."""
        return bool(self.refs) or self.stream is not None

    @property
    def produced(self) -> Ref:
        """What Ray cancels it by, once it is sent."""
        return self.refs[0] if self.stream is None else self.stream.generator

    @property
    def awaited(self) -> Sequence[Ref]:
        """The objects that Ray still has to produce for it."""
        return self.refs if self.stream is None else self.stream.awaited

    def add_result(self, value: values.SharedValue) -> None:
        """Make a shared value stand for one of its results, or for the whole."""
        self.results.append(value)
        if self.refs:
            value.set_ref(self.refs[max(value.part, 0)])

    def outcome_of(self, error: BaseException) -> Failed | Exception:
        """Translate an exception from Ray."""
        outcome = values.outcome_of(self.name, error, self.group)
        return outcome if self.explain is None else self.explain(outcome)

    def deliver(self) -> None:
        """Settle its receiver with the received values."""
        receiver = self.receiver
        if receiver is None:
            return
        received = [self.found[index] for index in range(len(self.refs))]
        for found in received:
            failure = (
                self.outcome_of(found) if isinstance(found, BaseException) else found
            )
            if isinstance(failure, Failed | Exception):
                settle(receiver, failure)
                return
        parts = tuple(map(values.from_stored, received, self.refs))
        if len(parts) == 1:
            receiver.settle(parts[0])
        else:
            receiver.settle(Payload.of(Contents(parts=parts), encoded=b""))

    def stop_timer(self) -> None:
        """Forget its timeout or grace."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Calls:
    """The calls of one client.

    Attributes:
        live: calls with a waiting receiver, by number.
        ending: calls that were stopped and have not ended.
        idle: set while no call is ending.
        loop: the event loop that delivers.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.live: dict[int, PendingCall] = {}
        self.ending: dict[int, PendingCall] = {}
        self.idle = asyncio.Event()
        self.loop = loop
        self.canceller = Canceller()

    def __repr__(self) -> str:
        return f"<Calls {len(self.live)} live, {len(self.ending)} ending>"

    # Sending

    def new_number(self) -> int:
        """Return a number for a call or a placement."""
        return next(_numbers)

    def begin(self, call: PendingCall) -> int:
        """Register a call; return its number."""
        number = self.new_number()
        self.live[number] = call
        return number

    def when_ready(
        self, number: int, payload: bytes, send: Callable[[tuple[Any, ...]], object]
    ) -> None:
        """Send a call as soon as Ray knows all values that it refers to.

        These are values of calls that are sent already, unless their handles were made
        before the cluster was joined.

        Args:
            number: number of the call.
            payload: its arguments.
            send: called with the arguments for Ray.
        """
        source = values.source_of(payload)
        needs = () if source is None else payload.needs  # type: ignore[attr-defined]
        for value in () if source is None else (*needs, *source.references):
            if value.is_pending:
                value.add_callback(partial(self.when_ready, number, payload, send))
                return
        for value in needs:
            if isinstance(value.content, Failed):
                self.end(number, value.content)
                return
        if number not in self.live:
            return
        try:
            send(values.to_arguments(payload))
        except ValueError as error:  # such as what no bundle of a placement can hold
            self.end(number, InfeasibleError(f"{self.live[number].name}: {error}"))

    def watch(self, number: int, made: Ref | list[Ref]) -> None:
        """Register the object or objects of a sent call, and wait for all of them."""
        refs = made if isinstance(made, list) else [made]
        call = self.live[number]
        call.refs = refs
        for value in call.results:
            value.set_ref(refs[max(value.part, 0)])
        for index, ref in enumerate(refs):
            cluster.add_done_callback(ref, partial(self._arrive, number, index))

    def awaited(self) -> list[Ref]:
        """Return the objects that Ray still has to produce for live calls.

        Called in any thread.
        """
        calls = list(self.live.values())[:AWAITED]
        return [ref for call in calls for ref in call.awaited][:AWAITED]

    def sent_to(self, actor: int) -> list[Ref]:
        """Return an object of each unfinished call that was sent to an actor."""
        return [
            call.refs[0] if call.stream is None else call.stream.generator.completed()
            for call in self.live.values()
            if call.actor == actor and call.is_sent
        ]

    # Delivering

    def _arrive(self, number: int, index: int, received: Any) -> None:
        """Receive an object's value, in one of Ray's threads."""
        with suppress(RuntimeError):  # the loop is closed: no receiver waits
            self.loop.call_soon_threadsafe(self._take, number, index, received)

    def _take(self, number: int, index: int, received: Any) -> None:
        call = self.live.get(number) or self.ending.get(number)
        if call is None:
            return
        call.found[index] = received
        if len(call.found) == len(call.refs):
            self.live.pop(number, None)
            call.stop_timer()
            self.note_ended(number)
            call.deliver()

    def note_ended(self, number: int) -> None:
        """Note that a stopped call has ended."""
        call = self.ending.pop(number, None)
        if call is not None:
            call.stop_timer()
        if not self.ending:
            self.idle.set()

    def demand(self, number: int, limit: int) -> None:
        """Set the number of items that a stream may yield in all."""
        call = self.live.get(number)
        if call is not None and call.stream is not None:
            call.stream.raise_limit(limit)

    # Ending

    def end(self, number: int, outcome: Outcome | None = None) -> PendingCall | None:
        """Remove a call that has ended, or whose outcome is not needed.

        Its receiver gets the given outcome if there is one, and nothing else.
        """
        call = self.live.pop(number, None)
        if call is None:
            return None
        call.stop_timer()
        receiver, call.receiver = call.receiver, None
        if outcome is None:
            outcome = TaskCancelledError(f"{call.name} was cancelled.")
        elif receiver is not None:
            settle(receiver, outcome)
        for value in call.results:
            value.set_outcome(outcome)
        return call

    def cancel(self, number: int, outcome: Outcome | None = None) -> None:
        """Stop a call, if it has not ended; see `end`.

        After its grace period, a task is killed.
        """
        call = self.end(number, outcome)
        if call is None or call.goes_on or not call.is_sent:
            return
        self.ending[number] = call
        self.idle.clear()
        if call.stream is not None:
            call.stream.stop()
        if call.stream is None or call.stream.may_be_cancelled:
            self.interrupt(number)

    def interrupt(self, number: int) -> None:
        """Let Ray interrupt a stopped call; kill a task after its grace period."""
        call = self.ending.get(number)
        if call is not None:
            self.canceller.cancel(call.produced)
            call.timer = self.loop.call_later(call.grace, self._kill, number)

    def _kill(self, number: int) -> None:
        call = self.ending.get(number)
        if call is not None and not call.actor:
            self.canceller.cancel(call.produced, force=True)

    def kill_ending(self) -> None:
        """Kill the processes of all tasks that were cancelled and have not stopped."""
        for number in list(self.ending):
            self._kill(number)


# Streams


class Stream:
    """Takes the items of a generator on the cluster to the consumer.

    Ray holds the generator as soon as `window` items wait. So items are taken from Ray
    only as the consumer takes them here; all of them once the stream is stopped.

    Attributes:
        generator: Ray's generator.
        may_be_cancelled: False for a plain method of an actor that has not begun, which
            must not be cancelled; see `RayActor`.
    """

    def __init__(
        self,
        calls: Calls,
        number: int,
        generator: Any,
        window: int,
        *,
        may_be_cancelled: bool = True,
    ) -> None:
        """Start to take items; `window` items may wait."""
        self._calls = calls
        self._number = number
        self._call = calls.live[number]
        self.generator = generator
        self.may_be_cancelled = may_be_cancelled
        self._item: Ref | None = None
        self._window = self._limit = window
        self._taken = 0
        self._is_stopped = False
        self._limit_changed = asyncio.Event()
        self._call.stream = self
        self._task = calls.loop.create_task(self._take_items())

    @property
    def awaited(self) -> Sequence[Ref]:
        """The objects that Ray must produce before there is another item."""
        return () if self.is_held else (self._item or self.generator,)

    @property
    def is_held(self) -> bool:
        """True if the consumer must take items before more are taken from Ray."""
        limit = self._limit - self._window + step_of(self._window)
        return self._taken >= limit and not self._is_stopped

    def raise_limit(self, limit: int) -> None:
        """Take up to `limit` items in all, since the consumer has taken some."""
        self._limit = max(self._limit, limit)
        self._limit_changed.set()

    def stop(self) -> None:
        """Drop the items that still come."""
        self._is_stopped = True
        self._limit_changed.set()

    async def _take_items(self) -> None:
        call, outcome = self._call, cast("Outcome", b"")
        try:
            async for ref in self.generator:
                self._item = ref
                if not self._is_stopped:
                    self._deliver(await ref, ref)
                self._item = None
                del ref
                if not self.may_be_cancelled:
                    self.may_be_cancelled = True
                    if self._is_stopped:
                        self._calls.interrupt(self._number)
                while self.is_held:
                    self._limit_changed.clear()
                    await self._limit_changed.wait()
        except asyncio.CancelledError:
            raise  # the loop is being closed
        except Exception as error:  # noqa: BLE001 - reported as the stream's outcome
            outcome = call.outcome_of(error)
        self._calls.end(self._number, outcome)
        self._calls.note_ended(self._number)

    def _deliver(self, item: Any, ref: Ref) -> None:
        receiver = self._call.receiver
        if receiver is not None:
            self._taken += 1
            items = (values.from_stored(item, ref),)
            cast("ItemReceiver", receiver).receive_items(items)


# Values


def call_here(call: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function: the code of a program is on the loop of its calls."""
    return call(*arguments)


def itself(receiver: Any) -> Any:
    """Return a receiver as it is."""
    return receiver


class RayValues:
    """The values that one client shares with other processes.

    It implements all parts of a `ValueStore`: borrowed values, shared values, and
    requests for values in other processes.
    """

    def __init__(
        self,
        calls: Calls,
        run: Callable[..., Any] = call_here,
        wrap: Callable[[Any], Receiver] = itself,
    ) -> None:
        """Begin without values.

        Args:
            calls: the calls of the client.
            run: calls a function on the loop of the calls.
            wrap: makes a receiver that may be settled on this loop.
        """
        self.loans = self.shares = self
        self._calls = calls
        self._run = run
        self._wrap = wrap

    def loan(self, identity: int) -> values.SharedValue:
        """Return the value of a handle while it is unpickled."""
        return values.find_value(identity)

    def share(self, handle: Shareable) -> values.SharedValue:
        """Return the shared value that stands for a handle in other processes."""
        value = self.promise()
        self.keep(value, handle)
        return value

    def promise(self) -> values.SharedValue:
        """Return the value of a task that is not submitted yet."""
        return values.SharedValue()

    def keep(self, promised: values.SharedValue, handle: Shareable) -> None:
        """Fulfil a promised value by the result of a handle's task."""
        promised.task, promised.part = handle.task_id, handle.part
        outcome: Outcome | BaseException | None = handle.raw
        if outcome is None and handle.cancelled():
            outcome = TaskCancelledError(f"{handle.task_name} was cancelled.")
        if outcome is None:
            outcome = handle.error
        if outcome is not None:
            self._run(promised.set_outcome, outcome)
        elif not self._run(self._add_result, handle.task_id, promised):
            # Its outcome is about to be delivered on the handle's event loop.
            cast("Any", handle).add_done_callback(partial(self.keep, promised))

    def _add_result(self, number: int, promised: values.SharedValue) -> bool:
        call = self._calls.live.get(number)
        if call is None:
            return False
        call.add_result(promised)
        return True

    def fail(self, promised: values.SharedValue, error: BaseException) -> None:
        """Fail a promised value, since its task is never submitted."""
        self._run(promised.set_outcome, error)

    def drop(self, _child: int, value: values.SharedValue) -> None:
        """Cancel one of several results; the others stay expected.

        Calls that were already sent with it still get it.
        """
        error = TaskCancelledError("one of several results was cancelled.")
        self._run(value.set_outcome, error)

    def put(self, payload: bytes) -> values.SharedValue:
        """Store a value."""
        return values.SharedValue(content=payload)

    def fetch(self, identity: int, receiver: Any) -> int:
        """Request a value; return the number of the request."""
        value = values.find_value(identity)
        number: int = self._run(self._fetch, value, self._wrap(receiver))
        return number

    def _fetch(self, value: values.SharedValue, receiver: Any) -> int:
        calls = self._calls
        call = PendingCall("a value", receiver, calls.loop.time(), goes_on=True)
        number = calls.begin(call)

        def fetch() -> None:
            if number not in calls.live:
                return
            if value.is_here:
                calls.end(number, value.content)
            else:
                calls.watch(number, value.content)

        if value.is_here or value.is_pending:
            # Later: the caller must first record the number.
            calls.loop.call_soon(value.add_callback, fetch)
        else:
            fetch()  # code that waits for it now gives its CPUs back
        return number

    def discard(self, identity: int) -> None:
        """Cancel the task that produces a discarded value."""
        value = values.find_value(identity)
        if value.ref is not None:
            self._calls.canceller.cancel(value.ref)

    def cancel(self, number: int) -> None:
        """Forget a request."""
        self._run(self._calls.cancel, number)
