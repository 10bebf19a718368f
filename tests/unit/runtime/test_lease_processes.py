"""Processes that carry the mark of a lease are found, and waited for."""

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
    loop, ended = asyncio.get_running_loop(), list[Collection[int]]()
    remains = LeaseProcessWatcher(loop, f"AIOGPU_LEASE={os.getpid()}.2", ended.append)
    await until(lambda: "1 processes" in repr(remains))
    assert not ended
    sleeper.kill()
    await until(lambda: ended)
    assert ended == [{sleeper.pid}]


@pytest.mark.either_loop
async def test_without_pidfds_the_search_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: int) -> int:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr("aiogpu.runtime.callers.leases.AGAIN", 0.0)
    loop, ended = asyncio.get_running_loop(), list[Collection[int]]()
    rounds: list[tuple[int, ...]] = [(), (4711,)]
    LeaseProcessWatcher(loop, "A=1", ended.append, lambda _: rounds.pop())
    await until(lambda: ended)
    assert ended == [{4711}]


@pytest.mark.either_loop
async def test_a_search_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds: list[tuple[int, ...]] = [()]

    def find(_: str) -> tuple[int, ...]:
        if len(failures) < 2:
            failures.append("no")
            raise OSError(24, "too many open files")
        return rounds.pop()

    failures: list[str] = []
    monkeypatch.setattr("aiogpu.runtime.callers.leases.AGAIN", 0.0)
    loop, ended = asyncio.get_running_loop(), list[Collection[int]]()
    LeaseProcessWatcher(loop, "A=1", ended.append, find)
    await until(lambda: ended)
    assert (ended, failures) == ([set()], ["no", "no"])


@pytest.mark.either_loop
async def test_a_closed_watcher_reports_nothing(
    sleeper: subprocess.Popen[bytes],
) -> None:
    loop, ended = asyncio.get_running_loop(), list[Collection[int]]()
    remains = LeaseProcessWatcher(loop, f"AIOGPU_LEASE={os.getpid()}.2", ended.append)
    await until(lambda: "1 processes" in repr(remains))
    remains.close()
    assert "0 processes" in repr(remains)
    late = LeaseProcessWatcher(loop, "A=1", ended.append, lambda _: ())
    late.close()
    await asyncio.sleep(0)
    assert not ended
