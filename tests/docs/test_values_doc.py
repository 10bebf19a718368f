"""`docs/values.md` shows programs that run and what they print; its figures hold."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from aiogpu.runtime.objects.segments import PART
from aiogpu.runtime.objects.store import WARM
from aiogpu.serialization.references import SHARED_FROM
from aiogpu.wire.messages import WARM_BYTES as WARM_OF_WORKERS
from tests.docs.programs import printed_by

PAGE = (Path(__file__).parents[2] / "docs" / "values.md").read_text()
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


@pytest.mark.parametrize(
    "words",
    [
        f"From {SHARED_FROM // 1024} KiB of buffers on",
        f"below {SHARED_FROM // 1024} KiB lie in your program's memory",
        f"{PART:.0%}".replace("%", " % of the memory that is there"),
        f"up to {WARM >> 30} GiB by your program",
        f"and {WARM_OF_WORKERS >> 20} MiB by each worker",
    ],
)
def test_its_figures_are_those_of_the_code(words):
    assert words in " ".join(PAGE.split())
