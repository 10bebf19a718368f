"""Batches of submissions and results: ids, order, cost, and polling."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from aiogpu.client.spec_codec import dump_spec
from aiogpu.core.effects import Effect, Revoke
from aiogpu.core.model.ids import ClientId, TaskId, WorkerId
from aiogpu.core.model.units import CPU, UNIT
from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.queue.timers import AlarmKind
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.errors import InternalError, TaskTimeoutError
from aiogpu.runtime import node as runtime_node
from aiogpu.runtime.callers import requests
from aiogpu.runtime.callers.caller import Caller, Child, Client
from aiogpu.runtime.callers.requests import Requests
from aiogpu.runtime.driver import Driver
from aiogpu.runtime.node import AWAKE, SHORT, BusyPoll
from aiogpu.runtime.pending_tasks import Call
from aiogpu.runtime.workers import message_router as module
from aiogpu.runtime.workers.message_router import EVERY, FEW, LONGEST, InlinePoller
from aiogpu.wire.codec import LARGE
from aiogpu.wire.messages import ChildDone, Declare, Done, Submit
from tests.unit.runtime import fakes
from tests.unit.runtime.fakes import FakePeer

pytestmark = pytest.mark.either_loop


MINE = ClientId(1 << 26)


class FakeCommands:
    """Records the tasks that were sent to the worker."""

    def __init__(self) -> None:
        self.sent: deque[int] = deque()

    def assign(self, _worker: int, task: int, *_: object) -> None:
        self.sent.append(task)

    def send_ahead(
        self, worker: int, tasks: list[int], calls: list[Call], number: int
    ) -> None:
        self.sent.extend(tasks)
        for call in calls:
            call.worker, call.number = worker, (number := number + 1)

    def begun(self, _worker: int) -> int:
        return 0


def make_driver(scheduler: Scheduler, commands: object) -> Driver:
    pool = SimpleNamespace(commands=commands, spawn=lambda *_: None, pids={})
    return Driver(
        asyncio.get_running_loop(),
        scheduler,
        SimpleNamespace(bind=lambda *_: None),  # type: ignore[arg-type]
        lambda *_: None,
        lambda _: pool,  # type: ignore[arg-type, return-value]
    )


class OneWorkerNode:
    """A node with one program and one worker, whose tasks the test ends."""

    def __init__(self) -> None:
        self.commands, self.peer = FakeCommands(), FakePeer()
        self.scheduler = Scheduler(Ledger({CPU: UNIT}))
        self.driver = make_driver(self.scheduler, self.commands)
        self.driver.feed(Scheduler.join, MINE, 1.0, Limits())
        self.nested = Requests(self.driver, SimpleNamespace())  # type: ignore[arg-type]
        self.client = Client(MINE, client=MINE, peer=self.peer)  # type: ignore[arg-type]
        spec = dump_spec(fakes.func())
        for func in (1, 2):
            declaration = Declare(func, "train", spec, b"f")
            self.nested.on_message(self.client, declaration)

    def submit(self, *numbers: int, func: int = 1) -> None:
        batch = [Submit(0, number, func, b"%d" % number) for number in numbers]
        self.nested.submit_all(self.client, batch)

    def end(self, count: int, **payloads: bytes) -> list[int]:
        """Let the worker end the next `count` tasks; return them."""
        tasks = [self.commands.sent.popleft() for _ in range(count)]
        done = [
            Done(task, payloads.get(f"_{task}", b"r%d" % task), 5) for task in tasks
        ]
        self.driver.on_done(1, done)
        return tasks

    @property
    def reported(self) -> list[int]:
        """The program's numbers of the tasks whose end was reported, in order."""
        return [m.child for m in self.peer.sent if isinstance(m, ChildDone)]


@pytest.fixture
async def node() -> OneWorkerNode:
    node = OneWorkerNode()
    node.submit(1)
    node.driver.on_started(1)
    node.end(1)
    assert node.reported == [1]
    return node


async def test_results_in_a_batch_keep_their_order(node: OneWorkerNode) -> None:
    node.submit(*range(2, 102))
    assert len(node.client.children) == 100
    while node.commands.sent:
        node.end(min(7, len(node.commands.sent)))
    assert node.reported == [*range(1, 102)]
    assert node.client.children == {}
    assert not node.scheduler.tasks
    history = node.driver.results.history
    assert history.outcomes == {"finished": 101}
    assert len(history.ring) < 50, "most tasks ended in batches"
    assert {message.payload for message in node.peer.sent} == {  # type: ignore[union-attr]
        b"r%d" % task for task in range(1, 102)
    }


