"""Mistakes in the use of the API, and the error message for each."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import aiogpu
from aiogpu.api.usage_errors import NAMES_OF_RAY
from aiogpu.errors import (
    MisuseError,
    NoLoopError,
    OptionError,
    SerializationError,
)

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


def loop_in_a_generator(thing: Any) -> None:
    def items() -> Iterator[Any]:
        for item in thing:
            yield [item]

    list(items())


def delegate(thing: Any) -> None:
    def items() -> Iterator[Any]:
        yield from thing

    list(items())


def first(thing: Any) -> Any:
    return thing[0]


async def refusal(use: Use, thing: Any) -> str:
    """Return the message of the error that a use raises."""
    try:
        result = use(thing)
        if inspect.iscoroutine(result):
            await result
    except MisuseError as error:
        return str(error)
    raise AssertionError(f"{thing!r} was used")


@pytest.fixture
async def node(inline_node: aiogpu.types.Node) -> aiogpu.types.Node:
    return inline_node


# The wrong loop, the wrong `with`, a result that does not exist yet.


@pytest.mark.parametrize("use", [loop_over, list, tuple, first, sorted])
async def test_map_in_a_plain_for_is_refused(node: aiogpu.types.Node, use: Use) -> None:
    assert "write `async for item in pair.map(...)`" in await refusal(use, pair.map([]))
    message = await refusal(wait_for, pair.map([]))
    assert "`[item async for item in pair.map(...)]`" in message


async def test_stream_does_not_count_as_an_iterable(node: aiogpu.types.Node) -> None:
    """Libraries that accept both kinds may check for the plain one first."""
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
async def test_plain_with_is_refused(node: aiogpu.types.Node, call: str) -> None:
    message = await refusal(enter, BLOCKS[call]())
    assert message.endswith(f"write `async with {call}`, inside an `async def`.")


async def test_plain_with_on_a_node_is_refused(node: aiogpu.types.Node) -> None:
    opening = aiogpu.init(ignore_reinit_error=True)
    for thing in (opening, node):
        assert "write `async with aiogpu.init(...)`" in await refusal(enter, thing)
    assert await opening is node


@pytest.mark.parametrize("is_done", [False, True])
async def test_use_of_a_handle_as_its_result_is_refused(
    node: aiogpu.types.Node, is_done: bool
) -> None:
    handle: Any = pair.remote()
    if is_done:
        await handle
    uses: dict[Use, str] = {
        loop_over: "cannot be iterated",
        loop_in_a_generator: "cannot be iterated",
        delegate: "cannot be iterated",
        list: "cannot be iterated",
        first: "has no items",
        len: "has no length",
        bool: "has no truth value",
        lambda handle: 1 in handle: "contains no items",
        lambda handle: handle + 1: "does not support arithmetic (__add__)",
        lambda handle: 2 * handle: "does not support arithmetic (__rmul__)",
        float: "does not support arithmetic (__float__)",
        np.mean: "is not an array",
        lambda handle: np.stack([handle, handle]): "is not an array",
        lambda handle: np.ones(2) + handle: "is not an array",
    }
    for use, reason in uses.items():
        start = (
            f"a handle is not its result and {reason}; write `await` before "
            "pair.remote(...)"
        )
        assert (await refusal(use, handle)).startswith(start)
    with pytest.raises(AttributeError) as caught:
        _ = handle.shape
    assert str(caught.value) == (
        "a handle is not its result and has no attribute 'shape'; write `await` before "
        "pair.remote(...)."
    )
    assert not hasattr(handle, "_repr_svg_")
    message = await refusal(list, handle.reports())
    assert "write `async for item in handle.reports()`" in message
    assert await handle == [1, 2]
    message = await refusal(len, aiogpu.put([1, 2]))
    assert (
        message == "a handle is not its result and has no length; write `await handle`."
    )

    @aiogpu.remote
    def plain() -> list[str]:
        handle: Any = pair.remote()
        messages = []
        uses = (loop_over, loop_in_a_generator, delegate, first, len, bool, np.mean)
        for use in (*uses, lambda handle: handle.shape):
            with pytest.raises((MisuseError, AttributeError)) as caught:
                use(handle)
            messages.append(str(caught.value))
        aiogpu.get(handle)
        return messages

    for message in await plain.remote():
        assert "write aiogpu.get(pair.remote(...))." in message


@aiogpu.remote
def add_up(parts: Any) -> Any:
    return sum(parts)


@aiogpu.remote
async def add_up_on_a_loop(parts: Any) -> Any:
    return sum(parts)


@pytest.mark.parametrize(
    ("task", "advice"),
    [
        (add_up, "aiogpu.get(handle), or aiogpu.get(handles) for a list"),
        (add_up_on_a_loop, "`await handle`, or `await asyncio.gather(*handles)` for "),
    ],
)
async def test_use_of_a_handle_inside_an_argument_is_refused(
    node: aiogpu.types.Node, task: Any, advice: str
) -> None:
    with pytest.raises(MisuseError) as caught:
        await task.remote([pair.remote(), pair.remote()])
    assert f"; write {advice}" in str(caught.value)
    assert str(caught.value).endswith(
        ": a handle inside another argument is not replaced."
    )


async def test_result_before_the_end_is_refused(node: aiogpu.types.Node) -> None:
    """`concurrent.futures` and Ray would wait for the result."""
    handle = pair.remote()
    for use in handle.result, handle.exception:
        with pytest.raises(asyncio.InvalidStateError) as caught:
            use()
        message = str(caught.value)
        assert message.startswith(f"pair has not ended, and handle.{use.__name__}")
        assert "write `await handle`, as in `await pair.remote(...)`." in message
    assert await handle == handle.result() == [1, 2]
    invalid = raising.remote(asyncio.InvalidStateError("its own"))
    for _ in range(2):
        with pytest.raises(asyncio.InvalidStateError, match=r"^its own$"):
            await invalid


class Plain:
    @aiogpu.remote
    def method(self, number: int) -> int:
        return number

    @staticmethod
    @aiogpu.remote
    def function(number: int) -> int:
        return number


async def test_method_as_a_task_is_refused(node: aiogpu.types.Node) -> None:
    plain: Any = Plain()
    message = await refusal(lambda instance: instance.method.remote(1), plain)
    assert message.startswith("method(self, number: 'int') -> 'int' was called with wr")
    assert " method is a method of Plain: put @aiogpu.remote above the class" in message
    message = await refusal(lambda kind: kind.function.remote(1, 2), Plain)
    assert "is a method of" not in message


async def test_init_of_an_open_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOGPU_ADDRESS", "inline")
    calls: list[tuple[Callable[[], Any], str]] = [
        (
            pair.remote,
            "which an earlier .remote() opened with default options. Call init() ",
        ),
        (aiogpu.init, "has a node. Write `await aiogpu.shutdown()` before"),
    ]
    for call, message in calls:
        await call()
        with pytest.raises(aiogpu.errors.NodeRunningError, match=re.escape(message)):
            await aiogpu.init()
        await aiogpu.shutdown()


@pytest.mark.parametrize(
    ("use", "thing", "advice"),
    [
        (wait_for, pair, "`await pair.remote(...)`"),
        (wait_for, count, "`async for item in count.remote(...)`"),
        (loop_on, count, "`async for item in count.remote(...)`"),
        (loop_over, count, "`async for item in count.remote(...)`"),
        (wait_for, Counter, "`Counter.remote(...)`"),
    ],
)
async def test_use_of_a_remote_object_without_a_call_is_refused(
    use: Use, thing: object, advice: str
) -> None:
    assert f"write {advice}" in await refusal(use, thing)


async def test_wrong_use_of_actor_methods_is_refused(node: aiogpu.types.Node) -> None:
    counter: Any = Counter.remote()
    assert "write `await actor.add.remote(...)`" in await refusal(wait_for, counter.add)
    for use in (loop_on, loop_over, wait_for, lambda method: method()):
        message = await refusal(use, counter.each)
        assert "write `async for item in actor.each.remote(...)`" in message
    with pytest.raises(SerializationError) as raised:
        same.remote(counter.add)
    cause = (
        "args[0] (a RemoteMethod): MisuseError: Counter.add is a method of one actor"
    )
    assert cause in str(raised.value)
    assert "`actor.add.remote(...)` there." in str(raised.value)
    async with aiogpu.ActorPool(Counter, 1) as pool:
        message = await refusal(wait_for, pool.add)
        assert "write `await pool.add.remote(...)`" in message
        message = await refusal(lambda add: add.options(num_returns=2), pool.add)
        assert message.startswith(pool.add.__name__)
        assert "`@aiogpu.method(num_returns=2)` above the method" in message
        with pytest.raises(OptionError, match="name is not an option"):
            pool.add.options(name="a call")
    with pytest.raises(AttributeError) as caught:
        _ = Counter.add
    assert re.match("Counter is an actor's class and has no add: .*", str(caught.value))
    assert not hasattr(Counter, "_repr_html_")
    assert Counter.__wrapped__.STEP == 2


async def test_setting_an_attribute_of_an_actor_is_refused(
    node: aiogpu.types.Node,
) -> None:
    counter: Any = Counter.remote()
    for actor in (counter, aiogpu.ActorPool([counter])):
        message = await refusal(lambda actor: setattr(actor, "step", 3), actor)
        assert "an actor's attributes are in its process. Write a method" in message
        assert not hasattr(actor, "step")
    assert await counter.add.remote() == 2


@aiogpu.remote(num_cpus=0)
class Gated:
    def __init__(self) -> None:
        self.is_open = False

    async def wait(self) -> None:
        await asyncio.Event().wait()


async def test_an_await_on_another_loop_is_refused(node: aiogpu.types.Node) -> None:
    """In another thread, as asyncio's own message names no cause."""
    gated = await Gated.remote()
    handle = gated.wait.remote()
    group = aiogpu.placement([{"CPU": 1}])
    pool = aiogpu.ActorPool([gated])
    completions = aiogpu.as_completed([handle])

    async def refused() -> None:
        for wait in (
            partial(wait_for, handle),
            handle.coro,
            partial(wait_for, group),
            partial(wait_for, pool),
            pool.aclose,
            completions.__anext__,
        ):
            with pytest.raises(NoLoopError, match="in a thread other than its event"):
                await wait()

    await asyncio.to_thread(asyncio.run, refused())
    assert not handle.done(), "the work goes on"
    assert not pool._scheduler.is_closed
    handle.cancel()


