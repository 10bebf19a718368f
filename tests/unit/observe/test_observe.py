"""A node in numbers, in spans and in a trace; and what it reports, without pickle."""

from __future__ import annotations

import builtins
import gc
import json
import re
import socket
from dataclasses import fields
from typing import Any
from urllib.request import urlopen

import pytest

import aiogpu
from aiogpu.core.model.ids import ClientId, LeaseId, TaskId, WorkerId
from aiogpu.core.model.request import Device, Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.core.records import TaskRecord, WorkerRecord
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.engines.server_info import pack_capacity, unpack_capacity
from aiogpu.errors import NodeStartError, ProtocolError
from aiogpu.observe.metrics import MetricsServer, Seen, amounts
from aiogpu.observe.recorder import Recorder, Span
from aiogpu.observe.status_codec import status_codec
from aiogpu.observe.trace import DEVICES, WORKERS, trace_of
from tests.support.gate import Gate, pass_gate


@aiogpu.remote(num_gpus=0.25)
def held(path: str) -> None:
    pass_gate(path, "held")


async def status_of(gate: Gate) -> Seen:
    """A node on which one task runs and one waits."""
    async with aiogpu.init(address="local", num_cpus=1, num_gpus=1):
        handles = [held.remote(gate.path) for _ in range(2)]
        await gate.entered("held")
        status = await aiogpu.status()
        for handle in handles:
            handle.cancel()
    return Seen(status, {"finished": 7, "failed": 1})


async def test_metrics_of_a_node(gate: Gate) -> None:
    found = await status_of(gate)
    told = {(one.name, *one.labels.values()): one.value for one in amounts(found)}
    assert told["aiogpu_resource_total", "GPU"] == 1
    assert told["aiogpu_resource_free", "GPU"] == 0.75
    assert told["aiogpu_tasks", "running"] == 1
    assert told["aiogpu_tasks_waiting",] == 1
    assert told["aiogpu_tasks_ended", "finished"] == 7
    assert told["aiogpu_device_free_share", "GPU", "0"] == 0.75
    assert told["aiogpu_device_aside", "GPU", "0"] == 0


async def test_metrics_are_served_on_this_machine_alone(gate: Gate) -> None:
    found = await status_of(gate)
    server = MetricsServer(0, lambda: found)
    try:
        assert server._server.server_address[0] == "127.0.0.1"
        with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    assert 'aiogpu_resource_free{resource="GPU"} 0.75' in text
    assert 'aiogpu_tasks_ended_total{outcome="finished"} 7.0' in text
    assert "# TYPE aiogpu_tasks gauge" in text


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(NodeStartError, match=f"127.0.0.1:{port}.*--metrics"):
            MetricsServer(port, lambda: Seen(None, {}))  # type: ignore[arg-type]


def test_without_prometheus_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fail(name: str, *rest: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(NodeStartError, match=r"pip install 'aiogpu\[metrics\]'"):
        MetricsServer(0, lambda: Seen(None, {}))  # type: ignore[arg-type]


# Spans


REQUEST = Request.of({"CPU": UNIT}, {"GPU": 2500})


SPEC = TaskSpec("embed", Shape(REQUEST))


def record(task: int, since: float = 0.0) -> TaskRecord:
    return TaskRecord(TaskId(task), SPEC, since, ClientId(5))


@pytest.fixture
def worker() -> WorkerRecord:
    lease = Lease(LeaseId(1), REQUEST, (((3, 2500),),), Ledger({}))
    return WorkerRecord(WorkerId(7), lease=lease)


def test_a_task_is_a_span(worker: WorkerRecord) -> None:
    recorder = Recorder()
    recorder.begin(7, 99, 2.0)
    recorder.end(worker, record(1, since=1.0), "failed", 4.0)
    (span,) = recorder.spans([worker], now=9.0, epoch=100.0)
    assert span == Span(
        *(1, "embed", 5, 7, 99, (("GPU", 3),), 101.0, 102.0, 104.0, "failed")
    )
    assert recorder.outcomes == {"failed": 1}


def test_a_task_sent_ahead_begins_after_the_one_before_it(
    worker: WorkerRecord,
) -> None:
    recorder = Recorder()
    recorder.begin(7, 99, 1.0)
    recorder.end(worker, record(1), "finished", 2.0, took=0.5)
    recorder.end(worker, record(2), "failed", 3.0)
    recorder.end(worker, record(3), "finished", 4.0, took=0.25)
    times = [(span.started, span.ended) for span in recorder.spans([], 9.0, 0.0)]
    assert times == [(1.5, 2.0), (2.0, 3.0), (3.75, 4.0)]


def test_a_running_task_is_a_span(worker: WorkerRecord) -> None:
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


def test_tasks_that_end_together_are_as_if_each_ended_alone(
    worker: WorkerRecord,
) -> None:
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


def test_no_worker_and_no_lease_is_kept_alive(worker: WorkerRecord) -> None:
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


def test_the_oldest_spans_are_dropped_first(worker: WorkerRecord) -> None:
    recorder = Recorder(most=5)
    for task in range(4):
        recorder.end(worker, record(task), "finished", float(task))
    for first in range(4, 12, 4):
        row = [record(task) for task in range(first, first + 4)]
        recorder.end_row(worker, row, [0.0] * 4, "finished", float(first))
    recorder.end(WorkerRecord(WorkerId(8)), record(12), "died", 40.0)
    *spans, last = recorder.spans([], 99.0, 0.0)
    assert [span.task for span in spans] == [8, 9, 10, 11]
    assert (last.devices, last.pid, last.started) == ((), 0, 40.0), "it had no lease"
    assert repr(recorder) == "<Recorder 5 spans>"
    assert recorder.outcomes == {"finished": 12, "died": 1}


# Traces


def span(task: int, worker: int, started: float, ended: float, *gpus: int) -> Span:
    devices = tuple(("GPU", gpu) for gpu in gpus)
    times = (started - 0.5, started, ended)
    return Span(task, f"work{task}", 5, worker, 99, devices, *times, "finished")


def rows(trace: dict[str, Any], group: int) -> dict[str, list[str]]:
    """The names of what is in each row, by the row's name."""
    names = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["pid"] == group and event["name"] == "thread_name"
    }
    found: dict[str, list[str]] = {name: [] for name in names.values()}
    for event in trace["traceEvents"]:
        if event["pid"] == group and event["ph"] == "X":
            found[names[event["tid"]]].append(event["name"])
    return found


