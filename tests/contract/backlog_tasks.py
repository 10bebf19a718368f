"""Tasks that tests queue in large numbers. Light to import, as workers import them."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections import deque
from itertools import repeat

import aiogpu
from tests.contract import tasks
from tests.support.gate import pass_gate, say


@aiogpu.remote(max_retries=0)
def act(place: str, number: int, path: str = "", how: str = "") -> int:
    """Note the number; then return, or stop in the given way."""
    descriptor = os.open(place, os.O_APPEND | os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, b"%d\n" % number)
    os.close(descriptor)
    if path:
        say(path, f"{how}{number}")
    if how == "spin":
        while True:
            pass
    elif how == "C":
        # Consumes for ever without a single bytecode, so no signal handler runs.
        deque(repeat(None), maxlen=0)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "exit":
        os._exit(5)
    elif how == "segfault":
        ctypes.string_at(0)
    return number


@aiogpu.remote
def fill(path: str, name: str, mebibytes: int) -> int:
    """Use so much memory until the test releases the task."""
    filled = bytearray(os.urandom(1 << 20)) * mebibytes
    pass_gate(path, name)
    return len(filled) >> 20


_kept: list[bytearray] = []


@aiogpu.remote
def keep_filled(path: str, name: str, mebibytes: int) -> int:
    """Keep so much memory after the end of the task; return the process id."""
    _kept.append(bytearray(os.urandom(1 << 20)) * mebibytes)
    pass_gate(path, name)
    return os.getpid()


@aiogpu.remote
async def parent(number: int) -> int:
    import asyncio

    return sum(await asyncio.gather(*(tasks.add.remote(number, n) for n in range(3))))


_numbers: list[int] = [0]


@aiogpu.remote
def number_here() -> int:
    _numbers[0] += 1
    return _numbers[0]


@aiogpu.remote
def number(value: int) -> int:
    return value


@aiogpu.remote
def number_behind(_text: bytes, value: int) -> int:
    """Return a number that is sent behind a long argument in the frame."""
    return value


@aiogpu.remote
def tell_fifo(path: str, value: int) -> int:
    """Open a FIFO for which the test waits in plain code."""
    with open(path, "wb"):
        return value


@aiogpu.remote
def first_of(view: memoryview, _text: bytes) -> int:
    """Return the number at the start of a large buffer."""
    return int.from_bytes(view[:4], "little")


@aiogpu.remote(max_concurrency=16)
class Choir:
    """An actor whose threads answer at the same time."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def large(self, byte: int, size: int) -> bytes:
        """Wait for `begin`, then answer."""
        self.begun.wait()
        return bytes([byte]) * size

    def begin(self, path: str, fifo: str) -> None:
        """Release the waiting calls when a byte comes."""
        say(path, "ready")
        with open(fifo, "rb") as file:
            file.read(1)
        self.begun.set()
