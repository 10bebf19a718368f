"""`docs/accelerators.md` shows programs that run, all types and all vendors."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from aiogpu import accelerators
from aiogpu.accelerators import types
from aiogpu.accelerators.registry import KNOWN, vendor_of
from aiogpu.engines.devices import LIMIT
from tests.docs.programs import printed_by

PAGE = (Path(__file__).parents[2] / "docs" / "accelerators.md").read_text()
FENCE = re.compile(r"^```([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = FENCE.findall(PAGE)
PROGRAMS = [
    (program, output if kind == "text" else None)
    for (first, program), (kind, output) in pairwise([*BLOCKS, ("", "")])
    if first == "python run"
]


def test_the_page_has_programs():
    assert len(PROGRAMS) == 3


@pytest.mark.parametrize(("program", "output"), PROGRAMS)
def test_a_program_prints_what_stands_below_it(program, output, tmp_path):
    assert printed_by(program, tmp_path) == output


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "python"])
def test_other_blocks_run(text):
    exec(compile(text, "docs/accelerators.md", "exec"), {"__name__": "a_page"})


@pytest.mark.parametrize("name", sorted(set(accelerators.__all__) & set(vars(types))))
def test_every_type_is_there(name):
    assert f"`{getattr(accelerators, name)}`" in PAGE


@pytest.mark.parametrize("entry", KNOWN, ids=lambda entry: entry.name)
def test_every_vendor_is_there(entry):
    vendor = vendor_of(entry.kind)
    asked = vendor.option if entry.kind == "GPU" else entry.kind
    assert f"| `{asked}` | `{entry.variable}` |" in PAGE


def test_its_figures_are_those_of_the_code():
    assert f"waits {LIMIT:g} seconds for each" in PAGE
