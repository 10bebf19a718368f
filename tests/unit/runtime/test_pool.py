"""The pool with paper peers: what it tells the driver, and in which order."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from aiogpu.core.model.ids import TaskId
from aiogpu.core.model.request import Environment
from aiogpu.errors import NodeStartError
from aiogpu.linux.procfs import Findings
from aiogpu.memory.control_page import SLOTS
from aiogpu.runtime.pending_tasks import EACH
from aiogpu.runtime.workers import death as cause
from aiogpu.runtime.workers import pool
from aiogpu.runtime.workers.death import Death
from aiogpu.runtime.workers.message_router import InlinePoller
from aiogpu.runtime.workers.pool import Pool
from aiogpu.runtime.workers.slots import SITES_KEPT, SPARE_SLOTS, LiveWorker, Slots
from aiogpu.wire.connection import KEEPER, WORKER, ZYGOTE
from aiogpu.wire.messages import (
    Bind,
    Cancel,
    Close,
    Define,
    Done,
    End,
    Ended,
    Exit,
    Failed,
    Forget,
    Fork,
    Forked,
    Hello,
    Log,
    Message,
    Run,
    Signal,
    Skipped,
    Submit,
    Unforked,
    Wait,
    Withdraw,
)
from tests.unit.runtime import funcs
from tests.unit.runtime.paper import PaperConsole, PaperPeer, PaperStore, PaperZygotes


def lost(pid: int, last_output: tuple[str, ...] = ()) -> Death:
    """The death of a worker whose keeper has died."""
    return Death(pid, int(signal.SIGKILL), last_output, known=cause.KEEPER_DIED)


class House:
    """A pool between paper peers and a paper driver."""

    def __init__(self, directory: Path, most: int = SLOTS) -> None:
        self.console = PaperConsole()
        self.signals: list[tuple[int, int]] = []
        self.told: list[tuple[object, ...]] = []
        self.workers: dict[int, LiveWorker] = {}
        self.burst = InlinePoller(self.workers, list)
        self.requests = SimpleNamespace(on_message=self.on_nested)
        loop, console = asyncio.get_running_loop(), self.console
        self.pool = Pool(
            loop,
            PaperZygotes,  # type: ignore[arg-type]
            console,  # type: ignore[arg-type]
            PaperStore(),  # type: ignore[arg-type]
            Slots(loop, console, str(directory), most),  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            lambda pid, number: self.signals.append((pid, number)),
        )
        self.zygotes: PaperZygotes = self.pool.zygotes  # type: ignore[assignment]
        # Whatever the machine has killed before, these tests are not concerned.
        self.pool.autopsy.begin()

    def on_started(self, worker: int) -> None:
        self.told.append(("started", worker))

    def on_gone(self, worker: int, death: Death) -> None:
        self.told.append(("gone", worker, death))

    def on_outdated(self, environment: Environment) -> None:
        self.told.append(("outdated", environment))

    def on_done(self, worker: int, answers: list[Done]) -> None:
        for answer in answers:
            self.on_answer(worker, answer)

    def on_answer(self, worker: int, answer: Done | Failed) -> None:
        self.told.append((worker, answer))

    def on_skipped(self, worker: int, skipped: Skipped) -> None:
        self.told.append((worker, skipped))

    def on_nested(self, worker: LiveWorker, message: Message) -> None:
        self.told.append((worker.id, message))

    def delay(self, worker: LiveWorker, task: int, _delay: object) -> None:
        self.told.append(("behind", worker.id, task))

    def name_of(self, task: int) -> str:
        return f"train-{task}"

    def greet(self, role: str, identity: int, pid: int = 0) -> PaperPeer:
        peer = PaperPeer()
        hello = Hello(1, role, identity, pid)
        recipient = self.pool.greeted(peer, hello)  # type: ignore[arg-type]
        if recipient is not None:
            peer.on_messages, peer.on_lost, _ = recipient
        return peer

    def keeper(self, slot: int = 0) -> PaperPeer:
        return self.greet(KEEPER, slot)

    def worker(self, identity: int = 1) -> PaperPeer:
        return self.greet(WORKER, identity, 1000 + identity)

    def start(self, identity: int = 1) -> tuple[PaperPeer, PaperPeer]:
        """A worker in a new slot, from the wish to its greeting."""
        self.pool.spawn(identity)
        keeper = self.keeper(self.zygotes.kept[-1])
        keeper.on_messages([Forked(identity, 1000 + identity)])
        worker = self.worker(identity)
        self.told.clear()
        keeper.sent.clear()
        return keeper, worker


@pytest.fixture
async def house(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[House]:
    house = House(tmp_path, getattr(request, "param", SLOTS))
    yield house
    for slot in house.pool.slots:
        slot.keeper = None
    for worker in house.pool.workers.values():
        worker.peer = None
    await house.pool.close()
    assert os.listdir(tmp_path) == []


async def test_a_worker_from_the_wish_to_its_end(house: House) -> None:
    pool = house.pool
    pool.spawn(1)
    assert house.zygotes.kept == [0]
    assert repr(pool) == "<Pool 1 workers in 1 slots>"
    keeper = house.keeper()
    assert keeper.taken() == [Fork(1)]
    keeper.on_messages([Forked(1, 4711)])
    assert pool.pids == {1: 4711}
    assert house.told == []
    worker = house.greet(WORKER, 1, 4711)
    assert house.told == [("started", 1)]
    pool.retire(1)
    assert worker.taken() == [Exit()]
    worker.on_lost()
    assert keeper.taken() == []
    keeper.on_messages([Ended(1, 0)])
    assert house.told[1:] == [("gone", 1, Death(4711, 0))]
    pool.spawn(2)
    assert keeper.taken() == [Fork(2)], "its keeper serves again"
    assert house.zygotes.kept == [0]


async def test_a_worker_may_greet_before_its_keeper_reports(house: House) -> None:
    house.pool.spawn(1)
    keeper = house.keeper()
    house.worker(1)
    keeper.on_messages([Forked(1, 1001)])
    assert house.told == [("started", 1)]


@pytest.mark.parametrize("first", ["Ended", "end of file"])
async def test_it_is_gone_when_both_have_come(first: str, house: House) -> None:
    keeper, worker = house.start()
    if first == "Ended":
        keeper.on_messages([Ended(1, 9)])
        assert worker.calls == ["resume"], "a paused connection shows no end"
        worker.on_messages([Done(7, b"late answer")])
        assert house.told == [(1, Done(7, b"late answer"))]
        worker.on_lost()
        assert keeper.sent == []
    else:
        worker.on_lost()
        assert house.told == []
        house.pool.kill(1)
        keeper.on_messages([Ended(1, 9)])
    known = "" if first == "Ended" else cause.ENDED
    assert house.told[-1] == ("gone", 1, Death(1001, 9, known=known))
    assert house.pool.workers == {}


async def test_one_that_only_closes_its_connection_is_ended(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "LINGER", 0.0)
    keeper, worker = house.start()
    worker.on_lost()
    assert keeper.sent == [], "it may be about to end by itself"
    async with asyncio.timeout(60):
        while not keeper.sent:
            await asyncio.sleep(0)
    assert keeper.taken() == [End(1)]
    keeper.on_messages([Ended(1, 9)])
    death = Death(1001, 9, known=cause.DISCONNECTED)
    assert house.told == [("gone", 1, death)]
    house.pool.spawn(2)
    keeper.sent.clear()
    house.worker(2).on_lost()
    keeper.on_messages([Ended(2, 0)])
    await asyncio.sleep(0)
    assert keeper.sent == []


@pytest.mark.parametrize(
    ("status", "is_asked_of_the_kernel"),
    [(9, True), (11, True), (2, False), (0, False)],
)
async def test_the_kernel_is_asked_of_its_own_killings(
    status: int, is_asked_of_the_kernel: bool, house: House
) -> None:
    found = Findings(1, 1, "Killed process 1001 (python)")
    asked: list[int] = []

    class PaperAutopsy:
        def examine(self, pid: int) -> Findings:
            asked.append(pid)
            return found

    house.pool.autopsy = PaperAutopsy()  # type: ignore[assignment]
    keeper, worker = house.start()
    worker.on_lost()
    keeper.on_messages([Ended(1, status)])
    findings = found if is_asked_of_the_kernel else Findings()
    assert house.told == [("gone", 1, Death(1001, status, findings=findings))]
    assert asked == ([1001] if is_asked_of_the_kernel else [])


async def test_messages_about_others_are_not_heeded(house: House) -> None:
    keeper, _ = house.start(5)
    keeper.on_messages([Ended(4, 0)])
    keeper.on_messages([Forked(6, 1)])
    assert house.pool.pids == {5: 1005}
    assert house.told == []


async def test_unknown_greetings_are_cut_off(house: House) -> None:
    assert house.worker(9).calls == ["abort"]
    assert house.keeper(9).calls == ["abort"]
    house.start()
    assert house.worker(1).calls == ["abort"], "there is one of that id"
    assert house.keeper(0).calls == ["abort"]
    assert house.told == []
    zygote = house.greet(ZYGOTE, 0)
    assert house.zygotes.peers == [zygote]


async def test_one_that_has_ended_does_not_greet_any_more(house: House) -> None:
    house.pool.spawn(1)
    keeper = house.keeper()
    keeper.on_messages([Forked(1, 7)])
    keeper.on_messages([Ended(1, 256)])
    assert house.told == [("gone", 1, Death(7, 256))]
    assert house.worker(1).calls == ["abort"]


async def test_an_answer_goes_ahead_of_its_lines_which_is_said(house: House) -> None:
    keeper, worker = house.start()
    house.pool.commands.assign(1, 7, funcs.call(), Bind({}, {}), False)
    worker.on_messages([Log(7, 1, b"printed")])
    worker.on_messages([Log(0, 2, b"outside")])
    worker.on_messages([Done(7, b"")])
    keeper.on_messages([Ended(1, 0)])
    worker.on_lost()
    assert house.console.lines == [
        (1, "(train-7 pid=1001) printed"),
        (2, "(worker-1 pid=1001) outside"),
    ]
    assert house.told == [
        ("behind", 1, 7),
        (1, Done(7, b"")),
        ("behind", 1, EACH),
        ("gone", 1, Death(1001, 0, ("outside",))),
    ]


async def test_raw_output_comes_before_the_answer_too(
    house: House, tmp_path: Path
) -> None:
    house.pool.spawn(1)
    pipe = os.open(tmp_path / "0.1", os.O_WRONLY | os.O_NONBLOCK)
    house.keeper()
    assert os.listdir(tmp_path) == []
    worker = house.worker(1)
    os.write(pipe, b"raw")
    failed = Failed(7, "raised", "ValueError", "", "", None)
    worker.on_messages([failed])
    assert house.console.lines == [(1, "(worker-1 pid=1001) raw")]
    assert house.told == [("started", 1), ("behind", 1, 7), (1, failed)]
    house.console.show_all()
    worker.on_messages([failed])
    assert house.told[3:] == [(1, failed)]
    os.close(pipe)


async def test_the_last_lines_are_the_workers_own(house: House) -> None:
    keeper, worker = house.start()
    worker.on_messages([Log(0, 1, b"of the first")])
    worker.on_lost()
    keeper.on_messages([Ended(1, 0)])
    house.pool.spawn(2)
    keeper.on_messages([Ended(2, 1)])
    assert house.told[-1] == ("gone", 2, Death(0, 1))


async def test_what_a_worker_is_told_of_a_task(house: House) -> None:
    _, worker = house.start()
    call = funcs.call()
    bind = Bind({"A": "1"}, {"GPU": (0,)})
    house.pool.commands.assign(1, 7, call, bind, False)
    function = call.func.function
    define = Define(call.func.id, function.id, "train", {"CPU": 1.0}, b"pickled")
    run = Run(7, call.func.id, b"arguments", False)
    assert worker.taken() == [bind, define, run]
    house.pool.commands.assign(1, 8, call, None, True)
    assert worker.taken() == [Run(8, call.func.id, b"arguments", True)]
    again = Bind({}, {})
    house.pool.commands.assign(1, 9, call, again, False)
    assert worker.taken() == [again, run._replace(task=9)]


async def test_many_sites_are_forgotten_in_time(house: House) -> None:
    _, worker = house.start()
    for _ in range(SITES_KEPT):
        house.pool.commands.assign(1, 1, funcs.call(), None, False)
    assert Forget() not in worker.taken()
    house.pool.commands.assign(1, 1, funcs.call(), None, False)
    assert [type(message) for message in worker.taken()] == [Forget, Define, Run]


async def test_what_is_told_to_a_worker_that_has_gone(house: House) -> None:
    keeper, worker = house.start()
    worker.on_lost()
    worker.sent.clear()
    keeper.sent.clear()
    house.pool.commands.assign(1, 7, funcs.call(), None, False)
    house.pool.retire(1)
    house.pool.commands.interrupt(1, 7, 0, is_coroutine=True)
    assert worker.sent == []
    keeper.on_lost()
    house.pool.commands.interrupt(1, 7, 1, is_coroutine=True)
    house.pool.kill(1)
    assert keeper.sent == []


async def test_what_is_sent_ahead_is_one_write(house: House) -> None:
    _, worker = house.start()
    known, other = funcs.call(), funcs.call()
    house.pool.commands.assign(1, 7, known, Bind({}, {}), False)
    worker.sent.clear()
    house.pool.commands.send_ahead(1, [TaskId(8), TaskId(9)], [known, other], 7)
    run, define, last = worker.sent
    assert run == Run(8, known.func.id, b"arguments", False, 8)
    assert isinstance(define, Define)
    assert last == Run(9, other.func.id, b"arguments", False, 9)
    worker.on_lost()
    house.pool.commands.send_ahead(1, [TaskId(8)], [known], 7)
    assert len(worker.sent) == 3, "it has gone"


async def test_what_is_taken_back_is_said_on_the_page(house: House) -> None:
    keeper, worker = house.start()
    page = house.zygotes.page
    house.pool.commands.revoke(1, 12)
    assert page.revoked == {0: 12}
    page.begun_of[0] = 11
    assert house.pool.commands.begun(1) == 11
    worker.on_messages([Skipped(11, 11)])
    assert house.told == [(1, Skipped(11, 11))]
    keeper.on_messages([Ended(1, 9)])
    worker.on_lost()
    assert house.told[-1] == ("gone", 1, Death(1001, 9, begun=11))
    house.pool.commands.revoke(1, 13)
    assert page.revoked == {0: 12}, "the slot may be another's"
    assert house.pool.commands.begun(1) == 0


async def test_what_is_said_of_children_does_not_wait_for_lines(house: House) -> None:
    _, worker = house.start()
    said = [Submit(7, 1, 2, b""), Wait(7, (1,)), Withdraw(7, 1), Skipped(8, 8)]
    worker.on_messages([Log(7, 1, b"before")])
    for message in said:
        worker.on_messages([message])
    assert house.told == [(1, message) for message in said]


async def test_how_a_task_is_interrupted(house: House) -> None:
    keeper, worker = house.start()
    house.pool.commands.interrupt(1, 7, 0, is_coroutine=True)
    assert (worker.taken(), keeper.taken()) == ([Cancel(7)], [])
    assert house.zygotes.page.asked == {0: 7}
    house.pool.commands.interrupt(1, 7, 1, is_coroutine=True)
    assert (worker.taken(), keeper.taken()) == ([], [Signal(1)])
    house.pool.commands.interrupt(1, 8, 0, is_coroutine=False)
    assert (worker.taken(), keeper.taken()) == ([], [Signal(1)])
    house.zygotes.page.heard_of[0] = 8
    house.pool.commands.interrupt(1, 8, 1, is_coroutine=False)
    assert (worker.taken(), keeper.taken()) == ([], []), "it knows"


@pytest.mark.parametrize("first", ["the zygote's word", "the keeper's end"])
async def test_a_keeper_that_dies_takes_its_slot_along(
    first: str, house: House
) -> None:
    keeper, worker = house.start()
    worker.on_messages([Log(0, 1, b"last words")])
    house.console.show_all()
    if first == "the keeper's end":
        keeper.on_lost()
        assert house.told == [], "the zygote will say when all below it has ended"
        house.pool.on_lost_slot(0)
    else:
        house.pool.on_lost_slot(0)
        keeper.on_lost()
    death = lost(1001, ("last words",))
    assert house.told == [("gone", 1, death)]
    worker.on_lost()
    house.pool.on_lost_slot(0)
    assert len(house.told) == 1
    assert repr(house.pool) == "<Pool 0 workers in 0 slots>"


async def test_a_worker_is_not_put_into_a_slot_that_dies(house: House) -> None:
    """The driver may ask for another worker at the very word of the first's end."""
    keeper, _ = house.start()
    house.on_gone = lambda worker, _death: house.pool.spawn(worker + 1)  # type: ignore[method-assign]
    house.pool.on_lost_slot(0)
    assert keeper.sent == []
    assert house.zygotes.kept == [0, 1]
    keeper.on_lost()
    assert house.keeper(1).taken() == [Fork(2)]


