"""The types of objects that aiogpu returns, for annotations and `isinstance`.

`Handle`, `Stream`, `Results`, `ActorHandle` and `ActorPool` are in `aiogpu` itself, as
`aiogpu.Handle`.
"""

from __future__ import annotations

from aiogpu.api.actors.actor import RemoteClass
from aiogpu.api.actors.gang import Gang
from aiogpu.api.node import Node
from aiogpu.api.remote_function import RemoteFunction, RemoteGenerator
from aiogpu.api.reservation import Lease, Placement
from aiogpu.api.results.reports import Report, Reports
from aiogpu.api.runtime_context import RuntimeContext
from aiogpu.observe.status import NodeStatus
from aiogpu.observe.why import Why

__all__ = [
    "Gang",
    "Lease",
    "Node",
    "NodeStatus",
    "Placement",
    "RemoteClass",
    "RemoteFunction",
    "RemoteGenerator",
    "Report",
    "Reports",
    "RuntimeContext",
    "Why",
]
