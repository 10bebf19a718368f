"""The log of the node itself: files of bounded size, written by a thread.

A disk that is full, slow or gone costs lines of the log, which are counted; it never
stops the node, nor makes its loop wait.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import sys
import threading
from contextlib import suppress
from logging.handlers import QueueHandler, RotatingFileHandler
from typing import Final, TextIO

FILE: Final = "node.log"
SIZE: Final = 4 << 20
"""Bytes of one file; then it becomes `node.log.1`, and so on."""
KEPT: Final = 4
"""Old files kept beside the one that is written."""
WAITING: Final = 10_000
"""Lines that may wait for the disk; more are lost."""
PATIENCE: Final = 2.0
"""Seconds that the last lines get to be written in."""
FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_log: Final = logging.getLogger("aiogpu.daemon")


class Pages(RotatingFileHandler):
    """The files, mode 0600. What cannot be written is counted, and told later.

    Attributes:
        lost: lines since the last one that was written.
    """

    def __init__(self, path: str, size: int = SIZE, kept: int = KEPT) -> None:
        self.lost = 0
        super().__init__(path, maxBytes=size, backupCount=kept, delay=True)
        self.setFormatter(logging.Formatter(FORMAT))

    def _open(self) -> io.TextIOWrapper:
        raw = io.FileIO(self.baseFilename, "ab", opener=_open_private)
        buffer = io.BufferedWriter(raw)
        return io.TextIOWrapper(buffer, encoding="utf-8", errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, and before it how many were lost."""
        lost, self.lost = self.lost, 0
        if lost:
            text = f"! {lost} lines are missing here: they could not be written"
            super().emit(_record(logging.WARNING, text))
            if self.lost:
                self.lost += lost
                return
        super().emit(record)

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802 - theirs
        """Count the line; the file is opened anew for the next one."""
        self.lost += 1
        stream, self.stream = self.stream, None
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.close()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _record(level: int, text: str) -> logging.LogRecord:
    return logging.LogRecord(_log.name, level, __file__, 0, text, None, None)


class Journal(QueueHandler):
    """What the node logs goes through here; made to be the root logger's handler.

    Attributes:
        lost: lines that found no room on the way to the thread, or were none, in all.
    """

    def __init__(self, *to: logging.Handler) -> None:
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(WAITING)
        super().__init__(self._lines)
        self.lost = 0
        self._before = logging.getLogger().level
        self._to = to
        self._thread = threading.Thread(
            target=self._write_all, name="aiogpu-journal", daemon=True
        )
        self._thread.start()

    @classmethod
    def begin(cls, directory: str, terminal: TextIO | None = None) -> Journal:
        """Log into a directory, and to a terminal if there is one."""
        handlers: list[logging.Handler] = [Pages(f"{directory}/{FILE}")]
        if terminal is not None:
            handlers.append(Screen(terminal))
        journal = cls(*handlers)
        root = logging.getLogger()
        root.addHandler(journal)
        root.setLevel(logging.INFO)
        logging.captureWarnings(True)
        return journal

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802 - theirs
        """Count the line: a full queue, or any object's own `__str__`."""
        self.lost += 1

    def _write_all(self) -> None:
        told = 0
        while (record := self._lines.get()) is not None:
            lost = self.lost
            for handler in self._to:
                if isinstance(handler, Pages):
                    handler.lost += lost - told
                handler.handle(record)
            told = lost

    def close(self) -> None:
        """Write what is left, for `PATIENCE` seconds at most."""
        root = logging.getLogger()
        if self in root.handlers:
            root.removeHandler(self)
            root.setLevel(self._before)
            logging.captureWarnings(False)
        with suppress(queue.Full):
            self._lines.put(None, timeout=PATIENCE)
            self._thread.join(PATIENCE)
        if not self._thread.is_alive():
            for handler in self._to:
                with suppress(OSError):
                    handler.close()
        super().close()


class Screen(logging.StreamHandler[TextIO]):
    """A terminal, which may be closed at any time."""

    def __init__(self, terminal: TextIO) -> None:
        super().__init__(terminal)
        self.setFormatter(logging.Formatter(FORMAT))

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802 - theirs
        """Whoever has closed it does not want to know."""


class Lines(io.TextIOBase):
    """A stream that has no terminal any more: its lines go to the log."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(f"aiogpu.daemon.{name}")
        self._rest = ""

    def writable(self) -> bool:
        """It is for that alone."""
        return True

    def write(self, text: str) -> int:
        """Log what has become whole lines."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._log.info("%s", line)
        return len(text)


def stand_in_for_streams() -> None:
    """Have what is printed in this process logged from now on."""
    sys.stdout, sys.stderr = Lines("stdout"), Lines("stderr")
