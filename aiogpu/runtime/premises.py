"""What the programs that join a node find there."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiogpu.core.queue.fair_share import Limits


@dataclass(frozen=True, slots=True)
class Premises:
    """What clients find on a node.

    Attributes:
        node: its id.
        descriptors: path of the socket for shared memory.
        spill: directory for values for which there is no memory, "" for the system's.
        ledger: what it has to share out, as plain values.
        release: the version of aiogpu.
        limits: what each of them may have at once.
    """

    node: str
    descriptors: str
    spill: str
    ledger: bytes
    release: str
    limits: Limits = field(default_factory=Limits)
