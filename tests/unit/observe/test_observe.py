"""Metrics, history, traces, and the encoding of reports."""

from __future__ import annotations

import builtins
import json
import re
import socket
from dataclasses import fields, replace
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
from aiogpu.errors import NodeStartError
from aiogpu.observe.metrics import MetricsServer, Seen, amounts
from aiogpu.observe.status import EndedTask
from aiogpu.observe.status_codec import status_codec
from aiogpu.observe.trace import DEVICES, Span, trace_of
from aiogpu.runtime.history import LONGEST, LONGEST_TRACE, FailureReason, History
from aiogpu.wire.messages import ProtocolError
from tests.support.gate import Gate, pass_gate


@aiogpu.remote(num_gpus=0.25)
def held(path: str) -> None:
    pass_gate(path, "held")


async def status_of(gate: Gate) -> Seen:
    """Return the data of a node where one task runs and one waits."""
    async with aiogpu.init(address="local", num_cpus=1, num_gpus=1):
        handles = [held.remote(gate.path) for _ in range(2)]
        await gate.entered("held")
        status = await aiogpu.status()
        for handle in handles:
            handle.cancel()
    status = replace(status, evictions=3, reloads=2)
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


async def test_metrics_are_served_only_on_this_machine(gate: Gate) -> None:
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
    assert "# TYPE aiogpu_actor_evictions_total counter" in text
    assert "aiogpu_actor_evictions_total 3.0" in text
    assert "aiogpu_actor_reloads_total 2.0" in text


def test_metrics_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(NodeStartError, match=f"127.0.0.1:{port}.*--metrics"):
            MetricsServer(port, lambda: Seen(None, {}))  # type: ignore[arg-type]