async def test_wait_without_await_is_refused(node: aiogpu.types.Node) -> None:
    handle = pair.remote()

    def unpack(thing: Any) -> None:
        _ready, _pending = thing

    for use in unpack, loop_over:
        message = await refusal(use, aiogpu.wait([handle]))
        assert message.endswith("write `ready, pending = await aiogpu.wait(handles)`.")
    for waits in (
        asyncio.create_task(aiogpu.wait([handle])),  # type: ignore[arg-type]
        asyncio.wait_for(aiogpu.wait([handle]), 60),
        asyncio.gather(aiogpu.wait([handle])),
    ):
        assert await waits in (([handle], []), [([handle], [])])


async def test_put_returns_a_handle_at_once(node: aiogpu.types.Node) -> None:
    handle = aiogpu.put([1])
    assert isinstance(handle, aiogpu.Handle)
    assert handle.done()
    assert await handle == await same.remote(handle) == [1]
    [inside] = await same.remote([aiogpu.put(2)])
    assert await inside == 2


async def test_task_group_refuses_a_handle(node: aiogpu.types.Node) -> None:
    handle: Any = pair.remote()
    with pytest.raises(BaseExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(handle)
    (error,) = caught.value.exceptions
    assert isinstance(error, TypeError)
    assert repr(handle) in str(error)
    assert await handle == [1, 2]


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda: aiogpu.put(1), "aiogpu.put()"),
        (lambda: aiogpu.placement([{"CPU": 1}]), "aiogpu.placement()"),
        (lambda: pair.remote(), ".remote()"),
    ],
)
def test_call_without_loop_is_refused(use: Callable[[], Any], name: str) -> None:
    with pytest.raises(aiogpu.NoLoopError) as raised:
        use()
    assert str(raised.value).startswith(f"{name} needs a running event loop")
    assert "run that by aiogpu.run(main())" in str(raised.value)
    assert "use `aiogpu.sync`" in str(raised.value)


