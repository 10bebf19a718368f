"""`docs/cli.md` and `docs/service-json.md` show and name what views print."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from aiogpu.cli.main import COMMANDS, cli
from aiogpu.cli.status import VERSION, status_data
from aiogpu.cli.tables import plain
from aiogpu.cli.top import ORDERS, View, render_screen
from tests.cli.pictures import BUSY, stand_in

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cli.md").read_text()
SCHEMA = (DOCS / "service-json.md").read_text()
CONSOLE = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
(TOP,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"^\$ aiogpu (.*)\n", re.MULTILINE)


@pytest.mark.parametrize("shown", CONSOLE, ids=lambda text: text.splitlines()[0])
def test_commands_print_what_the_page_shows(
    shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, BUSY)
    printed = [
        f"$ aiogpu {line}\n{CliRunner().invoke(cli, line.split()).stdout}"
        for line in PROMPT.findall(shown)
    ]
    assert printed
    assert "".join(printed) == shown


def test_top_draws_what_the_page_shows() -> None:
    lines = TOP.splitlines()
    assert list(plain(render_screen(BUSY, View(), 96, len(lines)), 96)) == lines
    assert f"({', '.join(ORDERS[:-1])} or {ORDERS[-1]})" in PAGE.replace("by ", "")


def test_every_view_is_named_on_the_page() -> None:
    for name in ("status", "list", "why", "top", "completion"):
        assert name in COMMANDS
        assert f"| `aiogpu {name}` |" in PAGE


def keys(told: object) -> set[str]:
    """The names in a JSON value that are not data."""
    if isinstance(told, list):
        return set().union(*map(keys, told))
    if not isinstance(told, dict):
        return set()
    found = set()
    for name, value in told.items():
        found.add(name)
        if name not in ("request", "amounts", "holds", "max_share"):
            inner = list(value.values()) if name == "resources" else value
            found |= keys(inner)
    return found


def test_the_schema_names_every_key() -> None:
    told = json.loads(json.dumps(status_data(BUSY)))
    told["reservation"]["devices"] = {}
    assert f"`version` is {VERSION}." in SCHEMA
    for name in keys(told):
        assert f"`{name}`" in SCHEMA, name
