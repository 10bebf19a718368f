"""The wrong loop, the wrong `with`, a result that is still to come: told in words."""

import asyncio
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

import aiogpu
from aiogpu.errors import MisuseError


@aiogpu.remote
def pair() -> list[int]:
    return [1, 2]


@aiogpu.remote
def given(thing: object) -> str:
    return repr(thing)


@aiogpu.remote
def count() -> Iterator[int]:
    yield 1


@aiogpu.remote
class Counter:
    STEP = 2

    def add(self) -> int:
        return self.STEP

    def each(self) -> Iterator[int]:
        yield self.STEP


Use = Callable[[Any], Any]


def loop_over(thing: Any) -> None:
    for _ in thing:
        raise AssertionError(thing)


async def loop_on(thing: Any) -> None:
    async for _ in thing:
        raise AssertionError(thing)


def enter(thing: Any) -> None:
    with thing:
        raise AssertionError(thing)


async def wait_for(thing: Any) -> None:
    await thing


def first(thing: Any) -> Any:
    return thing[0]


async def used(use: Use, thing: Any) -> None:
    found = use(thing)
    if inspect.iscoroutine(found):
        await found


async def told(use: Use, thing: Any) -> str:
    with pytest.raises(MisuseError) as caught:
        await used(use, thing)
    return str(caught.value)


@pytest.fixture
async def node(inline_node: aiogpu.types.Node) -> aiogpu.types.Node:
    return inline_node


@pytest.mark.parametrize("use", [loop_over, list, tuple, first, sorted])
async def test_what_comes_on_the_loop_is_iterated_by_async_for(
    node: aiogpu.types.Node, use: Use
) -> None:
    said = await told(use, pair.map([]))
    assert "write `async for item in pair.map(...)`" in said


@aiogpu.remote
def letters() -> Iterator[bytes]:
    yield b"a"
    yield b"b"


async def echo(scope: object, receive: Use, send: Use) -> None:
    """A web application that sends back what it gets."""
    body = b""
    while (message := await receive())["more_body"]:
        body += message["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def test_a_stream_is_no_iterable_to_others(node: aiogpu.types.Node) -> None:
    """Who takes both kinds may ask for the plain one first."""
    httpx = pytest.importorskip("httpx", reason="httpx is not installed")
    assert not isinstance(letters.remote(), Iterable)
    transport = httpx.ASGITransport(echo)
    async with httpx.AsyncClient(transport=transport, base_url="http://box") as client:
        assert (await client.post("/", content=letters.remote())).content == b"ab"


async def test_a_map_is_nothing_to_await(node: aiogpu.types.Node) -> None:
    said = await told(wait_for, pair.map([]))
    assert "`[item async for item in pair.map(...)]`" in said


BLOCKS: dict[str, Callable[[], object]] = {
    "aiogpu.lease(...)": lambda: aiogpu.lease(num_cpus=1),
    "aiogpu.placement(...)": lambda: aiogpu.placement([{"CPU": 1}]),
    "aiogpu.ActorPool(...)": lambda: aiogpu.ActorPool(Counter, 1),
    "Counter.remote(...)": Counter.remote,
    "count.remote(...)": count.remote,
    "pair.map(...)": lambda: pair.map([]),
}


@pytest.mark.parametrize("call", BLOCKS)
async def test_what_ends_on_the_loop_is_entered_by_async_with(
    node: aiogpu.types.Node, call: str
) -> None:
    said = await told(enter, BLOCKS[call]())
    assert said.endswith(f"write `async with {call}`, inside an `async def`.")


async def test_a_node_is_entered_by_async_with(node: aiogpu.types.Node) -> None:
    opening = aiogpu.init(ignore_reinit_error=True)
    for thing in (opening, node):
        assert "write `async with aiogpu.init(...)`" in await told(enter, thing)
    assert await opening is node


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (loop_over, "cannot be iterated"),
        (list, "cannot be iterated"),
        (first, "has no items"),
        (len, "has no length"),
        (bool, "has no truth value"),
        (lambda handle: 1 in handle, "holds nothing"),
    ],
)
@pytest.mark.parametrize("is_done", [False, True])
async def test_a_handle_is_not_its_result(
    node: aiogpu.types.Node, use: Use, what: str, is_done: bool
) -> None:
    handle = pair.remote()
    if is_done:
        await handle
    assert (await told(use, handle)).startswith(
        f"a handle is not its result and {what}; write `await` before pair.remote(...)."
    )
    assert await handle == [1, 2]


