"""`@batch`: gathers calls with one item each into calls with a list of items.

The decorated function is an `async def` as well, so an actor's method stays a method.

A batch is *due* when it is full, or when its first call has waited for `max_wait`. A
due batch starts as soon as fewer than `max_concurrency` batches run, so a call waits at
most for `max_wait` and the batches before its own. The end of a batch does not make the
next one due: the next calls of its callers join the calls that came meanwhile.

Light to import: user modules load this file in every worker, so the first call imports
asyncio.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from functools import partial, update_wrapper
from inspect import Parameter, Signature
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, overload
from weakref import WeakValueDictionary

from aiogpu.api.options import check_duration, whole_number
from aiogpu.api.usage_errors import options_of
from aiogpu.errors import MisuseError, NoLoopError

if TYPE_CHECKING:
    import asyncio

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")

_POSITIONAL: Final = {Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD}
_ITEM: Final = Parameter("item", Parameter.POSITIONAL_ONLY)
_SELF: Final = Parameter("self", Parameter.POSITIONAL_ONLY)


class BatchDecorator(Protocol):
    """The type of `batch(...)`: a decorator that turns lists into single items.

    The awaitable's type contains no `Any`: mypy would make the result of a `gather` of
    two awaitables with different results `Any`.
    """

    @overload
    def __call__(
        self,
        function: Callable[
            [list[T]], Coroutine[Any, Any, Sequence[R | Exception | BaseException]]
        ],
        /,
    ) -> Callable[[T], Coroutine[object, None, R]]: ...

    @overload
    def __call__(
        self,
        function: Callable[
            [S, list[T]], Coroutine[Any, Any, Sequence[R | Exception | BaseException]]
        ],
        /,
    ) -> Callable[[S, T], Coroutine[object, None, R]]: ...


@options_of("batch()")
def batch(
    *, max_size: int, max_wait: float = 0.0, max_concurrency: int = 1
) -> BatchDecorator:
    """Decorator: gather calls with one item each into calls with a list of items.

    The function or method is an `async def` that takes a list and returns a list with
    one result per item, in the same order. The decorated function takes one item and
    returns one result. Calls on the same instance and event loop at about the same
    time reach the function together, in the order of the calls. The function runs in
    a separate asyncio task, in the context of the first caller.

    A batch starts when `max_size` items wait, or `max_wait` seconds after its first
    item came, but not while `max_concurrency` batches run.

    If the function raises an exception, all callers of the batch get it; if it returns
    an exception in place of a result, only the caller of that item gets it. Cancelling
    a caller removes its item from a batch that has not started; cancelling the last
    caller of a running batch cancels the batch. If the function does not return a list
    of the same length, all callers get a `MisuseError`. The function must not await the
    batched method on the same instance: the batch that would answer cannot start.
    `method.__wrapped__` is the undecorated function.

    Intended for `async def` methods of actors, but works without a node.

    Args:
        max_size: most items in a batch, 1 or more.
        max_wait: seconds that the first item waits for others, 0 or more; default 0: a
            batch has the calls of one iteration of the event loop.
        max_concurrency: most batches of one instance at once, 1 or more; default 1.
            Code that uses a GPU gains nothing by more than 1.

    Raises:
        OptionError: an option is invalid.
        MisuseError: the decorated object is not an `async def` that takes one list.
    """
    whole_number("max_size", max_size, 1, "a whole number of items, 1 or more")
    what = "a whole number of batches, 1 or more"
    whole_number("max_concurrency", max_concurrency, 1, what)
    check_duration("max_wait", max_wait, "a number of seconds, 0 or more")

    def decorate(function: Any) -> Any:
        _check_function(function)
        return _batched(Batching(function, max_size, max_wait, max_concurrency))

    return decorate


def _batched(batching: Batching) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call_method(self: object, item: object, /) -> Any:
        call = batching.join(self, item)
        try:
            return await call.future
        except BaseException:
            call.queue.withdraw(call)
            del call  # breaks a cycle: the error's traceback refers to this frame
            raise

    async def call_function(item: object, /) -> Any:
        return await call_method(None, item)

    call: Any = call_method if batching.is_method else call_function
    update_wrapper(call, batching.function)
    call.__annotations__ = {}  # the function's own annotations are for lists
    call.__signature__ = Signature([_SELF, _ITEM] if batching.is_method else [_ITEM])
    return call  # type: ignore[no-any-return]


def _check_function(function: Any) -> None:
    if isinstance(function, staticmethod | classmethod):
        raise MisuseError(
            f"batch() was given the {type(function).__name__} {function.__name__}; "
            f"write @{type(function).__name__} above @aiogpu.batch(...), not below."
        )
    if hasattr(function, "__aiogpu_function__"):
        raise MisuseError(
            f"batch() cannot gather calls of {function!r}, which run in different "
            f"processes. Decorate an async method of an actor instead."
        )
    if not inspect.isfunction(function):
        raise MisuseError(
            f"batch() was given {function!r}; write @aiogpu.batch(max_size=...) above "
            f"an `async def` that takes a list."
        )
    if not inspect.iscoroutinefunction(function):
        raise MisuseError(
            f"batch() needs a coroutine function, and {function.__qualname__} is none; "
            f"write `async def`, without `yield`."
        )
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    place = function.__qualname__.rpartition(".")[0]
    is_in_class = bool(place) and not place.endswith("<locals>")
    # A static method of a class has one parameter.
    counts = {1, 2} if is_in_class else {1}
    if len(parameters) not in counts or {p.kind for p in parameters} - _POSITIONAL:
        raise MisuseError(
            f"{function.__qualname__}{signature} cannot be batched: it must take one "
            f"list of items{' after self' if is_in_class else ''} and nothing else. "
            f"Put further arguments into the items."
        )


class Batching:
    """A decorated function and its queues.

    Attributes:
        name: the function's name for error messages.
        function: the undecorated function.
        is_method: True if the first parameter is an instance.
        max_size: most items in a batch.
        max_wait: seconds that the first item waits for others.
        max_concurrency: most batches at once, for each instance and loop.
    """

    def __init__(
        self,
        function: Callable[..., Coroutine[Any, Any, Sequence[Any]]],
        max_size: int,
        max_wait: float,
        max_concurrency: int,
    ) -> None:
        self.name = function.__qualname__.rpartition("<locals>.")[2]
        self.function = function
        self.is_method = len(inspect.signature(function).parameters) == 2
        self.max_size = max_size
        self.max_wait = max_wait
        self.max_concurrency = max_concurrency
        # By identity, because instances may be equal or unhashable.
        self._queues: WeakValueDictionary[tuple[int, int], BatchQueue]
        self._queues = WeakValueDictionary()

    def __reduce__(self) -> tuple[type[Batching], tuple[Any, ...]]:
        limits = (self.max_size, self.max_wait, self.max_concurrency)
        return Batching, (self.function, *limits)

    def join(self, instance: object, item: object) -> Call:
        """Make a call on the running loop.

        Args:
            instance: the instance of a method; None for a function.
            item: the argument.

        Raises:
            NoLoopError: no asyncio loop is running in this thread.
        """
        from asyncio import _get_running_loop

        loop = _get_running_loop()
        queue = self._queues.get((id(loop), id(instance)))
        if queue is None:
            if loop is None:
                raise NoLoopError(
                    f"{self.name} needs an asyncio event loop, and none is running in "
                    f"this thread; await it in a coroutine that aiogpu.run() runs."
                )
            queue = BatchQueue(self, instance, loop)
            self._queues[id(loop), id(instance)] = queue
        return queue.take(item)

    def check(self, results: object, count: int) -> Sequence[Any]:
        """Return the results; raise `MisuseError` unless there are `count`."""
        kind = type(results).__name__
        if isinstance(results, str | bytes) or not isinstance(results, Sequence):
            returned = f"an object of type {kind}"
        elif len(results) != count:
            returned = f"a {kind} of {len(results)}"
        else:
            return results
        raise MisuseError(
            f"{self.name} was given a list of {count} and must return a list of "
            f"{count}, one result for each item in the same order; it returned "
            f"{returned}. For an item that fails, return the exception as its result."
        )


class Call:
    """A call with one item.

    Attributes:
        item: the argument.
        due: loop time until which the call waits for others.
        context: the caller's context.
        queue: the queue of the call.
        future: the future that the caller awaits.
        batch: the call's batch; None while the call waits.
    """

    __slots__ = ("batch", "context", "due", "future", "item", "queue")

    def __init__(self, queue: BatchQueue, item: object, due: float) -> None:
        self.item = item
        self.due = due
        self.context: Context = copy_context()
        self.queue = queue
        self.future: asyncio.Future[Any] = queue.loop.create_future()
        self.batch: Batch | None = None

    def fail(self, error: BaseException) -> None:
        """Raise an error in the caller."""
        if isinstance(error, StopIteration):
            # A future refuses StopIteration; a coroutine raises this RuntimeError too.
            cause, error = error, RuntimeError("the batch raised StopIteration")
            error.__cause__ = cause
        self.future.set_exception(error)


class Batch:
    """Calls that are answered together.

    Attributes:
        calls: the calls in order of arrival; empty when the batch has ended.
        task: the task that runs the user's function; None when the batch has ended.
        has_suspended: True if the function has yielded to the event loop.
    """

    __slots__ = ("calls", "has_suspended", "task")

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.has_suspended = False
        self.task: asyncio.Task[None] | None = None
        for call in calls:
            call.batch = self

    def awaited(self) -> list[Call]:
        """Return the calls whose callers still wait."""
        return [call for call in self.calls if not call.future.done()]

    def items(self) -> list[Any]:
        """Drop the calls whose callers have gone; return the items of the others."""
        self.calls = self.awaited()
        return [call.item for call in self.calls]

    def answer(self, results: Sequence[Any]) -> None:
        """Return each result to its caller, or raise it if it is an exception."""
        for call, result in zip(self.calls, results, strict=True):
            if call.future.done():
                continue
            if isinstance(result, BaseException):
                call.fail(result)
            else:
                call.future.set_result(result)

    def fail(self, error: BaseException) -> bool:
        """Raise the error in every caller; return False if no caller is left."""
        awaited = self.awaited()
        for call in awaited:
            call.fail(error)
        return bool(awaited)

    def note_suspended(self) -> None:
        """Note that the loop ran a callback that was queued after the start."""
        self.has_suspended = True


class BatchQueue:
    """The calls on one instance and one event loop.

    Only its waiting calls and its batches refer to the queue. When the last of them
    ends, the queue is collected, and then the instance can be.
    """

    __slots__ = (
        "__weakref__",
        "_batching",
        "_instance",
        "_running",
        "_timer",
        "_waiting",
        "loop",
    )

    def __init__(
        self, batching: Batching, instance: object, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.loop = loop
        self._batching = batching
        self._instance = instance
        self._waiting: dict[Call, None] = {}
        self._running: set[Batch] = set()
        self._timer: asyncio.Handle | None = None

    def take(self, item: object) -> Call:
        """Add a call; if it fills a batch, start the batch unless too many run."""
        batching, waiting = self._batching, self._waiting
        due = self.loop.time() + batching.max_wait if batching.max_wait else 0.0
        call = Call(self, item, due)
        waiting[call] = None
        if len(self._running) < batching.max_concurrency:
            if len(waiting) >= batching.max_size:
                self._start()
            elif self._timer is None:
                self._set_timer(due)
        return call

    def withdraw(self, call: Call) -> None:
        """Remove a call whose caller has gone; cancel a batch without callers."""
        if self.loop.is_closed():
            return
        call.future.cancel()  # the caller's coroutine may have been closed
        batch = call.batch
        if batch is not None:
            if batch.task is not None and not batch.awaited():
                batch.task.cancel()
            return
        self._waiting.pop(call, None)
        if not self._waiting:
            self._cancel_timer()

    def _start(self) -> None:
        waiting = self._waiting
        for call in [call for call in waiting if call.future.done()]:
            del waiting[call]  # the caller has gone
        calls = list(islice(waiting, self._batching.max_size))
        for call in calls:
            del waiting[call]
        if not waiting:
            self._cancel_timer()
        if not calls:
            return
        batch = Batch(calls)
        self._running.add(batch)
        batch.task = self.loop.create_task(self._run(batch), context=calls[0].context)
        batch.task.add_done_callback(partial(self._end, batch))
        self.loop.call_soon(batch.note_suspended)

    async def _run(self, batch: Batch) -> None:
        import asyncio

        batching = self._batching
        bound = (self._instance,) if batching.is_method else ()
        items = batch.items()
        if not items:
            return
        try:
            results = await batching.function(*bound, items)
            if batch.has_suspended and len(self._waiting) >= batching.max_size:
                # A thread or a device does the work, and should not idle while callers
                # are woken. So start the next batch first, and wake the callers after
                # the loop has polled, when a thread gets the interpreter. If the
                # function blocks the loop instead, callers go first: see `_end`.
                self._start()
                await asyncio.sleep(0)
            batch.answer(batching.check(results, len(batch.calls)))
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:
            # The callers get the error, even one that would end the loop.
            if not batch.fail(error):
                raise

    def _end(self, batch: Batch, task: asyncio.Task[None]) -> None:
        """Start the next batch; callers were woken first and may have called again."""
        self._running.discard(batch)
        if task.cancelled():
            for call in batch.calls:
                call.future.cancel()
        # Breaks a reference cycle that would keep results and frames.
        batch.calls, batch.task = [], None
        if self._waiting:
            self._start_due(self.loop.time())

    def _start_due(self, now: float) -> None:
        """Start the batches that are due, and set the timer for the next one."""
        batching, waiting = self._batching, self._waiting
        self._cancel_timer()
        while waiting and len(self._running) < batching.max_concurrency:
            due = next(iter(waiting)).due
            if len(waiting) < batching.max_size and due > now:
                self._set_timer(due)
                break
            self._start()

    def _set_timer(self, due: float) -> None:
        # A loop may wake a little early, and uvloop counts whole milliseconds. Passing
        # `due` makes the call due when the timer fires.
        self._timer = self.loop.call_at(due, self._start_due, due)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
