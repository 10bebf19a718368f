"""What driver and zygote say to each other, a part of the vocabulary of `messages`.

And what a keeper says where it cannot fork.
"""

from typing import NamedTuple


class Keep(NamedTuple):
    """Driver to zygote: fork a keeper for this slot."""

    slot: int


class Ready(NamedTuple):
    """Zygote to driver: all is imported and it may fork.

    `modules`: top-level modules that came by that, but for the standard library's.
    `variables`: names of the environment variables that were read meanwhile.
    """

    modules: tuple[str, ...]
    variables: tuple[str, ...]


class Unfit(NamedTuple):
    """Zygote to driver: this module spoils forking or cannot be imported.

    `is_missing`: the import failed; otherwise it succeeded and left threads or an
    open device behind.
    """

    module: str
    reason: str
    is_missing: bool


class LeftOut(NamedTuple):
    """Zygote to driver: this learnt module is unfit, and was not imported."""

    module: str
    reason: str


class Lost(NamedTuple):
    """Zygote to driver: this slot's keeper has died; all below it has ended.

    `unforked` says why it was not even forked, "" where it was.
    """

    slot: int
    unforked: str = ""


class Unforked(NamedTuple):
    """Keeper to driver: the worker could not be forked, and why."""

    worker: int
    reason: str


class Check(NamedTuple):
    """Driver to zygote: say so if what you have imported was edited since."""


class Stale(NamedTuple):
    """Zygote to driver: the file of this module, which it has, was edited."""

    module: str
