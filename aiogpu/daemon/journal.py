"""The log of the node itself: files of bounded size, written by a thread.

If the disk is full, slow or gone, lines are lost and counted; the node goes on, and its
loop never waits.
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
"""Most bytes of a file; a full file is renamed to `node.log.1`, and so on."""
KEPT: Final = 4
"""Number of old files that are kept."""
WAITING: Final = 10_000
"""Most lines that wait for the disk; more lines are lost."""
PATIENCE: Final = 2.0
"""Seconds for writing the last lines at the end."""
FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_log: Final = logging.getLogger("aiogpu.daemon")


class RotatingLog(RotatingFileHandler):
    """The log files, mode 0600. Lines that cannot be written are counted and reported.

    Attributes:
        lost: number of lines lost since the last written line.
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
        """Write a line, after a line with the number of lost lines, if any."""
        lost, self.lost = self.lost, 0
        if lost:
            text = f"! {lost} lines are missing here: they could not be written"
            super().emit(_record(logging.WARNING, text))
            if self.lost:
                self.lost += lost
                return
        super().emit(record)

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802 - theirs
        """Count the line; the file is reopened for the next one."""
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
    """Handler of the root logger: queues lines for a thread that writes them.

    Attributes:
        lost: number of lines dropped because the queue was full or formatting failed.
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
        """Log to files in a directory, and to a terminal if there is one."""
        handlers: list[logging.Handler] = [RotatingLog(f"{directory}/{FILE}")]
        if terminal is not None:
            handlers.append(TerminalLog(terminal))
        journal = cls(*handlers)
        root = logging.getLogger()
        root.addHandler(journal)
        root.setLevel(logging.INFO)
        logging.captureWarnings(True)
        return journal

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802 - theirs
        """Count the line: the queue is full, or the `__str__` of an object fails."""
        self.lost += 1

    def _write_all(self) -> None:
        reported = 0
        while (record := self._lines.get()) is not None:
            lost = self.lost
            for handler in self._to:
                if isinstance(handler, RotatingLog):
                    handler.lost += lost - reported
                handler.handle(record)
            reported = lost

    def close(self) -> None:
        """Write the remaining lines, in at most `PATIENCE` seconds."""
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


class TerminalLog(logging.StreamHandler[TextIO]):
    """Logs to a terminal, which may be closed at any time."""

    def __init__(self, terminal: TextIO) -> None:
        super().__init__(terminal)
        self.setFormatter(logging.Formatter(FORMAT))

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802 - theirs
        """Ignore the error: the terminal was closed."""


class StreamToLog(io.TextIOBase):
    """Replaces a standard stream of a process without a terminal: logs its lines."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(f"aiogpu.daemon.{name}")
        self._rest = ""

    def writable(self) -> bool:
        """Return True; the stream cannot be read."""
        return True

    def write(self, text: str) -> int:
        """Log all complete lines."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._log.info("%s", line)
        return len(text)


def log_standard_streams() -> None:
    """Redirect `sys.stdout` and `sys.stderr` to the log."""
    sys.stdout, sys.stderr = StreamToLog("stdout"), StreamToLog("stderr")
