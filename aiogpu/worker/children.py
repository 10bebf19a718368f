"""The tasks that the running task has started, over the worker's own socket.

Whoever waits for one reads the socket himself: the worker has no other thread. What
comes for the worker meanwhile stays on the channel until the task has ended.
"""

from __future__ import annotations

import _thread
import time
from _thread import allocate_lock
from collections import deque
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final

from aiogpu.errors import NodeClosedError
from aiogpu.wire.messages import (
    NUMBER_BITS,
    Ask,
    Carried,
    Carry,
    ChildDemand,
    ChildDone,
    ChildFailed,
    ChildItems,
    Declare,
    Failed,
    Fetch,
    Find,
    Make,
    Message,
    Release,
    Submit,
    Sync,
    Synced,
    Wait,
    Withdraw,
)
from aiogpu.worker.context import current, passing, take_passing
from aiogpu.worker.shares import Shares

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiogpu.worker.channel import Channel
    from aiogpu.worker.shares import Receiver

SLICE: Final = 0.05
"""Seconds after which a waiting thread sees what another one has read for it."""
DECLARED: Final = 512
"""Sites that a worker takes for declared; then it declares all anew. The driver
keeps more, so that it never forgets one that the worker still counts on."""


class Children:
    """All children of the task that runs, by numbers of the worker's own.

    Attributes:
        loop: the event loop that reads the socket for the task; None without one.
        wake: has that loop look at what another thread has read.
        on_drop: told that there is something to say by `tell_dropped`, in whichever
            thread and maybe amid a send; None where that is said after each task.
        upsets: how many children have ended without a result so far.
        shares: their results, as others are given them.
    """

    def __init__(self, channel: Channel) -> None:
        self.loop: object = None
        self.wake: Callable[[], object] | None = None
        self.on_drop: Callable[[], object] | None = None
        self.upsets = 0
        self._channel = channel
        self._receivers: dict[int, Receiver] = {}
        self._declared: set[int] = set()
        self._waits: dict[object, tuple[int, ...]] = {}
        self._main = _thread.get_ident()
        self._is_bound = False
        self._numbers = count(1)
        self._submitting = allocate_lock()
        self._has_any = False
        self._dropped: deque[int] = deque()
        self.shares = Shares(channel, self.read, self._numbers.__next__)
        self._unwanted: deque[int] = deque()
        self._is_synced = False

    def fileno(self) -> int:
        """Descriptor of the socket, for an event loop to watch."""
        return self._channel.fileno()

    def submit(
        self,
        site: int,
        payload: bytes,
        receiver: Receiver,
        describe: Callable[[], Declare],
    ) -> int:
        """Start a child of the running task.

        Args:
            site: what is called, by this process's own id.
            payload: the pickled arguments.
            receiver: told of its end.
            describe: says what the site is; asked if the driver may not know.

        Returns:
            Its number; 0 if no task runs any more.

        Raises:
            MisuseError: what starts it is the import of a module for this task.
        """
        if current.is_loading:
            _refuse_to_begin_anew()
        with self._submitting:
            task = current.task
            if not task:
                return 0
            self._begin()
            if site not in self._declared:
                self._declare(describe())
            child = next(self._numbers)
            self._receivers[child] = receiver
            self._send_passed()
            self._channel.send(Submit(task, child, site, payload))
        return child

    def _begin(self) -> None:
        if not self._has_any:
            self._has_any = True
            self._channel.on_child = self._take
            if self.on_drop is None:
                self._channel.on_idle = self.tell_dropped
            self._channel.admit_guests(True)

    def ask(self, actor: int, method: str, payload: bytes, receiver: Receiver) -> int:
        """Call a method of an actor; gives the call's number among the children.

        Returns:
            0 if no task runs any more.
        """
        with self._submitting:
            if not current.task:
                return 0
            self._begin()
            child = next(self._numbers)
            self._receivers[child] = receiver
            self._send_passed()
            self._channel.send(Ask(current.task, child, actor, method, payload))
        return child

    def find(self, name: str, namespace: str, receiver: Receiver) -> int:
        """Ask which actor has a name; gives the question's number."""
        with self._submitting:
            self._begin()
            child = next(self._numbers)
            self._receivers[child] = receiver
            self._channel.send(Find(child, name, namespace))
        return child

    def make(
        self, made: Callable[[int], Make], site: int, describe: Callable[[], Declare]
    ) -> int:
        """Have an actor made; gives its id.

        Args:
            made: what is to be said of it, given its id.
            site: its class, by this process's own id.
            describe: says what the site is; asked if the driver may not know.

        Raises:
            MisuseError: what starts it is the import of a module for this task.
        """
        if current.is_loading:
            _refuse_to_begin_anew()
        with self._submitting:
            if site not in self._declared:
                self._declare(describe())
            actor = -((current.worker << NUMBER_BITS) + next(self._numbers))
            self._send_passed()
            self._channel.send(made(actor))
        return actor

    def fetch(self, value: int, receiver: Receiver) -> int:
        """Ask for a value; gives the question's number, 0 if no task runs any more."""
        with self._submitting:
            if not current.task:
                return 0
            self._begin()
            child = next(self._numbers)
            self._receivers[child] = receiver
            self.tell_amid()
            self._channel.send(Fetch(current.task, child, value))
        return child

    def tell(self, message: Message) -> None:
        """Say something that nobody answers."""
        self._channel.send(message)

    def drop(self, actor: int) -> None:
        """The last handle to an actor is gone; said soon, since it may go anywhere."""
        self._dropped.append(actor)
        if self.on_drop is not None:
            self.on_drop()

    def tell_dropped(self) -> None:
        """Say which handles are gone, and what else was lent and is not needed."""
        while self._dropped:
            self._channel.send(Release(self._dropped.popleft()))
        if current.loans is not None and current.loans.over:
            current.loans.tell_to(self._channel.send)

    def tell_amid(self) -> None:
        """The same while a task runs, which may go on for days."""
        over = current.loans is not None and current.loans.over
        # What other calls and threads send must keep those alive that it names.
        others_send = passing or current.actor is not None
        is_alone = self._channel.is_main_thread and not others_send
        may_drop = self._dropped and is_alone
        if over or may_drop:
            with self._channel.uncut():
                if may_drop:
                    self.tell_dropped()
                elif current.loans is not None:
                    current.loans.tell_to(self._channel.send)

    def _send_passed(self) -> None:
        self._tell_unwanted()
        self.tell_amid()
        if passing:
            self._channel.send(Carry(0, take_passing()))

    def _declare(self, declaration: Declare) -> None:
        if len(self._declared) >= DECLARED:
            self._declared.clear()
        self._channel.send(declaration)
        self._declared.add(declaration.site)

    def demand(self, child: int, limit: int) -> None:
        """Let a child that is a stream yield so many items in all."""
        self.tell_amid()
        if child in self._receivers:
            self._channel.send(ChildDemand(child, limit))

    def withdraw(self, child: int) -> None:
        """Nobody wants a child's result any more: stop it."""
        if self._receivers.pop(child, None) is not None:
            self.upsets += 1
            self.shares.withdraw(child)
            self._channel.send(Withdraw(current.task, child))

    def withdraw_soon(self, child: int) -> None:
        """The same where the collector runs, which may be amid a send."""
        if self._channel.is_busy:
            self._unwanted.append(child)
        else:
            self.withdraw(child)

    def _tell_unwanted(self) -> None:
        while self._unwanted:
            self.withdraw(self._unwanted.popleft())

    def note_wait(
        self, waiter: object, children: tuple[int, ...], is_bound: bool = False
    ) -> None:
        """A thread or loop of the task waits for these, or for none any more.

        The task as a whole waits for what any of them waits for; see `Wait` for what
        its main thread is bound to.
        """
        self._tell_unwanted()
        self.tell_amid()
        self.end_wait(waiter)
        if children:
            self._waits[waiter] = children
            if waiter == self._main:
                self._is_bound = is_bound
        bound = self._waits.get(self._main, ()) if self._is_bound else ()
        waits = list(self._waits.values())
        if len(waits) > 1:
            children = tuple(
                {child: None for some in (bound, *waits) for child in some}
            )
        else:
            children = waits[0] if waits else ()
        self._channel.send(Wait(current.task, children, len(bound)))

    def end_wait(self, waiter: object) -> None:
        """All that it waited for has ended, which the driver knows by itself."""
        self._waits.pop(waiter, None)

    def read(self) -> None:
        """Take what has come, without waiting.

        Raises:
            NodeClosedError: the driver has gone.
        """
        is_open = self._channel.read_ready(is_guest=True)
        if self.wake is not None:
            # What was read may be for the task's own loop, which saw nothing come.
            self.wake()
        if not is_open:
            raise NodeClosedError("the node has gone.")

    def wait_until(
        self, is_done: Callable[[], bool], deadline: float | None = None
    ) -> bool:
        """Read until something is done; False if time is up before.

        Args:
            is_done: asked after each read.
            deadline: by `time.monotonic()`, None for no limit.

        Raises:
            NodeClosedError: the driver has gone.
        """
        while not is_done():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            if _thread._count():
                left = SLICE if left is None else min(left, SLICE)
            self._channel.wait(left)
            self.read()
        return True

    def hand_over(self) -> None:
        """Wait until the driver has, or will get by itself, each result that is shared.

        A child that ended just before its result was shared has sent its answer here
        and nowhere else. The answer is lost if this process ends without reading it.
        """
        due = self.shares.due_now()
        self._is_synced = False
        # Where the driver has gone, the next send says so.
        with suppress(NodeClosedError):
            self._channel.send(Sync())
            self.wait_until(lambda: self._is_synced)
        self.shares.forget(due)

    def end_task(self) -> None:
        """The task has ended, and what it had started ends with it."""
        with self._submitting:
            current.task = 0
            self._waits.clear()
            if not self._has_any:
                return
            self._has_any = False
            self._channel.admit_guests(False)
            left, self._receivers = self._receivers, {}
        for receiver in left.values():
            self.upsets += 1
            receiver.abandon()

    def _take(self, message: Message) -> bool:
        if self.shares.due:
            self.shares.pass_on(message)
        if type(message) is ChildItems:
            receiver = self._receivers.get(message.child)
            if receiver is not None:
                receiver.receive_items(message.payloads)  # type: ignore[attr-defined]
            return True
        if type(message) is ChildDone:
            receiver = self._receivers.pop(message.child, None)
            if receiver is not None:
                receiver.receive(message.payload)
            return True
        if type(message) is ChildFailed:
            receiver = self._receivers.pop(message.child, None)
            if receiver is not None:
                receiver.reject(Failed(*message))
                self.upsets += 1
            return True
        if type(message) is Carried:
            from aiogpu.worker.carried import hold_for  # few results have handles

            hold_for(self._receivers.get(message.child), message.actors, self.drop)
            return True
        if type(message) is Synced:
            self._is_synced = True
            return True
        return False


def _refuse_to_begin_anew() -> None:
    # Late: a program that is written as it should be hardly comes here.
    from aiogpu.worker.loading import refuse_to_begin_anew

    refuse_to_begin_anew()
