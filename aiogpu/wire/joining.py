"""What a client and its node say to each other of joining and leaving.

A client is a program that works on a node of another process. What it says of tasks,
actors and values is what a worker says of those that its task has started.
"""

from typing import Final, NamedTuple

FIRST_CLIENT: Final = 1 << 26
"""Ids of clients begin here; those of workers are below. A client chooses its own."""
END_OF_CLIENTS: Final = FIRST_CLIENT + (1 << 24)
"""Those of clients are below."""

RESOURCES: Final = "resources"
"""Asks for all resources by name."""
AVAILABLE: Final = "available"
"""Asks for what is free of each."""
STATUS: Final = "status"
"""Asks who holds what, what waits and why."""
WHY: Final = "why"
"""Asks why a child waits, by its number; 0 for nobody's."""
WHY_TASK: Final = "why task"
"""The same of any task, by the node's number."""
TIMELINE: Final = "timeline"
"""Asks what has run where and when."""


class Refused(NamedTuple):
    """Node to whoever has greeted: go away, for this reason; the connection ends.

    Its tag is the same in all versions, since one of another version reads it.
    """

    reason: str


class Join(NamedTuple):
    """Client to node: what its tasks' workers are to begin with.

    `release`: its version of aiogpu. `executable`, `flags`, `sys_path`, `directory`
    and `environ` are its own. `preload`: modules for its zygote. `shows`: whether it is
    sent what its tasks print. `only_looks`: it will run nothing. `weight`:
    what it gets where another of weight 1 gets 1.
    """

    release: str
    name: str
    executable: str
    flags: tuple[str, ...]
    sys_path: tuple[str, ...]
    directory: str
    environ: dict[str, str]
    preload: tuple[str, ...]
    shows: bool
    only_looks: bool
    weight: float


class Welcome(NamedTuple):
    """Node to client: it has joined.

    `descriptors` is the path of the socket for shared memory, `page` that of the
    control page, `spill` where values go for which there is no memory, "" for the
    system's choice. `ledger` is what the node has to share out and how it
    works, as plain values.
    """

    node: str
    descriptors: str
    page: str
    spill: str
    ledger: bytes


class Inquire(NamedTuple):
    """Client to node: tell something of the node, as the result of a child.

    The answer is `ChildDone` with plain values, see `runtime.status_codec`. `what` is
    one of the above, `number` the child or the task that is meant.
    """

    child: int
    what: str
    number: int


class Carried(NamedTuple):
    """Node to whoever asked: the child's answer, which follows, has handles to these.

    They count as held by whoever is told until he says `Release` of each.
    """

    child: int
    actors: tuple[int, ...]


class TakeLease(NamedTuple):
    """Client to node: I want a lease of what this site, which I declared, asks for.

    `ChildDone` grants it, with a `leasing.Grant`; `Withdraw` gives it up, or back.
    """

    child: int
    site: int


class FindPlacement(NamedTuple):
    """Client to node: tell me the placement of that name that outlives its program.

    `ChildDone` tells it as plain values; `TakeLease` of it says when it is granted.
    """

    child: int
    name: str


class Depart(NamedTuple):
    """Client to node: stop all that is mine, and tell me when it has stopped."""


class Departed(NamedTuple):
    """Node to client: nothing of yours is left."""


Joining = (
    Join | Welcome | Inquire | Carried | TakeLease | FindPlacement | Depart | Departed
)
"""Everything that concerns clients, but for `Refused`."""
