"""Where an actor is, as the driver knows it."""

from __future__ import annotations

from enum import Enum


class ActorState(Enum):
    """Where an actor is."""

    PENDING = "pending"
    """It waits for its place, or its constructor runs; maybe not for the first time."""
    ALIVE = "alive"
    LEAVING = "leaving"
    """It was told to end after what it was sent."""
    DEAD = "dead"
