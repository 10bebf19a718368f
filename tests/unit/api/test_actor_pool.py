"""`ActorPool`: choice of the actor for a call, growth, deaths, and limits."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from random import Random
from typing import Any

import pytest

import aiogpu
from aiogpu.api.actors.pool import PoolLimits, check_bounds
from aiogpu.errors import ActorDiedError, InfeasibleError, MisuseError, OptionError
from tests.support.waits import turns
from tests.unit.api.fakes import FakeActor, FakeActors, Model, started

Remote: Any = aiogpu.remote(Model)


async def ready_pool(actors: FakeActors, *limits: Any, **options: Any) -> Any:
    """Return a pool whose first actors are ready."""
    pool = aiogpu.ActorPool(actors.make, *limits, **options)
    actors.live()
    return await pool


def call(pool: Any, count: int = 1) -> list[Any]:
    return [pool.embed.remote(str(number)) for number in range(count)]


async def ends_of(handles: list[Any]) -> list[Any]:
    """Return the result or the error of each call."""
    return list(await asyncio.gather(*handles, return_exceptions=True))


# Which actor takes a call.


async def test_call_goes_to_the_actor_with_the_fewest_calls(actors: FakeActors) -> None:
    pool = await ready_pool(actors, 3)
    handles = call(pool, 5)
    assert actors.loads == [2, 2, 1]
    actors.links[1].answer(0, "a")
    actors.links[1].answer(1, "b")
    await turns()
    call(pool, 2)
    assert actors.loads == [2, 4, 1]  # among equals, the first
    assert [await handles[1], await handles[4]] == ["a", "b"]
    assert actors.links[1].arguments[0] == ("embed", "1")


async def test_ended_calls_do_not_count_as_load(actors: FakeActors) -> None:
    pool = await ready_pool(actors, 2)
    first, second = call(pool, 2)
    first.cancel()
    actors.links[1].calls[0].settle(ValueError("bad text"))
    await turns()
    with pytest.raises(MisuseError, match=r"Model\.embed\(text.* wrong arguments"):
        pool.embed.remote()
    call(pool, 2)
    assert actors.loads == [2, 2]
    assert actors.links[0].cancelled == 1
    with pytest.raises(ValueError, match="bad text"):
        await second
    for _ in range(3):
        actors.links[0].answer()
        await turns()
        call(pool)
    assert actors.loads == [5, 2], "among equals, the first is next"


# Growing and shrinking.


async def test_pool_grows_when_all_actors_are_loaded(actors: FakeActors) -> None:
    pool = await ready_pool(actors, min_size=1, max_size=3, target=2)
    call(pool, 2)
    assert len(pool) == 1
    call(pool)
    assert (len(pool), actors.loads) == (2, [3, 0])  # the new actor is not ready
    actors.live()
    await turns()
    call(pool, 3)
    assert (len(pool), actors.loads) == (3, [3, 3, 0])
    actors.live()
    await turns()
    call(pool, 9)
    assert (len(pool), actors.loads) == (3, [5, 5, 5])


async def test_pool_does_not_grow_without_need(actors: FakeActors) -> None:
    """Actors that start count, and so do actors with few calls."""
    pool = await ready_pool(actors, min_size=1, max_size=9, target=4)
    call(pool, 8)
    assert len(pool) == 2
    call(pool)
    assert len(pool) == 3
    others = FakeActors()
    pool = await ready_pool(others, 2, max_size=3)
    call(pool, 2)
    others.links[1].answer()
    await turns()
    call(pool)
    assert (len(pool), others.loads) == (2, [1, 2])


async def test_empty_pool_makes_an_actor_for_a_call(actors: FakeActors) -> None:
    pool = await ready_pool(actors, min_size=0, max_size=2)
    assert (len(pool), actors.links) == (0, [])
    (handle,) = call(pool)
    assert (len(pool), actors.loads) == (1, [1])
    actors.live()
    actors.links[0].answer(value="a")
    assert await handle == "a"


async def test_pool_shrinks_when_actors_are_idle(actors: FakeActors) -> None:
    loop, idle_after = asyncio.get_running_loop(), 0.05

    async def shrunk(pool: Any, size: int) -> float:
        while len(pool) > size:
            await asyncio.wait([asyncio.ensure_future(turns(1))])
        return loop.time()

    began = loop.time()
    pool = await ready_pool(actors, 3, min_size=1, idle_after=idle_after)
    call(pool, 2)
    assert await shrunk(pool, 2) - began >= idle_after - 0.002
    assert actors.stories == [[], [], ["terminate"]]
    answered = loop.time()
    actors.links[0].answer()
    assert await shrunk(pool, 1) - answered >= idle_after - 0.002
    assert actors.stories == [["terminate"], [], ["terminate"]]
    actors.links[1].answer()
    await asyncio.wait([loop.create_future()], timeout=2 * idle_after)
    assert len(pool) == 1
    call(pool)
    assert actors.loads == [1, 2, 0]


# Deaths.


async def test_actor_that_dies_in_a_call_is_replaced(
    actors: FakeActors, caplog: pytest.LogCaptureFixture
) -> None:
    """The new actor gets its number, so it comes first among equals."""
    pool = await ready_pool(actors, 2)
    handles = call(pool, 2)
    actors.links[0].answer()
    await turns()
    handles += call(pool)
    with caplog.at_level(logging.WARNING):
        actors.links[0].die("it was killed")
        await turns()
    assert (len(pool), len(actors.links)) == (2, 3)
    assert caplog.messages == ["a pool has lost its actor 0: it was killed"]
    assert isinstance((await ends_of(handles[2:]))[0], ActorDiedError)
    call(pool)
    assert actors.loads == [2, 2, 0]  # the new actor is not ready
    actors.live()
    await turns()
    assert repr(pool) == "<ActorPool of Model: 2 actors, 2 ready, 2 calls, 1 died>"
    actors.links[1].answer(0)
    actors.links[1].answer(1)
    await turns()
    call(pool)
    assert actors.loads == [2, 2, 1]


async def test_replacement_that_cannot_be_made_is_tried_again(
    actors: FakeActors, caplog: pytest.LogCaptureFixture
) -> None:
    pool = await ready_pool(actors, 1)
    call(pool)
    actors.links[0].answer()
    await turns()
    actors.refuses = OSError("no weights")
    actors.links[0].die(is_gone=True)
    await turns()
    assert len(pool) == 0
    with pytest.raises(ActorDiedError) as caught:
        call(pool)
    assert caught.value.__cause__ is actors.refuses
    assert "a pool could not start another actor" in caplog.messages
    actors.refuses = None
    pool._scheduler._not_before = 0.0
    call(pool)
    assert actors.loads == [1, 1]


# Random events.


@pytest.mark.parametrize("seed", range(8))
async def test_counts_hold_after_random_events(actors: FakeActors, seed: int) -> None:
    chance = Random(seed)
    pool = await ready_pool(actors, 2, min_size=1, max_size=5, idle_after=0)
    scheduler = pool._scheduler
    handles: list[Any] = []
    for _ in range(300):
        event = chance.random()
        link: FakeActor = chance.choice(actors.links)
        if event < 0.5:
            scheduler._not_before = 0.0
            handles += call(pool, chance.randint(1, 4))
        elif event < 0.8 and link.calls:
            link.answer(chance.randrange(len(link.calls)))
        elif event < 0.85 and handles:
            chance.choice(handles).cancel()
        elif event < 0.9:
            link.live()
        elif event < 0.93:
            link.die(is_gone=True)
        elif event < 0.95:
            link.restart()
        else:
            actors.live()
        await turns(chance.randint(0, 3))
        members = scheduler._actors
        numbers = [member.number for member in members]
        assert numbers == sorted(set(numbers))
        assert len(members) <= 5
    await turns()
    unanswered = sum(not handle.done() for handle in handles)
    assert scheduler._calls == unanswered
    assert sum(member.calls for member in scheduler._actors) <= unanswered
    for handle in handles:
        handle.cancel()
    await turns()
    assert scheduler._calls == 0
    assert {member.calls for member in scheduler._actors} <= {0}
    scheduler.close(at_once=True)
    await ends_of(handles)


# Its beginning and its end.


class Block:
    """A task with the block `async with ActorPool(...)`, which may raise."""

    def __init__(self, actors: FakeActors, error: Exception | None = None) -> None:
        self.pool: Any = aiogpu.ActorPool(actors.make, 2)
        self.error = error
        self.story: list[str] = []
        self.task = asyncio.ensure_future(self.run())

    async def run(self) -> None:
        async with self.pool as entered:
            assert entered is self.pool
            self.story.append("entered")
            if self.error is not None:
                raise self.error
        self.story.append("left")


@pytest.mark.parametrize("how", ["error", "cancel", "death", "early death"])
async def test_block_that_fails_kills_its_actors(actors: FakeActors, how: str) -> None:
    block = Block(actors, LookupError() if how == "error" else None)
    await turns(1 if how == "early death" else 5)
    if how == "error":
        actors.live()
    elif how == "cancel":
        block.task.cancel()
    else:
        actors.links[0].die(ActorDiedError("its constructor raised", "Model"))
    await turns()
    dead = "death" in how
    assert actors.stories[dead:] == [["kill"]] * (2 - dead)
    assert not block.task.done()
    actors.end()
    error = (await ends_of([block.task]))[0]
    kinds = {"error": LookupError, "cancel": asyncio.CancelledError}
    assert isinstance(error, kinds.get(how, ActorDiedError))
    assert block.story == ["entered"] * (how == "error")


@pytest.mark.parametrize("rooms", [(2, 2, 2), (2, 3, 2), (None, None, None)])
async def test_pool_without_room_for_its_actors_is_closed(
    actors: FakeActors, rooms: tuple[int | None, ...]
) -> None:
    """If the actors need different resources, the pool cannot know its room."""
    pool = aiogpu.ActorPool(actors.make, 3)
    for link, most in zip(actors.links, rooms, strict=True):
        link.most = most
    ready = await started(pool.__aenter__())
    if len(set(rooms)) > 1 or None in rooms:
        actors.live()
        assert await ready is pool
        return
    actors.end()
    message = "pool of 3 Model, each with half a GPU, .* room for 2 at once"
    with pytest.raises(InfeasibleError, match=message):
        await ready
    assert actors.stories == [["kill"]] * 3
    with pytest.raises(MisuseError, match="closed"):
        call(pool)


@pytest.mark.parametrize("in_thread", [False, True])
async def test_dropped_pool_ends_its_actors_after_their_calls(
    actors: FakeActors, in_thread: bool
) -> None:
    """In any thread, but not while a method of the pool is referenced."""
    kept: list[Any] = [await ready_pool(actors, 2)]
    embed = kept[0].embed
    gc.collect()
    gc.disable()
    try:
        if in_thread:
            thread = threading.Thread(target=kept.clear)
            thread.start()
            thread.join()
        else:
            kept.clear()
        await turns()
        assert actors.stories == [[], []]
        handle = embed.remote("a")
        del embed
        await turns()
    finally:
        gc.enable()
    assert actors.stories == [["terminate"], ["terminate"]]
    actors.links[0].answer(value="a")
    assert await handle == "a"


# Arguments, repr and attributes.


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (Model, "takes a class under @aiogpu.remote, .* not <class .*Model'>"),
        (8, "takes a class under @aiogpu.remote, .* not 8"),
        ([Remote], r"takes a class .* not \[<RemoteClass .*>\]"),
        (aiogpu.remote(lambda: 7), "takes a class .* not <RemoteFunction .*>"),
        (lambda: 7, "returned 7; it must return an actor's handle"),
        (lambda: Remote, "returned <RemoteClass .*>; it must return an actor's handle"),
    ],
)
async def test_pool_refuses_other_arguments(argument: Any, message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        aiogpu.ActorPool(argument, 2)
    if isinstance(argument, list):
        with pytest.raises(MisuseError, match="takes a class under"):
            aiogpu.ActorPool(argument)  # as Ray's pool takes them


async def test_pool_kills_its_actors_if_one_cannot_be_made(actors: FakeActors) -> None:
    with pytest.raises(OptionError, match="needs the number of actors"):
        aiogpu.ActorPool(actors.make)
    assert actors.links == []

    def make() -> Any:
        if len(actors.links) == 2:
            raise LookupError("no third one")
        return actors.make()

    with pytest.raises(LookupError, match="no third one"):
        aiogpu.ActorPool(make, 3)
    assert actors.stories == [["kill"], ["kill"]]


async def test_pool_has_a_repr_and_helpful_attribute_errors(actors: FakeActors) -> None:
    pool: Any = aiogpu.ActorPool(actors.make, 2)
    assert repr(pool) == "<ActorPool of Model: 2 actors, 0 ready, 0 calls, 0 died>"
    assert repr(pool.embed) == "<PoolMethod Model.embed>"
    assert len(pool) == 2
    empty: Any = aiogpu.ActorPool(actors.make, min_size=0, max_size=1)
    assert repr(empty) == "<ActorPool of actors: 0 actors, 0 ready, 0 calls, 0 died>"
    assert empty
    assert aiogpu.typed(empty) is empty
    of_class: Any = aiogpu.ActorPool(Remote, min_size=0, max_size=1)
    for access, message in (
        (lambda: pool.embd, r"no method embd\. Did you mean embed\?"),
        (lambda: pool._secret, "_secret of Model is private"),
        (lambda: pool.__len_, "no attribute __len_"),
        (lambda: of_class.embd, "no method embd"),
        (empty.embd.remote, "no method embd"),  # before the first actor
    ):
        with pytest.raises(AttributeError, match=message):
            access()
    with pytest.raises(MisuseError, match=r"await pool\.embed\.remote\(\.\.\.\)"):
        pool.embed("a")


# Its limits.


def limits(**given: Any) -> PoolLimits:
    names = ("size", "min_size", "max_size", "target", "idle_after")
    return check_bounds(*(given.get(name) for name in names))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"size": 4}, (4, 4, 4, 1, 60)),
        ({"min_size": 2}, (2, 2, 2, 1, 60)),
        ({"min_size": 1, "max_size": 8}, (1, 1, 8, 1, 60)),
        ({"min_size": 0, "max_size": 1}, (0, 0, 1, 1, 60)),
        ({"size": 2, "max_size": 8, "target": 16}, (2, 2, 8, 16, 60)),
        ({"size": 4, "min_size": 1, "idle_after": 0}, (4, 1, 4, 1, 0)),
        ({"size": 0, "max_size": 3, "idle_after": 2.5}, (0, 0, 3, 1, 2.5)),
    ],
)
def test_missing_limits_follow_from_the_given_ones(given: Any, expected: Any) -> None:
    assert limits(**given) == expected


ORDER = "needs min_size <= size <= max_size"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"needs the number of actors; give size=4, or min_size=1 and max_size=4"),
        ({"max_size": 3}, "needs the number of actors"),
        ({"size": -1}, "size=-1 must be a whole number of actors, 0 or more"),
        *(({"size": size}, f"size={size!r} must be") for size in (1.0, True, "4")),
        ({"min_size": -1}, "min_size=-1 must be"),
        ({"size": 1, "max_size": 0}, "max_size=0 must be a whole number .* 1 or more"),
        ({"size": 0}, "a max_size of 1 or more"),
        ({"size": 3, "max_size": 2}, ORDER),
        ({"size": 1, "min_size": 2}, ORDER),
        ({"min_size": 3, "max_size": 2}, ORDER),
        ({"size": 1, "max_size": 2, "target": 0}, "target=0 must be a whole number"),
        *(
            (
                {"size": 1, "max_size": 2, "idle_after": time},
                f"idle_after={time} must be",
            )
            for time in (-1, True)
        ),
        ({"size": 4, "target": 2}, "target= sets when a pool grows .* always has 4"),
        ({"size": 4, "idle_after": 2}, "idle_after= sets when a pool grows or shrinks"),
    ],
)
def test_impossible_limits_are_refused(given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        limits(**given)
