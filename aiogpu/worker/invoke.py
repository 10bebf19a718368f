"""One call of the user's code: load the arguments, call, await, send, classify.

Every task and method is called by `invoke`: in a worker's main thread, in the threads
of an actor, on an event loop, in the program by the inline engine, and in Ray's
workers. It is a coroutine, so that code on a loop can suspend in it. An `Invoker`
supplies what differs between these places. Where no loop runs, nothing suspends, and
one `send` runs `invoke` to its end (`run_now`) without asyncio.

The rest is about failures:

- `RetryRules` decides whether a failure is retried. The worker decides, because it has
  the user's classes, and only once something has failed.
- `clear_frames` clears the frames of an error after the report. A traceback keeps the
  frames that an error has passed, with all objects in their variables. If one of these
  objects refers to the error, as a failed handle does, only the garbage collector frees
  them. In an idle process it never runs, and a failed task would keep actors and values
  alive.
- `explain_quit` explains that a debugger finds no terminal in a worker.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from time import perf_counter
from types import CodeType, CoroutineType
from typing import TYPE_CHECKING, Any, Final, final

from aiogpu.client.current import ActorExit, current, has_exited
from aiogpu.errors import (
    GpuOutOfMemoryError,
    NodeClosedError,
    SerializationError,
    TaskError,
    WorkerSetupError,
)
from aiogpu.serialization.exceptions import RAISED, UNREADABLE, UNSENDABLE, safe_text
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import (
    Retried,
    dump_result,
    is_retried,
    load_arguments,
    load_function,
    load_result,
    load_retried,
    split_results,
)
from aiogpu.wire.messages import Done, Failed, Items

if TYPE_CHECKING:
    from asyncio import Future

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and arguments by name."""

OWN_FRAMES: Final = "/aiogpu/worker/"
"""Path of this package's own frames, which are removed from users' tracebacks."""

CO_COROUTINE: Final = 0x80
"""Flag of the code of an `async def`; see `inspect`, which is slow to import."""

_CAN_RESUME: Final = 0x20 | CO_COROUTINE | 0x200
"""Flags of the code of a generator, a coroutine, an async generator."""


class UnsendableError(Exception):
    """An item of a stream cannot be sent; the cause says why."""


@final
class Raised:
    """The exception of a call, and the step that failed.

    Attributes:
        kind: a kind of failure of `serialization.exceptions`.
        error: the exception.
    """

    __slots__ = ("error", "kind")

    def __init__(self, kind: str, error: BaseException) -> None:
        self.kind = kind
        self.error = error


def call_function(function: Callable[..., Any], arguments: Arguments) -> Any:
    """Call user code, in a frame that may be interrupted, unlike the one of `invoke`.

    If the function is a builtin, it has no frame of its own.
    """
    return function(*arguments[0], **arguments[1])


def call_isolated(function: Callable[..., Any], arguments: Arguments) -> Any:
    """Call a task in a copy of the context: its variables do not reach the next task.

    Its module was imported outside, so what the module has set holds for every call.
    """
    return copy_context().run(function, *arguments[0], **arguments[1])


class Callables(dict[Any, Callable[..., Any]]):
    """Functions or methods by name, looked up at their first call.

    Attributes:
        failure: the kind of failure if the lookup raises.
        call: calls one of them with arguments.
    """

    failure: str
    call: Callable[[Callable[..., Any], Arguments], Any] = staticmethod(call_function)


