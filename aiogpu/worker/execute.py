"""Runs one task at a time: finds the function, calls it, packs the outcome."""

from __future__ import annotations

import os
import sys
from _thread import get_ident
from collections.abc import Callable
from time import perf_counter
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final

from aiogpu.client.current import ActorExit, current, has_exited
from aiogpu.errors import GpuOutOfMemoryError, TaskError
from aiogpu.serialization.exceptions import (
    LEFT,
    RAISED,
    STOPPED,
    UNREADABLE,
    UNSENDABLE,
    pack_failure,
)
from aiogpu.serialization.payload import has_handles
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import (
    dump_result,
    load_arguments,
    load_function,
    split_results,
)
from aiogpu.wire.messages import (
    Create,
    Define,
    Done,
    Failed,
    Invoke,
    Run,
)
from aiogpu.worker.gpu import poisoned_by, tell
from aiogpu.worker.invoke import RetryRules, arguments_in, explain_quit, let_go, packed
from aiogpu.worker.streams import (
    MainThreadWindow,
    StreamSender,
    UnsendableError,
    send_all,
)

if TYPE_CHECKING:
    from aiogpu.worker.connection import Channel
    from aiogpu.worker.coroutines import Coroutines
    from aiogpu.worker.environment import Threads
    from aiogpu.worker.interrupts import Interrupts

CO_COROUTINE: Final = 0x80
"""Among the flags of the code of an `async def`; see `inspect`."""
OWN_FRAMES: Final = "/aiogpu/worker/"
"""Marks this package's own frames, which a user's traceback leaves out."""


def unsendable(answer: Done | Failed, error: BaseException) -> Failed:
    """The answer in place of one that is too large to send.

    What a failure says of memory and of its process holds for this one as well.
    """
    failed = pack_failure(answer.task, UNSENDABLE, error, OWN_FRAMES)
    if type(answer) is Failed:
        failed = failed._replace(peak=answer.peak, is_spoilt=answer.is_spoilt)
    return failed