@pytest.mark.parametrize("limits", [Limits(), Limits(max_waiting=1000)])
async def test_a_batch_costs_the_same_for_each_task(
    node: OneWorkerNode, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a limit must be checked for each."""
    node.driver.feed(Scheduler.join, MINE, 1.0, limits)
    made: list[Child] = []

    def make(caller: Caller, number: int) -> Child:
        made.append(Child(caller, number))
        return made[-1]

    monkeypatch.setattr(requests, "Child", make)
    node.submit(*range(2, 302))
    assert len(made) == 300


class RaisingReceiver:
    """A receiver that raises when it gets a result, and records errors."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def settle(self, outcome: bytes | Exception) -> None:
        if isinstance(outcome, bytes):
            raise ValueError("not this one")
        self.errors.append(outcome)


class RecordingReceiver:
    """A receiver that records results."""

    def __init__(self, into: list[bytes], then: Any = int) -> None:
        self._into = into
        self._then = then

    def settle(self, payload: bytes) -> None:
        self._into.append(payload)
        self._then()


async def test_receiver_that_raises_harms_no_other_receiver(
    node: OneWorkerNode, caplog: pytest.LogCaptureFixture
) -> None:
    results: list[bytes] = []
    raising, recording = RaisingReceiver(), RecordingReceiver(results)
    cancelling = RecordingReceiver(results, lambda: node.driver.cancel(6))
    for receiver in (recording, recording, raising, cancelling, *[recording] * 21):
        node.driver.submit(node.client.declared[1], b"", receiver, None, MINE)  # type: ignore[arg-type]
    node.end(1)
    node.end(6)
    assert results == [b"r2", b"r3", b"r5", b"r7", b"r8"], "task 6 was cancelled"
    assert [type(error) for error in raising.errors] == [InternalError]
    assert "not this one" in str(raising.errors[0])
    assert "failed to settle" in caplog.text
    assert not node.driver.knows(6)


@pytest.mark.parametrize("reason", ["values", "large", "other", "fetched"])
async def test_result_with_extra_work_is_handled_separately(
    node: OneWorkerNode, reason: str
) -> None:
    node.submit(*range(2, 40))
    node.end(1)
    _, second, *_ = node.commands.sent
    call: Any = node.driver.call_of(second)  # type: ignore[arg-type]
    child = call.receiver
    results: list[bytes] = []
    payloads = {}
    if reason == "values":
        child.values = [(RecordingReceiver(results), -1)]
    elif reason == "large":
        payloads[f"_{second}"] = bytes(LARGE)
    elif reason == "other":
        call.receiver = RecordingReceiver(results)
    else:
        node.client.fetched[5] = SimpleNamespace()  # type: ignore[assignment]
    node.end(4, **payloads)
    mine = [3, 4, 5, 6] if reason != "other" else [3, 5, 6]
    assert node.reported == [1, 2, *mine]
    assert results == ([b"r4"] if reason in ("values", "other") else [])


async def test_task_in_a_batch_costs_few_python_calls(node: OneWorkerNode) -> None:
    """The number of Python calls does not depend on the load of the machine."""
    node.submit(*range(2, 80))
    names: Counter[str] = Counter()

    def note(frame: FrameType, what: str, _argument: object) -> None:
        if what == "call":
            names[frame.f_code.co_name] += 1

    many, before = 2000, sys.getprofile()
    node.peer.sent.clear()
    sys.setprofile(note)
    try:
        for first in range(80, 80 + many, 250):
            node.submit(*range(first, first + 250))
        while node.commands.sent:
            node.end(min(30, len(node.commands.sent)))
    finally:
        sys.setprofile(before)
    assert len(node.reported) == many + 78
    assert names.total() / many < 12, names.most_common(20)


class RevokingCommands:
    """Sends nothing and records the workers whose tasks were to be revoked."""

    def __init__(self) -> None:
        self.revoked: list[int] = []
        self.reaches = True

    def assign(self, *_: object) -> None: ...

    def is_reached(self, _worker: int) -> bool:
        return self.reaches

    def revoke(self, worker: int, _below: int) -> None:
        self.revoked.append(worker)

    def begun(self, _worker: int) -> int:
        return 0


class StalledNode:
    """A driver with one worker, which got a task and does not start it."""

    def __init__(self, payload: bytes, scheduler: Scheduler | None = None) -> None:
        self.commands = RevokingCommands()
        self.scheduler = scheduler or Scheduler(Ledger({CPU: UNIT}))
        self.driver = make_driver(self.scheduler, self.commands)
        if isinstance(scheduler, SerialScheduler):
            scheduler.driver = self.driver
        receiver = SimpleNamespace()
        self.driver.submit(fakes.call().func, payload, receiver)  # type: ignore[arg-type]
        self.driver.on_started(1)

    async def look(self) -> None:
        """Let the driver check the worker, whose time to start the task is over."""
        record: Any = self.scheduler.workers.get(WorkerId(1))
        record.is_revoking, record.revocations = True, 1
        self.driver.revoke(Revoke(WorkerId(1), 1))
        async with asyncio.timeout(60):
            while record.is_revoking:
                await asyncio.sleep(0)


@pytest.mark.parametrize("is_large", [True, False])
async def test_task_that_may_not_have_arrived_is_not_revoked(is_large: bool) -> None:
    """A large task, or a program that blocks its loop, costs no healthy worker."""
    stalled = StalledNode(bytes(LARGE) if is_large else b"x")
    stalled.commands.reaches = is_large
    await stalled.look()
    assert stalled.commands.revoked == []
    record: Any = stalled.scheduler.workers.get(WorkerId(1))
    assert record.task is not None, "the worker still has its task"


class SerialScheduler(Scheduler):
    """Asserts that no event is handled while another one is handled."""

    driver: Driver

    def __init__(self) -> None:
        super().__init__(Ledger({CPU: UNIT}))
        self.is_deciding = False
        self.events: list[str] = []


def _recording(name: str) -> Callable[..., Sequence[Effect]]:
    step = getattr(Scheduler, name)

    def method(self: SerialScheduler, *args: object) -> Sequence[Effect]:
        assert self.driver.is_busy
        assert not self.is_deciding
        self.is_deciding = True
        self.events.append(name)
        wanted: Sequence[Effect] = step(self, *args)
        self.is_deciding = False
        return wanted

    return method


class BusyReceiver:
    """A receiver that submits two tasks and cancels one when its own task ends."""

    def __init__(self, stalled: StalledNode) -> None:
        self.stalled = stalled
        self.outcomes: list[object] = []
        self.during: list[str] = []

    def settle(self, error: Exception) -> None:
        driver, scheduler = self.stalled.driver, self.stalled.scheduler
        assert isinstance(scheduler, SerialScheduler)
        self.outcomes.append(type(error))
        before = len(scheduler.events)
        receiver = SimpleNamespace(settle=self.outcomes.append)
        func = fakes.call().func
        first = driver.submit(func, b"x", receiver)  # type: ignore[arg-type]
        second = driver.submit(func, b"x", receiver)  # type: ignore[arg-type]
        assert second == first + 1
        driver.cancel(first)
        self.during = scheduler.events[before:]


async def test_nested_event_is_handled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events keep their order, and no decision is made during another one."""
    # The driver calls the methods of the class `Scheduler`.
    for name, method in {
        n: _recording(n) for n in ("wake", "submit", "cancel")
    }.items():
        monkeypatch.setattr(Scheduler, name, method)
    scheduler = SerialScheduler()
    stalled = StalledNode(b"x", scheduler)
    driver = stalled.driver
    receiver = BusyReceiver(stalled)
    func = replace(fakes.call().func, spec=replace(fakes.call().func.spec, timeout=9))
    task = driver.submit(func, b"x", receiver)  # type: ignore[arg-type]
    scheduler.events.clear()
    record = scheduler.tasks[TaskId(task)]
    scheduler.timers.set(0.0, AlarmKind.EXPIRE, record.id)
    driver.feed(Scheduler.wake)
    assert receiver.outcomes == [TaskTimeoutError]
    assert receiver.during == [], "the scheduler got no event in the meantime"
    assert scheduler.events == ["wake", "submit", "submit", "cancel"]
    assert not driver.is_busy
    assert sorted(scheduler.tasks) == [1, task + 2], "the last task waits"


class FakeConnection:
    """A worker's connection, over a pair of sockets."""

    def __init__(self, story: PollStory) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.peer = self
        self.bytes_read = 0
        self.read_time = 0.0
        self.error: Exception | None = None
        self.is_cut_off = False
        self._story = story

    @property
    def readable(self) -> int:
        return self.ours.fileno()

    def send_posted(self) -> None:
        """Nothing was posted."""

    def read_now(self) -> None:
        self.bytes_read += len(os.read(self.ours.fileno(), 100))
        self._story.now += self.read_time
        assert self._story.poller.count < 0
        if self.error is not None:
            raise self.error
        # Code that gets a result may submit more tasks.
        for _ in range(2 * FEW):
            self._story.poller.note()

    def abort(self) -> None:
        self.is_cut_off = True


class PollStory:
    """Workers that may have sent messages, and a clock that the test advances."""

    def __init__(self, count: int) -> None:
        self.now = 100.0
        self.workers = [FakeConnection(self) for _ in range(count)]
        workers: Any = dict(enumerate(self.workers))
        workers[-1] = SimpleNamespace(peer=None)  # a worker that starts
        self.tell: Callable[[], object] = list
        self.poller = InlinePoller(workers, lambda: self.tell())

    def submit(self) -> None:
        for _ in range(FEW + 1):
            self.poller.note()

    def send_from_all(self) -> None:
        for worker in self.workers:
            worker.theirs.send(b"x")

    @property
    def bytes_read(self) -> list[int]:
        return [worker.bytes_read for worker in self.workers]


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Iterator[PollStory]:
    story = PollStory(3)
    monkeypatch.setattr(module, "perf_counter", lambda: story.now)
    yield story
    for worker in story.workers:
        worker.ours.close()
        worker.theirs.close()


def test_submissions_are_flushed_before_workers_are_polled(story: PollStory) -> None:
    """Otherwise the next batch would be longer, take longer, and so on."""
    before_flush: list[list[int]] = []

    def tell() -> None:
        before_flush.append(story.bytes_read)
        story.now += EVERY * 3

    story.tell = tell
    story.send_from_all()
    story.submit()
    assert before_flush == [[0, 0, 0]]
    story.send_from_all()
    story.now += EVERY * 1.1
    story.submit()
    assert story.bytes_read == [2, 2, 2]


def test_poll_during_a_submission_is_limited_in_time(story: PollStory) -> None:
    for worker in story.workers:
        worker.read_time = LONGEST * 0.6
    seen = []
    for _ in range(3):
        story.send_from_all()
        story.now += 1.0
        story.submit()
        seen.append(story.bytes_read)
    assert seen[0] == [1, 1, 0]
    assert seen[1][2] == 2, "the worker that was not read last time is read first"
    assert min(seen[2]) > 1, seen


def test_message_that_raises_closes_only_its_own_connection(
    story: PollStory, caplog: pytest.LogCaptureFixture
) -> None:
    story.workers[1].error = ValueError("a bug")
    story.send_from_all()
    story.submit()
    assert story.bytes_read == [1, 1, 1]
    assert [worker.is_cut_off for worker in story.workers] == [False, True, False]
    assert "a bug" in caplog.text
    assert story.poller.count == 0


class ManualClock:
    """A clock, and a loop that records the calls it is asked to make."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cpus: int = 2) -> None:
        self.now = 1.0
        self.soon: list[object] = []
        monkeypatch.setattr(runtime_node, "perf_counter", lambda: self.now)
        monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cpus)))
        self.poll = BusyPoll(self)  # type: ignore[arg-type]

    def call_soon(self, call: object) -> None:
        self.soon.append(call)

    def turn(self, after: float) -> int:
        """Advance the clock, make the pending calls, and count the new ones."""
        self.now += after
        calls, self.soon = self.soon, []
        for call in calls:
            call()  # type: ignore[operator]
        return len(self.soon)


def test_loop_polls_while_answers_come_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(monkeypatch)
    clock.poll.note(1)
    assert not clock.soon
    clock.now += SHORT / 2
    clock.poll.note(1)
    clock.poll.note(1)
    assert len(clock.soon) == 1
    assert clock.turn(AWAKE / 2) == 1
    clock.poll.note(1)
    assert clock.turn(AWAKE * 0.9) == 1
    assert clock.turn(AWAKE) == 0
    clock.now += SHORT
    clock.poll.note(1)
    assert not clock.soon


def test_loop_sleeps_in_flood_or_with_one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(monkeypatch)
    for _ in range(3):
        clock.poll.note(1)
        clock.poll.note(2)
    assert not clock.soon
    clock.poll.note(1)
    clock.poll.note(1)
    assert len(clock.soon) == 1
    clock.poll.note(9)
    assert clock.turn(0) == 0
    clock = ManualClock(monkeypatch, cpus=1)
    clock.poll.note(1)
    clock.poll.note(1)
    assert not clock.soon
