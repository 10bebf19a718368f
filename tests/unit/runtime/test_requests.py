"""What callers ask of the node, what it does not trust, and leases' processes."""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiogpu.client.function_spec import FunctionSpec
from aiogpu.client.interface import Receiver
from aiogpu.client.spec_codec import dump_spec
from aiogpu.errors import AiogpuError, InfeasibleError, InternalError
from aiogpu.linux.cgroup import read_bytes
from aiogpu.runtime.callers import leases
from aiogpu.runtime.callers.leases import LeaseProcessWatcher, find_marked
from aiogpu.runtime.callers.requests import Requests
from aiogpu.runtime.workers.slots import LiveWorker
from aiogpu.wire.messages import (
    ChildFailed,
    Declare,
    Message,
    Submit,
)
from tests.support.until import until
from tests.unit.runtime import fakes
from tests.unit.runtime.fakes import FakePeer


class FakeDriver:
    """Notes what it is asked; tasks end when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.receivers: dict[int, Receiver] = {}
        self.funcs: list[FunctionSpec] = []
        self.ends_at_once = False
        self.actors = SimpleNamespace()
        self.scheduler = SimpleNamespace(clients=None)
        self.on_report = self.asked.append

    def submit(
        self,
        func: FunctionSpec,
        payload: bytes,
        receiver: Receiver,
        parent: int,
        _client: int = 0,
    ) -> int:
        task = 100 + len(self.funcs)
        self.funcs.append(func)
        self.asked.append(("submit", payload, parent))
        if self.ends_at_once:
            receiver.settle(InfeasibleError("at once"))
        else:
            self.receivers[task] = receiver
        return task

    def knows(self, task: int) -> bool:
        return task in self.receivers

    def cancel(self, task: int) -> None:
        self.asked.append(("cancel", task))

    def wait(
        self, task: int, children: tuple[int, ...], is_elsewhere: bool = False
    ) -> None:
        assert not is_elsewhere
        self.asked.append(("wait", task, children))

    def receiver_of(self, task: int) -> Receiver | None:
        return self.receivers.get(task)


class FakeStore:
    """Has lent nothing to anybody."""


class RequestStory:
    """A nest between a paper driver and workers with paper peers."""

    def __init__(self) -> None:
        self.driver = FakeDriver()
        self.refusal: AiogpuError | None = None
        self.driver.actors.check = self.check
        self.nested = Requests(self.driver, FakeStore())  # type: ignore[arg-type]

    def check(self, _func: FunctionSpec, _payload: bytes) -> None:
        if self.refusal is not None:
            raise self.refusal

    def worker(self, number: int = 1) -> tuple[LiveWorker, FakePeer]:
        worker, peer = LiveWorker(number, None, None), FakePeer()  # type: ignore[arg-type]
        worker.peer = peer  # type: ignore[assignment]
        return worker, peer

    def hear(self, worker: LiveWorker, *said: Message) -> None:
        for message in said:
            self.nested.on_message(worker, message)


@pytest.fixture
def story() -> RequestStory:
    return RequestStory()


def declaration(
    func: int = 7, payload: bytes = b"function", priority: int = 0, **changed: Any
) -> Declare:
    told = replace(fakes.func(), **changed)
    told = replace(told, spec=replace(told.spec, priority=priority))
    return Declare(func, told.spec.name, dump_spec(told), payload)


def error_in(failed: Message) -> Exception:
    assert isinstance(failed, ChildFailed)
    assert failed.payload is not None
    error: Exception = pickle.loads(failed.payload)
    return error


def test_what_two_workers_declare_alike_is_one_site(story: RequestStory) -> None:
    """So that `max_calls`, what is sent, and how long it takes are known of all."""
    (one, _), (two, _) = story.worker(1), story.worker(2)
    story.hear(one, declaration(7), declaration(8), Submit(3, 1, 7, b""))
    story.hear(one, Submit(3, 2, 8, b""))
    story.hear(two, declaration(9), Submit(4, 1, 9, b""))
    assert len(set(map(id, story.driver.funcs))) == 1
    story.hear(two, declaration(10, priority=5), Submit(4, 2, 10, b""))
    story.hear(two, declaration(11, b"other"), Submit(4, 3, 11, b""))
    *_, urgent, other = story.driver.funcs
    assert urgent.function is story.driver.funcs[0].function
    assert urgent.spec.priority == 5
    assert other.function.payload == b"other"
    assert len({func.id for func in story.driver.funcs}) == 3


def test_a_function_that_was_never_declared_is_an_error(story: RequestStory) -> None:
    worker, peer = story.worker()
    story.hear(worker, Submit(3, 1, 7, b""))
    assert isinstance(error_in(peer.sent[0]), InternalError)


def test_only_so_much_is_remembered(
    story: RequestStory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.runtime.callers.requests.KEPT", 4)
    worker, peer = story.worker()
    for func in range(1, 20):
        story.hear(worker, declaration(func, b"%d" % func), Submit(3, func, func, b""))
        story.hear(worker, declaration(1, b"1"))
        story.hear(worker, Submit(3, 100 + func, 1, b""))
    assert peer.sent == [], "what was declared last is known"
    assert len(worker.declared) == 4
    assert len(story.nested._functions) + len(story.nested._funcs) < 12


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


def test_one_that_only_begins_its_program_is_found(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernel shows none of its variables for a moment."""
    (tmp_path / str(sleeper.pid)).symlink_to(f"/proc/{sleeper.pid}")
    shown = [b"", b"", *[read_bytes(f"/proc/{sleeper.pid}/environ")] * 9]
    monkeypatch.setattr(leases, "read_bytes", lambda _path: shown.pop(0))
    mark = f"AIOGPU_LEASE={os.getpid()}.2"
    assert find_marked(mark, tmp_path) == (sleeper.pid,)
    assert len(shown) == 8, "it was found at the third look, and not looked at again"
    # One without any variables is no reason to wait for ever.
    monkeypatch.setattr(leases, "read_bytes", lambda _path: b"")
    assert find_marked(mark, tmp_path) == ()


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
