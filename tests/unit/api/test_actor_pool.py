"""`ActorPool` as an object: what it takes, how it is called, when its actors end."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

import aiogpu
from aiogpu.errors import ActorDiedError, MisuseError, NoLoopError, OptionError
from tests.support.turns import no_complaints, turns
from tests.unit.api.paper_actor import Model, Paper


@pytest.fixture
async def paper() -> AsyncIterator[Paper]:
    async with no_complaints():
        yield Paper()


def stories(paper: Paper) -> list[list[str]]:
    """What each actor was told to do."""
    return [link.story for link in paper.links]


def end(paper: Paper) -> None:
    """All processes have gone."""
    for link in paper.links:
        link.end()


# What it takes.


Remote: Any = aiogpu.remote(Model)


@pytest.mark.parametrize(
    ("thing", "words"),
    [
        (Model, "was given <class .*Model'>; give it a class under @aiogpu.remote"),
        (8, "was given 8; give it a class under @aiogpu.remote"),
        (None, "was given None"),
        (object(), "was given <object object"),
        ([Remote], r"was given \[<RemoteClass .*>\]; give it a class"),
        (aiogpu.remote(lambda: 7), "was given <RemoteFunction .*>; give it a class"),
        (lambda: 7, "gave 7; it must give an actor's handle"),
        (lambda: Remote, "gave <RemoteClass .*>; it must give an actor's handle"),
    ],
)
async def test_what_makes_no_actors_is_refused(thing: Any, words: str) -> None:
    with pytest.raises(MisuseError, match=words):
        aiogpu.ActorPool(thing, 2)


async def test_actors_that_there_are_already_make_no_pool() -> None:
    """As Ray's does; that it was not told how many to make would mislead."""
    with pytest.raises(MisuseError, match="give it a class under"):
        aiogpu.ActorPool([])  # type: ignore[arg-type]


async def test_ill_valued_bounds_are_refused_before_any_is_made(paper: Paper) -> None:
    with pytest.raises(OptionError, match="size=-1"):
        aiogpu.ActorPool(paper.make, -1)
    with pytest.raises(OptionError, match="was not told how many"):
        aiogpu.ActorPool(paper.make)
    assert paper.links == []


def test_without_a_loop_it_says_so() -> None:
    with pytest.raises(NoLoopError, match=r"ActorPool\(\) needs a running event loop"):
        aiogpu.ActorPool(Remote, 2)


async def test_if_one_cannot_be_made_none_is_left(paper: Paper) -> None:
    def make() -> Any:
        if len(paper.links) == 2:
            raise LookupError("no third one")
        return paper.make()

    with pytest.raises(LookupError, match="no third one"):
        aiogpu.ActorPool(make, 3)
    assert stories(paper) == [["kill"], ["kill"]]


# How it is called.


async def test_it_looks_like_what_it_is(paper: Paper) -> None:
    pool = aiogpu.ActorPool(paper.make, 2)
    assert repr(pool) == "<ActorPool of Model: 2 actors, 0 ready, 0 calls, 0 died>"
    assert repr(pool.embed) == "<PoolMethod Model.embed>"
    assert pool.embed is pool.embed
    assert len(pool) == 2
    empty = aiogpu.ActorPool(paper.make, min_size=0, max_size=1)
    assert repr(empty) == "<ActorPool of actors: 0 actors, 0 ready, 0 calls, 0 died>"
    assert empty
    assert aiogpu.typed(empty) is empty


async def test_a_method_that_is_not_there_is_told_at_once(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, 1)
    with pytest.raises(AttributeError, match=r"no method embd\. Did you mean embed\?"):
        _ = pool.embd
    with pytest.raises(AttributeError, match="_secret of Model is private"):
        _ = pool._secret
    with pytest.raises(AttributeError, match="no attribute __len_"):
        _ = pool.__len_
    of_class: Any = aiogpu.ActorPool(Remote, min_size=0, max_size=1)
    with pytest.raises(AttributeError, match="no method embd"):
        _ = of_class.embd


async def test_where_no_actor_was_made_the_call_tells(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, min_size=0, max_size=1)
    method = pool.embd
    with pytest.raises(AttributeError, match="no method embd"):
        method.remote()


async def test_calling_a_method_directly_is_refused_in_words(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, 1)
    with pytest.raises(MisuseError, match=r"await pool\.embed\.remote\(\.\.\.\)"):
        pool.embed("a")


async def test_map_shares_the_items_out(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, 2)
    paper.live()
    await pool
    results = pool.embed.map("abcdef", limit=4)
    assert repr(results) == "<Results of Model.embed: are 0 ahead, 4 at most>"

    async def take() -> list[str]:
        return [text async for text in results]

    taking = asyncio.ensure_future(take())
    await turns()
    first, second = paper.links
    assert first.arguments == [("embed", "a"), ("embed", "c")]
    assert second.arguments == [("embed", "b"), ("embed", "d")]
    second.answer(0, "B")
    second.answer(1, "D")
    await turns()
    assert paper.loads == [2, 2]  # in order: "a" is to be taken first
    first.answer(0, "A")
    await turns()
    # "b" was ready as well, and the second actor has no call: then both have one.
    assert second.arguments[2:] == [("embed", "e")]
    assert first.arguments[2:] == [("embed", "f")]
    first.answer(1, "C")
    second.answer(2, "E")
    first.answer(2, "F")
    assert await taking == [*"ABCDEF"]


