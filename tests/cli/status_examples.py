"""Examples of `NodeStatus`, and fake nodes that answer `aiogpu` commands with them.

`python -m tests.cli.status_examples NAME COMMAND...` shows one in a terminal; NAME is
"busy", "long" or "dying".
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

import aiogpu
from aiogpu.cli import connect
from aiogpu.cli.main import main as command
from aiogpu.cli.views.status import tasks_named
from aiogpu.core.queue.fair_share import Limits
from aiogpu.observe.snapshot import why_ended
from aiogpu.observe.status import (
    ActorStatus,
    ClientStatus,
    DeviceStatus,
    EndedTask,
    Holder,
    NodeStatus,
    OtherProcess,
    ReservationStatus,
    ShapeStatus,
    TaskStatus,
    WorkerStatus,
)
from aiogpu.observe.why import StopReport
from aiogpu.wire.messages import CANCEL, CANCEL_ALL, KILL, KILL_NAMED

GIB = 2**30


JOB = 1 << 26
"""Id of a program that has joined the node."""


IDLE = NodeStatus(
    total={"CPU": 4.0, "GPU": 0.0},
    available={"CPU": 4.0, "GPU": 0.0},
    devices=(),
    workers=(),
    tasks=(),
    waiting_count=0,
    shapes=(),
    shape_count=0,
    reservation=None,
)


A100 = "NVIDIA A100-SXM4-40GB"


BUSY = NodeStatus(
    total={"CPU": 8.0, "GPU": 3.0},
    available={"CPU": 4.0, "GPU": 0.25},
    devices=(
        DeviceStatus(
            *("GPU", 0, "A100", "GPU-0", A100, 40 * GIB, 0.25),
            holders=(
                Holder(0.5, 1, 101, "Model 'serve'", 60.0, is_endless=True),
                Holder(0.25, 2, 102, "train", 12.0, memory=6 * GIB, used=7 * GIB),
            ),
            used=10 * GIB,
            utilisation=87,
            temperature=63,
            power=286.5,
            others=(OtherProcess(13, "Xorg", 2 * GIB),),
            seen=0.4,
        ),
        DeviceStatus(
            *("GPU", 1, "A100", "GPU-1", A100, 40 * GIB, 0.0),
            holders=(Holder(1.0, 3, 103, "whole", 3.0),),
            used=0,
            utilisation=0,
            others=(),
            seen=0.4,
        ),
        DeviceStatus(
            *("GPU", 2, "A100", "GPU-2", A100, 40 * GIB, 0.0),
            holders=(),
            aside="XID 79 (the GPU has fallen off the bus)",
        ),
    ),
    workers=(
        WorkerStatus(1, 101, "busy", "Model 'serve'"),
        WorkerStatus(2, 102, "busy", "train"),
        WorkerStatus(4, 104, "idle", None),
    ),
    tasks=(
        TaskStatus(1, "Model 'serve'", "running", {"GPU": 0.5}, 1, None, pid=101),
        TaskStatus(
            7, "train", "running", {"CPU": 1.0, "GPU": 0.25}, 2, None, JOB, pid=102
        ),
        TaskStatus(
            *(8, "whole", "running", {"CPU": 1.0, "GPU": 1.0}, None, None),
            is_lease=True,
            pid=103,
        ),
        TaskStatus(
            *(12, "train", "waiting", {"CPU": 1.0, "GPU": 1.0}, None),
            "waits for GPU 1 (free by device: 0: 0.25, 1: 0, 2: set aside)",
        ),
    ),
    waiting_count=3,
    shapes=(
        ShapeStatus(
            *({"CPU": 1.0, "GPU": 1.0}, "pack", (), 3, "train", 75.0),
            "waits for GPU 1 (free by device: 0: 0.25, 1: 0, 2: set aside)",
        ),
    ),
    shape_count=1,
    reservation=ReservationStatus(12, "train", {"GPU": (1,)}, {"CPU": 1.0}, None),
    clients=(
        ClientStatus(0, "", 0, 1.0, 2, 0, {"CPU": 1.0, "GPU": 1.5}, Limits()),
        ClientStatus(
            *(JOB, "train.py", 4711, 2.0, 1, 3, {"CPU": 1.0, "GPU": 0.25}),
            Limits(max_waiting=100, max_share={"GPU": 0.5}),
        ),
        ClientStatus(JOB + 9, "notebook", 4712, 1.0, 0, 0, {}, Limits(), has_left=True),
    ),
    actors=(
        ActorStatus(1, "serve", "", "Model", "alive", 2, 1, 101, 3, True),
        ActorStatus(9, None, "", "Cache", "pending", 1, None, 0, 0, False, JOB),
    ),
    failures=(
        EndedTask(6, "load", "torch.OutOfMemoryError", "no room left", 2.0),
        EndedTask(5, "train", "ValueError", "no such key", 75.0, JOB),
    ),
)


TRACE = """Traceback (most recent call last):
  File "train.py", line 12, in train
    return table[key]