@pytest.mark.usefixtures("no_leaks")
async def test_call_after_a_block_warns_once(caplog: pytest.LogCaptureFixture) -> None:
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
    ("name", "message"),
    [
        ("wiat", ": did you mean 'wait'\\?$"),
        ("cancel", ": write `handle.cancel\\(\\)`$"),
        ("exceptions", "in `aiogpu.errors`"),
        ("nothing_like_it", "'nothing_like_it'$"),
        ("_wait", "'_wait'$"),
    ],
)
def test_unknown_name_of_the_package_gets_a_suggestion(name: str, message: str) -> None:
    """The message suggests the nearest name, or the replacement of Ray's name."""
    with pytest.raises(AttributeError, match=f"no attribute '{name}'") as raised:
        getattr(aiogpu, name)
    assert re.search(message, str(raised.value))
    assert not NAMES_OF_RAY.keys() & set(dir(aiogpu))


MISSPELT: dict[str, tuple[Callable[..., object], str]] = {
    "a node": (aiogpu.init, "num_gpu num_gpus"),
    "a lease": (aiogpu.lease, "gpu"),
    "a placement": (partial(aiogpu.placement, [{"GPU": 1}]), "stratgy strategy"),
    "batch()": (aiogpu.batch, "max_sise max_size"),
    "a pool of actors": (partial(aiogpu.ActorPool, Counter), "maxsize max_size"),
    "wait()": (partial(aiogpu.wait, []), "time_out timeout"),
    "get()": (partial(aiogpu.get, []), "timeot timeout"),
    "map()": (partial(same.map, []), "limits limit"),
    "kill()": (partial(aiogpu.kill, None), "norestart no_restart"),  # type: ignore[arg-type]
    "a task": (aiogpu.remote, "num_gpu num_gpus"),
    "a method": (aiogpu.method, "num_return num_returns"),
}


@pytest.mark.parametrize("of_what", MISSPELT)
def test_misspelt_option_gets_a_suggestion_and_a_list(of_what: str) -> None:
    call, names = MISSPELT[of_what]
    misspelt, _, nearest = names.partition(" ")
    with pytest.raises(OptionError) as caught:
        call(**{misspelt: 1})
    start, _, known = str(caught.value).partition(" The options are: ")
    hint = f" Did you mean {nearest}?" if nearest else ""
    assert start == f"{misspelt} is not an option of {of_what}.{hint}"
    assert known.endswith(".")
    assert not nearest or nearest in known.rstrip(".").split(", ")


@pytest.mark.parametrize("function", [aiogpu.init, aiogpu.lease])
def test_option_without_its_name_is_refused(function: Callable[..., object]) -> None:
    with pytest.raises(
        MisuseError,
        match=rf"^{function.__name__}\(4\): the options of .* are keyword arguments: ",
    ):
        function(4)
