"""What many an event and effect consist of alone: whom it is about.

A class that is another name for the same fields takes these from here, for Python
compiles anew what it makes from fields, and a program starts with all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from aiogpu.core.ids import TaskId, WorkerId


@dataclass(slots=True)
class AboutTask:
    """One task."""

    task: TaskId


@dataclass(slots=True)
class AboutReason:
    """One task, and the reason for people."""

    task: TaskId
    reason: str


@dataclass(slots=True)
class AboutHolder:
    """One task that asks for a lease, and under which id that is held."""

    task: TaskId
    holder: WorkerId


@dataclass(slots=True)
class AboutWorker:
    """One worker."""

    worker: WorkerId


@dataclass(slots=True)
class AboutDevice:
    """One device: its kind, and its index among those."""

    kind: str
    index: int
