"""The benchmark runs to its end, says what it must, and its parts stay apart."""

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.method import FULL, QUICK, Pair, alternate, percentile
from benchmarks.report import fill, table
from benchmarks.rows import Goal, judge, latency_row, rate_row
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks"
GOAL = Goal(1.6, "x floor")


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", *arguments],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("AIOGPU_")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A quick run of everything: what it printed, and what it wrote."""
    file = tmp_path_factory.mktemp("results") / "new" / "run.json"
    done = run("--json", str(file))
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def test_all_workloads_run_to_the_end(quick):
    _, report = quick
    found = [row["name"].partition(":")[0] for row in report["rows"]]
    assert list(dict.fromkeys(found)) == list(WORKLOADS)
    missing = {r["verdict"] for r in report["rows"] if "not measured" in r["verdict"]}
    assert missing == {
        f"not measured: {library} is not installed"
        for library in ("numpy", "torch", "ray")
        if find_spec(library) is None
    }


def test_the_json_says_on_what_machine_it_was_made(quick):
    _, report = quick
    machine = report["machine"]
    assert (report["schema"], report["environment"]) == (1, "aiogpu")
    assert report["is_quick"] is True
    assert machine["cpu"]
    assert machine["kernel"]
    assert 1 <= machine["usable_cores"] <= machine["cores"]
    assert machine["python"].startswith(f"3.{sys.version_info.minor}.")
    assert {"aiogpu", "uvloop", "msgpack", "cloudpickle"} <= set(machine["libraries"])
    assert len(machine["load_average"]) == len(report["load_average_after"]) == 3


def test_the_json_holds_all_samples(quick):
    _, report = quick
    rows = {row["name"]: row for row in report["rows"]}
    for name in ("noop_latency", "gpu_latency"):
        for samples in ("samples", "floor_samples"):
            assert [len(block) for block in rows[name][samples]] == [20, 20]
    assert rows["noop_latency"]["p50"] <= rows["noop_latency"]["p99"]
    assert rows["start: asyncio in worker"]["p50"] == 0


def test_a_quick_run_is_held_against_no_goal(quick):
    text, report = quick
    assert not {row["verdict"] for row in report["rows"]} & {"met", "not met"}
    assert "makes too few calls" in text


def test_the_table_has_the_machine_and_a_line_for_each_row(quick):
    text, report = quick
    heading, columns, *lines, ending = text.splitlines()
    assert "load average" in heading
    assert ending.startswith("load average at the end")
    assert columns.split()[-4:] == ["ratio", "note", "goal", "verdict"]
    assert len(lines) == len(report["rows"])


MACHINE = {
    "cpu": "Abacus",
    "cores": 2,
    "usable_cores": 1,
    "kernel": "6",
    "python": "3.11",
    "libraries": {"aiogpu": "0"},
    "load_average": (0, 0, 0),
}


def test_a_page_is_filled_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    marks = "<!-- figures: begin; by hand -->", "<!-- figures: end -->"
    page.write_text(f"above\n{marks[0]}\nold\n{marks[1]}\nbelow\n")
    row = rate_row("x", pair(200, 500), 20, Goal(0.4, "x floor", is_least=True), FULL)
    for _ in range(2):
        fill(page, MACHINE, [row])
    lines = page.read_text().splitlines()
    assert lines[:2] == ["above", marks[0]]
    assert lines[-2:] == [marks[1], "below"]
    assert lines[3].startswith("Abacus, 1 of 2 cores")
    assert [line for line in lines if line.startswith("| x | 40,000 |")]
    assert "old" not in lines


def test_a_page_without_marks_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("above <!-- figures: begin -->\n")
    with pytest.raises(ValueError, match="figures: end"):
        fill(page, MACHINE, [])
    assert page.read_text() == "above <!-- figures: begin -->\n"


def test_the_page_of_figures_has_its_marks(tmp_path):
    page = tmp_path / "performance.md"
    page.write_text((ROOT / "docs" / "performance.md").read_text())
    fill(page, MACHINE, [])
    assert "Abacus" in page.read_text()


def test_an_environment_that_lacks_something_says_so():
    lacking = ["gpu_latency", "nested", "batching", "backlog", "queue", "many_gpus"]
    lacking += ["isolated", "spaced", "cancel", "turnover", "actors", "many_actors"]
    lacking += ["values", "map"]
    lacking += ["streams"]
    done = run("--environment", "executor", "noop_latency", *lacking)
    assert done.returncode == 0, done.stderr
    assert "not measured: an executor shares out no GPUs" in done.stdout
    assert done.stdout.count("not measured: an executor") == len(lacking)


