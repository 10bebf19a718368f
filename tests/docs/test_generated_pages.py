"""Reference pages of commands and of JSON are generated from the code.

`python -m tests.docs.test_api_page` writes them, and the tables of options.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import click
import pytest

from aiogpu.cli.main import COMMANDS, cli
from aiogpu.cli.views import status as printed
from aiogpu.cli.views.status import ENDED, KINDS
from aiogpu.cli.views.top import ORDERS
from aiogpu.core.queue.fair_share import Limits
from aiogpu.observe import status, why
from tests.docs.test_api_page import documented

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BLOCK = re.MULTILINE | re.DOTALL
HINT = "python -m tests.docs.test_api_page updates it"
GENERATED = "<!-- generated: the text of `aiogpu COMMAND --help` -->\n"
"""Above this line the page of commands is written by hand."""
NODE_OPTIONS = {"pid", "address"}
"""Options of most commands, which the page describes once."""
JSON_TOP = f"""\
# JSON of the commands

`aiogpu status`, `list` and `why` print one object with `--json`. `version` is \
{printed.VERSION}. Within a version names keep their meaning; new ones may be added, \
so ignore names that you do not know. Amounts are in bytes, seconds and whole units: \
half a GPU is `0.5`. `null` means unknown or absent.

A script that means the shared node asks `aiogpu status --json --address auto`: \
otherwise it gets [several nodes](#several-nodes) where there are several.

`aiogpu list WHAT --json` has `version`; `left_out`, how many more there are that were \
asked for; and under WHAT a list of objects as below: {{kinds}}. With `--state \
finished`, `failed` or `cancelled`, tasks are [ended tasks](#ended-task). \
`aiogpu why TASK --json` has `version` and, under `tasks`, a [reason](#reason) for \
each task of that name.
"""
JSON_PARTS: dict[type, str] = {
    printed.StatusData: "A node",
    printed.NodesData: "Several nodes",
    printed.NodeData: "One of several nodes",
    status.DeviceStatus: "Device",
    status.Holder: "Holder",
    status.OtherProcess: "Other process",
    status.WorkerStatus: "Worker",
    status.TaskStatus: "Task",
    status.ShapeStatus: "Waiting request",
    status.ReservationStatus: "Reservation",
    status.ClientStatus: "Program",
    Limits: "Limits",
    status.ActorStatus: "Actor",
    status.EndedTask: "Ended task",
    status.PlacementStatus: "Placement",
    status.BundleStatus: "Bundle",
    status.OutageStatus: "Outage",
    status.UnendedStatus: "Unended processes",
    status.IdleEndStatus: "Ended idle worker",
    why.Why: "Reason",
    why.Shortage: "Shortage",
}
LISTED = {
    "tasks": status.TaskStatus,
    "actors": status.ActorStatus,
    "placements": status.PlacementStatus,
    "workers": status.WorkerStatus,
    "gpus": status.DeviceStatus,
    "clients": status.ClientStatus,
    "nodes": printed.NodeData,
}
PLAIN = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    NoneType: "null",
    dict: "object",
}


def command_named(name: str) -> click.Command:
    """The subcommand with this name."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, name
    return command


def paragraphs(help_text: str) -> Iterator[str]:
    """A help text as Markdown: preformatted paragraphs become code blocks."""
    for part in inspect.cleandoc(help_text).split("\n\n"):
        if not part.startswith("\b\n"):
            yield " ".join(part.split())
            continue
        title, _, lines = part.removeprefix("\b\n").partition("\n")
        yield f"{title}\n\n```text\n{inspect.cleandoc(lines)}\n```"


def cell(text: str) -> str:
    """A cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def settings_of(command: click.Command) -> dict[str, Any]:
    """The settings with which `aiogpu` runs a command, which keeps what they say."""
    return {**cli.context_settings, **command.context_settings}


def context_of(command: click.Command, name: str | None) -> click.Context:
    return click.Context(command, info_name=name, **settings_of(command))


def option_rows(command: click.Command) -> Iterator[str]:
    """A row for each option of a command."""
    context = context_of(command, command.name)
    options = [each for each in command.params if isinstance(each, click.Option)]
    needs_node = {option.name for option in options} >= NODE_OPTIONS
    for option in options:
        record = option.get_help_record(context)
        if record is not None and not (needs_node and option.name in NODE_OPTIONS):
            names, meaning = map(cell, record)
            meaning = meaning.translate(str.maketrans("[]", "()"))  # no link
            meaning = re.sub(r"'aiogpu\((\w+)\)'", r"`'aiogpu[\1]'`", meaning)
            yield f"| `{names}` | {meaning} |"
    if needs_node:
        yield "| `--pid`, `--address` | [Which node](#which-node). |"


def table(head: str, rows: Iterator[str]) -> str:
    """A Markdown table, or nothing if there are no rows."""
    lines = [*rows]
    rule = "|---" * (head.count("|") - 1) + "|"
    return "\n".join(("", head, rule, *lines, "")) if lines else ""


def command_page() -> str:
    """The page of all commands: what is written by hand, and each help text."""
    by_hand, mark, _ = (DOCS / "cli.md").read_text().partition(GENERATED)
    parts = [by_hand, mark]
    for name in COMMANDS:
        command = command_named(name)
        context = context_of(command, f"aiogpu {name}")
        usage = " ".join(command.collect_usage_pieces(context))
        text = "\n\n".join(paragraphs(command.help or ""))
        parts += [f"\n## aiogpu {name}\n\n`aiogpu {name} {usage}`\n\n{text}\n"]
        parts += [table("| option | meaning |", option_rows(command))]
    return "".join(parts)


def link(kind: type) -> str:
    """The title of a section as a link."""
    title = JSON_PARTS[kind]
    return f"[{title.lower()}](#{title.lower().replace(' ', '-')})"


def json_type(hint: Any) -> str:
    """The type of a key in words."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(map(json_type, inner))
    if kind in (tuple, list):
        is_pair = inner[-1] not in (..., inner[0])
        return "list" if is_pair else f"list of {json_type(inner[0])}"
    if kind in (dict, Mapping):
        return f"{json_type(inner[1])} by name" if inner[1] is not Any else "object"
    return PLAIN.get(hint) or link(hint)


def in_json(text: str) -> str:
    """Replace Python values in a docstring by JSON values."""
    text = text.replace("None", "null")
    lists = str.maketrans("()", "[]")
    return re.sub(r"`\{?[\w\": ]*\([^`]+`", lambda m: m[0].translate(lists), text)


def json_rows(kind: type) -> Iterator[str]:
    """A row for each key of an object."""
    hints, texts = get_type_hints(kind), documented(kind)
    if kind is printed.StatusData:
        known = get_type_hints(status.NodeStatus)
        hints = {name: known.get(name, hint) for name, hint in hints.items()}
        texts = documented(status.NodeStatus) | texts
    assert sorted(hints.keys() - texts) == []
    for name, hint in hints.items():
        type_name, text = json_type(hint), in_json(texts[name])
        if is_dataclass(kind) and printed.is_nullable(kind, name):
            if not type_name.endswith("null"):
                type_name += " or null"
            text = re.sub(r'(?<=[;,] )(0|"")(?= (if|while|without) )', "null", text)
        yield f"| `{printed.json_name(kind, name)}` | {type_name} | {cell(text)} |"


def json_page() -> str:
    """The page of all JSON objects."""
    kinds = ", ".join(f"`{name}` {link(kind)}" for name, kind in LISTED.items())
    parts = [JSON_TOP.format(kinds=kinds)]
    for kind, title in JSON_PARTS.items():
        parts += [f"\n## {title}\n", table("| key | type | meaning |", json_rows(kind))]
    return "".join(parts)


PAGES = {"cli.md": command_page, "service-json.md": json_page}


@pytest.mark.parametrize("page", PAGES)
def test_a_generated_page_is_up_to_date(page: str) -> None:
    assert (DOCS / page).read_text() == PAGES[page](), HINT


def test_help_texts_name_all_states_and_orders() -> None:
    _, _, states = (command_named("list").help or "").partition("States:\n")
    row = re.compile(r"^(\w+) +(.+(?:\n {4,}.+)*)", re.MULTILINE)
    rows = dict(row.findall(inspect.cleandoc(states.split("\n\n")[0])))
    named = {kind: re.split(r"[,;]\s+", rows[kind]) for kind in KINDS}
    assert {kind: sorted(states) for kind, states in named.items()} == {
        kind: sorted([*each.states, *(ENDED if kind == "tasks" else ())])
        for kind, each in KINDS.items()
    }
    orders = f"{', '.join(ORDERS[:-1])} or {ORDERS[-1]}"
    assert orders in (command_named("top").help or "")


def commands_on_pages() -> list[str]:
    """All `aiogpu` commands in code blocks of the pages."""
    block = re.compile(r"^```[^\n`]*\n(.*?)^```$", BLOCK)
    commands = set()
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        blocks = block.findall(path.read_text())
        for line in "".join(blocks).splitlines():
            if match := re.match(r"(?:\$ )?(?:\S+/)?(aiogpu [a-z][^#|<>&;)]*)", line):
                commands.add(match[1].rstrip())
    return sorted(commands)


def test_commands_on_pages_are_valid() -> None:
    assert len(commands_on_pages()) > 20
    for line in commands_on_pages():
        _, name, *arguments = shlex.split(line)
        assert name in COMMANDS, line
        command = command_named(name)
        with command.make_context(f"aiogpu {name}", arguments, **settings_of(command)):
            pass  # no usage error


@pytest.mark.parametrize("page", ["cli.md", "service.md"])
def test_options_in_the_text_of_a_page_exist(page: str) -> None:
    known = {
        option
        for name in COMMANDS
        for parameter in command_named(name).params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    by_hand = (DOCS / page).read_text().partition(GENERATED)[0]
    text = re.sub(r"^```.*?^```$", "", by_hand, flags=BLOCK)
    named = set(re.findall(r"(?<=[ `])--[a-z-]+", text))
    assert named
    assert named - known == set()


def write() -> None:
    """Write the pages."""
    for page, render in PAGES.items():
        (DOCS / page).write_text(render())
