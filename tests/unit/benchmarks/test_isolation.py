"""What isolated tasks are measured by is what it is said to be, and nothing leaks."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest

from benchmarks import tasks
from benchmarks.census import Weight, by_part, descendants, weigh
from benchmarks.environments import ENVIRONMENTS
from benchmarks.forks import open_forks
from benchmarks.method import FULL, QUICK, Pair, rotate
from benchmarks.port import Need
from benchmarks.rows import Goal, beside_row, slowest_row
from benchmarks.script import in_script
from benchmarks.workloads import isolated, learning, turnover
from tests.support.program import run

pytestmark = pytest.mark.either_loop

ROOT = Path(__file__).parents[3]
MS = 1_000_000
ALONE = Need(num_gpus=0.25, is_isolated=True)
OWN = {"json", "json.decoder", "json.encoder", "json.scanner", "_json"}
"""What the image has imported here to answer."""


def facts(number):
    """The modules of this process, and the kilobytes that are its own or a parent's."""
    import sys

    with open("/proc/self/smaps_rollup") as file:
        (line,) = [line for line in file if line.startswith("Anonymous:")]
    return sorted(sys.modules), int(line.split()[1])


def facts_of_image(source):
    code = in_script(facts).__code__
    assert not code.co_freevars
    body = Path(__file__).read_text().partition("def facts")[2].partition("\n\n\n")[0]
    program = f"{source}\nimport json\ndef facts{body}\nprint(json.dumps(facts(0)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    modules, kilobytes = json.loads(done.stdout)
    return set(modules), kilobytes


@pytest.mark.parametrize("preload", [None, (), ("numpy",)], ids=str)
async def test_the_image_that_is_forked_is_the_zygotes(preload):
    """It has the modules that a worker is born with, and shares as much memory."""
    environment = ENVIRONMENTS["aiogpu"]()
    await environment.open(num_cpus=1, num_gpus=1, preload=preload)
    try:
        found, of_worker = await environment.task(in_script(facts), ALONE)(0)
    finally:
        await environment.close()
    modules, of_image = facts_of_image(environment.image(preload))
    assert modules - OWN == set(found) - OWN
    assert ("numpy" in modules) is bool(preload)
    assert 0.8 < of_image / of_worker < 1.25


async def test_forks_are_counted_one_by_one_or_together():
    with open_forks() as forks:
        samples = await forks.fork(5)
        (each,) = await forks.fork_in_a_row(5)
    assert len(samples) == 5
    assert all(sample > 0 for sample in [*samples, each])


async def test_all_take_turns_after_a_warm_up():
    story = []

    async def block(name):
        story.append(name)
        return [len(story)]

    runs = [lambda name=name: block(name) for name in "abc"]
    assert await rotate(runs, 2) == [[[4], [7]], [[5], [8]], [[6], [9]]]
    assert "".join(story) == "abcabcabc"


def test_a_function_in_a_script_travels_by_value():
    assert b"benchmarks" in cloudpickle.dumps(tasks.noop)
    for function in (tasks.noop, tasks.use_numpy, tasks.spin, tasks.hang):
        sent = cloudpickle.dumps(in_script(function))
        assert sent.count(b"benchmarks.tasks") == 0
        assert cloudpickle.loads(sent).__name__ == function.__name__
    assert in_script(tasks.use_numpy)(0) == sum(range(1_000))


def test_a_census_counts_what_lives_below_this_process():
    with subprocess.Popen(
        [sys.executable, "-c", "print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout.readline()
        name = descendants()[child.pid]
        parts = by_part({"children": name})
        assert child.pid in parts["children"]
        assert parts["driver"] == [os.getpid()]
        weight = weigh([child.pid])
        child.communicate(b"\n")
    assert (weight.processes, weight.threads, weight.descriptors) == (1, 1, 3)
    assert 0 < weight.private <= weight.proportional <= weight.resident < 1 << 30
    assert child.pid not in descendants()


CENSUS = """
    import os, threading
    from benchmarks.census import weigh
    before = weigh([os.getpid()])
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    with open(os.devnull):
        after = weigh([os.getpid()])
    end.set()
    thread.join()
    print(after.descriptors - before.descriptors, after.threads - before.threads)
"""


def test_a_census_sees_one_more_descriptor_and_one_more_thread():
    """In a process of its own, in which no thread of another test ends meanwhile."""
    assert run(CENSUS) == "1 1\n"


def found(*descriptors):
    """What was seen, look by look."""
    steady = Weight(1, 1 << 20, 1 << 20, 1 << 19, 8, 1)
    return [
        {"driver": steady, "zygote": replace(steady, descriptors=count)}
        for count in descriptors
    ]


@pytest.mark.parametrize(
    ("descriptors", "verdict", "growth"),
    [((9, 9, 9), "met", 1), ((9, 9, 8), "met", 1), ((8, 9, 10), "not met", 1.25)],
)
def test_the_part_that_grew_most_is_judged(descriptors, verdict, growth):
    rows = {row.name: row for row in turnover.rows(found(*descriptors), FULL)}
    row = rows["turnover: descriptors"]
    assert (row.verdict, row.ratio) == (verdict, growth)
    assert (row.floor, row.p50) == (8 + descriptors[0], 8 + descriptors[-1])
    assert "after 100, 500, 1,000 workers: driver 8, 8, 8; zygote" in row.note
    assert rows["turnover: threads"].verdict == "met"
    assert rows["turnover: memory, shares"].verdict == "no goal"


async def test_two_hundred_workers_leave_no_descriptor_and_no_thread():
    """One that each of them left would be a hundred more at the end than half-way."""
    seen = []
    environment = ENVIRONMENTS["aiogpu"]()
    rows = await turnover.measure(environment, replace(QUICK, lives=200))
    for row in rows:
        if row.name.partition(": ")[2] in {"descriptors", "threads", "processes"}:
            parts = row.note.partition("workers: ")[2].split("; ")
            assert [part.split()[0] for part in parts] == [
                "driver",
                "zygote",
                "keepers",
            ]
            for part in parts:
                _, half, last = map(float, part.partition(" ")[2].split(", "))
                assert last - half < 50, row.note
            seen.append(row.unit)
    assert seen == ["files", "threads", "processes"]


@pytest.mark.parametrize(("slowest", "verdict"), [(50, "met"), (51, "not met")])
def test_within_means_the_slowest(slowest, verdict):
    goal = Goal(50, "ms")
    row = slowest_row("x", [MS] * 19 + [slowest * MS], goal, FULL, "y")
    assert (row.p50, row.p99, row.verdict) == (1, slowest, verdict)
    assert row.note == f"slowest of 20: {slowest}.0 ms; y"


def test_a_ratio_is_judged_and_its_notes_follow_the_spread():
    pair = Pair([[MS], [2 * MS]], [[2 * MS], [6 * MS]])
    row = beside_row("x", pair, Goal(2.5, "x fork"), FULL, "y", "z")
    assert (row.ratio, row.verdict) == (2.5, "met")
    assert row.note == "blocks 2.00 to 3.00; y; z"


async def test_rows_of_a_library_that_is_missing_say_so(monkeypatch):
    monkeypatch.setattr(isolated, "find_spec", lambda name: None)
    rows = await learning.measure(ENVIRONMENTS["aiogpu"](), QUICK)
    assert [row.verdict for row in rows] == [
        "not measured: numpy is not installed",
        "not measured: torch is not installed",
    ]


def test_there_are_enough_samples():
    assert (FULL.isolated, FULL.lives) == (200, 1_000)
    assert FULL.cancels // 2 >= 20
