"""Programs on the pages print the output below them; links and cited tests exist.

A block that begins with `python run` is a program, and the `text` block below it is its
output, in tabs and lists too. The same holds for a `python` block of the README above a
`text` block. A block with `from=FILE` has parts of an example, with `...` between them.
All other Python blocks compile, with `await` outside of functions; blocks with
`file=NAME` belong to `test_testing_page.py`.
"""

import ast
import json
import re
import shlex
import sys
import tomllib
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from aiogpu.cli.main import cli
from tests.support.program import clean_environment, output_of, run_command

ROOT = Path(__file__).parents[2]
SITE = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
PAGES = {
    **{name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")},
    **{path.name: path.read_text() for path in sorted((ROOT / "design").glob("*.md"))},
    **SITE,
}
"""Pages by name: of the site, and of the repository."""
FENCE = re.compile(r"^( *)```([^\n`]+)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*(?:\S*/)?aiogpu (.+)$", re.MULTILINE)
CITATION = re.compile(r"\b(tests/[\w/]+\.py)::(\w+)")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
NAMED_FILE = re.compile(
    r"`((?:benchmarks/results|design|docs|examples)/[\w/.-]+\.\w+)`"
)
FOLDERS = (".", "docs", "design", "design/decisions", "benchmarks/results")


class Block(NamedTuple):
    """A fenced block of a page; `after` is the block below it."""

    page: str
    kind: str
    text: str
    after: tuple[str, str]

    @property
    def is_program(self) -> bool:
        readme = self.page == "README.md" and self.kind == "python"
        return self.kind == "python run" or (readme and self.after[0] == "text")


def fences(text: str) -> list[tuple[str, str]]:
    """The kind and the text of each fenced block, also in tabs and lists."""
    return [
        (kind, re.sub(rf"^{indent}", "", body, flags=re.MULTILINE))
        for indent, kind, body in FENCE.findall(text)
    ]


BLOCKS = [
    Block(page, *block, after)
    for page, text in PAGES.items()
    for block, after in pairwise([*fences(text), ("", "")])
]
PROGRAMS = [block for block in BLOCKS if block.is_program]
PARTS = [block for block in BLOCKS if block.kind.startswith("python from=")]
PYTHON = [block for block in BLOCKS if block.kind.startswith("python")]
CITED = sorted({cited for text in PAGES.values() for cited in CITATION.findall(text)})


LARGE = ("torch", "sklearn")
"""Packages that the pages use and the tests do not install."""


def ids_of(blocks: list[Block]) -> list[str]:
    """Test ids: the page, and the first function or class of the block."""
    names = [re.search(r"(?:def|class) (\w+)|$", block.text) for block in blocks]
    return [f"{b.page}-{n and n[1]}" for b, n in zip(blocks, names, strict=True)]


def comparable(text: str) -> str:
    """The text with masked process ids and times, and with single spaces."""
    text = re.sub(r"\bpid([= ])\w+", r"pid\1N", text)
    text = re.sub(r"\b\d+(\.\d+)? s\b", "N s", text)
    return re.sub(r"(?<=\S) +", " ", text)


def without_parts(text: str) -> str:
    """The text without percentages and without digits that a model has read."""
    return re.sub(r"\[\d(, \d)+\]", "[digits]", re.sub(r"\d+%", "N%", text))


@pytest.mark.parametrize("block", PROGRAMS, ids=ids_of(PROGRAMS))
def test_a_program_prints_the_text_below_it(block, tmp_path):
    """Files of the same page lie beside the program."""
    kind, output = block.after
    assert kind == "text", "a text block with its output must follow"
    for file in BLOCKS:
        if file.page == block.page and (name := file.kind.partition("file=")[2]):
            (tmp_path / name).write_text(file.text)
    program = tmp_path / "program.py"
    program.write_text(block.text)
    texts = [path.read_text() for path in tmp_path.iterdir()]
    needed = [each for each in LARGE if any(f"import {each}" in t for t in texts)]
    needed += [each for each in LARGE if any(f"from {each}" in t for t in texts)]
    if missing := [each for each in needed if find_spec(each) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if not needed:
        assert comparable(output_of(program)) == comparable(output)
        return
    # Accuracies hang on the version of torch, and so does the advice to preload it.
    ran = run_command(sys.executable, str(program), env=clean_environment())
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    assert without_parts(comparable(ran.stdout)) == without_parts(comparable(output))


@pytest.mark.parametrize("block", PYTHON, ids=ids_of(PYTHON))
def test_python_compiles(block):
    compile(block.text, block.page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def source_of(path: str) -> str:
    """The text of a program, or of the cells of a notebook."""
    text = (ROOT / path).read_text()
    if not path.endswith(".ipynb"):
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def compact(text: str) -> str:
    """The lines without indentation and blank lines."""
    lines = [line.strip() for line in text.splitlines()]
    return "".join(f"{line}\n" for line in lines if line)


@pytest.mark.parametrize("block", PARTS, ids=ids_of(PARTS))
def test_parts_of_an_example_are_in_the_example(block):
    remaining = compact(source_of(block.kind.partition("from=")[2]))
    for part in compact(block.text).split("...\n"):
        _, result, remaining = remaining.partition(part)
        assert result, part


def test_commands_and_their_options_are_known():
    """Commands in shell blocks, and examples of `--help`."""
    shells = [
        block.text
        for block in BLOCKS
        if block.kind in ("bash", "sh", "console") or block.page == "cli.md"
    ]
    lines = [line for text in shells for line in COMMAND.findall(text)]
    assert len(lines) > 30
    for line in lines:
        name, *words = shlex.split(re.split(r" [>|] ", line)[0], comments=True)
        command = cli.get_command(click.Context(cli), name)
        assert command, line
        command.make_context(name, words)  # raises UsageError


def test_the_pages_have_programs():
    assert len(PROGRAMS) > 30
    readme = [block for block in PYTHON if block.page == "README.md"]
    assert [b for b in readme if "print(" in b.text and not b.is_program] == []


@pytest.mark.parametrize("path", sorted({path for path, _ in CITED}))
def test_cited_tests_exist_and_run_with_every_change(path):
    functions = {
        node.name: [ast.unparse(mark) for mark in node.decorator_list]
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for function in [function for file, function in CITED if file == path]:
        assert function.startswith("test_")
        assert "pytest.mark.slow" not in functions[function]


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_and_named_files_exist(folder):
    missing = []
    for page in (ROOT / folder).glob("*.md"):
        # The recipes show lines of other pages, with the links of those pages.
        text = re.sub(
            r"^```diff.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
        )
        paths = [page.parent / to for to in LINK.findall(text)]
        paths += [ROOT / to for to in NAMED_FILE.findall(text)]
        missing += [(page.name, path) for path in paths if not path.exists()]
    assert missing == []


def test_every_page_is_in_the_menu_of_the_site():
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r": (\S+\.md)$", menu, re.MULTILINE)
    assert sorted(named) == sorted(SITE)


def test_the_changelog_has_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    versions = re.findall(
        r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert versions[0] == version


def test_each_guarantee_names_its_test():
    row = re.compile(r"^\| (?!fault \|)([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
    page = PAGES["proofs.md"]
    rows = row.findall(page)
    assert len(rows) == page.count("\n| ") - page.count("\n| fault |") > 30
    assert [fault for fault, _, proof in rows if not CITATION.search(proof)] == []


def test_each_statement_of_ray_has_a_proof():
    page = PAGES["ray-gpu-page.md"]
    proofs = re.findall(r"^\| \d+ \| .* \| ([^|]+) \|$", page, re.MULTILINE)
    assert len(proofs) == 18
    assert [proof for proof in proofs if not CITATION.search(proof)] == []


def test_the_readme_begins_with_the_commands_to_try_and_to_test():
    first, *_ = [block.text for block in BLOCKS if block.kind == "bash"]
    assert first == (
        "python3 -m venv .venv && .venv/bin/pip install -q '.[demo]' "
        "&& .venv/bin/aiogpu demo\n"
    )
    for tests in (
        PAGES["README.md"].split("\n## Tests\n")[1],
        PAGES["CONTRIBUTING.md"],
    ):
        _, command = fences(tests)[0]
        assert command == (
            "python3 -m venv .venv && .venv/bin/pip install -q -e '.[demo,test]' "
            "&& .venv/bin/python -m pytest -n 4\n"
        )
