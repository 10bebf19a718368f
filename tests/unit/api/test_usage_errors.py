"""[B40] Mistakes in the use of the API, and what is said of each."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

import aiogpu
from aiogpu.api.usage_errors import NAMES_OF_RAY
from aiogpu.errors import MisuseError, OptionError, SerializationError

Use = Callable[[Any], Any]


@aiogpu.remote
def pair() -> list[int]:
    return [1, 2]


@aiogpu.remote
def same(thing: Any) -> Any:
    return thing


@aiogpu.remote
def raising(error: Exception) -> None:
    raise error


@aiogpu.remote
def count() -> Iterator[bytes]:
    yield b"a"
    yield b"b"


@aiogpu.remote
class Counter:
    STEP = 2

    def add(self) -> int:
        return self.STEP

    def each(self) -> Iterator[int]:
        yield self.STEP


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


def in_two(thing: Any) -> None:
    _ready, _pending = thing


async def told(use: Use, thing: Any) -> str:
    """Return what is said of a use."""
    try:
        found = use(thing)
        if inspect.iscoroutine(found):
            await found
    except MisuseError as error:
        return str(error)
    raise AssertionError(f"{thing!r} was used")


@pytest.fixture
async def node(inline_node: aiogpu.types.Node) -> aiogpu.types.Node:
    return inline_node


# The wrong loop, the wrong `with`, a result that is still to come.


@pytest.mark.parametrize("use", [loop_over, list, tuple, first, sorted])
async def test_a_map_is_iterated_by_async_for(
    node: aiogpu.types.Node, use: Use
) -> None:
    assert "write `async for item in pair.map(...)`" in await told(use, pair.map([]))
    said = await told(wait_for, pair.map([]))
    assert "`[item async for item in pair.map(...)]`" in said


async def test_a_stream_is_no_iterable_to_others(node: aiogpu.types.Node) -> None:
    """Libraries that take both kinds may ask for the plain one first."""
    httpx = pytest.importorskip("httpx", reason="httpx is not installed")
    assert not isinstance(count.remote(), Iterable)

    async def echo(scope: object, receive: Use, send: Use) -> None:
        body = b""
        while (message := await receive())["more_body"]:  # type: ignore[call-arg]
            body += message["body"]
        start = {"type": "http.response.start", "status": 200, "headers": []}
        await send(start)
        await send({"type": "http.response.body", "body": body})

    transport = httpx.ASGITransport(echo)
    async with httpx.AsyncClient(transport=transport, base_url="http://box") as client:
        assert (await client.post("/", content=count.remote())).content == b"ab"


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


@pytest.mark.parametrize("is_done", [False, True])
async def test_a_handle_is_not_its_result(
    node: aiogpu.types.Node, is_done: bool
) -> None:
    handle: Any = pair.remote()
    if is_done:
        await handle
    uses: dict[Use, str] = {
        loop_over: "cannot be iterated",
        list: "cannot be iterated",
        first: "has no items",
        len: "has no length",
        bool: "has no truth value",
        lambda handle: 1 in handle: "contains no items",
        lambda handle: handle + 1: "does not support arithmetic (__add__)",
        lambda handle: 2 * handle: "does not support arithmetic (__rmul__)",
        float: "does not support arithmetic (__float__)",
    }
    for use, what in uses.items():
        said = f"a handle is not its result and {what}; write `await` before pair.remo"
        assert (await told(use, handle)).startswith(said)
    said = await told(list, handle.reports())
    assert "write `async for item in handle.reports()`" in said
    assert await handle == [1, 2]
    said = await told(len, await aiogpu.put([1, 2]))
    assert said == "a handle is not its result and has no length; write `await handle`."

    @aiogpu.remote
    def plain() -> list[str]:
        handle: Any = pair.remote()
        said = []
        for use in (loop_over, first, len, bool):
            with pytest.raises(MisuseError) as caught:
                use(handle)
            said.append(str(caught.value))
        aiogpu.get(handle)
        return said

    for said in await plain.remote():
        assert "write aiogpu.get(pair.remote(...))." in said


@aiogpu.remote
def add_up(parts: Any) -> Any:
    return sum(parts)


@aiogpu.remote
async def add_up_on_a_loop(parts: Any) -> Any:
    return sum(parts)


@pytest.mark.parametrize(
    ("task", "write"),
    [
        (add_up, "aiogpu.get(handle), or aiogpu.get(handles) for a list"),
        (add_up_on_a_loop, "`await handle`, or `await asyncio.gather(*handles)` for "),
    ],
)
async def test_a_handle_in_a_list_stays_one(
    node: aiogpu.types.Node, task: Any, write: str
) -> None:
    with pytest.raises(MisuseError) as caught:
        await task.remote([pair.remote(), pair.remote()])
    assert f"; write {write}" in str(caught.value)
    assert str(caught.value).endswith(
        ": a handle inside another argument is not replaced."
    )


async def test_a_result_before_its_end(node: aiogpu.types.Node) -> None:
    """As `concurrent.futures` and Ray would wait for it."""
    handle = pair.remote()
    for use in handle.result, handle.exception:
        with pytest.raises(asyncio.InvalidStateError) as caught:
            use()
        assert str(caught.value).startswith(
            f"pair has not ended, and handle.{use.__name__}"
        )
        assert "write `await handle`, as in `await pair.remote(...)`." in str(
            caught.value
        )
    assert await handle == handle.result() == [1, 2]
    invalid = raising.remote(asyncio.InvalidStateError("its own"))
    for _ in range(2):
        with pytest.raises(asyncio.InvalidStateError, match=r"^its own$"):
            await invalid


class Plain:
    @aiogpu.remote
    def method(self, number: int) -> int:
        return number


async def test_a_method_that_is_no_task(node: aiogpu.types.Node) -> None:
    plain: Any = Plain()
    said = await told(lambda one: one.method.remote(1), plain)
    assert said.startswith("method(self, number: 'int') -> 'int' was called with wr")
    assert " method is a method of Plain: put @aiogpu.remote above the class" in said


async def test_a_node_that_a_call_has_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIOGPU_ADDRESS", "inline")
    calls: dict[str, Callable[[], Any]] = {
        "which an earlier .remote() opened with default options. Call init() ": (
            pair.remote
        ),
        "has a node. Write `await aiogpu.shutdown()` before": aiogpu.init,
    }
    for said, call in calls.items():
        await call()
        with pytest.raises(aiogpu.errors.NodeRunningError) as caught:
            await aiogpu.init()
        assert said in str(caught.value)
        await aiogpu.shutdown()


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


async def test_methods_of_actors_and_pools(node: aiogpu.types.Node) -> None:
    counter: Any = Counter.remote()
    assert "write `await actor.add.remote(...)`" in await told(wait_for, counter.add)
    for use in (loop_on, loop_over, wait_for, lambda method: method()):
        said = await told(use, counter.each)
        assert "write `async for item in actor.each.remote(...)`" in said
    with pytest.raises(SerializationError) as raised:
        same.remote(counter.add)
    said = "args[0] (a RemoteMethod): MisuseError: Counter.add is a method of one actor"
    assert said in str(raised.value)
    assert "`actor.add.remote(...)` there." in str(raised.value)
    async with aiogpu.ActorPool(Counter, 1) as pool:
        said = await told(wait_for, pool.add)
        assert "write `await pool.add.remote(...)`" in said
        said = await told(lambda one: one.options(num_returns=2), pool.add)
        assert said.startswith(pool.add.__name__)
        assert "`@aiogpu.method(num_returns=2)` above it" in said
        with pytest.raises(OptionError, match="name is not an option"):
            pool.add.options(name="a call")
    with pytest.raises(AttributeError) as caught:
        _ = Counter.add
    assert re.match("Counter is an actor's class and has no add: .*", str(caught.value))
    assert not hasattr(Counter, "_repr_html_")
    assert Counter.__wrapped__.STEP == 2


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


async def test_a_put_that_is_not_awaited(node: aiogpu.types.Node) -> None:
    # What to do is said once, and ends with one full stop.
    advice = r"await aiogpu\.put\(value\)`.*[^.]\.$"
    for wrapped in (aiogpu.put(1), [aiogpu.put(1)]):
        with pytest.raises(SerializationError, match=advice) as caught:
            same.remote(wrapped)
        assert "Create it inside" not in str(caught.value)
    putting = aiogpu.put([1])
    handle = await putting
    assert isinstance(handle, aiogpu.Handle)
    assert await putting is handle
    assert await handle == await same.remote(handle) == [1]


async def test_a_task_group_is_given_a_handle(node: aiogpu.types.Node) -> None:
    handle: Any = pair.remote()
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(handle)
    (error,) = caught.value.exceptions
    assert "pass handle.coro() instead" in str(error)
    assert "coro" not in repr(handle)
    assert await handle == [1, 2]


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
    assert "run that by aiogpu.run(main())" in str(raised.value)
    assert "use `aiogpu.sync`" in str(raised.value)


@pytest.mark.usefixtures("no_leaks")
async def test_a_call_after_the_block_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "aiogpu"):
        async with aiogpu.init(address="inline", num_cpus=1):
            assert await same.remote(2) == 2
        assert caplog.text == ""
        for _ in range(2):
            assert await same.remote(2) == 2
            assert caplog.text.count("opens a node with default options") == 1
        await aiogpu.shutdown()
        async with aiogpu.init(address="inline", num_cpus=1):
            assert await same.remote(2) == 2
    assert caplog.text.count("opens a node with default options") == 1


# Misspelt names and options.


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wiat", ": did you mean 'wait'\\?$"),
        ("cancel", ": write `handle.cancel\\(\\)`$"),
        ("exceptions", "in `aiogpu.errors`"),
        ("nothing_like_it", "'nothing_like_it'$"),
        ("_wait", "'_wait'$"),
    ],
)
def test_a_name_that_the_package_has_not(name: str, said: str) -> None:
    """The nearest is told, or what there is in place of Ray's."""
    with pytest.raises(AttributeError, match=f"no attribute '{name}'") as raised:
        getattr(aiogpu, name)
    assert re.search(said, str(raised.value))
    assert not NAMES_OF_RAY.keys() & set(dir(aiogpu))


