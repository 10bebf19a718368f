"""Finds the address of a buffer, and checks its mapped pages for changes.

Separate from `mapping`, since it imports ctypes, which most programs do not need.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, Final

_ENTRY: Final = 8
"""Bytes of an entry in `/proc/self/pagemap`, one per page; see proc_pid_pagemap(5)."""

_HERE: Final = 0xC0
"""Bits of the entry's last byte: the page is in memory, or swapped out."""

_OF_A_FILE: Final = 0x20
"""Bit of the same byte: a page of a file or shared memory, not a private copy."""


class _Buffer(ctypes.Structure):
    """`Py_buffer` of Python's stable interface."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get: Final = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release: Final = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = (ctypes.POINTER(_Buffer),)
_release.restype = None


def address_of(buffer: Any) -> int:
    """Return the address of a buffer.

    Args:
        buffer: a contiguous object with the buffer protocol.

    Raises:
        BufferError: the buffer is not contiguous.
    """
    view = _Buffer()
    _get(buffer, ctypes.byref(view), 0)
    try:
        return view.buf or 0
    finally:
        _release(ctypes.byref(view))


def is_as_mapped(address: int, size: int) -> bool:
    """Return whether this process has left all pages of a private mapping unchanged.

    False as well if the kernel does not show it.

    Args:
        address: start of the range.
        size: bytes of the range.
    """
    first = address // mmap.PAGESIZE
    pages = (address + size - 1) // mmap.PAGESIZE - first + 1
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(first * _ENTRY)
            entries = file.read(pages * _ENTRY)
    except OSError:
        return False
    if len(entries) != pages * _ENTRY:
        return False
    kinds = set(entries[_ENTRY - 1 :: _ENTRY])
    return all(kind & _OF_A_FILE or not kind & _HERE for kind in kinds)
