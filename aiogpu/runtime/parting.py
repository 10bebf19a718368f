"""What ends with a program that leaves a node, and what of it stays.

Whoever says that he leaves is told when nothing of his runs any more; who is killed
need not be, and the same is done.
"""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from aiogpu.core.model.ids import ClientId, TaskId
from aiogpu.core.model.text import in_words
from aiogpu.runtime.client import Client
from aiogpu.runtime.driver import Driver
from aiogpu.runtime.far import Far
from aiogpu.runtime.lessee import give_back_all
from aiogpu.wire.messages import Departed

AT_ONCE: Final = 1000
"""Tasks of a client that has gone which are stopped in one turn of the loop."""
FIRST_LOOK: Final = 1e-3
LONGEST_LOOK: Final = 0.02
"""Seconds between two looks at whether all of a client that leaves has stopped."""


class Absent(NamedTuple):
    """A program that has gone and has left something.

    Attributes:
        program: what the workers of its tasks begin with.
        name: how people know it.
        pid: what its process id was.
    """

    program: str
    name: str
    pid: int


class Parting:
    """See above."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, driver: Driver, far: Far
    ) -> None:
        self._loop = loop
        self._driver = driver
        self._far = far
        self._left: dict[ClientId, Absent] = {}

    def __repr__(self) -> str:
        return f"<Parting {len(self._left)} have left something>"

    def give_up(self, client: Client) -> None:
        """Stop what is a client's own."""
        give_back_all(client, self._driver)
        for number in list(client.asked):
            self._far.withdraw(client, number)
        client.fetched.clear()
        children, client.children = client.children, {}
        self._stop_some([TaskId(task) for task in children.values()])
        client.departing.update(TaskId(task) for task in children.values())
        self._driver.actors.holding.pop(client.id, None)
        holds = list(client.holds)
        self._far.release_all(client)
        for public in holds:
            actor = self._driver.actors.get(public)
            if actor is not None and not actor.holders:
                client.departing.add(TaskId(actor.id))
        why = (
            f"the program that had started it ({client.name}, pid {client.pid}) ended."
        )
        client.departing.update(self._driver.actors.end_of_client(client.client, why))

    def _stop_some(self, tasks: list[TaskId]) -> None:
        for task in tasks[:AT_ONCE]:
            self._driver.cancel(task)
        if len(tasks) > AT_ONCE:
            self._loop.call_soon(self._stop_some, tasks[AT_ONCE:])

    def depart(self, client: Client) -> None:
        """It says that it leaves."""
        self.give_up(client)
        config = self._driver.scheduler.config
        within = config.cancel_grace + config.exit_grace
        self._look(client, FIRST_LOOK, self._loop.time() + within)

    def _look(self, client: Client, pause: float, until: float) -> None:
        """Tell a client that nothing of it runs any more, as soon as that is so."""
        if client.peer is None:
            return
        knows = self._driver.knows
        client.departing = {task for task in client.departing if knows(task)}
        if client.departing and self._loop.time() < until:
            longer = min(2 * pause, LONGEST_LOOK)
            self._loop.call_later(pause, self._look, client, longer, until)
            return
        client.peer.send_one(Departed())

    def note_left(self, client: Client) -> None:
        """It has gone; detached actors of it may live on, and start again."""
        self._left[client.client] = Absent(client.program, client.name, client.pid)

    def left(self) -> dict[ClientId, Absent]:
        """The programs that have gone and of which something lives."""
        alive = {one.id for one in self._driver.scheduler.clients or ()}
        self._left = {id_: one for id_, one in self._left.items() if id_ in alive}
        return self._left

    def wants(self, program: str) -> bool:
        """Whether something lives that a program has left which has gone."""
        return any(one.program == program for one in self.left().values())


def remains_of(clients: list[Client]) -> str:
    """What clients have asked for that has not ended, in words; "" for nothing."""
    counts = {
        "task": sum(len(one.children) for one in clients),
        "call": sum(number > 0 for one in clients for _, number in one.asked.values()),
        "lease": sum(len(one.leases) for one in clients),
    }
    return in_words(
        [f"{n} {what}{'' if n == 1 else 's'}" for what, n in counts.items() if n]
    )
