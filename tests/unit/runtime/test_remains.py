"""What a lease was for is found by its mark, and waited for."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Collection, Iterator

import pytest

from aiogpu.runtime.callers.leases import LeaseProcessWatcher, find_marked
from tests.support.until import until


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is marked, as one of two leases."""
    variables = {**os.environ, "AIOGPU_LEASE": f"outer.1,{os.getpid()}.2"}
    with subprocess.Popen(["sleep", "60"], env=variables) as process:
        yield process
        process.kill()


def test_the_marked_are_found(sleeper: subprocess.Popen[bytes]) -> None:
    assert find_marked(f"AIOGPU_LEASE={os.getpid()}.2") == (sleeper.pid,)
    assert find_marked(f"AIOGPU_LEASE={os.getpid()}") == ()
    assert find_marked(f"OTHER={os.getpid()}.2") == ()


@pytest.mark.either_loop
async def test_their_ends_are_awaited(sleeper: subprocess.Popen[bytes]) -> None:
    loop, told = asyncio.get_running_loop(), list[Collection[int]]()
    remains = LeaseProcessWatcher(loop, f"AIOGPU_LEASE={os.getpid()}.2", told.append)
    await until(lambda: "1 processes" in repr(remains))
    assert not told
    sleeper.kill()
    await until(lambda: told)
    assert told == [{sleeper.pid}]


@pytest.mark.either_loop
async def test_it_is_looked_until_there_is_none() -> None:
    loop, told = asyncio.get_running_loop(), list[Collection[int]]()
    ended = subprocess.Popen(["true"])
    ended.wait()
    rounds: list[tuple[int, ...]] = [(), (ended.pid,), (ended.pid,)]
    LeaseProcessWatcher(loop, "A=1", told.append, lambda _: rounds.pop())
    await until(lambda: told)
    assert (told, rounds) == ([{ended.pid}], [])


@pytest.mark.either_loop
async def test_where_an_end_cannot_be_seen_it_is_looked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: int) -> int:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr("aiogpu.runtime.callers.leases.AGAIN", 0.0)
    loop, told = asyncio.get_running_loop(), list[Collection[int]]()
    rounds: list[tuple[int, ...]] = [(), (4711,)]
    LeaseProcessWatcher(loop, "A=1", told.append, lambda _: rounds.pop())
    await until(lambda: told)
    assert told == [{4711}]


@pytest.mark.either_loop
async def test_where_it_cannot_be_looked_it_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds: list[tuple[int, ...]] = [()]

    def find(_: str) -> tuple[int, ...]:
        if len(told_off) < 2:
            told_off.append("no")
            raise OSError(24, "too many open files")
        return rounds.pop()

    told_off: list[str] = []
    monkeypatch.setattr("aiogpu.runtime.callers.leases.AGAIN", 0.0)
    loop, told = asyncio.get_running_loop(), list[Collection[int]]()
    LeaseProcessWatcher(loop, "A=1", told.append, find)
    await until(lambda: told)
    assert (told, told_off) == ([set()], ["no", "no"])


@pytest.mark.either_loop
async def test_who_is_not_waited_for_any_more_is_not_told_of(
    sleeper: subprocess.Popen[bytes],
) -> None:
    loop, told = asyncio.get_running_loop(), list[Collection[int]]()
    remains = LeaseProcessWatcher(loop, f"AIOGPU_LEASE={os.getpid()}.2", told.append)
    await until(lambda: "1 processes" in repr(remains))
    remains.close()
    assert "0 processes" in repr(remains)
    late = LeaseProcessWatcher(loop, "A=1", told.append, lambda _: ())
    late.close()
    await asyncio.sleep(0)
    assert not told
