"""The calls of one client that run on the cluster, and how their ends come back.

Ray reports each object in a thread of its own. What has come by the time that the
client's event loop looks is delivered together, so that many ends wake the loop once.
A program's client has the program's loop; that of a task or an actor has a loop of its
own, and is used by all threads of the process, so a lock guards it.
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
"""Questions to Ray until one is answered in Ray's own thread."""
LOST_AFTER: Final = 1.0
"""Seconds after which cancels that were handed to Ray's thread are taken for lost."""


class Canceller:
    """Cancels tasks where it does no harm, while no event loop waits for it.

    Ray 2.60 ends this process in two cases, both seen with Ray alone:

    - A task is cancelled between its reply and its completion (a failed check
      "it != submissible_tasks_.end()"). Ray's core takes in replies in a thread of its
      own, and lets go of its lock in between. Whoever cancels many short tasks soon
      meets that moment; a cancel in that very thread never does.
    - A task is cancelled that was sent a moment ago, and whose arguments are still to
      come. Ray does in turn what it was sent and what it is asked. So the answer to a
      question says that all that was sent before was taken up, and it comes in Ray's
      own thread.

    So cancels are done in Ray's thread, on the answer to a question.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: list[partial[None]] = []
        self._lost_at = 0.0
        self._marker: Ref | None = None

    def cancel(self, ref: Ref, *, force: bool = False) -> None:
        """Have a task cancelled soon, from any thread; see `cluster.cancel`."""
        request = partial(cluster.cancel, ref, force=force)
        with self._lock:
            self._requests.append(request)
        self._post(time.monotonic())

    def _post(self, now: float) -> None:
        """Hand all requests to Ray's thread together, unless some are on their way."""
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
        """Run on the answer to a question.

        Returns False if the answer came at once, in this thread, and nothing was run.
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
                return  # the question would have Ray start a cluster
            try:
                request()
            except Exception:  # noqa: BLE001 - the others must not be lost with it
                _log.exception("! a cancel was not heard")
        with self._lock:
            self._lost_at = 0.0
        # Ray need not have taken up what was sent since.
        self._post(time.monotonic())


# Calls


@dataclass(slots=True, eq=False)
class PendingCall:
    """A task, a method call or a question that has not ended.

    Attributes:
        name: of what is called.
        receiver: is told of the end; None once nobody wants to know.
        since: the loop's time at which it was made.
        actor: number of the actor whose method it calls; 0 for a task.
        request: what it asks for; None if it holds nothing of its own.
        group: the placement group in which it, or its actor, runs.
        grace: seconds from its cancel to the end of its process, for a task.
        goes_on: whether it cannot be stopped, though nobody wants its answer.
        result: delivered in place of what comes; None for the objects themselves.
        explain: returns what is known of an error of Ray's beyond its words.
        refs: the objects that it makes; empty until it is sent, and for a stream.
        stream: brings its items, from when it is sent; None if it is no stream.
        found: what has come, by the index of its object.
        timer: ends its timeout or its grace.
        results: what others know its results by, to whom its handles were given.
        dependents: numbers of sent calls that need its results, and which part.
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
        """True once Ray has it."""
        return bool(self.refs) or self.stream is not None

    @property
    def awaited(self) -> Sequence[Ref]:
        """What Ray still has to make for it."""
        return self.refs if self.stream is None else self.stream.awaited

    def add_result(self, value: values.SharedValue) -> None:
        """Have a value follow one of its results, or all of them."""
        self.results.append(value)
        if self.refs:
            value.set_ref(self.refs[max(value.part, 0)])

    def outcome_of(self, error: BaseException) -> Failed | Exception:
        """Return what an exception that came from Ray means."""
        known = None if self.explain is None else self.explain(error)
        return known or outcome_of(self.name, error, self.group, self.receiver)

    def deliver(self) -> None:
        """Tell its receiver of what has come."""
        receiver = self.receiver
        if receiver is None:
            return
        found = [self.found[index] for index in range(len(self.refs))]
        for one in found:
            bad = self.outcome_of(one) if isinstance(one, BaseException) else one
            if isinstance(bad, Failed | Exception):
                settle(receiver, bad)
                return
        if self.result is not None:
            receiver.settle(self.result)
            return
        parts = tuple(map(values.from_stored, found, self.refs))
        if len(parts) == 1:
            receiver.settle(parts[0])
        else:
            receiver.settle(Payload.of(Contents(parts=parts), encoded=b""))


