"""`docs/placement.md` shows what is printed, and names what there is."""

import inspect
import re
from pathlib import Path

import pytest

import aiogpu
from aiogpu.core.model.request import STRATEGIES
from tests.docs.programs import printed_by

PAGE = (Path(__file__).parents[2] / "docs" / "placement.md").read_text()
FENCE = re.compile(r"^```([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = FENCE.findall(PAGE)


@pytest.mark.parametrize("number", range(0, len(BLOCKS), 2))
def test_a_program_prints_what_stands_below_it(number, tmp_path):
    program, output = BLOCKS[number : number + 2]
    assert (program[0], output[0]) == ("python run", "text")
    assert printed_by(program[1], tmp_path) == output[1]


def test_it_names_every_argument_and_strategy():
    arguments = inspect.signature(aiogpu.placement).parameters
    assert all(f"| `{name}` |" in PAGE for name in arguments)
    assert all(f'`"{strategy}"`' in PAGE for strategy in STRATEGIES)


def test_it_names_what_a_placement_has():
    public = {name for name in vars(aiogpu.types.Placement) if not name.startswith("_")}
    public -= {"placement_group_of"}
    assert all(re.search(rf"group\.{name}\b", PAGE) for name in public)
