"""The calls of one client on the cluster, and the delivery of their outcomes.

Ray reports each object in one of its threads. Objects that have arrived before the
client's event loop runs are delivered together, so many outcomes wake the loop once. A
program's client uses the program's loop. The client of a task or an actor has its own
loop, and is used by all threads of the process under a lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, Final, cast

from aiogpu.engines.ray import cluster, values
from aiogpu.engines.ray.cluster import Ref
from aiogpu.engines.ray.errors import outcome_of
from aiogpu.engines.ray.options import step_of
from aiogpu.errors import TaskCancelledError
from aiogpu.observe.why import Why
from aiogpu.runtime.pending_tasks import settle
from aiogpu.serialization.exceptions import pack_own_error
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
        result: delivered instead of the objects; None for the objects themselves.
        explain: returns the failure behind an error of Ray's, if it is known.
        refs: the objects that it produces; empty until it is sent, and for a stream.
        stream: takes its items once it is sent; None if it is no stream.
        found: received values, by the index of their object.
        timer: ends its timeout or its grace period.
        results: shared values for its results.
        dependents: numbers of sent calls that need its results, with the part.
    """

    name: str
    receiver: Receiver | None
    since: float
    actor: int = 0
    request: Request | None = None
    group: PlacementGroupSpec | BundleRef | None = None
    grace: float = 0.0
    goes_on: bool = False
    result: bytes | None = None
    explain: Callable[[BaseException], Failed | None] | None = None
    refs: Sequence[Ref] = ()
    stream: Stream | None = None
    found: dict[int, Any] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    results: list[values.SharedValue] = field(default_factory=list)
    dependents: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_sent(self) -> bool:
        """True once it was sent to Ray."""
        return bool(self.refs) or self.stream is not None

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
        known = None if self.explain is None else self.explain(error)
        return known or outcome_of(self.name, error, self.group, self.receiver)

    def deliver(self) -> None:
        """Settle its receiver with the received values."""
        receiver = self.receiver
        if receiver is None:
            return
        received = [self.found[index] for index in range(len(self.refs))]
        for value in received:
            failure = (
                self.outcome_of(value) if isinstance(value, BaseException) else value
            )
            if isinstance(failure, Failed | Exception):
                settle(receiver, failure)
                return
        if self.result is not None:
            receiver.settle(self.result)
            return
        parts = tuple(map(values.from_stored, received, self.refs))
        if len(parts) == 1:
            receiver.settle(parts[0])
        else:
            receiver.settle(Payload.of(Contents(parts=parts), encoded=b""))


_numbers: Final = count(1)
AWAITED: Final = 1000
"""Objects of one wait, at most."""


