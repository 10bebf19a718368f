"""The calls of one event loop that run on the cluster, and how their ends come back.

Ray tells of each object's coming in a thread of its own. What has come by the time
that the loop looks is delivered together, so that many ends wake it once. Ray holds a
generator as soon as so many items wait as the stream allows. So items are taken out of
Ray only as the consumer takes them here (`Inflow`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast

from aiogpu.engines.ray import ray_api as ray
from aiogpu.engines.ray.cancellation import Cancelling
from aiogpu.engines.ray.errors import tell
from aiogpu.engines.ray.values import arrived, failure_in
from aiogpu.serialization.payload import Contents, Payload

if TYPE_CHECKING:
    from aiogpu.client.interface import ItemReceiver, Receiver
    from aiogpu.core.model.request import Request
    from aiogpu.engines.ray.ray_api import Ref
    from aiogpu.engines.ray.values import Shared
    from aiogpu.wire.messages import Failed


_numbers: Final = count(1)


class Live:
    """One call that has not ended.

    Attributes:
        name: of what is called.
        request: what it asks for; None where it holds nothing of its own.
        refs: the objects that it makes; empty while it waits to be sent.
        waitables: what Ray can wait for in its stead, if it makes no objects yet.
        receiver: who is told of its end; None once nobody wants to know.
        actor: the number of the actor whose method it calls; 0 if it is a task.
        is_borrowed: whether what it waits for is made by somebody else.
        goes_on: whether it cannot be stopped, though nobody wants its answer.
        timer: rings when its time is up.
        stop: ends it where no object is enough to do so; None if one is.
        since: the loop's time at which it was made.
        on_sent: told when it was sent, or has ended without.
        on_end: called when it has ended that was stopped; None for nobody.
        told_as: what its receiver is told in place of what comes; None for that.
        within: the placement in which it runs, or its actor lives; None for none.
        knows: asked what is known of an error of Ray's beyond its words; may be None.
        shares: its results, as others know them who were given its handles.
        needed_by: calls that were sent and need results of it, and which of these.
        grace: seconds from its cancel to the end of its process, of a task.
    """

    __slots__ = (
        "actor",
        "came",
        "goes_on",
        "grace",
        "is_borrowed",
        "knows",
        "name",
        "needed_by",
        "on_end",
        "on_sent",
        "receiver",
        "refs",
        "request",
        "shares",
        "since",
        "stop",
        "timer",
        "told_as",
        "waitables",
        "within",
    )

    def __init__(
        self,
        name: str,
        receiver: Receiver,
        since: float,
        *,
        actor: int = 0,
        request: Request | None = None,
    ) -> None:
        self.name = name
        self.request = request
        self.within = None if request is None else request.placement_group
        self.on_end: Callable[[], object] | None = None
        self.receiver: Receiver | None = receiver
        self.refs: Sequence[Ref] = ()
        self.actor = actor
        self.is_borrowed = self.goes_on = False
        self.grace = 0.0
        self.waitables: Sequence[Any] = ()
        self.timer: asyncio.TimerHandle | None = None
        self.stop: Callable[[], object] | None = None
        self.since = since
        self.came: dict[int, Any] = {}
        self.on_sent: list[Callable[[], object]] = []
        self.told_as: bytes | None = None
        self.knows: Callable[[BaseException], Failed | None] | None = None
        self.shares: list[Shared] = []
        self.needed_by: list[tuple[int, int]] = []

    def __repr__(self) -> str:
        return f"<Live {self.name}>"

    def tell_sent(self) -> None:
        """It was sent, or never will be."""
        told, self.on_sent = self.on_sent, []
        for tell_one in told:
            tell_one()

    def tell_error(self, receiver: Receiver, error: BaseException) -> None:
        """Tell its receiver of an exception that has come from Ray."""
        known = None if self.knows is None else self.knows(error)
        if known is None:
            tell(receiver, self.name, error, self.within)
        else:
            receiver.reject(known)

    def rest(self) -> None:
        """Have nothing rung for it any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Calls:
    """See above.

    Attributes:
        live: the calls whose end somebody waits for, by number.
        ending: those that were stopped and have not ended yet.
        on_delivered: told when something was delivered; None for nobody.
        on_posted: told, in any thread, that the loop has something to deliver; None
            for nobody.
        is_posted: whether it has.
        cancelling: how Ray is told to cancel them.
        loop: that loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.cancelling = Cancelling()
        self.live: dict[int, Live] = {}
        self.ending: dict[int, Live] = {}
        self.on_delivered: Callable[[], object] | None = None
        self.on_posted: Callable[[], object] | None = None
        self.is_posted = False
        self.loop = loop
        self._arrived: deque[tuple[int, int, Any]] = deque()

    def __repr__(self) -> str:
        return f"<Calls {len(self.live)} live, {len(self.ending)} ending>"

    def begin(self, live: Live) -> int:
        """Note a call; gives its number."""
        number = next(_numbers)
        self.live[number] = live
        return number

    def of_actor(self, actor: int) -> int:
        """The number of the first call of an actor; its own if there is none."""
        found = (number for number, one in self.live.items() if one.actor == actor)
        return next(found, actor)

    def watch(self, number: int, refs: Sequence[Ref]) -> None:
        """It was sent, and makes these objects; told when all have come."""
        live = self.live[number]
        live.refs = refs
        live.tell_sent()
        for index, ref in enumerate(refs):
            ray.when_done(ref, partial(self._arrive, number, index))

    def wait(self, refs: Sequence[Ref], seconds: float) -> bool:
        """Wait in this thread until one of them is there; see `ray.wait`."""
        return ray.wait(refs, seconds)

    def ref_of(self, number: int, part: int) -> Ref | None:
        """The object of a call that runs, or of one of its results."""
        live = self.live.get(number)
        if live is None or not live.refs:
            return None
        return live.refs[max(part, 0)]

    def note_needs(self, number: int, needs: Sequence[Shared]) -> None:
        """A call is sent, and needs these: it is told if one of them is forsaken."""
        for one in needs:
            live = self.live.get(one.task)
            if live is not None:
                live.needed_by.append((number, one.part))

    def when_sent(self, number: int, call: Callable[[], object]) -> None:
        """Call when a call was sent, or has ended without; now, if that is so."""
        live = self.live.get(number)
        if live is None or live.refs:
            call()
        else:
            live.on_sent.append(call)

    def _arrive(self, number: int, index: int, found: Any) -> None:
        """In a thread of Ray's."""
        if number not in self.live:
            found = None  # the loop of a worker may not turn for long
        self._arrived.append((number, index, found))
        self._post()

    def post(self, call: Callable[[], object]) -> None:
        """Have something done on the loop, from whichever thread."""
        self._arrived.append((0, 0, call))
        self._post()

    def ring(self, number: int, after: float, call: Callable[[], object]) -> None:
        """Have something done for a call in so many seconds, unless it ends before.

        Code of another thread than the loop's may ask, in an actor that has several.
        """
        when = self.loop.time() + after

        def set_timer() -> None:
            live = self.live.get(number) or self.ending.get(number)
            if live is not None:
                live.timer = self.loop.call_at(when, call)

        if asyncio._get_running_loop() is self.loop:
            set_timer()
        else:
            self.post(set_timer)

    def tell_delivered(self) -> None:
        """Something has come that was waited for."""
        if self.on_delivered is not None:
            self.on_delivered()

    def _post(self) -> None:
        if not self.is_posted:
            self.is_posted = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
                if self.on_posted is not None:
                    self.on_posted()
            except RuntimeError:
                # The loop is closed: nobody is left who would want to know.
                self._arrived.clear()
            except BaseException:
                self.is_posted = False  # plain code was interrupted here
                raise

    def _deliver(self) -> None:
        self.is_posted = False
        arrived = self._arrived
        while arrived:
            number, index, found = arrived.popleft()
            if number:
                self._take(number, index, found)
            else:
                found()
        self.tell_delivered()

    def _take(self, number: int, index: int, found: Any) -> None:
        live = self.live.get(number) or self.ending.get(number)
        if live is None:
            return
        live.came[index] = found
        if len(live.came) == len(live.refs):
            self.live.pop(number, None)
            self.ending.pop(number, None)
            live.rest()
            _settle(live)
            if live.on_end is not None:
                live.on_end()

    def end(self, number: int, tell: Callable[[Receiver], object]) -> None:
        """A call has ended without having been sent; its receiver is told so."""
        live = self.live.pop(number, None)
        if live is not None:
            live.rest()
            if live.receiver is not None:
                tell(live.receiver)
            live.tell_sent()
            self.tell_delivered()

    def fail(self, number: int, error: Exception) -> None:
        """The same, with an error."""
        self.end(number, lambda receiver: receiver.fail(error))

    def let_go(self, number: int) -> Live | None:
        """Nobody wants to know of a call any more; gives it if it has not ended."""
        live = self.live.pop(number, None)
        if live is None:
            return None
        live.rest()
        live.receiver = live.knows = None
        live.tell_sent()
        if live.refs or live.stop is not None:
            self.ending[number] = live
        return live

    def forget(self, number: int) -> None:
        """The same of a call that goes on, and of which no end need be heard."""
        self.let_go(number)
        self.ending.pop(number, None)


