"""Whose terminal a task's line goes to on a node that programs have joined."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from aiogpu.core.model.ids import ClientId, TaskId, WorkerId
from aiogpu.runtime.output import Routes
from aiogpu.wire.messages import Message, Printed

ONE, TWO = 1 << 26, (1 << 26) + 1


class PaperPeer:
    def __init__(self) -> None:
        self.sent: list[Message] = []

    def send_one(self, message: Message) -> None:
        self.sent.append(message)


@dataclass
class PaperReader:
    peer: PaperPeer | None = field(default_factory=PaperPeer)
    shows: bool = True
    is_slow: bool = False


class PaperSource:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


class PaperLog:
    def __init__(self) -> None:
        self.lines: list[tuple[object, ...]] = []
        self.is_closed = False

    def write(self, *line: object) -> None:
        self.lines.append(line)

    def close(self) -> None:
        self.is_closed = True


class House:
    """A node whose task 7 is of one program, 8 of another, and 9 its own."""

    def __init__(self) -> None:
        of = {7: ONE, 8: TWO, 9: 0}
        self.tasks = {
            TaskId(task): SimpleNamespace(id=task, client=ClientId(client))
            for task, client in of.items()
        }
        self.workers = {
            WorkerId(1): SimpleNamespace(task=self.tasks[TaskId(7)]),
            WorkerId(2): SimpleNamespace(task=None),
        }
        self.readers = {ONE: PaperReader(), TWO: PaperReader()}
        node: Any = self
        readers: Any = self.readers
        self.routes = Routes(node, readers)
        self.log: Any = PaperLog()
        self.routes.log = self.log
        self.source = PaperSource()

    def take(self, text: str, worker: int = 1, task: int = 0) -> bool:
        return self.routes.take(1, "embed pid=4", text, self.source, worker, task)

    def seen(self, client: int) -> list[str]:
        peer = self.readers[client].peer
        assert peer is not None
        return [line.text for line in peer.sent if isinstance(line, Printed)]


@pytest.fixture
def house() -> House:
    return House()


def test_a_line_goes_to_whose_task_has_printed_it(house: House) -> None:
    assert house.take("a", task=7)
    assert house.take("b", task=8)
    assert house.seen(ONE) == ["(embed pid=4) a"]
    assert house.seen(TWO) == ["(embed pid=4) b"]
    assert house.log.lines == [
        (ONE, 7, 1, "embed pid=4", "a"),
        (TWO, 8, 1, "embed pid=4", "b"),
    ]


def test_what_comes_by_the_pipes_is_the_running_tasks(house: House) -> None:
    assert house.take("raw", worker=1)
    assert house.seen(ONE) == ["(embed pid=4) raw"]
    assert not house.take("of none", worker=2)
    assert not house.take("of nobody", worker=3)
    assert not house.take("of the node", task=9)
    assert not house.take("of one that has ended", task=99)
    assert len(house.log.lines) == 1


def test_who_does_not_want_lines_is_sent_none(house: House) -> None:
    house.readers[ONE].shows = False
    assert house.take("a", task=7)
    assert house.seen(ONE) == []
    assert len(house.log.lines) == 1


def test_who_has_gone_is_sent_none(house: House) -> None:
    house.readers[ONE].peer = None
    assert house.take("a", task=7)
    del house.readers[ONE]
    assert house.take("b", task=7)
    assert [line[-1] for line in house.log.lines] == ["a", "b"]


def test_a_slow_reader_slows_its_own_tasks(house: House) -> None:
    house.readers[ONE].is_slow = True
    house.take("b", task=8)
    assert house.source.calls == []
    house.take("a", task=7)
    house.take("a", task=7)
    assert house.source.calls == ["pause", "pause"]
    house.routes.resume(TWO)
    assert house.source.calls == ["pause", "pause"]
    house.routes.resume(ONE)
    house.routes.resume(ONE)
    assert house.source.calls == ["pause", "pause", "resume"]


@pytest.mark.either_loop
async def test_at_the_end_nobody_waits_for_a_reader(house: House) -> None:
    house.readers[ONE].is_slow = True
    house.take("a", task=7)
    await house.routes.close()
    assert house.source.calls == ["pause", "resume"]
    assert house.log.is_closed
