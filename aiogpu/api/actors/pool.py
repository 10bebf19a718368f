"""`ActorPool`: several actors of one class that are called as if they were one.

`PoolScheduler` chooses the actor for the next call, and creates and removes actors. A
dead actor is replaced under its number; if actors die before their first answer, the
scheduler backs off exponentially. Actors that the pool was given are neither replaced
nor ended. The scheduler holds no reference to the user's pool, so that dropping the
pool ends the actors. User modules import this file in every worker: it must stay light,
so asyncio is imported late.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Sequence,
)
from contextlib import suppress
from functools import partial
from itertools import count
from operator import attrgetter
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    NamedTuple,
    NoReturn,
    Protocol,
    TypeVar,
    cast,
)

from aiogpu.api.actors.actor import (
    ActorHandle,
    GeneratorMethod,
    RemoteClass,
    RemoteMethod,
    link_of,
)
from aiogpu.api.actors.methods import ActorInterface, no_method
from aiogpu.api.options import (
    check_duration,
    check_options,
    check_seconds,
    optional,
    whole,
)
from aiogpu.api.remote_function import Decorated, Mapper
from aiogpu.api.usage_errors import CalledFirst, EnteredOnLoop, options_of
from aiogpu.errors import (
    ActorDiedError,
    InfeasibleError,
    MisuseError,
    NodeError,
    OptionError,
    TaskCancelledError,
    TaskTimeoutError,
)

if TYPE_CHECKING:
    import asyncio

    from aiogpu.api.actors.link import Link
    from aiogpu.api.results.handle import Handle


class PoolLimits(NamedTuple):
    """How many actors a pool has.

    Attributes:
        size: actors at first.
        least: actors at least.
        most: actors at most.
        target: unanswered calls per actor above which another actor is created.
        idle_after: seconds without a call after which an actor is removed.
    """

    size: int
    least: int
    most: int
    target: int
    idle_after: float


class PoolActor:
    """One actor of a pool.

    Attributes:
        number: the lowest number that was free.
        handle: the actor's handle.
        link: the link that the handle holds.
        ended: settled when the actor's process has ended.
        calls: unanswered calls of the pool.
        idle_since: loop time of the last answer, or when the actor became ready.
        is_ready: whether the constructor has returned.
        has_been_ready: whether the actor was ready at any time.
        has_answered: whether the actor has answered a call.
        on_answer: called at the end of each call.
    """

    __slots__ = (
        *("calls", "ended", "handle", "has_answered", "idle_since"),
        *("has_been_ready", "is_ready", "link", "number", "on_answer"),
    )

    def __init__(self, number: int, handle: ActorHandle[Any]) -> None:
        self.number = number
        self.handle = handle
        self.link = handle._link
        self.ended: Handle[None] = self.link.ended()
        self.calls = 0
        self.idle_since = 0.0
        self.is_ready = False
        self.has_been_ready = False
        self.has_answered = False
        self.on_answer: Callable[[Handle[Any]], None]

    @property
    def is_idle(self) -> bool:
        """True if the actor is ready and has no unanswered call."""
        return self.is_ready and not self.calls


LONGEST_PAUSE: Final = 60.0
"""Seconds between two attempts, at most, while actors die before they answer."""


def _when_done(handle: Any, call: Callable[[Any], object]) -> None:
    from asyncio import Future

    # The method of a handle would count as a waiter for its result.
    Future.add_done_callback(handle, call)


def _warn(text: str, *args: object, **more: Any) -> None:
    import logging

    logging.getLogger(__name__).warning(text, *args, **more)


_calls: Final = attrgetter("calls")


_number: Final = attrgetter("number")


class PoolScheduler:
    """Creates, calls and removes the actors of one pool.

    Attributes:
        interface: the interface of the actors' class; None before the first actor, if
            a function creates them.
        is_given: whether the actors were made by others, and outlive the pool.
        loop: the event loop of all calls.
        is_closed: whether calls are refused.
        deaths: how many actors have died.
    """

    def __init__(
        self,
        interface: ActorInterface | None,
        make: Callable[[], object] | None,
        bounds: PoolLimits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.interface = interface
        self.loop = loop
        self.is_closed = False
        self.deaths = 0
        self.is_given = make is None
        self._make = make
        self._waiting: deque[Callable[[PoolActor | None], None]] = deque()
        self._bounds = bounds
        self._actors: list[PoolActor] = []
        self._takers: list[PoolActor] = []
        self._leaving: set[PoolActor] = set()
        self._calls = 0
        self._last_death: BaseException | None = None
        self._failures = 0
        self._not_before = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._create_timer: asyncio.TimerHandle | None = None
        self._starting: list[asyncio.Future[None]] = []
        try:
            for _ in range(bounds.size):
                self._create_actor()
        except BaseException:
            self.close(at_once=True)
            raise

    def __len__(self) -> int:
        return len(self._actors)

    def __repr__(self) -> str:
        ready = sum(actor.is_ready for actor in self._actors)
        state = "closed, " if self.is_closed else ""
        return (
            f"{state}{len(self._actors)} actors, {ready} ready, {self._calls} calls, "
            f"{self.deaths} died"
        )

    @property
    def name(self) -> str:
        """The name of the actors in errors."""
        return "actors" if self.interface is None else self.interface.name

    # Calls

    def take(self) -> PoolActor:
        """Choose the actor for the next call; create one more if all are busy.

        Raises:
            MisuseError: the pool is closed.
            ActorDiedError: all actors have died, and the back-off has not passed.
        """
        if self.is_closed:
            raise self._closed()
        actors, bounds = self._actors, self._bounds
        if not actors and self.is_given:
            raise self.none_left()
        if not actors:
            left = self._not_before - self.loop.time()
            if left > 0:
                raise ActorDiedError(
                    f"all actors of the pool of {self.name} have died, and the last "
                    f"ones before they had answered a call; another one is made in "
                    f"{left:.0f} s.",
                    self.name,
                ) from self._last_death
            self._create_actor()
        actor = min(self._takers, key=_calls)
        if (
            len(actors) < bounds.most
            and actor.calls >= bounds.target
            and self._calls >= bounds.target * len(actors)
            and self.loop.time() >= self._not_before
        ):
            self._create_actor()
        return actor

    def _closed(self) -> MisuseError:
        error = MisuseError(f"the pool of {self.name} is closed and takes no calls.")
        error.__cause__ = self._last_death
        return error

    def none_left(self) -> MisuseError | ActorDiedError:
        """Return the error of a call for which there is no actor."""
        if self._last_death is None:
            return MisuseError("this pool has no actors; give it one by push().")
        error = ActorDiedError(
            f"all actors that this pool of {self.name} was given have died.", self.name
        )
        error.__cause__ = self._last_death
        return error

    def when_idle(self, start: Callable[[PoolActor | None], None]) -> None:
        """Call `start` with an actor without calls, in turn; None if all have died."""
        if self.is_closed:
            raise self._closed()
        if self.is_given and not self._actors and self._last_death is not None:
            raise self.none_left()
        self._waiting.append(start)
        self._use_idle()

    def idle(self) -> PoolActor | None:
        """Return the first actor that is ready and has no calls; None if all have."""
        return next((actor for actor in self._takers if actor.is_idle), None)

    def _use_idle(self) -> None:
        while self._waiting and (actor := self.idle()) is not None:
            self._waiting.popleft()(actor)

    def no_actor(self) -> MisuseError | ActorDiedError:
        """Return the error of a call that waited for an actor in vain."""
        return self._closed() if self.is_closed else self.none_left()

    def _refuse_waiting(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for start in waiting:
            start(None)

    def watch(self, actor: PoolActor, handle: Handle[Any]) -> None:
        """Count a call until it ends."""
        actor.calls += 1
        self._calls += 1
        _when_done(handle, actor.on_answer)

    def _on_answer(self, actor: PoolActor, handle: Handle[Any]) -> None:
        actor.calls -= 1
        self._calls -= 1
        if not actor.calls:
            actor.idle_since = self.loop.time()
            self._set_idle_timer()
        try:
            self._note_outcome(actor, handle)
        finally:
            self._use_idle()

    def _note_outcome(self, actor: PoolActor, handle: Handle[Any]) -> None:
        if handle.cancelled():
            return
        # Reads the attribute, so that asyncio still reports an error nobody retrieves.
        if isinstance(handle._exception, ActorDiedError):
            if actor.is_ready:
                self._check_alive(actor)
        elif not actor.has_answered:
            actor.has_answered = True
            self._failures = 0

    # Creating and removing actors

    def _create_actor(self) -> None:
        assert self._make is not None, self
        self.add(self._make())

    def add(self, handle: object) -> None:
        """Add an actor to those that are called.

        Raises:
            MisuseError: the argument is no actor's handle, or is in the pool already.
        """
        if any(handle is actor.handle for actor in self._actors):
            raise MisuseError(f"{handle!r} is in this pool already.")
        if not isinstance(handle, ActorHandle):
            raise MisuseError(
                f"what makes the actors of this pool gave {handle!r}; it must give an "
                f"actor's handle, as `lambda: Model.remote('large')` does."
            )
        self.interface = handle._link.interface
        taken = {actor.number for actor in self._actors}
        number = next(number for number in count() if number not in taken)
        actor = PoolActor(number, handle)
        actor.on_answer = partial(self._on_answer, actor)
        insort(self._actors, actor, key=_number)
        _when_done(actor.ended, partial(self._on_ended, actor))
        self._check_alive(actor)

    def _check_alive(self, actor: PoolActor) -> None:
        """Send the actor no calls until it reports that it is alive, or its error."""
        actor.is_ready = False
        self._choose_takers()
        try:
            ready = actor.link.ready()
        except NodeError as error:
            # There is no node left to ask.
            self._remove_dead(actor, error)
            return
        _when_done(ready, partial(self._on_ready, actor))

    def _choose_takers(self) -> None:
        """Choose who gets calls: the ready actors, or all if none is ready."""
        ready = [actor for actor in self._actors if actor.is_ready]
        self._takers = ready or self._actors[:]

    def _on_ready(self, actor: PoolActor, handle: Handle[None]) -> None:
        if handle.cancelled():
            return
        error = handle.exception()
        if error is not None:
            self._remove_dead(actor, error)
            return
        actor.is_ready = actor.has_been_ready = True
        actor.idle_since = self.loop.time()
        self._choose_takers()
        self._set_idle_timer()
        self._settle_starting()
        self._use_idle()

    def remove(self, actor: PoolActor) -> None:
        """Call a given actor no more."""
        self._actors.remove(actor)
        self._choose_takers()

    def _on_ended(self, actor: PoolActor, handle: Handle[None]) -> None:
        self._leaving.discard(actor)
        if actor in self._actors and not handle.cancelled():
            # The cause comes with the answer of `link.ready()`.
            handle.exception()
            self._check_alive(actor)

    def _remove_dead(self, actor: PoolActor, error: BaseException) -> None:
        if self.is_closed or actor not in self._actors:
            return
        self._actors.remove(actor)
        if not (self.is_given or actor.ended.done()):
            self._leaving.add(actor)
        self._choose_takers()
        self.deaths += 1
        self._last_death = error
        self._settle_starting(None if actor.has_been_ready else error)
        if not isinstance(error, ActorDiedError):
            # The node has closed, or the task that created this pool has ended.
            self.close(at_once=True)
            return
        if self.is_given and not self._actors:
            self._refuse_waiting()
        _warn("a pool has lost its actor %d: %s", actor.number, error)
        if actor.has_answered:
            self._not_before = 0.0
        else:
            self._back_off()
        self._fill()

    def _back_off(self) -> None:
        """Create no actor for a time that doubles with each failure."""
        pause = min(2.0**self._failures, LONGEST_PAUSE)
        self._failures += 1
        self._not_before = self.loop.time() + pause

    def _fill(self) -> None:
        """Create actors up to the minimum, after the back-off if there is one."""
        self._create_timer = None
        if self.is_closed or len(self._actors) >= self._bounds.least:
            return
        if self.loop.time() < self._not_before:
            self._create_timer = self.loop.call_at(self._not_before, self._fill)
            return
        try:
            self._create_actor()
        except NodeError as error:
            self._last_death = error
            self.close(at_once=True)
            return
        except Exception as error:  # noqa: BLE001 - the user's function raised it
            _warn("a pool cannot make another actor", exc_info=True)
            self._last_death = error
            self._back_off()
        self._fill()

    def _set_idle_timer(self) -> None:
        if self.is_given:
            return
        if self._idle_timer is None and len(self._actors) > self._bounds.least:
            since = min((m.idle_since for m in self._takers if m.is_idle), default=None)
            if since is not None:
                due = since + self._bounds.idle_after
                self._idle_timer = self.loop.call_at(due, self._remove_idle, since)

    def _remove_idle(self, since: float) -> None:
        self._idle_timer = None
        for actor in reversed(self._takers):
            if len(self._actors) <= self._bounds.least:
                break
            if actor.is_idle and actor.idle_since <= since:
                self._actors.remove(actor)
                self._leaving.add(actor)
                actor.link.terminate()
        self._choose_takers()
        self._set_idle_timer()

    # Start and end of the pool

    async def ready(self) -> None:
        """Wait until all actors are ready.

        Raises:
            ActorDiedError: an actor died first, most likely in its constructor.
            MisuseError: the pool is closed.
            InfeasibleError: even an idle node has no room for so many actors.
        """
        if self.is_closed:
            raise self._closed()
        if self._are_all_ready():
            return
        if self.is_given and not self._actors:
            raise self.none_left()
        started = self.loop.create_future()
        self._starting.append(started)
        try:
            if not self.is_given:
                await check_room(self.name, [actor.link for actor in self._actors])
        except BaseException as error:
            started.cancel()  # nobody awaits it any more
            if isinstance(error, InfeasibleError):
                self.close(at_once=True)
            raise
        await started

    def _are_all_ready(self) -> bool:
        are_enough = len(self._actors) >= self._bounds.least
        return are_enough and all(actor.is_ready for actor in self._actors)

    def _settle_starting(self, error: BaseException | None = None) -> None:
        if error is None and not self._are_all_ready():
            return
        starting, self._starting = self._starting, []
        for started in starting:
            if started.done():
                continue
            if error is None:
                started.set_result(None)
            else:
                started.set_exception(error)

    def close(self, at_once: bool) -> None:
        """Refuse calls and end all actors: after the calls they were sent, or now."""
        if self.is_closed:
            return
        self.is_closed = True
        for alarm in (self._idle_timer, self._create_timer):
            if alarm is not None:
                alarm.cancel()
        self._settle_starting(self._closed())
        actors, self._actors, self._takers = self._actors, [], []
        self._refuse_waiting()
        if self.is_given:
            return
        self._leaving.update(actors)
        for actor in actors:
            if at_once:
                actor.link.kill(no_restart=True)
            else:
                actor.link.terminate()

    async def ended(self) -> None:
        """Wait until all processes have ended."""
        ends = [actor.ended for actor in self._leaving]
        from asyncio import gather

        await gather(*ends, return_exceptions=True)


async def check_room(name: str, links: Sequence[Link]) -> None:
    """Check that the node can hold all these actors at once.

    Actors with different requests are not checked.

    Raises:
        InfeasibleError: even an idle node has no room for so many.
    """
    from asyncio import gather

    if len(links) < 2:
        return  # the request of one actor was checked when it was created
    rooms = await gather(*(link.room() for link in links), return_exceptions=True)
    kinds = {room for room in rooms if not isinstance(room, BaseException)}
    if len(kinds) != 1:
        return  # `PoolScheduler.ready` raises what is wrong
    [(most, request)] = kinds
    if most is not None and most < len(rooms):
        raise InfeasibleError(
            f"a pool of {len(rooms)} {name}, each with {request}, can never be ready: "
            f"this node has room for {most} at once, even when idle. Make it smaller, "
            f"or ask for less for each."
        )


_LEAST: Final = optional(whole(0, "a whole number of actors, 0 or more, or None"), None)


_MOST: Final = whole(1, "a whole number of actors, 1 or more, or None")


_TARGET: Final = optional(whole(1, "a whole number of calls, 1 or more, or None"), 1)


class Submission:
    """One call that a pool makes when an actor has none.

    Attributes:
        error: what kept it from being made; None if nothing did.
        handle: the handle of the call; None before it was made.
    """

    __slots__ = ("_function", "_on_end", "_scheduler", "_value", "error", "handle")

    def __init__(
        self,
        scheduler: PoolScheduler,
        function: Callable[[Any, Any], object],
        value: object,
        on_end: Callable[[Submission], None],
    ) -> None:
        self._scheduler = scheduler
        self._function = function
        self._value = value
        self._on_end = on_end
        self.error: BaseException | None = None
        self.handle: Handle[Any] | None = None

    def start(self, actor: PoolActor | None) -> None:
        """Make the call on an actor; None says that there will be none."""
        if self.error is not None:
            return  # it was cancelled
        try:
            if actor is None:
                raise self._scheduler.no_actor()
            made = self._function(actor.handle, self._value)
            # Late: it imports asyncio.
            from aiogpu.api.results.handle import Handle

            if not isinstance(made, Handle):
                raise MisuseError(
                    f"the function for submit() and map() of a pool gave {made!r}; it "
                    f"must give a call's handle, as `lambda actor, value: "
                    f"actor.method.remote(value)` does."
                )
        except Exception as error:  # noqa: BLE001 - it is told by `result`
            self.error = error
            self._on_end(self)
            return
        self.handle = made
        self._scheduler.watch(actor, made)
        _when_done(made, lambda _: self._on_end(self))

    def cancel(self) -> None:
        """Stop the call, or do not make it."""
        if self.handle is not None:
            self.handle.cancel()
        else:
            self.error = TaskCancelledError("this call of a pool was cancelled.")

    @property
    def has_ended(self) -> bool:
        """True if there is a result or an error."""
        return self.error is not None or (
            self.handle is not None and self.handle.done()
        )

    def result(self) -> Any:
        """Return the result of a call that has ended, or raise its error."""
        if self.error is not None:
            raise self.error
        assert self.handle is not None, self
        if self.handle.cancelled():
            raise TaskCancelledError(f"{self.handle.task_name} was cancelled.")
        return self.handle.result()


class Submissions:
    """Calls of a pool whose results are asked for one by one."""

    def __init__(self, scheduler: PoolScheduler) -> None:
        self._scheduler = scheduler
        self._calls: dict[Submission, None] = {}
        self._ended: deque[Submission] = deque()
        self._news: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def submit(self, function: Callable[[Any, Any], object], value: object) -> None:
        """Make a call when an actor has none; raises if the pool takes no calls."""
        call = Submission(self._scheduler, function, value, self._on_end)
        self._calls[call] = None
        try:
            self._scheduler.when_idle(call.start)
        except BaseException:
            self._calls.pop(call, None)
            raise

    def _on_end(self, call: Submission) -> None:
        self._ended.append(call)
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)

    async def next(self, timeout: float | None, is_ordered: bool) -> Any:
        """Return the next result, in the order of submission or of ends.

        Raises:
            MisuseError: no result is to come.
            TaskTimeoutError: the time was up; the result stays the next one.
        """
        from asyncio import shield
        from asyncio import timeout as time_limit

        what = "get_next()" if is_ordered else "get_next_unordered()"
        if timeout is not None:
            check_seconds("timeout", timeout)
        try:
            async with time_limit(timeout):
                while (call := self._first(what, is_ordered)) is None:
                    if self._news is None:
                        self._news = self._scheduler.loop.create_future()
                    await shield(self._news)
        except TimeoutError:
            raise TaskTimeoutError(
                f"{what}: no result within {timeout:g} s; it stays the next one."
            ) from None
        del self._calls[call]
        if not self._calls:
            self._ended.clear()
        return call.result()

    def _first(self, what: str, is_ordered: bool) -> Submission | None:
        if not self._calls:
            raise MisuseError(
                f"{what} has nothing to wait for: each call that was submitted to this "
                f"pool has given its result. Ask has_next() first."
            )
        if is_ordered:
            first = next(iter(self._calls))
            return first if first.has_ended else None
        while self._ended:
            call = self._ended.popleft()
            if call in self._calls:
                return call
        return None

    def cancel(self) -> None:
        """Cancel all calls whose results were not asked for."""
        for call in self._calls:
            call.cancel()


def check_bounds(
    size: object, min_size: object, max_size: object, target: object, idle_after: object
) -> PoolLimits:
    """Check the arguments of `ActorPool`.

    Raises:
        OptionError: an argument is invalid.
    """
    first, least, most = _LEAST("size", size), _LEAST("min_size", min_size), max_size
    if first is None and least is None:
        raise OptionError(
            "ActorPool() was not told how many actors to make; say size=4, or "
            "min_size=1 and max_size=4."
        )
    first = least if first is None else first
    least = first if least is None else least
    most = first if max_size is None else _MOST("max_size", max_size)
    if not least <= first <= most or not most:
        raise OptionError(
            f"ActorPool(size={size!r}, min_size={min_size!r}, max_size={max_size!r}) "
            f"must have min_size <= size <= max_size, and a max_size of 1 or more."
        )
    seconds = 60.0
    if idle_after is not None:
        allowed = "a number of seconds, 0 or more"
        seconds = check_duration("idle_after", idle_after, allowed)
    bounds = PoolLimits(first, least, most, _TARGET("target", target), seconds)
    if least == most and (target is not None or idle_after is not None):
        option = "target" if target is not None else "idle_after"
        raise OptionError(
            f"{option}= says when a pool grows or shrinks, and this one always has "
            f"{most} actors; give min_size or max_size as well."
        )
    return bounds


GIVEN: Final = PoolLimits(size=0, least=0, most=0, target=1, idle_after=0.0)
"""Of a pool of given actors, which makes and ends none."""


A = TypeVar("A")
T = TypeVar("T")
R = TypeVar("R")


class MakesActor(Protocol[A]):
    """A class under `@remote` whose constructor needs no arguments."""

    def remote(self) -> ActorHandle[A]:
        """Make an actor."""


class PoolFinalizer:
    """Held by a pool and its methods; ends the actors when the last of them goes."""

    __slots__ = ("scheduler",)

    def __init__(self, scheduler: PoolScheduler) -> None:
        self.scheduler = scheduler

    def __del__(self) -> None:
        scheduler = self.scheduler
        if not scheduler.is_closed:
            # Any thread may drop the last reference. A closed loop raises
            # RuntimeError; its node has closed as well.
            with suppress(RuntimeError):
                scheduler.loop.call_soon_threadsafe(scheduler.close, False)


class PoolMethod(CalledFirst, Mapper):
    """A method of a pool; `.remote(...)` calls it on one of the actors."""

    __slots__ = ("_finalizer", "_name")

    def __init__(self, finalizer: PoolFinalizer, name: str) -> None:
        self._finalizer = finalizer
        self._name = name

    def __repr__(self) -> str:
        return f"<PoolMethod {self.__name__}>"

    @property
    def __name__(self) -> str:
        """The name of the method in errors."""
        return f"{self._finalizer.scheduler.name}.{self._name}"

    def remote(self, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Call it on the actor with the fewest unanswered calls.

        Raises:
            MisuseError: the arguments do not fit, or the pool is closed.
            NoLoopError: this is another thread than the event loop's.
            SerializationError: an argument cannot be pickled.
            ActorDiedError: all actors have died, and the back-off has not passed.
        """
        return self._called(lambda method: method.remote(*args, **kwargs))

    def _remote_chunk(self, arguments: tuple[Any, ...]) -> Handle[Any]:
        return self._called(lambda method: method._remote_chunk(arguments))

    def _called(self, call: Callable[[RemoteMethod], Handle[Any]]) -> Handle[Any]:
        # Late: `session` imports asyncio.
        from aiogpu.api.results.handle import check_thread

        scheduler = self._finalizer.scheduler
        check_thread(scheduler.loop, f"{self.__name__}.remote()")
        actor = scheduler.take()
        method = getattr(actor.handle, self._name)
        if isinstance(method, GeneratorMethod):
            raise MisuseError(
                f"{self.__name__} is a generator, and a pool counts calls that have "
                f"one result; call it by the handle of one actor."
            )
        handle = call(method)
        scheduler.watch(actor, handle)
        return handle

    if not TYPE_CHECKING:

        def options(self, **options: object) -> NoReturn:
            """Always raises; `OptionError` for one that no method has."""
            check_options(dict(options), "method")
            given = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise MisuseError(
                f"{self.__name__} is a method of an actor, and has its options where "
                f"its class defines it: write `@aiogpu.method({given or '...'})` above "
                f"it, and call it by `.remote(...)`."
            )

    def _what_to_write(self) -> str:
        return (
            f"{self.__name__} runs in an actor's process: write `await "
            f"pool.{self._name}.remote(...)`."
        )


