"""Leases that a program holds which has joined the node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiogpu.core.model.ids import TaskId
from aiogpu.errors import AiogpuError, InternalError, NodeClosedError
from aiogpu.runtime.call import Site
from aiogpu.runtime.child import Child
from aiogpu.runtime.terms import dump_gang
from aiogpu.serialization.exceptions import RAISED, pack_failure
from aiogpu.wire.messages import (
    ChildDone,
    ChildFailed,
    Failed,
    FindPlacement,
    Message,
    TakeLease,
    Withdraw,
)

if TYPE_CHECKING:
    from aiogpu.runtime.client import Client
    from aiogpu.runtime.driver import Driver
    from aiogpu.runtime.leases import LeaseReceiver


class Lessee:
    """Tells a client of a lease that it has asked for; see `LeaseReceiver`.

    Attributes:
        pid: its process.
    """

    __slots__ = ("_client", "_number", "pid")

    def __init__(self, client: Client, number: int) -> None:
        self.pid = client.pid
        self._client = client
        self._number = number

    def receive(self, payload: bytes) -> None:
        """It is granted, and the client's until that gives it back or ends."""
        if self._client.peer is not None:
            self._client.peer.post(ChildDone(self._number, payload))

    def reject(self, failed: Failed) -> None:
        """It is refused."""
        self._client.leases.pop(self._number, None)
        self._client.standing.pop(self._number, None)
        if self._client.peer is not None:
            self._client.peer.post(ChildFailed(self._number, *failed.why))

    def fail(self, error: Exception) -> None:
        """It is refused, or the node closes."""
        self.reject(pack_failure(0, RAISED, error, ""))


def hear_of_leases(
    client: Client, message: Message, driver: Driver, is_draining: bool
) -> bool:
    """Take in what a client says of its leases; False if it is something else."""
    if isinstance(message, TakeLease):
        _take(client, message, driver, is_draining)
        return True
    if isinstance(message, FindPlacement):
        _find(client, message, driver)
        return True
    return isinstance(message, Withdraw) and _give_back(client, message.child, driver)


def _take(
    client: Client, message: TakeLease, driver: Driver, is_draining: bool
) -> None:
    lessee = Lessee(client, message.child)
    site = client.declared.get(message.site)
    if is_draining:
        lessee.fail(NodeClosedError("the node is being stopped, and grants nothing."))
    elif isinstance(site, Site) and site.spec.is_lease:
        if client.wish is not None:
            # From now on its limits and its turn are as any other program's.
            from aiogpu.core.scheduler.scheduler import Scheduler

            driver.feed(Scheduler.join, *client.wish)
            client.wish = None
        try:
            if site.spec.is_detached:
                _take_standing(client, message, site, lessee, driver)
                return
            task = driver.submit(site, b"", lessee, None, client.client)
        except AiogpuError as error:
            lessee.fail(error)
            return
        if driver.knows(task):
            client.leases[message.child] = task
    elif isinstance(site, Failed):
        lessee.reject(site)
    else:
        lessee.fail(InternalError(f"{client.name} never declared this lease"))


def _take_standing(
    client: Client, message: TakeLease, site: Site, lessee: Lessee, driver: Driver
) -> None:
    def submit(site: Site, receiver: LeaseReceiver) -> int:
        return driver.submit(site, b"", receiver, None, client.client)

    task = driver.leases.standing.take(site, lessee, submit)
    client.standing[message.child] = TaskId(task), lessee


def _find(client: Client, message: FindPlacement, driver: Driver) -> None:
    child = Child(client, message.child)
    try:
        child.receive(dump_gang(driver.leases.standing.find(message.name)))
    except AiogpuError as error:
        child.fail(error)


def _give_back(client: Client, number: int, driver: Driver) -> bool:
    if number in client.standing:
        standing, lessee = client.standing.pop(number)
        driver.leases.standing.remove(standing, driver.cancel, lessee)
        return True
    task = client.leases.pop(number, None)
    if task is not None:
        driver.cancel(task)
    return task is not None


def task_of(client: Client, number: int) -> int:
    """The lease or placement that a client knows by a number; 0 for none."""
    if number in client.standing:
        return client.standing[number][0]
    return client.leases.get(number, 0)


def give_back_all(client: Client, driver: Driver) -> None:
    """A client has gone, or leaves; what its leases were for may go on."""
    for number in list(client.leases):
        _give_back(client, number, driver)
    standing, client.standing = list(client.standing.values()), {}
    for task, lessee in standing:
        driver.leases.standing.leave(task, lessee)
