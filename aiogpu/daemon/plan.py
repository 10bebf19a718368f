"""What a node is to be: decided by the command, carried out by the node's process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final, NamedTuple

from aiogpu.core.queue.fair_share import Limits
from aiogpu.daemon.place import Place
from aiogpu.engines.base import NodeOptions

DRAIN: Final = 30.0
"""Seconds that what runs has to end in when the node is asked to stop."""
CLOSING: Final = 20.0
"""Seconds that a node's end takes at most, beside the grace of those it cancels."""
OPENING: Final = 120.0
"""Seconds until a node is ready, at most."""
IMPORTING: Final = 60.0
"""Seconds more for each module that is preloaded."""
LAST_WORDS: Final = "node.err"
"""Beside the log: what comes from below Python, such as a crash; of one life."""


class Plan(NamedTuple):
    """One node to be started.

    Attributes:
        options: what it is to have.
        place: where it is to be.
        drain: seconds for what runs when it is asked to stop.
        sys_path: where it finds modules.
        metrics: port of 127.0.0.1 for Prometheus; None for none.
        max_waiting: unfinished tasks that a program may have; None for no limit.
        max_share: the part that a program may hold of a resource, by its name.
    """

    options: NodeOptions
    place: Place
    drain: float = DRAIN
    sys_path: tuple[str, ...] = ()
    metrics: int | None = None
    max_waiting: int | None = None
    max_share: Mapping[str, float] = {}

    @property
    def limits(self) -> Limits:
        """What a program may have at once; raises `OptionError` for what is none."""
        return Limits(self.max_waiting, max_share=self.max_share)

    @property
    def ends_within(self) -> float:
        """Seconds that its end takes at most, after the drain."""
        return CLOSING + self.options.cancel_grace

    @property
    def opens_within(self) -> float:
        """Seconds until it is ready, at most."""
        return OPENING + IMPORTING * len(self.options.preload)

    def packed(self) -> bytes:
        """As bytes for the process that is to be it."""
        fields = self._asdict()
        fields["options"] = self.options._asdict()
        fields["place"] = self.place._asdict()
        return json.dumps(fields).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> Plan:
        """The plan again; raises `ValueError` or `TypeError` if it is none."""
        fields = json.loads(data)
        options = NodeOptions(**fields.pop("options"))
        place = Place(**fields.pop("place"))
        sys_path = tuple(fields.pop("sys_path"))
        options = options._replace(preload=tuple(options.preload))
        return cls(options, place, sys_path=sys_path, **fields)
