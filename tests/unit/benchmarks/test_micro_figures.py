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
from benchmarks.micro.backlog import LoopMonitor, rows_of
from benchmarks.micro.isolation import in_script
from benchmarks.micro.rows import (
    Goal,
    Scale,
    rate_row,
    table,
    time_row,
)
from benchmarks.processes import (
    descendants,
)
from benchmarks.report import fill_page
from benchmarks.timing import Pair, alternate, rotate
from tests.support.program import environment

ROOT = Path(__file__).parents[3]
FULL, QUICK = Scale(), Scale(is_quick=True)
MS = 1_000_000


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.micro", "--quick", *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_quick_run_keeps_all_samples_and_judges_nothing(tmp_path):
    file = tmp_path / "new" / "run.json"
    text = run("--json", str(file), "start", "spaced")
    report = json.loads(file.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert rows["start: asyncio in worker"]["p50"] == 0
    for row in rows.values():
        assert "makes too few calls" in row["verdict"]
    spaced = rows["spaced: beside reused, as spaced"]
    assert [len(block) for block in spaced["samples"]] == [4]
    assert [len(block) for block in spaced["floor_samples"]] == [4]
    assert report["machine"]["libraries"].keys() >= {"aiogpu", "uvloop"}
    _, columns, *lines, ending = text.splitlines()
    assert columns.split()[-4:] == ["ratio", "note", "goal", "verdict"]
    assert len(lines) == len(rows)
    assert ending.startswith("load average at the end")


@pytest.mark.slow
def test_all_benchmarks_run_to_the_end(tmp_path):
    file = tmp_path / "run.json"
    run("--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    found = [row["name"].partition(":")[0] for row in rows]
    assert list(dict.fromkeys(found)) == list(BENCHMARKS)
    missing = {row["verdict"] for row in rows if "not measured" in row["verdict"]}
    assert missing == {
        f"not measured: {library} is not installed"
        for library in ("numpy", "torch", "ray")
        if find_spec(library) is None
    }


def pair(floor_us: int, workload_us: int) -> Pair:
    """Two blocks of equal samples."""
    return Pair([[floor_us * 1000] * 3] * 2, [[workload_us * 1000] * 3] * 2)


@pytest.mark.parametrize(("workload", "verdict"), [(32, "met"), (33, "not met")])
def test_a_ratio_is_held_against_its_goal(workload, verdict):
    row = time_row("x", "us", pair(20, workload), Goal(1.6, "x floor"), FULL, "y")
    assert row.verdict == verdict
    assert (row.floor, row.p50, row.p99) == (20, workload, workload)
    assert row.ratio == pytest.approx(workload / 20)
    assert row.note.endswith("; y")
    assert verdict in table([row])


def test_the_figure_is_the_median_of_the_ratios_of_blocks():
    uneven = Pair([[10], [20], [1000]], [[20], [40], [1000]])
    assert (uneven.ratio, uneven.added) == (2, 10)
    row = rate_row(
        "x", "", Pair([[10], [20], [10]], [[20], [80], [100]]), 1, None, FULL
    )
    assert (row.ratio, row.note) == (0.25, "blocks 0.10 to 0.50")


async def test_all_take_turns_after_a_warm_up():
    story = []

    async def block(name):
        story.append(name)
        return [len(story)]

    runs = [lambda name=name: block(name) for name in "abc"]
    assert await rotate(runs, 2) == [[[4], [7]], [[5], [8]], [[6], [9]]]
    assert "".join(story) == "abcabcabc"
    found = await alternate(*runs[:2], 1)
    assert (found.floor, found.workload) == ([[12]], [[13]])


def test_a_page_is_filled_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text((ROOT / "benchmarks/results/micro.md").read_text())
    before, after = page.read_text().splitlines()[0], page.read_text().splitlines()[-1]
    for _ in range(2):
        fill_page(page, "the new figures")
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == (before, after)
    assert lines.count("the new figures") == 1
    page.write_text("above <!-- figures: begin -->\n")
    with pytest.raises(ValueError, match="figures: end"):
        fill_page(page, "")


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
    assert b"benchmarks" in cloudpickle.dumps(tasks.noop)
    for function in (tasks.noop, tasks.use_numpy, tasks.spin, tasks.hang):
        sent = cloudpickle.dumps(in_script(function))
        assert sent.count(b"benchmarks.tasks") == 0
        assert cloudpickle.loads(sent).__name__ == function.__name__


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now

    def holding(self, milliseconds):
        """A call that takes so long."""

        def hold(_number=0):
            self.now += milliseconds * MS

        return hold


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(backlog, "perf_counter_ns", clock)
    monkeypatch.setattr(backlog, "thread_time_ns", lambda: clock.now // 2)
    return clock


async def test_the_longest_turn_of_the_loop_counts(clock):
    loop, monitor = asyncio.get_running_loop(), LoopMonitor()
    with monitor.watch() as hold:
        for milliseconds in (3, 4):  # in one turn, so both add up
            loop.call_soon(clock.holding(milliseconds))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        loop.call_soon(clock.holding(5))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert (hold.longest, hold.on_cpu) == (7 * MS, 3.5 * MS)
    assert hold.whole == 12 * MS
    clock.now += 50 * MS
    with monitor.watch() as hold:
        clock.now += 9 * MS  # held until the end
    assert hold.longest == 9 * MS


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
    memory, row = rows_of(found, 1_000_000, FULL)
    assert (memory.p50, memory.verdict) == (1025, "not met")
    assert (row.name, row.verdict) == ("backlog: submitting", verdict)
    assert row.note.endswith("; 1.0 us a call")
