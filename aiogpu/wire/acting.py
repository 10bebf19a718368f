"""What driver and worker say to each other of an actor; see `wire.messages`."""

from __future__ import annotations

from typing import Final, NamedTuple

SERIAL: Final = "serial"
"""Plain methods, one at a time, in the order of their sending."""
THREADED: Final = "threaded"
"""Plain methods, each in a thread of its group's."""
ASYNC: Final = "async"
"""Coroutine methods interleave on one event loop; plain ones run there as well."""

DEFAULT_GROUP: Final = ""
"""The concurrency group of methods that name none."""


class Create(NamedTuple):
    """Driver to worker: be this actor from now on.

    `number` is as in `Run`; those of its calls are higher. `site` stands for its
    class, `payload` for the constructor's arguments. `mode` is one of the above;
    `limits` says how many methods of a group run at once; `groups` names the group of
    each method that has one.
    """

    task: int
    site: int
    payload: bytes
    number: int
    mode: str
    limits: dict[str, int]
    groups: dict[str, str]


class Created(NamedTuple):
    """Worker to driver: the constructor has returned."""

    task: int


class Invoke(NamedTuple):
    """Driver to worker: call a method of the actor with these arguments."""

    call: int
    method: str
    payload: bytes


class Drop(NamedTuple):
    """Driver to worker: nobody wants this call's answer; begin it no more, stop it.

    The control page counts them, so that a worker which is busy sees that there is
    one to read.
    """

    call: int


class Leave(NamedTuple):
    """Driver to actor: end in an orderly way, after all that you were sent."""