_numbers: Final = count(1)
AWAITED: Final = 1000
"""Objects that one wait is for, at most."""


class Calls:
    """The calls of one client.

    Attributes:
        live: those whose end somebody waits for, by number.
        ending: those that were stopped and have not ended.
        on_delivered: called with the lock when something was delivered; None for
            nobody.
        loop: the event loop that delivers.
        lock: is held by the loop while it delivers, and by other threads while they
            use the calls, what they refer to, and the values of the process.
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
        """Note a call; return its number."""
        number = next(_numbers)
        self.live[number] = call
        return number

    def when_ready(
        self, number: int, payload: bytes, send: Callable[..., object]
    ) -> None:
        """Send a call as soon as Ray knows all values that it refers to.

        Args:
            number: of the call.
            payload: its arguments.
            send: is given the arguments for Ray, in one tuple.
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
        """Note that a call was sent and makes these objects; wait for all of them."""
        call = self.live[number]
        call.refs = refs
        for value in call.results:
            value.set_ref(refs[max(value.part, 0)])
        for index, ref in enumerate(refs):
            cluster.add_done_callback(ref, partial(self._arrive, number, index))

    def awaited(self) -> list[Ref]:
        """Return what Ray still has to make for calls that have not ended."""
        with self.lock:
            calls = islice(self.live.values(), AWAITED)
            refs = chain.from_iterable(call.awaited for call in calls)
            return list(islice(refs, AWAITED))

    def sent_to(self, actor: int) -> list[Ref]:
        """Return an object of each call of an actor that was sent and has not ended."""
        sent: list[Ref] = []
        for call in self.live.values():
            if call.actor == actor and call.awaited:
                stream = call.stream
                ref = call.refs[0] if stream is None else stream.generator.completed()
                sent.append(ref)
        return sent

    # Delivering

    def _arrive(self, number: int, index: int, found: Any) -> None:
        """Take what has come of an object, in one of Ray's threads."""
        self.call_soon(partial(self._take, number, index, found))

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run something on the loop, from any thread."""
        self._arrived.append(callback)
        if self._is_posted:
            return
        self._is_posted = True
        try:
            self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop is closed: nobody is left who would want to know.
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

    def _take(self, number: int, index: int, found: Any) -> None:
        call = self.live.get(number) or self.ending.get(number)
        if call is None:
            return
        call.found[index] = found
        if len(call.found) == len(call.refs):
            self.live.pop(number, None)
            self.ending.pop(number, None)
            self._stop_timer(call)
            call.deliver()

    def note_delivered(self) -> None:
        """Tell who waits that something was delivered."""
        if self.on_delivered is not None:
            self.on_delivered()

    def demand(self, number: int, limit: int) -> None:
        """Let a stream yield so many items in all."""
        call = self.live.get(number)
        if call is not None and call.stream is not None:
            call.stream.raise_limit(limit)

    # Ending

    def end(self, number: int, outcome: Outcome | None = None) -> PendingCall | None:
        """Note that a call has ended, or goes on and nobody wants to know.

        Its receiver is told the outcome if there is one, and nothing else any more.
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
        """Run something in so many seconds, from any thread.

        Args:
            seconds: from now on.
            callback: what to run.
            number: of a call; if it ends before, nothing is run.
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
        """Run something on the loop, from any thread; now, if this is the loop's."""
        if asyncio._get_running_loop() is self.loop:
            callback()
        else:
            self.call_soon(callback)

    def cancel(self, number: int, outcome: Outcome | None = None) -> None:
        """Stop a call, if it has not ended; see `end`.

        A task whose grace has passed is killed.
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
        """Stop a call, or give up one of its results.

        Calls that were sent to Ray and need them are stopped, and their receivers told
        at once: Ray would tell them in other words, or not at all.
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
            needed = [one for one, of in call.dependents if part in (-1, of)]
            revoked += [(dependent, -1) for dependent in needed]
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
"""What `why` says of a stream that has yielded as many items as it may."""


