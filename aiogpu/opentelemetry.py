"""Spans of tasks in OpenTelemetry: `pip install 'aiogpu[opentelemetry]'`.

`traced(f)` sends the context of the caller's span along with each call. The worker
makes two spans under it, for the queue and for the run. The exporter of the worker is
set up there, by the option `setup`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import time_ns
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

from opentelemetry.propagate import extract, inject
from opentelemetry.trace import SpanKind, Tracer, get_tracer

from aiogpu.api.remote_function import Definition, RemoteFunction
from aiogpu.api.runtime_context import get_runtime_context
from aiogpu.errors import MisuseError

__all__ = ["traced"]

P = ParamSpec("P")
R = TypeVar("R")

NAME: Final = "aiogpu"
"""Name of the tracer."""


class TracedFunction(RemoteFunction[P, R]):
    """A remote function whose tasks have spans; made by `traced`."""

    def remote(self, /, *args: Any, **kwargs: Any) -> Any:
        """Start a task as the plain function does, with the context of this span."""
        _plain(self)._definition.parameters.check(args, kwargs)
        carrier: dict[str, str] = {}
        inject(carrier)
        start: Callable[..., Any] = super().remote
        return start(carrier, time_ns(), *args, **kwargs)

    def _remote_chunk(self, arguments: tuple[Any, ...]) -> NoReturn:
        raise MisuseError(
            f"{self.__name__}.map() has chunk=, and a chunk is one task, while a "
            f"traced function has spans for each call. Leave chunk= out, or map the "
            f"plain function."
        )


def traced(function: RemoteFunction[P, R]) -> RemoteFunction[P, R]:
    """Return a remote function whose tasks have two spans of OpenTelemetry.

    The span "NAME queue" lasts from `.remote()` until the code begins, the span "NAME"
    until it has ended, with the error if it raises. Both are children of the span in
    which `.remote()` is called, and the task's own spans are children of the second.

    Args:
        function: a remote function or coroutine function.

    Raises:
        MisuseError: it is something else, such as a generator.

    Example:
        `train = traced(train)`, or `@traced` above `@aiogpu.remote`.
    """
    is_traced = isinstance(function, TracedFunction)
    if not isinstance(function, RemoteFunction) or is_traced or _is_generator(function):
        raise MisuseError(
            f"traced() was given {function!r}; give it a function or coroutine "
            f"function under @aiogpu.remote, which is not traced yet and yields no "
            f"items."
        )
    plain = function._definition
    run: Any = partial(run_coroutine if plain.is_coroutine else run_plain, function)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(run, name, getattr(function, name))
    run.__wrapped__ = function
    return TracedFunction(Definition(run), function._options)


def _is_generator(function: RemoteFunction[..., Any]) -> bool:
    return function._definition.is_generator


def _plain(traced: RemoteFunction[..., Any]) -> RemoteFunction[..., Any]:
    """Return the function under a traced one."""
    run: Any = traced._definition.function
    function: RemoteFunction[..., Any] = run.args[0]
    return function


def run_plain(
    function: RemoteFunction[..., R],
    carrier: dict[str, str],
    submitted: int,
    /,
    *args: Any,
    **kwargs: Any,
) -> R:
    """Run a task in its spans, in the worker."""
    with _spans(carrier, submitted):
        result: R = function.__wrapped__(*args, **kwargs)
        return result


async def run_coroutine(
    function: RemoteFunction[..., R],
    carrier: dict[str, str],
    submitted: int,
    /,
    *args: Any,
    **kwargs: Any,
) -> R:
    """Run a task of a coroutine function in its spans, in the worker."""
    with _spans(carrier, submitted):
        result: R = await function.__wrapped__(*args, **kwargs)
        return result


@contextmanager
def _spans(carrier: dict[str, str], submitted: int) -> Iterator[None]:
    tracer: Tracer = get_tracer(NAME)
    context, task = extract(carrier), get_runtime_context()
    attributes: dict[str, Any] = {
        "aiogpu.task": task.task_id,
        "aiogpu.worker": task.worker_id,
        **{f"aiogpu.{name}": n for name, n in task.get_assigned_resources().items()},
    }
    for kind, ids in task.get_accelerator_ids().items():
        if ids:
            attributes[f"aiogpu.{kind}.ids"] = ids
    name = task.task_name
    queue = tracer.start_span(
        f"{name} queue", context, SpanKind.INTERNAL, start_time=submitted
    )
    queue.end()
    with tracer.start_as_current_span(name, context, SpanKind.CONSUMER, attributes):
        yield
