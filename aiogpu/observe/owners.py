"""The programs of a node: their names, and which of them holds what."""

from __future__ import annotations

from typing import Final

from aiogpu.core.model.ids import OWN
from aiogpu.observe.status import (
    Holder,
    NodeStatus,
    Program,
    held_tasks,
    name_and_pid,
)

ENDING: Final = -1
"""Stands for the program of a holder whose task has ended: the status names none."""


class Owners:
    """The programs of a node: their names, and which of them holds what."""

    def __init__(self, status: NodeStatus) -> None:
        self._known = {c.id: Program(c.name, c.pid) for c in status.clients}
        tasks = held_tasks(status)
        self._by_worker = {t.worker: t.client for t in tasks if t.worker is not None}
        # A lease has no worker; its holder has the number of the lease.
        self._by_name = {(t.pid, t.name): t.client for t in tasks}
        self._ids = {(t.pid, t.name): t.id for t in tasks}
        self._firsts = {(t.client, t.name): t.id for t in reversed(status.waiting)}
        # Without a list of programs there is only the node's own.
        self._default = ENDING if status.clients else OWN
        self._departed = status.departed

    def client(self, holder: Holder) -> int:
        """Return the number of the program to which a holder belongs."""
        found = self._by_worker.get(holder.worker)
        if found is None:
            found = self._by_name.get((holder.pid, holder.task or ""), self._default)
        return found

    def held_task(self, holder: Holder) -> int | None:
        """Return the number of the task, actor or lease of a holder, if it is known."""
        return self._ids.get((holder.pid, holder.task or ""))

    def waiting_task(self, client: int, name: str) -> int | None:
        """Return the number of a program's first waiting task with a name, if known."""
        return self._firsts.get((client, name))

    def name(self, client: int) -> str:
        """Return the name and the process of a program."""
        if client == ENDING:
            return "of an ended task"
        if client not in self._known and str(client) in self._departed:
            return f"{self._departed[str(client)]} (has left)"
        return name_and_pid(client, self._known)