Ask = Callable[..., object]
ASKS: dict[str, tuple[Ask, str]] = {
    "a node": (aiogpu.init, "num_gpu num_gpus"),
    "a lease": (aiogpu.lease, "gpu"),
    "a placement": (
        lambda **options: aiogpu.placement([{"GPU": 1}], **options),
        "stratgy strategy",
    ),
    "batch()": (aiogpu.batch, "max_sise max_size"),
    "a pool of actors": (
        lambda **options: aiogpu.ActorPool(Counter, **options),
        "maxsize max_size",
    ),
    "wait()": (lambda **options: aiogpu.wait([], **options), "time_out timeout"),
    "get()": (lambda **options: aiogpu.get([], **options), "timeot timeout"),
    "map()": (lambda **options: same.map([], **options), "limits limit"),
    "kill()": (lambda **options: aiogpu.kill(None, **options), "norestart no_restart"),
    "a task": (aiogpu.remote, "num_gpu num_gpus"),
    "a method": (aiogpu.method, "num_return num_returns"),
}


@pytest.mark.parametrize("of_what", ASKS)
def test_a_misspelt_option_is_named_with_the_nearest_and_all_others(
    of_what: str,
) -> None:
    ask, names = ASKS[of_what]
    misspelt, _, nearest = names.partition(" ")
    with pytest.raises(OptionError) as caught:
        ask(**{misspelt: 1})
    said, _, known = str(caught.value).partition(" The options are: ")
    hint = f" Did you mean {nearest}?" if nearest else ""
    assert said == f"{misspelt} is not an option of {of_what}.{hint}"
    assert known.endswith(".")
    assert not nearest or nearest in known.rstrip(".").split(", ")


@pytest.mark.parametrize("function", [aiogpu.init, aiogpu.lease])
def test_an_option_without_its_name_is_refused(function: Callable[..., object]) -> None:
    with pytest.raises(
        MisuseError,
        match=rf"^{function.__name__}\(4\): the options of .* are keyword arguments: ",
    ):
        function(4)
