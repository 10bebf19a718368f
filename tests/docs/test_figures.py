"""Published figures have one source each: tables and charts show the kept runs."""

import json
import re

from benchmarks.compare import CHART, FIGURES, chart, medians, table
from tests.repo.source_folders import ROOT

RUN = json.loads(FIGURES.read_text())
FIELD = (ROOT / "benchmarks/results/field.md").read_text()
COLUMNS = {"aiogpu": 1, "executor": 3, "loky": 4, "Dask": 5, "xoscar": 6, "Ray": 7}
"""The places of the systems in the first table of `field.md`, after the floor."""


def rows(text: str) -> dict[str, list[str]]:
    """The cells of the rows of tables by their titles, without ratios and stars."""
    plain = re.sub(r" \(\*\*[^)]*\)|\*\*", "", text)
    cells = [
        row.split(" | ") for row in re.findall(r"^\| (.*) \|$", plain, re.MULTILINE)
    ]
    return {title: [cell.strip() for cell in others] for title, *others in cells}


def test_the_chart_shows_the_kept_figures() -> None:
    assert CHART.read_text() == chart(RUN["seconds"], RUN["facts"])


def test_the_readme_shows_the_kept_figures() -> None:
    assert table(RUN["seconds"]) in (ROOT / "README.md").read_text()


def test_the_page_shows_the_figures_of_the_field() -> None:
    page = (ROOT / "docs/comparison.md").read_text().partition("\n## The figures")[2]
    overview = rows(FIELD.partition("<!-- figures: begin")[2].partition("\n### ")[0])
    shown = rows(page.partition("\n\nMedians")[0])
    assert shown.pop("| aiogpu")
    assert len(shown) == 13
    for title, cells in shown.items():
        kept = [overview[title][place] for place in COLUMNS.values()]
        assert cells == [cell.replace("-", "\N{EN DASH}") for cell in kept], title


def test_the_chart_and_the_field_are_one_run() -> None:
    overview = rows(FIELD.partition("<!-- figures: begin")[2].partition("\n### ")[0])
    assert overview["a call, awaited"][1] == "86 µs"
    (day,) = set(re.findall(r"\d+ November 2026", RUN["facts"]))
    assert day in (ROOT / "docs/comparison.md").read_text()


def test_medians_are_those_of_the_blocks() -> None:
    entries = [
        {"workload": "call", "system": "ray", "turns": [[[1.0, 3.0]], [[2.0]]]},
        {"workload": "call", "system": "loky", "turns": [[[1.0]]]},
        {"workload": "cancel", "system": "dask", "turns": []},
    ]
    found = medians({"entries": entries})
    assert (found["call"], found["cancel"]) == ({"ray": 2.0}, {})
