"""What a person who watches has chosen to see: how far down, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ORDERS: Final = ("number", "name", "memory", "time")
"""By what the tasks on workers are sorted."""


@dataclass(slots=True)
class View:
    """See above; changed by keys.

    Attributes:
        is_paused: whether the picture stays as it is.
        has_ended: whether the person wants no more of it.
        offset: how many lines of the picture are above the screen.
        order: one of `ORDERS`.
        bottom: the offset that shows the last line; noted when it is drawn.
        page: lines of the picture that are shown at once.
    """

    is_paused: bool = False
    has_ended: bool = False
    offset: int = 0
    order: str = ORDERS[0]
    bottom: int = 0
    page: int = 1

    def fit(self, count: int, room: int) -> None:
        """A picture of so many lines is drawn where there is room for so many."""
        self.page = max(room, 1)
        self.bottom = max(0, count - room)
        self.offset = min(self.offset, self.bottom)

    def press(self, key: str) -> None:
        """Do what a key is for; those that are for nothing do nothing."""
        match key:
            case "q":
                self.has_ended = True
            case "p":
                self.is_paused = not self.is_paused
            case "s":
                self.order = ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)]
            case "j" | "down":
                self._scroll(1)
            case "k" | "up":
                self._scroll(-1)
            case " " | "page down":
                self._scroll(self.page)
            case "b" | "page up":
                self._scroll(-self.page)
            case "g" | "home":
                self.offset = 0
            case "G" | "end":
                self.offset = self.bottom

    def _scroll(self, lines: int) -> None:
        self.offset = max(0, min(self.offset + lines, self.bottom))
