"""What comes through a queue, as much at a time as is there: for threads that write."""

from __future__ import annotations

from collections.abc import Iterator
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def batches(queue: SimpleQueue[T | None]) -> Iterator[list[T]]:
    """Wait for what comes, take all that there is, and so on until None has come."""
    is_open = True
    while is_open:
        taken = [queue.get()]
        while not queue.empty():
            taken.append(queue.get())
        entries = [one for one in taken if one is not None]
        is_open = len(entries) == len(taken)
        yield entries
