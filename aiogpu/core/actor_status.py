"""One actor as a `NodeStatus` shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """An actor that has not ended.

    Attributes:
        id: its number, which is also that of the task that it is to the queue.
        name: under which `aiogpu.get_actor` finds it, None without one.
        namespace: in which that name was given, "" where none was.
        class_name: the name of its class.
        state: "pending" (it waits for its place, or its constructor runs), "alive" or
            "leaving" (it ends after what it was sent).
        holders: how many hold a handle to it.
        worker: id of its worker, None while it has none.
        pid: process id of its worker, 0 without one.
        calls: how many of its calls were not answered yet.
        is_detached: whether it outlives the program that has made it.
        client: the program whose it is, 0 for the node's own.
    """

    id: int
    name: str | None
    namespace: str
    class_name: str
    state: str
    holders: int
    worker: int | None
    pid: int
    calls: int
    is_detached: bool
    client: int = 0
