"""`ActorPool`: several actors of one class that are called as if they were one.

`PoolScheduler` says which of them takes the next call, when one is made and when it
goes. An actor is lent no more once it has died, and another one takes its number. Where
actors die before they have answered anything, the next is made later and later. It does
not know the pool that is the user's, so that dropping the pool ends it. Light on
purpose: user modules bring this file into every worker, so asyncio is imported late.
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
    """How many actors there are.

    Attributes:
        size: at first.
        least: when there is nothing to do.
        most: when there is much.
        target: unanswered calls that each may have before another actor is made.
        idle_after: seconds without a call after which one goes.
    """

    size: int
    least: int
    most: int
    target: int
    idle_after: float


class PoolActor:
    """One actor of the scheduler.

    Attributes:
        number: its place; the lowest that was free.
        handle: to it.
        link: what the handle holds.
        ended: settled when its process has ended.
        calls: of the pool's that it has not answered.
        idle_since: loop time of its last answer, or of its coming to life.
        is_ready: whether its constructor has returned.
        has_been_ready: whether it ever has.
        has_answered: whether it has answered a call.
        on_answer: told of each call's end.
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
        """True if it is ready and has answered all calls."""
        return self.is_ready and not self.calls


LONGEST_PAUSE: Final = 60.0
"""Seconds between two attempts, when none of the actors made lives to answer."""


def _when_done(handle: Any, call: Callable[[Any], object]) -> None:
    from asyncio import Future

    # That of a handle would count as somebody who waits for it.
    Future.add_done_callback(handle, call)


def _warn(text: str, *args: object, **more: Any) -> None:
    import logging

    logging.getLogger(__name__).warning(text, *args, **more)


_calls: Final = attrgetter("calls")


_number: Final = attrgetter("number")


