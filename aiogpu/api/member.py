"""One actor of a pool, and what the pool knows of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiogpu.api.actor import ActorHandle
    from aiogpu.api.handle import Handle
    from aiogpu.api.method import Link


class Member:
    """One actor of the crew.

    Attributes:
        number: its place; the lowest that was free.
        handle: to it.
        link: what the handle holds.
        ended: settled when its process has ended.
        calls: of the pool's that it has not answered.
        idle_since: loop time of its last answer, or of its coming to life.
        is_ready: whether its constructor has returned.
        has_been_ready: whether it ever has.
        has_answered: whether it has answered a call.
        on_answer: told of each call's end.
    """

    __slots__ = (
        *("calls", "ended", "handle", "has_answered", "idle_since"),
        *("has_been_ready", "is_ready", "link", "number", "on_answer"),
    )

    def __init__(self, number: int, handle: ActorHandle[Any], link: Link) -> None:
        self.number = number
        self.handle = handle
        self.link = link
        self.ended: Handle[None] = link.ended()
        self.calls = 0
        self.idle_since = 0.0
        self.is_ready = False
        self.has_been_ready = False
        self.has_answered = False
        self.on_answer: Callable[[Handle[Any]], None]
