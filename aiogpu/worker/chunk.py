"""A chunk of a `map`: one task calls a function with one item after the other.

An error of an item ends the chunk but not the task, so the results before the error are
kept. Tracebacks show only the function's own frames.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from time import perf_counter
from types import CoroutineType
from typing import Any, Final

from aiogpu.client.current import current
from aiogpu.serialization.exceptions import RAISED, ChunkOutcome, pack_failure
from aiogpu.serialization.serializer import load_function
from aiogpu.wire.messages import CHUNKED, plain_name
from aiogpu.worker.gpu import poisoned_by
from aiogpu.worker.invoke import CO_COROUTINE, OWN_FRAMES, clear_frames, explain_quit

METHOD_MARK: Final = "__aiogpu_method__"
"""Attribute that holds the options of `@aiogpu.method`."""


class Chunk:
    """A function that is called with a time limit and items.

    A chunk that runs longer than the limit (in seconds, 0 for none) ends early, with
    fewer values than items.
    """

    __slots__ = ("_function", "_is_coroutine")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        self._is_coroutine = bool(getattr(code, "co_flags", 0) & CO_COROUTINE)

    def __call__(self, seconds: float, *items: Any) -> Any:
        """Call the function with each item; return a `ChunkOutcome` or a coroutine."""
        function, client = self._function, current.client
        values: list[Any] = []
        started = perf_counter()
        deadline = started + seconds if seconds else inf
        if self._is_coroutine:
            return self._await_each(None, items, values, started, deadline)
        failure = None
        try:
            for item in items:
                value = function(item)
                if type(value) is CoroutineType:
                    rest = items[len(values) + 1 :]
                    return self._await_each(value, rest, values, started, deadline)
                values.append(value)
                # The function has forked: the child must not run the remaining items.
                if perf_counter() > deadline or current.client is not client:
                    break
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the item's
            failure = _packed(error, client)
        return ChunkOutcome(values, perf_counter() - started, failure)

    async def _await_each(
        self,
        first: CoroutineType[Any, Any, Any] | None,
        items: tuple[Any, ...],
        values: list[Any],
        started: float,
        deadline: float,
    ) -> ChunkOutcome:
        function, client = self._function, current.client
        failure = None
        try:
            if first is not None:
                values.append(await first)
            for item in items:
                if values and (
                    perf_counter() > deadline or current.client is not client
                ):
                    break
                value = function(item)
                if type(value) is CoroutineType:
                    value = await value
                values.append(value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the item's
            failure = _packed(error, client)
        return ChunkOutcome(values, perf_counter() - started, failure)


def _packed(error: BaseException, client: object) -> tuple[Any, ...]:
    """Pack an item's error; raise an error that concerns the whole task."""
    if current.client is not client:
        raise error
    if any(current.accelerators.values()):
        from aiogpu.worker.gpu import has_run_out

        if poisoned_by(error) or has_run_out(error):
            raise error
    explain_quit(error)
    packed = tuple(pack_failure(0, RAISED, error, OWN_FRAMES))
    clear_frames(error)
    return packed


def load_chunk(payload: bytes) -> Chunk:
    """Unpickle a function that was sent to be called with chunks."""
    return Chunk(load_function(payload))


class PickledChunk:
    """A pickled function that unpickles as a `Chunk`."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return load_chunk, (self._payload,)


def method_of(actor: object, name: str) -> Callable[..., Any]:
    """Return an actor's method by its name on the wire; lookup errors pass through."""
    method = _find_method(actor, plain_name(name))
    return Chunk(method) if name.endswith(CHUNKED) else method


def _find_method(actor: object, name: str) -> Any:
    """Return the object's callable attribute, else the method of its class.

    `self.value = 0` beside a method `value` hides the method, which is found here as in
    Ray; `self.predict = compile(self.predict)` replaces it.
    """
    found = getattr(actor, name)
    if callable(found):
        return found
    kind = type(actor)
    hidden = next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
    return hidden.__get__(actor, kind)


def is_timed(actor: object, name: str) -> bool:
    """Return whether an actor's method has a `run_timeout`."""
    options = getattr(_find_method(actor, plain_name(name)), METHOD_MARK, None)
    return getattr(options, "run_timeout", None) is not None
