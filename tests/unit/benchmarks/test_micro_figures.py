"""Figures of the micro benchmarks are right: statistics, verdicts, floors, the runs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import cloudpickle
import pytest

import aiogpu
from benchmarks import tasks
from benchmarks.floors import (
    first_core,
    open_floor,
    open_floor_apart,
    pinned_to,
    second_core,
)
from benchmarks.forks import zygote_image
from benchmarks.micro import backlog
from benchmarks.micro.__main__ import BENCHMARKS
from benchmarks.micro.isolation import in_script
from benchmarks.micro.rows import Goal, rates, times
from benchmarks.processes import descendants
from benchmarks.report import keep_run
from benchmarks.timing import Pair, rotate
from tests.support.program import environment

ROOT = Path(__file__).parents[3]
MS = 1_000_000


def run(file: Path, *names: str) -> dict:
    words = ["-m", "benchmarks.micro", "--quick", "--json", str(file), *names]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    _, columns, *lines, ending = done.stdout.splitlines()
    assert columns.split()[-4:] == ["ratio", "note", "goal", "verdict"]
    assert len(lines) == len(rows)
    assert " after." in ending
    return rows


def test_a_quick_run_keeps_all_samples_and_judges_nothing(tmp_path):
    rows = run(tmp_path / "new" / "run.json", "start", "spaced")
    assert rows["start: asyncio in worker"]["p50"] == 0
    for row in rows.values():
        assert "makes too few calls" in row["verdict"]
    spaced = rows["spaced: beside reused, as spaced"]
    for samples in ("samples", "floor_samples"):
        assert [len(block) for block in spaced[samples]] == [4]


@pytest.mark.slow
def test_all_benchmarks_run_to_the_end(tmp_path):
    rows = run(tmp_path / "run.json")
    found = [name.partition(":")[0] for name in rows]
    assert list(dict.fromkeys(found)) == list(BENCHMARKS)
    missing = {row["verdict"] for row in rows.values() if row["p50"] is None}
    assert missing == {
        f"not measured: {library} is not installed"
        for library in ("numpy", "torch", "ray")
        if find_spec(library) is None
    }


UNEVEN = Pair([[10_000], [20_000], [10_000]], [[20_000], [80_000], [100_000]])


def test_the_figure_is_the_median_of_the_ratios_of_blocks():
    row = times("x", "us", UNEVEN, Goal(4, "x floor"), "y")
    assert (row.p50, row.p99, row.floor, row.ratio) == (80, 100, 10, 4)
    assert (row.note, UNEVEN.added) == ("blocks 2.00 to 10.00; y", 60_000)
    row = rates("x", "calls/s", UNEVEN, 1, Goal(0.25, "x floor", is_least=True))
    assert (row.p50, row.floor, row.ratio) == (12_500, 100_000, 0.25)
    assert row.note == "blocks 0.10 to 0.50"


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (times("x", "us", UNEVEN, Goal(4, "x")), "met"),
        (times("x", "us", UNEVEN, Goal(3.9, "x")), "not met"),
        (times("x", "us", UNEVEN), "no goal"),
        (times("x", "us", UNEVEN, fault="why"), "INVALID: why"),
        (rates("x", "", UNEVEN, 1, Goal(0.26, "x", is_least=True)), "not met"),
        (rates("x", "", UNEVEN, 1, Goal(1e4, "/s", True), absolute=True), "met"),
        (
            rates("x", "", UNEVEN, 1, None, lowest=200_000),
            "INVALID: the floor is below 200 k/s; the machine is busy",
        ),
    ],
)
def test_a_figure_is_held_against_its_goal(row, verdict):
    assert row.verdict(is_quick=False) == row.cells(is_quick=False)[-1] == verdict


async def test_all_take_turns_after_a_warm_up():
    story = []

    async def block(name):
        story.append(name)
        return [len(story)]

    runs = [lambda name=name: block(name) for name in "abc"]
    assert await rotate(runs, 2) == [[[4], [7]], [[5], [8]], [[6], [9]]]
    assert "".join(story) == "abcabcabc"


@pytest.mark.parametrize("part", ["micro", "field", "simulation"])
def test_a_page_is_filled_between_its_marks(tmp_path, part):
    page = tmp_path / "page.md"
    before = (ROOT / f"benchmarks/results/{part}.md").read_text()
    page.write_text(before)
    for _ in range(2):
        keep_run(page, "the new figures", {}, None, keep=True)
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == (before.splitlines()[0], before.splitlines()[-1])
    assert lines.count("the new figures") == 1
    page.write_text("above <!-- figures: begin -->\n")
    with pytest.raises(ValueError, match="figures: end"):
        keep_run(page, "", {}, None, keep=True)


def running(kind):
    """The processes below this one that run a floor of a kind."""
    pids = set()
    for pid in descendants():
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        if b"benchmarks.floors" in words and kind.encode() in words:
            pids.add(pid)
    return pids


@pytest.mark.either_loop
@pytest.mark.parametrize("kind", ["blocking", "coroutine", "relay"])
async def test_a_floor_is_another_process_that_answers_every_call(kind):
    async with open_floor(kind) as floor:
        answers = await asyncio.gather(*map(floor.call, range(100)))
        assert answers == [None] * 100
        assert running(kind)
    assert not running(kind)


@pytest.mark.either_loop
async def test_the_floors_worker_has_a_core_of_its_own():
    before = os.sched_getaffinity(0)
    first, second = first_core(), second_core()
    async with open_floor_apart() as floor:
        assert await floor.call(1) is None
        (pid,) = running("blocking")
        assert os.sched_getaffinity(pid) == second
        assert os.sched_getaffinity(0) == first
    assert os.sched_getaffinity(0) == before
    with pytest.raises(ZeroDivisionError), pinned_to(second):
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == before


def facts(number):
    """The modules of this process, and the kilobytes that are its own or a parent's."""
    import sys

    with open("/proc/self/smaps_rollup") as file:
        (line,) = [line for line in file if line.startswith("Anonymous:")]
    return sorted(sys.modules), int(line.split()[1])


