"""`docs/actors.md` shows programs that run, and what they print."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs.programs import printed_by

PAGE = (Path(__file__).parents[2] / "docs" / "actors.md").read_text()
FENCE = re.compile(r"^```([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [*FENCE.findall(PAGE), ("", "")]
PROGRAMS = [
    (program, output if kind == "text" else None)
    for (first, program), (kind, output) in pairwise(BLOCKS)
    if first == "python run"
]


def test_the_page_has_programs():
    assert len(PROGRAMS) >= 2


@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_a_program_prints_what_stands_below_it(program, output, tmp_path):
    assert output is not None, "a text block with its output must follow"
    assert printed_by(program, tmp_path) == output
