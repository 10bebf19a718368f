"""The client of the task that runs in this worker, over the worker's own socket.

Code that waits for an answer reads the socket itself: the worker has no other thread.
Messages for the worker stay on the channel until the task has ended. A module that a
worker imports must not start the program again: each worker would start another
program, without end (`refuse_while_importing`).
"""

from __future__ import annotations

import _thread
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Final, cast

from aiogpu.client.current import (
    check_task_runs,
    client_of_process,
    current,
    method_called,
    no_call_to_report,
)
from aiogpu.client.node_client import NodeClient
from aiogpu.client.references import Loans
from aiogpu.errors import MisuseError, NodeClosedError, TaskCancelledError
from aiogpu.wire.messages import Message, Sync, Synced, Wait
from aiogpu.worker.private_hooks import IMPORT

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.worker.connection import Channel


SLICE: Final = 0.05
"""Seconds after which a waiting thread sees messages that another thread has read."""


class TaskClient(NodeClient):
    """The client of the running task; lives as long as the worker.

    Attributes:
        loop: the event loop that reads the socket for the task; None without one.
        wake: makes this loop handle messages that another thread has read.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.loop: object = None
        self.wake: Callable[[], object] | None = None
        self.send = channel.send  # type: ignore[method-assign]
        self.fileno = channel.fileno
        self._channel = channel
        self._loops: dict[AbstractEventLoop, LoopWaits] = {}
        self._waits: dict[object, Collection[int]] = {}
        self._main = _thread.get_ident()
        self._is_bound = False
        self._has_any = False
        self._unwanted: deque[int] = deque()
        self._is_synced = False

    @property
    def waits(self) -> LoopWaits:
        """The waits on the event loop of this thread."""
        loop = sys.modules["asyncio"].get_running_loop()
        waits = self._loops.get(loop)
        if waits is None or not waits.is_current:
            for other in [
                loop for loop, waits in self._loops.items() if not waits.is_current
            ]:
                del self._loops[other]
            waits = self._loops[loop] = LoopWaits(self, loop)
        return waits

    @property
    def loans(self) -> Loans:
        """The loans of this worker."""
        assert self._channel.loans is not None, self
        return self._channel.loans

    def _check(self, func: FunctionSpec, payload: bytes) -> None:
        if current.is_loading:
            refuse_while_importing()
        super()._check(func, payload)

    def declare(self, func: FunctionSpec) -> None:
        """Send a function and its options to the node.

        Raises:
            MisuseError: a module that a task imports would start the same task again.
        """
        if func.spec.name == current.name:
            refuse_while_importing()
        super().declare(func)

    def _prepare(self, name: str) -> None:
        check_task_runs(name)
        if not self._has_any:
            self._begin()
        if self._unwanted:
            self._withdraw_unwanted()
        self.report_ended_loans_in_task()

    def _begin(self) -> None:
        self._has_any = True
        self._channel.on_child = self.take
        loans = self._channel.loans
        if loans is None or loans.on_over is None:
            self._channel.on_idle = self.report_ended_loans
        self._channel.admit_guests(True)

    def report_ended_loans(self) -> None:
        """Report ended loans between tasks."""
        loans = self._channel.loans
        if loans is not None and loans.over:
            loans.report_to(self._channel.send)

    def report_ended_loans_in_task(self) -> None:
        """Report ended loans while a task runs, which may take days."""
        loans = self._channel.loans
        if loans is not None and loans.over:
            with self._channel.without_interrupts():
                loans.report_to(self._channel.send)

    def demand(self, number: int, limit: int) -> None:
        """Set the number of items that a stream may yield in all."""
        self.report_ended_loans_in_task()
        super().demand(number, limit)

    def cancel(self, question: int) -> None:
        """Withdraw a query for a value; see `interface.ValueStore`."""
        self.withdraw(question)

    def withdraw_soon(self, child: int) -> None:
        """Withdraw from a finalizer, which may run during a send."""
        if self._channel.is_busy:
            self._unwanted.append(child)
        else:
            self.withdraw(child)

    def _withdraw_unwanted(self) -> None:
        while self._unwanted:
            self.withdraw(self._unwanted.popleft())

    def note_wait(
        self, waiter: object, children: Collection[int], is_bound: bool = False
    ) -> None:
        """Note the children for which a thread or loop of the task waits, or none.

        The task as a whole waits for the children of all its threads and loops. `Wait`
        explains which children its main thread is bound to. A loop may change its
        collection, if it says so by `note_more` or by another call.
        """
        self._withdraw_unwanted()
        self.report_ended_loans_in_task()
        self.end_wait(waiter)
        if children:
            self._waits[waiter] = children
            if waiter == self._main:
                self._is_bound = is_bound
        bound = self._waits.get(self._main, ()) if self._is_bound else ()
        # Copies, made at once: other threads change what their loops wait for.
        waits = [tuple(waited_for) for waited_for in list(self._waits.values())]
        if len(waits) > 1:
            together = tuple(
                {child: None for waited_for in (bound, *waits) for child in waited_for}
            )
        else:
            together = waits[0] if waits else ()
        self.send(Wait(current.task, together, len(bound)))

    def note_more(self, children: tuple[int, ...]) -> None:
        """Note children for which a loop waits as well as for those already noted.

        The loop's collection, which `note_wait` was given, contains them.
        """
        self._withdraw_unwanted()
        self.report_ended_loans_in_task()
        self.send(Wait(current.task, children, is_more=True))

    def end_wait(self, waiter: object) -> None:
        """Note the end of a wait of which the driver already knows."""
        self._waits.pop(waiter, None)

    def read(self) -> None:
        """Handle received messages, without waiting.

        Raises:
            NodeClosedError: the driver has gone.
        """
        is_open = self._channel.read_ready(is_guest=True)
        if self.wake is not None:
            # A message may be for the task's own loop, which saw no bytes arrive.
            self.wake()
        if not is_open:
            raise NodeClosedError("the node has gone.")

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Read until `is_done()`; False if the deadline passes first.

        Args:
            is_done: called before each read.
            deadline: by `time.monotonic()`, None for no limit.

        Raises:
            NodeClosedError: the driver has gone.
        """
        while not is_done():
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return False
            if _thread._count():
                remaining = SLICE if remaining is None else min(remaining, SLICE)
            self._channel.wait(remaining)
            self.read()
        return True

    def hand_over(self) -> None:
        """Wait until the driver has each shared result, or will get it from elsewhere.

        A child that ended just before its result was shared has sent its answer only to
        this process. The answer is lost if this process ends without reading it.
        """
        due = self.shares.due_now()
        self._is_synced = False
        # If the driver has gone, the next send raises.
        with suppress(NodeClosedError):
            self.send(Sync())
            self.wait_until(lambda: self._is_synced)
        self.shares.forget(due)

    def report(self, payload: bytes) -> None:
        """Send a report of the running task or call; see `aiogpu.report`.

        Raises:
            MisuseError: this code belongs to no running task or call.
        """
        number = method_called.get()[1] or self._channel.entered
        if not number or number == current.actor:
            raise no_call_to_report()
        self._channel.report(number, payload)

    def end_task(self) -> bool:
        """End the task's children and waits after the task has ended.

        Returns:
            True if children were left, whose handles a loop has yet to settle.
        """
        with self._requesting:
            current.task = 0
            self._waits.clear()
            if not self._has_any:
                return False
            self._has_any = False
            self._channel.admit_guests(False)
        has_left = bool(self._receivers)
        self._settle_all(abandoned)
        return has_left

    def take(self, message: Message) -> bool:
        """Deliver an answer; False if the message is not for a task."""
        if type(message) is Synced:
            self._is_synced = True
            return True
        return super().take(message)


