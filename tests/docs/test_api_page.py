"""Reference pages are complete: public names, exceptions, and the tables of options.

Tables of options come from the tables in `aiogpu.api.options` and `aiogpu.api.node`,
and so does `aiogpu/api/keywords.py`. `python -m tests.docs.test_api_page` writes all
these, and the pages of `test_generated_pages.py`.
"""

import inspect
import re
from itertools import groupby
from typing import Any

import pytest

import aiogpu
from aiogpu import (
    accelerators,
    errors,
    fastapi,
    joblib,
    opentelemetry,
    profiling,
    sync,
    types,
    util,
)
from aiogpu.api.node import InitOptions
from aiogpu.api.options import OptionTable, TaskOptions
from tests.docs import keywords_page
from tests.repo.source_folders import ROOT

API = ROOT / "docs/api.md"
OPTIONS_PAGE = ROOT / "docs/options.md"
OPTIONS = {
    "Options of a task": TaskOptions.docs("task"),
    "Options of an actor": TaskOptions.docs("actor"),
    "Options of a method": TaskOptions.docs("method"),
    "Options of the node": InitOptions.docs("node"),
}
ENTRY = re.compile(
    r"^(?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n {4}.*)*)", re.MULTILINE
)
TABLE = re.compile(r"(?<=\| name \| what it is \|\n\|---\|---\|\n)(?:\|.*\n)*")
NAME = re.compile(r"^\| `(aiogpu\.[\w.]+)` \|.*$", re.MULTILINE)
ERRORS = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type)
    and issubclass(value, errors.AiogpuError | errors.AiogpuWarning)
}


def documented(source: object) -> dict[str, str]:
    """The entries in a docstring, with their texts."""
    doc = inspect.getdoc(source) or ""
    section = re.split(r"\n(?:Attributes|Args):\n", doc)[1].partition("\n\n")[0]
    return {
        name: " ".join(entry["text"].split())
        for entry in ENTRY.finditer(inspect.cleandoc(section))
        for name in entry["names"].split(", ")
    }


def option_rows(docs: dict[str, str]) -> str:
    """The lines of a table of options."""
    rows = groupby(docs.items(), key=lambda entry: entry[1])
    return "".join(
        f"| {', '.join(f'`{name}`' for name, _ in entries)} | {text} |\n"
        for text, entries in rows
    )


def with_current_tables(page: str) -> str:
    """The page of options with up-to-date tables."""
    remaining = map(option_rows, OPTIONS.values())
    return TABLE.sub(lambda _: next(remaining), page)


def first_sentence(name: str) -> str:
    """What a public name is: the first paragraph of its docstring."""
    value: object = aiogpu
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    text = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    return text.replace("|", "\\|")


def with_current_names(page: str) -> str:
    """The page of the API with what each of its names is."""
    return NAME.sub(lambda row: f"| `{row[1]}` | {first_sentence(row[1])} |", page)


def test_the_api_page_says_what_each_name_is() -> None:
    page = API.read_text()
    assert page == with_current_names(page), "run tests.docs.test_api_page"
    assert [name for name in NAME.findall(page) if not first_sentence(name)] == []


def test_the_api_page_has_every_public_name_once() -> None:
    constants = vars(accelerators.types)
    vendors = [name for name in accelerators.__all__ if name not in constants]
    public = [
        *(f"aiogpu.{name}" for name in aiogpu.__all__ if name not in ERRORS),
        *(f"aiogpu.sync.{name}" for name in sync.__all__),
        *(f"aiogpu.fastapi.{name}" for name in fastapi.__all__),
        *(f"aiogpu.joblib.{name}" for name in joblib.__all__),
        *(f"aiogpu.util.{name}" for name in util.__all__),
        *(f"aiogpu.opentelemetry.{name}" for name in opentelemetry.__all__),
        *(f"aiogpu.profiling.{name}" for name in profiling.__all__),
        *(f"aiogpu.errors.{name}" for name in ERRORS),
        *(f"aiogpu.types.{name}" for name in types.__all__),
        *(f"aiogpu.accelerators.{name}" for name in vendors),
    ]
    result = NAME.findall(API.read_text())
    assert sorted(result) == sorted(public)


def test_the_page_of_exceptions_lists_each_with_its_builtin_base() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(ERRORS)
    for name, also in rows:
        assert also in [kind.__name__ for kind in ERRORS[name].__mro__[1:]], name
    exported = [name for name in ERRORS if name in aiogpu.__all__]
    text = " ".join(page.partition("most are also in")[2].split())
    assert re.findall(r"`(\w+)`", text.partition("The others")[0])[1:] == exported


def test_tables_of_options_are_up_to_date() -> None:
    page = OPTIONS_PAGE.read_text()
    assert len(TABLE.findall(page)) == len(OPTIONS)
    assert page == with_current_tables(page), "run tests.docs.test_api_page"


def test_keywords_for_type_checkers_are_up_to_date() -> None:
    keywords = keywords_page.KEYWORDS.read_text()
    assert keywords == keywords_page.current_keywords(), "run tests.docs.test_api_page"


@pytest.mark.parametrize("group", OPTIONS)
def test_every_table_of_options_is_on_the_page(group: str) -> None:
    assert f"\n## {group}\n" in OPTIONS_PAGE.read_text()


@pytest.mark.parametrize("table", [TaskOptions, InitOptions])
def test_the_docs_of_a_table_are_those_of_its_options(table: type[OptionTable]) -> None:
    _, *sections = re.split(r"\n\nOf an? (\w+):\n", inspect.getdoc(table) or "")
    kinds: Any = sections[::2]
    for kind, section in zip(kinds, sections[1::2], strict=True):
        lines = re.findall(r"^ {4}(\w[\w, ]*): ", section, re.MULTILINE)
        names = {name for line in lines for name in line.split(", ")}
        assert names <= set(table.docs(kind)), "an entry of no option"


if __name__ == "__main__":
    from tests.docs import test_generated_pages

    keywords_page.KEYWORDS.write_text(keywords_page.current_keywords())
    OPTIONS_PAGE.write_text(with_current_tables(OPTIONS_PAGE.read_text()))
    API.write_text(with_current_names(API.read_text()))
    test_generated_pages.write()
