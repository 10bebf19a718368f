"""`ActorPool`: several actors of one class that are called as if they were one.

`PoolScheduler` chooses the actor for the next call, and creates and removes actors. A
dead actor is replaced under its number; if actors die before their first answer, the
scheduler backs off exponentially. Actors that were passed to the pool are neither
replaced nor ended. The scheduler does not refer to the user's pool, so dropping the
pool ends the actors. Light to import: user modules load this file in every worker, so
asyncio is imported late.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
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
)
from aiogpu.api.actors.methods import ActorInterface, no_method
from aiogpu.api.options import (
    TaskOptions,
    duration,
    whole,
)
from aiogpu.api.remote_function import Decorated, Mapper
from aiogpu.api.usage_errors import (
    CalledFirst,
    EnteredOnLoop,
    NotPassedOn,
    SetInItsProcess,
    options_of,
)
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
    """The number of actors of a pool.

    Attributes:
        size: actors at first.
        least: fewest actors.
        most: most actors.
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
        number: the actor's number in the pool, the lowest that was free.
        handle: the actor's handle.
        link: the handle's link to the actor.
        scheduler: the pool's scheduler.
        checked: settled when the actor is ready, or dead; the last such request.
        lost: settled when the process of a ready actor is lost; None for others.
        calls: unanswered calls of the pool.
        idle_since: loop time of the last answer, or when the actor became ready.
        is_away: False if the constructor has returned and the process is not lost.
        is_ended_here: True if this program has told the actor to end.
        has_been_ready: True if the actor was ready at any time.
        has_answered: True if the actor has answered a call.
    """

    def __init__(
        self, scheduler: PoolScheduler, number: int, handle: ActorHandle[Any]
    ) -> None:
        self.scheduler = scheduler
        self.number = number
        self.handle = handle
        self.link = handle._link
        self.checked: Handle[None] | None = None
        self.lost: Handle[None] | None = None
        self.calls = 0
        self.idle_since = 0.0
        self.is_away = True
        self.has_been_ready = False
        self.has_answered = False
        self.is_ended_here = False

    def on_ended_here(self, is_final: bool) -> None:
        """See `Watcher`: other actors get the next calls, before the node answers."""
        self.is_ended_here |= is_final
        self.scheduler.check_alive(self)

    @property
    def is_idle(self) -> bool:
        """True if the actor is ready and has no unanswered call."""
        return not self.is_away and not self.calls


LONGEST_PAUSE: Final = 60.0
"""Longest pause in seconds between attempts, while actors die before they answer."""


def _when_done(handle: Any, call: Callable[[Any], object]) -> None:
    from asyncio import Future

    # `Handle.add_done_callback` would count as a waiter for the result.
    Future.add_done_callback(handle, call)


def _warn(text: str, *args: object, **more: Any) -> None:
    import logging

    logging.getLogger(__name__).warning(text, *args, **more)


_load: Final = attrgetter("is_away", "calls")
"""Actors that are not ready get calls only if no actor is ready."""


_number: Final = attrgetter("number")


class PoolScheduler:
    """Creates, calls and removes the actors of one pool.

    Attributes:
        interface: the interface of the actors' class; None before the first actor, if
            a function creates them.
        is_given: True if the pool was made from a list of actors, which outlive it.
        loop: the event loop of all calls.
        is_closed: True if calls are refused.
        deaths: number of actors that have died.
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
        self._bounds = bounds
        self._actors: list[PoolActor] = []
        self._leaving: set[Handle[None]] = set()
        self._calls = 0
        self._last_death: BaseException | None = None
        self._failures = 0
        self._not_before = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._create_timer: asyncio.TimerHandle | None = None
        self._all_ready: asyncio.Future[None] | None = None  # while it is awaited
        try:
            for _ in range(bounds.size):
                self._create_actor()
        except BaseException:
            self.close(at_once=True)
            raise

    def __len__(self) -> int:
        return len(self._actors)

    def __repr__(self) -> str:
        ready = sum(not actor.is_away for actor in self._actors)
        state = "closed, " if self.is_closed else ""
        return (
            f"{state}{len(self._actors)} actors, {ready} ready, {self._calls} calls, "
            f"{self.deaths} died"
        )

    @property
    def name(self) -> str:
        """The name of the actors for error messages."""
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
            pause = self._not_before - self.loop.time()
            if pause > 0:
                raise ActorDiedError(
                    f"all actors of the pool of {self.name} have died, the last of "
                    f"them before they answered a call; the pool starts another in "
                    f"{pause:.0f} s.",
                    self.name,
                ) from self._last_death
            self._create_actor()
        actor = min(actors, key=_load)
        if (
            len(actors) < bounds.most
            and actor.calls >= bounds.target
            and self._calls >= bounds.target * len(actors)
            and self.loop.time() >= self._not_before
        ):
            self._create_actor()
        return actor

    def _closed(self) -> MisuseError:
        error = MisuseError(f"the pool of {self.name} is closed; make a new one.")
        error.__cause__ = self._last_death
        return error

    def none_left(self) -> MisuseError | ActorDiedError:
        """Return the error of a call for which there is no actor."""
        if self._last_death is None:
            return MisuseError("this pool was made from an empty list of actors.")
        error = ActorDiedError(
            f"all actors of this pool of {self.name} have died; make a pool of others.",
            self.name,
        )
        error.__cause__ = self._last_death
        return error

    def handles(self) -> list[ActorHandle[Any]]:
        """Return the handles of all actors, by number."""
        return [actor.handle for actor in self._actors]

    def watch(self, actor: PoolActor, handle: Handle[Any]) -> None:
        """Count a call until it ends."""
        actor.calls += 1
        self._calls += 1
        _when_done(handle, partial(self._on_answer, actor))

    def _on_answer(self, actor: PoolActor, handle: Handle[Any]) -> None:
        """Count the end of a call."""
        actor.calls -= 1
        self._calls -= 1
        if not actor.calls:
            actor.idle_since = self.loop.time()
            self._set_idle_timer()
        if handle.cancelled():
            return
        # Read the attribute: `exception()` would mark the error as retrieved.
        if isinstance(handle._exception, ActorDiedError):
            if not actor.is_away:
                self.check_alive(actor)
        elif not actor.has_answered:
            actor.has_answered = True
            self._failures = 0

    # Creating and removing actors

    def _create_actor(self) -> None:
        assert self._make is not None, self
        self.add(self._make())

    def add(self, handle: object) -> None:
        """Add an actor to the pool.

        Raises:
            MisuseError: the argument is not an actor's handle, or already in the pool.
        """
        if any(handle is actor.handle for actor in self._actors):
            raise MisuseError(f"{handle!r} is already in this pool.")
        if not isinstance(handle, ActorHandle):
            raise MisuseError(
                f"the function that makes actors for this pool returned {handle!r}; it "
                f"must return an actor's handle, as `lambda: Model.remote('large')` "
                f"does."
            )
        self.interface = handle._link.interface
        taken = {actor.number for actor in self._actors}
        number = next(number for number in count() if number not in taken)
        actor = PoolActor(self, number, handle)
        insort(self._actors, actor, key=_number)
        actor.link.watch(actor)
        self.check_alive(actor)

    def check_alive(self, actor: PoolActor) -> None:
        """Ask the actor whether it is alive; send it no calls until it answers."""
        if actor not in self._actors:
            return
        actor.is_away = True
        try:
            ready = actor.link.ready()
        except NodeError as error:
            # The node is closed.
            self._remove_dead(actor, error)
            return
        actor.checked = ready
        _when_done(ready, partial(self._on_ready, actor))

    def _on_ready(self, actor: PoolActor, handle: Handle[None]) -> None:
        if handle.cancelled():
            return
        error = handle.exception()
        if error is not None:
            self._remove_dead(actor, error)
            return
        if handle is not actor.checked or actor not in self._actors:
            return  # it was asked again after this answer, or has been removed
        try:
            if actor.lost is None:
                actor.lost = actor.link.lost()
                _when_done(actor.lost, partial(self._on_lost, actor))
        except NodeError as closed:
            self._remove_dead(actor, closed)
            return
        actor.is_away, actor.has_been_ready = False, True
        actor.idle_since = self.loop.time()
        self._set_idle_timer()
        self._settle_all_ready()

    def _on_lost(self, actor: PoolActor, handle: Handle[None]) -> None:
        """Ask an actor again whose process is lost: it restarts, or is dead."""
        if not handle.cancelled():
            handle.exception()  # `link.ready()` reports the cause
            actor.lost = None
            self.check_alive(actor)

    def _release(self, actor: PoolActor) -> None:
        """Let go of an actor; `ended` waits for its process, unless it was given.

        The wait for the loss of the process refers to the actor. Without a withdrawal,
        only the garbage collector would release the last handle of a given actor.
        """
        lost, actor.lost = actor.lost, None
        if lost is not None:
            lost.cancel()
        if self.is_given:
            return
        with suppress(NodeError):  # the node is closed, and its processes have ended
            ended = actor.link.ended()
            self._leaving.add(ended)
            _when_done(ended, self._leaving.discard)

    def _remove_dead(self, actor: PoolActor, error: BaseException) -> None:
        if self.is_closed or actor not in self._actors:
            return
        self._actors.remove(actor)
        self._release(actor)
        self.deaths += 1
        self._last_death = error
        self._settle_all_ready(None if actor.has_been_ready else error)
        if not isinstance(error, ActorDiedError):
            # The node was closed, or the task that made this pool has ended.
            self.close(at_once=True)
            return
        if not actor.is_ended_here:
            _warn("a pool has lost its actor %d: %s", actor.number, error)
        if actor.has_answered or actor.is_ended_here:
            self._not_before = 0.0
        else:
            self._back_off()
        self._fill()

    def _back_off(self) -> None:
        """Pause the creation of actors, twice as long with each failure."""
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
            _warn("a pool could not start another actor", exc_info=True)
            self._last_death = error
            self._back_off()
        self._fill()

    def _set_idle_timer(self) -> None:
        if self.is_given:
            return
        if self._idle_timer is None and len(self._actors) > self._bounds.least:
            since = min((a.idle_since for a in self._actors if a.is_idle), default=None)
            if since is not None:
                due = since + self._bounds.idle_after
                self._idle_timer = self.loop.call_at(due, self._remove_idle, since)

    def _remove_idle(self, since: float) -> None:
        self._idle_timer = None
        for actor in self._actors[::-1]:
            if len(self._actors) <= self._bounds.least:
                break
            if actor.is_idle and actor.idle_since <= since:
                self._actors.remove(actor)
                actor.link.terminate()
                self._release(actor)
        self._set_idle_timer()

    # Start and end of the pool

    async def ready(self) -> None:
        """Wait until all actors are ready.

        Raises:
            ActorDiedError: an actor died first, most likely in its constructor.
            MisuseError: the pool is closed.
            InfeasibleError: even an idle node has no room for all the actors.
        """
        from asyncio import shield

        if self.is_closed:
            raise self._closed()
        if self._are_all_ready():
            return
        if self.is_given and not self._actors:
            raise self.none_left()
        if self._all_ready is None:
            self._all_ready = self.loop.create_future()
            # If the waiters are cancelled, nobody wants its error.
            _when_done(self._all_ready, lambda ready: ready.exception())
        all_ready = self._all_ready
        if not self.is_given:
            try:
                await check_room(self.name, [actor.link for actor in self._actors])
            except InfeasibleError:
                self.close(at_once=True)
                raise
        await shield(all_ready)

    def _are_all_ready(self) -> bool:
        are_enough = len(self._actors) >= self._bounds.least
        return are_enough and not any(actor.is_away for actor in self._actors)

    def _settle_all_ready(self, error: BaseException | None = None) -> None:
        if error is None and not self._are_all_ready():
            return
        all_ready, self._all_ready = self._all_ready, None
        if all_ready is None:
            return
        if error is None:
            all_ready.set_result(None)
        else:
            all_ready.set_exception(error)

    def close(self, at_once: bool) -> None:
        """Refuse calls and end all actors: at once, or after the calls made so far."""
        if self.is_closed:
            return
        self.is_closed = True
        for timer in (self._idle_timer, self._create_timer):
            if timer is not None:
                timer.cancel()
        self._settle_all_ready(self._closed())
        actors, self._actors = self._actors, []
        for actor in actors:
            if at_once and not self.is_given:
                actor.link.kill(no_restart=True)
            elif not self.is_given:
                actor.link.terminate()
            self._release(actor)

    async def ended(self) -> None:
        """Wait until all processes have ended."""
        from asyncio import gather

        await gather(*self._leaving, return_exceptions=True)