class Executor:
    """The functions that a worker knows, and the way to run them.

    Attributes:
        is_spoilt: this process is unfit for another task.
        has_left: a method has ended the actor that this process is.
    """

    def __init__(
        self, channel: Channel, interrupts: Interrupts, threads: Threads
    ) -> None:
        self.is_spoilt = False
        self.has_left = False
        self._channel = channel
        self._interrupts = interrupts
        self._threads = threads
        self._func: Define | None = None
        self._funcs: dict[int, Define] = {}
        self._payloads: dict[int, bytes] = {}
        self._functions: dict[int, Callable[..., Any]] = {}
        self._coroutines: Coroutines | None = None
        self._raised: BaseException | None = None
        self._retrying = RetryRules()
        self._has_run_out = False
        interrupts.spare(self._attempt.__code__, send_all.__code__)

    def define(self, message: Define) -> None:
        """Learn a function; its function is not unpickled before a task needs it."""
        if message.payload:
            self._payloads[message.function] = message.payload
        self._funcs[message.func] = message._replace(payload=b"")

    def forget_error(self) -> None:
        """Let go of what the last task has raised, and so of its frames."""
        self._raised = None

    def forget(self) -> None:
        """Drop all functions and functions."""
        self._funcs.clear()
        self._payloads.clear()
        self._functions.clear()
        self._retrying.forget()

    def run(self, message: Run) -> Done | Failed:
        """Run a task to its end; whatever it does, the answer is returned."""
        func = self._funcs[message.func]
        if func is not self._func:
            self._func = func
            self._threads.adapt(func.resources.get("CPU", 0.0))
        current.task, current.name = message.task, func.name
        current.resources = func.resources
        self._raised = None
        flow = self.flow_of(message.task, message) if message.limit else None
        outcome = self._attempt(
            message.task, None, func.function, message.payload, flow
        )
        if isinstance(outcome, tuple):
            return outcome
        self._raised = outcome.error
        self._has_run_out = False
        failed = self.describe(message.task, outcome)
        if func.retried and failed.kind == RAISED:
            is_retried = self._is_retried(func, outcome.error, failed)
            failed = failed._replace(is_retried=is_retried)
        # It refers to this frame, and so to itself and to the arguments.
        del outcome
        return failed

    def _is_retried(self, func: Define, error: BaseException, failed: Failed) -> bool:
        told: list[type[BaseException]] = []
        if failed.payload is None:
            told.append(TaskError)
        if self._has_run_out:
            told.append(GpuOutOfMemoryError)
        return self._retrying.wants(func, error, *told)

    def make(self, message: Create) -> object | Failed:
        """Make an actor, its class being known as a function; a failure is returned."""
        func = self._funcs[message.func]
        self._threads.adapt(func.resources.get("CPU", 0.0))
        current.task, current.name = message.task, func.name
        current.resources = func.resources
        made: list[object] = []

        def keep(*args: Any, **kwargs: Any) -> None:
            made.append(self._functions[func.function](*args, **kwargs))

        try:
            if func.function not in self._functions:
                self._load(func.function)
        except BaseException as error:  # noqa: BLE001 - foreign code may raise anything
            return self.describe(message.task, Raised(UNREADABLE, error))
        outcome = self._attempt(message.task, keep, 0, message.payload)
        if isinstance(outcome, tuple):
            return made[0]
        failed = self.describe(message.task, outcome)
        del outcome
        return failed

    def flow_of(self, task: int, message: Run | Invoke) -> StreamSender:
        """The way out for what a generator yields."""
        return StreamSender(self._channel, task, message.limit, message.skip)

    def call(self, method: Callable[..., Any], message: Invoke) -> Done | Failed:
        """Call a method of an actor in this thread, interruptibly."""
        number = message.call
        flow = self.flow_of(number, message) if message.limit else None
        outcome = self._attempt(number, method, 0, message.payload, flow)
        if isinstance(outcome, tuple):
            return outcome
        failed = self.describe(number, outcome)
        del outcome
        return failed

    def describe(self, task: int, outcome: Raised) -> Failed:
        """Return what is to be sent of a failure."""
        kind, error = outcome.kind, outcome.error
        has_devices = any(current.accelerators.values())
        if self._channel.is_closed:
            self._raised = error  # this fork ends as a program would
            has_devices = False
        peak, is_spoilt = -1, has_devices and self._is_poisoned(error)
        if (current.exits and has_exited()) or type(error) is ActorExit:
            kind = LEFT
            self.has_left = True
        elif self._interrupts.is_asked(task):
            self._interrupts.hear(task)
            kind = STOPPED
        elif has_devices:
            peak = self._peak_of_shortage(error)
        explain_quit(error)
        pack = None if self._channel.is_closed else packed
        failed = pack_failure(task, kind, error, OWN_FRAMES, pack)
        if peak >= 0 or is_spoilt:
            failed = failed._replace(peak=peak, is_spoilt=is_spoilt)
        let_go(error)
        return failed

    def _is_poisoned(self, error: BaseException) -> bool:
        name = poisoned_by(error)
        if name is None:
            return False
        self.is_spoilt = True
        tell(error, name, os.getpid())
        return True

    def _peak_of_shortage(self, error: BaseException) -> int:
        """The most bytes of device memory that were used; -1 for any other failure."""
        # Of no use to most workers.
        from aiogpu.worker.gpu import has_run_out, peak_memory

        if not has_run_out(error):
            return -1
        self._has_run_out = True
        return peak_memory()

    def exit_code(self) -> int:
        """Return what a program that ended as the last task did would exit with.

        Prints the traceback of an exception that is no `SystemExit`.
        """
        error = self._raised
        if error is None:
            return 0
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
            return 1
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1

    def _attempt(
        self,
        task: int,
        function: Callable[..., Any] | None,
        known_as: int,
        payload: bytes,
        flow: StreamSender | None = None,
    ) -> Done | Raised:
        # No interrupt lands in this very frame, so leaving is safe at any step.
        interrupts, value = self._interrupts, None
        kind = UNREADABLE
        interrupts.entered = task
        started = perf_counter()
        try:
            if interrupts.is_asked(task):
                raise KeyboardInterrupt
            if function is None:
                function = self._functions.get(known_as)
                if function is None:
                    function = self._load(known_as)
            current.loader = get_ident()
            args, kwargs = (
                load_arguments(payload)
                if type(payload) is bytes
                else self._opened(function, payload)
            )
            current.loader = 0
            kind = RAISED
            value = _call(function, args, kwargs)
            if type(value) is CoroutineType:
                value = self._await(value, task)
            if type(payload) is not bytes:
                value = split_results(value, payload)
            if flow is not None:
                self._pour(value, flow)
                value = None
            if current.exits and has_exited():
                raise ActorExit
            kind = UNSENDABLE
            result = dump_result(value)
            if type(result) is PickledValue:
                result = packed(result)
            done = Done(task, result, int((perf_counter() - started) * 1e6) + 1)  # type: ignore[arg-type]
            interrupts.entered = 0
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the task's
            interrupts.entered = current.loader = 0
            if type(value) is CoroutineType and not value.cr_suspended:
                value.close()  # one that never began would complain of that
            return Raised(UNSENDABLE if type(error) is UnsendableError else kind, error)
        return done

    def _opened(
        self, function: Callable[..., Any], payload: bytes
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in a parcel."""
        if has_handles(payload) and is_coroutine(function):
            return self._own_loop().load(payload)
        return arguments_in(payload)

    def _load(self, function: int) -> Callable[..., Any]:
        current.loader = get_ident()
        try:
            loaded: Callable[..., Any] = load_function(self._payloads[function])
        finally:
            current.loader = 0
        self._functions[function] = loaded
        return loaded

    def _await(self, coroutine: CoroutineType[Any, Any, Any], task: int) -> Any:
        return self._own_loop().run(coroutine, task)

    def _own_loop(self) -> Coroutines:
        if self._coroutines is None:
            # asyncio costs 40 ms to import; only the first coroutine pays.
            with self._interrupts.shielded():
                from aiogpu.worker.coroutines import Coroutines

                # Half of a loop would complain when it is collected.
                self._coroutines = Coroutines(self._channel, self._interrupts)
        return self._coroutines

    def _pour(self, items: Any, flow: StreamSender) -> None:
        if hasattr(items, "__anext__"):
            self._own_loop().pour(items, flow)
        else:
            send_all(
                items,
                flow,
                MainThreadWindow(self._channel, self._interrupts, flow).hold,
            )


class Raised:
    """What an attempt raised, and in which of its steps."""

    __slots__ = ("error", "kind")

    def __init__(self, kind: str, error: BaseException) -> None:
        self.kind = kind
        self.error = error


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    # A frame of its own: an interrupt may land in a builtin called from here.
    return function(*args, **kwargs)


def is_coroutine(function: object) -> bool:
    """Return whether a function, or the one that it wraps, is an `async def`."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function = inner
    code = getattr(function, "__code__", None)
    # As `inspect` does, which is slow to import.
    return code is not None and bool(code.co_flags & CO_COROUTINE)
