"""Tasks that are given views of shared memory, and keep, change or outlive them."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from typing import Final

import aiogpu
from aiogpu.memory.addresses import address_of
from aiogpu.serialization.references import PickledValue
from aiogpu.worker.nested import task_client
from tests.support.gate import pass_gate

B: Final = ord("b")
_kept: Final[list[memoryview]] = []


@aiogpu.remote
def count(view: memoryview, byte: int) -> int:
    """How often a byte is there."""
    return bytes(view).count(byte)


@aiogpu.remote
def keep(view: memoryview) -> None:
    """Keep it for the rest of the worker's life."""
    _kept.append(view)


@aiogpu.remote
def bytes_kept() -> list[set[int]]:
    """Which bytes each of the kept ones shows."""
    return [set(view) for view in _kept]


@aiogpu.remote
def try_to_change(view: memoryview) -> None:
    """Write where only reading is allowed."""
    view[0] = 1


@aiogpu.remote
def write_in_vain(size: int, times: int) -> None:
    """Write what would be sent, and do not send it, as where that is interrupted."""
    for _ in range(times):
        task_client().loans.pack(PickledValue(b"", [memoryview(bytes(size))]))


@aiogpu.remote(max_retries=0)
def hold(path: str, view: memoryview) -> int:
    """Have it until the gate opens."""
    pass_gate(path, "holds")
    return view[0]


@aiogpu.remote
def give_back(view: memoryview) -> memoryview:
    """The same."""
    return view


@aiogpu.remote
def change_by_force(view: memoryview) -> memoryview:
    """Give it back with another first byte, as torch does in place."""
    ctypes.memset(address_of(view), B, 1)
    return view


@aiogpu.remote
def make(byte: int, size: int) -> memoryview:
    """So many of that byte."""
    return memoryview(bytes([byte]) * size)


@aiogpu.remote(max_retries=0)
def die_while_writing(size: int) -> memoryview:
    """Give memory whose second half ends the process that reads it (SIGBUS)."""
    with tempfile.TemporaryFile() as file:
        os.ftruncate(file.fileno(), size)
        mapped = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED)
        os.ftruncate(file.fileno(), size // 2)
        return memoryview(mapped)


@aiogpu.remote
def make_many(count: int, size: int) -> list[memoryview]:
    """So many of that size, each with its number in its first bytes."""
    return [memoryview(i.to_bytes(4, "little") + bytes(size - 4)) for i in range(count)]


@aiogpu.remote
def number_in(_text: str, view: memoryview) -> int:
    """The number in its first bytes."""
    return int.from_bytes(view[:4], "little")
