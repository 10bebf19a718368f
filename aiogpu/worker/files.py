"""Whether the files of what a zygote has imported were edited since."""

from __future__ import annotations

import os
import sys
import time
from typing import Final

OWN: Final = "aiogpu"
"""This package's own modules are as old as the driver's, and stay so."""


class Files:
    """The source files of all modules that are loaded now, and how old they were.

    Args:
        since: when the imports began, in nanoseconds since the epoch. A file that
            was written later may have been read before or after.
    """

    def __init__(self, since: int) -> None:
        now = time.time_ns()
        self._written: dict[str, tuple[str, int]] = {}
        for name, module in list(sys.modules.items()):
            path = getattr(getattr(module, "__spec__", None), "origin", None)
            if not isinstance(path, str) or name.partition(".")[0] == OWN:
                continue
            written = _written(path)
            if written:
                is_doubtful = since <= written <= now
                self._written[path] = (name, 0 if is_doubtful else written)

    def edited(self) -> list[str]:
        """Modules whose files have changed since this was asked last.

        One whose file has gone has not changed.
        """
        found = []
        for path, (name, before) in self._written.items():
            written = _written(path)
            if written not in (0, before):
                self._written[path] = (name, written)
                found.append(name)
        return found


def _written(path: str) -> int:
    """When a file was written, in nanoseconds; 0 if there is none."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