def timed(
    function: Callable[..., Any], begin: Callable[[], object]
) -> Callable[..., Any]:
    """Return a function that calls `begin`, then `function`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        begin()
        return function(*args, **kwargs)

    run.__wrapped__ = function  # type: ignore[attr-defined]
    return run


class Functions(Callables):
    """Functions by id, unpickled at their first call.

    The negated id of a function maps to the same function, wrapped by `timed`.

    Args:
        begin: called when the code of a timed function begins.

    Attributes:
        payloads: the pickled functions, by id.
    """

    failure = UNREADABLE
    call = staticmethod(call_isolated)

    def __init__(self, begin: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.payloads: dict[int, bytes] = {}
        self._begin = begin

    def __missing__(self, function: int) -> Callable[..., Any]:
        if function < 0:
            assert self._begin is not None, self
            wrapped = self[function] = timed(self[-function], self._begin)
            return wrapped
        current.loader = get_ident()
        try:
            loaded: Callable[..., Any] = load_function(self.payloads[function])
        finally:
            current.loader = 0
        self[function] = loaded
        return loaded


class Constructor(Callables):
    """Constructors of actors, by the function id of the class.

    Args:
        functions: holds the classes.
        keep: receives the object, since a constructor sends no result.
        kept: what the actor's `on_evict` has returned, for its `on_return`; b"" for
            nothing.
    """

    failure = UNREADABLE

    def __init__(
        self,
        functions: Functions,
        keep: Callable[[object], object],
        kept: bytes = b"",
    ) -> None:
        super().__init__()
        self._functions = functions
        self._keep = keep
        self._kept = kept

    def __missing__(self, function: int) -> Callable[..., Any]:
        cls, keep, kept = self._functions[function], self._keep, self._kept

        def make(*args: Any, **kwargs: Any) -> None:
            actor = cls(*args, **kwargs)
            if kept:
                actor.on_return(load_result(kept))
            keep(actor)

        return make


class Invoker:
    """The parts of `invoke` that differ between the places where code runs.

    The defaults are for a worker in which an event loop runs.
    """

    def load(self, function: Callable[..., Any], payload: bytes) -> Arguments:
        """Unpickle the compound arguments of a call."""
        return open_arguments(payload)

    def wait(
        self, coroutine: CoroutineType[Any, Any, Any], call: int
    ) -> Awaitable[Any]:
        """Return an awaitable for the result of the coroutine that a call returned."""
        return coroutine

    async def send_items(self, items: Any, stream: Any) -> None:
        """Run the generator that the call has returned, and send what it yields."""
        raise NotImplementedError

    def pack(self, outgoing: PickledValue) -> bytes:
        """Make the payload of a compound value."""
        return pack_value(outgoing)


async def invoke(
    invoker: Invoker,
    call: int,
    functions: Callables,
    name: Any,
    payload: bytes,
    stream: object = None,
) -> Done | Raised:
    """Run one call to its end; return its answer or the exception.

    No interrupt lands in this frame (`Interrupts.spare`).

    Args:
        invoker: supplies what depends on the place where the call runs.
        call: number of the task or call.
        functions: holds the function or method.
        name: its name there.
        payload: the arguments.
        stream: sends the items of a generator one by one, by `Invoker.send_items`; None
            for a single result.
    """
    kind, arguments, value = functions.failure, None, None
    started = perf_counter()
    try:
        function = functions[name]
        kind = UNREADABLE
        current.loader = get_ident()
        arguments = (
            load_arguments(payload)
            if type(payload) is bytes
            else invoker.load(function, payload)
        )
        current.loader = 0
        kind = RAISED
        value = functions.call(function, arguments)
        if type(value) is CoroutineType:
            value = await invoker.wait(value, call)
        if type(payload) is not bytes:
            value = split_results(value, payload)
        if stream is not None:
            await invoker.send_items(value, stream)
            value = None
        if current.exits and has_exited():
            raise ActorExit
        kind = UNSENDABLE
        result = dump_result(value)
        if type(result) is PickledValue:
            result = invoker.pack(result)
        took = int((perf_counter() - started) * 1e6) + 1
        return Done(call, result, took)  # type: ignore[arg-type]
    except BaseException as error:  # noqa: BLE001 - reported for the call
        current.loader = 0
        if type(value) is CoroutineType and not value.cr_suspended:
            value.close()  # avoids the warning about a coroutine that never began
        if type(error) is UnsendableError:
            kind = UNSENDABLE
        elif type(error) is WorkerSetupError:
            kind = RAISED
        return Raised(kind, error)


def run_now(call: Coroutine[Any, Any, Done | Raised]) -> Done | Raised:
    """Run `invoke` to its end, where nothing suspends."""
    try:
        call.send(None)
    except StopIteration as ended:
        outcome: Done | Raised = ended.value
        return outcome
    raise AssertionError("a call without an event loop was suspended")


class StreamSender:
    """The producer's end of a stream: sends a generator's items, within a limit.

    Each item is sent at once, in a message of its own. The generator may compute for
    any time before the next item, and no other code would send a buffered item
    meanwhile. The driver handles items that arrive together in one step.

    Attributes:
        task: number of the task or call.
        limit: number of items that it may yield in all, as last reported.
        on_open: called when the limit rises.
    """

    __slots__ = ("_count", "_pack", "_send", "_skip", "limit", "on_open", "task")

    def __init__(
        self,
        send: Callable[[Items], object],
        task: int,
        limit: int,
        skip: int,
        pack: Callable[[PickledValue], bytes] | None = None,
    ) -> None:
        """Make the sender of one stream.

        Args:
            send: sends an item.
            task: number of the task or call.
            limit: number of items that it may yield in all.
            skip: number of items that earlier attempts have sent.
            pack: makes the payload of a large item; `pack_value` if None.
        """
        self.task = task
        self.limit = limit
        self.on_open: Callable[[], object] | None = None
        self._pack = pack or pack_value
        self._send = send
        self._skip = skip
        self._count = 0

    def __repr__(self) -> str:
        return f"<StreamSender {self.task}: {self._count} of {self.limit}>"

    @property
    def is_held(self) -> bool:
        """True if the consumer must take items before the next item is produced."""
        return self._count >= self.limit

    def raise_limit(self, limit: int) -> None:
        """Raise the limit, since the consumer has taken items."""
        if limit > self.limit:
            self.limit = limit
            if self.on_open is not None:
                self.on_open()

    def send(self, item: object) -> None:
        """Send the next item, unless an earlier attempt has sent it.

        Raises:
            UnsendableError: the item cannot be pickled, or is too large.
        """
        self._count += 1
        if self._count <= self._skip:
            return
        try:
            payload = dump_result(item)
            if isinstance(payload, PickledValue):
                payload = self._pack(payload)
            self._send(Items(self.task, (payload,)))
        except SerializationError as error:
            raise UnsendableError(
                f"item {self._count} of its stream is lost: {error}"
            ) from error


def send_all(
    items: Iterator[Any], flow: StreamSender, hold: Callable[[], object]
) -> None:
    """Run a plain generator to its end, and send its items.

    If this raises, the generator's `finally` blocks have run.

    Args:
        items: the generator.
        flow: sends the items.
        hold: waits while the flow is held; raises if the generator is to end.
    """
    try:
        send = flow.send
        for item in items:
            send(item)
            del item  # free it before the next item, since both may be large
            hold()
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()


async def send_all_async(
    items: Any, flow: StreamSender, new_future: Callable[[], Future[None]]
) -> None:
    """Send the items of a plain or async generator, on an event loop.

    A plain generator blocks the loop until it is held.

    Args:
        items: the generator.
        flow: sends the items.
        new_future: makes a future of the loop.
    """
    try:
        if hasattr(items, "__anext__"):
            async for item in items:
                flow.send(item)
                del item
                if flow.is_held:
                    await _opened(flow, new_future)
        else:
            for item in items:
                flow.send(item)
                del item
                if flow.is_held:
                    await _opened(flow, new_future)
    finally:
        if hasattr(items, "aclose"):
            await items.aclose()
        elif hasattr(items, "close"):
            items.close()


async def _opened(flow: StreamSender, new_future: Callable[[], Future[None]]) -> None:
    while flow.is_held:
        waiter = new_future()
        flow.on_open = partial(_set, waiter)
        await waiter


def _set(waiter: Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def open_arguments(payload: Any) -> Arguments:
    """Unpickle compound arguments, and release the payload's own references."""
    try:
        return load_arguments(payload)
    finally:
        payload.release()


