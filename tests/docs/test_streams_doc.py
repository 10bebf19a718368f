"""`docs/streams.md` shows what is printed, and its figures are the code's."""

import re
from pathlib import Path

from aiogpu.api.options import MAX_BUFFERED
from tests.docs.programs import printed_by

PAGE = (Path(__file__).parents[2] / "docs" / "streams.md").read_text()
FENCE = re.compile(r"^```([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_program_prints_what_stands_below_it(tmp_path):
    (program, output) = FENCE.findall(PAGE)
    assert (program[0], output[0]) == ("python run", "text")
    assert printed_by(program[1], tmp_path) == output[1]


def test_its_figures_are_those_of_the_code():
    assert f"`max_buffered={MAX_BUFFERED}`" in PAGE