class Calls:
    """The calls of one client.

    Attributes:
        live: calls with a waiting receiver, by number.
        ending: calls that were stopped and have not ended.
        on_delivered: called under the lock after a delivery; None for no call.
        loop: the event loop that delivers.
        lock: held by the loop during a delivery, and by other threads while they use
            the calls and the values of the process.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.live: dict[int, PendingCall] = {}
        self.ending: dict[int, PendingCall] = {}
        self.on_delivered: Callable[[], object] | None = None
        self.loop = loop
        self.lock = threading.RLock()
        self.canceller = Canceller()
        self._arrived: deque[Callable[[], object]] = deque()
        self._is_posted = False

    def __repr__(self) -> str:
        return f"<Calls {len(self.live)} live, {len(self.ending)} ending>"

    # Sending

    def begin(self, call: PendingCall) -> int:
        """Register a call; return its number."""
        number = next(_numbers)
        self.live[number] = call
        return number

    def when_ready(
        self, number: int, payload: bytes, send: Callable[..., object]
    ) -> None:
        """Send a call as soon as Ray knows all values that it refers to.

        Args:
            number: number of the call.
            payload: its arguments.
            send: called with the arguments for Ray, in one tuple.
        """
        source = values.source_of(payload)
        needs = () if source is None else payload.needs  # type: ignore[attr-defined]
        for value in () if source is None else (*needs, *source.references):
            if value.is_pending:
                value.add_callback(partial(self.when_ready, number, payload, send))
                return
        for value in needs:
            if value.failed is not None:
                self.end(number, value.failed)
                return
            maker = self.live.get(value.task)
            if maker is not None:
                maker.dependents.append((number, value.part))
        send(values.to_arguments(payload))

    def watch(self, number: int, refs: Sequence[Ref]) -> None:
        """Register the objects of a sent call, and wait for all of them."""
        call = self.live[number]
        call.refs = refs
        for value in call.results:
            value.set_ref(refs[max(value.part, 0)])
        for index, ref in enumerate(refs):
            cluster.add_done_callback(ref, partial(self._arrive, number, index))

    def awaited(self) -> list[Ref]:
        """Return the objects that Ray still has to produce for live calls."""
        with self.lock:
            calls = islice(self.live.values(), AWAITED)
            refs = chain.from_iterable(call.awaited for call in calls)
            return list(islice(refs, AWAITED))

    def sent_to(self, actor: int) -> list[Ref]:
        """Return an object of each unfinished call that was sent to an actor."""
        sent: list[Ref] = []
        for call in self.live.values():
            if call.actor == actor and call.awaited:
                stream = call.stream
                ref = call.refs[0] if stream is None else stream.generator.completed()
                sent.append(ref)
        return sent

    # Delivering

    def _arrive(self, number: int, index: int, received: Any) -> None:
        """Receive an object's value, in one of Ray's threads."""
        self.call_soon(partial(self._take, number, index, received))

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run a callback on the loop, from any thread."""
        self._arrived.append(callback)
        if self._is_posted:
            return
        self._is_posted = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop is closed: no receiver waits.
            self._arrived.clear()
        except BaseException:
            self._is_posted = False  # plain code was interrupted here
            raise

    def _deliver(self) -> None:
        self._is_posted = False
        with self.lock:
            while self._arrived:
                self._arrived.popleft()()
            self.note_delivered()

    def _take(self, number: int, index: int, received: Any) -> None:
        call = self.live.get(number) or self.ending.get(number)
        if call is None:
            return
        call.found[index] = received
        if len(call.found) == len(call.refs):
            self.live.pop(number, None)
            self.ending.pop(number, None)
            self._stop_timer(call)
            call.deliver()

    def note_delivered(self) -> None:
        """Report a delivery to `on_delivered`."""
        if self.on_delivered is not None:
            self.on_delivered()

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
        self._stop_timer(call)
        receiver, call.receiver, call.explain = call.receiver, None, None
        if outcome is None:
            outcome = TaskCancelledError(f"{call.name} was cancelled.")
        elif receiver is not None:
            settle(receiver, outcome)
        for value in call.results:
            value.set_outcome(outcome)
        self.note_delivered()
        return call

    def call_later(
        self, seconds: float, callback: Callable[[], object], number: int = 0
    ) -> None:
        """Run a callback after a delay, from any thread.

        Args:
            seconds: the delay.
            callback: the function to run.
            number: number of a call; if the call ends before, the callback does not
                run.
        """
        when = self.loop.time() + seconds

        def set_timer() -> None:
            call = self.live.get(number) or self.ending.get(number)
            if call is not None or not number:
                timer = self.loop.call_at(when, self._run, callback)
                if call is not None:
                    call.timer = timer

        self.on_loop(set_timer)

    def _run(self, callback: Callable[[], object]) -> None:
        with self.lock:
            callback()

    def _stop_timer(self, call: PendingCall) -> None:
        """Forget a call's timeout or grace."""
        if call.timer is not None:
            self.on_loop(call.timer.cancel)
            call.timer = None

    def on_loop(self, callback: Callable[[], object]) -> None:
        """Run a callback on the loop, from any thread; now, in the loop's thread."""
        if asyncio._get_running_loop() is self.loop:
            callback()
        else:
            self.call_soon(callback)

    def cancel(self, number: int, outcome: Outcome | None = None) -> None:
        """Stop a call, if it has not ended; see `end`.

        After its grace period, a task is killed.
        """
        call = self.end(number, outcome)
        if call is None or call.goes_on or not call.is_sent:
            return
        if call.stream is not None:
            call.stream.stop()
        else:
            self.ending[number] = call
            self.canceller.cancel(call.refs[0])
            self.call_later(call.grace, partial(self.kill, number), number)

    def kill(self, number: int) -> None:
        """Kill the process of a task that was cancelled and has not stopped."""
        call = self.ending.get(number)
        if call is not None and call.refs and not call.actor:
            self.canceller.cancel(call.refs[0], force=True)

    def revoke(self, number: int, error: Exception, part: int = -1) -> None:
        """Stop a call, or fail one of its results.

        Sent calls that need the results are stopped, and their receivers are settled at
        once: Ray would report other texts, or nothing.
        """
        failed, first = pack_own_error(error), number
        revoked = [(number, part)]
        while revoked:
            number, part = revoked.pop()
            call = self.live.get(number)
            if call is None:
                continue
            for value in call.results:
                if part in (-1, value.part):
                    value.revoke(failed)
            revoked += [
                (dependent, -1)
                for dependent, needed_part in call.dependents
                if part in (-1, needed_part)
            ]
            if part == -1:
                self.cancel(number, error if number == first else failed)

    def why(self, number: int) -> Why | None:
        """Return the state of a call, as far as Ray reports it."""
        call = self.live.get(number)
        if call is None:
            return None
        request = {} if call.request is None else call.request.as_numbers()
        seconds = self.loop.time() - call.since
        if call.is_sent:
            is_held = call.stream is not None and call.stream.is_held
            notes = (HELD,) if is_held else ()
            return Why(call.name, number, "sent", seconds, request, notes=notes)
        unsent = ("calls that are still to be sent",)
        return Why(
            call.name, number, "expecting", seconds, request, children=unsent, count=1
        )