class ActorPool(EnteredOnLoop, Generic[A]):
    """Several actors of one class, called as if they were one.

    `await pool.method.remote(...)` calls the actor with the fewest unanswered calls,
    the first of equals; `pool.method.map(items)` does so for each item. Actors that
    are not ready yet get calls only if no actor is ready.

    `await pool` waits until the actors are ready. `async with` waits as well, and ends
    the actors at the end of the block: after the calls they were sent, or at once if
    the block raised. Without `async with` they end when the pool is dropped.

    With `min_size` below `max_size` the pool grows and shrinks. A dead actor is
    replaced: at once if it had answered a call, else after a delay that doubles up to
    one minute. Its unanswered calls raise `ActorDiedError`, and a warning is logged. A
    pool of which no actor fits even on an idle node is an `InfeasibleError` where the
    pool is awaited.

    Given a list of actors, the pool calls these. It does not end them and does not
    replace those that die. `push` and `pop_idle` change which they are. When all have
    died, calls raise `ActorDiedError`.

    `submit`, `get_next` and `map` call a function with an actor that has no calls. If
    the actor has a method of such a name, `pool.map` is that method.
    """

    @options_of("a pool of actors")
    def __init__(
        self,
        actor: MakesActor[A] | Callable[[], ActorHandle[A]] | Iterable[ActorHandle[A]],
        size: int | None = None,
        *,
        min_size: int | None = None,
        max_size: int | None = None,
        target: int | None = None,
        idle_after: float | None = None,
    ) -> None:
        """Start to create the actors, or take those that there are.

        Args:
            actor: the class under `@aiogpu.remote`; or a function that creates an
                actor and returns its handle:
                `lambda: Model.options(num_gpus=0.5).remote("large")`; or the handles
                of actors, for a pool without the other options.
            size: actors at first; None for `min_size`.
            min_size: actors at least, 0 or more; None for `size`.
            max_size: actors at most; None for `size`.
            target: unanswered calls per actor, 1 or more, above which another actor is
                created; None for 1.
            idle_after: seconds without a call, 0 or more, after which an actor above
                `min_size` ends; None for 60.

        Raises:
            OptionError: an argument is invalid.
            MisuseError: `actor` is not an actor's class and returns no actor's handle.
            NoLoopError: no event loop runs in this thread.
        """
        interface, make, given = _maker(actor)
        sizes = (size, min_size, max_size, target, idle_after)
        if make is None and any(option is not None for option in sizes):
            raise OptionError(
                "ActorPool([...]) calls the actors that it was given, and makes none: "
                "leave size, min_size, max_size, target and idle_after out."
            )
        bounds = GIVEN if make is None else check_bounds(*sizes)
        from asyncio import _get_running_loop

        loop = _get_running_loop()
        if loop is None:
            from aiogpu.api.session import no_loop

            raise no_loop("ActorPool()")
        scheduler = PoolScheduler(interface, make, bounds, loop)
        self._finalizer = PoolFinalizer(scheduler)
        self._submitted = Submissions(scheduler)
        for handle in given:
            scheduler.add(handle)
        if scheduler.interface is not None:
            for name in _OWN_NAMES & scheduler.interface.methods.keys():
                self.__dict__[name] = PoolMethod(self._finalizer, name)

    def __repr__(self) -> str:
        scheduler = self._finalizer.scheduler
        return f"<ActorPool of {scheduler.name}: {scheduler!r}>"

    def __len__(self) -> int:
        """Return how many actors there are, ready or not."""
        return len(self._finalizer.scheduler)

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> PoolMethod:
        if name.startswith("__") or name in {"_finalizer", "_submitted"}:
            raise AttributeError(f"an ActorPool has no attribute {name}.")
        interface = self._finalizer.scheduler.interface
        if interface is not None and name not in interface.methods:
            raise no_method(interface, name)
        # The method holds the finalizer, not the pool: dropping the pool ends it.
        method = PoolMethod(self._finalizer, name)
        self.__dict__[name] = method
        return method

    def _as_called(self) -> str:
        return "aiogpu.ActorPool(...)"

    def __await__(self) -> Generator[Any, None, ActorPool[A]]:
        yield from self._finalizer.scheduler.ready().__await__()
        return self

    async def __aenter__(self) -> ActorPool[A]:
        try:
            return await self
        except BaseException:
            await self._end(at_once=True)
            raise

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self._end(at_once=error is not None)

    def submit(
        self, fn: Callable[[ActorHandle[A], T], Awaitable[Any]], value: T, /
    ) -> None:
        """Call `fn(actor, value)` with an actor that has no calls, as soon as there is.

        `get_next` gives the results. `await pool.method.remote(value)` gives its own,
        and takes the actor at once that has the fewest calls.

        Args:
            fn: starts a call and returns its handle, as `lambda actor, value:
                actor.method.remote(value)` does. It is called on the event loop, in the
                order of `submit`.
            value: its second argument.

        Raises:
            MisuseError: the pool is closed.
            ActorDiedError: all actors that the pool was given have died.
        """
        self._check_thread("submit()")
        self._submitted.submit(fn, value)

    async def get_next(self, timeout: float | None = None) -> Any:
        """Return the next result of what was submitted, in the order of `submit`.

        Args:
            timeout: seconds; None waits as long as it takes. When the time is up, or
                the wait is cancelled, the result stays the next one.

        Raises:
            Exception: what the call has raised; the next result is the one after it.
            TaskTimeoutError: the time was up.
            MisuseError: nothing was submitted whose result was not given.
        """
        self._check_thread("get_next()")
        return await self._submitted.next(timeout, is_ordered=True)

    async def get_next_unordered(self, timeout: float | None = None) -> Any:
        """Return the result of whichever call ends first; else as `get_next`."""
        self._check_thread("get_next_unordered()")
        return await self._submitted.next(timeout, is_ordered=False)

    def has_next(self) -> bool:
        """Return whether `get_next` has a result to give or to wait for."""
        return bool(self._submitted)

    def has_free(self) -> bool:
        """Return whether an actor is ready that has no calls."""
        return self._finalizer.scheduler.idle() is not None

    def map(
        self, fn: Callable[[ActorHandle[A], T], Awaitable[R]], values: Iterable[T], /
    ) -> AsyncGenerator[R]:
        """Call `fn(actor, value)` for each value; gives the results in their order.

        Each call takes an actor that has none. Values are read as far ahead as twice
        the number of actors. Leaving the loop over the results cancels the other calls.
        `pool.method.map(values)` is shorter, and has more options.

        Args:
            fn: as for `submit`.
            values: any iterable.
        """
        return self._map(fn, values, is_ordered=True)

    def map_unordered(
        self, fn: Callable[[ActorHandle[A], T], Awaitable[R]], values: Iterable[T], /
    ) -> AsyncGenerator[R]:
        """As `map`, but each result as soon as it is there."""
        return self._map(fn, values, is_ordered=False)

    async def _map(
        self, fn: Callable[[Any, Any], object], values: Iterable[Any], is_ordered: bool
    ) -> AsyncGenerator[Any]:
        self._check_thread("map()")
        mine, items, end = (
            Submissions(self._finalizer.scheduler),
            iter(values),
            object(),
        )
        try:
            while True:
                while len(mine) < 2 * max(1, len(self)):
                    if (value := next(items, end)) is end:
                        break
                    mine.submit(fn, value)
                if not mine:
                    return
                yield await mine.next(None, is_ordered)
        finally:
            mine.cancel()

    def push(self, actor: ActorHandle[A], /) -> None:
        """Add an actor to a pool of given actors.

        Raises:
            MisuseError: it is no actor's handle; the pool makes its actors, is closed,
                or has this one already.
        """
        scheduler = self._given("push()")
        link_of(actor, "push() of a pool")
        scheduler.add(actor)

    def pop_idle(self) -> ActorHandle[A] | None:
        """Take an actor that has no calls out of a pool of given ones.

        Returns:
            Its handle; None if each actor has calls, or is not ready.

        Raises:
            MisuseError: the pool makes its actors, or is closed.
        """
        scheduler = self._given("pop_idle()")
        actor = scheduler.idle()
        if actor is None:
            return None
        scheduler.remove(actor)
        return actor.handle

    def _given(self, what: str) -> PoolScheduler:
        self._check_thread(what)
        scheduler = self._finalizer.scheduler
        if scheduler.is_closed:
            raise scheduler.no_actor()
        if not scheduler.is_given:
            raise MisuseError(
                f"{what} is for a pool of given actors, ActorPool([...]); this one "
                f"makes and ends its actors itself."
            )
        return scheduler

    def _check_thread(self, what: str) -> None:
        # Late: it imports asyncio.
        from aiogpu.api.results.handle import check_thread

        check_thread(self._finalizer.scheduler.loop, f"{what} of a pool")

    async def aclose(self) -> None:
        """End the actors after the calls they were sent, and wait; idempotent."""
        await self._end(at_once=False)

    async def _end(self, at_once: bool) -> None:
        scheduler = self._finalizer.scheduler
        scheduler.close(at_once)
        await scheduler.ended()


_OWN_NAMES: Final = frozenset(
    name for name in vars(ActorPool) if not name.startswith("_")
) - {"aclose"}
"""Names of methods of a pool that a method of its actors may have."""


def _maker(
    actor: object,
) -> tuple[ActorInterface | None, Callable[[], object] | None, Sequence[object]]:
    """Return the class of the actors, what makes them, and those that are there."""
    if isinstance(actor, RemoteClass):
        return actor._interface, actor.remote, ()
    if isinstance(actor, Iterable) and not isinstance(actor, type):
        given = list(actor)
        if all(isinstance(one, ActorHandle) for one in given):
            return None, None, given
    elif callable(actor) and not isinstance(actor, type | Decorated):
        return None, actor, ()
    raise MisuseError(
        f"ActorPool() was given {actor!r}; give it a class under @aiogpu.remote, or a "
        f"function that makes one actor: `lambda: Model.remote('large')`, or a list of "
        f"actors' handles."
    )


def typed(handle: ActorHandle[A] | ActorPool[A], /) -> A:
    """Return the argument, typed as an object of the actor's class.

    Methods under `@aiogpu.method` then have a `.remote` with their parameters and
    results: `await aiogpu.typed(counter).add.remote(1)`.
    """
    return cast("A", handle)
