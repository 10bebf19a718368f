"""How a task ends that has a family, was stopped, or may be tried again."""

from __future__ import annotations

from aiogpu.core.effects import Effect, Forget, Settle
from aiogpu.core.family import part
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.node import Node
from aiogpu.core.records import TaskRecord
from aiogpu.core.retry import may_retry
from aiogpu.core.retry import retry as retry_later


def end_specially(
    node: Node,
    record: TaskRecord,
    retry: bool,
    now: float,
    effects: list[Effect],
) -> None:
    """End a task that is not of the commonest kind, or try it again."""
    was_wanted = record.state is not TaskState.STOPPING
    if was_wanted and retry and not node.is_closing and may_retry(record):
        retry_later(node, record, now)
    else:
        node.end(record)
        effects.append(Settle(record.id) if was_wanted else Forget(record.id))
    if record.kin is not None:
        part(node, record, now, effects)
