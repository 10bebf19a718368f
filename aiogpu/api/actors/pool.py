"""`ActorPool`: several actors of one class that are called as if they were one.

`PoolScheduler` chooses the actor for the next call, and creates and removes actors. A
dead actor is replaced under its number; if actors die before their first answer, the
scheduler backs off exponentially. The scheduler holds no reference to the user's pool,
so that dropping the pool ends the actors. User modules import this file in every
worker: it must stay light, so asyncio is imported late.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Generator, Sequence
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
)
from aiogpu.api.actors.methods import ActorInterface, no_method
from aiogpu.api.options import check_duration, check_options, optional, whole
from aiogpu.api.remote_function import Decorated, Mapper
from aiogpu.api.usage_errors import CalledFirst, EnteredOnLoop, options_of
from aiogpu.errors import (
    ActorDiedError,
    InfeasibleError,
    MisuseError,
    NodeError,
    OptionError,
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
        loop: the event loop of all calls.
        is_closed: whether calls are refused.
        deaths: how many actors have died.
    """

    def __init__(
        self,
        interface: ActorInterface | None,
        make: Callable[[], object],
        bounds: PoolLimits,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.interface = interface
        self.loop = loop
        self.is_closed = False
        self.deaths = 0
        self._make = make
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
        handle = self._make()
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
        if not actor.ended.done():
            self._leaving.add(actor)
        self._choose_takers()
        self.deaths += 1
        self._last_death = error
        self._settle_starting(None if actor.has_been_ready else error)
        if not isinstance(error, ActorDiedError):
            # The node has closed, or the task that created this pool has ended.
            self.close(at_once=True)
            return
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
        started = self.loop.create_future()
        self._starting.append(started)
        try:
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


A = TypeVar("A")


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
    one minute. Its unanswered calls raise `ActorDiedError`.
    """

    @options_of("a pool of actors")
    def __init__(
        self,
        actor: MakesActor[A] | Callable[[], ActorHandle[A]],
        size: int | None = None,
        *,
        min_size: int | None = None,
        max_size: int | None = None,
        target: int | None = None,
        idle_after: float | None = None,
    ) -> None:
        """Start to create the actors.

        Args:
            actor: the class under `@aiogpu.remote`, or a function that creates an
                actor and returns its handle:
                `lambda: Model.options(num_gpus=0.5).remote("large")`.
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
        interface, make = _maker(actor)
        bounds = check_bounds(size, min_size, max_size, target, idle_after)
        from asyncio import _get_running_loop

        loop = _get_running_loop()
        if loop is None:
            from aiogpu.api.session import no_loop

            raise no_loop("ActorPool()")
        self._finalizer = PoolFinalizer(PoolScheduler(interface, make, bounds, loop))

    def __repr__(self) -> str:
        scheduler = self._finalizer.scheduler
        return f"<ActorPool of {scheduler.name}: {scheduler!r}>"

    def __len__(self) -> int:
        """Return how many actors there are, ready or not."""
        return len(self._finalizer.scheduler)

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> PoolMethod:
        if name.startswith("__"):
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

    async def aclose(self) -> None:
        """End the actors after the calls they were sent, and wait; idempotent."""
        await self._end(at_once=False)

    async def _end(self, at_once: bool) -> None:
        scheduler = self._finalizer.scheduler
        scheduler.close(at_once)
        await scheduler.ended()


def _maker(actor: object) -> tuple[ActorInterface | None, Callable[[], object]]:
    if isinstance(actor, RemoteClass):
        return actor._interface, actor.remote
    if not callable(actor) or isinstance(actor, type | Decorated):
        raise MisuseError(
            f"ActorPool() was given {actor!r}; give it a class under @aiogpu.remote, "
            f"or a function that makes one actor: `lambda: Model.remote('large')`."
        )
    return None, actor


def typed(handle: ActorHandle[A] | ActorPool[A], /) -> A:
    """Return the argument, typed as an object of the actor's class.

    Methods under `@aiogpu.method` then have a `.remote` with their parameters and
    results: `await aiogpu.typed(counter).add.remote(1)`.
    """
    return cast("A", handle)
