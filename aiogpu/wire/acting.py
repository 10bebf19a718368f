"""What driver and worker say to each other of an actor; see `wire.messages`."""

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
    """Driver to worker: call a method of the actor with these arguments.

    `limit` and `skip` are as in `Run`.
    """

    call: int
    method: str
    payload: bytes
    limit: int = 0
    skip: int = 0


class Drop(NamedTuple):
    """Driver to worker: nobody wants this call's answer; begin it no more, stop it.

    The control page counts them, so that a worker which is busy sees that there is
    one to read.
    """

    call: int


class Leave(NamedTuple):
    """Driver to actor: end in an orderly way, after all that you were sent."""


class Make(NamedTuple):
    """Worker to driver: make an actor of a declared class, under this id.

    The id is the worker's own choice, below zero and the only one of its kind on the
    node; so what it says next can name the actor. `name` is empty for none.
    """

    actor: int
    site: int
    payload: bytes
    name: str
    namespace: str
    get_if_exists: bool


class Find(NamedTuple):
    """Worker to driver: tell who has that name, as the result of a child."""

    child: int
    name: str
    namespace: str


class Ask(NamedTuple):
    """Worker to driver: call a method of an actor; the answer is that of a child.

    `method` may be one of those below, which no class has.
    """

    task: int
    child: int
    actor: int
    method: str
    payload: bytes


class Hold(NamedTuple):
    """Worker to driver: this process has a handle to the actor."""

    actor: int


class Release(NamedTuple):
    """Worker to driver: this process has no handle to the actor any more."""

    actor: int


class Carry(NamedTuple):
    """Worker to driver: what follows holds handles to these actors.

    `task` is the one whose result follows, 0 for a `Submit`, an `Ask` or a `Make`.
    """

    task: int
    actors: tuple[int, ...]


class Stop(NamedTuple):
    """Worker to driver: end an actor, `how` is one of those below."""

    actor: int
    how: str


READY: Final = " ready"
"""Tell when the actor was made."""
ENDED: Final = " ended"
"""Tell when its process has ended."""
ROOM: Final = " room"
"""Tell how many actors of its kind can live at once."""
AT_ONCE: Final = "at once"
AFTER_ALL: Final = "after all"
"""After what it was sent."""
AGAIN: Final = "again"
"""End its process; it may be made anew."""

Acting = (
    Create
    | Created
    | Invoke
    | Drop
    | Leave
    | Make
    | Find
    | Ask
    | Hold
    | Release
    | Carry
    | Stop
)
"""Everything that concerns actors."""
