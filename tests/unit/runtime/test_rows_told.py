"""Tasks that are submitted, or end, together: who is told what, and in which order."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from aiogpu.client.spec_codec import dump_spec
from aiogpu.core.model.ids import ClientId
from aiogpu.core.model.units import CPU, UNIT
from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.records import TaskRecord
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.errors import InternalError, ProtocolError
from aiogpu.runtime.callers.caller import Child, Client
from aiogpu.runtime.callers.requests import Requests
from aiogpu.runtime.driver import Driver
from aiogpu.runtime.pending_tasks import Call
from aiogpu.serialization.payload import Contents, Payload
from aiogpu.wire.codec import LARGE
from aiogpu.wire.messages import ChildDone, Declare, Done, Submit
from tests.unit.runtime import funcs
from tests.unit.runtime.paper import PaperPeer

MINE = ClientId(1 << 26)


class PaperOrders:
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
            call.send_to(worker, number := number + 1)

    def begun(self, _worker: int) -> int:
        return 0


class Office:
    """A node of one worker, which ends what the test says, and a program."""

    def __init__(self) -> None:
        self.commands, self.peer = PaperOrders(), PaperPeer()
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
        spec = dump_spec(funcs.func())
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
async def office() -> Office:
    office = Office()
    office.submit(1)
    office.driver.on_started(1)
    office.end(1)
    assert office.told == [1]
    return office


async def test_all_that_comes_together_is_told_in_order(office: Office) -> None:
    rows: list[int] = []

    def note(_worker: int, records: list[TaskRecord], took: list[float]) -> None:
        assert len(records) == len(took)
        rows.append(len(records))

    office.driver.observe(SimpleNamespace(on_assign=bool, on_end=bool, on_row=note))  # type: ignore[arg-type]
    office.submit(*range(2, 102))
    assert len(office.client.children) == 100
    while office.commands.sent:
        office.end(min(7, len(office.commands.sent)))
    assert office.told == [*range(1, 102)]
    assert office.client.children == {}
    assert not office.scheduler.tasks
    assert sum(rows) > 50
    assert {it.payload for it in office.peer.sent} == {  # type: ignore[union-attr]
        b"r%d" % task for task in range(1, 102)
    }


async def test_functions_in_turn_keep_their_order(office: Office) -> None:
    row = [Submit(0, number, 1 + number // 3 % 2, b"") for number in range(2, 50)]
    office.nested.submit_all(office.client, row)
    while office.commands.sent:
        office.end(min(5, len(office.commands.sent)))
    assert office.told == [*range(1, 50)]


async def test_a_number_that_comes_twice_cuts_off(office: Office) -> None:
    with pytest.raises(ProtocolError, match="number 3 after 3"):
        office.submit(2, 3, 3)


async def test_what_was_declared_as_no_task_fails_one_by_one(office: Office) -> None:
    office.submit(2, 3, func=9)
    func = office.client.declared[2]
    func.actor = object()  # type: ignore[union-attr, assignment]
    office.submit(4, 5, func=2)
    assert [it.child for it in office.peer.sent[1:]] == [2, 3, 4, 5]  # type: ignore[union-attr]


async def test_one_that_refers_to_others_is_told_by_itself(office: Office) -> None:
    office.submit(*range(2, 60))
    sent = list(office.commands.sent)
    assert len(sent) == 1
    office.end(1)
    third = list(office.commands.sent)[2]
    payload = Payload.of(Contents(b"x"))
    office.end(5, **{f"_{third}": payload})
    assert office.told == [1, 2, 3, 4, 5, 6, 7]


class Angry:
    """Wants no answer, and is told an error."""

    def __init__(self) -> None:
        self.told: list[Exception] = []

    def settle(self, outcome: bytes | Exception) -> None:
        if isinstance(outcome, bytes):
            raise ValueError("not this one")
        self.told.append(outcome)


class Content:
    """Notes what it is told."""

    def __init__(self, into: list[bytes], then: Any = int) -> None:
        self._into = into
        self._then = then

    def settle(self, payload: bytes) -> None:
        self._into.append(payload)
        self._then()


async def test_what_one_makes_of_its_answer_is_no_others_business(
    office: Office, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[bytes] = []
    func, submit = office.client.declared[1], office.driver.submit
    later: list[int] = []

    def stop() -> None:
        office.driver.cancel(later[0])

    angry = Angry()
    for receiver in (Content(heard), Content(heard), angry, Content(heard, stop)):
        submit(func, b"", receiver, None, MINE)  # type: ignore[arg-type]
    later.append(submit(func, b"", Content(heard), None, MINE))  # type: ignore[arg-type]
    for _ in range(20):
        submit(func, b"", Content(heard), None, MINE)  # type: ignore[arg-type]
    office.end(1)
    office.end(6)
    assert heard == [b"r2", b"r3", b"r5", b"r7", b"r8"], (
        "and not 6, which was cancelled"
    )
    assert [type(error) for error in angry.told] == [InternalError]
    assert "not this one" in str(angry.told[0])
    assert "failed to tell" in caplog.text
    assert not office.driver.knows(6)


async def test_answers_of_others_are_dropped(office: Office) -> None:
    office.submit(*range(2, 20))
    office.end(1)
    first, second, *_ = office.commands.sent
    office.driver.on_done(1, [Done(99, b"", 1), Done(98, b"", 1)])
    office.driver.on_done(2, [Done(first, b"", 1), Done(second, b"", 1)])
    assert office.told == [1, 2]
    office.end(2)
    assert office.told == [1, 2, 3, 4]


@pytest.mark.parametrize("odd", ["values", "large", "other", "fetched"])
async def test_who_is_told_more_than_a_result_is_told_by_itself(
    office: Office, odd: str
) -> None:
    office.submit(*range(2, 40))
    office.end(1)
    _, second, *_ = office.commands.sent
    call = office.driver.call_of(second)  # type: ignore[arg-type]
    assert call is not None
    child = call.receiver
    assert isinstance(child, Child)
    heard: list[bytes] = []
    payloads = {}
    if odd == "values":
        child.values = [(Content(heard), -1)]  # type: ignore[list-item]
    elif odd == "large":
        payloads[f"_{second}"] = bytes(LARGE)
    elif odd == "other":
        call.receiver = Content(heard)  # type: ignore[assignment]
    else:
        office.client.fetched[5] = SimpleNamespace()  # type: ignore[assignment]
    office.end(4, **payloads)
    mine = [3, 4, 5, 6] if odd != "other" else [3, 5, 6]
    assert office.told == [1, 2, *mine]
    assert heard == ([b"r4"] if odd in ("values", "other") else [])


async def test_nobody_is_told_who_has_gone(office: Office) -> None:
    office.submit(*range(2, 20))
    office.end(1)
    office.client.peer = None
    office.end(4)
    assert office.told == [1, 2]
    assert len(office.client.children) == 13


async def test_a_task_in_a_row_costs_few_calls(office: Office) -> None:
    """Calls of Python functions are counted, which no other load changes."""
    office.submit(*range(2, 80))
    names: Counter[str] = Counter()

    def note(frame: FrameType, what: str, _argument: object) -> None:
        if what == "call":
            names[frame.f_code.co_name] += 1

    many, before = 2000, sys.getprofile()
    office.peer.sent.clear()
    sys.setprofile(note)
    try:
        for first in range(80, 80 + many, 250):
            office.submit(*range(first, first + 250))
        while office.commands.sent:
            office.end(min(30, len(office.commands.sent)))
    finally:
        sys.setprofile(before)
    assert len(office.told) == many + 78
    assert names.total() / many < 12, names.most_common(20)