async def test_a_late_end_of_a_keeper_does_not_touch_its_successor(
    house: House,
) -> None:
    first, _ = house.start(1)
    house.pool.on_lost_slot(0)
    second, _ = house.start(2)
    assert house.zygotes.kept == [0, 0]
    house.zygotes.die()
    first.on_lost()
    assert house.told == []
    assert set(house.pool.workers) == {2}
    second.on_lost()
    assert house.told == [("gone", 2, lost(1002))]


async def test_an_idle_keeper_that_dies_is_not_used(house: House) -> None:
    keeper, worker = house.start()
    worker.on_lost()
    keeper.on_messages([Ended(1, 0)])
    keeper.on_lost()
    house.pool.spawn(2)
    assert house.zygotes.kept == [0, 1]


async def test_orphaned_keepers_report_themselves(house: House) -> None:
    """When its zygote died before it, nobody else tells of a keeper's death."""
    keeper, _ = house.start()
    house.zygotes.die()
    assert house.told == []
    keeper.on_lost()
    assert house.told == [("gone", 1, lost(1001))]


async def test_zygote_and_keeper_die_at_once(house: House) -> None:
    keeper, _ = house.start()
    keeper.on_lost()
    house.zygotes.die()
    assert house.told == [("gone", 1, lost(1001))]


