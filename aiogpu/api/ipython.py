"""Ctrl-C in a terminal's IPython, where the event loop stands still between cells.

IPython runs a cell's coroutine by `run_until_complete`. Ctrl-C breaks that call off and
leaves the coroutine's asyncio task waiting, and with it the aiogpu task and its GPU. So
the task of an interrupted cell is cancelled here. A Jupyter kernel does that itself.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from typing import Any, Final

CELL: Final = "run_cell_async"
"""The coroutine function of IPython that runs a cell."""
WITHIN: Final = 1.0
"""Seconds that the interrupted cell has for its `finally`, before the prompt."""

_watched: Final[list[object]] = []
"""The shell that is watched; there is one in a process, if any."""


def watch(loops: Iterable[asyncio.AbstractEventLoop]) -> None:
    """Cancel what an interrupted cell leaves behind, if this is an IPython shell.

    Args:
        loops: those that have a node, looked at after each cell.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is None or shell in _watched:
        return
    _watched.append(shell)

    def after(result: Any) -> None:
        if isinstance(result.error_in_exec, KeyboardInterrupt):
            for loop in list(loops):
                _cancel_cells(loop)

    shell.events.register("post_run_cell", after)


def _cancel_cells(loop: asyncio.AbstractEventLoop) -> None:
    if loop.is_running() or loop.is_closed():
        return  # a kernel's loop, which has seen the interrupt itself
    cells = {
        task
        for task in asyncio.all_tasks(loop)
        if getattr(task.get_coro(), "__name__", "") == CELL
    }
    for task in cells:
        task.cancel()
    if cells:
        loop.run_until_complete(asyncio.wait(cells, timeout=WITHIN))
