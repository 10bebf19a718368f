"""Turns between children and other tasks of one program and priority.

Children go first: their parent holds a process while it waits for them, so a tree of
tasks is worked off in depth. But a parent may start children for ever. So each child
that starts gives one turn: the first task of a bucket (of one shape and depth) goes to
the front. The buckets have their turns in rotation.

The bound: of *n* buckets of a program and priority, each has a turn after at most *n*
children of that priority have started, if there are no more than `EXAMINED` others that
are passed over: buckets of other priorities, and those whose turn has come. One task of
a shape at a time has its turn. It stays at the front until its resources are free.

A task of a function that itself waits for children would begin another tree, and hold
another process. Such a task has its turn only after `reserve_after` times (1 + *b*)
squared seconds, if *b* tasks wait now. So a program with endless trees gains a process
ever more rarely, and yet starts each tree some time.
"""

from __future__ import annotations

from itertools import islice
from typing import Final

from aiogpu.core.queue.ready import Bucket, Rotation
from aiogpu.core.records import Kin, TaskRecord
from aiogpu.core.scheduler.state import SchedulerState

FRONT: Final = -(1 << 62)
"""The first lane of a task that has its turn; before all lanes of children."""

EXAMINED: Final = 8
"""The most buckets, and tasks of each, that are examined for each child that starts."""


def give_turn(node: SchedulerState, child: TaskRecord) -> None:
    """Give another task its turn, because a task starts; does so for children only."""
    rotation = node.ready.rotations.get(child.client)
    if rotation is None or child.kin is None or not child.kin.depth:
        return
    for _ in range(min(EXAMINED, len(rotation))):
        bucket = next(iter(rotation))
        rotation.move_to_end(bucket)
        if bucket.lane[0] != child.kin.lane[0] or _has_turn(node, bucket):
            continue
        record = _choose(node, bucket, rotation)
        if record is not None:
            _move_to_front(node, bucket, record)
            return


def _has_turn(node: SchedulerState, bucket: Bucket) -> bool:
    """Return True if a task of a bucket's shape and priority is at the front."""
    lanes = node.ready.by_shape[bucket.group.client, bucket.shape]
    return any(lane[0] == bucket.lane[0] and lane[1] < FRONT >> 1 for lane in lanes)


def _choose(
    node: SchedulerState, bucket: Bucket, rotation: Rotation
) -> TaskRecord | None:
    """Return the first task of a bucket that may start now; None if there is none."""
    pause = node.config.reserve_after * (1 + len(node.blocked)) ** 2
    if rotation.tree_begun is None:
        rotation.tree_begun = node.now
    for record in islice(bucket, EXAMINED):
        if not record.spec.pace.waits:
            return record
        if node.now >= rotation.tree_begun + pause:
            rotation.tree_begun = node.now
            return record
    return None


def _move_to_front(node: SchedulerState, bucket: Bucket, record: TaskRecord) -> None:
    priority, depth = bucket.lane
    node.turns_given += 1
    lane = priority, FRONT + node.turns_given
    if record.kin is None:
        record.kin = Kin(lane, depth)
    record.kin.lane = lane
    node.ready.push(record)
    bucket.discard(record)
