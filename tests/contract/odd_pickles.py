"""Objects that are odd to pickle: light to import, since workers import them."""

from __future__ import annotations

import os
from typing import Any

from tests.support.gate import pass_gate


class Sighted:
    """Tells where it was unpickled: it is the pid of the process that did so last."""

    def __init__(self, path: str, name: str = "sighted") -> None:
        self.path = path
        self.name = name

    def __reduce__(self) -> Any:
        return see, (self.path, self.name)


def see(path: str, name: str) -> Sighted:
    """Unpickles a `Sighted`, and notes the process in a file."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")
    return Sighted(path, name)


class LoudError(Exception):
    """Travels well."""


class StubbornError(Exception):
    """Cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.socket = lambda: None

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class Unwilling:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("I will not travel")


class Explosive:
    """Pickles well, and raises where it is unpickled."""

    def __reduce__(self) -> Any:
        return explode, ("unpickled",)


def explode(text: str) -> None:
    raise LoudError(text)


class Ending:
    """Pickles well, and ends the process where it is unpickled."""

    def __reduce__(self) -> Any:
        return os._exit, (7,)


class Gated:
    """Waits at a gate where it is unpickled."""

    def __init__(self, path: str, name: str) -> None:
        self.path = path
        self.name = name

    def __reduce__(self) -> Any:
        return pass_gate, (self.path, self.name)
