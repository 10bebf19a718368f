"""A worker's side without its driver: what a task says of its children, and hears."""

from __future__ import annotations

import os
from collections import deque

from aiogpu.serialization.exceptions import RAISED, pack_failure
from aiogpu.serialization.serializer import dump_result
from aiogpu.wire.messages import ChildDone, ChildFailed, Message, Submit, Wait
from aiogpu.worker.nested import TaskClient


class PaperChannel:
    """Notes what is sent; gives what the test has put there, one for each read.

    A pipe is readable as long as there is something.
    """

    is_main_thread = True
    loans = None

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.coming: deque[Message] = deque()
        self.on_child = lambda _message: False
        self._reading, self._writing = os.pipe()

    def fileno(self) -> int:
        return self._reading

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def admit_guests(self, are_admitted: bool) -> None:
        pass

    def wait(self, _seconds: float | None) -> None:
        pass

    def read_ready(self, is_guest: bool = False) -> bool:
        assert is_guest
        if self.coming:
            os.read(self._reading, 1)
            self.on_child(self.coming.popleft())
        return True

    def put(self, *messages: Message) -> None:
        for message in messages:
            self.coming.append(message)
            os.write(self._writing, b".")

    def close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)

    @property
    def waits(self) -> list[tuple[int, ...]]:
        """What the driver was told of waits."""
        return [one.children for one in self.sent if isinstance(one, Wait)]

    @property
    def started(self) -> list[int]:
        """The numbers of the children that were started."""
        return [one.child for one in self.sent if isinstance(one, Submit)]


def paper_children(channel: PaperChannel) -> TaskClient:
    return TaskClient(channel)  # type: ignore[arg-type]


def done(child: int, value: object = None) -> ChildDone:
    return ChildDone(child, dump_result(value))


def failed(child: int, error: BaseException) -> ChildFailed:
    return ChildFailed(child, *pack_failure(0, RAISED, error, "").why)