def test_rows_of_devices_and_workers() -> None:
    trace = trace_of([span(2, 8, 3.0, 4.0), span(1, 7, 1.0, 2.0, 0, 1)])
    assert rows(trace, DEVICES) == {"GPU 0": ["work1"], "GPU 1": ["work1"]}
    assert rows(trace, WORKERS) == {"worker 7": ["work1"], "worker 8": ["work2"]}


def test_tasks_that_share_a_device_have_a_row_each() -> None:
    spans = [
        span(1, 7, 1.0, 3.0, 0),
        span(2, 8, 2.0, 4.0, 0),
        span(3, 7, 3.0, 5.0, 0),
        span(4, 9, 3.5, 5.0, 0),
    ]
    assert rows(trace_of(spans), DEVICES) == {
        "GPU 0": ["work1", "work3"],
        "GPU 0 (2)": ["work2"],
        "GPU 0 (3)": ["work4"],
    }


def test_what_a_trace_says_of_a_task() -> None:
    trace = json.loads(json.dumps(trace_of([span(1, 7, 1.0, 1.25, 0)])))
    event = next(event for event in trace["traceEvents"] if event["ph"] == "X")
    assert (event["ts"], event["dur"], event["cat"]) == (1e6, 250e3, "finished")
    assert event["args"] == {
        "task": 1,
        "client": 5,
        "worker": 7,
        "pid": 99,
        "waited": 0.5,
        "outcome": "finished",
        "devices": ["GPU 0"],
    }
    events = trace_of([])["traceEvents"]
    assert {event["ph"] for event in events} == {"M"}, "nothing has run"


# Reports


KNOWN = {one.__name__ for one in status_codec.classes}


PLAIN = {"Mapping", "None"}


@pytest.mark.parametrize("record", status_codec.classes)
def test_every_class_that_a_report_contains_is_known(record: type) -> None:
    told = " ".join(str(field.type) for field in fields(record))
    named = set(re.findall(r"\b[A-Z]\w+", told))
    assert named - PLAIN <= KNOWN


def test_a_ledger_arrives_whole() -> None:
    gpus = [
        Device(0, "A100", "GPU-1", "NVIDIA A100", 80 << 30, (8, 0), "0:3B:00.0"),
        Device("MIG-2", links=frozenset({"GPU-1", "GPU-3"}), parent="GPU-1"),
    ]
    ledger = Ledger({"CPU": 40_000, "license": 1}, [DeviceSet("GPU", gpus)])
    policies = {"mps": "off", "spare_workers": 2, "memory_guard": True}
    told, how = unpack_capacity(pack_capacity(ledger, policies))
    assert how == policies
    assert told.capacity == ledger.capacity
    assert told.device_sets["GPU"].devices == tuple(gpus)
    assert told.totals() == ledger.totals()


@pytest.mark.parametrize(
    "told", [(), ({"CPU": "4"}, (), {}), ({}, (("GPU", ((),)),), {})]
)
def test_what_is_no_capacity_is_refused(told: tuple[object, ...]) -> None:
    with pytest.raises(ProtocolError):
        unpack_capacity(status_codec.dump(told))
