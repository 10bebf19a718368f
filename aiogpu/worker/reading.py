"""Which environment variables Python code reads while modules are imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class _Recording(os._Environ[str]):
    """`os.environ` while it is recorded; reading all of it is not recorded."""

    names: set[str]
    expected: list[str]

    def __getitem__(self, name: str) -> str:
        # Whoever copies it lists all names, and reads them in that order.
        if self.expected and self.expected[-1] == name:
            self.expected.pop()
        elif isinstance(name, str):
            self.names.add(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        listed = list(super().__iter__())
        self.expected = listed[::-1]
        return iter(listed)


@contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """Record the names that are read in the block, in the set that is given."""
    environ = os.environ
    state = vars(environ)
    names: set[str] = set()
    state["names"], state["expected"] = names, []
    environ.__class__ = _Recording
    try:
        yield names
    finally:
        environ.__class__ = os._Environ
        del state["names"], state["expected"]
