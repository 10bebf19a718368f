"""Runs tasks and calls in a worker's main thread, and sends their answers.

One task runs at a time. `Executor` finds its function, calls it by `invoke` so that it
can be interrupted, classifies failures, and sends the answer.
"""

from __future__ import annotations

import _thread
import os
import sys
from collections.abc import Callable
from contextvars import copy_context
from time import monotonic_ns
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NoReturn

from aiogpu.client.current import ActorExit, current, has_exited, method_called
from aiogpu.errors import NodeClosedError, SerializationError
from aiogpu.serialization.exceptions import (
    LEFT,
    RAISED,
    STOPPED,
    UNREADABLE,
    UNSENDABLE,
    pack_failure,
)
from aiogpu.serialization.payload import has_handles
from aiogpu.serialization.references import end_collecting
from aiogpu.wire.messages import (
    Began,
    Create,
    Created,
    Define,
    Demand,
    Done,
    Failed,
    Invoke,
    Run,
)
from aiogpu.worker.environment import Settings
from aiogpu.worker.gpu import explain_poisoned, has_run_out, peak_memory, poisoned_by
from aiogpu.worker.invoke import (
    OWN_FRAMES,
    Arguments,
    Callables,
    Constructor,
    Functions,
    Invoker,
    Raised,
    RetryRules,
    StreamSender,
    clear_frames,
    explain_quit,
    invoke,
    is_coroutine,
    open_arguments,
    pack_value,
    send_all,
)
from aiogpu.worker.nested import SLICE

if TYPE_CHECKING:
    from aiogpu.worker.connection import Channel
    from aiogpu.worker.coroutines import Coroutines
    from aiogpu.worker.environment import Threads
    from aiogpu.worker.interrupts import Interrupts
    from aiogpu.worker.nested import TaskClient
    from aiogpu.worker.stdio import Stdio
    from aiogpu.worker.zygote.preload import Imports


