"""What tasks log by `logging` is shown, from the level on that the program has."""

from __future__ import annotations

import re

import pytest

from tests.cli.service.box import box
from tests.support.program import start

PROGRAM = """
    import logging, sys
    import aiogpu

    @aiogpu.remote
    def logs():
        log = logging.getLogger("lib")
        log.debug("a debug line")
        log.info("an info line")
        log.warning("a warning line")

    @aiogpu.remote(max_calls=1)
    def configures():
        logging.basicConfig(format="own %(levelname)s %(message)s", level=logging.DEBUG)
        logging.debug("format")

    async def main():
        async with aiogpu.init(OPTIONS):
            await logs.remote()
            await configures.remote()

    BEFORE
    aiogpu.run(main())
"""


def shown(before: str, options: str = "num_cpus=1", **variables: str) -> list[str]:
    """What the tasks' lines say."""
    program = start(
        PROGRAM.replace("OPTIONS", options).replace("BEFORE", before), **variables
    )
    out, err = program.communicate(timeout=120)
    assert (program.returncode, out) == (0, ""), err
    return re.findall(r"^\((?:logs|configures) pid=\d+\) (.*)$", err, re.MULTILINE)


LEVELS = [
    ("", ["a warning line"]),
    ("logging.basicConfig(level=logging.INFO)", ["an info line", "a warning line"]),
    (
        "logging.basicConfig(level=logging.DEBUG)",
        ["a debug line", "an info line", "a warning line"],
    ),
    ("logging.basicConfig(level=logging.ERROR)", []),
]


@pytest.mark.parametrize(("before", "lines"), LEVELS)
def test_a_task_logs_what_the_program_logs(before: str, lines: list[str]) -> None:
    assert shown(before) == [*lines, "own DEBUG format"]


def test_programs_of_one_node_log_what_each_of_them_logs() -> None:
    with box() as here:
        here.run("start", "--head", "--num-cpus=1")
        for before, lines in LEVELS:
            joined = {**here.variables, "AIOGPU_ADDRESS": "auto"}
            assert shown(before, "", **joined) == [*lines, "own DEBUG format"]
