"""Tasks with values in shared memory: light to import, since workers import them."""

from __future__ import annotations

import atexit
import ctypes
import mmap
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import aiogpu
from aiogpu.memory.addresses import address_of
from aiogpu.serialization.references import PickledValue
from aiogpu.worker.nested import task_client
from tests.support.gate import pass_gate

B: Final = ord("b")
_kept: Final[list[memoryview]] = []


@aiogpu.remote
def count(view: memoryview, byte: int) -> int:
    """Count the places where a byte stands."""
    return bytes(view).count(byte)


@aiogpu.remote
def keep(view: memoryview) -> None:
    """Keep a value for the rest of the worker's life."""
    _kept.append(view)


@aiogpu.remote
def bytes_kept() -> list[set[int]]:
    """Return which bytes each kept value shows."""
    return [set(view) for view in _kept]


@aiogpu.remote
def write_in_vain(size: int, times: int) -> None:
    """Write a value to shared memory and do not send it, as if interrupted."""
    for _ in range(times):
        task_client().loans.pack(PickledValue(b"", [memoryview(bytes(size))]))


@aiogpu.remote(max_retries=0)
def hold(path: str, view: memoryview) -> int:
    """Hold a value until the gate opens."""
    pass_gate(path, "holds")
    return view[0]


@aiogpu.remote
def give_back(view: memoryview) -> memoryview:
    return view


@aiogpu.remote
def change_by_force(view: memoryview) -> memoryview:
    """Change the first byte in place, as torch does."""
    ctypes.memset(address_of(view), B, 1)
    return view


@aiogpu.remote
def make(byte: int, size: int) -> memoryview:
    """Return a byte so many times."""
    return memoryview(bytes([byte]) * size)


@aiogpu.remote(max_retries=0)
def die_while_writing(size: int) -> memoryview:
    """Return memory that ends the process with SIGBUS when its second half is read."""
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), size)
        mapped = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED)
        os.ftruncate(file.fileno(), size // 2)
        return memoryview(mapped)


@aiogpu.remote
def make_many(count: int, size: int) -> list[memoryview]:
    """Return so many values of a size, each with its number in its first bytes."""
    return [memoryview(i.to_bytes(4, "little") + bytes(size - 4)) for i in range(count)]


@aiogpu.remote
def number_in(_text: str, view: memoryview) -> int:
    """Return the number in the first bytes."""
    return int.from_bytes(view[:4], "little")


turns = 0
"""The loop's turns, counted by a test."""
unpickled_in: list[int] = []
"""The turn in which each value was unpickled."""


class SlowValue:
    """Takes long to unpickle; large enough for shared memory."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.content = bytearray(1 << 19)

    def __reduce__(self) -> tuple[object, ...]:
        import pickle

        return make_again, (self.number, pickle.PickleBuffer(self.content))


def make_again(number: int, _: object) -> int:
    """Unpickle a `SlowValue`, slowly."""
    from aiogpu.api.results.handle import DECODING

    until = time.perf_counter() + 2 * DECODING
    while time.perf_counter() < until:
        pass
    unpickled_in.append(turns)
    return number


@aiogpu.remote
def make_slow_value(number: int) -> SlowValue:
    return SlowValue(number)


class Points:
    """Named pipes in a directory at which a task and the test wait for each other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def add(self, *names: str) -> None:
        for name in names:
            os.mkfifo(self.directory / name)

    def arrive(self, name: str) -> None:
        """Wait for the test, in a task."""
        with (self.directory / name).open("w") as pipe:
            pipe.write(name)

    def meet(self, name: str) -> None:
        """Wait for the task, in the test."""
        assert (self.directory / name).read_text() == name


class PickledLast:
    """Arrives at "shared" when it is pickled, after the values that stand before it."""

    def __init__(self, points: Points) -> None:
        self.points = points

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        self.points.arrive("shared")
        return str, ("last",)


@aiogpu.remote(max_calls=1)
def child(points: Points) -> str:
    points.arrive("child runs")
    points.arrive("child goes on")
    # The process ends after it has sent its last answer.
    atexit.register(points.arrive, "child has answered")
    return "a result"


def begin(points: Points) -> list[Any]:
    handle = child.remote(points)
    points.arrive("parent runs")
    points.arrive("parent goes on")
    return [handle, PickledLast(points)]


@aiogpu.remote(max_calls=1)
def hand_on(points: Points) -> list[Any]:
    return begin(points)


@aiogpu.remote(max_calls=1)
async def hand_on_softly(points: Points) -> list[Any]:
    return begin(points)


@aiogpu.remote(max_retries=0)
def hand_on_and_die(points: Points) -> Iterator[list[Any]]:
    yield begin(points)
    os.kill(os.getpid(), signal.SIGKILL)


@aiogpu.remote
class Parent:
    def hand_on_and_leave(self, points: Points) -> Iterator[list[Any]]:
        yield begin(points)
        aiogpu.exit_actor()
