"""Tasks that are submitted or end together: ids, order, cost, and when a node polls."""

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
from aiogpu.runtime.callers.caller import Child, Client
from aiogpu.runtime.callers.requests import Requests
from aiogpu.runtime.driver import Driver
from aiogpu.runtime.node import AWAKE, SHORT, BusyPoll
from aiogpu.runtime.pending_tasks import Call
from aiogpu.runtime.workers import message_router as module
from aiogpu.runtime.workers.message_router import (
    EVERY,
    FEW,
    LONGEST,
    InlinePoller,
)
from aiogpu.wire.codec import LARGE
from aiogpu.wire.messages import ChildDone, Declare, Done, Submit
from tests.unit.runtime import fakes
from tests.unit.runtime.fakes import FakePeer

pytestmark = pytest.mark.either_loop


MINE = ClientId(1 << 26)


class FakeCommands:
    """Notes which tasks went to the worker."""

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


class OneWorkerNode:
    """A node of one worker, which ends what the test says, and a program."""

    def __init__(self) -> None:
        self.commands, self.peer = FakeCommands(), FakePeer()
        pool = SimpleNamespace(
            commands=self.commands,
            spawn=lambda *_: None,
            pids={},
        )
        self.scheduler = Scheduler(Ledger({CPU: UNIT}))
        self.driver = Driver(
            asyncio.get_running_loop(),
            self.scheduler,
            SimpleNamespace(bind=lambda *_: None),  # type: ignore[arg-type]
            lambda *_: None,
            lambda _: pool,  # type: ignore[arg-type, return-value]
        )
        self.pool: Any = pool
        self.driver.feed(Scheduler.join, MINE, 1.0, Limits())
        self.nested = Requests(self.driver, SimpleNamespace())  # type: ignore[arg-type]
        self.client = Client(MINE, client=MINE, peer=self.peer)  # type: ignore[arg-type]
        spec = dump_spec(fakes.func())
        for func in (1, 2):
            told = Declare(func, "train", spec, b"f")
            self.nested.on_message(self.client, told)

    def submit(self, *numbers: int, func: int = 1) -> None:
        row = [Submit(0, number, func, b"%d" % number) for number in numbers]
        self.nested.submit_all(self.client, row)

    def end(self, count: int, **payloads: bytes) -> list[int]:
        """The worker ends so many; gives the tasks."""
        tasks = [self.commands.sent.popleft() for _ in range(count)]
        done = [
            Done(task, payloads.get(f"_{task}", b"r%d" % task), 5) for task in tasks
        ]
        self.driver.on_done(1, done)
        return tasks

    @property
    def told(self) -> list[int]:
        """The program's numbers of what it was told of, in order."""
        return [it.child for it in self.peer.sent if isinstance(it, ChildDone)]


@pytest.fixture
async def node() -> OneWorkerNode:
    node = OneWorkerNode()
    node.submit(1)
    node.driver.on_started(1)
    node.end(1)
    assert node.told == [1]
    return node


async def test_answers_that_come_together_keep_their_order(node: OneWorkerNode) -> None:
    node.submit(*range(2, 102))
    assert len(node.client.children) == 100
    while node.commands.sent:
        node.end(min(7, len(node.commands.sent)))
    assert node.told == [*range(1, 102)]
    assert node.client.children == {}
    assert not node.scheduler.tasks
    history = node.driver.results.history
    assert history.outcomes == {"finished": 101}
    assert len(history.ring) < 50, "most have ended in rows"
    assert {it.payload for it in node.peer.sent} == {  # type: ignore[union-attr]
        b"r%d" % task for task in range(1, 102)
    }


class RaisingReceiver:
    """Wants no answer, and is told an error."""

    def __init__(self) -> None:
        self.told: list[Exception] = []

    def settle(self, outcome: bytes | Exception) -> None:
        if isinstance(outcome, bytes):
            raise ValueError("not this one")
        self.told.append(outcome)


class NotingReceiver:
    """Notes what it is told."""

    def __init__(self, into: list[bytes], then: Any = int) -> None:
        self._into = into
        self._then = then

    def settle(self, payload: bytes) -> None:
        self._into.append(payload)
        self._then()


