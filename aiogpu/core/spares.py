"""Clean workers that are kept ready, so that a fresh process costs a task nothing.

They are wanted for an environment from the moment on when a task of it has taken a
process of its own; a program that reuses its workers never pays for them. They are
refilled behind the task that has taken one. Those of the node's own program stay;
those of other environments (a program that has joined, `env_vars`) go when no such
task has come for a while, and no more than some environments have any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiogpu.core.timers import AlarmKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiogpu.core.specs import Environment
    from aiogpu.core.timers import Timers

MOST: Final = 8
"""Environments that have spares at a time. A further one has none until one of them has
not been used for a while: to replace them by turns would cost more than it saves."""


class Spares:
    """How many spares a node keeps, for which environments.

    Attributes:
        target: how many there are to be for each, those that start included.
        wanted: the environments for which they are wanted, and when they last were.
    """

    def __init__(self, target: int, kept_for: float, timers: Timers) -> None:
        self.target = target
        self._kept_for = kept_for
        self._timers = timers
        self.wanted: dict[Environment, float] = {}
        self._in_vain: set[Environment] = set()
        self._is_awaited = False

    def __repr__(self) -> str:
        wanted = f"{len(self.wanted)} environments" if self.wanted else "nobody"
        return f"<Spares {self.target} for {wanted}>"

    @property
    def total(self) -> int:
        """How many may be there for all environments together."""
        return self.target * max(len(self.wanted), 1)

    def want(self, environment: Environment, now: float) -> bool:
        """A task has taken a process of its own; whether that is news."""
        if environment in self.wanted:
            self.wanted[environment] = now
            return False
        if not self.target or len(self.wanted) >= MOST:
            return False
        self.wanted[environment] = now
        if environment:
            self._timers.set(now + self._kept_for, AlarmKind.SPARES, 0)
        return True

    def unwanted(self, now: float) -> Iterator[Environment]:
        """Forget and yield the environments whose spares nobody has used for long."""
        earliest = None
        for environment, used_at in list(self.wanted.items()):
            if not environment:
                continue
            if now - used_at >= self._kept_for:
                self.forget(environment)
                yield environment
            elif earliest is None or used_at < earliest:
                earliest = used_at
        if earliest is not None:
            self._timers.set(earliest + self._kept_for, AlarmKind.SPARES, 0)

    def forget(self, environment: Environment) -> None:
        """Keep none for this environment until a task takes a process of its own."""
        self.wanted.pop(environment, None)
        self._in_vain.discard(environment)

    def note_start(self, environment: Environment, has_started: bool) -> None:
        """A worker has started, or a spare ended before it had.

        After the latter no spare is asked for until one starts: where none can be
        forked, asking would never end.
        """
        if has_started:
            self._in_vain.discard(environment)
        elif environment in self.wanted:
            self._in_vain.add(environment)

    def await_refill(self) -> bool:
        """Whether nobody has said before that they will be refilled."""
        was_awaited, self._is_awaited = self._is_awaited, True
        return not was_awaited

    def note_refill(self) -> None:
        """They are refilled now."""
        self._is_awaited = False

    def kept(self, environment: Environment) -> int:
        """How many clean workers of an environment are to be left alone."""
        return self.target if environment in self.wanted else 0

    def missing(self, environment: Environment, there: int) -> int:
        """How many are to be forked where there are so many."""
        if environment in self._in_vain or environment not in self.wanted:
            return 0
        return max(self.target - there, 0)
