"""Tasks and an actor that read a buffer; `ends` tells whether it was torn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import aiogpu
from aiogpu import sync


def ends(buffer: Any) -> tuple[int, int]:
    """Return the first and the last number."""
    return int(buffer[0]), int(buffer[-1])


def ends_of_both(buffer: Any, again: Any) -> tuple[int, int]:
    """Return the first number of one buffer and the last of the other."""
    return int(buffer[0]), int(again[-1])


def ends_in(box: dict[str, Any]) -> tuple[int, int]:
    """Return the ends of a buffer in a container with another object."""
    assert box["set"] == {(1,)}
    return ends(box["buffer"])


read = sync.remote(ends)
read_on_loop = aiogpu.remote(ends)


@sync.remote
def read_inside(box: dict[str, Any]) -> tuple[int, int]:
    return ends_in(box)


@sync.remote
def yield_ends(buffer: Any) -> Iterator[tuple[int, int]]:
    yield ends(buffer)


@sync.remote(num_cpus=0)
class Reader:
    def __init__(self, buffer: Any = None) -> None:
        self._first = None if buffer is None else ends(buffer)

    def read(self, buffer: Any) -> tuple[int, int]:
        return ends(buffer)

    def first(self) -> tuple[int, int] | None:
        return self._first


@sync.remote
def read_by_children(count: int, size: int) -> list[tuple[int, int]]:
    import numpy as np

    buffer = np.zeros(size)
    handles = []
    for number in range(count):
        buffer[:] = number
        handles.append(read.remote(buffer))
    buffer[:] = -1
    return sync.get(handles)


@sync.remote
def wait_and_give(box: list[int]) -> int:
    """Take some milliseconds; return the number in the box."""
    number, milliseconds = box
    ended = time.perf_counter() + milliseconds / 1000
    while time.perf_counter() < ended:
        pass
    return number


def get_boxed(box: dict[str, Any]) -> int:
    """Return the value of the handle in the box."""
    assert not box["buffer"].any()
    return int(sync.get(box["handle"]))
