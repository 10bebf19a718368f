"""How a task ends that has a family, was stopped, or may be tried again."""

from __future__ import annotations

from typing import NamedTuple

from aiogpu.core.effects import Effect, Forget, Settle
from aiogpu.core.family import part
from aiogpu.core.lifecycle import TaskState
from aiogpu.core.node import Node
from aiogpu.core.records import TaskRecord
from aiogpu.core.retry import may_retry
from aiogpu.core.retry import retry as retry_later


class Failure(NamedTuple):
    """What an answer says of how its task has failed, if it has.

    Attributes:
        retry: by an exception for which it is to be tried again.
        ran_out: for want of device memory.
    """

    retry: bool
    ran_out: bool


def end_specially(
    node: Node,
    record: TaskRecord,
    failure: Failure,
    now: float,
    effects: list[Effect],
) -> None:
    """End a task that is not of the commonest kind, or try it again."""
    was_wanted = record.state is not TaskState.STOPPING
    may_go_on = was_wanted and not node.is_closing
    if may_go_on and failure.ran_out and _goes_alone(node, record):
        pass
    elif may_go_on and failure.retry and may_retry(record):
        retry_later(node, record, now)
    else:
        node.end(record)
        effects.append(Settle(record.id) if was_wanted else Forget(record.id))
    if record.kin is not None:
        part(node, record, now, effects)


def _goes_alone(node: Node, record: TaskRecord) -> bool:
    """Whether what ran out of device memory gets devices of its own now."""
    from aiogpu.core.exclusive import try_exclusively  # few ask for it

    return try_exclusively(node, record)
