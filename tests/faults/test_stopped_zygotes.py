"""[B7] What a killed driver leaves where its zygote or a keeper is stopped: nothing.

Somebody else stops them (SIGSTOP). The kernel continues them as their parent dies.
"""

from __future__ import annotations

import os
import signal
import tempfile

import psutil
import pytest

from tests.faults.remains import gone_within
from tests.support.cgroups import groups_of
from tests.support.program import start

LIMIT = 20.0
"""Seconds; what nobody continues stays for ever."""

PROGRAM = """
    import asyncio, sys, threading
    import aiogpu
    from tests.contract import tasks

    async def main():
        async with aiogpu.init(num_cpus=1, num_gpus=1):
            if sys.argv[1] == "with a keeper":
                await tasks.add.remote(1)
            print("ready", flush=True)
            await asyncio.Event().wait()

    if sys.argv[2] == "in a thread":
        thread = threading.Thread(target=asyncio.run, args=(main(),))
        thread.start()
        thread.join()
    else:
        aiogpu.run(main())
"""


@pytest.mark.parametrize("where", ["in the main thread", "in a thread"])
@pytest.mark.parametrize(
    ("has", "stopped", "killed"),
    [
        ("no keeper", "aiogpu-zygote", ""),
        ("with a keeper", "aiogpu-zygote", ""),
        ("with a keeper", "aiogpu-", ""),
        ("with a keeper", "aiogpu-keep", "aiogpu-zygote"),
    ],
)
def test_a_killed_driver(has: str, stopped: str, killed: str, where: str) -> None:
    with tempfile.TemporaryDirectory(prefix="agd-", dir="/tmp") as place:
        program = start(PROGRAM, has, where, XDG_RUNTIME_DIR=place)
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        helpers = psutil.Process(program.pid).children(recursive=True)
        for helper in helpers:
            if helper.name().startswith(stopped):
                helper.suspend()
        groups = groups_of(program.pid)
        program.send_signal(signal.SIGSTOP)
        for helper in helpers:
            if killed and helper.name().startswith(killed):
                helper.kill()
        program.kill()
        program.wait(60)
        try:
            gone_within(LIMIT, place)
        finally:
            for helper in helpers:
                if helper.is_running():
                    helper.kill()
            program.communicate()
        assert {*groups} & {*groups_of(program.pid)} == set()
        assert program.returncode == -signal.SIGKILL
        assert os.listdir(place) == []
