"""Tasks that come, or end, in a row: what is the same for all of them is done once.

Of what `Scheduler.submit` and `Scheduler.finish` decide about each task these do the
commonest, where there is nothing to decide: it waits behind others that are like it,
or it ends and the next one has been sent already. Of all else they keep off.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from aiogpu.core.dispatch import take_turn
from aiogpu.core.effects import Effect
from aiogpu.core.ids import OWN, ClientId, TaskId, WorkerId
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.node import Node
from aiogpu.core.ready import Line
from aiogpu.core.records import TaskRecord
from aiogpu.core.specs import TaskSpec

_ENDED: Final = TaskState.ENDED
_QUEUED: Final = TaskState.QUEUED
_RUNNING: Final = TaskState.RUNNING


def push_row(  # noqa: PLR0917 - as `Scheduler.submit`
    node: Node,
    first: TaskId,
    count: int,
    spec: TaskSpec,
    now: float,
    client: ClientId = OWN,
) -> bool:
    """Have new tasks without a parent wait behind others that are like them.

    Args:
        node: where.
        first: id of the first; the others' follow.
        count: how many they are.
        spec: of all of them.
        now: the time.
        client: whose they are.

    Returns:
        False if each is to be submitted by itself; then nothing has changed.
    """
    if node.is_closing or node.reservation is not None:
        return False
    if spec.timeout is not None or spec.is_grouped:
        return False
    line: Line = spec.shape
    if node.clients is not None:
        line = client, spec.shape
    bucket = node.ready.by_shape.get(line)
    if bucket is None:
        return False
    if node.clients is not None:
        program = node.clients.of(client)
        if program.most or program.limits.max_waiting is not None:
            return False
        node.clients.now = now
        program.unfinished += count
    retries = spec.max_retries
    records = [
        TaskRecord(TaskId(task), spec, retries, now, client)
        for task in range(first, first + count)
    ]
    node.tasks.extend(first, records)
    bucket.extend(records)
    return True


def end_row(
    node: Node,
    worker_id: WorkerId,
    ended: Iterable[tuple[TaskId, float]],
    now: float,
    effects: list[Effect],
) -> list[TaskRecord]:
    """A worker has ended tasks, without a failure, that it was sent ahead in order.

    Args:
        node: where.
        worker_id: the worker.
        ended: the tasks, and the seconds that each took.
        now: the time.
        effects: gets what is to be done besides.

    Returns:
        The first of them, which have ended: as if `Settle` were answered for each.
        The rest is for `TaskFinished`.
    """
    settled: list[TaskRecord] = []
    worker = node.workers.get(worker_id)
    if worker is None or worker.refill_at < 0 or node.solitude.is_wanted:
        return settled
    if node.clients is not None:
        node.clients.now = now
    queue = worker.queue
    for task, took in ended:
        record = worker.task
        if record is None or record.id != task or not queue:
            break
        following = queue[0]
        if not _simply_follows(following, record):
            break
        if took:
            record.spec.pace.note(took)
        record.worker, record.state = None, _ENDED
        settled.append(record)
        if len(queue) - 1 <= worker.refill_at:
            take_turn(node, worker, now, effects)
        else:
            worker.task = queue.popleft()
            following.state = _RUNNING
    if settled:
        _forget(node, settled)
    return settled


def _simply_follows(following: TaskRecord, record: TaskRecord) -> bool:
    """Whether nothing is to be decided when one task ends and the other begins."""
    spec = record.spec
    return (
        record.state is _RUNNING
        and record.kin is None
        and not spec.max_calls
        and spec.timeout is None
        and following.state is _QUEUED
        and following.client == record.client
    )


def _forget(node: Node, settled: list[TaskRecord]) -> None:
    node.tasks.pop_some([record.id for record in settled])
    if node.clients is not None:
        client = node.clients.of(settled[0].client)
        client.unfinished -= len(settled)
        node.clients.forget(client)
