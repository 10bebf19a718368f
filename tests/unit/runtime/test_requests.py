"""Requests of nested callers, and the search for the processes of a lease."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import Receiver
from aiogpu.client.spec_codec import dump_spec
from aiogpu.errors import InternalError
from aiogpu.linux.cgroup import read_bytes
from aiogpu.runtime.callers import leases
from aiogpu.runtime.callers.leases import LeaseProcessWatcher, find_marked
from aiogpu.runtime.callers.requests import Requests
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.wire.messages import ChildFailed, Declare, Message, Submit
from tests.support.waits import until
from tests.unit.runtime import fakes
from tests.unit.runtime.fakes import FakePeer


class FakeDriver:
    """Records requests."""

    def __init__(self) -> None:
        self.funcs: list[FunctionSpec] = []
        self.actors = SimpleNamespace(check=lambda *_: None)
        self.scheduler = SimpleNamespace(clients=None)
        self.on_report = list
        self.expect_imports = bool

    def submit(
        self,
        func: FunctionSpec,
        payload: bytes,
        receiver: Receiver,
        parent: int,
        _client: int = 0,
    ) -> int:
        self.funcs.append(func)
        return 100 + len(self.funcs)

    def knows(self, _task: int) -> bool:
        return True


class RequestStory:
    """The handler of requests, with a fake driver and workers with fake peers."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.nested = Requests(self.driver, SimpleNamespace())  # type: ignore[arg-type]

    def worker(self, number: int = 1) -> tuple[LiveWorker, FakePeer]:
        worker, peer = LiveWorker(number, None, None), FakePeer()  # type: ignore[arg-type]
        worker.peer = peer  # type: ignore[assignment]
        return worker, peer

    def receive(self, worker: LiveWorker, *messages: Message) -> None:
        for message in messages:
            self.nested.on_message(worker, message)


@pytest.fixture
def story() -> RequestStory:
    return RequestStory()


def declaration(
    func: int = 7, payload: bytes = b"function", priority: int = 0
) -> Declare:
    declared = fakes.func()
    declared = replace(declared, spec=replace(declared.spec, priority=priority))
    return Declare(func, declared.spec.name, dump_spec(declared), payload)


def test_equal_declarations_of_workers_share_one_function(story: RequestStory) -> None:
    """So `max_calls`, sent functions and durations count for all workers."""
    (worker_1, _), (worker_2, _) = story.worker(1), story.worker(2)
    story.receive(worker_1, declaration(7), declaration(8), Submit(3, 1, 7, b""))
    story.receive(worker_1, Submit(3, 2, 8, b""))
    story.receive(worker_2, declaration(9), Submit(4, 1, 9, b""))
    assert len(set(map(id, story.driver.funcs))) == 1
    story.receive(worker_2, declaration(10, priority=5), Submit(4, 2, 10, b""))
    story.receive(worker_2, declaration(11, b"other"), Submit(4, 3, 11, b""))
    *_, urgent, other = story.driver.funcs
    assert urgent.function is story.driver.funcs[0].function
    assert urgent.spec.priority == 5
    assert other.function.payload == b"other"
    assert len({func.id for func in story.driver.funcs}) == 3


def test_submit_of_an_undeclared_function_fails(story: RequestStory) -> None:
    worker, peer = story.worker()
    story.receive(worker, Submit(3, 1, 7, b""))
    (failed,) = peer.sent
    assert isinstance(failed, ChildFailed)
    assert isinstance(pickle.loads(failed.payload or b""), InternalError)


def test_number_of_remembered_declarations_is_limited(
    story: RequestStory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.runtime.callers.requests.KEPT", 4)
    worker, peer = story.worker()
    for func in range(1, 20):
        story.receive(
            worker, declaration(func, b"%d" % func), Submit(3, func, func, b"")
        )
        story.receive(worker, declaration(1, b"1"))
        story.receive(worker, Submit(3, 100 + func, 1, b""))
    assert peer.sent == [], "the latest declarations are known"
    assert len(worker.declared) == 4
    assert len(story.nested._functions) + len(story.nested._funcs) < 12


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the marks of two leases in its environment."""
    variables = {**os.environ, "AIOGPU_LEASE": f"outer.1,{os.getpid()}.2"}
    with subprocess.Popen(["sleep", "60"], env=variables) as process:
        yield process
        process.kill()


def test_search_finds_processes_by_their_mark(sleeper: subprocess.Popen[bytes]) -> None:
    assert find_marked(f"AIOGPU_LEASE={os.getpid()}.2") == (sleeper.pid,)
    assert find_marked(f"AIOGPU_LEASE={os.getpid()}") == ()
    assert find_marked(f"OTHER={os.getpid()}.2") == ()


def test_search_finds_a_process_during_its_exec(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """During an exec, the kernel shows an empty environment for a moment."""
    (tmp_path / str(sleeper.pid)).symlink_to(f"/proc/{sleeper.pid}")
    shown = [b"", b"", *[read_bytes(f"/proc/{sleeper.pid}/environ")] * 9]
    monkeypatch.setattr(leases, "read_bytes", lambda _path: shown.pop(0))
    mark = f"AIOGPU_LEASE={os.getpid()}.2"
    assert find_marked(mark, tmp_path) == (sleeper.pid,)
    assert len(shown) == 8, "found at the third read, and not read again"
    # A process without any variables does not block the search.
    monkeypatch.setattr(leases, "read_bytes", lambda _path: b"")
    assert find_marked(mark, tmp_path) == ()


@pytest.mark.either_loop
async def test_watcher_repeats_search_without_pidfds(
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
async def test_watcher_repeats_a_failed_search(monkeypatch: pytest.MonkeyPatch) -> None:
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
async def test_closed_watcher_reports_nothing(sleeper: subprocess.Popen[bytes]) -> None:
    loop, ended = asyncio.get_running_loop(), list[Collection[int]]()
    watcher = LeaseProcessWatcher(loop, f"AIOGPU_LEASE={os.getpid()}.2", ended.append)
    await until(lambda: "1 processes" in repr(watcher))
    watcher.close()
    assert "0 processes" in repr(watcher)
    LeaseProcessWatcher(loop, "A=1", ended.append, lambda _: ()).close()
    await asyncio.sleep(0)
    assert not ended
