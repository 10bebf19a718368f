"""Which actor of a pool takes a call, when one is made and when one goes."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiogpu
from aiogpu.api.actors.pool import LONGEST_PAUSE
from aiogpu.errors import (
    ActorDiedError,
    InfeasibleError,
    MisuseError,
    NodeClosedError,
    NodeDiedError,
)
from tests.support.turns import no_complaints, turns
from tests.unit.api.paper_actor import Paper, PaperLink

IDLE_AFTER = 0.05


@pytest.fixture
async def paper() -> AsyncIterator[Paper]:
    async with no_complaints():
        yield Paper()


async def ready_pool(paper: Paper, *bounds: Any, **options: Any) -> Any:
    """A pool whose first actors are ready."""
    pool = aiogpu.ActorPool(paper.make, *bounds, **options)
    paper.live()
    return await pool


def call(pool: Any, count: int = 1) -> list[Any]:
    return [pool.embed.remote(str(number)) for number in range(count)]


async def heard(handles: list[Any]) -> list[Any]:
    """How calls have ended, each an error or a result."""
    return list(await asyncio.gather(*handles, return_exceptions=True))


# Which takes a call.


async def test_the_one_with_the_fewest_unanswered_calls_is_next(paper: Paper) -> None:
    pool = await ready_pool(paper, 3)
    handles = call(pool, 5)
    assert paper.loads == [2, 2, 1]
    paper.links[1].answer(0, "a")
    paper.links[1].answer(1, "b")
    await turns()
    handles += call(pool, 2)
    assert paper.loads == [2, 4, 1]  # the first of equals, once it has fewer
    assert await handles[1] == "a"
    assert await handles[4] == "b"
    assert paper.links[1].arguments[0] == ("embed", "1")


async def test_of_equals_the_first_is_next(paper: Paper) -> None:
    pool = await ready_pool(paper, 3)
    for _ in range(3):
        call(pool)
        paper.links[0].answer()
        await turns()
    assert paper.loads == [3, 0, 0]


async def test_a_cancelled_or_failed_call_counts_no_more(paper: Paper) -> None:
    pool = await ready_pool(paper, 2)
    first, second = call(pool, 2)
    first.cancel()
    paper.links[1].calls[0].settle(ValueError("bad text"))
    await turns()
    call(pool, 2)
    assert paper.loads == [2, 2]
    assert paper.links[0].cancelled == 1
    with pytest.raises(ValueError, match="bad text"):
        await second


async def test_counting_a_call_is_not_waiting_for_it(paper: Paper) -> None:
    """[B15] With its last waiter the work is cancelled, in a pool as well."""
    pool = await ready_pool(paper, 1)
    waiter = asyncio.ensure_future(call(pool)[0].coro())
    await turns()
    waiter.cancel()
    await turns()
    assert paper.links[0].cancelled == 1


async def test_an_error_that_nobody_hears_is_told_to_the_loop() -> None:
    paper = Paper()
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, what: told.append(str(what["exception"]))
    )
    pool = await ready_pool(paper, 1)
    call(pool)
    paper.links[0].calls.pop().settle(ValueError("unheard"))
    await turns()
    gc.collect()
    assert told == ["unheard"]


async def test_those_that_are_not_ready_are_called_where_none_is(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, 3)
    call(pool, 4)  # none is ready, so all take some
    assert paper.loads == [2, 1, 1]
    paper.links[1].live()
    await turns()
    call(pool, 3)
    assert paper.loads == [2, 4, 1]
    paper.live()
    await pool
    call(pool, 2)
    assert paper.loads == [3, 4, 2]


async def test_a_call_that_is_refused_counts_for_nothing(paper: Paper) -> None:
    pool = await ready_pool(paper, 2)
    with pytest.raises(MisuseError, match=r"Model\.embed\(text.* wrong arguments"):
        pool.embed.remote()
    call(pool, 2)
    assert paper.loads == [1, 1]


# Growing and shrinking.


async def test_it_grows_when_all_have_enough_to_do(paper: Paper) -> None:
    pool = await ready_pool(paper, min_size=1, max_size=3, target=2)
    call(pool, 2)
    assert len(pool) == 1
    call(pool)
    assert (len(pool), paper.loads) == (2, [3, 0])  # it is not ready yet
    paper.live()
    await turns()
    call(pool, 3)
    assert (len(pool), paper.loads) == (3, [3, 3, 0])
    paper.live()
    await turns()
    call(pool, 9)
    assert (len(pool), paper.loads) == (3, [5, 5, 5])


async def test_one_that_is_being_made_is_counted_on(paper: Paper) -> None:
    """A call for which there will be room has no further actor made."""
    pool = await ready_pool(paper, min_size=1, max_size=9, target=4)
    call(pool, 8)
    assert len(pool) == 2
    call(pool)
    assert len(pool) == 3


async def test_one_with_little_to_do_makes_growing_needless(paper: Paper) -> None:
    pool = await ready_pool(paper, 2, max_size=3)
    call(pool, 2)
    call(pool, 0)
    paper.links[1].answer()
    await turns()
    call(pool)
    assert (len(pool), paper.loads) == (2, [1, 2])


async def test_a_pool_without_actors_makes_one_for_a_call(paper: Paper) -> None:
    pool = await ready_pool(paper, min_size=0, max_size=2)
    assert (len(pool), paper.links) == (0, [])
    (handle,) = call(pool)
    assert (len(pool), paper.loads) == (1, [1])
    paper.live()
    paper.links[0].answer(value="a")
    assert await handle == "a"


async def test_it_shrinks_when_there_is_nothing_to_do(paper: Paper) -> None:
    loop = asyncio.get_running_loop()
    pool = await ready_pool(paper, 3, min_size=1, idle_after=IDLE_AFTER)
    began = loop.time()
    handles = call(pool, 2)
    while len(pool) > 2:
        await asyncio.wait(handles, timeout=0.001)
    assert loop.time() - began >= IDLE_AFTER - 0.002
    assert [link.story for link in paper.links] == [[], [], ["terminate"]]
    paper.links[0].answer()
    answered = loop.time()
    while len(pool) > 1:
        await asyncio.wait([handles[1]], timeout=0.001)
    assert loop.time() - answered >= IDLE_AFTER - 0.002
    assert [link.story for link in paper.links] == [["terminate"], [], ["terminate"]]
    paper.links[1].answer()
    await asyncio.wait([asyncio.ensure_future(turns())], timeout=2 * IDLE_AFTER)
    assert len(pool) == 1
    call(pool)
    assert paper.loads == [1, 2, 0]


async def test_of_those_that_may_go_the_last_go_first(paper: Paper) -> None:
    pool = await ready_pool(paper, 4, min_size=2, idle_after=IDLE_AFTER)
    now = asyncio.get_running_loop().time()
    for member in pool._finalizer.scheduler._actors:
        member.idle_since = now
    while len(pool) > 2:
        await asyncio.sleep(0)
    stories = [link.story for link in paper.links]
    assert stories == [[], [], ["terminate"], ["terminate"]]


async def test_one_that_is_not_ready_is_not_idle(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, 2, min_size=0, idle_after=0)
    await turns()
    assert len(pool) == 2
    paper.live()
    while len(pool):
        await asyncio.sleep(0)


async def test_a_place_that_has_come_free_is_taken_again(paper: Paper) -> None:
    """Of equals the lowest number is next, also if it is the youngest."""
    pool = await ready_pool(paper, 2)
    paper.links[0].answer(call(pool) and 0)
    await turns()
    paper.links[0].die()
    paper.links[0].end()
    await turns()
    paper.live()
    await pool
    call(pool)
    assert paper.loads == [1, 0, 1]


# Deaths.


async def test_one_that_dies_in_a_call_is_replaced(
    paper: Paper, caplog: pytest.LogCaptureFixture
) -> None:
    pool = await ready_pool(paper, 2)
    handles = call(pool, 2)
    paper.links[0].answer()
    await turns()
    handles += call(pool)
    with caplog.at_level(logging.WARNING):
        paper.links[0].die("it was killed")
        await turns()
    assert (len(pool), len(paper.links)) == (2, 3)
    assert caplog.messages == ["a pool has lost its actor 0: it was killed"]
    outcome = await heard(handles[2:])
    assert isinstance(outcome[0], ActorDiedError)
    call(pool)
    assert paper.loads == [2, 2, 0]  # it is not ready yet
    paper.live()
    await turns()
    call(pool)
    assert paper.loads == [2, 2, 1]
    assert repr(pool) == "<ActorPool of Model: 2 actors, 2 ready, 3 calls, 1 died>"


async def test_one_that_dies_with_nothing_to_do_is_replaced(paper: Paper) -> None:
    pool = await ready_pool(paper, 1)
    call(pool)
    paper.links[0].answer()
    await turns()
    paper.links[0].die()
    paper.links[0].end()
    await turns()
    assert (len(pool), len(paper.links)) == (1, 2)


async def test_one_too_many_is_not_replaced(paper: Paper) -> None:
    pool = await ready_pool(paper, 2, min_size=1)
    paper.links[1].die()
    paper.links[1].end()
    await turns()
    assert (len(pool), len(paper.links)) == (1, 2)


async def test_one_that_restarts_gets_calls_when_it_lives_again(paper: Paper) -> None:
    pool = await ready_pool(paper, 2)
    handles = call(pool, 2)
    paper.links[0].restart()
    await turns()
    call(pool, 2)
    assert paper.loads == [1, 3]
    paper.links[0].live()
    await turns()
    call(pool)
    assert paper.loads == [2, 3]
    assert len(paper.links) == 2
    assert [error.is_restarting for error in await heard(handles[:1])] == [True]


async def test_another_actors_death_is_not_its_own(paper: Paper) -> None:
    """What its method has raised, who awaited a call of another one."""
    pool = await ready_pool(paper, 1)
    handles = call(pool)
    paper.links[0].calls[0].settle(ActorDiedError("Other is dead", "Other"))
    await turns()
    assert (len(pool), len(paper.links)) == (1, 1)
    handles += call(pool)
    assert paper.loads == [2]
    assert [str(error) for error in await heard(handles[:1])] == ["Other is dead"]


async def test_where_none_lives_to_answer_it_is_tried_later_and_later(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    pool: Any = aiogpu.ActorPool(paper.make, 1)
    crew = pool._finalizer.scheduler
    pauses = []
    for attempt in range(1, 10):
        before = loop.time()
        paper.links[-1].die("its constructor raised")
        await turns()
        assert (len(pool), len(paper.links)) == (0, attempt)
        pauses.append(round(crew._not_before - before))
        with pytest.raises(ActorDiedError, match="have died, and the last") as caught:
            call(pool)
        assert str(caught.value.__cause__) == "its constructor raised"
        crew._not_before = 0.0  # the time has come
        crew._fill()
        assert len(paper.links) == attempt + 1
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert LONGEST_PAUSE == 60
    paper.links[-1].live()
    await pool
    call(pool)
    paper.links[-1].answer()
    await turns()
    paper.links[-1].die()
    await turns()
    assert len(pool) == 1  # one that has answered is replaced at once


async def test_the_next_attempt_is_made_when_it_is_time(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiogpu.api.actors.pool.LONGEST_PAUSE", 0.02)
    pool: Any = aiogpu.ActorPool(paper.make, 1)
    paper.links[0].die()
    await turns()
    assert len(pool) == 0

    async def live() -> None:
        while len(paper.links) < 2:
            await asyncio.sleep(0)
        paper.links[1].live()

    living = asyncio.ensure_future(live())
    assert await pool is pool
    assert len(pool) == 1
    await living


async def test_an_actor_that_cannot_be_made_is_tried_again(
    paper: Paper, caplog: pytest.LogCaptureFixture
) -> None:
    pool = await ready_pool(paper, 1)
    call(pool)
    paper.links[0].answer()
    await turns()
    paper.refuses = OSError("no weights")
    paper.links[0].die()
    paper.links[0].end()
    await turns()
    assert len(pool) == 0
    with pytest.raises(ActorDiedError) as caught:
        call(pool)
    assert caught.value.__cause__ is paper.refuses
    assert "a pool cannot make another actor" in caplog.messages
    paper.refuses = None
    pool._finalizer.scheduler._not_before = 0.0
    call(pool)
    assert paper.loads == [1, 1]


async def test_with_the_node_ends_the_pool(paper: Paper) -> None:
    pool = await ready_pool(paper, 2)
    handles = call(pool, 2)
    for link in paper.links:
        link.die(NodeClosedError("this node is shut down"))
        link.end()
    await turns()
    with pytest.raises(MisuseError, match="is closed and takes no calls") as caught:
        call(pool)
    assert isinstance(caught.value.__cause__, NodeClosedError)
    assert len(paper.links) == 2
    assert {type(each) for each in await heard(handles)} == {NodeClosedError}


async def test_a_node_that_has_died_ends_the_pool(paper: Paper) -> None:
    """It answers nobody, and nothing is raised where nobody could catch it."""
    pool = await ready_pool(paper, 2)
    for link in paper.links:
        link.lose_node(NodeDiedError("the node has ended"))
    await turns()
    with pytest.raises(MisuseError, match="is closed and takes no calls") as caught:
        call(pool)
    assert isinstance(caught.value.__cause__, NodeDiedError)


async def test_a_node_that_is_closed_while_one_is_replaced(paper: Paper) -> None:
    pool = await ready_pool(paper, 1)
    call(pool)
    paper.links[0].answer()
    await turns()
    paper.refuses = NodeClosedError("this node is shut down")
    paper.links[0].die()
    paper.links[0].end()
    await turns()
    with pytest.raises(MisuseError, match="is closed"):
        call(pool)


# Whatever happens.


@pytest.mark.parametrize("seed", range(20))
async def test_its_counts_are_right_whatever_happens(paper: Paper, seed: int) -> None:
    from random import Random

    chance = Random(seed)
    pool = await ready_pool(paper, 2, min_size=1, max_size=5, idle_after=0)
    crew = pool._finalizer.scheduler
    handles: list[Any] = []
    for _ in range(300):
        what = chance.random()
        link: PaperLink = chance.choice(paper.links)
        if what < 0.5:
            crew._not_before = 0.0
            handles += call(pool, chance.randint(1, 4))
        elif what < 0.8 and link.calls:
            link.answer(chance.randrange(len(link.calls)))
        elif what < 0.85 and handles:
            chance.choice(handles).cancel()
        elif what < 0.9:
            link.live()
        elif what < 0.93:
            link.die()
            link.end()
        elif what < 0.95:
            link.restart()
        else:
            paper.live()
        await turns(chance.randint(0, 3))
        members = crew._actors
        assert [each.number for each in members] == sorted(
            {each.number for each in members}
        )
        assert len(members) <= 5
        assert set(crew._takers) <= set(members)
        assert bool(crew._takers) == bool(members)
    await turns()
    unanswered = sum(not handle.done() for handle in handles)
    assert crew._calls == unanswered
    assert sum(member.calls for member in crew._actors) <= unanswered
    for handle in handles:
        handle.cancel()
    await turns()
    assert crew._calls == 0
    assert {member.calls for member in crew._actors} <= {0}
    pool._finalizer.scheduler.close(at_once=True)
    await heard(handles)


@pytest.mark.parametrize("rooms", [(2, 2, 2), (2, 3, 2), (None, None, None)])
async def test_a_pool_without_room_is_closed(
    paper: Paper, rooms: tuple[int | None, ...]
) -> None:
    """Where its actors ask for different things, nobody can say."""
    pool = aiogpu.ActorPool(paper.make, 3)
    for link, most in zip(paper.links, rooms, strict=True):
        link.most = most
    ready = asyncio.ensure_future(pool.__aenter__())
    await turns()
    if len(set(rooms)) > 1 or None in rooms:
        paper.live()
        assert await ready is pool
        return
    for link in paper.links:
        link.end()
    told = "pool of 3 Model, each with half a GPU, .* room for 2 at once"
    with pytest.raises(InfeasibleError, match=told):
        await ready
    assert [link.story for link in paper.links] == [["kill"]] * 3
    with pytest.raises(MisuseError, match="closed"):
        call(pool)


async def test_who_dies_while_its_room_is_asked_for_is_heard(paper: Paper) -> None:
    pool = aiogpu.ActorPool(paper.make, 2)
    ready = asyncio.ensure_future(pool.__aenter__())
    await asyncio.sleep(0)
    paper.links[0].die(ActorDiedError("at birth", "Model"))
    await turns()
    for link in paper.links:
        link.end()
    with pytest.raises(ActorDiedError, match="at birth"):
        await ready
