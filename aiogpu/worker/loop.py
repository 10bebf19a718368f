"""A worker's life: bind, run tasks as they come, end in an orderly way."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from aiogpu.client.current import services
from aiogpu.errors import SerializationError
from aiogpu.memory.control_page import BEGUN, TOO_LATE
from aiogpu.wire.messages import (
    ASYNC,
    SERIAL,
    Bind,
    Create,
    Define,
    Exit,
    Forget,
    Run,
    Skipped,
)
from aiogpu.worker.connection import Channel
from aiogpu.worker.environment import TaskStateReset, Threads, bind, find, restore
from aiogpu.worker.execute import Executor, unsendable
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.nested import TaskClient
from aiogpu.worker.private_hooks import run_exit_functions
from aiogpu.worker.stdio import Stdio
from aiogpu.worker.zygote.import_tracker import Imports

if TYPE_CHECKING:
    from aiogpu.worker.actors.serial import ActorRuntime


class Worker:
    """One worker process; made in the zygote, begun in a fresh fork.

    Attributes:
        task_state: what each task finds as the first one has found it.
    """

    def __init__(
        self,
        channel: Channel,
        interrupts: Interrupts,
        imports: Imports,
        threads: Threads,
    ) -> None:
        self._channel = channel
        self._interrupts = interrupts
        self._imports = imports
        self._stdio = Stdio(channel)
        self._is_foreign = False
        self._executor = Executor(channel, interrupts, threads)
        self.task_state = TaskStateReset(interrupts.restore)
        self._client = TaskClient(channel)

    def begin(self) -> None:
        """Take over this process: what user code sees and does is this worker's."""
        services.client = self._client
        self._stdio.begin()
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        """User code has forked: the child is no worker, whatever it returns to."""
        self._is_foreign = True
        services.client = None
        if self._channel.loans is not None:
            self._channel.loans.leave()
        self._channel.close()
        self._stdio.leave()

    def _end_fork(self) -> NoReturn:
        """The child has come back from the user's code: end it as `python` would."""
        code = self._executor.exit_code()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def serve(self) -> None:
        """Obey the driver until it says `Exit`, or goes."""
        while True:
            message = self._channel.next()
            if type(message) is Run:
                has_run, is_last = self._run(message), message.is_last
                # It holds the arguments, of which the driver is to be told.
                del message
                self._client.tell_dropped()
                if has_run and (is_last or self._executor.is_spoilt):
                    return
            elif type(message) is Define:
                self._executor.define(message)
            elif type(message) is Bind:
                bind(message)
                find()
            elif type(message) is Create:
                if self._be_actor(message):
                    return
            elif type(message) is Forget:
                self._executor.forget()
            elif message is None or type(message) is Exit:
                return

    def _run(self, message: Run) -> bool:
        """Run a task and answer; False if it was taken back."""
        begun = self._interrupts.begin(message.number)
        if begun is not BEGUN:
            if begun == TOO_LATE:
                self._channel.send(Skipped(message.task, message.number))
            return False
        answer = self._executor.run(message)
        if self._is_foreign:
            self._end_fork()
        self._stdio.end_lines()
        if self._client.shares.due:
            self._client.hand_over()
        try:
            self._channel.send(answer)
        except SerializationError as error:
            self._channel.send(unsendable(answer, error))
        if self._imports.found:
            self._channel.send(self._imports.take())
        self._client.end_task()
        self._executor.forget_error()
        restore()
        self.task_state.restore()
        self._stdio.restore()
        return True

    def _be_actor(self, message: Create) -> bool:
        """Be an actor until it ends; False if its creation was taken back."""
        # Few workers become one.
        from aiogpu.worker.actors.serial import ActorRuntime

        begun = self._interrupts.begin(message.number)
        if begun is not BEGUN:
            if begun == TOO_LATE:
                self._channel.send(Skipped(message.task, message.number))
            return False
        ActorRuntime(
            self._channel,
            self._interrupts,
            self._executor,
            self._stdio,
            self._imports,
            self._end_fork,
        ).perform(message, _play)
        return True

    def end(self) -> None:
        """Leave the process: exit functions of the user's, a flush, no more.

        The interpreter's own finalisation is left out; it takes 14 ms bare and
        330 ms with torch, and the kernel takes everything back anyway.
        """
        try:
            run_exit_functions()
            self._stdio.flush()
            self._stdio.end_lines()
        finally:
            os._exit(0)


def _play(stage: ActorRuntime, actor: object, creation: Create) -> None:
    """Serve an actor's calls, in the way in which its mode asks."""
    if creation.mode == SERIAL:
        from aiogpu.worker.actors.serial import SerialActor

        SerialActor(stage, actor).play()
    elif creation.mode == ASYNC:
        from aiogpu.worker.actors.asynchronous import AsyncActor

        # The zygote learns asyncio by it, also where nobody ever calls.
        stage.tell_rest()
        AsyncActor(stage, actor).play()
    else:
        from aiogpu.worker.actors.threaded import ThreadedActor

        ThreadedActor(stage, actor, creation).play()
