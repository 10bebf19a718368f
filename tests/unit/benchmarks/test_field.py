"""What is made of a run: ratios turn by turn, tables, charts, and a day's bounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import main
from benchmarks.environments import ENVIRONMENTS
from benchmarks.field import trace
from benchmarks.field.contest import Entry
from benchmarks.field.figures import Ratio, lines, losses, spread, verdict
from benchmarks.field.page import FAMILIES, amount, judgement, overview
from benchmarks.field.question import FLOOR
from benchmarks.field.questions import QUESTIONS

ROOT = Path(__file__).parents[3]


def entry(contestant: str, *turns: float, why: str = "", question: str = "call") -> Any:
    name = QUESTIONS[question].metrics[0].name
    return Entry(
        question, contestant, [{name: [turn]} for turn in turns], ["a note"], why
    )


RUN = [
    entry(FLOOR, 10e-6, 20e-6, 10e-6),
    entry("aiogpu", 20e-6, 40e-6, 30e-6),
    entry("node", 40e-6, 80e-6, 60e-6),
    entry("executor", 40e-6, 120e-6, 60e-6),
    entry("loky", 10e-6, 80e-6, 30e-6),
    entry("xoscar", 10e-6, 20e-6, 20e-6),
    entry("dask", 20e-3, 40e-3, 30e-3),
    entry("ray", why="not supported: a | in its reason"),
    entry(FLOOR, 500.0, question="waiting"),
    entry("aiogpu", 700.0, question="waiting"),
]
FOUND = {
    "schema": 1,
    "ended": "2026-01-01T00:00:00+00:00",
    "minutes": 9.0,
    "is_quick": False,
    "machine": {
        "cpu": "Abacus",
        "cores": 2,
        "usable_cores": 2,
        "kernel": "6",
        "python": "3.11",
        "libraries": {"aiogpu": "0"},
        "load_average": [0, 0, 0],
    },
    "load_average_after": "0.00 0.00 0.00",
    "absent": {"loky": "loky is not installed"},
    "idle": {"aiogpu": 0.0, "ray": 0.04},
}


def result() -> dict[str, Any]:
    entries = [
        {name: getattr(each, name) for name in Entry.__dataclass_fields__}
        for each in RUN
    ]
    return {**FOUND, "entries": entries}


def test_a_block_is_held_against_the_blocks_of_its_turn() -> None:
    found = {line.contestant: line for line in lines(QUESTIONS, RUN)["call"]}
    assert found["aiogpu"].beside_floor == Ratio(2, 2, 2.5)
    assert found["executor"].beside_ours == Ratio(2, 2, 2.5)
    assert found["dask"].beside_ours == Ratio(*[pytest.approx(1000)] * 3)
    assert found["aiogpu"].p50 == 30e-6
    assert found["aiogpu"].p99 == 40e-6
    assert found["ray"].p50 is None
    assert found["ray"].beside_ours is None


def test_a_contestant_with_fewer_turns_is_held_against_those() -> None:
    short = [entry(FLOOR, 10, 10, 10), entry("aiogpu", 20)]
    (_, ours) = lines(QUESTIONS, short)["call"]
    assert ours.beside_floor == Ratio(2, 2, 2)


def test_a_floor_of_nothing_is_no_divisor() -> None:
    (_, ours) = lines(QUESTIONS, [entry(FLOOR, 0.0), entry("aiogpu", 2.0)])["call"]
    assert ours.beside_floor is None
    assert spread([]) is None


def test_every_peer_counts_once_and_the_node_is_none() -> None:
    counted = verdict(lines(QUESTIONS, RUN))
    assert counted._asdict() == {
        "tenfold": 1,
        "twofold": 1,
        "faster": 0,
        "equal": 1,
        "slower": 1,
    }
    assert counted.all == 4


def test_it_is_said_where_aiogpu_loses() -> None:
    found = lines(QUESTIONS, RUN)
    assert [line.contestant for line in losses(found)] == ["xoscar"]
    text = judgement(found)
    assert "Of 4 comparisons" in text
    assert "- a call, awaited: xoscar needs 20 µs, 0.5 (0.5 to 0.583)" in text
    assert "No peer" in judgement(lines(QUESTIONS, RUN[:3]))


def test_the_overview_has_a_column_for_each() -> None:
    head, _, calls, *_ = overview(lines(QUESTIONS, RUN)).splitlines()
    assert head.split("|")[2].strip() == FLOOR
    assert "| 20 µs | 30 µs" not in calls
    assert "| 10 µs | 30 µs | 60 µs (**2**) |" in calls
    assert "| 30 ms (**1,000**) | - |" in calls


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (None, "s", ""),
        (0.0, "s", "0 s"),
        (123.4e-6, "s", "123 µs"),
        (1.234e-3, "s", "1.23 ms"),
        (2.5, "s", "2.5 s"),
        (2e-9, "s", "0.002 µs"),
        (692.1, "B", "692 B"),
        (12_345, "B", "12.3 KB"),
    ],
)
def test_a_figure_has_the_unit_in_which_it_is_read(
    value: float | None, unit: str, text: str
) -> None:
    assert amount(value, unit) == text


def test_an_earlier_run_is_put_on_a_page(tmp_path: Path) -> None:
    file, page = tmp_path / "run.json", tmp_path / "page.md"
    file.write_text(json.dumps(result()))
    page.write_text((ROOT / "docs" / "field.md").read_text())
    done = CliRunner().invoke(main, ["field", "--from", str(file), "--page", str(page)])
    assert done.exit_code == 0, done.output
    assert "Of 4 comparisons" in done.output
    text = page.read_text()
    assert "Abacus" in text
    assert "ray 4.0%" in text
    assert "Not there: loky is not installed" in text
    assert "not supported: a / in its reason" in text
    assert "![Calls](plots/calls.svg)" in text
    assert "Not run yet" not in text


def test_what_is_asked_for_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.environments.find_spec", lambda _: None)
    done = CliRunner().invoke(main, ["field", "call", "--environment", "loky"])
    assert done.exit_code == 1
    assert "loky is not installed; pip install 'aiogpu[bench]'" in done.output


def test_a_chart_is_the_same_for_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs pip install 'aiogpu[bench]'")
    from benchmarks.field.plots import draw

    found = lines(QUESTIONS, RUN)
    first, again = (draw(tmp_path / name, QUESTIONS, found) for name in "ab")
    assert [path.name for path in first] == ["calls.svg", "waiting.svg"]
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
    text = first[0].read_text()
    assert "dc:date" not in text
    for word in ("a call, awaited", "aiogpu", "xoscar", "log scale"):
        assert word in text


def test_every_question_has_a_family_and_its_metrics_are_unique() -> None:
    names = [metric.name for each in QUESTIONS.values() for metric in each.metrics]
    assert len(names) == len(set(names))
    assert {each.family for each in QUESTIONS.values()} == set(FAMILIES)


def test_the_page_names_every_question_and_every_system() -> None:
    text = (ROOT / "docs" / "field.md").read_text().lower()
    for question in QUESTIONS:
        stem = question.partition("-")[0] if question.endswith("B") else question
        stem = "fresh-*" if stem.startswith("fresh-") and stem != "fresh-day" else stem
        assert f"`{stem}" in text, question
    for name in ENVIRONMENTS:
        assert {"executor": "processpoolexecutor"}.get(name, name) in text


def test_a_day_is_the_same_for_the_same_seed() -> None:
    jobs = trace.trace(160)
    assert jobs == trace.trace(160) != trace.trace(160, seed=1)
    assert {job.size for job in jobs} == set(trace.SIZES)
    assert jobs[0].arrival == 0
    assert jobs == sorted(jobs, key=lambda job: job.arrival)


job = st.builds(
    trace.Job,
    st.integers(0, 300),
    st.sampled_from(list(trace.SIZES)),
    st.integers(1, 99),
)


@given(st.lists(job, min_size=1, max_size=20))
def test_no_rule_is_better_than_the_bound_or_loses_a_task(
    jobs: list[trace.Job],
) -> None:
    best = trace.best(jobs)
    for rule in trace.RULES:
        day = trace.packed(jobs, rule)
        assert len(day.waits) == len(jobs)
        assert min(day.waits) >= 0
        assert day.makespan >= best.makespan >= trace.bound(jobs)


def test_quarters_go_to_the_fullest_device_and_pairs_to_free_ones() -> None:
    free = [4, 3, 4, 1]
    assert trace._fit(1, free) == [(3, 1)]
    assert trace._fit(8, free) == [(0, 4), (2, 4)]
    assert trace._fit(4, free) == []
    assert free == [0, 3, 0, 0]
