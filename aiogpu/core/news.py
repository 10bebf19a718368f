"""What a node hears beside its tasks: of devices, and of programs that share it.

Not every node has devices, and few are shared: what is done of it is loaded by the
first that is heard.
"""

from __future__ import annotations

from typing import Final

from aiogpu.core import events
from aiogpu.core.effects import Effect
from aiogpu.core.events import Event
from aiogpu.core.node import Node

_OF_PROGRAMS: Final = (events.ClientJoined, events.ClientLeft)
NEWS: Final = (
    *(events.Settled, events.SetAside, events.LeaseReturned, events.Recovered),
    *(events.Sick, events.Well, events.Foreign, events.MemoryShort, events.Outgrown),
    *_OF_PROGRAMS,
)
"""All of it."""


def take_in(node: Node, event: Event, now: float) -> list[Effect]:
    """Bring the records up to date; what waits is to be looked at then."""
    if type(event) in _OF_PROGRAMS:
        from aiogpu.core.client_news import HANDLERS
    else:
        from aiogpu.core.device_news import HANDLERS
    effects: list[Effect] = []
    HANDLERS[type(event)](node, event, now, effects)
    return effects
