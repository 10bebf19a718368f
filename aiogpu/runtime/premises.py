"""What the programs that join a node find there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Premises:
    """What clients find on a node.

    Attributes:
        node: its id.
        descriptors: path of the socket for shared memory.
        spill: directory for values for which there is no memory, "" for the system's.
        ledger: what it has to share out, pickled.
        release: the version of aiogpu.
    """

    node: str
    descriptors: str
    spill: str
    ledger: bytes
    release: str