def _settle(live: Live) -> None:
    receiver = live.receiver
    if receiver is None:
        return  # nobody wants to know
    found = [live.came[index] for index in range(len(live.refs))]
    for one in found:
        if isinstance(one, BaseException):
            live.tell_error(receiver, one)
            return
        failed = failure_in(one)
        if failed is not None:
            receiver.reject(failed)
            return
    if live.told_as is not None:
        receiver.receive(live.told_as)
        return
    parts = tuple(map(arrived, found, live.refs))
    if len(parts) == 1:
        receiver.receive(parts[0])
    else:
        receiver.receive(Payload.of(Contents(parts=parts), encoded=b""))


class Inflow:
    """See above: calling it stops the generator."""

    def __init__(
        self, calls: Calls, number: int, live: Live, items: Any, window: int
    ) -> None:
        self._calls = calls
        self._number = number
        self._live = live
        self._items = items
        self._taken = 0
        self._window = window
        self._stop: Callable[[Any], object] | None = None
        self._limit = window
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Inflow {self._live.name}, {self._taken} of {self._limit}>"

    @property
    def is_held(self) -> bool:
        """True if its consumer has to take items before more are taken out of Ray."""
        return self._taken >= self._limit - self._window + step_of(self._window)

    def begin(self, stop: Callable[[Any], object] | None = None) -> None:
        """Take items as they come; `stop` ends the generator, where Ray is not to."""
        self._stop = stop
        self._live.stop, self._live.waitables = self, (self._items,)
        self._live.tell_sent()
        self._task = self._calls.loop.create_task(self._take())

    def rise(self, limit: int) -> None:
        """The consumer has taken items: so many may come in all."""
        self._limit = max(self._limit, limit)
        self._more.set()

    def __call__(self) -> None:
        """Stop the generator; nobody wants its items any more."""
        if self._stop is None:
            cancel = self._calls.cancelling.cancel
            cancel(self._items)
            kill = partial(cancel, self._items, at_once=True)
            self._calls.loop.call_later(self._live.grace, kill)
        else:
            # Ray holds no generator of which nobody takes the items any more.
            self._stop(self._items.completed())
        self._items, self._live.waitables = None, ()
        self._calls.ending.pop(self._number, None)
        if self._task is not None:
            self._task.cancel()

    async def _take(self) -> None:
        try:
            async for ref in self._items:
                found = await ref
                self._pass(found, ref)
                del ref, found
                await self._allowed()
        except asyncio.CancelledError:
            if self._live.receiver is None:
                return
            raise
        except Exception as error:  # noqa: BLE001 - whatever ends a stream is told
            caught = error
            self._calls.end(
                self._number, lambda receiver: self._live.tell_error(receiver, caught)
            )
            return
        self._calls.end(self._number, lambda receiver: receiver.receive(b""))

    async def _allowed(self) -> None:
        """Wait until the consumer may take one more before it says that it has."""
        while self.is_held:
            self._live.waitables = ()
            self._more.clear()
            await self._more.wait()
        self._live.waitables = (self._items,)

    def _pass(self, found: Any, ref: Any) -> None:
        receiver = self._live.receiver
        if receiver is not None:
            self._taken += 1
            items = (arrived(found, ref),)
            cast("ItemReceiver", receiver).receive_items(items)
            self._calls.tell_delivered()


def step_of(window: int) -> int:
    """After how many items a consumer says that it has taken them; see `MapWindow`."""
    return (window + 1) // 2


def ahead_at_ray(window: int) -> int:
    """Return how many items may wait in Ray, beside those that wait here."""
    return max(window - step_of(window), 1)