class LoopWaits:
    """The children for which code on one event loop waits; see `interface.Waits`.

    The task waits as long as any of its code waits. The driver gets one message per
    turn of the loop, with the children that are new, unless code has given up a wait.
    """

    def __init__(self, client: TaskClient, loop: AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._waits: dict[int, int] = {}
        self._more: list[int] = []
        self._is_reported = True
        self._has_reported = False
        self._has_withdrawn = False
        self._task = current.task
        if client.loop is not loop:
            # A loop that user code runs, in a plain function or a thread.
            loop.add_reader(client.fileno(), self._read)

    @property
    def is_current(self) -> bool:
        """True while the task that created this object runs."""
        return self._task == current.task != 0

    def _read(self) -> None:
        if self.is_current:
            with suppress(NodeClosedError):
                self._client.read()
                return
        # Else it would be called forever, for bytes that this loop must not read.
        self._loop.remove_reader(self._client.fileno())

    def begin_wait(self, child: int) -> None:
        """Note that code on the loop waits for a child."""
        self._waits[child] = self._waits.get(child, 0) + 1
        if self._waits[child] == 1:
            self._more.append(child)
            self._report_soon()

    def end_wait(self, child: int) -> None:
        """Note that code stops waiting although the child has not ended."""
        if child in self._waits:
            self._waits[child] -= 1
            if not self._waits[child]:
                del self._waits[child]
                self._has_withdrawn = True
                self._report_soon()

    def settle(self, child: int) -> None:
        """Settle a child that has ended."""
        self._waits.pop(child, None)

    def _report_soon(self) -> None:
        if self._is_reported:
            self._is_reported = False
            self._loop.call_soon(self._report)

    def _report(self) -> None:
        self._is_reported = True
        more, self._more = self._more, []
        waits, is_whole = self._waits, self._has_withdrawn or not self._has_reported
        self._has_withdrawn = False
        if not self.is_current:
            return
        # For the driver, a wait that ended within the same turn never existed.
        if not is_whole:
            new = tuple([child for child in more if child in waits])
            if new:
                self._client.note_more(new)
        elif waits or self._has_reported:
            self._client.note_wait(self, waits)
            self._has_reported = bool(waits)


def abandoned(name: str) -> TaskCancelledError:
    """Return the error of a child task that was stopped by the end of its parent."""
    return TaskCancelledError(
        f"{name} was stopped because the task that started it has ended."
    )


def task_client() -> TaskClient:
    """Return the client of the task that this worker runs.

    Raises:
        NodeError: this process is no worker.
    """
    return cast("TaskClient", client_of_process())


def refuse_while_importing() -> None:
    """Refuse to start the program from a module that this thread is importing.

    Raises:
        MisuseError: this thread imports a module. Each worker would start another
            program, without end.
    """
    module = _imported()
    if module:
        raise MisuseError(
            f"a worker imports {module} for {current.name}, and the module starts the "
            f"program again: put the lines that start it, such as "
            f"`aiogpu.run(main())`, under `if __name__ == '__main__':`."
        )


def _imported() -> str:
    """Return the innermost module that this thread is importing; "" for none."""
    inner = frame = sys._getframe()
    while frame.f_back is not None:
        inner, frame = frame, frame.f_back
        if frame.f_code.co_filename == IMPORT:
            return str(inner.f_globals.get("__name__", "a module"))
    return ""
