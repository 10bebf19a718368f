"""`docs/leases.md` shows what is printed, and names what there is."""

import inspect
import re
from pathlib import Path

import pytest

import aiogpu
from aiogpu.api.node import FOREIGN
from aiogpu.api.options import CHECKS
from aiogpu.cli.run import (
    FAILED,
    KILLED_AFTER,
    NOT_EXECUTABLE,
    NOT_FOUND,
    NOT_IN_TIME,
    SENT_ON,
    run,
)
from aiogpu.runtime.devices.monitor import EACH
from aiogpu.runtime.devices.release import LIMIT
from aiogpu.wire.messages import LEASE_MARK
from tests.docs.programs import printed_by

PAGE = (Path(__file__).parents[2] / "docs" / "leases.md").read_text()
FENCE = re.compile(r"^```([^\n`]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def settled(text: str) -> str:
    return re.sub(r"pid \w+, for [\d.]+ s", "pid N, for N s", text)


def test_the_program_prints_what_stands_below_it(tmp_path):
    _, program, output = FENCE.findall(PAGE)
    assert (program[0], output[0]) == ("python run", "text")
    assert settled(printed_by(program[1], tmp_path)) == settled(output[1])


def test_it_names_every_option_of_the_command():
    options = {option for each in run.params for option in each.opts}
    named = set(re.findall(r"`(--[a-z-]+)", PAGE)) - {"--head"}
    assert named == {o for o in options if o.startswith("--")}


def test_it_names_every_option_of_a_lease():
    assert set(inspect.signature(aiogpu.lease).parameters) == set(CHECKS["lease"])
    assert all(f"`{option}`" in PAGE for option in CHECKS["lease"])


def test_it_names_what_a_lease_has():
    public = {name for name in vars(aiogpu.types.Lease) if not name.startswith("_")}
    assert all(re.search(rf"gpu\.{name}\b", PAGE) for name in public)


@pytest.mark.parametrize(
    "words",
    [
        f"then exit code {NOT_IN_TIME}",
        f"{NOT_FOUND} is a command that is not there, {NOT_EXECUTABLE} one",
        f"{FAILED} that no node could be asked",
        ", ".join(s.name for s in SENT_ON[:-1]) + f" and {SENT_ON[-1].name}",
        f"the variable `{LEASE_MARK}`",
        "(or two seconds)" if KILLED_AFTER == 2 else "",
        "in ten seconds is set aside" if LIMIT == 10 else "",
        "looked every second" if EACH == 1 else "",
        *(f'| `"{value}"`' for value in FOREIGN),
    ],
)
def test_its_words_are_those_of_the_code(words):
    assert words
    assert words in " ".join(PAGE.split())
