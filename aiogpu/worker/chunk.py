"""A function called with one item after the other in one task: a chunk of a `map`.

What an item raises ends the chunk but not the task, so that the results before it are
not lost. The function's own frames alone are in the tracebacks of its errors.
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
from aiogpu.worker.invoke import CO_COROUTINE, OWN_FRAMES, explain_quit, let_go

METHOD_MARK: Final = "__aiogpu_method__"
"""Attribute of a function under `@aiogpu.method` with its options."""


class Chunk:
    """A function, to be called with seconds and items.

    It ends early, with fewer values than items, once it has taken longer than these
    seconds; 0 are no limit.
    """

    __slots__ = ("_function", "_is_coroutine")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        self._is_coroutine = bool(getattr(code, "co_flags", 0) & CO_COROUTINE)

    def __call__(self, seconds: float, *items: Any) -> Any:
        """Call it with each item; gives a `ChunkOutcome` or a coroutine of one."""
        function, family = self._function, current.client
        values: list[Any] = []
        begun = perf_counter()
        until = begun + seconds if seconds else inf
        if self._is_coroutine:
            return self._await_each(None, items, values, begun, until)
        failure = None
        try:
            for item in items:
                value = function(item)
                if type(value) is CoroutineType:
                    rest = items[len(values) + 1 :]
                    return self._await_each(value, rest, values, begun, until)
                values.append(value)
                # In a fork that the function has made, the rest is not its to run.
                if perf_counter() > until or current.client is not family:
                    break
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the item's
            failure = _packed(error, family)
        return ChunkOutcome(values, perf_counter() - begun, failure)

    async def _await_each(
        self,
        first: CoroutineType[Any, Any, Any] | None,
        items: tuple[Any, ...],
        values: list[Any],
        begun: float,
        until: float,
    ) -> ChunkOutcome:
        function, family = self._function, current.client
        failure = None
        try:
            if first is not None:
                values.append(await first)
            for item in items:
                if values and (perf_counter() > until or current.client is not family):
                    break
                value = function(item)
                if type(value) is CoroutineType:
                    value = await value
                values.append(value)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the item's
            failure = _packed(error, family)
        return ChunkOutcome(values, perf_counter() - begun, failure)


def _packed(error: BaseException, family: object) -> tuple[Any, ...]:
    """The error as it travels; raised where it is the whole task's."""
    if current.client is not family:
        raise error
    if any(current.accelerators.values()):
        from aiogpu.worker.gpu import has_run_out

        if poisoned_by(error) or has_run_out(error):
            raise error
    explain_quit(error)
    failed = tuple(pack_failure(0, RAISED, error, OWN_FRAMES))
    let_go(error)
    return failed


def load_chunk(payload: bytes) -> Chunk:
    """A function that was sent to be called with chunks."""
    return Chunk(load_function(payload))


class Sent:
    """A function's payload, on its way to be called with chunks."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return load_chunk, (self._payload,)


def method_of(actor: object, name: str) -> Callable[..., Any]:
    """Return what an actor is called by; raises what looking it up raises."""
    method: Callable[..., Any] = getattr(actor, plain_name(name))
    return Chunk(method) if name.endswith(CHUNKED) else method


def is_timed(actor: object, name: str) -> bool:
    """Return whether a method that an actor is called by has a `run_timeout`."""
    options = getattr(getattr(actor, plain_name(name)), METHOD_MARK, None)
    return getattr(options, "run_timeout", None) is not None
