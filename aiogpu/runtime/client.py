"""One program that has joined a node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiogpu.core.model.ids import ClientId, TaskId
from aiogpu.core.queue.fair_share import Limits
from aiogpu.runtime.caller import Caller

if TYPE_CHECKING:
    from aiogpu.runtime.leases import LeaseReceiver


@dataclass(slots=True, eq=False)
class Client(Caller):
    """One program that has joined.

    Attributes:
        name: how people know it.
        shows: whether it is sent what its tasks print.
        only_looks: whether it runs nothing, and is listed nowhere.
        is_joined: whether it has said what its workers begin with.
        wish: what the core is told of it with its first lease, if it looks so far.
        pidfd: tells its end, whoever else has its connection open; -1 for none.
        is_slow: it has not read what it was sent.
        is_behind: so much that nothing more of it is started.
        leases: those that it has asked for and not given back, by its own numbers.
        standing: placements that outlive programs: their tasks, and who is told.
        last: the highest number that it has given to anything.
        departing: tasks whose code has not stopped, since it says that it leaves.
    """

    name: str = ""
    shows: bool = True
    only_looks: bool = False
    is_joined: bool = False
    is_slow: bool = False
    is_behind: bool = False
    wish: tuple[ClientId, float, Limits] | None = None
    pidfd: int = -1
    last: int = 0
    departing: set[TaskId] = field(default_factory=set)
    leases: dict[int, int] = field(default_factory=dict)
    standing: dict[int, tuple[TaskId, LeaseReceiver]] = field(default_factory=dict)
