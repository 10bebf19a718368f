"""Encodes status reports by their fields, without pickle.

Programs and commands read these bytes from a node that they cannot trust yet, so
reading them must run no code. Ten bytes of a pickle can ask for gigabytes of memory, or
for a tuple that contains itself a million times.
"""

from __future__ import annotations

from typing import Final

from aiogpu.core.queue.fair_share import Limits
from aiogpu.observe.status import (
    ActorStatus,
    BundleStatus,
    ClientStatus,
    DeviceStatus,
    EndedTask,
    Holder,
    IdleEndStatus,
    Machine,
    NodeStatus,
    OtherProcess,
    OutageStatus,
    PlacementStatus,
    ReservationStatus,
    ShapeStatus,
    TaskStatus,
    UnendedStatus,
    WorkerStatus,
)
from aiogpu.observe.task_list import TaskPage, TaskQuery, TaskRow
from aiogpu.observe.why import Shortage, StopReport, Why
from aiogpu.wire.codec import RecordCodec

status_codec: Final = RecordCodec(
    NodeStatus,
    TaskStatus,
    WorkerStatus,
    ShapeStatus,
    ClientStatus,
    Limits,
    ActorStatus,
    EndedTask,
    PlacementStatus,
    BundleStatus,
    ReservationStatus,
    DeviceStatus,
    Holder,
    OtherProcess,
    Why,
    Shortage,
    OutageStatus,
    Machine,
    StopReport,
    UnendedStatus,
    IdleEndStatus,
    TaskQuery,
    TaskPage,
    TaskRow,
)
"""Reads and writes the answers to `Inquire`; classes are identified by their index."""
