"""Writes `aiogpu/api/keywords.py` from the tables of options."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Collection
from itertools import groupby
from typing import Any, Final

from aiogpu.api.node import InitOptions
from aiogpu.api.options import Kind, Option, OptionTable, TaskOptions
from tests.repo.source_folders import ROOT

KEYWORDS = ROOT / "aiogpu/api/keywords.py"
HEAD: Final = '''"""The options as keywords, for type checkers and readers.

`python -m tests.docs.test_api_page` writes this file, from the tables of `api.options`
and `api.node`. Nothing imports it at run time: user modules import `api.options` in
every worker, and each annotation here would cost time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict

from aiogpu.api.options import GpuWhere
from aiogpu.core.model.request import PlacementGroupSpec


class Placement(Protocol):
    """The result of `aiogpu.placement(...)`, in code with a loop or without."""

    def placement_group_of(self) -> PlacementGroupSpec:
        """Return the specification."""


RetryOom = Literal["exclusive"] | Sequence[Literal["share", "exclusive"]]
RetryExceptions = bool | type[Exception] | Sequence[type[Exception]]
'''
ANY: Final = '''

class AnyKeywords(Options, ActorKeywords, total=False):
    """The options of `@remote(...)`, which may decorate a function or a class."""
'''


def shared_by(*kinds: Kind) -> set[str]:
    """The names of the options that all these take."""
    return set.intersection(*(set(TaskOptions.taken_by(kind)) for kind in kinds))


RESERVING: Final = shared_by("task", "actor", "lease", "gang")
COMMON: Final = shared_by("task", "actor")
CALL: Final = shared_by("call")


def entry(names: str, text: str) -> str:
    """One entry of a docstring, at most 88 columns wide."""
    return textwrap.fill(
        f"{names}: {text}",
        88,
        initial_indent=" " * 8,
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )


def keywords_of(
    table: type[OptionTable],
    kind: Kind,
    head: str,
    summary: str,
    inherited: Collection[str] = (),
) -> str:
    """The `TypedDict` of the options that a kind takes."""
    rows = table.taken_by(kind).values()
    docs = groupby(table.docs(kind).items(), key=lambda item: item[1])
    entries = [
        entry(", ".join(name for name, _ in items), text) for text, items in docs
    ]
    fields = [
        f"    {row.name}: {type_of(row, kind)}"
        for row in rows
        if row.name not in inherited
    ]
    opened = ["", "", f"class {head}:", f'    """{summary}', "", "    Attributes:"]
    return "\n".join([*opened, *entries, '    """', "", *fields, ""])


def base_of(head: str, summary: str, names: Collection[str]) -> str:
    """The `TypedDict` of options that others inherit."""
    rows = TaskOptions.taken_by("task").values()
    fields = [f"    {row.name}: {row.type}" for row in rows if row.name in names]
    opened = ["", "", f"class {head}:", f'    """{summary}"""', ""]
    return "\n".join([*opened, *fields, ""])


def type_of(row: Option[Any], kind: Kind) -> str:
    """The type of an option; None stands for a default, which a choice has not."""
    return row.type.removesuffix(" | None") if kind == "choice" else row.type


def current_keywords() -> str:
    """The text of the file, formatted."""
    text = "".join(
        [
            HEAD,
            base_of(
                "_Reserving(TypedDict, total=False)",
                "The options of tasks, actors, leases and gangs.",
                RESERVING,
            ),
            base_of(
                "_Common(_Reserving, total=False)",
                "The options of both tasks and actors.",
                COMMON - RESERVING,
            ),
            keywords_of(
                TaskOptions,
                "choice",
                "Choice(TypedDict, total=False)",
                "An entry of `any_of`: a whole request.",
            ),
            keywords_of(
                TaskOptions,
                "task",
                "Options(_Common, total=False)",
                "The options of a task, as `@remote(...)` and `.options(...)` take "
                "them.\n\n    Counts are at most 2_147_483_647 (2**31 - 1), "
                "`num_returns` 100_000; times are at\n    most 1_000_000_000 seconds.",
                COMMON,
            ),
            keywords_of(
                TaskOptions,
                "actor",
                "ActorKeywords(_Common, total=False)",
                "The options of an actor, as `@remote(...)` and `.options(...)` take "
                "them.\n\n    Counts are at most 2_147_483_647 (2**31 - 1).",
                COMMON,
            ),
            ANY,
            keywords_of(
                TaskOptions,
                "call",
                "MethodCallKeywords(TypedDict, total=False)",
                "The options of a method's calls, as `actor.method.options(...)` takes "
                "them.",
            ),
            keywords_of(
                TaskOptions,
                "method",
                "MethodKeywords(MethodCallKeywords, total=False)",
                "The options of a method, as `@aiogpu.method(...)` takes them.",
                CALL,
            ),
            keywords_of(
                TaskOptions,
                "lease",
                "LeaseKeywords(_Reserving, total=False)",
                "The options of a lease, as `lease(...)` takes them.",
                RESERVING,
            ),
            keywords_of(
                TaskOptions,
                "gang",
                "GangKeywords(_Reserving, total=False)",
                "The options of the ranks of a gang, as `gang(...)` takes them.",
                RESERVING,
            ),
            keywords_of(
                InitOptions,
                "node",
                "InitKeywords(TypedDict, total=False)",
                "The options of a node, as `init(...)` takes them.",
            ),
        ]
    )
    formatted = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", KEYWORDS, "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    )
    return formatted.stdout
