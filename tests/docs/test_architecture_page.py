"""`design/architecture.md` is short, names every package, and has correct tables."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from aiogpu.core.records import TASK_LEADS_TO, WORKER_LEADS_TO

ROOT = Path(__file__).parents[2]
DRAW = ROOT / "design" / "draw_lifecycle.py"
PAGE = (ROOT / "design" / "architecture.md").read_text()
DECISIONS = sorted((ROOT / "design/decisions").glob("0*.md"))
LONGEST = 950
LONGEST_DECISION = 35
TABLE = re.compile(r"<!-- drawn: (\w+) -->\n\n((?:\|.*\n)*)")
TABLES = dict(TABLE.findall(PAGE))
ROW = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)


def packages() -> set[str]:
    """The packages: folders of modules, and the files beside them."""
    package = ROOT / "aiogpu"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    files = {path.stem for path in package.glob("[!_]*.py")}
    return folders | files


def test_the_page_is_short():
    assert len(PAGE.split()) <= LONGEST


def test_the_table_names_every_package_and_no_other():
    rows = re.findall(r"^\| `(\w+)` \|", TABLE.sub("", PAGE), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == packages()


def test_the_drawing_shows_every_package():
    drawing = PAGE.split("```\n")[1]
    words = set(re.findall(r"\w+", drawing))
    assert packages() <= words


def test_named_files_and_modules_exist():
    named = re.findall(r"`((?:aiogpu|design|docs|tests)/[\w./]*)", PAGE)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
    modules = re.findall(r"`(\w+)\.(\w+)`", PAGE)
    inside = [
        f"aiogpu/{package}/{file}.py"
        for package, file in modules
        if package in packages()
    ]
    assert len(inside) > 10
    assert [path for path in inside if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("name", "table"), [("task", TASK_LEADS_TO), ("worker", WORKER_LEADS_TO)]
)
def test_a_table_of_states_matches_the_code(name, table):
    assert ROW.findall(TABLES[name]) == [
        (state.value, ", ".join(after.value for after in table[state]))
        for state in table
    ]


def test_the_script_writes_the_tables_of_the_page():
    ran = subprocess.run(
        [sys.executable, DRAW], capture_output=True, text=True, check=True
    )
    assert dict(TABLE.findall(ran.stdout)) == TABLES
    assert set(TABLES) == {"task", "worker"}


def test_the_script_updates_an_old_page(tmp_path):
    (tmp_path / "draw_lifecycle.py").write_text(DRAW.read_text())
    page = tmp_path / "architecture.md"
    page.write_text(PAGE.replace("| `stopping` | ended |\n", "| `stopping` | x |\n"))
    assert page.read_text() != PAGE
    script = tmp_path / "draw_lifecycle.py"
    subprocess.run([sys.executable, script, "--write"], check=True)
    assert page.read_text() == PAGE


def test_the_page_of_decisions_lists_them_by_their_titles():
    page = (ROOT / "design/decisions/README.md").read_text()
    titles = [path.read_text().splitlines()[0].removeprefix("# ") for path in DECISIONS]
    assert re.findall(r"^- \[(.*)\]\((.*)\)$", page, re.MULTILINE) == [
        (title, path.name) for title, path in zip(titles, DECISIONS, strict=True)
    ]


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_a_decision_is_short_and_has_its_four_parts(path):
    number, _, words = path.stem.partition("-")
    text = path.read_text()
    assert re.fullmatch(r"\d{4}", number)
    assert re.fullmatch(r"[a-z0-9-]+", words)
    assert text.startswith(f"# {number}: ")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        "Context",
        "Decision",
        "Alternatives and figures",
        "Consequences",
    ]
    assert len(text.splitlines()) <= LONGEST_DECISION