def pack_value(outgoing: PickledValue) -> bytes:
    """Make the payload of a value that this worker sends; see `Loans.pack`."""
    if current.client is None:
        raise NodeClosedError("this process is a fork of a worker, and sends nothing.")
    return current.client.pack(outgoing)


def is_coroutine(function: object) -> bool:
    """Return whether a function, or the function that it wraps, is an `async def`."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function = inner
    code = getattr(function, "__code__", None)
    return code is not None and bool(code.co_flags & CO_COROUTINE)


class RetryRules:
    """The options `retry_exceptions` of the functions of one worker."""

    def __init__(self) -> None:
        self._rules: dict[bytes, Retried] = {}

    def forget(self) -> None:
        """Forget all options."""
        self._rules.clear()

    def mark(
        self, failed: Failed, name: str, retried: bytes, error: BaseException
    ) -> Failed:
        """Set `is_retried` in a failure of user code by the function's options.

        The options may name the class that the program receives instead of the
        original.
        """
        reported_as: list[type[BaseException]] = []
        if failed.payload is None:
            reported_as.append(TaskError)
        if failed.peak >= 0:
            reported_as.append(GpuOutOfMemoryError)
        is_retried = self.wants(name, retried, error, *reported_as)
        return failed._replace(is_retried=is_retried)

    def wants(
        self,
        name: str,
        retried: bytes,
        error: BaseException,
        *reported_as: type[BaseException],
    ) -> bool:
        """Return whether a function's options ask for a retry of a failure.

        Args:
            name: name of the function that has failed.
            retried: its option, pickled; see `dump_retried`.
            error: the exception that it has raised.
            *reported_as: further classes by which the failure may be reported.
        """
        try:
            rule = self._rules.get(retried)
            if rule is None:
                rule = self._rules[retried] = load_retried(retried)
            if isinstance(rule, bool) or is_retried(rule, error):
                return bool(rule)
            return any(issubclass(kind, rule) for kind in reported_as)
        except BaseException as odd:  # noqa: BLE001 - foreign code may raise anything
            self._rules[retried] = False
            sys.stderr.write(
                f"aiogpu: {name} is never retried, because its retry_exceptions "
                f"cannot be used: {type(odd).__name__}: {safe_text(odd)}\n"
            )
            return False


def clear_frames(error: BaseException) -> None:
    """Clear the frames that an error, its causes and its contexts have passed.

    Frames of generators and coroutines stay: a generator may have caught the error and
    go on, and clearing its frame would end it. `invoke` itself has ended.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        exception = pending.pop()
        if exception is None or id(exception) in seen:
            continue
        seen.add(id(exception))
        trace = exception.__traceback__
        while trace is not None:
            if not _may_resume(trace.tb_frame.f_code):
                with suppress(RuntimeError):  # the frame runs
                    trace.tb_frame.clear()
            trace = trace.tb_next
        pending += exception.__cause__, exception.__context__


def _may_resume(code: CodeType) -> bool:
    return bool(code.co_flags & _CAN_RESUME) and code is not invoke.__code__


_NO_TERMINAL: Final = (
    "a debugger was started in a worker, which has no terminal to read from. Write "
    "`breakpoint()`, which waits for `aiogpu debug`; or run the program by "
    "aiogpu.init(address='inline'), so that tasks run in its own process."
)


def explain_quit(error: BaseException) -> None:
    """Explain the exception by which `pdb` ends; leave other exceptions unchanged."""
    kind = type(error)
    # Like `isinstance(error, bdb.BdbQuit)`, without importing bdb.
    if kind.__name__ == "BdbQuit" and kind.__module__ == "bdb" and not error.args:
        error.args = (_NO_TERMINAL,)
