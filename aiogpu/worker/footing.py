"""What the next task relies on and a task may have changed: where it stands.

Its directory, its file mode mask and the handler that interrupts it, each put back
in well under a microsecond. What a process cannot be given back so cheaply (limits,
locale, masked signals, threads) stays with the worker: `max_calls=1` avoids that.
"""

from __future__ import annotations

import os
from collections.abc import Callable


class Footing:
    """Where a worker's tasks begin."""

    def __init__(self, restore_handler: Callable[[], None]) -> None:
        self._restore_handler = restore_handler
        self._directory = -1
        self._mask = -1

    def find(self) -> None:
        """Note where this process stands: in the zygote, for all its workers."""
        # The directory may be unreadable, or removed under the program's feet.
        try:
            self._directory = os.open(".", os.O_PATH | os.O_CLOEXEC)
        except OSError:
            self._directory = -1
        self._mask = os.umask(0)
        os.umask(self._mask)

    def restore(self) -> None:
        """Undo what a task did to it."""
        if self._directory >= 0:
            try:
                os.fchdir(self._directory)
            except OSError:
                # It was removed or closed, and is no better for the next task.
                self._directory = -1
        if self._mask >= 0:
            os.umask(self._mask)
        self._restore_handler()
