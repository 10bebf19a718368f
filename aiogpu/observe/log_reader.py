"""Reads the log of tasks, also while the node writes and rotates it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import count
from typing import BinaryIO, Final

LINE: Final = re.compile(r"\S+ \S+ client=(\d+) task=(\d+) \w+ \((.*?)(?: pid=\d+)?\) ")
"""The beginning of a line: its program, its task and the name of the task."""
BEGIN: Final = re.compile(r"\S+ \S+ client=0 task=0 out \(node ")
"""The line that a node writes when it starts; the numbers of tasks begin anew."""
CHUNK: Final = 1 << 16


class LogReader:
    """Reads a rotated log: `path.2`, `path.1`, `path`, and then appended lines.

    The current file may be renamed or removed while it is read. The reader knows it by
    its inode, and keeps it open until its end.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def __repr__(self) -> str:
        return f"<LogReader {self._path}>"

    def read(self) -> Iterator[str]:
        """Yield the complete lines since the last call, without line ends."""
        while True:
            # Looked up first, so that no line before a rotation is missed.
            following = self._following()
            while data := self._file.read(CHUNK) if self._file is not None else b"":
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    yield line.decode("utf-8", "surrogateescape")
            if following is None:
                return
            if self._rest:
                yield self._rest.decode("utf-8", "surrogateescape")
                self._rest = b""
            self.close()
            self._file = following

    def _following(self) -> BinaryIO | None:
        """Return the file after the current one, or the oldest; None without one."""
        newer: BinaryIO | None = None
        for number in count():
            name = f"{self._path}.{number}" if number else self._path
            try:
                file = open(name, "rb", buffering=0)  # noqa: SIM115
            except OSError:
                if number:
                    return newer
                continue  # during a rotation `path` may be missing for a moment
            if self._file and os.path.sameopenfile(file.fileno(), self._file.fileno()):
                file.close()
                return newer
            if newer is not None:
                newer.close()
            newer = file
        return newer

    def close(self) -> None:
        """Close the current file."""
        if self._file is not None:
            self._file.close()
            self._file = None
