"""The control page: shared words by which the driver reaches busy workers.

A busy worker reads no messages, but can read these words. The memory has no name; the
kernel frees it after its last user has ended (memfd_create(2)).
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
_OF_NODE: Final = 2 * 8

_NAME: Final = 64
PAGE_SIZE: Final = _OF_SLOTS + _OF_NODE + SLOTS * _NAME

PLENTY: Final = 1 << 62
"""Free bytes for values before the driver has counted."""

ALL: Final = 1 << 62
"""Instead of a number of dropped calls: all calls, future ones included."""


class ControlPage:
    """Six words and a name for each slot, two words for the node.

    Words of a slot: the task to stop, the task that acknowledged its cancel, the last
    request that began, the first request that may begin, the number of dropped calls of
    an actor, and the task whose program stops. Words are eight bytes, aligned, and
    written by one store each. The worker writes the second and the third, the driver
    the others.

    The name is that of the module which the process is importing: an import may hang,
    or end the process. It is not written by one store, so a reader may see two halves.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        whole = memoryview(memory)
        self._words = whole[:_OF_SLOTS].cast("Q")
        self._of_node = whole[_OF_SLOTS : _OF_SLOTS + _OF_NODE].cast("Q")
        self._names = whole[_OF_SLOTS + _OF_NODE :]

    @classmethod
    def open(cls, descriptor: int) -> ControlPage:
        """Map the page; the descriptor may be closed after this."""
        return cls(mmap.mmap(descriptor, PAGE_SIZE))

    @staticmethod
    def create() -> int:
        """Create the memory; return its descriptor."""
        descriptor = os.memfd_create("aiogpu-page", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, PAGE_SIZE)
        return descriptor

    def note_left(self, free: int) -> None:
        """Driver: set the free bytes for values of all workers."""
        self._of_node[0] = free + 1

    def left(self) -> int:
        """Worker: return the free bytes for values."""
        return (self._of_node[0] or PLENTY) - 1

    def note_import(self, slot: int, module: str) -> None:
        """Worker: note the module that is being imported, "" for none."""
        if not module:
            self._names[slot * _NAME] = 0
            return
        name = module.encode("utf-8", "replace")[:_NAME].ljust(_NAME, b"\0")
        self._names[slot * _NAME : (slot + 1) * _NAME] = name

    def importing(self, slot: int) -> str:
        """Driver: return the module that is being imported, "" for none."""
        if not self._names[slot * _NAME]:
            return ""
        name = bytes(self._names[slot * _NAME : (slot + 1) * _NAME])
        return name.rstrip(b"\0").decode("utf-8", "replace")

    def announce_stop(self) -> None:
        """Driver: announce that the node stops, with all its tasks."""
        self._of_node[1] = 1

    def announce(self, slot: int, task: int) -> None:
        """Driver: announce that the program of this task stops."""
        self._words[slot * _WORDS + 5] = task

    def is_stopping(self, slot: int, task: int) -> bool:
        """Worker: return whether this task, its program or the node is to stop."""
        words, place = self._words, slot * _WORDS
        is_named = task in (words[place], words[place + 5])
        return is_named or self._of_node[1] != 0

    def close(self) -> None:
        """Unmap the page."""
        self._words.release()
        self._of_node.release()
        self._names.release()
        self._memory.close()

    def cancel(self, slot: int, task: int) -> None:
        """Driver: name the task that is to stop."""
        self._words[slot * _WORDS] = task

    def cancelled(self, slot: int) -> int:
        """Worker: return the task that is to stop, 0 for none."""
        return self._words[slot * _WORDS]

    def acknowledge(self, slot: int, task: int) -> None:
        """Worker: acknowledge the cancel of this task."""
        self._words[slot * _WORDS + 1] = task

    def acknowledged(self, slot: int) -> int:
        """Driver: return the last task that acknowledged a cancel."""
        return self._words[slot * _WORDS + 1]

    def begin(self, slot: int, number: int) -> str:
        """Worker: note that the request with this number is about to run.

        Returns:
            `BEGUN`; `VOID` if the request was revoked before; or `TOO_LATE` if it was
            revoked at the same moment: it must not run, and the driver, which may have
            read that it began, waits for a message.
        """
        words, place = self._words, slot * _WORDS
        if words[place + 3] > number:
            return VOID
        words[place + 2] = number
        return TOO_LATE if words[place + 3] > number else BEGUN

    def note_begun(self, slot: int, number: int) -> None:
        """Worker: note the running request, if requests are never revoked."""
        self._words[slot * _WORDS + 2] = number

    def begun(self, slot: int) -> int:
        """Driver: return the number of the last request that began."""
        return self._words[slot * _WORDS + 2]

    def revoke(self, slot: int, below: int) -> None:
        """Driver: revoke all requests with a lower number that have not begun."""
        self._words[slot * _WORDS + 3] = below

    def drop(self, slot: int, count: int) -> None:
        """Driver: set the number of dropped calls of the slot's actor, or `ALL`."""
        self._words[slot * _WORDS + 4] = count

    def dropped(self, slot: int) -> int:
        """Worker: return the number of `Drop` messages sent so far."""
        return self._words[slot * _WORDS + 4]

    def revoked(self, slot: int) -> int:
        """Return the lowest number that the worker may begin."""
        return self._words[slot * _WORDS + 3]