async def test_the_next_zygote_is_asked_for_keepers_that_never_came(
    house: House,
) -> None:
    house.pool.spawn(1)
    house.zygotes.die()
    assert house.zygotes.kept == [0, 1]
    assert house.keeper(0).calls == ["abort"], "of the zygote that has died"
    assert house.keeper(1).taken() == [Fork(1)]
    house.worker(1)
    assert house.told == [("started", 1)]
    house.pool.spawn(2)
    assert house.zygotes.kept == [0, 1, 2], "the number 0 may come yet"


async def test_without_a_zygote_nothing_can_be_forked(house: House) -> None:
    _, worker = house.start(1)
    house.pool.spawn(2)
    house.zygotes.break_for_good(NodeStartError("it died too often"))
    death = Death(reason="it died too often")
    assert house.told == [("gone", 2, death)]
    house.pool.spawn(3)
    assert len(house.told) == 1, "not while the core speaks"
    await asyncio.sleep(0)
    assert house.told[1:] == [("gone", 3, death)]
    worker.on_messages([Done(7, b"")])
    assert house.told[2:] == [(1, Done(7, b""))], "who runs is not harmed"


async def test_a_keeper_outlives_its_zygote_and_dies(house: House) -> None:
    first, _ = house.start(1)
    second, _ = house.start(2)
    first.on_lost()
    house.zygotes.break_for_good(NodeStartError("it died too often"))
    assert house.told == [("gone", 1, lost(1001))]
    second.on_lost()
    assert house.told[1:] == [("gone", 2, lost(1002))]


