"""The figures of the field, and the workloads of each system."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from benchmarks.field.process import FLOOR, FailedError, LateError, SystemProcess
from benchmarks.field.results import Ratio, conclusion, details, lines, overview
from benchmarks.field.run import QUICK, Entry, Run
from benchmarks.field.systems import NEEDS, UnsupportedError, missing
from benchmarks.field.workloads import WORKLOADS
from benchmarks.processes import descendants

CALLS = {"call", "gathered", "argument-1KB", "argument-100KB"}
CALLS |= {"argument-10MB", "argument-100MB", "start", "waiting"}
ACTORS = {"actor-call", "actor-gathered"}
CLAIMS = {
    "aiogpu": set(WORKLOADS),
    "node": set(WORKLOADS),
    "executor": CALLS | {"fresh-bare", "fresh-numpy", "fresh-torch"},
    "loky": CALLS,
    "dask": CALLS | ACTORS | {"passing-1KB", "passing-100MB", "day"},
    "xoscar": CALLS | ACTORS | {"stream"},
    "ray": set(WORKLOADS),
}


def systems() -> Iterator[Any]:
    yield pytest.param("executor", ["call", "argument-1KB", "stream"], id="daily")
    for name in CLAIMS:
        marks = [pytest.mark.slow, pytest.mark.skipif(bool(missing(name)), reason=name)]
        marks += [pytest.mark.ray] * (name == "ray")
        yield pytest.param(name, list(WORKLOADS), marks=marks, id=name)


@pytest.mark.parametrize(("name", "asked"), list(systems()))
def test_a_system_runs_its_workloads_and_leaves_nothing(name, asked):
    before, reports = descendants(), []
    run = Run([FLOOR, name], QUICK)
    run.run(asked, reports.append)
    assert len(reports) == len(asked)
    assert not descendants().keys() - before.keys()
    for entry in run.entries:
        workload, where = WORKLOADS[entry.workload], (entry.workload, entry.system)
        if workload.needs and find_spec(workload.needs) is None:
            assert entry.why == f"{workload.needs} is not installed", where
        elif entry.system == FLOOR or entry.workload in CLAIMS[name]:
            assert not entry.why, (where, entry.why)
            (figures,) = entry.turns
            assert len(figures) == len(workload.metrics)
            assert all(value >= 0 for each in figures for value in each)
        else:
            assert entry.why.startswith("not supported: "), (where, entry.why)


FAILING = """
import os, subprocess, sys, time
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[2]))
while True:
    method, _ = connection.recv()
    if method == "prepare":
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        if not os.fork():
            os.setsid()
            if not os.fork():
                time.sleep(600)
            os._exit(0)
        os.wait()
        while time.process_time() < 0.05:
            pass  # the kernel counts in ticks of 10 ms
        connection.send(("answer", {}))
    elif sys.argv[1] == "hangs":
        time.sleep(600)
    elif sys.argv[1] == "dies":
        print("these are its last words", file=sys.stderr)
        raise SystemExit(1)
    else:
        connection.send((sys.argv[1], "the reason"))
"""


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("hangs", LateError, "no answer within 0.5 s"),
        ("dies", FailedError, "its program ended: these are its last words"),
        ("failed", FailedError, "the reason"),
        ("unsupported", UnsupportedError, "the reason"),
        ("runner dies", None, ""),
    ],
)
def test_a_failing_system_leaves_no_process(how, error, words):
    before = set(descendants())
    system = SystemProcess(how, ("-c", FAILING))
    system.start()
    try:
        system.request(60, "prepare", "call")
        assert len(set(descendants()) - before) >= 4, (
            "processes with their own sessions count"
        )
        assert system.cpu_time() > 0
        if error is None:  # the runner's end of the pipe closes
            system.reaper.stdin.close()
            system.reaper.wait(60)
        else:
            with pytest.raises(error, match=words):
                system.request(0.5 if how == "hangs" else 60, "block", None)
    finally:
        system.stop()
    assert not set(descendants()) - before


def entry(system: str, *turns: float, why: str = "") -> Any:
    return Entry("call", system, [[[turn]] for turn in turns], ["a note"], why)


RUN = [
    entry(FLOOR, 10e-6, 20e-6, 10e-6),
    entry("aiogpu", 20e-6, 40e-6, 30e-6),
    entry("node", 40e-6, 80e-6, 60e-6),
    entry("executor", 40e-6, 120e-6, 60e-6),
    entry("loky", 10e-6, 80e-6, 30e-6),
    entry("xoscar", 10e-6, 20e-6, 20e-6),
    entry("dask", 20e-3, 40e-3, 30e-3),
    entry("ray", why="not supported: a | in its reason"),
]


def test_ratios_are_of_blocks_of_the_same_turn():
    (calls,) = lines(RUN)
    by_system = {line.entry.system: line for line in calls}
    assert by_system["aiogpu"].beside_floor == Ratio(2, 2, 2.5)
    assert by_system["executor"].beside_ours == Ratio(2, 2, 2.5)
    assert by_system["dask"].beside_ours == Ratio(*[pytest.approx(1000)] * 3)
    assert (by_system["aiogpu"].p50, by_system["aiogpu"].p99) == (30e-6, 40e-6)
    assert by_system["ray"].p50 is by_system["ray"].beside_ours is None
    ((_, short),) = lines([entry(FLOOR, 10, 10, 10), entry("aiogpu", 20)])
    assert short.beside_floor == Ratio(2, 2, 2)


def test_the_conclusion_counts_peers_and_lists_losses():
    text = conclusion(lines(RUN))
    assert text.startswith("Of 4 comparisons")
    assert "order of magnitude) in 1, a half or less in 1 more, less in 0 more" in text
    assert "equal (the quartiles lie on both sides) in 1, and needs more in 1." in text
    assert "- a call, awaited: xoscar needs 20 µs, 0.5 (0.5 to 0.583)" in text
    assert "No peer" in conclusion(lines(RUN[:3]))
    text = overview(lines(RUN))
    assert "| 10 µs | 30 µs | 60 µs (**2**) |" in text
    assert "| 30 ms (**1,000**) | - |" in text
    text = details(lines(RUN))
    assert "| ray |  |  |  |  | 0 | not supported: a / in its reason |" in text
    assert "| call | a blocking worker" in text


def test_metrics_are_unique_and_all_systems_have_claims():
    titles = [metric.title for each in WORKLOADS.values() for metric in each.metrics]
    assert len(titles) == len(set(titles))
    assert set(CLAIMS) == set(NEEDS)
