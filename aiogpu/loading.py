"""Imports during which nobody looks for garbage: what they make is there to stay."""

from __future__ import annotations

import gc
from sys import modules
from typing import Final

PYTHONS_OWN: Final = 1000
"""Objects that Python may have frozen itself: 3.12 begins with 375. A program that
freezes what it has freezes 4000 at least, the smallest one."""


class Loading:
    """A block of a program's that imports modules, and awaits nothing.

    Python's collector begins anew with every few hundred objects, and a module is
    made of as many; after the block it would look through all of them at once. So
    they count as old from then on, and whatever else was young with them: what of
    that is garbage is found when the old is looked through. A program that has
    switched the collector off, or has frozen something, finds that as it was.
    """

    __slots__ = ("_known", "_was_on")

    def __enter__(self) -> None:
        self._known = len(modules)
        self._was_on = gc.isenabled()
        # Whoever switches it off switches it on again, whatever other threads do.
        if self._was_on:
            gc.disable()

    def __exit__(self, *_: object) -> None:
        try:
            # Mostly all is there already; and the frozen are counted one by one.
            if len(modules) != self._known and gc.get_freeze_count() < PYTHONS_OWN:
                gc.freeze()
                gc.unfreeze()  # there are no other words for "all is old"
        finally:
            if self._was_on:
                gc.enable()