def test_the_floor_is_small():
    assert len((FOLDER / "floor.py").read_text().splitlines()) <= 80


def test_blocks_are_as_long_as_the_method_asks():
    assert FULL.calls >= 200
    assert FULL.gathered == 20_000
    assert (FULL.waiting, FULL.few) == (1_000_000, 1_000)
    assert (FULL.width, FULL.mapped) == (100, 1_000_000)
    assert (FULL.large, FULL.uses, FULL.handles) == (100_000_000, 50, 10_000)
    assert FULL.is_judged
    assert not QUICK.is_judged


@pytest.mark.parametrize("path", sorted((FOLDER / "workloads").glob("*.py")), ids=str)
def test_workloads_know_no_system(path):
    assert not [n for n in imports(path) if n.startswith(("aiogpu", "concurrent"))]
    assert not [n for n in imports(path) if n.startswith("benchmarks.environments")]


@pytest.mark.parametrize(
    "path", sorted((FOLDER / "environments").glob("*.py")), ids=str
)
def test_environments_know_no_workload(path):
    ours = {name for name in imports(path) if name.startswith("benchmarks")}
    assert not [
        name
        for name in ours - {"benchmarks.port"}
        if not name.startswith("benchmarks.environments.")
    ]


def imports(path):
    """All modules that a file imports, at its top or later."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "an absolute import is easier to check"
            yield node.module


def pair(floor_us, workload_us):
    """Two blocks of equal samples."""
    return Pair([[floor_us * 1000] * 3] * 2, [[workload_us * 1000] * 3] * 2)


@pytest.mark.parametrize(
    ("floor", "workload", "verdict"),
    [
        (20, 32, "met"),
        (20, 33, "not met"),
        (30, 40, "met"),
        (31, 40, "INVALID: the floor's p50 is above 30 us; the machine is busy"),
    ],
)
def test_a_latency_is_held_against_a_valid_floor(floor, workload, verdict):
    row = latency_row("x", pair(floor, workload), GOAL, FULL)
    assert row.verdict == verdict
    assert (row.floor, row.p50, row.p99) == (floor, workload, workload)
    assert row.ratio == pytest.approx(workload / floor)
    assert verdict in table([row])


@pytest.mark.parametrize(
    ("floor", "workload", "verdict"),
    [
        (200, 500, "met"),
        (200, 501, "not met"),
        (250, 500, "met"),
        (251, 500, "INVALID: the floor is below 80 k/s; the machine is busy"),
    ],
)
def test_a_rate_is_held_against_a_valid_floor(floor, workload, verdict):
    goal = Goal(0.4, "x floor", is_least=True)
    row = rate_row("x", pair(floor, workload), 20, goal, FULL)
    assert row.verdict == verdict
    assert row.goal == ">= 0.4 x floor"
    assert row.p50 == pytest.approx(20e6 / workload)
    assert row.ratio == pytest.approx(floor / workload)


def test_a_rate_tells_the_spread_of_its_blocks():
    uneven = Pair([[10], [20], [10]], [[20], [80], [100]])
    row = rate_row("x", uneven, 1, None, FULL)
    assert row.note == "blocks 0.10 to 0.50"
    assert (row.ratio, row.verdict) == (0.25, "no goal")


def test_the_figure_is_the_median_of_the_blocks_ratios():
    uneven = Pair([[10], [20], [1000]], [[20], [40], [1000]])
    assert uneven.ratio == 2
    assert uneven.added == 10


def test_without_a_goal_nothing_is_judged():
    assert judge(5, None, FULL) == "no goal"


def test_percentiles_are_over_all_blocks():
    blocks = [list(range(50)), list(range(50, 100))]
    assert [percentile(blocks, n) for n in (0, 50, 99, 100)] == [0, 50, 99, 99]


async def test_floor_and_workload_alternate_after_a_warm_up():
    story = []

    async def block(name):
        story.append(name)
        return [len(story)]

    found = await alternate(lambda: block("floor"), lambda: block("work"), 2)
    assert story == ["floor", "work"] * 3
    assert (found.floor, found.workload) == ([[3], [5]], [[4], [6]])


def test_the_help_names_the_other_programs():
    done = run("--help")
    for name in ("field", "soak", "simulation", "counts"):
        assert name in done.stdout
        assert any(FOLDER.glob(f"{name}*"))
