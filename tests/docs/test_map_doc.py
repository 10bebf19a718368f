"""`docs/map.md` shows programs that run, and its figures are the code's."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from aiogpu.api.map import CALLS, DEFAULT_LIMIT, FILL_TIME, LONGEST, SHARE, TARGET
from tests.docs.programs import printed_by

PAGE = (Path(__file__).parents[2] / "docs" / "map.md").read_text()
FENCE = re.compile(r"^```([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = [
    (program, output if kind == "text" else None)
    for (first, program), (kind, output) in pairwise([*FENCE.findall(PAGE), ("", "")])
    if first == "python run"
]


def test_the_page_has_programs():
    assert len(PROGRAMS) == 3


@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_a_program_prints_what_stands_below_it(program, output, tmp_path):
    assert printed_by(program, tmp_path) == output


@pytest.mark.parametrize(
    "words",
    [
        f"`limit` items further ({DEFAULT_LIMIT} unless named)",
        f"Without `limit`, {CALLS} tasks are ahead",
        f"aims at tasks of about {TARGET * 1e3:g} ms",
        f"takes longer than {LONGEST * 1e3:g} ms gives back",
        f"fills a chunk for {FILL_TIME * 1e3:g} ms at most",
        f"room for {SHARE} tasks at least, so `limit={10 * SHARE}` bounds them to 10",
    ],
)
def test_its_figures_are_those_of_the_code(words):
    assert words in " ".join(PAGE.split())
