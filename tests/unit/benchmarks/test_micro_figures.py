"""The figures of the micro benchmarks: statistics, verdicts, floors, runs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

import aiogpu
from benchmarks import floors
from benchmarks.forks import zygote_image
from benchmarks.micro import backlog
from benchmarks.micro.__main__ import BENCHMARKS
from benchmarks.micro.isolation import in_script
from benchmarks.micro.rows import BUSY, Goal, rates, times
from benchmarks.processes import descendants
from benchmarks.report import keep_run
from benchmarks.timing import Pair, rotate
from tests.support.program import environment

ROOT = Path(__file__).parents[3]
MS = 1_000_000


def run(file: Path, *names: str) -> dict:
    words = [sys.executable, "-m", "benchmarks.micro", "--quick", *names]
    words += ["--json", str(file)]
    output = subprocess.check_output(words, cwd=ROOT, env=environment(), text=True)
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert all(name in output for name in rows)
    return rows


def test_a_quick_run_keeps_all_samples_and_judges_nothing(tmp_path):
    rows = run(tmp_path / "new" / "run.json", "latency", "start", "spaced")
    assert rows["start: asyncio in worker"]["p50"] == 0
    verdicts = {row["verdict"] for row in rows.values()}
    assert "not judged: --quick makes too few calls" in verdicts
    assert not verdicts & {"met", "not met"}  # rows of a busy machine are invalid
    spaced = rows["spaced: beside reused, as spaced"]
    for samples in ("samples", "floor_samples"):
        assert [len(block) for block in spaced[samples]] == [4]


@pytest.mark.slow
def test_all_benchmarks_run_to_the_end(tmp_path):
    rows = run(tmp_path / "run.json")
    names = [name.partition(":")[0] for name in rows]
    assert list(dict.fromkeys(names)) == list(BENCHMARKS)
    missing = {row["verdict"] for row in rows.values() if row["p50"] is None}
    libraries = [each for each in ("numpy", "torch", "ray") if find_spec(each) is None]
    assert missing == {f"not measured: {each} is not installed" for each in libraries}


UNEVEN = Pair([[10_000], [20_000], [10_000]], [[20_000], [80_000], [100_000]])
TIMES = partial(times, "x", "us", UNEVEN)
RATES = partial(rates, "x", "calls/s", UNEVEN, 1)


def test_the_figure_is_the_median_of_the_ratios_of_blocks():
    row = TIMES(Goal(4, "x floor"), "y")
    assert (row.p50, row.p99, row.floor, row.ratio) == (80, 100, 10, 4)
    assert (row.note, UNEVEN.added) == ("blocks 2.00 to 10.00; y", 60_000)
    row = RATES(None)
    assert (row.p50, row.floor, row.ratio) == (12_500, 100_000, 0.25)
    assert row.note == "blocks 0.10 to 0.50"


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (TIMES(Goal(4, "x")), "met"),
        (TIMES(Goal(3.9, "x")), "not met"),
        (TIMES(), "no goal"),
        (TIMES(fault="why"), "INVALID: why"),
        (RATES(Goal(0.26, "x", is_least=True)), "not met"),
        (RATES(Goal(1e4, "/s", is_least=True), absolute=True), "met"),
        (RATES(None, lowest=2e5), f"INVALID: the floor is below 200 k/s; {BUSY}"),
    ],
)
def test_a_figure_is_compared_with_its_goal(row, verdict):
    assert row.verdict(is_quick=False) == row.cells(is_quick=False)[-1] == verdict


async def test_blocks_take_turns_after_a_warm_up():
    story = []

    async def block(name):
        story.append(name)
        return [len(story)]

    runs = [lambda name=name: block(name) for name in "abc"]
    assert await rotate(runs, 2) == [[[4], [7]], [[5], [8]], [[6], [9]]]
    assert "".join(story) == "abcabcabc"


@pytest.mark.parametrize("part", ["micro", "field", "simulation"])
def test_a_page_is_updated_between_its_marks(tmp_path, part):
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


@pytest.mark.either_loop
async def test_the_worker_of_the_floor_has_its_own_core():
    before, others = os.sched_getaffinity(0), descendants()
    first, second = floors.first_core(), floors.second_core()
    async with floors.open_floor_apart() as floor:
        assert await floor.call(1) is None
        (pid,) = descendants().keys() - others
        assert os.sched_getaffinity(pid) == second
        assert os.sched_getaffinity(0) == first
    assert os.sched_getaffinity(0) == before
    assert descendants() == others


def memory_facts(number):
    """The modules of this process, and its anonymous memory in kilobytes."""
    import sys

    with open("/proc/self/smaps_rollup") as file:
        (line,) = [line for line in file if line.startswith("Anonymous:")]
    return sorted(sys.modules), int(line.split()[1])


OWN = {"json", "json.decoder", "json.encoder", "json.scanner", "_json"}
"""Modules that the image imports to print its answer."""


@pytest.mark.either_loop
@pytest.mark.parametrize("preload", [None, (), ("numpy",)], ids=str)
async def test_the_forked_image_equals_a_zygote(preload):
    """The image has a new worker's modules, and shares as much memory."""
    options = {"preload": preload} if preload is not None else {}
    async with aiogpu.init(num_cpus=1, num_gpus=1, **options):
        call = aiogpu.remote(num_gpus=0.25, max_calls=1)(in_script(memory_facts)).remote
        worker_modules, of_worker = await call(0)
    body = (
        Path(__file__)
        .read_text()
        .partition("def memory_facts")[2]
        .partition("\n\n\n")[0]
    )
    source = zygote_image(preload)
    program = f"{source}\nimport json\ndef memory_facts{body}\n"
    program += "print(json.dumps(memory_facts(0)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    modules, of_image = json.loads(done.stdout)
    assert set(modules) - OWN == set(worker_modules) - OWN
    assert ("numpy" in modules) is bool(preload)
    assert 0.8 < of_image / of_worker < 1.25


async def test_the_longest_turn_of_the_loop_counts(monkeypatch):
    now = 0

    def hold(milliseconds):
        nonlocal now
        now += milliseconds * MS

    monkeypatch.setattr(backlog, "perf_counter_ns", lambda: now)
    monkeypatch.setattr(backlog, "thread_time_ns", lambda: now // 2)
    loop, monitor = asyncio.get_running_loop(), backlog.LoopMonitor()
    with monitor.watch() as watched:
        for turn in ((3, 4), (5,)):  # holds within one turn add up
            for milliseconds in turn:
                loop.call_soon(hold, milliseconds)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
    assert (watched.longest, watched.on_cpu) == (7 * MS, 3.5 * MS)
    assert watched.whole == 12 * MS
    hold(50)
    with monitor.watch() as watched:
        hold(9)  # the last turn counts as well
    assert watched.longest == 9 * MS


@pytest.mark.parametrize(
    ("on_cpu", "verdict"),
    [(21, "not met"), (2, f"INVALID: the thread ran for 2.0 ms of these; {BUSY}")],
)
def test_a_hold_is_judged_if_the_thread_had_the_core(on_cpu, verdict):
    hold = {"longest": 21 * MS, "on_cpu": on_cpu * MS, "calls": 10**9, "whole": 1}
    measured = {"bytes": 1025.0, "holds": {"submitting": hold}}
    memory, row = backlog.rows_of(measured, 1_000_000)
    assert (memory.verdict(False), row.verdict(False)) == ("not met", verdict)
    assert row.note.endswith("; 1.0 us a call")
