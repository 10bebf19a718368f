"""Tasks and actors that say much at once: light to import."""

from __future__ import annotations

import threading

import aiogpu
from tests.support.gate import say


@aiogpu.remote
def number(value: int) -> int:
    return value


@aiogpu.remote
def number_behind(_text: bytes, value: int) -> int:
    """Its arguments are long, and travel in the frame."""
    return value


@aiogpu.remote
def tell_fifo(path: str, value: int) -> int:
    """Open a FIFO, for which the test waits in plain code."""
    with open(path, "wb"):
        return value


@aiogpu.remote
def first_of(view: memoryview, _text: bytes) -> int:
    """The number at the beginning of a large buffer."""
    return int.from_bytes(view[:4], "little")


@aiogpu.remote(max_concurrency=16)
class Choir:
    """Its threads answer at the same time."""

    def __init__(self) -> None:
        self.begun = threading.Event()

    def large(self, byte: int, size: int) -> bytes:
        """Wait for the sign, then answer."""
        self.begun.wait()
        return bytes([byte]) * size

    def begin(self, path: str, fifo: str) -> None:
        """Give the sign when a byte comes."""
        say(path, "ready")
        with open(fifo, "rb") as file:
            file.read(1)
        self.begun.set()