async def test_map_takes_an_async_iterable_and_any_order(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, 2)

    async def texts() -> AsyncIterator[str]:
        for text in "ab":
            yield text

    async def take() -> list[str]:
        return [text async for text in pool.embed.map(texts(), ordered=False)]

    taking = asyncio.ensure_future(take())
    await turns()
    paper.links[1].answer(0, "B")
    await turns()
    paper.links[0].answer(0, "A")
    assert await taking == ["B", "A"]


async def test_leaving_a_map_cancels_what_is_ahead(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, 2)
    async with pool.embed.map("abcd", limit=3) as results:
        taking = asyncio.ensure_future(anext(results))
        await turns()
        paper.links[0].answer(0, "A")
        assert await taking == "A"
    assert [link.cancelled for link in paper.links] == [1, 1]
    await turns()
    assert pool._finalizer.scheduler._calls == 0


# When its actors are ready, and when they end.


async def test_it_is_awaited_until_all_are_ready(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, 2)

    async def wait() -> Any:
        return await pool

    waiting = [asyncio.ensure_future(wait()) for _ in range(2)]
    paper.links[1].live()
    await turns()
    assert not waiting[0].done()
    waiting[1].cancel()
    paper.links[0].live()
    assert await waiting[0] is pool
    assert await pool is pool
    assert stories(paper) == [[], []]


async def test_a_constructor_that_fails_is_raised_by_await(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, 2)
    paper.links[0].live()
    paper.links[1].die("its constructor raised")
    with pytest.raises(ActorDiedError, match="its constructor raised"):
        await pool


async def test_the_block_begins_when_all_are_ready_and_ends_them(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, 2)
    story = []

    async def block() -> None:
        async with pool as entered:
            assert entered is pool
            story.append("entered")
        story.append("left")

    running = asyncio.ensure_future(block())
    await turns()
    assert story == []
    paper.live()
    await turns()
    assert story == ["entered"]
    assert stories(paper) == [["terminate"], ["terminate"]]
    end(paper)
    await running
    assert story == ["entered", "left"]
    with pytest.raises(MisuseError, match="the pool of Model is closed"):
        pool.embed.remote("a")
    with pytest.raises(MisuseError, match="is closed"):
        await pool
    assert repr(pool).startswith("<ActorPool of Model: closed, 0 actors")


async def test_an_error_in_the_block_ends_them_at_once(paper: Paper) -> None:
    async def block() -> None:
        async with aiogpu.ActorPool(paper.make, 2):
            raise LookupError

    running = asyncio.ensure_future(block())
    await turns()
    paper.live()
    await turns()
    assert stories(paper) == [["kill"], ["kill"]]
    end(paper)
    with pytest.raises(LookupError):
        await running


async def test_a_block_that_cannot_begin_leaves_none(paper: Paper) -> None:
    async def block() -> None:
        async with aiogpu.ActorPool(paper.make, 2):
            raise AssertionError("it began")

    running = asyncio.ensure_future(block())
    await turns()
    paper.links[0].die("its constructor raised")
    await turns()
    assert stories(paper)[1:] == [["kill"]]
    assert not running.done()
    end(paper)
    with pytest.raises(ActorDiedError, match="its constructor raised"):
        await running


async def test_a_cancelled_beginning_leaves_none(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, 2)
    running = asyncio.ensure_future(pool.__aenter__())
    await turns()
    running.cancel()
    await turns()
    assert stories(paper) == [["kill"], ["kill"]]
    end(paper)
    await asyncio.wait([running])
    assert running.cancelled()


async def test_closing_waits_for_those_that_go_already(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, 2, min_size=1, idle_after=0)
    paper.live()
    while len(pool) > 1:
        await asyncio.sleep(0)
    closing = asyncio.ensure_future(pool.aclose())
    await turns()
    assert stories(paper) == [["terminate"], ["terminate"]]
    paper.links[0].end()
    await turns()
    assert not closing.done()
    paper.links[1].end()
    await closing
    await pool.aclose()
    assert stories(paper) == [["terminate"], ["terminate"]]


async def test_closing_while_one_is_to_be_replaced(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, 1)
    paper.links[0].die()
    paper.links[0].end()
    await turns()
    await pool.aclose()
    crew = pool._finalizer.scheduler
    crew._not_before = 0.0
    crew._fill()
    assert len(paper.links) == 1


@pytest.mark.parametrize("is_elsewhere", [False, True])
async def test_without_a_pool_its_actors_end(paper: Paper, is_elsewhere: bool) -> None:
    kept: list[Any] = [aiogpu.ActorPool(paper.make, 2)]
    paper.live()
    await kept[0]
    handle = kept[0].embed.remote("a")
    gc.collect()
    gc.disable()
    try:
        if is_elsewhere:
            thread = threading.Thread(target=kept.clear)
            thread.start()
            thread.join()
        else:
            kept.clear()
        await turns()
    finally:
        gc.enable()
    assert stories(paper) == [["terminate"], ["terminate"]]
    paper.links[0].answer(value="a")
    assert await handle == "a"


async def test_a_method_keeps_the_actors(paper: Paper) -> None:
    pool: Any = aiogpu.ActorPool(paper.make, 1)
    embed = pool.embed
    del pool
    gc.collect()
    await turns()
    assert stories(paper) == [[]]
    embed.remote("a")
    assert paper.loads == [1]
    del embed
    gc.collect()
    await turns()
    assert stories(paper) == [["terminate"]]


def test_a_pool_may_outlive_its_loop() -> None:
    paper = Paper()
    kept: list[Any] = []

    async def main() -> None:
        kept.append(aiogpu.ActorPool(paper.make, 1))

    asyncio.run(main())
    kept.clear()
    gc.collect()
    assert stories(paper) == [[]]
