"""What a node says of itself, as bytes: reports by their fields, and no pickle.

Programs and commands read these bytes before they have any other reason to trust the
node, so reading them must run no code.
"""

from __future__ import annotations

from typing import Final

from aiogpu.core.actor_status import ActorStatus
from aiogpu.core.client_status import ClientStatus
from aiogpu.core.failure_status import FailureStatus
from aiogpu.core.holding import DeviceStatus, Holder
from aiogpu.core.limits import Limits
from aiogpu.core.observed import OtherProcess
from aiogpu.core.outage import OutageStatus
from aiogpu.core.placement_status import BundleStatus, PlacementStatus
from aiogpu.core.shape_status import ShapeStatus
from aiogpu.core.shortage import ReservationStatus, Shortage
from aiogpu.core.snapshot import NodeStatus, TaskStatus, WorkerStatus
from aiogpu.core.why import Why
from aiogpu.wire.frames import RecordCodec

status_codec: Final = RecordCodec(
    *(NodeStatus, TaskStatus, WorkerStatus, ShapeStatus, ClientStatus, Limits),
    *(ActorStatus, FailureStatus, PlacementStatus, BundleStatus, ReservationStatus),
    *(DeviceStatus, Holder, OtherProcess, Why, Shortage, OutageStatus),
)
"""Reads and writes the answers to `Inquire`; each class has the number of its place."""