class Executor(Invoker):
    """The functions that a worker knows, and how to run them; see `invoke.Invoker`.

    Attributes:
        channel: to the driver.
        client: sends requests of the running code to the node.
        dropped: running calls of an actor that were cancelled, and that go on.
        has_left: a method has ended the actor of this process.
        is_evicted: the actor of this process ends here and returns elsewhere.
        interrupts: interrupts the code in the main thread.
        is_spoilt: this process is unfit for another task.
        raised: exception of the last task; sets the exit code of a fork.
        stdio: the streams of this process.
    """

    def __init__(
        self,
        channel: Channel,
        interrupts: Interrupts,
        threads: Threads,
        imports: Imports,
        stdio: Stdio,
        client: TaskClient,
    ) -> None:
        self.channel = channel
        self.client = client
        self.dropped: set[int] = set()
        self.has_left = False
        self.is_evicted = False
        self.interrupts = interrupts
        self.is_spoilt = False
        self.raised: BaseException | None = None
        self.stdio = stdio
        self._threads = threads
        self._imports = imports
        self._func: Define | None = None
        self._funcs: dict[int, Define] = {}
        self._functions = Functions(self._begin)
        self._coroutines: Coroutines | None = None
        self._retry_rules = RetryRules()
        self._settings = Settings()
        # An interrupt in these frames would skip the answer.
        interrupts.spare(self.call.__code__, invoke.__code__, Raised.__init__.__code__)
        interrupts.spare(send_all.__code__)

    def define(self, message: Define) -> None:
        """Store a function and its options; the first task unpickles it."""
        if message.payload:
            self._functions.payloads[message.function] = message.payload
        function = -message.function if message.is_timed else message.function
        self._funcs[message.func] = message._replace(payload=b"", function=function)

    def forget(self) -> None:
        """Forget all functions."""
        self._funcs.clear()
        self._functions = Functions(self._begin)
        self._retry_rules.forget()

    def _begin(self) -> None:
        """Report that the code of the task begins."""
        self.channel.send(Began(current.task, monotonic_ns() // 1000))

    def begin_call(self) -> None:
        """Report that the code of the actor's current call begins."""
        self.channel.send(Began(method_called.get()[1], monotonic_ns() // 1000))

    def run(self, message: Run) -> Done | Failed:
        """Run a task to its end, and return the answer."""
        task, func = message.task, self._funcs[message.func]
        if func is not self._func:
            self._func = func
            self._threads.adapt(func.resources.get("CPU", 0.0))
            self._settings.restore()
        current.task, current.name = task, func.name
        current.resources = func.resources
        self.raised = None
        stream = self.new_stream(task, message) if message.limit else None
        outcome = self.call(
            task, self._functions, func.function, message.payload, stream
        )
        if type(outcome) is not Raised:
            return outcome
        error = self.raised = outcome.error
        failed = self.describe(task, outcome)
        if func.retried and failed.kind == RAISED:
            failed = self._retry_rules.mark(failed, func.name, func.retried, error)
        # The error refers to this frame, a cycle that would keep the arguments.
        del error
        return failed

    def make(self, message: Create) -> object | Failed:
        """Make an actor from its class, which is stored as a function."""
        func = self._funcs[message.func]
        self._threads.adapt(func.resources.get("CPU", 0.0))
        current.task, current.name = message.task, func.name
        current.resources = func.resources
        made: list[object] = []
        kept, loans = message.kept, self.channel.loans
        if kept and loans is not None:
            kept = loans.take_payload(kept)
        constructor = Constructor(self._functions, made.append, kept)
        outcome = self.call(message.task, constructor, func.function, message.payload)
        if type(outcome) is not Raised:
            return made[0]
        return self.describe(message.task, outcome)

    def call(
        self,
        number: int,
        functions: Callables,
        name: Any,
        payload: bytes,
        stream: StreamSender | None = None,
    ) -> Done | Raised:
        """Run a call by `invoke` in this thread, where it can be interrupted."""
        # No interrupt lands in this frame (`Interrupts.spare`).
        interrupts = self.interrupts
        interrupts.entered = number
        outcome: Done | Raised
        if interrupts.is_cancelled(number):
            outcome = Raised(UNREADABLE, KeyboardInterrupt())
        else:
            try:
                invoke(self, number, functions, name, payload, stream).send(None)
            except StopIteration as ended:
                outcome = ended.value
        interrupts.entered = 0
        return outcome

    def new_stream(self, number: int, message: Run | Invoke) -> StreamSender:
        """Make the sender of a generator's items."""
        return StreamSender(self.channel.send, number, message.limit, message.skip)

    def load(self, function: Callable[..., Any], payload: bytes) -> Arguments:
        """Unpickle arguments; a coroutine's handles belong to its loop."""
        if has_handles(payload) and is_coroutine(function):
            return self._own_loop().load(payload)
        return open_arguments(payload)

    async def wait(self, coroutine: CoroutineType[Any, Any, Any], call: int) -> Any:
        """Run a coroutine on this worker's loop to its end; never suspends."""
        return self._own_loop().run(coroutine, call)

    async def send_items(self, items: Any, stream: StreamSender) -> None:
        """Run a generator to its end; never suspends."""
        if hasattr(items, "__anext__"):
            self._own_loop().send_items(items, stream)
        else:
            window = MainThreadWindow(self.channel, self.interrupts, stream)
            if current.actor is None:
                copy_context().run(send_all, items, stream, window.hold)
            else:
                send_all(items, stream, window.hold)

    def _own_loop(self) -> Coroutines:
        if self._coroutines is None:
            # Imported by the first coroutine only: asyncio takes 40 ms.
            with self.interrupts.shielded():
                from aiogpu.worker.coroutines import Coroutines

                # A half-made loop would warn when it is collected.
                self._coroutines = Coroutines(self.channel, self.interrupts)
        return self._coroutines

    def settle_handles(self) -> None:
        """Let the handles of an ended task's children take their outcomes."""
        if self._coroutines is not None:
            self._coroutines.settle()

    # Answers

    def describe(self, number: int, raised: Raised) -> Failed:
        """Return the message about a failure, and release its frames.

        `raised.error` is deleted: the error refers to the frames that hold it, a cycle
        that would keep the arguments.
        """
        kind, error = raised.kind, raised.error
        del raised.error
        has_devices = any(current.accelerators.values())
        if self.channel.is_closed:
            self.raised = error  # sets the exit code of this fork
            has_devices = False
        peak, is_spoilt = -1, False
        if has_devices and (name := poisoned_by(error)) is not None:
            is_spoilt = self.is_spoilt = True
            explain_poisoned(error, name, os.getpid())
        if (current.exits and has_exited()) or type(error) is ActorExit:
            kind = LEFT
            self.has_left = True
        elif self.interrupts.is_cancelled(number):
            self.interrupts.acknowledge(number)
            kind = STOPPED
            end_collecting()
        elif has_devices and has_run_out(error):
            peak = peak_memory()
        explain_quit(error)
        pack = None if self.channel.is_closed else pack_value
        failed = pack_failure(number, kind, error, OWN_FRAMES, pack)
        if peak >= 0 or is_spoilt:
            failed = failed._replace(peak=peak, is_spoilt=is_spoilt)
        clear_frames(error)
        return failed

    def answer(self, answer: Done | Failed | Created) -> None:
        """Send an answer, after the output printed before it; then report imports."""
        if self.channel.is_closed:
            self._end_fork()
        self.stdio.end_lines()
        try:
            self.channel.send(answer)
        except SerializationError as error:
            self.channel.send(_unsendable(answer, error))
        if self._imports.found:
            self.report_imports()

    def answer_all(self, answers: list[Done | Failed]) -> None:
        """Send answers together, after the output printed before them."""
        self.stdio.end_lines()
        try:
            self.channel.send_all(answers)
        except SerializationError:
            for answer in answers:
                self.answer(answer)
        self.report_imports()

    def report_imports(self) -> None:
        """Report the modules imported since the last report."""
        if self._imports.found:
            self.channel.send(self._imports.take())

    def _end_fork(self) -> NoReturn:
        """End a fork that has returned from the user's code, as `python` would."""
        code = self._exit_code()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _exit_code(self) -> int:
        """Return the exit code of a program that ended like the last task.

        Prints the traceback of an exception that is no `SystemExit`.
        """
        error = self.raised
        if error is None:
            return 0
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, error.__traceback__)
            return 1
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        sys.stderr.write(f"{error.code}\n")
        return 1


class MainThreadWindow:
    """Holds back a generator that runs in the worker's main thread."""

    def __init__(
        self, channel: Channel, interrupts: Interrupts, flow: StreamSender
    ) -> None:
        self._channel = channel
        self._interrupts = interrupts
        self._flow = flow

    def hold(self) -> None:
        """Read messages until the consumer wants more items.

        Raises:
            KeyboardInterrupt: the task is to stop.
            NodeClosedError: the driver has gone.
        """
        flow, interrupts = self._flow, self._interrupts
        if interrupts.is_cancelled(flow.task):
            self._stop()
        while flow.is_held:
            if self._has_demand():
                return
            if interrupts.is_cancelled(flow.task):
                self._stop()
            try:
                self._wait()
            except KeyboardInterrupt:
                self._stop()

    def _has_demand(self) -> bool:
        flow = self._flow
        for message in self._channel.take(Demand):
            if isinstance(message, Demand) and message.task == flow.task:
                flow.raise_limit(message.limit)
        return not flow.is_held

    def _wait(self) -> None:
        # Another thread of the task may read the message that this thread waits for.
        self._channel.wait(SLICE if _thread._count() else None)
        if not self._channel.read_ready():
            raise NodeClosedError("the node has gone.")

    def _stop(self) -> NoReturn:
        """Raise the interrupt at the generator's `yield`."""
        self._interrupts.acknowledge(self._flow.task)
        # Its cleanup may take any time, and is not interrupted again.
        self._interrupts.entered = 0
        raise KeyboardInterrupt(f"task {self._flow.task} was cancelled")


def _unsendable(answer: Done | Failed | Created, error: BaseException) -> Failed:
    """Return the failure that replaces an answer too large to send.

    It keeps the memory peak and the state of the process from the original failure.
    """
    failed = pack_failure(answer.task, UNSENDABLE, error, OWN_FRAMES)
    if type(answer) is Failed:
        failed = failed._replace(peak=answer.peak, is_spoilt=answer.is_spoilt)
    return failed
