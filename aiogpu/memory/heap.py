"""This process's heap, fit for messages of some hundred kilobytes."""

from __future__ import annotations

from typing import Final

KEPT: Final = 1 << 20
"""Bytes up to which a block is taken from the heap and goes back there. Twice as many
may lie unused at the heap's end; it is four times what a message has at most."""


def keep_pages() -> None:
    """Have blocks of up to `KEPT` bytes lie in pages that this process has already.

    glibc gives a block of 128 KiB or more back to the kernel when it is freed, and so
    the pages of a large message are faulted in anew at each of its copies: measured,
    that is more than all else that it costs. glibc learns: once a larger block has been
    freed, it keeps those up to that size (`mallopt(3)`, under M_MMAP_THRESHOLD). Here
    it learns before the first message; a program that has freed a larger block, or has
    set the threshold itself, is left as it is, and so is another C library. What is
    forked later has learnt it too.
    """
    bytes(KEPT)  # of zeros that the kernel gives: no page of it is touched
