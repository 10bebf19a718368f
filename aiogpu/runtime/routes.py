"""To whom the lines of tasks go on a node that other programs have joined.

A task's lines go to the program whose task it is, on the connection by which its answer
goes, and so ahead of that. What belongs to no task stays with the node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.records import TaskRecord
from aiogpu.core.scheduler.state import SchedulerState
from aiogpu.runtime.console import Source
from aiogpu.runtime.task_log import TaskLog
from aiogpu.wire.messages import PROGRESS, Message, Printed, Warned


class Peer(Protocol):
    """The connection of a program."""

    def send_one(self, message: Message) -> None:
        """Send it a message."""
        ...


class Reader(Protocol):
    """A program that has joined.

    Attributes:
        peer: its connection, None once it has gone.
        shows: whether it wants to see what its tasks print.
        is_slow: it has not read what it was sent before.
    """

    @property
    def peer(self) -> Peer | None:
        """See above."""
        ...

    @property
    def shows(self) -> bool:
        """See above."""
        ...

    @property
    def is_slow(self) -> bool:
        """See above."""
        ...


class Routes:
    """See above.

    Attributes:
        log: keeps every line of every task; None for nobody.
    """

    def __init__(self, node: SchedulerState, readers: Mapping[int, Reader]) -> None:
        self.log: TaskLog | None = None
        self._node = node
        self._readers = readers
        self._paused: dict[int, set[Source]] = {}

    def __repr__(self) -> str:
        return f"<Routes {len(self._readers)}>"

    def take(
        self,
        stream: int,
        label: str,
        text: str,
        source: Source,
        worker: int,
        task: int,
        replaces: int = 0,
    ) -> bool:
        """Send a line to its owner; False if that is the node itself.

        Args:
            stream: 1 or 2, for stdout and stderr.
            label: who has printed it.
            text: the line.
            source: where it comes from; made to wait while its owner is slow.
            worker: the process.
            task: the task that has printed it; 0 for whichever runs there.
            replaces: the worker whose progress it replaces; 0 for none.
        """
        record = self._record(worker, task)
        if record is None or not record.client:
            return False
        client = record.client
        if self.log is not None and not text.endswith(PROGRESS):
            self.log.write(client, record.id, stream, label, text)
        reader = self._readers.get(client)
        if reader is None or reader.peer is None or not reader.shows:
            return True
        shown = text if text == PROGRESS else f"({label}) {text}"
        reader.peer.send_one(Printed(stream, shown, replaces))
        if reader.is_slow:
            self._paused.setdefault(client, set()).add(source)
            source.pause()
        return True

    def warn(self, client: int, text: str) -> bool:
        """Have a program log a warning; False if it is the node itself, or has gone."""
        reader = self._readers.get(client)
        if reader is None or reader.peer is None:
            return False
        reader.peer.send_one(Warned(text))
        return True

    def _record(self, worker: int, task: int) -> TaskRecord | None:
        if task:
            return self._node.tasks.get(TaskId(task))
        known = self._node.workers.get(WorkerId(worker))
        return None if known is None else known.task

    def resume(self, client: int) -> None:
        """A program has read what it was sent, or has gone."""
        for source in self._paused.pop(client, ()):
            source.resume()

    async def close(self) -> None:
        """Have what is left written; nothing more comes."""
        for client in list(self._paused):
            self.resume(client)
        if self.log is not None:
            await asyncio.to_thread(self.log.close)
