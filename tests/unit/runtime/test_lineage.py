"""One environment's generations, with paper zygotes: who follows whom, and why not."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aiogpu.errors import NodeStartError, PreloadError
from aiogpu.runtime.workers.death import UnavailableError
from aiogpu.runtime.zygote.config import Modules
from aiogpu.runtime.zygote.generations import DEAR, INTENSITY, ZygoteGenerations
from aiogpu.runtime.zygote.process import ZygoteEvents
from aiogpu.wire.messages import Imported, LeftOut, Ready, Stale, Unfit

SLOW = Imported(("slow",), (DEAR,))


class PaperProcess:
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


class Family:
    """A lineage and the paper zygotes that it makes."""

    def __init__(self, preload: tuple[str, ...] = (), starts: bool = True) -> None:
        self.made: list[PaperProcess] = []
        self.told: list[tuple[str, int]] = []
        self.fault: Exception | None = None
        self.lineage = ZygoteGenerations(
            asyncio.get_running_loop(),
            self.make,
            self,  # type: ignore[arg-type]
            (("A", "1"),),
            preload,
        )
        if starts:
            self.lineage.current.start()

    def on_zygote_death(self, zygote: PaperProcess) -> None:
        self.told.append(("death", zygote.generation))

    def on_superseded(self, zygote: PaperProcess) -> None:
        self.told.append(("superseded", zygote.generation))

    def make(self, environment: object, modules: Modules, events: ZygoteEvents) -> Any:
        assert environment == (("A", "1"),)
        process = PaperProcess(len(self.made), modules, events)
        process.fault = self.fault
        self.made.append(process)
        return process

    @property
    def last(self) -> PaperProcess:
        return self.made[-1]

    @property
    def current(self) -> int:
        return self.lineage.current.generation

    async def follower(self, count: int = 2) -> PaperProcess:
        """Wait until so many were made; gives the last."""
        async with asyncio.timeout(60):
            while len(self.made) < count:
                await asyncio.sleep(0)
        return self.last

    async def settle(self) -> None:
        """Let a timer that may have been set go off."""
        timer = self.lineage._timer
        async with asyncio.timeout(60):
            while timer is not None and self.lineage._timer is timer:
                await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiogpu.runtime.zygote.generations.DEBOUNCE", 0.01)


@pytest.fixture
async def family() -> AsyncIterator[Family]:
    family = Family(("named",))
    family.last.become_ready()
    yield family
    family.lineage.end()


async def test_what_is_learnt_makes_a_generation(family: Family) -> None:
    lineage = family.lineage
    lineage.hear(Imported(("slow", "quick"), (DEAR, 1)))
    lineage.hear(Imported(("other",), (DEAR,)))
    follower = await family.follower()
    assert (follower.preload, follower.learnt) == (("named",), ("slow", "other"))
    assert follower.proven == ()
    assert family.current == 0, "the old one serves"
    assert family.told == []
    follower.become_ready()
    assert family.current == 1
    assert family.made[0].calls == ["start", "retire"]
    assert family.told == [("superseded", 0)]
    await family.settle()
    assert len(family.made) == 2, "a burst makes one generation"
    lineage.hear(SLOW)
    assert lineage._timer is None, "nothing is new"


async def test_what_is_learnt_meanwhile_makes_another_one(family: Family) -> None:
    family.lineage.hear(SLOW)
    second = await family.follower()
    family.lineage.hear(Imported(("late",), (DEAR,)))
    await family.settle()
    assert len(family.made) == 2
    second.become_ready()
    third = await family.follower(3)
    assert (third.learnt, third.proven) == (("slow", "late"), ("slow",))


async def test_what_is_learnt_before_the_first_is_ready() -> None:
    family = Family()
    family.lineage.hear(SLOW)
    await family.settle()
    assert len(family.made) == 1
    family.last.become_ready()
    assert (await family.follower()).learnt == ("slow",)
    family.lineage.end()


async def test_what_is_left_out_is_named_once(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    family.lineage.hear(Imported(("bad", "good"), (DEAR, DEAR)))
    follower = await family.follower()
    for _ in range(2):
        follower.on_message(follower, LeftOut("bad", "it left 1 threads running"))
    follower.become_ready()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "! bad is not preloaded: it left 1 threads running; workers import it "
        "themselves"
    )
    assert family.lineage.learning.proven == {"good"}


async def test_a_generation_that_adds_nothing_does_not_serve(family: Family) -> None:
    family.lineage.hear(SLOW)
    follower = await family.follower()
    follower.on_message(follower, LeftOut("slow", "it left 1 threads running"))
    follower.become_ready()
    assert follower.calls == ["start", "end"]
    follower.die(0)
    assert (family.current, family.told) == (0, [])


async def test_a_generation_spoilt_by_one_module_is_made_without_it(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    family.lineage.hear(Imported(("bad", "good"), (DEAR, DEAR)))
    follower = await family.follower()
    follower.die(0, Unfit("bad", "it left 1 threads running", False))
    assert family.current == 0
    third = await family.follower(3)
    assert third.learnt == ("good",)
    assert "bad is not preloaded" in caplog.text
    assert family.told == []


async def test_a_generation_that_dies_takes_what_it_was_to_add_along(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    family.lineage.hear(SLOW)
    (await family.follower()).die(-11)
    assert family.lineage.learning.left_out == {
        "slow": "the zygote that imported it ended with status -11"
    }
    assert "status -11 while it imported; the one before serves on" in caplog.text
    await family.settle()
    assert (family.current, len(family.made)) == (0, 2)


async def test_a_generation_that_cannot_be_started(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    family.fault = NodeStartError("no interpreter")
    family.lineage.hear(SLOW)
    await family.follower()
    assert "what was learnt is not preloaded: no interpreter" in caplog.text
    assert (family.current, family.lineage.problem) == (0, None)


async def test_an_edited_module_makes_a_generation(family: Family) -> None:
    first = family.last
    first.on_message(first, Stale("named"))
    first.on_message(first, Stale("another"))
    follower = await family.follower()
    follower.become_ready()
    first.on_message(first, Stale("named"))
    assert family.lineage._timer is None, "it does not serve any more"
    assert len(family.made) == 2


async def test_a_named_module_that_was_spoilt_by_an_edit(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    first = family.last
    first.on_message(first, Stale("named"))
    follower = await family.follower()
    follower.die(0, Unfit("named", "SyntaxError: line 3", True))
    assert "named cannot be imported anew: SyntaxError: line 3; workers go" in (
        caplog.text
    )
    await family.settle()
    assert (family.current, len(family.made)) == (0, 2)
    first.on_message(first, Stale("named"))
    assert (await family.follower(3)).preload == ("named",), "it may be mended"


async def test_one_that_dies_is_followed_by_what_is_proven(family: Family) -> None:
    family.lineage.hear(SLOW)
    (await family.follower()).become_ready()
    family.last.die()
    follower = await family.follower(3)
    assert (follower.learnt, follower.proven) == (("slow",), ("slow",))
    assert family.told == [("superseded", 0), ("death", 1)]
    assert family.current == 2, "it is to serve, so who waits can ask it"
    follower.die(-11)
    assert (await family.follower(4)).learnt == (), "it may be to blame"


async def test_who_dies_after_it_was_superseded_is_not_replaced(
    family: Family,
) -> None:
    family.lineage.hear(SLOW)
    (await family.follower()).become_ready()
    family.made[0].die()
    assert family.told == [("superseded", 0), ("death", 0)]
    assert len(family.made) == 2


async def test_a_death_while_the_next_one_imports(family: Family) -> None:
    family.lineage.hear(SLOW)
    follower = await family.follower()
    family.made[0].die()
    assert family.current == 2
    follower.become_ready()
    assert family.current == 1
    assert family.made[2].calls == ["start", "retire"]
    family.made[2].become_ready()
    assert family.current == 1


async def test_too_many_deaths(
    family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    lineage = family.lineage
    for _ in range(INTENSITY):
        family.last.die()
        family.last.become_ready()
    last = family.last
    last.die()
    assert len(family.made) == INTENSITY + 1, "the next one is started when wanted"
    assert lineage.problem is None
    assert isinstance(last.problem, UnavailableError)
    assert str(last.problem) == "the zygote ended with status -9: last words"
    assert family.told[-1] == ("death", last.generation)
    for _ in range(10):
        made = len(family.made)
        assert lineage.serving() is lineage.current is family.last
        assert lineage.serving() is family.last
        assert len(family.made) == made + 1
        family.last.die()
        assert isinstance(family.last.problem, UnavailableError)
    lineage.serving()
    family.last.become_ready()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == INTENSITY + 2, "what goes on is not told again and again"
    assert "no worker can be started: the zygote ended with stat" in warnings[INTENSITY]
    assert warnings[-1].startswith("workers can be started again: zygote ")


async def test_one_that_cannot_be_started_is_tried_again(family: Family) -> None:
    lineage = family.lineage
    family.fault = NodeStartError("python cannot be started: no file")
    family.last.die()
    for _ in range(3):
        with pytest.raises(UnavailableError, match="no file"):
            lineage.serving()
    assert lineage.problem is None
    family.last.fault = None
    assert lineage.serving() is family.last
    assert len(family.made) == 2, "the same one"


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN, errno.ENOENT])
async def test_a_first_one_that_cannot_be_started(number: int) -> None:
    family = Family(starts=False)
    error = NodeStartError("python cannot be started")
    error.__cause__ = OSError(number, os.strerror(number))
    family.last.fault = error
    if number != errno.ENOENT:
        with pytest.raises(UnavailableError):
            family.lineage.serving()
        family.last.fault = None
        assert family.lineage.serving() is family.last
        return
    lengths = []
    for _ in range(3):
        with pytest.raises(NodeStartError) as caught:
            family.lineage.serving()
        assert not isinstance(caught.value, UnavailableError)
        lengths.append(len(caught.traceback))
    assert lengths[1] == lengths[2], "each is a new one"
    assert family.lineage.problem is not None


@pytest.mark.parametrize("status", [-signal.SIGKILL, os.EX_TEMPFAIL])
async def test_a_first_one_that_is_ended_from_outside(status: int) -> None:
    family = Family()
    family.last.die(status)
    with pytest.raises(NodeStartError) as caught:
        await family.lineage.ready()
    assert not isinstance(caught.value, UnavailableError), "a user is told of this one"
    assert family.lineage.problem is None
    assert family.lineage.serving() is family.last
    waiting = asyncio.ensure_future(family.lineage.ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    family.last.become_ready()
    await waiting
    family.lineage.end()


async def test_what_serves_in_the_place_of_one_that_has_died(family: Family) -> None:
    """It may add nothing; there is no other."""
    family.lineage.hear(SLOW)
    follower = await family.follower()
    for _ in range(INTENSITY + 1):
        family.lineage.current.die()
        if family.lineage.current.is_over:
            break
        family.lineage.current.become_ready()
    follower.on_message(follower, LeftOut("slow", "it left 1 threads running"))
    follower.become_ready()
    assert family.lineage.serving() is follower


async def test_a_first_one_that_dies_is_an_error() -> None:
    family = Family()
    family.last.die(1)
    with pytest.raises(NodeStartError, match="status 1"):
        await family.lineage.ready()
    family.lineage.end()


async def test_a_first_one_that_lacks_a_named_module() -> None:
    family = Family(("named",))
    family.last.die(0, Unfit("named", "ModuleNotFoundError: named", True))
    with pytest.raises(PreloadError, match="'named', which cannot be imported"):
        await family.lineage.ready()
    family.lineage.end()


async def test_a_named_module_that_starts_threads_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    family = Family(("named", "other"))
    family.last.die(0, Unfit("named", "it left 1 threads running", False))
    assert family.last.preload == ("other",)
    family.last.become_ready()
    await family.lineage.ready()
    assert "named is not preloaded: it left 1 threads running, and" in caplog.text
    family.lineage.end()


async def test_a_learnt_module_that_spoils_a_first_one() -> None:
    """A zygote for another environment begins with what the plain one has."""
    family = Family()
    family.lineage.learning.modules.append("slow")
    family.last.die(0, Unfit("slow", "it opened /dev/nvidia0", False))
    assert family.last.learnt == ()
    assert family.lineage.problem is None
    family.lineage.end()


async def test_an_interpreter_that_is_unfit_from_the_start() -> None:
    """A sitecustomize may start a thread; starting again would not help."""
    family = Family(("named",))
    family.last.die(0, Unfit("cloudpickle", "it left 1 threads running", False))
    with pytest.raises(NodeStartError, match="cannot be forked here: it left 1 thr"):
        await family.lineage.ready()
    assert len(family.made) == 1
    family.lineage.end()


async def test_imports_that_never_end() -> None:
    family = Family(("named", "other"))
    family.last.is_late = True
    family.last.die()
    with pytest.raises(PreloadError, match="'named', 'other', and the imports did not"):
        await family.lineage.ready()
    family.lineage.end()


async def test_the_end(family: Family) -> None:
    family.lineage.hear(SLOW)
    follower = await family.follower()
    family.lineage.hear(Imported(("late",), (DEAR,)))
    family.lineage.end()
    assert follower.calls == ["start", "end"]
    follower.die()
    family.made[0].die()
    family.lineage.hear(Imported(("later",), (DEAR,)))
    await family.settle()
    assert len(family.made) == 2
    assert repr(family.lineage).startswith("<ZygoteGenerations <")