OWN = {"json", "json.decoder", "json.encoder", "json.scanner", "_json"}
"""What the image has imported here to answer."""


@pytest.mark.either_loop
@pytest.mark.parametrize("preload", [None, (), ("numpy",)], ids=str)
async def test_the_image_that_is_forked_is_the_zygotes(preload):
    """It has the modules that a worker is born with, and shares as much memory."""
    options = {"preload": preload} if preload is not None else {}
    async with aiogpu.init(num_cpus=1, num_gpus=1, **options):
        call = aiogpu.remote(num_gpus=0.25, max_calls=1)(in_script(facts)).remote
        found, of_worker = await call(0)
    body = Path(__file__).read_text().partition("def facts")[2].partition("\n\n\n")[0]
    source = zygote_image(preload)
    program = f"{source}\nimport json\ndef facts{body}\nprint(json.dumps(facts(0)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    modules, of_image = json.loads(done.stdout)
    assert set(modules) - OWN == set(found) - OWN
    assert ("numpy" in modules) is bool(preload)
    assert 0.8 < of_image / of_worker < 1.25


def test_a_function_in_a_script_travels_by_value():
    for function in (tasks.noop, tasks.use_numpy, tasks.spin, tasks.hang):
        assert b"benchmarks.tasks" in cloudpickle.dumps(function)
        assert b"benchmarks.tasks" not in cloudpickle.dumps(in_script(function))


async def test_the_longest_turn_of_the_loop_counts(monkeypatch):
    now = 0

    def hold(milliseconds):
        nonlocal now
        now += milliseconds * MS

    monkeypatch.setattr(backlog, "perf_counter_ns", lambda: now)
    monkeypatch.setattr(backlog, "thread_time_ns", lambda: now // 2)
    loop, monitor = asyncio.get_running_loop(), backlog.LoopMonitor()
    with monitor.watch() as watched:
        for turn in ((3, 4), (5,)):  # what is held in one turn adds up
            for milliseconds in turn:
                loop.call_soon(hold, milliseconds)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    assert (watched.longest, watched.on_cpu) == (7 * MS, 3.5 * MS)
    assert watched.whole == 12 * MS
    hold(50)
    with monitor.watch() as watched:
        hold(9)  # until the end
    assert watched.longest == 9 * MS


@pytest.mark.parametrize(
    ("longest", "on_cpu", "verdict"),
    [
        (20, 1, "met"),
        (21, 21, "not met"),
        (21, 2, "INVALID: it ran 2.0 ms of these; the machine is busy"),
    ],
)
def test_a_hold_is_judged_where_the_thread_had_the_core(longest, on_cpu, verdict):
    hold = {"longest": longest * MS, "on_cpu": on_cpu * MS, "calls": 10**9, "whole": 1}
    found = {"bytes": 1025.0, "holds": {"submitting": hold}}
    memory, row = backlog.rows_of(found, 1_000_000)
    assert (memory.p50, memory.verdict(False)) == (1025, "not met")
    assert (row.name, row.verdict(False)) == ("backlog: submitting", verdict)
    assert row.note.endswith("; 1.0 us a call")
