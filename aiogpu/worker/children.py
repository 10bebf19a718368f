"""The tasks that the running task has started, over the worker's own socket.

Whoever waits for one reads the socket himself: the worker has no other thread. What
comes for the worker meanwhile stays on the channel until the task has ended.
"""

from __future__ import annotations

import _thread
import time
from typing import TYPE_CHECKING, Final, Protocol

from aiogpu.errors import NodeClosedError
from aiogpu.wire.messages import (
    ChildDone,
    ChildFailed,
    Declare,
    Failed,
    Message,
    Submit,
    Wait,
    Withdraw,
)
from aiogpu.worker.context import current

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiogpu.worker.channel import Channel

SLICE: Final = 0.05
"""Seconds after which a waiting thread sees what another one has read for it."""


class Receiver(Protocol):
    """Who waits for a child. One of the two is called, at most once."""

    def receive(self, payload: bytes) -> None:
        """Take the pickled result."""
        ...

    def reject(self, failed: Failed) -> None:
        """Take why there is none."""
        ...


class Children:
    """All children of the task that runs, by numbers of the worker's own.

    Attributes:
        loop: the event loop that reads the socket for the task; None without one.
    """

    def __init__(self, channel: Channel) -> None:
        self.loop: object = None
        self._channel = channel
        self._receivers: dict[int, Receiver] = {}
        self._declared: set[int] = set()
        self._last = 0
        self._has_any = False
        channel.on_child = self._take

    def fileno(self) -> int:
        """Descriptor of the socket, for an event loop to watch."""
        return self._channel.fileno()

    def knows(self, site: int) -> bool:
        """Whether a site was declared."""
        return site in self._declared

    def declare(self, site: int, name: str, terms: bytes, payload: bytes) -> None:
        """Tell the driver what calls of a site are, once."""
        self._channel.send(Declare(site, name, terms, payload))
        self._declared.add(site)

    def submit(self, site: int, payload: bytes, receiver: Receiver) -> int:
        """Start a child of the running task; gives its number."""
        if not self._has_any:
            self._has_any = True
            self._channel.admit_guests(True)
        self._last += 1
        child = self._last
        self._receivers[child] = receiver
        self._channel.send(Submit(current.task, child, site, payload))
        return child

    def withdraw(self, child: int) -> None:
        """Nobody wants a child's result any more: stop it."""
        if self._receivers.pop(child, None) is not None:
            self._channel.send(Withdraw(current.task, child))

    def holds(self, child: int) -> bool:
        """Whether a child has not ended, and its task neither."""
        return child in self._receivers

    def note_wait(self, children: tuple[int, ...]) -> None:
        """The task's code waits for these, or for none any more."""
        self._channel.send(Wait(current.task, children))

    def read(self) -> None:
        """Take what has come, without waiting.

        Raises:
            NodeClosedError: the driver has gone.
        """
        if not self._channel.read_ready(is_guest=True):
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

    def end_task(self) -> None:
        """The task has ended, and what it had started ends with it."""
        if self._has_any:
            self._has_any = False
            self._channel.admit_guests(False)
            self._receivers.clear()

    def _take(self, message: Message) -> bool:
        if type(message) is ChildDone:
            receiver = self._receivers.pop(message.child, None)
            if receiver is not None:
                receiver.receive(message.payload)
            return True
        if type(message) is ChildFailed:
            receiver = self._receivers.pop(message.child, None)
            if receiver is not None:
                receiver.reject(Failed(*message))
            return True
        return False
