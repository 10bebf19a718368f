"""What is asked of the scheduler for a task: built once per function.

A spec holds only what decides; the function and its arguments stay with the
driver. Tasks whose specs have equal shapes can stand in for each other in every
decision but the order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aiogpu.core.pace import Pace
from aiogpu.core.resources import Request

Environment = tuple[tuple[str, str], ...]
"""The variables of `runtime_env`, sorted by name; the core only compares them."""

Lane = tuple[int, int]
"""Sorts tasks of equal standing: the priority, then the depth, both negated."""

UNLIMITED = -1
"""`max_retries` without end."""


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """What tasks must have in common to be queued together."""

    request: Request
    environment: Environment = ()
    _hash: int = field(init=False, repr=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.request, self.environment)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Shape)
            and self.request == other.request
            and self.environment == other.environment
        )


@dataclass(frozen=True, slots=True, eq=False)
class TaskSpec:
    """What one function asks for, the same for all its calls.

    Attributes:
        name: how logs, errors and `status()` call the task.
        shape: request and environment.
        function: identity of the function, for `max_calls`.
        max_calls: calls after which the worker ends; 0 is no limit. 1 also means
            that the call starts in a process that has run nothing else.
        max_retries: how often a task is started again after its worker died, or
            failed with an exception that is to be retried; -1 is without end.
        priority: higher goes first.
        timeout: seconds from submission after which the task is stopped.
        cancel_grace: seconds from its first interrupt to the kill of its worker;
            None for the node's own.
        is_detached: whether it outlives the task that has started it.
        is_endless: whether it holds what it has until its owner gives it up, so
            that nobody should wait for its end.
        retries_oom: whether a task that has run out of device memory is tried once
            more, with a device of its own.
        pace: how long its tasks take; shared and kept up to date by all of them.
        is_lease: whether it is a lease for others' processes and has no worker. It is
            endless as well, and its `max_calls` is 1, so that it follows nobody.
        lane: of tasks that no other task has started.
        is_grouped: whether it is a gang, or runs in one.
    """

    name: str
    shape: Shape
    function: int = 0
    max_calls: int = 0
    max_retries: int = 3
    priority: int = 0
    timeout: float | None = None
    cancel_grace: float | None = None
    is_detached: bool = False
    is_endless: bool = False
    retries_oom: bool = False
    pace: Pace = field(default_factory=Pace, repr=False)
    is_lease: bool = False
    lane: Lane = field(init=False, repr=False, default=(0, 0))
    is_grouped: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lane", (-self.priority, 0))
        is_grouped = self.shape.request.gang is not None
        object.__setattr__(self, "is_grouped", is_grouped)
