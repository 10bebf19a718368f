"""A failure as `status()` tells of it: plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FailureStatus:
    """A task, or a call of an actor, that has failed for good.

    Attributes:
        task: its number; of a call, the actor's.
        name: its name; of a call, "Model.predict".
        error: the exception's type, "ValueError" or "torch.OutOfMemoryError".
        message: the first line of what it says.
        seconds: for how long its owner has known it.
        client: the program whose it was, 0 for the node's own.
    """

    task: int
    name: str
    error: str
    message: str
    seconds: float
    client: int = 0