# Streams

HELD: Final = "it runs, and waits for its consumer to take items"
"""Note of `why` for a stream at its limit."""


class Stream:
    """Takes the items of a generator on the cluster to the consumer.

    Ray holds the generator as soon as `window` items wait. So items are taken from Ray
    only as the consumer takes them here.

    Attributes:
        generator: Ray's generator.
    """

    def __init__(
        self,
        calls: Calls,
        number: int,
        generator: Any,
        window: int,
        *,
        may_wait: bool = False,
    ) -> None:
        """Start to take items.

        Args:
            calls: the calls of this loop.
            number: number of the call.
            generator: Ray's generator.
            window: number of items that may wait.
            may_wait: it is a plain method of an actor, which must not be cancelled
                before it has begun; see `RayActor`.
        """
        self._calls = calls
        self._number = number
        self._call = calls.live[number]
        self.generator = generator
        self._item: Ref | None = None
        self._task: asyncio.Task[None] | None = None
        self._window = self._limit = window
        self._taken = 0
        self._may_wait = may_wait
        self._is_stopped = False
        self._limit_changed = asyncio.Event()
        self._call.stream = self
        calls.on_loop(self._start)

    def _start(self) -> None:
        self._task = self._calls.loop.create_task(self._take_items())

    @property
    def awaited(self) -> Sequence[Ref]:
        """The objects that Ray must produce before there is another item."""
        return () if self.is_held else (self._item or self.generator,)

    @property
    def is_held(self) -> bool:
        """True if the consumer must take items before more are taken from Ray."""
        return self._taken >= self._limit - self._window + step_of(self._window)

    def raise_limit(self, limit: int) -> None:
        """Take up to `limit` items in all, since the consumer has taken some."""
        self._limit = max(self._limit, limit)
        self._calls.on_loop(self._limit_changed.set)

    def stop(self) -> None:
        """Cancel a generator whose items are not needed."""
        self._is_stopped = True
        if not self._may_wait:
            self._cancel()
            self._calls.on_loop(self._end)

    def _end(self) -> None:
        assert self._task is not None, self
        self._task.cancel()

    def _cancel(self) -> None:
        cancel = self._calls.canceller.cancel
        cancel(self.generator)
        # Ray does not kill an actor to stop a call.
        again = partial(cancel, self.generator, force=not self._call.actor)
        self._calls.call_later(self._call.grace, again)

    async def _take_items(self) -> None:
        try:
            async for ref in self.generator:
                self._may_wait = False
                if self._is_stopped:
                    self._cancel()
                    return
                self._item = ref
                item = await ref
                self._deliver(item, ref)
                self._item = None
                del ref, item
                while self.is_held:
                    self._limit_changed.clear()
                    await self._limit_changed.wait()
        except asyncio.CancelledError:
            if self._call.receiver is None:
                return
            raise
        except Exception as error:  # noqa: BLE001 - reported as the outcome of the stream
            outcome: Outcome = self._call.outcome_of(error)
        else:
            outcome = b""
        with self._calls.lock:
            self._calls.end(self._number, outcome)

    def _deliver(self, item: Any, ref: Ref) -> None:
        with self._calls.lock:
            receiver = self._call.receiver
            if receiver is not None:
                self._taken += 1
                items = (values.from_stored(item, ref),)
                cast("ItemReceiver", receiver).receive_items(items)
                self._calls.note_delivered()


