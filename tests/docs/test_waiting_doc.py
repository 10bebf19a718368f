"""`docs/waiting.md` shows what is printed, and its figures are the code's."""

import re
from pathlib import Path

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.request import DEEPEST, HORIZON
from aiogpu.core.records import TaskState
from aiogpu.observe.snapshot import LISTED
from tests.docs.programs import printed_by

PAGE = (Path(__file__).parents[2] / "docs" / "waiting.md").read_text()
FENCE = re.compile(r"^```([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STATE = re.compile(r"^- `(\w+)`", re.MULTILINE)


def settled(text: str) -> str:
    """Without what differs from run to run, and the columns that it shifts."""
    text = re.sub(r"\bpid \d+", "pid N", text)
    text = re.sub(r"\d+(\.\d)? s\b", "N s", text)
    return re.sub(r"(?<=\S) +", " ", text)


def test_the_program_prints_what_stands_below_it(tmp_path):
    (program, output) = FENCE.findall(PAGE)
    assert (program[0], output[0]) == ("python run", "text")
    assert settled(printed_by(program[1], tmp_path)) == settled(output[1])


CONFIG = SchedulerConfig()


def test_it_names_every_state():
    states = {state.value for state in TaskState}
    assert set(STATE.findall(PAGE)) == states | {"opening"}


@pytest.mark.parametrize(
    "words",
    [
        f"first of its line for {CONFIG.reserve_after:g} s and still does not fit",
        f"as take about {HORIZON * 1e3:g} ms together, at most {DEEPEST}",
        f"is not done after {CONFIG.long * 1e3:g} ms",
        f"of those that wait the first {LISTED};",
    ],
)
def test_its_figures_are_those_of_the_code(words):
    assert words in " ".join(PAGE.split())