def test_missing_prometheus_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fail(name: str, *rest: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(NodeStartError, match=r"pip install 'aiogpu\[metrics\]'"):
        MetricsServer(0, lambda: Seen(None, {}))  # type: ignore[arg-type]


# Tasks that have ended


REQUEST = Request.of({"CPU": UNIT}, {"GPU": 2500})


SPEC = TaskSpec("embed", Shape(REQUEST))


LEASE = Lease(LeaseId(1), REQUEST, (((3, 2500),),), Ledger({}))


FAILURE = FailureReason.of("ValueError", "no such key\nat all", "Traceback: ...")


def record(task: int, since: float = 0.0) -> TaskRecord:
    return TaskRecord(TaskId(task), SPEC, since, ClientId(5))


@pytest.fixture
def history() -> History:
    """A history of five tasks, with a worker on GPU 3 that started at 2."""
    history = History(most=5)
    history.occupy(7, 99, LEASE)
    history.sites[7].began = 2.0
    return history


def end(
    history: History, task: int, outcome: str, now: float, *failure: FailureReason
) -> None:
    history.add(task, SPEC, 5, history.sites[7], 1.0, now, outcome, *failure)


def test_ended_task_has_a_span_and_a_history_entry(history: History) -> None:
    end(history, 1, "failed", 4.0, FAILURE)
    (span,) = history.spans([], now=9.0, epoch=100.0)
    assert span == Span(
        *(1, "embed", 5, 7, 99, (("GPU", 3),), 101.0, 102.0, 104.0, "failed")
    )
    assert history.outcomes == {"failed": 1}
    ended = EndedTask(
        *(1, "embed", "ValueError", "no such key", 5.0, 5, "failed", 1.0, 2.0),
        *(7, 99, (("GPU", 3),), {"CPU": 1.0, "GPU": 0.25}),
    )
    assert history.ended(9.0) == history.failures(9.0) == (ended,)
    assert history.find(1, 9.0) == replace(ended, traceback="Traceback: ...")
    assert history.find(2, 9.0) is None


def test_running_task_has_a_span_only(history: History) -> None:
    worker, unknown = WorkerRecord(WorkerId(7)), WorkerRecord(WorkerId(8))
    worker.task = unknown.task = record(1)
    (span,) = history.spans([worker, unknown], 9.0, 0.0)
    assert (span.started, span.ended, span.outcome) == (2.0, 9.0, "running")
    assert history.ended(9.0) == ()


def test_retried_attempt_has_a_span_only(
    history: History,
) -> None:
    for outcome in ("retried", "died"):
        end(history, 1, outcome, 3.0)
    assert [span.outcome for span in history.spans([], 9.0, 0.0)] == ["retried", "died"]
    assert history.ended(9.0) == ()
    assert history.find(1, 9.0) is None
    end(history, 1, "died", 4.0, FAILURE)
    assert [task.state for task in history.ended(9.0)] == ["failed"]


def test_cancelled_task_is_not_a_failure(
    history: History,
) -> None:
    history.add(1, SPEC, 5, history.sites[0], 1.0, 4.0, "cancelled", FAILURE)
    (ended,) = history.ended(5.0)
    assert (ended.ran, ended.waited, ended.worker, ended.pid) == (None, 3.0, None, 0)
    assert history.failures(5.0) == ()


def test_oldest_history_entries_are_dropped_first(history: History) -> None:
    for task in range(4):
        end(history, task, "failed", float(task), FAILURE)
    for first in range(4, 12, 4):
        row = [record(task) for task in range(first, first + 4)]
        history.add_row(7, row, [0] * 4, float(first))
    end(history, 12, "cancelled", 40.0)
    assert [task.task for task in history.ended(99.0)] == [12, 11, 10, 9, 8]
    assert history.outcomes == {"failed": 4, "finished": 8, "cancelled": 1}


def test_long_texts_are_cut_and_displace_older_entries() -> None:
    long = FailureReason.of("E", "x" * 999, "a" * 50_000 + "b" * 50_000)
    assert len(long.message) == LONGEST
    assert len(long.traceback) < LONGEST_TRACE + 100
    assert long.traceback.startswith("aaa")
    assert "83616 characters are left out" in long.traceback
    assert long.traceback.endswith("bbb")
    history = History(room=8 * long.size)
    for task in range(9):
        end(history, task, "failed", float(task), long)
    assert [task.task for task in history.ended(9.0)] == [8, 7, 6, 5, 4, 3, 2]


def test_history_size_is_bounded(
    history: History,
) -> None:
    task = 0
    for size in (1, 3, 2, 9, 1, 1, 4) * 20:
        row = [record(task + number) for number in range(size)]
        history.add_row(7, row, [0] * size, float(task))
        task += size
        end(history, task, "failed", float(task), FAILURE)
        task += 1
        assert [one.task for one in history.ended(9.0)] == [
            task - number for number in range(1, min(task, 5) + 1)
        ]
        held = sum(len(getattr(one, "tasks", "1")) for one in history.ring)
        assert held <= 2 * 5 + 9 + 5


# Traces


def span(task: int, worker: int, started: float, ended: float, *gpus: int) -> Span:
    devices = tuple(("GPU", gpu) for gpu in gpus)
    times = (started - 0.5, started, ended)
    return Span(task, f"work{task}", 5, worker, 99, devices, *times, "finished")


def rows(trace: dict[str, Any], group: int) -> dict[str, list[str]]:
    """Return the names of the spans in each row, by row name."""
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


def test_tasks_that_share_a_device_have_separate_rows() -> None:
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


def test_trace_event_describes_a_task() -> None:
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
def test_status_codec_knows_every_class(record: type) -> None:
    told = " ".join(str(field.type) for field in fields(record))
    named = set(re.findall(r"\b[A-Z]\w+", told))
    assert named - PLAIN <= KNOWN


def test_ledger_info_round_trips() -> None:
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
def test_invalid_ledger_info_is_refused(told: tuple[object, ...]) -> None:
    with pytest.raises(ProtocolError):
        unpack_capacity(status_codec.dump(told))
