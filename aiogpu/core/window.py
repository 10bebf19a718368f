"""How far the producer of a stream may be ahead of its consumer, by counts alone."""

from __future__ import annotations


class Window:
    """The consumer's end: what it has taken, and what the producer was told of it.

    The producer may yield `limit` items in all. It is told a higher limit whenever
    the consumer has taken half a window since, so that it need not be held while the
    consumer keeps up, and few messages pass.

    Attributes:
        size: items that the producer may be ahead, 1 or more.
        taken: items that the consumer has taken.
        limit: what the producer was told last.
    """

    __slots__ = ("_step", "limit", "size", "taken")

    def __init__(self, size: int) -> None:
        self.size = size
        self.taken = 0
        self.limit = size
        self._step = (size + 1) // 2

    def __repr__(self) -> str:
        return f"<Window {self.taken} taken, {self.limit} allowed>"

    def take(self) -> int:
        """Note that one item was taken; gives the limit to tell now, 0 for none."""
        self.taken += 1
        limit = self.taken + self.size
        if limit - self.limit < self._step:
            return 0
        self.limit = limit
        return limit

    def holds(self, buffered: int) -> bool:
        """Whether the producer has to wait, with so many items not taken yet."""
        return self.taken + buffered >= self.limit
