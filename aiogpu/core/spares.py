"""Clean workers that are kept ready, so that a fresh process costs a task nothing.

They are wanted from the moment on when a task has taken a process of its own; a
program that reuses its workers never pays for them. They are refilled behind the
task that has taken one.
"""

from __future__ import annotations


class Spares:
    """How many spares a node keeps.

    Attributes:
        target: how many there are to be, those that start included.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self._is_wanted = False
        self._is_in_vain = False
        self._is_awaited = False

    def __repr__(self) -> str:
        return f"<Spares {self.target} {'wanted' if self._is_wanted else 'unwanted'}>"

    def want(self) -> None:
        """A task has taken a process of its own: others will."""
        self._is_wanted = True

    def note_start(self, has_started: bool) -> None:
        """A worker has started, or a spare ended before it had.

        After the latter no spare is asked for until one starts: where none can be
        forked, asking would never end.
        """
        self._is_in_vain = not has_started

    def await_refill(self) -> bool:
        """Whether nobody has said before that they will be refilled."""
        was_awaited, self._is_awaited = self._is_awaited, True
        return not was_awaited

    def note_refill(self) -> None:
        """They are refilled now."""
        self._is_awaited = False

    def missing(self, there: int) -> int:
        """How many are to be forked where there are so many."""
        if self._is_in_vain or not self._is_wanted:
            return 0
        return max(self.target - there, 0)
