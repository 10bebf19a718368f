"""`ActorPool`: several actors of one class that are called as if they were one.

Light on purpose, as `api.remote_function` is: user modules bring this file into every
worker.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    NoReturn,
    Protocol,
    TypeVar,
    cast,
)

from aiogpu.api.actor import (
    ActorHandle,
    RemoteClass,
)
from aiogpu.api.actor_class import ActorInterface, no_method
from aiogpu.api.actor_options import check_method_options
from aiogpu.api.mapper import Mapper
from aiogpu.api.method import GeneratorMethod, RemoteMethod
from aiogpu.api.options import LONGEST_TIME, whole
from aiogpu.api.pool_scheduler import PoolLimits
from aiogpu.api.remote_function import Decorated
from aiogpu.api.usage_errors import CalledFirst, EnteredOnLoop, options_of
from aiogpu.errors import MisuseError, NoLoopError, OptionError

if TYPE_CHECKING:
    from aiogpu.api.handle import Handle
    from aiogpu.api.pool_scheduler import PoolScheduler


USUAL_TARGET: Final = 1


USUAL_IDLENESS: Final = 60.0


_check_least: Final = whole(0, "a whole number of actors, 0 or more, or None")


_check_most: Final = whole(1, "a whole number of actors, 1 or more, or None")


_check_target: Final = whole(1, "a whole number of calls, 1 or more, or None")


def check_bounds(
    size: object, min_size: object, max_size: object, target: object, idle_after: object
) -> PoolLimits:
    """Check what `ActorPool` was given; see there.

    Raises:
        OptionError: names the option, the value and what is allowed.
    """
    first = _check_least("size", size)
    least = _check_least("min_size", min_size)
    most = _check_most("max_size", max_size)
    if first is None and least is None:
        raise OptionError(
            "ActorPool() was not told how many actors to make; say size=4, or "
            "min_size=1 and max_size=4."
        )
    first = least if first is None else first
    assert first is not None
    least = first if least is None else least
    most = first if most is None else most
    if not least <= first <= most or not most:
        raise OptionError(
            f"of ActorPool(size={size!r}, min_size={min_size!r}, "
            f"max_size={max_size!r}) size must lie between the others, and max_size be "
            f"1 or more."
        )
    bounds = PoolLimits(
        first,
        least,
        most,
        _check_target("target", target) or USUAL_TARGET,
        USUAL_IDLENESS if idle_after is None else _check_idleness(idle_after),
    )
    if least == most and (target is not None or idle_after is not None):
        option = "target" if target is not None else "idle_after"
        raise OptionError(
            f"{option}= says when a pool grows or shrinks, and this one always has "
            f"{most} actors; give min_size or max_size as well."
        )
    return bounds


def _check_idleness(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= LONGEST_TIME:
        raise OptionError(
            f"idle_after={value!r} must be a number of seconds, 0 or more. The most is "
            f"{LONGEST_TIME:_}."
        )
    return float(value)


A = TypeVar("A")


class MakesActor(Protocol[A]):
    """A class under `@remote` whose constructor needs no arguments."""

    def remote(self) -> ActorHandle[A]:
        """Make an actor."""
        ...


class PoolFinalizer:
    """Held by a pool and its methods; with the last of them the actors end."""

    __slots__ = ("crew",)

    def __init__(self, crew: PoolScheduler) -> None:
        self.crew = crew

    def __del__(self) -> None:
        crew = self.crew
        if not crew.is_closed:
            # Who drops the last reference may be any thread; a loop that is closed,
            # and its node with it, refuses.
            with suppress(RuntimeError):
                crew.loop.call_soon_threadsafe(crew.close, False)


class OptionsWhereDefined:
    """An actor's method, which has its options where the class says them."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def options(self, **options: object) -> NoReturn:
            """Always raises; `OptionError` for one that no method has."""
            check_method_options(options)
            given = ", ".join(f"{name}={value!r}" for name, value in options.items())
            raise MisuseError(
                f"{self.__name__} is a method of an actor, and has its options where "
                f"its class defines it: write `@aiogpu.method({given or '...'})` above "
                f"it, and call it by `.remote(...)`."
            )


class PoolMethod(CalledFirst, OptionsWhereDefined, Mapper):
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
        return f"{self._tie.crew.name}.{self._name}"

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

    def _called(
        self, call: Callable[[RemoteMethod[..., Any]], Handle[Any]]
    ) -> Handle[Any]:
        # Late: `session` imports asyncio.
        from aiogpu.api.loop_sessions import check_thread

        crew = self._tie.crew
        check_thread(crew.loop, f"{self.__name__}.remote()")
        member = crew.take()
        method = getattr(member.handle, self._name)
        if isinstance(method, GeneratorMethod):
            raise MisuseError(
                f"{self.__name__} is a generator, and a pool counts calls that have "
                f"one result; call it by the handle of one actor."
            )
        handle = call(method)
        crew.watch(member, handle)
        return handle

    if not TYPE_CHECKING:
        # Visible, it would make type checkers accept every direct call.
        def __call__(self, /, *args: object, **kwargs: object) -> NoReturn:
            """Always raises `MisuseError`: an actor's method is not called directly."""
            raise MisuseError(
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
        face, make = _maker(actor)
        bounds = check_bounds(size, min_size, max_size, target, idle_after)
        from asyncio import _get_running_loop

        loop = _get_running_loop()
        if loop is None:
            raise NoLoopError(
                "ActorPool() needs a running event loop, and there is none in this "
                "thread. Make it inside an `async def` that runs by aiogpu.run(main())."
            )
        from aiogpu.api.pool_scheduler import PoolScheduler

        self._tie = PoolFinalizer(PoolScheduler(face, make, bounds, loop))

    def __repr__(self) -> str:
        crew = self._tie.crew
        return f"<ActorPool of {crew.name}: {crew!r}>"

    def __len__(self) -> int:
        """Return how many actors there are, ready or not."""
        return len(self._tie.crew)

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> PoolMethod:
        if name.startswith("__"):
            raise AttributeError(f"an ActorPool has no attribute {name}.")
        face = self._tie.crew.face
        if face is not None and name not in face.methods:
            raise no_method(face, name)
        # It holds the tie, not this pool, so that the pool goes at once.
        method = PoolMethod(self._tie, name)
        self.__dict__[name] = method
        return method

    def _as_called(self) -> str:
        return "aiogpu.ActorPool(...)"

    def __await__(self) -> Generator[Any, None, ActorPool[A]]:
        yield from self._tie.crew.ready().__await__()
        return self

    async def __aenter__(self) -> ActorPool[A]:
        try:
            return await self
        except BaseException:
            await self._end(at_once=True)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._end(at_once=error is not None)

    async def aclose(self) -> None:
        """End the actors after what they were sent, and wait for it; idempotent."""
        await self._end(at_once=False)

    async def _end(self, at_once: bool) -> None:
        crew = self._tie.crew
        crew.close(at_once)
        await crew.ended()


def _maker(actor: object) -> tuple[ActorInterface | None, Callable[[], object]]:
    if isinstance(actor, RemoteClass):
        return actor._face, actor.remote
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
