"""What `status()` and `why()` show of a node without processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from aiogpu.core.model.ids import OWN, TaskId, WorkerId
from aiogpu.core.records import TaskState, WorkerRecord, WorkerState
from aiogpu.engines.inline.job import Job
from aiogpu.engines.inline.node import InlineNode
from aiogpu.observe.snapshot import LISTED, picture
from aiogpu.observe.status import Holdings, NodeStatus, Queue, ShapeStatus, shape_status
from aiogpu.observe.why import Why, awaited_gang, find_shortages, tell_lacks
from aiogpu.runtime.actors.actor import Actor


def picture_inline(node: InlineNode, now: float) -> NodeStatus:
    """Picture the node: all that run and all actors have workers, this process each.

    One worker is there also when nothing runs.
    """
    turns, leases = node.turns, node.leases
    workers = node.workers or [WorkerRecord(WorkerId(1), state=WorkerState.IDLE)]
    queue = Queue(
        count=sum(len(jobs) for jobs in turns.by_shape.values()) + len(leases.waiting),
        first=[
            *(
                (job.record, _reason(node, job, before))
                for before, job in enumerate(islice(turns, LISTED))
            ),
            *((record, tell_lacks(node, record)) for record in leases.waiting),
        ],
        shapes=[
            _shape(jobs, node, now) for jobs in islice(turns.by_shape.values(), LISTED)
        ],
        shape_count=len(turns.by_shape),
        placements=leases.placements_seen(),
    )
    pids = {int(worker.id): os.getpid() for worker in workers} | leases.pids
    seen = picture(node.ledger, workers, queue, pids, now, granted=leases.granted)

    def place_of(actor: Actor) -> tuple[int, int] | None:
        life = node.actors.life(actor.id)
        if life is None or actor.worker is None:
            return None
        return life.worker_id, os.getpid()

    actors = node.actors.listed(place_of, lambda _: OWN)
    return replace(seen, actors=actors)


def _reason(node: InlineNode, job: Job, before: int) -> str:
    if placement := awaited_gang(node, job.record):
        return f"waits for {placement}, its placement"
    lacks = tell_lacks(node, job.record) if _may_lack(node, job) else ""
    return lacks or f"waits for its turn: {before} before it"


def _may_lack(node: InlineNode, job: Job) -> bool:
    """Return whether it waits for what others hold; others wait for those that run."""
    return job.is_urgent or not node.turns.running


def _shape(jobs: Mapping[TaskId, Job], node: InlineNode, now: float) -> ShapeStatus:
    first = next(iter(jobs.values()))
    reason = _reason(node, first, node.turns.position(first))
    return shape_status(first.record, len(jobs), now - first.record.since, reason)


def why_inline(node: InlineNode, task: int, now: float) -> Why | None:
    """Say what a task waits for, or that it runs; None if it has ended."""
    leased = node.leases.why(TaskId(task), _holdings(node, now))
    if leased is not None:
        return leased
    turns, job = node.turns, node.jobs.get(TaskId(task))
    actor = node.actors.life(task)
    record = job.record if job else actor.record if actor else None
    if record is None:
        return None
    waits = job is not None and record.state is TaskState.WAITING
    if job is not None and waits and _may_lack(node, job):
        why = _why_lacking(node, job, now)
        if why.reasons or why.placement:
            return why
    return Why(
        name=record.spec.name,
        task=task,
        state=record.state.value,
        seconds=now - record.since,
        request=record.spec.shape.request.as_numbers(),
        position=turns.position(job) + 1 if waits and job else None,
        of=sum(len(jobs) for jobs in turns.by_shape.values()) if waits else 0,
        worker=record.worker.id if record.worker else None,
        pid=0 if waits else os.getpid(),
    )


def _holdings(node: InlineNode, now: float) -> Holdings:
    workers, leases = node.workers, node.leases
    pids = {int(worker.id): os.getpid() for worker in workers} | leases.pids
    return Holdings([*workers, *leases.granted.values()], pids, now)


def _why_lacking(node: InlineNode, job: Job, now: float) -> Why:
    """Say what of the resources that it asks for others hold."""
    record = job.record
    alike = list(node.turns.by_shape[record.spec.shape])
    return Why(
        name=job.name,
        task=job.id,
        state=record.state.value,
        seconds=now - record.since,
        request=record.spec.shape.request.as_numbers(),
        where=str(record.spec.shape.request.where or ""),
        position=alike.index(job.id) + 1,
        of=len(alike),
        reasons=tuple(find_shortages(node, record, _holdings(node, now))),
        is_held_endlessly=not node.turns.running,
        placement=awaited_gang(node, record),
    )
