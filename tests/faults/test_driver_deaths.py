"""[B7] The death of the driver after message 1, 2, 3 … of its program's life.

The program kills itself, from the node's start to its end; two seconds later there
is no worker, nothing that a worker started, and no directory.
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

from tests.faults.remains import gone_within, living
from tests.support.program import start

LIMIT = 2.0
"""Seconds for which something may be left."""
AT_ONCE = 4
"""Programs that run side by side."""

PROGRAM = """
    import asyncio, sys
    import aiogpu
    from tests.faults.lives import LIVES
    from tests.faults.steps import Steps

    async def main(life, at):
        with Steps() as steps:
            steps.begin("driver", at)
            async with aiogpu.init(num_cpus=1, num_gpus=1):
                assert await LIVES[life](0) == 2
            print(steps.passed)

    aiogpu.run(main(sys.argv[1], int(sys.argv[2])))
"""


class Program:
    """A driver that dies after message `at`."""

    def __init__(self, life: str, at: int) -> None:
        self.at = at
        self._life = life
        self._place = tempfile.TemporaryDirectory(prefix="agd-", dir="/tmp")
        place = self._place.name
        self._process = start(PROGRAM, life, str(at), XDG_RUNTIME_DIR=place)

    def end(self) -> bool:
        """See that nothing is left; False if it was not reached."""
        out, err = self._communicate()
        place = self._place.name
        where = f"{self._life}, driver after {self.at}: {err}"
        is_reached = self._process.returncode == -signal.SIGKILL
        assert is_reached or self._process.returncode == 0, where
        try:
            gone_within(LIMIT, place)
        except AssertionError as error:
            error.add_note(where)
            raise
        self._place.cleanup()
        if not is_reached:
            assert out.count(",") + 1 < self.at, (where, out)
        return is_reached

    def _communicate(self) -> tuple[str, str]:
        # Its helpers hold its pipes open, so these are no sign of its end.
        self._process.wait(timeout=60)
        try:
            return self._process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(living(self._place.name)) from None


def programs(life: str, stride: int) -> Generator[Program, None, None]:
    """One for each step, a few of them started before they are asked for."""
    started: list[Program] = []
    at = 0
    try:
        while True:
            while len(started) < AT_ONCE:
                at += stride
                started.append(Program(life, at))
            yield started.pop(0)
    finally:
        with ExitStack() as ends:
            for program in started:
                # One may have more steps than another: messages that come together
                # are one.
                ends.callback(program.end)


@pytest.mark.parametrize(
    ("life", "stride"),
    [
        ("daemon", 3),
        *(
            pytest.param(life, 1, marks=pytest.mark.slow)
            for life in (
                "daemon",
                "isolated",
                "reused",
                "nested",
                "nested-soft",
                "actor",
            )
        ),
    ],
)
def test_each_step(life: str, stride: int) -> None:
    """With every change each third step of one life; each of all, if all is run."""
    with closing(programs(life, stride)) as each:
        last = next(program.at for program in each if not program.end())
    assert last > stride, "nobody has died"


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


def test_before_the_zygote_has_said_anything() -> None:
    with tempfile.TemporaryDirectory(prefix="agd-", dir="/tmp") as place:
        program = start(STILLBORN, XDG_RUNTIME_DIR=place)
        program.communicate(timeout=60)
        assert program.returncode == -signal.SIGKILL
        gone_within(LIMIT, place)


HANGING = """
    import sys
    import aiogpu
    sys.path.insert(0, sys.argv[1])

    async def main():
        await aiogpu.init(preload=["endless"])

    aiogpu.run(main())
"""


def test_while_a_module_to_preload_hangs(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import pathlib, threading\n"
        f"pathlib.Path({str(tmp_path)!r}, 'in').touch()\nthreading.Event().wait()\n"
    )
    with tempfile.TemporaryDirectory(prefix="agd-", dir="/tmp") as place:
        program = start(HANGING, str(tmp_path), XDG_RUNTIME_DIR=place)
        while not (tmp_path / "in").exists():
            assert program.poll() is None
            os.sched_yield()
        program.kill()
        program.communicate(timeout=60)
        gone_within(LIMIT, place)