async def test_a_slot_that_cannot_be_made(house: House, tmp_path: Path) -> None:
    (tmp_path / "0.2").touch()
    house.pool.spawn(1)
    await asyncio.sleep(0)
    ((_, worker, death),) = house.told
    assert isinstance(death, Death)
    assert (worker, death.status) == (1, None)
    assert death.reason.startswith("no slot can be made: [Errno 17]")
    house.pool.spawn(2)
    assert house.zygotes.kept == [0]


async def test_moving_to_a_slot_that_cannot_be_made(
    house: House, tmp_path: Path
) -> None:
    house.pool.spawn(1)
    (tmp_path / "1.1").mkdir()
    house.zygotes.die()
    ((_, worker, death),) = house.told
    assert isinstance(death, Death)
    assert (worker, death.status) == (1, None)
    assert "no slot can be made" in death.reason
    (tmp_path / "1.1").rmdir()


@pytest.mark.parametrize("house", [3], indirect=True)
async def test_there_are_only_so_many_slots(house: House) -> None:
    house.start(1)
    house.start(2)
    house.pool.spawn(3)
    assert house.pool.slots.most_workers == 2, "one is for a keeper that ends"
    house.pool.spawn(4)
    assert house.told == [], "the core is told of events one at a time"
    await asyncio.sleep(0)
    reason = "3 slots of 3 are taken, by workers and keepers that have ended or will"
    assert house.told == [("gone", 4, Death(reason=reason, known=cause.CROWDED))]
    assert set(house.pool.workers) == {1, 2, 3}


