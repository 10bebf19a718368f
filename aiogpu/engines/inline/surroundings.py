"""What a task finds around it: its variables, and what it may ask about itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from aiogpu.client.current import Context, current


class Surroundings:
    """One task's, put on the process when it begins and taken off when it ends.

    Those of a task that another one waits for lie on top of the other's, so they
    must be taken off in reverse order.
    """

    def __init__(self, environ: Mapping[str, str], facts: Mapping[str, object]) -> None:
        """Take note of what is to be seen.

        Args:
            environ: variables to set.
            facts: attributes of `worker.context.current` to set.
        """
        self._environ: Final = dict(environ)
        self._facts: Final = dict(facts)
        self._environ_before: dict[str, str | None] = {}
        self._facts_before: dict[str, object] = {}

    def again(self) -> Surroundings:
        """The same, to be put on another time."""
        return Surroundings(self._environ, self._facts)

    def named(self, name: str) -> Surroundings:
        """The same for an actor's call, to be put on another time."""
        return Surroundings(self._environ, {**self._facts, "name": name})

    def put_on(self) -> None:
        """Remember what there is, and set this task's."""
        self._environ_before = {name: os.environ.get(name) for name in self._environ}
        self._facts_before = {
            name: getattr(current, name) for name in Context.__slots__
        }
        self.renew()

    def renew(self) -> None:
        """Set this task's again, whatever it has made of them."""
        os.environ.update(self._environ)
        _set_facts(self._facts)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Put them on for the block."""
        self.put_on()
        try:
            yield
        finally:
            self.take_off()

    def take_off(self) -> None:
        """Set what there was before. Nothing else is touched."""
        for name, value in self._environ_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _set_facts(self._facts_before)


def _set_facts(facts: Mapping[str, object]) -> None:
    for name, value in facts.items():
        setattr(current, name, value)
