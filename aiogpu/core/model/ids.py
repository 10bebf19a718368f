"""Ids: plain integers, each with a type of its own for the type checker.

Ids come from counters, never from random numbers, so that a run can be replayed.
"""

from __future__ import annotations

from typing import NewType

TaskId = NewType("TaskId", int)
WorkerId = NewType("WorkerId", int)
LeaseId = NewType("LeaseId", int)
ClientId = NewType("ClientId", int)

OWN = ClientId(0)
"""The program on whose event loop the node runs; other programs have joined it."""

PROGRAM = "AIOGPU_PROGRAM"
"""The environment variable that names a task's program, if several share the node."""


def is_of_program(variable: str) -> bool:
    """Return True for the variables of a program, which children of tasks inherit.

    They are no variables of the user's, and are not shown.
    """
    return variable.startswith(PROGRAM)
