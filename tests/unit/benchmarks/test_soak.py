"""The soak can fail: each of its claims is seen not to hold."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from benchmarks.soak import shares
from benchmarks.soak.growth import Series
from benchmarks.soak.operation import Account, Operation
from benchmarks.soak.operations import OPERATIONS
from benchmarks.soak.record import Record
from tests.support.program import ROOT, environment


def operation(account: Account) -> Operation:
    return Operation("drawn", 1, "seed", account)


def settled(result: object = None, error: BaseException | None = None) -> Any:
    future = asyncio.get_running_loop().create_future()
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
    return future


async def test_ends_are_legal_or_told() -> None:
    account = Account()
    one = operation(account)
    assert await one.end(settled(1), 1)
    assert await one.end(settled(4), lambda found: found % 2 == 0)
    assert not await one.end(settled(error=ValueError("of the task")), 1, ValueError)
    assert not await one.end(settled(error=aiogpu.WorkerDiedError("killed")), 1)
    assert account.wrong == []
    assert not await one.end(settled(2), 1)
    assert not await one.end(settled(error=KeyError("of nobody")), 1, ValueError)
    assert not await one.end(settled(error=aiogpu.NodeDiedError("gone")), 1)
    assert len(account.wrong) == 3
    assert account.ends == Counter(
        ["result"] * 3 + ["ValueError", "WorkerDiedError", "KeyError", "NodeDiedError"]
    )


async def test_a_node_that_is_ended_may_be_told_of() -> None:
    account = Account(is_mortal=True)
    await operation(account).end(settled(error=aiogpu.NodeDiedError("gone")), 1)
    assert account.wrong == []


async def test_what_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.soak.operation.LIMIT", 0.01)
    account = Account()
    handle = asyncio.get_running_loop().create_future()

    async def never(one: Operation) -> None:
        await one.end(one.begin("a future", handle), None)

    await operation(account).run(never)
    (told,) = account.hung
    assert "has not ended in" in told
    assert "a future" in told
    assert handle.cancelled(), "the others are not to wait for it"


async def test_a_mistake_of_an_operation_is_told() -> None:
    async def wrong(one: Operation) -> None:
        raise AssertionError("it does not hold")

    account = Account()
    await operation(account).run(wrong)
    assert "it does not hold" in account.wrong[0]


def test_two_who_have_one_share_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in shares.environment(str(tmp_path)).items():
        monkeypatch.setenv(name, value)
    with shares.held([0], 0.5), shares.held([0], 0.25), shares.held([1], 1):
        shares.take([0], 0.25)[0].close()
        with pytest.raises(shares.OverlapError, match="2 quarters of GPU 0"):
            shares.take([0], 0.5)
        with pytest.raises(shares.OverlapError, match="of GPU 1"):
            shares.take([1], 0.25)
    with shares.held([0, 1], 2):
        pass


def test_growth_is_told_from_what_comes_and_goes() -> None:
    series = Series()
    series.samples = [10, 50, 52, 49, 51, 90, 50, 52, 50]
    assert abs(series.growth) < 3
    series.samples = [10, 50, 55, 60, 65, 70, 75, 80, 85]
    assert series.growth > 20
    series.samples = [1, 2]
    assert not series.is_enough


def test_a_claim_that_fails_once_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    record = Record()
    record.check("all is well", True)
    assert record.has_held
    record.look("all is well", ["no", "not at all"])
    record.add("figures", {"kills": 3})
    assert not record.has_held
    assert "FAILED: all is well: no; not at all" in capsys.readouterr().out
    table = record.table()
    assert "figures: kills 3" in table
    assert "all is well       2  FAILED 1 x" in table
    assert record.as_json()["claims"]["all is well"]["checks"] == 2


def test_each_operation_is_drawn_by_its_name() -> None:
    names = [operate.__name__ for operate in OPERATIONS]
    assert len(names) == len(set(names)) > 15
    assert all(OPERATIONS.values())


def test_the_command_says_what_it_takes() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", "--help"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    for option in ("--minutes", "--seed", "--embedded", "--service", "--json"):
        assert option in told


HALF = """
import asyncio
from benchmarks.soak import __main__ as soak

async def half(record, seed, seconds, tell):
    print("begun", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("its services are ended", flush=True)

soak.HALVES["service"] = half
soak.main(["--service"])
"""


@pytest.mark.parametrize(
    ("number", "status", "before"),
    [
        (signal.SIGTERM, 143, ""),
        (signal.SIGTERM, 143, "trap '' INT;"),  # as of a shell's job in the background
        (signal.SIGINT, 130, ""),
    ],
)
def test_whatever_ends_it_it_ends_what_it_has_started(
    number: signal.Signals, status: int, before: str
) -> None:
    with subprocess.Popen(
        ["sh", "-c", f'{before} exec "$@"', "sh", sys.executable, "-c", HALF],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as soak:
        assert soak.stdout is not None
        while "begun" not in soak.stdout.readline():
            assert soak.poll() is None
        soak.send_signal(number)
        told, _ = soak.communicate(timeout=60)
    assert "its services are ended" in told
    assert "all claims held" in told
    assert soak.returncode == status