# Values


class RayValues:
    """The values that one client shares with other processes.

    It implements all parts of a `ValueStore`: borrowed values, shared values, and
    requests for values in other processes.
    """

    def __init__(self, calls: Calls) -> None:
        self.loans = self.shares = self
        self._calls = calls

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
        with self._calls.lock:
            if handle.raw is not None:
                promised.set_outcome(handle.raw)
            elif handle.cancelled():
                promised.set_outcome(
                    TaskCancelledError(f"{handle.task_name} was cancelled.")
                )
            elif handle.error is not None:
                promised.set_outcome(handle.error)
            elif handle.task_id in self._calls.live:
                self._calls.live[handle.task_id].add_result(promised)
            else:
                # Its outcome is about to be delivered on the handle's event loop.
                cast("Any", handle).add_done_callback(partial(self.keep, promised))

    def fail(self, promised: values.SharedValue, error: BaseException) -> None:
        """Fail a promised value, since its task is never submitted."""
        promised.set_outcome(error)

    def drop(self, child: int, value: values.SharedValue) -> None:
        """Cancel one of several results; the others stay expected.

        Calls of other processes that were already sent with it still get it.
        """
        error = TaskCancelledError("one of several results was cancelled.")
        with self._calls.lock:
            value.revoke(pack_own_error(error))
            self._calls.revoke(child, error, value.part)

    def put(self, payload: bytes) -> values.SharedValue:
        """Store a value."""
        value = values.SharedValue()
        value.set_outcome(payload)
        return value

    def fetch(self, identity: int, receiver: Any) -> int:
        """Request a value; return the number of the request."""
        value, calls = values.find_value(identity), self._calls
        call = PendingCall("a value", receiver, calls.loop.time(), goes_on=True)

        def fetch() -> None:
            outcome = value.failed or value.payload
            if outcome is not None:
                calls.end(number, outcome)
            elif number in calls.live:
                calls.watch(number, (value.as_ref(),))

        with calls.lock:
            number = calls.begin(call)
            if value.failed is None and value.payload is None and value.ref is not None:
                fetch()
            else:
                # Later: the caller must first record the number.
                calls.call_soon(lambda: value.add_callback(fetch))
        return number

    def discard(self, identity: int) -> None:
        """Cancel the task that produces a discarded value."""
        value = values.find_value(identity)
        if value.ref is not None:
            self._calls.canceller.cancel(value.ref)

    def cancel(self, number: int) -> None:
        """Forget a request."""
        with self._calls.lock:
            self._calls.cancel(number)
