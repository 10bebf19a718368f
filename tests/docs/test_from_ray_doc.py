"""`docs/from-ray.md` cites tests that exist and shows programs that run.

A block that begins with `python run` is a whole program; the `text` block after it
is what it prints. Other Python blocks compile, with `await` outside of functions.
"""

import ast
import re
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.programs import printed_by

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-ray.md").read_text()
FENCE = re.compile(r"^```([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CITATION = re.compile(r"\b(tests/[\w/]+\.py)::(\w+)")


class Block(NamedTuple):
    kind: str
    text: str


BLOCKS = [Block(*found) for found in FENCE.findall(PAGE)]
PYTHON = [block.text for block in BLOCKS if block.kind.startswith("python")]
PROGRAMS = [
    (program.text, after.text if after.kind == "text" else None)
    for program, after in pairwise([*BLOCKS, Block("", "")])
    if program.kind == "python run"
]
CITATIONS = sorted(set(CITATION.findall(PAGE)))


def names(texts):
    """The first function of each text, to call its test by."""
    return [re.search(r"def (\w+)|$", text)[1] or "no function" for text in texts]


def functions_in(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize(("file", "function"), CITATIONS, ids=lambda part: part)
def test_a_cited_test_exists(file, function):
    assert function.startswith("test_")
    assert function in functions_in(ROOT / file)


def test_every_mention_of_a_test_file_names_a_test():
    assert len(CITATIONS) > 20
    assert PAGE.count("tests/") == len(CITATION.findall(PAGE))


@pytest.mark.parametrize("text", PYTHON, ids=names(PYTHON))
def test_python_compiles(text):
    compile(text, "docs/from-ray.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize(
    ("program", "output"), PROGRAMS, ids=names(text for text, _ in PROGRAMS)
)
def test_a_program_prints_what_stands_below_it(program, output, tmp_path):
    assert output is not None, "a text block with its output must follow"
    assert printed_by(program, tmp_path) == output


def test_every_statement_has_a_proof_a_departure_or_a_time():
    page = PAGE.partition("## API by API")[0]
    statements = re.split(r"^### \d+\. ", page, flags=re.MULTILINE)[1:]
    assert len(statements) == 18
    for statement in statements:
        title, _, body = statement.partition("\n")
        is_settled = CITATION.search(body)
        assert is_settled, title
