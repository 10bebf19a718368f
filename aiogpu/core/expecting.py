"""Tasks whose arguments are results of others that are not there yet.

They stand in no queue and hold nothing. Who has the values says when all are there,
or ends the task because one never will be.
"""

from __future__ import annotations

from collections.abc import Iterator

from aiogpu.core.ids import TaskId
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.node import Node
from aiogpu.core.records import TaskRecord, move_task


def expect(node: Node, record: TaskRecord, needs: tuple[TaskId, ...]) -> None:
    """Set a new task aside until its arguments are there."""
    move_task(record, TaskState.EXPECTING)
    node.expecting[record.id] = needs


def supply(node: Node, task: TaskId) -> bool:
    """All arguments are there: the task waits with the others, if it still is."""
    if node.expecting.pop(task, None) is None:
        return False
    record = node.tasks[task]
    move_task(record, TaskState.WAITING)
    node.ready.push_back(record)
    return True


def awaited_results(node: Node, record: TaskRecord) -> list[TaskRecord]:
    """The unfinished tasks whose results a task expects."""
    found = map(node.tasks.get, node.expecting.get(record.id, ()))
    return [need for need in found if need is not None]


def with_expected(node: Node, records: Iterator[TaskRecord]) -> Iterator[TaskRecord]:
    """Tasks, and those whose results they expect, and so on; each once."""
    seen: set[TaskId] = set()
    line = list(records)
    while line:
        record = line.pop()
        if record.id not in seen:
            seen.add(record.id)
            yield record
            line += awaited_results(node, record)