class Stream:
    """The items of a generator that runs on the cluster, on their way to the consumer.

    Ray holds the generator as soon as `window` items wait. So items are taken out of
    Ray only as the consumer takes them here.

    Attributes:
        generator: Ray's.
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
        """Take items as they come.

        Args:
            calls: of this loop.
            number: of the call.
            generator: Ray's.
            window: how many items may wait.
            may_wait: whether it is a plain method of an actor, which must not be
                cancelled before it has begun; see `RayActor`.
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
        """Return what Ray has to make before there is another item."""
        return () if self.is_held else (self._item or self.generator,)

    @property
    def is_held(self) -> bool:
        """True if the consumer has to take items before more are taken out of Ray."""
        return self._taken >= self._limit - self._window + step_of(self._window)

    def raise_limit(self, limit: int) -> None:
        """Take up to `limit` items in all: the consumer has taken some."""
        self._limit = max(self._limit, limit)
        self._calls.on_loop(self._limit_changed.set)

    def stop(self) -> None:
        """Cancel a generator whose items are not wanted."""
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
        # Ray kills no actor for that.
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
                found = await ref
                self._deliver(found, ref)
                self._item = None
                del ref, found
                while self.is_held:
                    self._limit_changed.clear()
                    await self._limit_changed.wait()
        except asyncio.CancelledError:
            if self._call.receiver is None:
                return
            raise
        except Exception as error:  # noqa: BLE001 - whatever ends a stream is told
            outcome: Outcome = self._call.outcome_of(error)
        else:
            outcome = b""
        with self._calls.lock:
            self._calls.end(self._number, outcome)

    def _deliver(self, found: Any, ref: Ref) -> None:
        with self._calls.lock:
            receiver = self._call.receiver
            if receiver is not None:
                self._taken += 1
                items = (values.from_stored(found, ref),)
                cast("ItemReceiver", receiver).receive_items(items)
                self._calls.note_delivered()


# Values


class RayValues:
    """The values that one client shares with other processes.

    It is the whole of a `ValueStore`: what was lent to this process, what it gives to
    others, and the questions for values that are not here.
    """

    def __init__(self, calls: Calls) -> None:
        self.loans = self.shares = self
        self._calls = calls

    def loan(self, identity: int) -> values.SharedValue:
        """Return the value of a handle that is being unpickled."""
        return values.find_value(identity)

    def share(self, handle: Shareable) -> values.SharedValue:
        """Return what others refer to who are given a handle."""
        value = self.promise()
        self.keep(value, handle)
        return value

    def promise(self) -> values.SharedValue:
        """Return the value of a task that is not submitted yet."""
        return values.SharedValue()

    def keep(self, promised: values.SharedValue, handle: Shareable) -> None:
        """Have a promised value follow the result of a handle's task."""
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
                # Its outcome is on its way to the event loop of the handle.
                cast("Any", handle).add_done_callback(partial(self.keep, promised))

    def fail(self, promised: values.SharedValue, error: BaseException) -> None:
        """Note that the task of a promised value is never submitted."""
        promised.set_outcome(error)

    def drop(self, child: int, value: values.SharedValue) -> None:
        """Cancel one of several results; the others may still come.

        Calls of other processes that were sent it already get it.
        """
        error = TaskCancelledError("one of several results was cancelled.")
        with self._calls.lock:
            value.revoke(pack_own_error(error))
            self._calls.revoke(child, error, value.part)

    def put(self, payload: bytes) -> values.SharedValue:
        """Keep a value."""
        value = values.SharedValue()
        value.set_outcome(payload)
        return value

    def fetch(self, identity: int, receiver: Any) -> int:
        """Ask for a value; return the question's number."""
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
                # Not at once: whoever asks notes the number first.
                calls.call_soon(lambda: value.add_callback(fetch))
        return number

    def discard(self, identity: int) -> None:
        """Cancel the task that makes a discarded value."""
        value = values.find_value(identity)
        if value.ref is not None:
            self._calls.canceller.cancel(value.ref)

    def cancel(self, number: int) -> None:
        """Forget a question."""
        with self._calls.lock:
            self._calls.cancel(number)
