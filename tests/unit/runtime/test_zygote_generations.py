"""The zygotes of one environment: what is learnt, which follows which, and failures."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiogpu.errors import NodeStartError, PreloadError
from aiogpu.runtime.workers.death import UnavailableError
from aiogpu.runtime.zygote.config import Modules
from aiogpu.runtime.zygote.generations import (
    DEAR,
    DEVICE_MODULES,
    INTENSITY,
    MOST,
    NOT_CHEAP,
    REMEMBERED,
    Learning,
    ZygoteGenerations,
    sees_devices,
)
from aiogpu.runtime.zygote.process import ZygoteEvents
from aiogpu.wire.messages import Imported, LeftOut, Ready, Stale, Unfit


def hear(learning: Learning, **costs: int) -> bool:
    return learning.hear(tuple(costs), tuple(costs.values()))


def test_a_costly_module_is_learnt_at_once() -> None:
    learning = Learning(())
    assert not hear(learning, cheap=DEAR - 1)
    assert hear(learning, dear=DEAR)
    assert learning.modules == ["dear"]


def test_what_is_not_cheap_is_learnt_from_the_second_worker() -> None:
    learning = Learning(())
    assert not hear(learning, a=NOT_CHEAP, b=NOT_CHEAP - 1)
    assert hear(learning, a=NOT_CHEAP, b=NOT_CHEAP - 1)
    assert learning.modules == ["a"]


def test_nothing_is_learnt_twice() -> None:
    learning = Learning(["named"], ["given"])
    assert not hear(learning, named=DEAR, given=DEAR)
    assert hear(learning, new=DEAR)
    assert not hear(learning, new=DEAR)
    assert learning.modules == ["given", "new"]


def test_what_is_unfit_never_comes_back() -> None:
    learning = Learning(())
    hear(learning, bad=DEAR, good=DEAR)
    learning.leave_out("bad", "it left 1 threads running")
    assert learning.modules == ["good"]
    assert not hear(learning, bad=DEAR)
    learning.prove(["bad", "good"])
    assert learning.proven == {"good"}
    learning.leave_out("good", "it crashed")
    assert (learning.modules, learning.proven) == ([], set())
    assert set(learning.left_out) == {"bad", "good"}
    learning.leave_out("never seen", "")


def test_what_is_given_was_proven() -> None:
    assert Learning((), ["a", "b"]).proven == {"a", "b"}


@pytest.mark.parametrize(
    ("module", "is_seen"),
    [
        *((module, True) for module in sorted(DEVICE_MODULES)),
        ("cupy.linalg", True),
        ("numba", False),
        ("cupyx", False),
        ("torch.cuda", False),
    ],
)
def test_what_must_see_devices_is_not_learnt(module: str, is_seen: bool) -> None:
    assert sees_devices(module) is is_seen
    assert Learning(()).hear([module], [DEAR]) is not is_seen


def test_the_number_of_learnt_modules_is_bounded() -> None:
    learning = Learning(())
    names = [f"m{number}" for number in range(MOST + 1)]
    assert learning.hear(names, [DEAR] * len(names))
    assert learning.modules == names[:-1]


def test_what_is_remembered_is_bounded() -> None:
    learning = Learning(())
    names = [f"m{number}" for number in range(REMEMBERED + 1)]
    costs = [NOT_CHEAP] * len(names)
    assert not learning.hear(names, costs)
    assert not learning.hear(names[-1:], costs)
    assert learning.hear(names[:1], costs)


LEARNT = Imported(("slow",), (DEAR,))


class FakeProcess:
    """A zygote that lives and dies as the test says."""

    def __init__(self, number: int, modules: Modules, events: ZygoteEvents) -> None:
        self.generation = number
        self.preload, self.learnt, self.proven = modules
        self.ready: Ready | None = None
        self.unfit: Unfit | None = None
        self.problem: Exception | None = None
        self.status, self.last = 0, ("last words",)
        self.is_closing = self.is_over = self.is_stale = self.is_late = False
        self.is_started = False
        self.calls: list[str] = []
        self.fault: Exception | None = None
        self.events: Any = events
        self.on_message = self.events.on_message

    def start(self, _launched: object = None) -> None:
        self.calls.append("start")
        if self.fault is not None:
            raise self.fault
        self.is_started = True

    def retire(self) -> None:
        self.calls.append("retire")

    def end(self) -> None:
        self.is_closing = True
        self.calls.append("end")

    def become_ready(self) -> None:
        self.ready = Ready((), ())
        self.events.on_ready(self)

    def die(self, status: int = -9, unfit: Unfit | None = None) -> None:
        self.status, self.unfit, self.is_over = status, unfit, True
        self.events.on_end(self)


class Generations:
    """A lineage and the paper zygotes that it makes."""

    def __init__(self, preload: tuple[str, ...] = (), starts: bool = True) -> None:
        self.made: list[FakeProcess] = []
        self.events: list[tuple[str, int]] = []
        self.fault: Exception | None = None
        self.zygotes = ZygoteGenerations(
            asyncio.get_running_loop(),
            self.make,
            self,  # type: ignore[arg-type]
            (("A", "1"),),
            preload,
        )
        if starts:
            self.zygotes.current.start()

    def on_zygote_death(self, zygote: FakeProcess) -> None:
        self.events.append(("death", zygote.generation))

    def on_superseded(self, zygote: FakeProcess) -> None:
        self.events.append(("superseded", zygote.generation))

    def make(self, environment: object, modules: Modules, events: ZygoteEvents) -> Any:
        assert environment == (("A", "1"),)
        process = FakeProcess(len(self.made), modules, events)
        process.fault = self.fault
        self.made.append(process)
        return process

    @property
    def last(self) -> FakeProcess:
        return self.made[-1]

    @property
    def current(self) -> int:
        return self.zygotes.current.generation

    async def follower(self, count: int = 2) -> FakeProcess:
        """Wait until so many were made; gives the last."""
        async with asyncio.timeout(60):
            while len(self.made) < count:
                await asyncio.sleep(0)
        return self.last

    async def settle(self) -> None:
        """Let a timer that may have been set go off."""
        timer = self.zygotes._timer
        async with asyncio.timeout(60):
            while timer is not None and self.zygotes._timer is timer:
                await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def no_debounce(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiogpu.runtime.zygote.generations.DEBOUNCE", 0.01)


@pytest.fixture
async def generations() -> AsyncIterator[Generations]:
    generations = Generations(("named",))
    generations.last.become_ready()
    yield generations
    generations.zygotes.end()


async def test_what_is_learnt_makes_a_generation(generations: Generations) -> None:
    zygotes = generations.zygotes
    zygotes.hear(Imported(("slow", "quick"), (DEAR, 1)))
    zygotes.hear(Imported(("other",), (DEAR,)))
    follower = await generations.follower()
    assert (follower.preload, follower.learnt) == (("named",), ("slow", "other"))
    assert follower.proven == ()
    assert generations.current == 0, "the old one serves"
    assert generations.events == []
    follower.become_ready()
    assert generations.current == 1
    assert generations.made[0].calls == ["start", "retire"]
    assert generations.events == [("superseded", 0)]
    await generations.settle()
    assert len(generations.made) == 2, "a burst makes one generation"
    zygotes.hear(LEARNT)
    assert zygotes._timer is None, "nothing is new"


async def test_what_is_learnt_meanwhile_makes_another_one(
    generations: Generations,
) -> None:
    generations.zygotes.hear(LEARNT)
    second = await generations.follower()
    generations.zygotes.hear(Imported(("late",), (DEAR,)))
    await generations.settle()
    assert len(generations.made) == 2
    second.become_ready()
    third = await generations.follower(3)
    assert (third.learnt, third.proven) == (("slow", "late"), ("slow",))


async def test_a_generation_that_adds_nothing_does_not_serve(
    generations: Generations,
) -> None:
    generations.zygotes.hear(LEARNT)
    follower = await generations.follower()
    follower.on_message(follower, LeftOut("slow", "it left 1 threads running"))
    follower.become_ready()
    assert follower.calls == ["start", "end"]
    follower.die(0)
    assert (generations.current, generations.events) == (0, [])


async def test_a_generation_spoilt_by_one_module_is_made_without_it(
    generations: Generations, caplog: pytest.LogCaptureFixture
) -> None:
    generations.zygotes.hear(Imported(("bad", "good"), (DEAR, DEAR)))
    follower = await generations.follower()
    follower.die(0, Unfit("bad", "it left 1 threads running", False))
    assert generations.current == 0
    third = await generations.follower(3)
    assert third.learnt == ("good",)
    assert "bad is not preloaded" in caplog.text
    assert generations.events == []


async def test_a_generation_that_dies_takes_what_it_was_to_add_along(
    generations: Generations, caplog: pytest.LogCaptureFixture
) -> None:
    generations.zygotes.hear(LEARNT)
    (await generations.follower()).die(-11)
    assert generations.zygotes.learning.left_out == {
        "slow": "the zygote that imported it ended with status -11"
    }
    assert "status -11 while it imported; the one before serves on" in caplog.text
    await generations.settle()
    assert (generations.current, len(generations.made)) == (0, 2)


async def test_an_edited_module_makes_a_generation(generations: Generations) -> None:
    first = generations.last
    first.on_message(first, Stale("named"))
    first.on_message(first, Stale("another"))
    follower = await generations.follower()
    follower.become_ready()
    first.on_message(first, Stale("named"))
    assert generations.zygotes._timer is None, "it does not serve any more"
    assert len(generations.made) == 2


async def test_one_that_dies_is_followed_by_what_is_proven(
    generations: Generations,
) -> None:
    generations.zygotes.hear(LEARNT)
    (await generations.follower()).become_ready()
    generations.last.die()
    follower = await generations.follower(3)
    assert (follower.learnt, follower.proven) == (("slow",), ("slow",))
    assert generations.events == [("superseded", 0), ("death", 1)]
    assert generations.current == 2, "it is to serve, so who waits can ask it"
    follower.die(-11)
    assert (await generations.follower(4)).learnt == (), "it may be to blame"


async def test_a_death_while_the_next_one_imports(generations: Generations) -> None:
    generations.zygotes.hear(LEARNT)
    follower = await generations.follower()
    generations.made[0].die()
    assert generations.current == 2
    follower.become_ready()
    assert generations.current == 1
    assert generations.made[2].calls == ["start", "retire"]
    generations.made[2].become_ready()
    assert generations.current == 1


async def test_too_many_deaths(
    generations: Generations, caplog: pytest.LogCaptureFixture
) -> None:
    zygotes = generations.zygotes
    for _ in range(INTENSITY):
        generations.last.die()
        generations.last.become_ready()
    last = generations.last
    last.die()
    assert len(generations.made) == INTENSITY + 1, "the next one is started when wanted"
    assert zygotes.problem is None
    assert isinstance(last.problem, UnavailableError)
    assert str(last.problem) == "the zygote ended with status -9: last words"
    assert generations.events[-1] == ("death", last.generation)
    for _ in range(10):
        made = len(generations.made)
        assert zygotes.serving() is zygotes.current is generations.last
        assert zygotes.serving() is generations.last
        assert len(generations.made) == made + 1
        generations.last.die()
        assert isinstance(generations.last.problem, UnavailableError)
    zygotes.serving()
    generations.last.become_ready()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == INTENSITY + 2, "what goes on is not told again and again"
    assert "no worker can be started: the zygote ended with stat" in warnings[INTENSITY]
    assert warnings[-1].startswith("workers can be started again: zygote ")


async def test_one_that_cannot_be_started_is_tried_again(
    generations: Generations,
) -> None:
    zygotes = generations.zygotes
    generations.fault = NodeStartError("python cannot be started: no file")
    generations.last.die()
    for _ in range(3):
        with pytest.raises(UnavailableError, match="no file"):
            zygotes.serving()
    assert zygotes.problem is None
    generations.last.fault = None
    assert zygotes.serving() is generations.last
    assert len(generations.made) == 2, "the same one"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN, errno.ENOENT])
async def test_a_first_one_that_cannot_be_started(number: int) -> None:
    generations = Generations(starts=False)
    error = NodeStartError("python cannot be started")
    error.__cause__ = OSError(number, os.strerror(number))
    generations.last.fault = error
    if number != errno.ENOENT:
        with pytest.raises(UnavailableError):
            generations.zygotes.serving()
        generations.last.fault = None
        assert generations.zygotes.serving() is generations.last
        return
    lengths = []
    for _ in range(3):
        with pytest.raises(NodeStartError) as caught:
            generations.zygotes.serving()
        assert not isinstance(caught.value, UnavailableError)
        lengths.append(len(caught.traceback))
    assert lengths[1] == lengths[2], "each is a new one"
    assert generations.zygotes.problem is not None


@pytest.mark.parametrize("status", [-signal.SIGKILL, os.EX_TEMPFAIL])
async def test_a_first_one_that_is_ended_from_outside(status: int) -> None:
    generations = Generations()
    generations.last.die(status)
    with pytest.raises(NodeStartError) as caught:
        await generations.zygotes.ready()
    assert not isinstance(caught.value, UnavailableError), "a user is told of this one"
    assert generations.zygotes.problem is None
    assert generations.zygotes.serving() is generations.last
    waiting = asyncio.ensure_future(generations.zygotes.ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    generations.last.become_ready()
    await waiting
    generations.zygotes.end()


async def test_a_follower_serves_if_there_is_no_other(generations: Generations) -> None:
    """It may add nothing; there is no other."""
    generations.zygotes.hear(LEARNT)
    follower = await generations.follower()
    for _ in range(INTENSITY + 1):
        generations.zygotes.current.die()
        if generations.zygotes.current.is_over:
            break
        generations.zygotes.current.become_ready()
    follower.on_message(follower, LeftOut("slow", "it left 1 threads running"))
    follower.become_ready()
    assert generations.zygotes.serving() is follower


@pytest.mark.parametrize(
    ("status", "unfit", "is_late", "error", "text"),
    [
        (1, None, False, NodeStartError, "status 1"),
        (
            0,
            Unfit("named", "ModuleNotFoundError: named", True),
            False,
            PreloadError,
            "'named', which cannot be imported",
        ),
        (-9, None, True, PreloadError, "'named', and the imports did not"),
        # A sitecustomize may start a thread; starting again would not help.
        (
            0,
            Unfit("cloudpickle", "it left 1 threads running", False),
            False,
            NodeStartError,
            "cannot be forked here: it left 1 thr",
        ),
    ],
    ids=["death", "missing module", "imports too long", "unfit interpreter"],
)
async def test_a_first_zygote_that_fails_is_an_error(
    status: int,
    unfit: Unfit | None,
    is_late: bool,
    error: type[NodeStartError],
    text: str,
) -> None:
    generations = Generations(("named",))
    generations.last.is_late = is_late
    generations.last.die(status, unfit)
    with pytest.raises(error, match=text):
        await generations.zygotes.ready()
    assert len(generations.made) == 1
    generations.zygotes.end()


async def test_nothing_follows_after_the_end(generations: Generations) -> None:
    generations.zygotes.hear(LEARNT)
    follower = await generations.follower()
    generations.zygotes.hear(Imported(("late",), (DEAR,)))
    generations.zygotes.end()
    assert follower.calls == ["start", "end"]
    follower.die()
    generations.made[0].die()
    generations.zygotes.hear(Imported(("later",), (DEAR,)))
    await generations.settle()
    assert len(generations.made) == 2
    assert repr(generations.zygotes).startswith("<ZygoteGenerations <")