async def test_a_receiver_that_raises_harms_no_other(
    node: OneWorkerNode, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[bytes] = []
    func, submit = node.client.declared[1], node.driver.submit
    later: list[int] = []

    def stop() -> None:
        node.driver.cancel(later[0])

    angry = RaisingReceiver()
    for receiver in (
        NotingReceiver(heard),
        NotingReceiver(heard),
        angry,
        NotingReceiver(heard, stop),
    ):
        submit(func, b"", receiver, None, MINE)  # type: ignore[arg-type]
    later.append(submit(func, b"", NotingReceiver(heard), None, MINE))  # type: ignore[arg-type]
    for _ in range(20):
        submit(func, b"", NotingReceiver(heard), None, MINE)  # type: ignore[arg-type]
    node.end(1)
    node.end(6)
    assert heard == [b"r2", b"r3", b"r5", b"r7", b"r8"], (
        "and not 6, which was cancelled"
    )
    assert [type(error) for error in angry.told] == [InternalError]
    assert "not this one" in str(angry.told[0])
    assert "failed to settle" in caplog.text
    assert not node.driver.knows(6)


@pytest.mark.parametrize("reason", ["values", "large", "other", "fetched"])
async def test_an_answer_that_needs_more_than_a_result_goes_alone(
    node: OneWorkerNode, reason: str
) -> None:
    node.submit(*range(2, 40))
    node.end(1)
    _, second, *_ = node.commands.sent
    call = node.driver.call_of(second)  # type: ignore[arg-type]
    assert call is not None
    child = call.receiver
    assert isinstance(child, Child)
    heard: list[bytes] = []
    payloads = {}
    if reason == "values":
        child.values = [(NotingReceiver(heard), -1)]  # type: ignore[list-item]
    elif reason == "large":
        payloads[f"_{second}"] = bytes(LARGE)
    elif reason == "other":
        call.receiver = NotingReceiver(heard)  # type: ignore[assignment]
    else:
        node.client.fetched[5] = SimpleNamespace()  # type: ignore[assignment]
    node.end(4, **payloads)
    mine = [3, 4, 5, 6] if reason != "other" else [3, 5, 6]
    assert node.told == [1, 2, *mine]
    assert heard == ([b"r4"] if reason in ("values", "other") else [])


async def test_a_task_in_a_row_costs_few_calls(node: OneWorkerNode) -> None:
    """Calls of Python functions are counted, which no other load changes."""
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
    assert len(node.told) == many + 78
    assert names.total() / many < 12, names.most_common(20)


class RevokingCommands:
    """Tells nobody, and notes what it was to tell."""

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
    """A driver whose one worker has been sent a task and begins nothing."""

    def __init__(self, payload: bytes, scheduler: Scheduler | None = None) -> None:
        self.commands = RevokingCommands()
        pool = SimpleNamespace(
            commands=self.commands,
            spawn=lambda _worker: None,
        )
        self.scheduler = scheduler or Scheduler(Ledger({CPU: UNIT}))
        self.driver = Driver(
            asyncio.get_running_loop(),
            self.scheduler,
            SimpleNamespace(bind=lambda *_: None),  # type: ignore[arg-type]
            lambda *_: None,
            lambda _: pool,  # type: ignore[arg-type, return-value]
        )
        if isinstance(scheduler, OneAtATime):
            scheduler.driver = self.driver
        receiver = SimpleNamespace()
        self.driver.submit(fakes.call().func, payload, receiver)  # type: ignore[arg-type]
        self.driver.on_started(1)

    async def look(self) -> None:
        """The worker is looked at when it has had its time."""
        record = self.scheduler.workers.get(WorkerId(1))
        assert record is not None
        assert record.task is not None
        record.is_revoking, record.revocations = True, 1
        self.driver.revoke(Revoke(WorkerId(1), 1))
        async with asyncio.timeout(60):
            while record.is_revoking:
                await asyncio.sleep(0)


@pytest.mark.parametrize("is_large", [True, False])
async def test_what_may_not_have_arrived_is_left_where_it_is(is_large: bool) -> None:
    """A large task, or a program that holds its loop, gives no healthy worker up."""
    stalled = StalledNode(bytes(LARGE) if is_large else b"x")
    stalled.commands.reaches = is_large
    await stalled.look()
    assert stalled.commands.revoked == []
    record = stalled.scheduler.workers.get(WorkerId(1))
    assert record is not None
    assert record.task is not None, "it still has its task"


class OneAtATime(Scheduler):
    """Is told of nothing while the effects of what it was told are carried out."""

    driver: Driver

    def __init__(self) -> None:
        super().__init__(Ledger({CPU: UNIT}))
        self.is_deciding = False
        self.told: list[str] = []


def _heard(name: str) -> Callable[..., Sequence[Effect]]:
    step = getattr(Scheduler, name)

    def method(self: OneAtATime, *args: object) -> Sequence[Effect]:
        assert self.driver.is_busy, "the driver has said that it is at work"
        assert not self.is_deciding, "it is not asked amid a decision"
        self.is_deciding = True
        self.told.append(name)
        wanted: Sequence[Effect] = step(self, *args)
        self.is_deciding = False
        return wanted

    return method


class BusyReceiver:
    """Submits, cancels and submits again as it is told of its task."""

    def __init__(self, stalled: StalledNode) -> None:
        self.stalled = stalled
        self.told: list[object] = []
        self.during: list[str] = []

    def settle(self, error: Exception) -> None:
        driver, scheduler = self.stalled.driver, self.stalled.scheduler
        assert isinstance(scheduler, OneAtATime)
        self.told.append(type(error))
        before = len(scheduler.told)
        receiver = SimpleNamespace(settle=self.told.append)
        func = fakes.call().func
        first = driver.submit(func, b"x", receiver)  # type: ignore[arg-type]
        second = driver.submit(func, b"x", receiver)  # type: ignore[arg-type]
        assert second == first + 1
        driver.cancel(first)
        self.during = scheduler.told[before:]


async def test_an_event_amid_another_is_handled_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order in which it happened; nothing is decided amid a decision."""
    # The driver calls what `Scheduler` has by these names.
    for name, method in {n: _heard(n) for n in ("wake", "submit", "cancel")}.items():
        monkeypatch.setattr(Scheduler, name, method)
    scheduler = OneAtATime()
    stalled = StalledNode(b"x", scheduler)
    driver = stalled.driver
    meddler = BusyReceiver(stalled)
    func = replace(fakes.call().func, spec=replace(fakes.call().func.spec, timeout=9))
    task = driver.submit(func, b"x", meddler)  # type: ignore[arg-type]
    scheduler.told.clear()
    record = scheduler.tasks[TaskId(task)]
    scheduler.timers.set(0.0, AlarmKind.EXPIRE, record.id)
    driver.feed(Scheduler.wake)
    assert meddler.told == [TaskTimeoutError]
    assert meddler.during == [], "it is told nothing while it is at work"
    assert scheduler.told == ["wake", "submit", "submit", "cancel"]
    assert not driver.is_busy
    assert sorted(scheduler.tasks) == [1, task + 2], "the last one waits"


class FakeConnection:
    """A worker's connection, which may have something to say."""

    def __init__(self, burst: Burst) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.peer = self
        self.heard = 0
        self.takes = self.costs = self.sent_at = 0.0
        self.error: Exception | None = None
        self.then: Callable[[], object] = bool
        self.is_readable = True
        self.is_cut_off = False
        self._burst = burst

    def say(self) -> None:
        self.theirs.send(b"x")

    @property
    def readable(self) -> int:
        self._burst.now += self.costs
        return self.ours.fileno() if self.is_readable else -1

    def send_posted(self) -> None:
        self.sent_at = self._burst.now

    def read_now(self) -> None:
        self.heard += len(os.read(self.ours.fileno(), 100))
        self._burst.now += self.takes
        assert self._burst.poller.count < 0
        self.then()
        if self.error is not None:
            raise self.error
        # What is submitted by whoever is told of an answer.
        for _ in range(2 * FEW):
            self._burst.poller.note()

    def abort(self) -> None:
        self.is_cut_off = True


class Burst:
    """Speakers, and a clock that goes on when a test says so."""

    def __init__(self, count: int) -> None:
        self.now = 100.0
        self.speakers = [FakeConnection(self) for _ in range(count)]
        workers: Any = dict(enumerate(self.speakers))
        workers[-1] = SimpleNamespace(peer=None)  # one that starts
        self.tell: Callable[[], object] = list
        self.poller = InlinePoller(workers, lambda: self.tell())

    def submit(self, count: int = FEW + 1) -> None:
        for _ in range(count):
            self.poller.note()

    def all_say(self) -> None:
        for speaker in self.speakers:
            speaker.say()

    @property
    def heard(self) -> list[int]:
        return [speaker.heard for speaker in self.speakers]


@pytest.fixture
def burst(monkeypatch: pytest.MonkeyPatch) -> Iterator[Burst]:
    burst = Burst(3)
    monkeypatch.setattr(module, "perf_counter", lambda: burst.now)
    yield burst
    for speaker in burst.speakers:
        speaker.ours.close()
        speaker.theirs.close()


def test_submissions_are_passed_on_before_the_look(burst: Burst) -> None:
    """Else the next row would be longer, and take longer, and so on."""
    told: list[list[int]] = []

    def tell() -> None:
        told.append(burst.heard)
        burst.now += EVERY * 3

    burst.tell = tell
    burst.all_say()
    burst.submit()
    assert told == [[0, 0, 0]]
    burst.all_say()
    burst.now += EVERY * 1.1
    burst.submit()
    assert burst.heard == [2, 2, 2]


def test_one_submission_takes_in_no_more_than_it_may(burst: Burst) -> None:
    for speaker in burst.speakers:
        speaker.takes = LONGEST * 0.6
    seen = []
    for _ in range(3):
        burst.all_say()
        burst.now += 1.0
        burst.submit()
        seen.append(burst.heard)
    assert seen[0] == [1, 1, 0]
    assert seen[1][2] == 2, "who was not heard the last time is heard first"
    assert min(seen[2]) > 1, seen


def test_a_message_that_raises_costs_only_its_own_connection(
    burst: Burst, caplog: pytest.LogCaptureFixture
) -> None:
    burst.speakers[1].error = ValueError("a bug")
    burst.all_say()
    burst.submit()
    assert burst.heard == [1, 1, 1]
    assert [speaker.is_cut_off for speaker in burst.speakers] == [False, True, False]
    assert "a bug" in caplog.text
    assert burst.poller.count == 0


class ManualClock:
    """A clock, and a loop that notes what it is to call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cpus: int = 2) -> None:
        self.now = 1.0
        self.soon: list[object] = []
        monkeypatch.setattr(runtime_node, "perf_counter", lambda: self.now)
        monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cpus)))
        self.it = BusyPoll(self)  # type: ignore[arg-type]

    def call_soon(self, call: object) -> None:
        self.soon.append(call)

    def turn(self, after: float) -> int:
        """Let the loop turn after so long; gives how many calls it has left."""
        self.now += after
        calls, self.soon = self.soon, []
        for call in calls:
            call()  # type: ignore[operator]
        return len(self.soon)


def test_it_stays_awake_while_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(monkeypatch)
    clock.it.note(1)
    assert not clock.soon
    clock.now += SHORT / 2
    clock.it.note(1)
    clock.it.note(1)
    assert len(clock.soon) == 1
    assert clock.turn(AWAKE / 2) == 1
    clock.it.note(1)
    assert clock.turn(AWAKE * 0.9) == 1
    assert clock.turn(AWAKE) == 0
    clock.now += SHORT
    clock.it.note(1)
    assert not clock.soon


def test_in_a_flood_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(monkeypatch)
    for _ in range(3):
        clock.it.note(1)
        clock.it.note(2)
    assert not clock.soon
    clock.it.note(1)
    clock.it.note(1)
    assert len(clock.soon) == 1
    clock.it.note(9)
    assert clock.turn(0) == 0


def test_with_one_cpu_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(monkeypatch, cpus=1)
    clock.it.note(1)
    clock.it.note(1)
    assert not clock.soon