ValueError: no such key"""


ENDED = (
    replace(BUSY.failures[0], ran=0.31, worker=2, pid=102, devices=(("GPU", 0),)),
    EndedTask(4, "embed", "", "", 9.0, 0, "finished", 0.2, 3.2, 2, 102, (("GPU", 0),)),
    EndedTask(3, "train", "", "", 12.0, JOB, "cancelled", 4.0),
    replace(BUSY.failures[1], ran=12.0, worker=1, pid=99, waited=3.0, traceback=TRACE),
)
"""The ended tasks of the busy node, the latest first."""


LONG = replace(
    BUSY,
    tasks=tuple(
        TaskStatus(number, f"job-{number}", "running", {"CPU": 1.0}, number, None)
        for number in range(100)
    ),
)


class StatusNode:
    """A node with one status after the other; the last one stays."""

    def __init__(self, statuses: Sequence[NodeStatus]) -> None:
        self.statuses = list(statuses)
        self.stopped: list[tuple[str, int]] = []

    async def status(self) -> NodeStatus:
        if len(self.statuses) > 1:
            return self.statuses.pop(0)
        return self.statuses[0]

    async def why(self, task_id: int) -> aiogpu.types.Why:
        for task in self.statuses[0].tasks:
            if task.id == task_id:
                return aiogpu.types.Why(
                    task.name, task.id, "running", worker=2, pid=102
                )
        for ended in ENDED:
            if ended.task == task_id:
                return why_ended(ended)
        raise aiogpu.errors.NoSuchTaskError(f"this node has no task {task_id}.")

    async def ended(self) -> tuple[EndedTask, ...]:
        return ENDED

    async def failed_calls(self, actor: int) -> tuple[EndedTask, ...]:
        return ()

    async def stop(self, kind: str, number: int) -> tuple[str, aiogpu.types.Why | None]:
        self.stopped.append((kind, number))
        try:
            why = await self.why(number)
        except aiogpu.errors.NoSuchTaskError:
            return "", None
        kinds = {1: "actor", 8: "lease"}
        return kinds.get(number, "task") if why.ended is None else "", why

    async def stop_named(self, what: str, name: str) -> StopReport:
        numbers = tuple(task.id for task in tasks_named(self.statuses[0], name))
        if len(numbers) > 1 and what != CANCEL_ALL:
            return StopReport(numbers, len(numbers))
        kind = KILL if what == KILL_NAMED else CANCEL
        first = tuple([await self.stop(kind, number) for number in numbers])
        return StopReport(numbers, len(numbers), Counter(k for k, _ in first), first)


def answer_with(patch: pytest.MonkeyPatch, *statuses: NodeStatus) -> None:
    """Commands find a node with these statuses, at every address."""
    replace_node(patch.setattr, StatusNode(statuses))


def replace_node(put: Callable[[object, str, object], None], node: StatusNode) -> None:
    """Replace the node at every address."""

    @asynccontextmanager
    async def joined(
        _address: str, _patience: float | None = None
    ) -> AsyncIterator[connect.Node]:
        yield node

    put(connect, "joined", joined)


class DyingNode(StatusNode):
    """A node that has ended at the second request."""

    async def status(self) -> NodeStatus:
        if not self.statuses:
            raise aiogpu.NodeDiedError("the node has ended.")
        return self.statuses.pop()


if __name__ == "__main__":
    nodes = {"busy": StatusNode, "long": StatusNode, "dying": DyingNode}
    name = sys.argv.pop(1)
    replace_node(setattr, nodes[name]([LONG if name == "long" else BUSY]))
    command()
