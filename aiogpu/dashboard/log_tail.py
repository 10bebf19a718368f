"""The last lines of a node's log, for one tab; the files are read in a thread."""

from __future__ import annotations

import os
from collections import deque
from typing import Final

from aiogpu.errors import NodeError
from aiogpu.observe.log_reader import BEGIN, LINE, LogReader
from aiogpu.runtime.directories import check_meeting, logs_beside
from aiogpu.runtime.output import FILE

LINES: Final = 200
"""Lines that are kept and shown."""
LONGEST: Final = 2000
"""Characters of a line."""


class LogTail:
    """The last lines of a log, of all tasks or of one.

    Args:
        task: the number of the task; 0 for all.
        needle: show only lines that contain it, in any case; "" for all.
    """

    def __init__(self, task: int, needle: str) -> None:
        self._task = task
        self._needle = needle.casefold()
        self._lines: deque[str] = deque(maxlen=LINES)
        self._directory = ""
        self._reader: LogReader | None = None

    def __repr__(self) -> str:
        return f"<LogTail {self._directory}>"

    def read(self, address: str) -> list[str]:
        """Read what is new in the log of a node; return the last lines.

        Args:
            address: the path of the node's socket.

        Raises:
            NodeError: the node keeps no log, or another user controls the directory.
        """
        directory = logs_beside(address)
        if directory != self._directory or self._reader is None:
            self.close()
            check_meeting(directory)
            if not os.path.isdir(directory):
                raise NodeError(
                    "this node keeps no log: it is inside a program, and the output of "
                    "its tasks goes to the output of that program. A node of `aiogpu "
                    "start --head` keeps one."
                )
            self._directory = directory
            self._reader = LogReader(os.path.join(directory, FILE))
        for line in self._reader.read():
            if self._task and BEGIN.match(line):
                self._lines.clear()  # the number belongs to another node's task
            elif self._is_wanted(line):
                self._lines.append(line[:LONGEST])
        return [*self._lines]

    def _is_wanted(self, line: str) -> bool:
        if self._task:
            match = LINE.match(line)
            if match is None or int(match[2]) != self._task:
                return False
        return self._needle in line.casefold()

    def close(self) -> None:
        """Close the files."""
        if self._reader is not None:
            self._reader.close()
        self._reader = None
        self._lines.clear()
