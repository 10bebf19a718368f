"""A worker's life: bind, run tasks as they come, end in an orderly way."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

from aiogpu.errors import SerializationError
from aiogpu.memory.control_page import BEGUN, TOO_LATE
from aiogpu.serialization.exceptions import UNSENDABLE, pack_failure
from aiogpu.wire.messages import Bind, Carry, Create, Define, Exit, Forget, Run, Skipped
from aiogpu.worker.channel import Channel
from aiogpu.worker.children import Children
from aiogpu.worker.context import current, passing, take_passing
from aiogpu.worker.environ import bind, find, restore
from aiogpu.worker.execute import OWN_FRAMES, Executor
from aiogpu.worker.footing import Footing
from aiogpu.worker.imports import Imports
from aiogpu.worker.interrupts import Interrupts
from aiogpu.worker.stdio import Stdio
from aiogpu.worker.threads import Threads


class Worker:
    """One worker process; made in the zygote, begun in a fresh fork.

    Attributes:
        footing: what each task finds as the first one has found it.
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
        self.footing = Footing(interrupts.restore)
        self._children = Children(channel)

    def begin(self) -> None:
        """Take over this process: what user code sees and does is this worker's."""
        current.children = self._children
        self._stdio.begin()
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        """User code has forked: the child is no worker, whatever it returns to."""
        self._is_foreign = True
        current.children = None
        if current.loans is not None:
            current.loans.leave()
            current.loans = None
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
                self._children.tell_dropped()
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
        if passing:
            self._channel.send(Carry(message.task, take_passing()))
        if self._children.shares.due:
            self._children.hand_over()
        try:
            self._channel.send(answer)
        except SerializationError as error:
            self._channel.send(pack_failure(answer.task, UNSENDABLE, error, OWN_FRAMES))
        if self._imports.found:
            self._channel.send(self._imports.take())
        self._children.end_task()
        self._executor.forget_error()
        restore()
        self.footing.restore()
        self._stdio.restore()
        return True

    def _be_actor(self, message: Create) -> bool:
        """Be an actor until it ends; False if its creation was taken back."""
        # Few workers become one.
        from aiogpu.worker.actor import Stage

        begun = self._interrupts.begin(message.number)
        if begun is not BEGUN:
            if begun == TOO_LATE:
                self._channel.send(Skipped(message.task, message.number))
            return False
        Stage(
            self._channel,
            self._interrupts,
            self._executor,
            self._stdio,
            self._imports,
            self._end_fork,
        ).perform(message)
        return True

    def end(self) -> None:
        """Leave the process: exit functions of the user's, a flush, no more.

        The interpreter's own finalisation is left out; it takes 14 ms bare and
        330 ms with torch, and the kernel takes everything back anyway.
        """
        try:
            if atexit._ncallbacks():
                atexit._run_exitfuncs()
            self._stdio.flush()
            self._stdio.end_lines()
        finally:
            os._exit(0)
