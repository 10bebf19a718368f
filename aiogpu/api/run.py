"""Running a program: `asyncio.run` on uvloop. The only door to uvloop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """`asyncio.run` on uvloop.

    Args:
        main: the program's coroutine.
        debug: asyncio's debug mode; None for the interpreter's setting.
    """
    import uvloop

    _open_standard_descriptors()
    # In `with` it would make its loop at once, and fail to close it inside another.
    runner = asyncio.Runner(debug=debug, loop_factory=uvloop.new_event_loop)
    try:
        return runner.run(main)
    finally:
        runner.close()


def _open_standard_descriptors() -> None:
    """Fill descriptors 0 to 2 where the program was started without them.

    libuv aborts the process when it is to close one of these as its own.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
