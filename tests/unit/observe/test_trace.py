"""Spans as Perfetto opens them."""

from __future__ import annotations

import json
from typing import Any

from aiogpu.observe.recorder import Span
from aiogpu.observe.trace import DEVICES, WORKERS, trace_of


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


def test_those_that_share_a_device_have_a_row_each() -> None:
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


def test_what_is_told_of_each() -> None:
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


def test_nothing_has_run() -> None:
    events = trace_of([])["traceEvents"]
    assert {event["ph"] for event in events} == {"M"}
