"""docs/api.md lists every public name once, by the first line of its description.

Options have tables too, from the docstrings of `aiogpu.api.keywords` and of `init`.

`python -m tests.docs.test_api_page` writes the tables anew.
"""

import inspect
import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest

import aiogpu
from aiogpu import errors, sync, types
from aiogpu.api import keywords
from tests.repo.rooms import ROOT

PAGE = ROOT / "docs/api.md"
GROUPS = {
    "Tasks, actors and their results": (
        *("remote", "method", "Handle", "Stream", "Results", "get", "put", "wait"),
        *("as_completed", "batch", "ActorHandle", "ActorPool", "typed"),
        *("get_actor", "kill", "exit_actor"),
    ),
    "The node": (
        *("init", "shutdown", "run", "is_initialized", "status", "why"),
        *("cluster_resources", "available_resources", "lease", "placement"),
    ),
    "Inside a task": ("get_gpu_ids", "get_runtime_context"),
    "Without an event loop": ("from_thread",),
}
OPTIONS = {
    "Options of a task": keywords.Options,
    "Options of an actor": keywords.ActorKeywords,
    "Options of a method": keywords.MethodKeywords,
    "Options of the node": aiogpu.init,
}
ENTRY = re.compile(
    r"^(?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n {4}.*)*)", re.MULTILINE
)
TABLE = re.compile(r"(?<=\| name \| what it is \|\n\|---\|---\|\n)(?:\|.*\n)*")


def errors_of_ours() -> dict[str, type[Exception]]:
    """All of `aiogpu.errors`, as they stand there."""
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type)
        and issubclass(value, errors.AiogpuError | errors.AiogpuWarning)
    }


def rows(module: ModuleType, names: Iterable[str], prefix: str) -> str:
    """The lines of one table."""
    told: dict[str, Any] = {name: getattr(module, name) for name in names}
    return "".join(
        f"| `{prefix}.{name}` | {value.__doc__.strip().splitlines()[0]} |\n"
        for name, value in told.items()
    )


def described(source: object) -> dict[str, str]:
    """The options that a docstring describes, with their texts."""
    doc = inspect.getdoc(source) or ""
    section = re.split(r"\n(?:Attributes|Args):\n", doc)[1].partition("\n\n")[0]
    return {
        name: " ".join(entry["text"].split())
        for entry in ENTRY.finditer(inspect.cleandoc(section))
        for name in entry["names"].split(", ")
    }


def option_rows(source: object) -> str:
    """The lines of a table of options."""
    return "".join(
        f"| `{name}` | {text} |\n" for name, text in described(source).items()
    )


def tables() -> list[str]:
    """All of the page, in its order."""
    caught = [name for name in errors_of_ours() if name in aiogpu.__all__]
    others = [name for name in errors_of_ours() if name not in aiogpu.__all__]
    return [
        *(rows(aiogpu, names, "aiogpu") for names in [*GROUPS.values()][:-1]),
        rows(aiogpu, GROUPS["Without an event loop"], "aiogpu")
        + rows(sync, sync.__all__, "aiogpu.sync"),
        *map(option_rows, OPTIONS.values()),
        rows(aiogpu, caught, "aiogpu"),
        rows(errors, others, "aiogpu.errors"),
        rows(types, types.__all__, "aiogpu.types"),
    ]


def written(page: str) -> str:
    """The page with its tables as they should be."""
    remaining = iter(tables())
    return TABLE.sub(lambda _: next(remaining), page)


def test_every_name_of_the_top_is_in_one_group() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    caught = [name for name in errors_of_ours() if name in aiogpu.__all__]
    assert sorted(grouped + caught) == sorted(aiogpu.__all__)


def test_the_page_lists_each_by_its_description() -> None:
    page = PAGE.read_text()
    assert len(TABLE.findall(page)) == len(tables())
    assert page == written(page), "python -m tests.docs.test_api_page writes it anew"


@pytest.mark.parametrize("source", OPTIONS.values(), ids=OPTIONS)
def test_every_option_is_described(source: object) -> None:
    names = (
        source.__annotations__
        if isinstance(source, type)
        else inspect.signature(source).parameters  # type: ignore[arg-type]
    )
    assert sorted(described(source)) == sorted(names)


@pytest.mark.parametrize("group", [*GROUPS, *OPTIONS])
def test_the_page_has_a_heading_for_each_group(group: str) -> None:
    assert f"\n## {group}\n" in PAGE.read_text()


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
