"""`ActorPool` with the methods of `ray.util.ActorPool`, for ported Ray programs.

For code without an event loop, on the functions of `aiogpu.sync`; it works in plain
tasks too. New programs call `aiogpu.ActorPool`, which also starts and replaces actors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from aiogpu import sync
from aiogpu.errors import MisuseError, TaskTimeoutError
from aiogpu.serialization.references import HANDLE_MARK

if TYPE_CHECKING:
    from aiogpu.sync import Handle

A = TypeVar("A")
T = TypeVar("T")

__all__ = ["ActorPool"]


class ActorPool(Generic[A]):
    """Gives each call to an actor that has none; see `ray.util.ActorPool`.

    A submitted call that finds no free actor is made when `get_next` or
    `get_next_unordered` has seen another call end.

    Args:
        actors: handles of actors; the pool does not end them.

    Example:
        `ActorPool([a, b]).map(lambda actor, x: actor.double.remote(x), range(9))`
    """

    def __init__(self, actors: Iterable[A]) -> None:
        self._free = deque(actors)
        self._waiting: deque[tuple[Callable[[A, Any], Any], Any]] = deque()
        # Both in the order of submission; a call that could not be made has no actor.
        self._running: dict[object, A | None] = {}
        self._errors: dict[object, Exception] = {}

    def __repr__(self) -> str:
        free, calls = len(self._free), len(self._running) + len(self._waiting)
        return f"<ActorPool: {free} free actors, {calls} calls>"

    def submit(self, fn: Callable[[A, T], Handle[Any]], value: T) -> None:
        """Call `fn(actor, value)` on a free actor, now or as soon as there is one.

        Args:
            fn: starts a call and returns its handle, as `lambda actor, value:
                actor.method.remote(value)` does.
            value: the second argument of `fn`.
        """
        self._waiting.append((fn, value))
        self._start()

    def _start(self) -> None:
        while self._free and self._waiting:
            fn, value = self._waiting.popleft()
            actor = self._free.popleft()
            try:
                handle = fn(actor, value)
                if not hasattr(type(handle), HANDLE_MARK):
                    raise MisuseError(
                        f"the function of a pool returned {handle!r}; it must return a "
                        f"call's handle, as `lambda actor, value: "
                        f"actor.method.remote(value)` does."
                    )
            except Exception as error:  # noqa: BLE001 - `get_next` raises it in turn
                failed = object()
                self._running[failed], self._errors[failed] = None, error
                self._free.append(actor)
            else:
                self._running[handle] = actor

    def has_next(self) -> bool:
        """Return whether `get_next` has a result to return or to wait for."""
        return bool(self._running or self._waiting)

    def has_free(self) -> bool:
        """Return whether an actor is free, and no submitted call waits for it."""
        return bool(self._free) and not self._waiting

    def get_next(self, timeout: float | None = None) -> Any:
        """Return the next result, in the order of `submit`.

        Args:
            timeout: seconds; None waits without limit. After a timeout, the next call
                returns the same result.

        Raises:
            Exception: the error of the call; it counts as its result.
            TaskTimeoutError: the time is up.
            MisuseError: all results of submitted calls were taken.
        """
        self._check_has_next("get_next()")
        return self._take([next(iter(self._running))], timeout)

    def get_next_unordered(self, timeout: float | None = None) -> Any:
        """Return the result of the call that ends next; otherwise like `get_next`."""
        self._check_has_next("get_next_unordered()")
        return self._take(list(self._running), timeout)

    def _check_has_next(self, what: str) -> None:
        if not self._running and not self._waiting:
            raise MisuseError(
                f"{what} has nothing to wait for: all results of submitted calls were "
                f"taken. Check has_next() first."
            )
        if not self._running:
            raise MisuseError(
                f"{what} would wait for ever: {len(self._waiting)} calls wait, and the "
                f"pool has no actor. Add one by push()."
            )

    def _take(self, calls: list[Any], timeout: float | None) -> Any:
        failed = next((call for call in calls if call in self._errors), None)
        if failed is not None:
            del self._running[failed]
            raise self._errors.pop(failed)
        ended, _ = sync.wait(calls, num_returns=1, timeout=timeout)
        if not ended:
            raise TaskTimeoutError(
                f"no result within {timeout:g} s; call again to go on waiting."
            )
        self._free.append(cast("A", self._running.pop(ended[0])))
        self._start()
        return sync.get(ended[0])

    def map(
        self, fn: Callable[[A, T], Handle[Any]], values: Iterable[T]
    ) -> Iterator[Any]:
        """Call `fn(actor, value)` for each value; yield the results in their order.

        All values are read at once.

        Raises:
            MisuseError: results of earlier calls were not taken.
        """
        return self._map(fn, values, self.get_next)

    def map_unordered(
        self, fn: Callable[[A, T], Handle[Any]], values: Iterable[T]
    ) -> Iterator[Any]:
        """Like `map`, with the results in the order in which the calls end."""
        return self._map(fn, values, self.get_next_unordered)

    def _map(
        self,
        fn: Callable[[A, T], Handle[Any]],
        values: Iterable[T],
        get_next: Callable[[], Any],
    ) -> Iterator[Any]:
        if self.has_next():
            raise MisuseError(
                "map() would mix its results with those of earlier calls; take these "
                "by get_next() while has_next()."
            )
        for value in values:
            self.submit(fn, value)

        def results() -> Iterator[Any]:
            while self.has_next():
                yield get_next()

        return results()

    def push(self, actor: A) -> None:
        """Add an actor to the pool.

        Raises:
            MisuseError: the actor is already in the pool.
        """
        if actor in self._free or actor in self._running.values():
            raise MisuseError(f"{actor!r} is already in this pool.")
        self._free.append(actor)
        self._start()

    def pop_idle(self) -> A | None:
        """Remove a free actor from the pool and return it; None if there is none."""
        return self._free.popleft() if self.has_free() else None