class PoolScheduler:
    """The actors of a pool; see above.

    Attributes:
        interface: of the actors' class; None before the first, if a function makes
            them.
        loop: on which it is called.
        is_closed: no call is taken any more.
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
        self._members: list[PoolActor] = []
        self._takers: list[PoolActor] = []
        self._leaving: set[PoolActor] = set()
        self._calls = 0
        self._last_death: BaseException | None = None
        self._fruitless = 0
        self._not_before = 0.0
        self._idle_alarm: asyncio.TimerHandle | None = None
        self._hire_alarm: asyncio.TimerHandle | None = None
        self._starting: list[asyncio.Future[None]] = []
        try:
            for _ in range(bounds.size):
                self._hire()
        except BaseException:
            self.close(at_once=True)
            raise

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        ready = sum(member.is_ready for member in self._members)
        state = "closed, " if self.is_closed else ""
        return (
            f"{state}{len(self._members)} actors, {ready} ready, {self._calls} calls, "
            f"{self.deaths} died"
        )

    @property
    def name(self) -> str:
        """What errors call the actors."""
        return "actors" if self.interface is None else self.interface.name

    # Calls.

    def take(self) -> PoolActor:
        """The member that is to be called next; an actor is made if there are too few.

        Raises:
            MisuseError: the pool is closed.
            ActorDiedError: all have died, and it is too early to make another one.
        """
        if self.is_closed:
            raise self._closed()
        members, bounds = self._members, self._bounds
        if not members:
            left = self._not_before - self.loop.time()
            if left > 0:
                raise ActorDiedError(
                    f"all actors of the pool of {self.name} have died, and the last "
                    f"ones before they had answered a call; another one is made in "
                    f"{left:.0f} s.",
                    self.name,
                ) from self._last_death
            self._hire()
        member = min(self._takers, key=_calls)
        if (
            len(members) < bounds.most
            and member.calls >= bounds.target
            and self._calls >= bounds.target * len(members)
            and self.loop.time() >= self._not_before
        ):
            self._hire()
        return member

    def _closed(self) -> MisuseError:
        error = MisuseError(f"the pool of {self.name} is closed and takes no calls.")
        error.__cause__ = self._last_death
        return error

    def watch(self, member: PoolActor, handle: Handle[Any]) -> None:
        """Count a call until it ends."""
        member.calls += 1
        self._calls += 1
        _when_done(handle, member.on_answer)

    def _on_answer(self, member: PoolActor, handle: Handle[Any]) -> None:
        member.calls -= 1
        self._calls -= 1
        if not member.calls:
            member.idle_since = self.loop.time()
            self._arm()
        if handle.cancelled():
            return
        # Looked at so that asyncio still tells of an error that nobody hears.
        if isinstance(handle._exception, ActorDiedError):
            if member.is_ready:
                self._doubt(member)
        elif not member.has_answered:
            member.has_answered = True
            self._fruitless = 0

    # Comings and goings.

    def _hire(self) -> None:
        handle = self._make()
        if not isinstance(handle, ActorHandle):
            raise MisuseError(
                f"what makes the actors of this pool gave {handle!r}; it must give an "
                f"actor's handle, as `lambda: Model.remote('large')` does."
            )
        self.interface = handle._link.interface
        taken = {member.number for member in self._members}
        number = next(number for number in count() if number not in taken)
        member = PoolActor(number, handle)
        member.on_answer = partial(self._on_answer, member)
        insort(self._members, member, key=_number)
        _when_done(member.ended, partial(self._on_ended, member))
        self._doubt(member)

    def _doubt(self, member: PoolActor) -> None:
        """Give it no calls until it says that it lives, or why it does not."""
        member.is_ready = False
        self._sort()
        try:
            ready = member.link.ready()
        except NodeError as error:
            # There is nobody to be asked any more.
            self._lose(member, error)
            return
        _when_done(ready, partial(self._on_ready, member))

    def _sort(self) -> None:
        """Calls go to those that are ready; where none is, to those that will be."""
        ready = [member for member in self._members if member.is_ready]
        self._takers = ready or self._members[:]

    def _on_ready(self, member: PoolActor, handle: Handle[None]) -> None:
        if handle.cancelled():
            return
        error = handle.exception()
        if error is not None:
            self._lose(member, error)
            return
        member.is_ready = member.has_been_ready = True
        member.idle_since = self.loop.time()
        self._sort()
        self._arm()
        self._tell_starting()

    def _on_ended(self, member: PoolActor, handle: Handle[None]) -> None:
        self._leaving.discard(member)
        if member in self._members and not handle.cancelled():
            # Why, it says to whoever asks whether it is ready.
            handle.exception()
            self._doubt(member)

    def _lose(self, member: PoolActor, error: BaseException) -> None:
        if self.is_closed or member not in self._members:
            return
        self._members.remove(member)
        if not member.ended.done():
            self._leaving.add(member)
        self._sort()
        self.deaths += 1
        self._last_death = error
        self._tell_starting(None if member.has_been_ready else error)
        if not isinstance(error, ActorDiedError):
            # The node has closed, or the task has ended whose pool this is.
            self.close(at_once=True)
            return
        _warn("a pool has lost its actor %d: %s", member.number, error)
        if member.has_answered:
            self._not_before = 0.0
        else:
            self._pause()
        self._fill()

    def _pause(self) -> None:
        """Make no actor for some time, each time longer."""
        pause = min(2.0**self._fruitless, LONGEST_PAUSE)
        self._fruitless += 1
        self._not_before = self.loop.time() + pause

    def _fill(self) -> None:
        """Make as many as there must be, now or when it is time."""
        self._hire_alarm = None
        if self.is_closed or len(self._members) >= self._bounds.least:
            return
        if self.loop.time() < self._not_before:
            self._hire_alarm = self.loop.call_at(self._not_before, self._fill)
            return
        try:
            self._hire()
        except NodeError as error:
            self._last_death = error
            self.close(at_once=True)
            return
        except Exception as error:  # noqa: BLE001 - the user's function raised it
            _warn("a pool cannot make another actor", exc_info=True)
            self._last_death = error
            self._pause()
        self._fill()

    def _arm(self) -> None:
        if self._idle_alarm is None and len(self._members) > self._bounds.least:
            since = min((m.idle_since for m in self._takers if m.is_idle), default=None)
            if since is not None:
                due = since + self._bounds.idle_after
                self._idle_alarm = self.loop.call_at(due, self._dismiss_idle, since)

    def _dismiss_idle(self, since: float) -> None:
        self._idle_alarm = None
        for member in reversed(self._takers):
            if len(self._members) <= self._bounds.least:
                break
            if member.is_idle and member.idle_since <= since:
                self._members.remove(member)
                self._leaving.add(member)
                member.link.terminate()
        self._sort()
        self._arm()

    # The beginning and the end.

    async def ready(self) -> None:
        """Wait until all are ready.

        Raises:
            ActorDiedError: one of them died before it was, most likely by its
                constructor.
            MisuseError: the pool is closed.
            InfeasibleError: not even an idle node has room for so many at once.
        """
        if self.is_closed:
            raise self._closed()
        if self._are_all_ready():
            return
        news = self.loop.create_future()
        self._starting.append(news)
        try:
            await check_room(self.name, [member.link for member in self._members])
        except BaseException as error:
            news.cancel()  # nobody will look at it
            if isinstance(error, InfeasibleError):
                self.close(at_once=True)
            raise
        await news

    def _are_all_ready(self) -> bool:
        are_enough = len(self._members) >= self._bounds.least
        return are_enough and all(member.is_ready for member in self._members)

    def _tell_starting(self, error: BaseException | None = None) -> None:
        if error is None and not self._are_all_ready():
            return
        starting, self._starting = self._starting, []
        for news in starting:
            if news.done():
                continue
            if error is None:
                news.set_result(None)
            else:
                news.set_exception(error)

    def close(self, at_once: bool) -> None:
        """Take no call any more, and end all: after what they were sent, or at once."""
        if self.is_closed:
            return
        self.is_closed = True
        for alarm in (self._idle_alarm, self._hire_alarm):
            if alarm is not None:
                alarm.cancel()
        self._tell_starting(self._closed())
        members, self._members, self._takers = self._members, [], []
        self._leaving.update(members)
        for member in members:
            if at_once:
                member.link.kill(no_restart=True)
            else:
                member.link.terminate()

    async def ended(self) -> None:
        """Wait until no process is left."""
        ends = [member.ended for member in self._leaving]
        from asyncio import gather

        await gather(*ends, return_exceptions=True)


async def check_room(name: str, links: Sequence[Link]) -> None:
    """Check that actors can live at once, if all of them ask for the same.

    Raises:
        InfeasibleError: not even an idle node has room for so many.
    """
    from asyncio import gather

    if len(links) < 2:
        return  # what it asks for was looked at when it was made
    rooms = await gather(*(link.room() for link in links), return_exceptions=True)
    kinds = {room for room in rooms if not isinstance(room, BaseException)}
    if len(kinds) != 1:
        return  # what is wrong is told by those who wait until each is ready
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
    """Check what `ActorPool` was given; see there.

    Raises:
        OptionError: names the option, the value and what is allowed.
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
    """Held by a pool and its methods; with the last of them the actors end."""

    __slots__ = ("scheduler",)

    def __init__(self, scheduler: PoolScheduler) -> None:
        self.scheduler = scheduler

    def __del__(self) -> None:
        scheduler = self.scheduler
        if not scheduler.is_closed:
            # Who drops the last reference may be any thread; a loop that is closed,
            # and its node with it, refuses.
            with suppress(RuntimeError):
                scheduler.loop.call_soon_threadsafe(scheduler.close, False)


