"""The lines of a log, oldest first, across the files that it was turned into."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from typing import BinaryIO, Final

CHUNK: Final = 1 << 16


class Trail:
    """Reads `path.2`, `path.1`, `path`, and goes on where the last reading ended.

    The file that is read may be renamed meanwhile, or removed: it is known by its
    inode, and stays open until its end was read.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def __repr__(self) -> str:
        return f"<Trail {self._path}>"

    def read(self) -> Iterator[str]:
        """All whole lines that have come since, without their ends."""
        while self._file is not None or self._open_next():
            yield from self._lines()
            if not self._is_over():
                return
            # It was written to before another took its place.
            yield from self._lines()
            if self._rest:
                yield self._take_rest()
            if not self._open_next():
                return

    def _lines(self) -> Iterator[str]:
        assert self._file is not None, self
        while data := self._file.read(CHUNK):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                yield line.decode("utf-8", "backslashreplace")

    def _take_rest(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "backslashreplace")

    def _is_over(self) -> bool:
        """Return whether there is a newer file than the one that is read."""
        known = self._known()
        return bool(known) and known[0] != self._inode

    @property
    def _inode(self) -> tuple[int, int] | None:
        if self._file is None:
            return None
        found = os.fstat(self._file.fileno())
        return found.st_dev, found.st_ino

    def _known(self) -> list[tuple[int, int]]:
        """The files that there are, newest first."""
        known: list[tuple[int, int]] = []
        for number in count():
            try:
                found = os.stat(self._name(number))
            except OSError:
                if number:
                    return known
                continue  # between two files there may be none for a moment
            known.append((found.st_dev, found.st_ino))
        return known

    def _name(self, number: int) -> str:
        return f"{self._path}.{number}" if number else self._path

    def _open_next(self) -> bool:
        """Open the file after the one that was read, or the oldest."""
        before = self._inode
        known = self._known()
        newer = known[: known.index(before)] if before in known else known
        for identity in reversed(newer):
            for number in range(len(known) + 2):
                with suppress(OSError):
                    file = open(self._name(number), "rb", buffering=0)  # noqa: SIM115
                    found = os.fstat(file.fileno())
                    if (found.st_dev, found.st_ino) == identity:
                        self.close()
                        self._file = file
                        return True
                    file.close()
        return False

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
