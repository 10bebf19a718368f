"""Matches what waits with what is free.

One function looks at all that is ready and takes leases for what fits, in order
of priority and submission. A task that does not fit holds up those of its own
shape only, as in Ray; other shapes go past it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

from aiogpu.core.ledger import Lease, Ledger
from aiogpu.core.ready import Bucket, Precedence, ReadyQueue, precedence
from aiogpu.core.records import TaskRecord


def place(ready: ReadyQueue, ledger: Ledger) -> list[tuple[TaskRecord, Lease]]:
    """Take tasks from the queue, each with its lease, until nothing more fits."""
    turns: list[tuple[Precedence, TaskRecord, Bucket]] = []
    for bucket in ready.buckets():
        head = bucket.head()
        assert head is not None, bucket
        turns.append((precedence(head), head, bucket))
    heapify(turns)
    placed: list[tuple[TaskRecord, Lease]] = []
    while turns:
        _, record, bucket = turns[0]
        lease = ledger.take(bucket.shape.request)
        if lease is None:
            heappop(turns)
            continue
        placed.append((record, lease))
        bucket.pop()
        head = bucket.head()
        if head is None:
            ready.drop(bucket)
            heappop(turns)
        else:
            heapreplace(turns, (precedence(head), head, bucket))
    return placed
