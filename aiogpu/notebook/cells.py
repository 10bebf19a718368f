"""Which cell of a notebook has started a task, so that its output lands there.

Numbers of tasks increase, so the cell of a task follows from the number that was next
when each cell began. Submitting a task costs nothing more.
"""

from __future__ import annotations

import asyncio
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

KEPT: Final = 1000
"""The last cells that are known; output of older tasks lands under the running cell."""


def shell() -> Any:
    """Return the IPython shell of a notebook's kernel; None elsewhere."""
    ipython = sys.modules.get("IPython")
    found = None if ipython is None else ipython.get_ipython()
    return found if hasattr(found, "kernel") else None


def is_notebook() -> bool:
    """Return True in the kernel of a notebook."""
    return shell() is not None


class Cells:
    """The cells that have run since the node was opened.

    Args:
        loop: the event loop of the node.
        next_number: returns a number below which all earlier tasks are, and no later.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, next_number: Callable[[], int]
    ) -> None:
        self._loop = loop
        self._next_number = next_number
        self._begins: list[int] = []
        self._cells: list[Any] = []
        self._shell = shell()
        if self._shell is not None:
            self._note(self._shell.get_parent())
            self._shell.events.register("pre_run_cell", self._on_cell)

    def __repr__(self) -> str:
        return f"<Cells {len(self._cells)}>"

    def _on_cell(self, _: object) -> None:
        cell = self._shell.get_parent()
        if asyncio._get_running_loop() is self._loop:
            self._note(cell)
        elif not self._loop.is_closed():
            # `aiogpu.sync` submits by the same queue, so the order is kept.
            self._loop.call_soon_threadsafe(self._note, cell)

    def _note(self, cell: Any) -> None:
        self._begins.append(self._next_number())
        self._cells.append(cell)
        if len(self._begins) > KEPT:
            del self._begins[: KEPT // 2], self._cells[: KEPT // 2]

    def find(self, number: int) -> Any:
        """Return the cell that has started a task; None if unknown, as for 0."""
        index = bisect_right(self._begins, number) - 1
        return self._cells[index] if index >= 0 and number else None

    def close(self) -> None:
        """Watch the cells no longer."""
        if self._shell is not None:
            self._shell.events.unregister("pre_run_cell", self._on_cell)
            self._shell = None


@contextmanager
def output_under(cell: Any) -> Iterator[None]:
    """Let what this thread prints land under a cell; None for the running cell.

    An ipykernel before 7.2 cannot do that for one thread: there it is the running cell.
    """
    undo: list[tuple[Any, Any]] = []
    streams: tuple[Any, ...] = (sys.stdout, sys.stderr)
    for stream in streams if cell is not None else ():
        enter = getattr(stream, "set_thread_parent", None)
        if enter is not None:
            undo.append((stream.reset_thread_parent, enter(cell)))
    try:
        yield
    finally:
        for leave, token in undo:
            leave(token)
