"""What is kept of what has run."""

from __future__ import annotations

import gc

import pytest

from aiogpu.core.model.ids import ClientId, LeaseId, TaskId, WorkerId
from aiogpu.core.model.request import Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.observe.recorder import Recorder, Span

REQUEST = Request.of({"CPU": UNIT}, {"GPU": 2500})
SPEC = TaskSpec("embed", Shape(REQUEST))


def record(task: int, since: float = 0.0) -> TaskRecord:
    return TaskRecord(TaskId(task), SPEC, since, ClientId(5))


@pytest.fixture
def worker() -> WorkerRecord:
    lease = Lease(LeaseId(1), REQUEST, (((3, 2500),),), Ledger({}))
    return WorkerRecord(WorkerId(7), lease=lease)


def test_a_task_from_begin_to_end(worker: WorkerRecord) -> None:
    recorder = Recorder()
    recorder.begin(7, 99, 2.0)
    recorder.end(worker, record(1, since=1.0), "failed", 4.0)
    (span,) = recorder.spans([worker], now=9.0, epoch=100.0)
    assert span == Span(
        *(1, "embed", 5, 7, 99, (("GPU", 3),), 101.0, 102.0, 104.0, "failed")
    )
    assert recorder.outcomes == {"failed": 1}


def test_what_was_sent_ahead_begins_after_what_was_before_it(
    worker: WorkerRecord,
) -> None:
    recorder = Recorder()
    recorder.begin(7, 99, 1.0)
    recorder.end(worker, record(1), "finished", 2.0, took=0.5)
    recorder.end(worker, record(2), "failed", 3.0)
    recorder.end(worker, record(3), "finished", 4.0, took=0.25)
    times = [(span.started, span.ended) for span in recorder.spans([], 9.0, 0.0)]
    assert times == [(1.5, 2.0), (2.0, 3.0), (3.75, 4.0)]


def test_what_runs_is_told_as_running(worker: WorkerRecord) -> None:
    recorder = Recorder()
    idle = WorkerRecord(WorkerId(8))
    worker.task = record(1)
    assert recorder.spans([worker, idle], 9.0, 0.0) == [], "it was not seen to begin"
    recorder.begin(7, 99, 2.0)
    (span,) = recorder.spans([worker, idle], 9.0, 0.0)
    assert (span.started, span.ended, span.outcome) == (2.0, 9.0, "running")
    recorder.forget(7)
    recorder.forget(7)
    assert recorder.spans([worker], 9.0, 0.0) == []


def test_without_a_lease_there_is_no_device() -> None:
    recorder = Recorder()
    recorder.end(WorkerRecord(WorkerId(8)), record(1), "died", 4.0)
    (span,) = recorder.spans([], 9.0, 0.0)
    assert (span.devices, span.pid, span.started) == ((), 0, 4.0)


def test_the_oldest_go(worker: WorkerRecord) -> None:
    recorder = Recorder(most=3)
    for task in range(10):
        recorder.end(worker, record(task), "finished", float(task))
    assert [span.task for span in recorder.spans([], 99.0, 0.0)] == [7, 8, 9]
    assert recorder.outcomes["finished"] == 10


def test_a_row_is_as_if_each_were_told_by_itself(worker: WorkerRecord) -> None:
    rows, singles = Recorder(), Recorder()
    records = [record(task, since=task / 8) for task in range(3)]
    took = [0.25, 0.5, 0.75]
    for recorder in (rows, singles):
        recorder.begin(7, 99, 1.0)
    rows.end_row(worker, records, took, "finished", 4.0)
    for one, seconds in zip(records, took, strict=True):
        singles.end(worker, one, "finished", 4.0, seconds)
    for recorder in (rows, singles):
        recorder.end(worker, record(9), "failed", 5.0)
    assert rows.spans([], 9.0, 100.0) == singles.spans([], 9.0, 100.0)
    assert rows.outcomes == singles.outcomes == {"finished": 3, "failed": 1}
    unseen = Recorder()
    unseen.end_row(worker, records, took, "finished", 4.0)
    assert {span.pid for span in unseen.spans([], 9.0, 0.0)} == {0}


def test_the_oldest_of_a_row_go_first(worker: WorkerRecord) -> None:
    recorder = Recorder(most=5)
    for first in range(0, 12, 4):
        row = [record(task) for task in range(first, first + 4)]
        recorder.end_row(worker, row, [0.0] * 4, "finished", float(first))
    assert [span.task for span in recorder.spans([], 99.0, 0.0)] == [7, 8, 9, 10, 11]
    assert repr(recorder) == "<Recorder 5 spans>"
    assert recorder.outcomes["finished"] == 12


def test_nobody_is_kept_by_what_he_has_run(worker: WorkerRecord) -> None:
    assert worker.lease is not None
    worker.lease.holder = worker
    recorder = Recorder()
    recorder.end(worker, record(1), "failed", 4.0)
    recorder.end_row(worker, [record(2)], [1.0], "finished", 5.0)
    reached: dict[int, object] = {}
    ahead: list[object] = [recorder]
    while ahead:
        one = ahead.pop()
        if id(one) not in reached and not isinstance(one, type):
            reached[id(one)] = one
            ahead += gc.get_referents(one)
    kept = [one for one in reached.values() if isinstance(one, WorkerRecord | Lease)]
    assert kept == []
    assert all(span.devices == (("GPU", 3),) for span in recorder.spans([], 9.0, 0.0))
