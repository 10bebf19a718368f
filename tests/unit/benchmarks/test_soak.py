"""The soak can fail: it notices when a claim does not hold."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from benchmarks.soak import tasks
from benchmarks.soak.monitor import Record, growth
from benchmarks.soak.operation import Account, Operation
from benchmarks.soak.sandbox import LIMIT_VARIABLE, Sandbox
from tests.support.program import ROOT, environment, start


def ended(end: object) -> Any:
    future = asyncio.get_running_loop().create_future()
    if isinstance(end, Exception):
        future.set_exception(end)
    else:
        future.set_result(end)
    return future


@pytest.mark.parametrize(
    ("end", "is_mortal", "is_legal"),
    [
        (1, False, True),
        (2, False, False),
        (ValueError("of the task"), False, True),
        (KeyError("of nobody"), False, False),
        (aiogpu.WorkerDiedError("killed"), False, True),
        (aiogpu.NodeDiedError("gone"), False, False),
        (aiogpu.NodeDiedError("gone"), True, True),
    ],
    ids=repr,
)
async def test_an_illegal_end_is_recorded(
    end: object, is_mortal: bool, is_legal: bool
) -> None:
    account = Account(is_mortal)
    operation = Operation("drawn", 1, "seed", account)
    assert await operation.end(ended(end), 1, ValueError) is (end == 1)
    assert account.ends.total() == 1
    assert (account.wrong == []) is is_legal


def test_a_share_that_two_tasks_hold_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tasks.LOCKS, str(tmp_path))
    with tasks.locked([0], 0.5), tasks.locked([0], 0.25), tasks.locked([1], 1):
        tasks.locked([0], 0.25).close()
        with pytest.raises(tasks.OverlapError, match="2 quarters of GPU 0"):
            tasks.locked([0], 0.5)
        with pytest.raises(tasks.OverlapError, match="of GPU 1"):
            tasks.locked([1], 0.25)
    with tasks.locked([0, 1], 2):
        pass


def test_growth_is_told_from_fluctuation() -> None:
    assert abs(growth([10, 50, 52, 49, 51, 90, 50, 52, 50])) < 3
    assert growth([10, 50, 55, 60, 65, 70, 75, 80, 85]) > 20


def test_a_claim_that_fails_once_fails_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = Record()
    record.check("all is well", [])
    assert record.holds
    record.check("all is well", ["no", "not at all"])
    record.figures["figures"]["kills"] = 3
    assert not record.holds
    assert "FAILED: all is well: no; not at all" in capsys.readouterr().out
    table = record.table()
    assert "figures: kills 3" in table
    assert "all is well       2  FAILED 1 x" in table


async def test_a_file_that_is_left_is_reported(tmp_path: Path) -> None:
    sandbox = Sandbox(str(tmp_path))
    assert await sandbox.left() == []
    Path(sandbox.environ["TMPDIR"], "spilled").touch()
    (remaining,) = await sandbox.left()
    assert remaining.endswith("/spilled")


SCENARIO = """
import asyncio
from benchmarks.soak import __main__ as soak, scenarios

class Waiting(scenarios.Scenario):
    async def run(self, seconds):
        print("begun", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print("the services are ended", flush=True)

soak.SCENARIOS["service"] = Waiting
soak.main(["service"])
"""


@pytest.mark.parametrize(
    ("number", "status", "before"),
    [
        (signal.SIGTERM, 143, "trap '' INT;"),  # as in a shell's background job
        (signal.SIGINT, 130, ""),
    ],
)
def test_a_signal_ends_the_soak_and_its_services(
    number: signal.Signals, status: int, before: str
) -> None:
    words = ["sh", "-c", f'{before} exec "$@"', "sh", sys.executable, "-c", SCENARIO]
    with subprocess.Popen(
        words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    ) as soak:
        assert soak.stdout is not None
        while "begun" not in soak.stdout.readline():
            assert soak.poll() is None
        soak.send_signal(number)
        output, _ = soak.communicate(timeout=60)
    assert "the services are ended" in output
    assert "all claims held" in output
    assert soak.returncode == status


PROGRAM = """
import aiogpu
from benchmarks.soak.operation import Account, Operation
from benchmarks.soak.tasks import echo, uninterruptible

async def waits(operation):
    call = operation.begin("a call", uninterruptible.remote(1))
    await operation.end(call, None)

async def main():
    account = Account()
    async with aiogpu.init(num_cpus=1):
        assert await echo.remote(1) == 1
        await Operation("waits", 1, "seed", account).run(waits)
        assert await echo.remote(2) == 2
    print(account.hung[0], flush=True)

aiogpu.run(main())
"""


def test_all_stacks_are_dumped_when_an_operation_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "1")
    sandbox = Sandbox(str(tmp_path))
    output, stderr = start(PROGRAM, **sandbox.environ).communicate(timeout=60)
    assert "waits 1 has not ended in 1 s: a call" in output, stderr
    assert "uninterruptible" in output, "names the task that hangs"
    assert "(aiogpu-work" in stderr
    assert " in uninterruptible" in stderr, "the worker's stack"
    assert "benchmarks/soak/sandbox.py" in stderr, "the program's stack"