async def check_room(name: str, links: Sequence[Link]) -> None:
    """Check that the node can hold all these actors at once.

    Actors with different requests are not checked.

    Raises:
        InfeasibleError: even an idle node has no room for all the actors.
    """
    from asyncio import gather

    if len(links) < 2:
        return  # the request of one actor was checked when it was created
    rooms = await gather(*(link.room() for link in links), return_exceptions=True)
    kinds = {room for room in rooms if not isinstance(room, BaseException)}
    if len(kinds) != 1:
        return  # `PoolScheduler.ready` raises the error, if any
    [(most, request)] = kinds
    if most is not None and most < len(rooms):
        raise InfeasibleError(
            f"a pool of {len(rooms)} {name}, each with {request}, can never be ready: "
            f"this node has room for {most} at once, even when idle. Make the pool "
            f"smaller, or ask for less for each actor."
        )


_LEAST: Final = whole(0, "a whole number of actors, 0 or more, or None")
_MOST: Final = whole(1, "a whole number of actors, 1 or more, or None")
_TARGET: Final = whole(1, "a whole number of calls, 1 or more, or None")
_IDLE: Final = duration("a number of seconds, 0 or more")


def check_bounds(
    size: object, min_size: object, max_size: object, target: object, idle_after: object
) -> PoolLimits:
    """Check the arguments of `ActorPool`.

    Raises:
        OptionError: an argument is invalid.
    """
    if size is None and min_size is None:
        raise OptionError(
            "ActorPool() needs the number of actors; give size=4, or min_size=1 and "
            "max_size=4."
        )
    least = _LEAST("size", size) if min_size is None else _LEAST("min_size", min_size)
    first = least if size is None else _LEAST("size", size)
    most = first if max_size is None else _MOST("max_size", max_size)
    if not least <= first <= most or not most:
        raise OptionError(
            f"ActorPool needs min_size <= size <= max_size, and a max_size of 1 or "
            f"more; got size={size!r}, min_size={min_size!r}, max_size={max_size!r}."
        )
    if least == most and (target is not None or idle_after is not None):
        option = "target" if target is not None else "idle_after"
        raise OptionError(
            f"{option}= sets when a pool grows or shrinks, but this pool always has "
            f"{most} actors; give min_size or max_size as well."
        )
    return PoolLimits(
        size=first,
        least=least,
        most=most,
        target=1 if target is None else _TARGET("target", target),
        idle_after=60.0 if idle_after is None else _IDLE("idle_after", idle_after),
    )