@aiogpu.remote
def handle_of_a_plain_task() -> list[str]:
    handle: Any = pair.remote()
    uses: list[Use] = [loop_over, first, len, bool]
    said = []
    for use in uses:
        try:
            use(handle)
        except MisuseError as error:
            said.append(str(error))
    aiogpu.get(handle)
    return said


async def test_a_handle_in_a_plain_task_says_get(node: aiogpu.types.Node) -> None:
    said = await handle_of_a_plain_task.remote()
    assert len(said) == 4
    assert all("write aiogpu.get(pair.remote(...))." in one for one in said)


@pytest.mark.parametrize(
    ("use", "thing", "write"),
    [
        (wait_for, pair, "`await pair.remote(...)`"),
        (wait_for, count, "`async for item in count.remote(...)`"),
        (loop_on, count, "`async for item in count.remote(...)`"),
        (loop_over, count, "`async for item in count.remote(...)`"),
        (wait_for, Counter, "`Counter.remote(...)`"),
    ],
)
async def test_what_was_not_called_yet(use: Use, thing: object, write: str) -> None:
    assert f"write {write}" in await told(use, thing)


async def test_a_method_that_was_not_called_yet(node: aiogpu.types.Node) -> None:
    counter = Counter.remote()
    async with aiogpu.ActorPool(Counter, 1) as pool:
        said = await told(wait_for, pool.add)
        assert "write `await pool.add.remote(...)`" in said
    assert "write `await actor.add.remote(...)`" in await told(wait_for, counter.add)
    for use in (loop_on, loop_over, wait_for, lambda method: method()):
        said = await told(use, counter.each)
        assert "write `async for item in actor.each.remote(...)`" in said


async def test_the_methods_of_a_pool_take_no_options(node: aiogpu.types.Node) -> None:
    async with aiogpu.ActorPool(Counter, 1) as pool:
        said = await told(lambda one: one.options(num_returns=2), pool.add)
        assert said.startswith(pool.add.__name__)
        assert "`@aiogpu.method(num_returns=2)` above it" in said
        with pytest.raises(aiogpu.OptionError, match="name is not an option"):
            pool.add.options(name="a call")


def in_two(thing: Any) -> None:
    _ready, _pending = thing


async def test_a_wait_that_is_not_awaited(node: aiogpu.types.Node) -> None:
    handle = pair.remote()
    for use in in_two, loop_over:
        said = await told(use, aiogpu.wait([handle]))
        assert said.endswith("write `ready, pending = await aiogpu.wait(handles)`.")
    for waits in (
        asyncio.create_task(aiogpu.wait([handle])),  # type: ignore[arg-type]
        asyncio.wait_for(aiogpu.wait([handle]), 60),
        asyncio.gather(aiogpu.wait([handle])),
    ):
        assert await waits in (([handle], []), [([handle], [])])


async def test_a_method_is_no_argument(node: aiogpu.types.Node) -> None:
    counter = Counter.remote()
    with pytest.raises(aiogpu.errors.SerializationError) as raised:
        given.remote(counter.add)
    told = "args[0] (a RemoteMethod): MisuseError: Counter.add is a method of one actor"
    assert told in str(raised.value)
    assert "`actor.add.remote(...)` there." in str(raised.value)


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda: aiogpu.put(1), "aiogpu.put()"),
        (lambda: aiogpu.placement([{"CPU": 1}]), "aiogpu.placement()"),
        (lambda: pair.remote(), ".remote()"),
    ],
)
def test_what_needs_a_loop_says_its_name(use: Callable[[], Any], what: str) -> None:
    with pytest.raises(aiogpu.NoLoopError) as raised:
        use()
    assert str(raised.value).startswith(f"{what} needs a running event loop")


def test_an_actors_class_has_not_what_its_actors_have() -> None:
    with pytest.raises(AttributeError) as caught:
        _ = Counter.add
    assert re.match("Counter is an actor's class and has no add: .*", str(caught.value))
    assert not hasattr(Counter, "_repr_html_")
    assert Counter.__wrapped__.STEP == 2


@pytest.mark.parametrize("kind", [aiogpu.Handle, aiogpu.Stream, aiogpu.ActorHandle])
def test_words_cost_the_objects_nothing(kind: type) -> None:
    """No `__getattr__`, which would slow each attribute; no room for a `__dict__`."""
    for one in inspect.getmro(kind):
        if one.__module__ == "aiogpu.api.usage_errors":
            assert vars(one).keys().isdisjoint({"__getattr__", "__dict__", "__init__"})
