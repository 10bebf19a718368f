"""docs/api.md lists every public name once, by the first line of its description.

`python -m tests.docs.test_api_page` writes the tables anew.
"""

import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest

import aiogpu
from aiogpu import errors, types
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
}
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


def tables() -> list[str]:
    """All of the page, in its order."""
    caught = [name for name in errors_of_ours() if name in aiogpu.__all__]
    others = [name for name in errors_of_ours() if name not in aiogpu.__all__]
    return [
        *(rows(aiogpu, names, "aiogpu") for names in GROUPS.values()),
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


@pytest.mark.parametrize("group", GROUPS)
def test_the_page_has_a_heading_for_each_group(group: str) -> None:
    assert f"\n## {group}\n" in PAGE.read_text()


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
