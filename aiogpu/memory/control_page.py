"""The control page: words that driver and workers share, a few for each slot.

It says what no message can say to a worker that is busy. The memory has no name; the
kernel frees it with its last holder (memfd_create(2)).
"""

from __future__ import annotations

import mmap
import os
from typing import Final

SLOTS: Final = 4096
"""Workers that one node can have at a time."""

_WORDS: Final = 6
BEGUN: Final = "begun"
VOID: Final = "void"
TOO_LATE: Final = "too late"
_OF_SLOTS: Final = SLOTS * _WORDS * 8
PAGE_SIZE: Final = _OF_SLOTS + 2 * 8

PLENTY: Final = 1 << 62
"""Bytes that are left for values where nobody has counted yet."""

ALL: Final = 1 << 62
"""In place of how many calls were dropped: all, whatever is still to come."""


class ControlPage:
    """Six words for each slot, and two for the node.

    Who is to stop, who heard it, who began, who may not begin, how many calls of an
    actor were dropped, and whose program stops. Words are eight bytes, aligned, and
    written in one store each. The worker writes the second and the third, the driver
    the others.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        whole = memoryview(memory)
        self._words = whole[:_OF_SLOTS].cast("Q")
        self._of_node = whole[_OF_SLOTS:].cast("Q")

    @classmethod
    def open(cls, descriptor: int) -> ControlPage:
        """Map the page; the descriptor may be closed after this."""
        return cls(mmap.mmap(descriptor, PAGE_SIZE))

    @staticmethod
    def create() -> int:
        """Make the memory; gives its descriptor."""
        descriptor = os.memfd_create("aiogpu-page", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, PAGE_SIZE)
        return descriptor

    def note_left(self, left: int) -> None:
        """Driver: so many bytes are left for values of all workers."""
        self._of_node[0] = left + 1

    def left(self) -> int:
        """Worker: bytes that are left for values."""
        return (self._of_node[0] or PLENTY) - 1

    def announce_stop(self) -> None:
        """Driver: the node stops, and all its tasks with it."""
        self._of_node[1] = 1

    def announce(self, slot: int, task: int) -> None:
        """Driver: the program of this task stops."""
        self._words[slot * _WORDS + 5] = task

    def is_stopping(self, slot: int, task: int) -> bool:
        """Worker: whether this task, its program or the node is to stop."""
        words, place = self._words, slot * _WORDS
        is_told = task in (words[place], words[place + 5])
        return is_told or self._of_node[1] != 0

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._of_node.release()
        self._memory.close()

    def ask(self, slot: int, task: int) -> None:
        """Driver: name the task that is to stop."""
        self._words[slot * _WORDS] = task

    def asked(self, slot: int) -> int:
        """Worker: the task that is to stop, 0 for none."""
        return self._words[slot * _WORDS]

    def hear(self, slot: int, task: int) -> None:
        """Worker: note that the cancel has reached this task."""
        self._words[slot * _WORDS + 1] = task

    def heard(self, slot: int) -> int:
        """Driver: return the last task that a cancel has reached."""
        return self._words[slot * _WORDS + 1]

    def begin(self, slot: int, number: int) -> str:
        """Worker: say that it is about to run what was sent under that number.

        Returns:
            `BEGUN`; `VOID` if it was revoked before; or `TOO_LATE` if both sides
            came in the same moment: then it shall not run, and the driver, who may
            have read that it was begun, waits to hear so.
        """
        words, place = self._words, slot * _WORDS
        if words[place + 3] > number:
            return VOID
        words[place + 2] = number
        return TOO_LATE if words[place + 3] > number else BEGUN

    def note_begun(self, slot: int, number: int) -> None:
        """Worker: say what it runs, where nothing is ever taken back."""
        self._words[slot * _WORDS + 2] = number

    def begun(self, slot: int) -> int:
        """Driver: the number that was begun last."""
        return self._words[slot * _WORDS + 2]

    def revoke(self, slot: int, below: int) -> None:
        """Driver: whatever has a lower number and is not begun shall not begin."""
        self._words[slot * _WORDS + 3] = below

    def drop(self, slot: int, count: int) -> None:
        """Driver: so many calls of the slot's actor were dropped so far, or `ALL`."""
        self._words[slot * _WORDS + 4] = count

    def dropped(self, slot: int) -> int:
        """Worker: return how many `Drop` messages it has got, or will get."""
        return self._words[slot * _WORDS + 4]

    def revoked(self, slot: int) -> int:
        """The number from which on the worker may begin."""
        return self._words[slot * _WORDS + 3]