@pytest.mark.parametrize("house", [1], indirect=True)
async def test_a_slot_of_another_zygote_makes_way(house: House) -> None:
    keeper, worker = house.start()
    worker.on_lost()
    keeper.on_messages([Ended(1, 0)])
    house.zygotes.supersede()
    keeper.sent.clear()
    house.zygotes.others["X"] = house.zygotes.current
    house.pool.spawn(2)
    await asyncio.sleep(0)
    assert house.told[-1][2].known == cause.CROWDED
    keeper.on_lost()
    house.pool.on_lost_slot(0)
    house.pool.spawn(3)
    assert house.zygotes.kept == [0, 0]


async def test_where_the_kernel_has_no_descriptor_left(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("aiogpu.runtime.output.os.open", fail)
        house.pool.spawn(1)
    await asyncio.sleep(0)
    death = house.told[-1][2]
    assert death.known == cause.CROWDED
    assert death.reason == (
        "no pipe for another worker: [Errno 24] Too many open files"
    )
    house.start(2)
    assert house.zygotes.kept == [0], "its place was not lost"


@pytest.mark.parametrize("who", ["keeper", "zygote"])
async def test_where_the_kernel_forks_no_more(who: str, house: House) -> None:
    house.pool.spawn(1)
    reason = "no process can be forked"
    if who == "keeper":
        keeper = house.keeper()
        keeper.on_messages([Unforked(2, "of another"), Unforked(1, reason)])
    else:
        house.pool.on_lost_slot(0, reason)
    assert house.told == [("gone", 1, Death(reason=reason, known=cause.CROWDED))]
    house.pool.spawn(2)
    if who == "keeper":
        assert keeper.taken() == [Fork(1), Close()], "one process less"
        assert house.zygotes.kept == [0, 1]
    else:
        assert house.zygotes.kept == [0, 0]


async def test_only_so_many_keepers_wait_for_work(house: House) -> None:
    started = [house.start(identity) for identity in range(1, SPARE_SLOTS + 2)]
    for identity, (keeper, worker) in enumerate(started, start=1):
        worker.on_lost()
        keeper.sent.clear()
        keeper.on_messages([Ended(identity, 0)])
    assert [keeper.sent for keeper, _ in started[:-1]] == [[]] * SPARE_SLOTS
    last, _ = started[-1]
    assert last.sent == [Close()]
    last.on_lost()
    house.pool.on_lost_slot(SPARE_SLOTS)
    assert repr(house.pool) == f"<Pool 0 workers in {SPARE_SLOTS} slots>"


async def test_a_worker_that_does_not_connect_in_time(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.runtime.workers.pool.START_LIMIT", 0.0)
    house.pool.spawn(1)
    async with asyncio.timeout(60):
        while not house.told:
            await asyncio.sleep(0)
    assert house.told == [
        (
            "gone",
            1,
            Death(reason="it did not connect within 0 s", known=cause.NOT_STARTED),
        )
    ]
    keeper = house.keeper(0)
    assert keeper.taken() == []
    house.pool.spawn(2)
    assert keeper.taken() == [Fork(2)], "a keeper that comes late is of use"
    async with asyncio.timeout(60):
        while not keeper.sent:
            await asyncio.sleep(0)
    assert keeper.taken() == [End(2)]
    keeper.on_messages([Ended(2, 9)])
    reason = "it did not connect within 0 s"
    assert house.told[1:] == [
        ("gone", 2, Death(0, 9, (), reason, known=cause.NOT_STARTED))
    ]


async def test_closing_waits_for_all_keepers(house: House) -> None:
    one, _ = house.start(1)
    two, _ = house.start(2)
    house.pool.spawn(3)
    closing = asyncio.ensure_future(house.pool.close())
    await asyncio.sleep(0)
    assert (one.sent, two.sent) == ([Close()], [Close()])
    assert house.keeper(2).calls == ["abort"], "it comes too late"
    one.on_lost()
    await asyncio.sleep(0)
    assert not closing.done()
    two.on_lost()
    await closing
    assert all(w.timer.cancelled() for w in house.pool.workers.values())


async def test_closing_an_empty_pool(house: House) -> None:
    await house.pool.close()
