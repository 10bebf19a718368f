"""Where output goes that nobody wants to see."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Final


class Nowhere(io.RawIOBase):
    """Takes all that is written and keeps nothing."""

    def writable(self) -> bool:
        """Always true."""
        return True

    def write(self, data: object, /) -> int:
        """Drop it; gives its size, as if it were written."""
        return len(data)  # type: ignore[arg-type]


_nowhere: Final = io.TextIOWrapper(io.BufferedWriter(Nowhere()))  # never closed


@contextmanager
def silence() -> Iterator[None]:
    """Let nothing appear that is printed in the block."""
    with redirect_stdout(_nowhere), redirect_stderr(_nowhere):
        yield