GIVEN: Final = PoolLimits(size=0, least=0, most=0, target=1, idle_after=0.0)
"""The limits of a pool that was made from a list of actors."""


A = TypeVar("A")
T = TypeVar("T")
R = TypeVar("R")


class MakesActor(Protocol[A]):
    """A class under `@remote` whose constructor needs no arguments."""

    def remote(self) -> ActorHandle[A]:
        """Start an actor."""


class PoolMethod(CalledFirst, NotPassedOn, Mapper):
    """A method of a pool; `.remote(...)` calls it on one of the actors."""

    __slots__ = ("_name", "_pool")

    _PASS_INSTEAD = "pass handles of its actors"

    def __init__(self, pool: ActorPool[Any], name: str) -> None:
        self._pool = pool
        self._name = name

    def __repr__(self) -> str:
        return f"<PoolMethod {self.__name__}>"

    @property
    def __name__(self) -> str:
        """The name of the method for error messages."""
        return f"{self._pool._scheduler.name}.{self._name}"

    def remote(self, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Call the method on the actor with the fewest unanswered calls.

        Raises:
            MisuseError: the arguments do not match the method's parameters, or the pool
                is closed.
            NoLoopError: called in a thread other than the event loop's.
            SerializationError: an argument cannot be pickled.
            ActorDiedError: all actors have died, and the back-off has not passed.
        """
        return self._called(lambda method: method.remote(*args, **kwargs))

    def _remote_chunk(self, arguments: tuple[Any, ...]) -> Handle[Any]:
        return self._called(lambda method: method._remote_chunk(arguments))

    def _called(self, call: Callable[[RemoteMethod], Handle[Any]]) -> Handle[Any]:
        # Imported late: it imports asyncio.
        from aiogpu.api.results.handle import check_thread

        scheduler = self._pool._scheduler
        check_thread(scheduler.loop, f"{self.__name__}.remote()")
        actor = scheduler.take()
        method = getattr(actor.handle, self._name)
        if isinstance(method, GeneratorMethod):
            raise MisuseError(
                f"{self.__name__} is a generator, and a pool can only call methods "
                f"with one result; call it by the handle of one actor."
            )
        handle = call(method)
        scheduler.watch(actor, handle)
        return handle

    if not TYPE_CHECKING:

        def options(self, **options: object) -> NoReturn:
            """Raise `MisuseError`; `OptionError` for an unknown option."""
            TaskOptions.check(options, "method")
            given = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise MisuseError(
                f"{self.__name__} of a pool has no .options(): write `@aiogpu.method("
                f"{given or '...'})` above the method in its class."
            )

    def _what_to_write(self) -> str:
        return (
            f"{self.__name__} runs in an actor's process: write `await "
            f"pool.{self._name}.remote(...)`."
        )


class ActorPool(EnteredOnLoop, NotPassedOn, SetInItsProcess, Generic[A]):
    """Several actors of one class that are called as if they were one.

    `await pool.method.remote(...)` calls the actor with the fewest unanswered calls;
    `pool.method.map(items)` does so for each item. Actors that are not ready, because
    they start or restart, get calls only if no actor is ready.

    `await pool` waits until the actors are ready. `async with` waits as well, and ends
    the actors at the end of the block: after the calls made so far, or at once if the
    block raised. Without `async with` the actors end when the pool is dropped.

    With `min_size` below `max_size` the pool grows and shrinks. A dead actor is
    replaced: at once if it had answered a call, else after a delay that doubles up to
    one minute. Its unanswered calls raise `ActorDiedError`, and a warning is logged
    unless this program ended the actor. If the pool cannot fit even on an idle node,
    `await pool` raises `InfeasibleError`.

    A pool made from a list of actors calls these. It does not end them, nor replace
    dead ones. When all have died, calls raise `ActorDiedError`.

    `for actor in pool` iterates over the handles of the actors, ready or not, for a
    call to each: `await asyncio.gather(*(actor.ping.remote() for actor in pool))`.

    The pool has one name of its own, `aclose`; all others are methods of the actors.
    `aiogpu.util.ActorPool` has the methods of Ray's pool, such as `submit`.
    """

    _PASS_INSTEAD = "pass handles of its actors"

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
        """Start the actors, or make a pool of existing actors.

        Args:
            actor: a class under `@aiogpu.remote`; or a function that starts an actor
                and returns its handle, such as
                `lambda: Model.options(num_gpus=0.5).remote("large")`; or a list of
                actors' handles, without the other options.
            size: number of actors at first; default `min_size`.
            min_size: fewest actors, 0 or more; default `size`.
            max_size: most actors; default `size`.
            target: unanswered calls per actor, 1 or more, above which another actor is
                started; default 1.
            idle_after: seconds without a call, 0 or more, after which an actor above
                `min_size` ends; default 60.

        Raises:
            OptionError: an argument is invalid.
            MisuseError: `actor` has another type, or returned another object.
            NoLoopError: no event loop is running in this thread.
        """
        interface, make, given = _maker(actor)
        sizes = (size, min_size, max_size, target, idle_after)
        if make is None and any(option is not None for option in sizes):
            raise OptionError(
                "ActorPool([...]) calls existing actors and starts none: leave out "
                "size, min_size, max_size, target and idle_after."
            )
        bounds = GIVEN if make is None else check_bounds(*sizes)
        from asyncio import _get_running_loop

        loop = _get_running_loop()
        if loop is None:
            from aiogpu.api.session import no_loop

            raise no_loop("ActorPool()")
        self._scheduler = PoolScheduler(interface, make, bounds, loop)
        for handle in given:
            self._scheduler.add(handle)

    def __repr__(self) -> str:
        return f"<ActorPool of {self._scheduler.name}: {self._scheduler!r}>"

    def __del__(self) -> None:
        scheduler = self.__dict__.get("_scheduler")
        if scheduler is not None and not scheduler.is_closed:
            # Any thread may drop the last reference.
            with suppress(RuntimeError):  # the loop is closed, and so is its node
                scheduler.loop.call_soon_threadsafe(scheduler.close, False)

    def __len__(self) -> int:
        """Return the number of actors, ready or not."""
        return len(self._scheduler)

    def __iter__(self) -> Iterator[ActorHandle[A]]:
        """Iterate over the handles of the actors there are now, ready or not."""
        return iter(self._scheduler.handles())

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> PoolMethod:
        if name.startswith("__") or name == "_scheduler":
            raise AttributeError(f"an ActorPool has no attribute {name}.")
        interface = self._scheduler.interface
        if interface is not None and name not in interface.methods:
            raise no_method(interface, name)
        # It refers to the pool, which must not refer to it: dropping the pool ends the
        # actors at once.
        return PoolMethod(self, name)

    def _as_called(self) -> str:
        return "aiogpu.ActorPool(...)"

    def __await__(self) -> Generator[Any, None, ActorPool[A]]:
        self._check_loop("`await`")
        yield from self._scheduler.ready().__await__()
        return self

    async def __aenter__(self) -> ActorPool[A]:
        try:
            return await self
        except BaseException:
            await self._end(at_once=True)
            raise

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self._end(at_once=error is not None)

    def _check_loop(self, what: str) -> None:
        from aiogpu.api.results.handle import check_loop

        check_loop(self._scheduler.loop, f"{what} of a pool")

    async def aclose(self) -> None:
        """End the actors after the calls made so far, and wait; idempotent."""
        await self._end(at_once=False)

    async def _end(self, at_once: bool) -> None:
        self._check_loop("aclose()")
        self._scheduler.close(at_once)
        await self._scheduler.ended()


def _maker(
    actor: object,
) -> tuple[ActorInterface | None, Callable[[], object] | None, Sequence[object]]:
    """Return the actors' interface, the function to start one, and existing actors."""
    if isinstance(actor, RemoteClass):
        return actor._interface, actor.remote, ()
    if isinstance(actor, Iterable) and not isinstance(actor, type):
        handles = list(actor)
        if all(isinstance(handle, ActorHandle) for handle in handles):
            return None, None, handles
    elif callable(actor) and not isinstance(actor, type | Decorated):
        return None, actor, ()
    raise MisuseError(
        f"ActorPool() takes a class under @aiogpu.remote, a function that starts one "
        f"actor, such as `lambda: Model.remote('large')`, or a list of actors' "
        f"handles, not {actor!r}."
    )


def typed(handle: ActorHandle[A] | ActorPool[A], /) -> A:
    """Return the argument, with the type of the actor's class for type checkers.

    Type checkers then know the parameters and results of methods under
    `@aiogpu.method`: `await aiogpu.typed(counter).add.remote(1)`.
    """
    return cast("A", handle)
