"""The driver dies after message 1, 2, 3 … of a scenario.

The program kills itself, at each message from the node's start to its end. Two seconds
later there is no worker, no process of a worker, and no directory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.faults.leftovers import processes_of, wait_until_gone
from tests.support.program import start

LIMIT = 2.0
"""Seconds after which nothing may be left."""
AT_ONCE = 4
"""Programs that run side by side."""

PROGRAM = """
    import asyncio, sys
    import aiogpu
    from tests.faults.task_scenarios import SCENARIOS
    from tests.faults.kill_at_message import MessageKiller

    async def main(scenario, at):
        with MessageKiller() as messages:
            messages.begin("driver", at)
            async with aiogpu.init(num_cpus=1, num_gpus=1):
                assert await SCENARIOS[scenario](0) == 2
            print(messages.passed)

    aiogpu.run(main(sys.argv[1], int(sys.argv[2])))
"""


class Program:
    """A driver that dies after message `at`."""

    def __init__(self, scenario: str, at: int) -> None:
        self.at = at
        self._scenario = scenario
        self._directory = tempfile.TemporaryDirectory(prefix="agd-", dir="/tmp")
        variables = {"XDG_RUNTIME_DIR": self._directory.name}
        self._process = start(PROGRAM, scenario, str(at), **variables)

    def check_end(self) -> bool:
        """Check that nothing is left; return False if there was no message `at`."""
        out, err = self._communicate()
        where = f"{self._scenario}, driver after {self.at}: {err}"
        has_died = self._process.returncode == -signal.SIGKILL
        assert has_died or self._process.returncode == 0, where
        try:
            wait_until_gone(LIMIT, self._directory.name)
        except AssertionError as error:
            error.add_note(where)
            raise
        self._directory.cleanup()
        if not has_died:
            assert out.count(",") + 1 < self.at, (where, out)
        return has_died

    def _communicate(self) -> tuple[str, str]:
        # Helpers hold the pipes open, so a closed pipe is no sign of the end.
        self._process.wait(timeout=60)
        try:
            return self._process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(processes_of(self._directory.name)) from None


def programs(scenario: str, stride: int) -> Generator[Program, None, None]:
    """Yield a program for each message, with a few of the next ones started."""
    started: list[Program] = []
    at = 0
    try:
        while True:
            while len(started) < AT_ONCE:
                at += stride
                started.append(Program(scenario, at))
            yield started.pop(0)
    finally:
        with ExitStack() as ends:
            for program in started:
                # The number of messages varies: messages that come together are one.
                ends.callback(program.check_end)


LONG_FORM = ("daemon", "isolated", "reused", "nested", "nested-async", "actor")


@pytest.mark.parametrize(
    ("scenario", "stride"),
    [
        ("daemon", 3),
        *(pytest.param(each, 1, marks=pytest.mark.slow) for each in LONG_FORM),
    ],
)
def test_a_driver_killed_at_any_message_leaves_nothing(
    scenario: str, stride: int
) -> None:
    """Every change runs each third message of one scenario; the full check runs all."""
    with closing(programs(scenario, stride)) as started:
        last = next(program.at for program in started if not program.check_end())
    assert last > stride, "no driver has died"


STILLBORN = """
    import os, signal
    import aiogpu
    from aiogpu.runtime.zygote import config
    from tests.contract import tasks

    start = config.start_interpreter

    def start_and_die(*args, **options):
        start(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    config.start_interpreter = start_and_die

    async def main():
        async with aiogpu.init(num_cpus=1):
            pass

    aiogpu.run(main())
"""


def test_a_driver_killed_before_its_zygote_is_ready_leaves_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="agd-", dir="/tmp") as directory:
        program = start(STILLBORN, XDG_RUNTIME_DIR=directory)
        program.communicate(timeout=60)
        assert program.returncode == -signal.SIGKILL
        wait_until_gone(LIMIT, directory)


HANGING = """
    import sys
    import aiogpu
    sys.path.insert(0, sys.argv[1])

    async def main():
        await aiogpu.init(preload=["endless"])

    aiogpu.run(main())
"""


def test_a_driver_killed_while_a_preload_hangs_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import pathlib, threading\n"
        f"pathlib.Path({str(tmp_path)!r}, 'in').touch()\nthreading.Event().wait()\n"
    )
    with tempfile.TemporaryDirectory(prefix="agd-", dir="/tmp") as directory:
        program = start(HANGING, str(tmp_path), XDG_RUNTIME_DIR=directory)
        while not (tmp_path / "in").exists():
            assert program.poll() is None
            os.sched_yield()
        program.kill()
        program.communicate(timeout=60)
        wait_until_gone(LIMIT, directory)
