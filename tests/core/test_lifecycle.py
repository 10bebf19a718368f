"""The two tables: complete, connected, and with one way out."""

import pytest

from aiogpu.core.records import TASK_LEADS_TO, WORKER_LEADS_TO, TaskState, WorkerState

MACHINES = [
    pytest.param(TASK_LEADS_TO, TaskState.WAITING, TaskState.ENDED, id="task"),
    pytest.param(WORKER_LEADS_TO, WorkerState.STARTING, WorkerState.GONE, id="worker"),
]


@pytest.mark.parametrize(("table", "first", "last"), MACHINES)
def test_every_state_has_a_row_and_can_be_reached(table, first, last):
    reached = {first}
    for _ in table:
        reached |= {after for before in reached for after in table[before]}
    assert reached == set(table) == set(type(first))


@pytest.mark.parametrize(("table", "first", "last"), MACHINES)
def test_only_the_last_state_leads_nowhere(table, first, last):
    assert [state for state, after in table.items() if not after] == [last]


@pytest.mark.parametrize(("table", "first", "last"), MACHINES)
def test_the_end_can_be_reached_from_everywhere_else_at_once(table, first, last):
    assert all(last in after for state, after in table.items() if state is not last)


def test_a_task_that_is_being_stopped_never_runs_again():
    assert TASK_LEADS_TO[TaskState.STOPPING] == (TaskState.ENDED,)
