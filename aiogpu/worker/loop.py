"""A worker's main loop: bind, run tasks as they arrive, exit in an orderly way."""

from __future__ import annotations

import gc
import os
import sys
from _thread import allocate_lock
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from aiogpu.client.current import current
from aiogpu.memory.control_page import BEGUN, TOO_LATE
from aiogpu.wire.messages import (
    ASYNC,
    SERIAL,
    Bind,
    Create,
    Created,
    Define,
    Done,
    Exit,
    Failed,
    Forget,
    Run,
    Skipped,
)
from aiogpu.worker.connection import Channel
from aiogpu.worker.environment import TaskStateReset, Threads, bind, record, restore
from aiogpu.worker.execute import Executor
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.nested import TaskClient
from aiogpu.worker.private_hooks import run_exit_functions
from aiogpu.worker.stdio import Stdio
from aiogpu.worker.zygote.preload import Imports

if TYPE_CHECKING:
    from aiogpu.worker.debug.breakpoints import Breakpoints

BREAKPOINT: Final = "PYTHONBREAKPOINT"
"""The variable that says what `breakpoint()` does, for the user to set."""


class Worker:
    """One worker process; made in the zygote, started in a fresh fork.

    Attributes:
        task_state: process state that is restored after each task.
    """

    def __init__(
        self,
        channel: Channel,
        interrupts: Interrupts,
        imports: Imports,
        threads: Threads,
        customize: Callable[[], None],
    ) -> None:
        """Prepare a worker.

        Args:
            channel: the connection to the driver.
            interrupts: interrupts the tasks.
            imports: records the imports.
            threads: sets the threads of numeric libraries.
            customize: runs the start-up code of Python that the zygote has not run.
        """
        self._channel = channel
        self._interrupts = interrupts
        self._signals = interrupts.user
        self._stdio = Stdio(channel)
        self._client = TaskClient(channel)
        self._executor = Executor(
            channel, interrupts, threads, imports, self._stdio, self._client
        )
        self._customize = customize
        self._imports = imports
        self.task_state = TaskStateReset()
        self._breakpoints: Breakpoints | None = None
        self._making = allocate_lock()

    def begin(self) -> None:
        """Set this worker's client and output streams up for user code."""
        self._signals.is_active = True
        current.client = self._client
        current.is_stopping = self._interrupts.is_stopping
        self._stdio.begin()
        # Not if a preloaded module has its own.
        if sys.breakpointhook is sys.__breakpointhook__ and not _chosen_debugger():
            sys.breakpointhook = self._on_breakpoint
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        """Detach a fork made by user code, which is no worker."""
        self._signals.is_active = False
        self._imports.leave()
        self._leave_breakpoints()
        current.client = None
        if self._channel.loans is not None:
            self._channel.loans.leave()
        self._channel.close()
        self._stdio.leave()

    def _leave_breakpoints(self) -> None:
        """Let Python decide what `breakpoint()` does: the user has, or this is a fork.

        A debugger of the user stops in the frame that calls it, so it must be called
        by Python itself.
        """
        if sys.breakpointhook == self._on_breakpoint:
            sys.breakpointhook = sys.__breakpointhook__

    def _on_breakpoint(self, *, header: str | None = None) -> None:
        """Stop at a `breakpoint()` of user code until a debugger lets it go on.

        Args:
            header: text to print first, as `pdb.set_trace` takes it.
        """
        if _chosen_debugger():  # since the begin of the task
            sys.__breakpointhook__()
            return
        with self._interrupts.shielded_if_open(), self._making:
            if self._breakpoints is None:
                from aiogpu.worker.debug.debugger import breakpoints

                self._breakpoints = breakpoints(
                    self._channel, self._interrupts, self._executor.dropped
                )
        self._breakpoints.stop(sys._getframe(1), header)

    def serve(self) -> None:
        """Handle the driver's messages until `Exit`, or until the driver has gone."""
        while True:
            message = self._channel.next()
            if type(message) is Run:
                has_run, is_last = self._run(message), message.is_last
                # The message holds the arguments, whose release is reported to the
                # driver.
                del message
                self._client.report_ended_loans()
                if has_run and (is_last or self._executor.is_spoilt):
                    return
            elif type(message) is Define:
                self._executor.define(message)
            elif type(message) is Bind:
                bind(message)
                if BREAKPOINT in message.environ and _chosen_debugger():
                    self._leave_breakpoints()
                self._customize()
                record()
            elif type(message) is Create:
                if self._serve_actor(message):
                    return
            elif type(message) is Forget:
                self._executor.forget()
            elif message is None or type(message) is Exit:
                return

    def _claim(self, message: Run | Create) -> bool:
        """Claim a request to run; False if the driver has revoked it."""
        begun = self._interrupts.begin(message.number)
        if begun == TOO_LATE:
            self._channel.send(Skipped(message.task, message.number))
        return begun is BEGUN

    def _run(self, message: Run) -> bool:
        """Run a task and answer; False if the task was revoked."""
        if not self._claim(message):
            return False
        executor, client = self._executor, self._client
        answer = executor.run(message)
        if self._signals.is_changed:
            # First of all: a timer of the task would end the process.
            self._signals.restore()
        if client.shares.due and not self._channel.is_closed:
            client.hand_over()
        executor.answer(answer)
        if client.end_task():
            executor.settle_handles()
        executor.raised = None
        restore()
        self.task_state.restore()
        self._stdio.restore()
        return True

    def _serve_actor(self, message: Create) -> bool:
        """Serve an actor until it ends; False if its creation was revoked."""
        if not self._claim(message):
            return False
        executor, client = self._executor, self._client
        current.actor = message.task
        actor = executor.make(message)
        if isinstance(actor, Failed):
            executor.answer(actor)
            client.report_ended_loans()
        else:
            executor.answer(Created(message.task))
            client.report_ended_loans()
            last = _serve(executor, actor, message)
            # Now, so that finalizers are still interruptible and their output is sent.
            del actor
            gc.collect()
            if client.shares.due:
                client.hand_over()
            executor.answer(last)
        return True

    def end(self) -> None:
        """Exit the process after the user's exit functions and a flush.

        The interpreter's own finalisation is skipped. It takes 14 ms, and 330 ms with
        torch, and the kernel frees all resources anyway.
        """
        self._signals.is_active = False
        try:
            run_exit_functions()
            self._stdio.flush()
            self._stdio.end_lines()
        finally:
            os._exit(0)


def _chosen_debugger() -> str:
    """Return what the user has chosen for `breakpoint()`; "" for nothing."""
    return "" if sys.flags.ignore_environment else os.environ.get(BREAKPOINT, "")


def _serve(executor: Executor, actor: object, creation: Create) -> Done | Failed:
    """Serve an actor's calls in its mode, and return its last message.

    Imports the module of this mode only.
    """
    from aiogpu.worker.actors import last_answer

    if creation.mode == ASYNC:
        from aiogpu.worker.async_actor import AsyncActor

        # So the zygote learns asyncio even if the actor is never called.
        executor.report_imports()
        AsyncActor(executor, actor).serve()
    elif creation.mode == SERIAL:
        from aiogpu.worker.actors import SerialActor

        SerialActor(executor, actor).serve()
    else:
        from aiogpu.worker.actors import ThreadedActor

        ThreadedActor(executor, actor, creation).serve()
    return last_answer(executor, actor, creation.task)
