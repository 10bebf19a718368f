"""An interrupt at whichever line of some files is executed next."""

from __future__ import annotations

import signal
import sys
from collections.abc import Container
from types import FrameType
from typing import Any


class Tripwire:
    """Raises one at the nth line of these files that its block executes.

    Attributes:
        is_torn: whether there were so many.
    """

    def __init__(self, nth: int, files: Container[str]) -> None:
        self._left = nth
        self._files = files
        self.is_torn = False

    def __enter__(self) -> Tripwire:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if self.is_torn or frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self._left -= 1
            if self._left <= 0:
                self.is_torn = True
                signal.raise_signal(signal.SIGINT)
        return self._trace