class PoolMethod(CalledFirst, Mapper):
    """A method of a pool's actors; call one of them by `.remote(...)`."""

    __slots__ = ("_name", "_tie")

    def __init__(self, tie: PoolFinalizer, name: str) -> None:
        self._tie = tie
        self._name = name

    def __repr__(self) -> str:
        return f"<PoolMethod {self.__name__}>"

    @property
    def __name__(self) -> str:
        """How errors call it."""
        return f"{self._tie.scheduler.name}.{self._name}"

    def remote(self, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Call it on the actor with the fewest unanswered calls.

        Raises:
            MisuseError: it takes other arguments, or the pool is closed.
            NoLoopError: this is another thread than the event loop's.
            SerializationError: an argument cannot be pickled.
            ActorDiedError: all actors have died, and no new one is made yet.
        """
        return self._called(lambda method: method.remote(*args, **kwargs))

    def _remote_chunk(self, arguments: tuple[Any, ...]) -> Handle[Any]:
        return self._called(lambda method: method._remote_chunk(arguments))

    def _called(self, call: Callable[[RemoteMethod], Handle[Any]]) -> Handle[Any]:
        # Late: `session` imports asyncio.
        from aiogpu.api.results.handle import check_thread

        scheduler = self._tie.scheduler
        check_thread(scheduler.loop, f"{self.__name__}.remote()")
        member = scheduler.take()
        method = getattr(member.handle, self._name)
        if isinstance(method, GeneratorMethod):
            raise MisuseError(
                f"{self.__name__} is a generator, and a pool counts calls that have "
                f"one result; call it by the handle of one actor."
            )
        handle = call(method)
        scheduler.watch(member, handle)
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
    of equals the first; `pool.method.map(items)` does so for each item. Actors that
    are not ready yet get calls only where none is ready.

    `await pool` waits until the actors are ready. `async with` does so too, and ends
    them at the end of the block, after what they were sent; after an error in the
    block at once. Without it they end as soon as the pool is dropped.

    With `min_size` below `max_size` it grows and shrinks. An actor that has died is
    replaced; at once if it had answered a call, else later and later, up to once a
    minute. Calls that went with it raise `ActorDiedError`.
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
        """Make the actors; they are ready later.

        Args:
            actor: the actors' class, or what makes one of them and gives its handle:
                `lambda: Model.options(num_gpus=0.5).remote("large")`.
            size: how many are made at first; None for `min_size`.
            min_size: how many there are at least, 0 or more; None for `size`.
            max_size: how many there are at most; None for `size`.
            target: unanswered calls that each may have, 1 or more, before one more is
                made; None for 1.
            idle_after: seconds without a call after which one ends, while there are
                more than `min_size`; 0 or more, None for 60.

        Raises:
            OptionError: one of these is ill-valued.
            MisuseError: `actor` is no actor's class, and gives no actor.
            NoLoopError: no event loop is running here.
        """
        interface, make = _maker(actor)
        bounds = check_bounds(size, min_size, max_size, target, idle_after)
        from asyncio import _get_running_loop

        loop = _get_running_loop()
        if loop is None:
            from aiogpu.api.session import no_loop

            raise no_loop("ActorPool()")
        self._tie = PoolFinalizer(PoolScheduler(interface, make, bounds, loop))

    def __repr__(self) -> str:
        scheduler = self._tie.scheduler
        return f"<ActorPool of {scheduler.name}: {scheduler!r}>"

    def __len__(self) -> int:
        """Return how many actors there are, ready or not."""
        return len(self._tie.scheduler)

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> PoolMethod:
        if name.startswith("__"):
            raise AttributeError(f"an ActorPool has no attribute {name}.")
        interface = self._tie.scheduler.interface
        if interface is not None and name not in interface.methods:
            raise no_method(interface, name)
        # It holds the tie, not this pool, so that the pool goes at once.
        method = PoolMethod(self._tie, name)
        self.__dict__[name] = method
        return method

    def _as_called(self) -> str:
        return "aiogpu.ActorPool(...)"

    def __await__(self) -> Generator[Any, None, ActorPool[A]]:
        yield from self._tie.scheduler.ready().__await__()
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
        """End the actors after what they were sent, and wait for it; idempotent."""
        await self._end(at_once=False)

    async def _end(self, at_once: bool) -> None:
        scheduler = self._tie.scheduler
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
    """The same handle or pool, for type checkers an object of the actor's class.

    Methods under `@aiogpu.method` then have a `.remote` with their parameters and
    results: `await aiogpu.typed(counter).add.remote(1)`.
    """
    return cast("A", handle)
