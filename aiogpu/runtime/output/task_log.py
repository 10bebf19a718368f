"""A log of what tasks print: files of bounded size, written by a thread.

A disk that is full, slow or gone costs lines, which are counted and told in the log
once it can be written again; it never makes the loop wait.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Final, NamedTuple, TypeVar

T = TypeVar("T")


def batches(queue: SimpleQueue[T | None]) -> Iterator[list[T]]:
    """Wait for what comes, take all that there is, and so on until None has come."""
    is_open = True
    while is_open:
        taken = [queue.get()]
        while not queue.empty():
            taken.append(queue.get())
        entries = [one for one in taken if one is not None]
        is_open = len(entries) == len(taken)
        yield entries


_log: Final = logging.getLogger(__name__)


FILE: Final = "tasks.log"


SIZE: Final = 8 << 20
"""Bytes of one file; then it becomes `tasks.log.1`, and so on."""


KEPT: Final = 4
"""Old files kept beside the one that is written."""


WAITING: Final = 8 << 20
"""Characters that may wait for the disk; more lines are lost."""


PATIENCE: Final = 2.0
"""Seconds that the last lines get to be written in."""


STREAMS: Final = {1: "out", 2: "err"}


_OF_A_LINE: Final = 64
"""What a line costs beside its text."""


class Entry(NamedTuple):
    """A line of a task.

    Attributes:
        at: seconds since the epoch.
        client: the program whose task it is.
        task: the task.
        stream: 1 or 2, for stdout and stderr.
        label: who has printed it.
        text: the line.
    """

    at: float
    client: int
    task: int
    stream: int
    label: str
    text: str

    def __str__(self) -> str:
        whole, part = divmod(self.at, 1)
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(whole))
        stream = STREAMS.get(self.stream, "out")
        return (
            f"{moment}.{int(part * 1000):03} client={self.client} task={self.task} "
            f"{stream} ({self.label}) {self.text}"
        )


class TaskLog:
    """See above. Its thread starts with the first line.

    Attributes:
        lost: lines that found no room on the way to the thread.
    """

    def __init__(self, directory: str, size: int = SIZE, kept: int = KEPT) -> None:
        self.lost = 0
        self._pages = Pages(f"{directory}/{FILE}", size, kept)
        self._waiting = 0
        self._lines: SimpleQueue[Entry | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<TaskLog {self._pages.path}>"

    def write(self, client: int, task: int, stream: int, label: str, text: str) -> None:
        """Keep a line; see `Entry`."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write_all, name="aiogpu-task-log", daemon=True
            )
            self._thread.start()
        size = len(text) + _OF_A_LINE
        with self._lock:
            if self._waiting + size > WAITING:
                self.lost += 1
                return
            self._waiting += size
        self._lines.put(Entry(time.time(), client, task, stream, label, text))

    def close(self) -> None:
        """Write what is left, for `PATIENCE` seconds at most."""
        self._lines.put(None)
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def _write_all(self) -> None:
        for entries in batches(self._lines):
            with self._lock:
                self._waiting -= sum(len(e.text) + _OF_A_LINE for e in entries)
                lost, self.lost = self.lost, 0
            self._pages.write(list(map(str, entries)), lost)
        self._pages.close()


class Pages:
    """The files, mode 0600; used by one thread.

    Attributes:
        path: of the one that is written.
    """

    def __init__(self, path: str, size: int, kept: int) -> None:
        self.path = path
        self._limit = size
        self._kept = kept
        self._size = 0
        self._descriptor = -1
        self._lost = 0
        self._has_warned = False

    def write(self, lines: list[str], lost: int = 0) -> None:
        """Write lines; `lost`: so many before them are missing."""
        self._lost += lost
        done = 0
        try:
            if self._lost:
                self._put(f"! {self._lost} lines are missing here: no room for them")
                self._lost = 0
            for line in lines:
                self._put(line)
                done += 1
        except OSError as error:
            self._lost += len(lines) - done
            self.close()
            if not self._has_warned:
                self._has_warned = True
                _log.warning("! lines of tasks are missing in the log: %s", error)

    def _put(self, line: str) -> None:
        data = f"{line}\n".encode("utf-8", "backslashreplace")
        if self._descriptor < 0:
            self._open()
        if self._size and self._size + len(data) > self._limit:
            self._turn()
        self._size += len(data)
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(self.path, flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def _turn(self) -> None:
        """Begin a new file."""
        self.close()
        for number in range(self._kept, 0, -1):
            older = f"{self.path}.{number - 1}" if number > 1 else self.path
            with suppress(FileNotFoundError):
                os.replace(older, f"{self.path}.{number}")
        self._open()

    def close(self) -> None:
        """Close the file; another line opens it again."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
