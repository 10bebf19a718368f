"""Who hears of an actor's begin and of its end, in a program of a cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

from aiogpu.engines import ray
from aiogpu.errors import ActorDiedError, NodeError
from aiogpu.runtime.actors.actor import ActorEnd, died
from aiogpu.serialization.serializer import dump_whole

if TYPE_CHECKING:
    from aiogpu.client.interface import Receiver
    from aiogpu.engines.cluster.actor import ClusterActor
    from aiogpu.wire.messages import Failed

NONE: Final = dump_whole(None)
"""The payload of None."""
AGAIN: Final = 0.05
"""Seconds between two looks at whether an actor has ended that was told to."""
SELDOM: Final = 0.5
"""The same for one that was not."""
LOOKED: Final = 0.005
"""Seconds between two looks at whether a process is there."""
LEAVING: Final = 10.0
"""Seconds for a process to be gone of which Ray says that it is dead."""


class Made:
    """Hears whether an actor's constructor has returned; keeps nobody alive for that.

    The constructor runs to its end all the same: Ray does what it was sent before.
    """

    def __init__(self, actor: ClusterActor) -> None:
        self._actor = ref(actor)

    def receive(self, place: Any) -> None:
        """It has, in this place."""
        actor = self._actor()
        if actor is not None:
            actor.place, actor.needs = place, ()
            actor.begin()

    def reject(self, failed: Failed) -> None:
        """It has not."""
        actor = self._actor()
        if actor is not None:
            actor.fail(failed)

    def fail(self, _error: Exception) -> None:
        """Its process has ended first; whoever calls is told so by Ray."""
        actor = self._actor()
        if actor is not None:
            actor.begin()

    def knows(self, error: BaseException) -> Failed | None:
        """Return what its actor knows of an error of Ray's; see `Live.knows`."""
        actor = self._actor()
        return None if actor is None else actor.knows(error)


class Ended:
    """Asks an actor again and again, until it does not answer any more."""

    def __init__(self, actor: ClusterActor, receiver: Receiver) -> None:
        self._actor = actor
        self._receiver = receiver

    def receive(self, place: Any) -> None:
        """It lives, in this place."""
        self._actor.place = place
        again = AGAIN if self._actor.end is not None else SELDOM
        self._actor.engine.loop.call_later(again, self._ask)

    def _ask(self) -> None:
        try:
            self._actor.await_end(self._receiver)
        except NodeError as error:
            self._receiver.fail(error)

    def reject(self, _failed: Failed) -> None:
        """Its constructor has failed."""
        self._receiver.receive(NONE)

    def fail(self, error: Exception) -> None:
        """Ray says that it is dead: its process is gone in a moment."""
        if not isinstance(error, ActorDiedError):
            self._receiver.fail(error)
            return
        actor = self._actor
        if actor.is_left:
            actor.end = ActorEnd(died(actor.name, "its `async with` block was left."))
        node, pid = actor.place
        is_here = bool(node) and node == ray.facts()[0]
        tell = partial(self._receiver.receive, NONE)
        _when_gone(actor.engine.loop, pid if is_here else 0, tell, LEAVING)


def _when_gone(
    loop: asyncio.AbstractEventLoop, pid: int, tell: Callable[[], object], left: float
) -> None:
    """Tell when a process is there no more; Ray ends it, and need not be asked."""
    if pid and left > 0 and os.path.exists(f"/proc/{pid}"):
        loop.call_later(LOOKED, _when_gone, loop, pid, tell, left - LOOKED)
    else:
        tell()
