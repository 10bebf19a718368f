"""Ids: plain integers with a type each for the type checker.

Counters hand them out, never chance, so that a run can be replayed.
"""

from __future__ import annotations

from typing import NewType

TaskId = NewType("TaskId", int)
WorkerId = NewType("WorkerId", int)
LeaseId = NewType("LeaseId", int)
ClientId = NewType("ClientId", int)

OWN = ClientId(0)
"""The program on whose event loop the node lives; others have joined it."""

PROGRAM = "AIOGPU_PROGRAM"
"""The variable that names a task's program, where several share a node."""
