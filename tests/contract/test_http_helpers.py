"""`aiogpu.fastapi`, driven by the messages between a server and an application."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiogpu
from aiogpu import errors
from tests.contract.stream_tasks import echo, items, stopping, waiting
from tests.support.errors import raises
from tests.support.gate import Gate

pytest.importorskip("fastapi", reason="fastapi is not installed")

from fastapi import FastAPI, Request, Response

from aiogpu import fastapi as helpers

pytestmark = pytest.mark.either_loop


class Exchange:
    """One request to an application, and the messages that the application sends."""

    def __init__(
        self, app: FastAPI, path: str, body: bytes = b"", kind: str = ""
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self.head = asyncio.Event()
        self._left = asyncio.Event()
        self._messages = [{"type": "http.request", "body": body, "more_body": False}]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST" if body else "GET",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", kind.encode())],
            "app": app,
        }
        self.done = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._messages:
            return self._messages.pop(0)
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.head.set()

    async def leave(self) -> None:
        """Disconnect, and wait until the application has ended."""
        self._left.set()
        await self.done

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    @property
    def is_complete(self) -> bool:
        return not self.sent[-1].get("more_body", False)


async def answered(app: FastAPI, path: str, *sent: Any) -> Exchange:
    exchange = Exchange(app, path, *sent)
    await exchange.done
    return exchange


app = FastAPI()
GIVEN: dict[str, tuple[list[Any], str]] = {
    "text": (["a", b"b", "é"], "text/plain"),
    "none": ([], "text/plain"),
    "events": (["a\nb", "", {"x": 1}], "text/event-stream"),
    "at once": ([ValueError("no")], "text/plain"),
    "later": (["a", ValueError("no")], "text/plain"),
    "other": ([3], "text/plain"),
}


@app.get("/items/{name}")
async def give_items(name: str) -> Response:
    given, media_type = GIVEN[name]
    return helpers.StreamResponse(items.remote(given), media_type)


@app.exception_handler(ValueError)
async def refused(_: Request, error: Exception) -> Response:
    return Response(str(error), 422)


@app.get("/stopping{path:path}")
async def give_stopping(path: str) -> Response:
    return helpers.StreamResponse(stopping.remote(path))


shared: list[Any] = []


@app.post("/wait")
async def wait(request: Request) -> str:
    """Wait for the shared task, or for a task at the gate whose path is the body."""
    path = (await request.body()).decode()
    call = shared[0] if shared else waiting.remote(path, "call")
    answer: str = await helpers.cancel_on_disconnect(request, call)
    return f"{answer} {len(await request.body())}"


@app.post("/read")
async def read(request: Request) -> str:
    """Read the body as a form is read, so that nothing of it is left."""
    text = b"".join([part async for part in request.stream()]).decode()
    both = asyncio.gather(*(echo.remote(text) for _ in range(2)))
    return " ".join(await helpers.cancel_on_disconnect(request, both))


async def test_items_of_a_stream_are_sent_at_once(aiogpu_node: Any) -> None:
    assert (await answered(app, "/items/text")).text == "abé"
    nothing = await answered(app, "/items/none")
    assert (nothing.status, nothing.text, nothing.is_complete) == (200, "", True)
    events = await answered(app, "/items/events")
    assert events.text == 'data: a\ndata: b\n\ndata: \n\ndata: {"x": 1}\n\n'
    assert (b"cache-control", b"no-store") in events.sent[0]["headers"]


async def each(items: list[Any]) -> AsyncGenerator[Any]:
    for item in items:
        yield item


async def body_of(items: list[Any], media_type: str = "text/event-stream") -> bytes:
    """Return the body of a response that sends these items."""
    parts: list[bytes] = []

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))

    await helpers.StreamResponse(each(items), media_type).stream_response(send)
    return b"".join(parts)


def received(body: bytes) -> list[str]:
    """Return the data of each event, as a client reads a stream.

    By https://html.spec.whatwg.org/multipage/server-sent-events.html.
    """
    text = body.decode("utf-8-sig")
    *lines, unfinished = re.split("\r\n|\r|\n", text)
    assert not unfinished
    events, data = [], ""
    for line in lines:
        field, _, value = line.partition(":")
        if not line:
            if data:
                events.append(data[:-1])
            data = ""
        elif field == "data":
            data += value.removeprefix(" ") + "\n"
        else:
            assert not field, f"a client would ignore {line!r}"
    assert not data, "a client would drop an event without an end"
    return events


NASTY = [
    *("", " ", "\n", "\n\n", "a\n", "\na", "a\n\nb", " a", "  \n a", ":", "data: x"),
    *("id: 1\n\nevent: x", "a\0b", "\ufeff", "\u2028", "a\u2029b", "\x85", "\x0b\x0c"),
    *("\x1c\x1d\x1e", "é\n", "\U0001f600", "\t\n\t"),
]


@pytest.mark.parametrize("text", NASTY, ids=ascii)
async def test_an_event_has_the_text_that_was_yielded(text: str) -> None:
    assert received(await body_of([text, "end"])) == [text, "end"]
    assert received(await body_of([text.encode()])) == [text]


@pytest.mark.parametrize("text", ["\r", "\r\n", "a\r", "a\r\nb\rc\n\r\r\n"], ids=ascii)
async def test_an_event_has_one_kind_of_line_break(text: str) -> None:
    breaks = text.replace("\r\n", "\n").replace("\r", "\n")
    assert received(await body_of([text])) == [breaks]


@settings(deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r")))
)
def test_every_text_comes_back_from_its_event(texts: list[str]) -> None:
    assert received(asyncio.run(body_of(texts))) == texts


async def test_events_are_recognised_by_their_media_type_alone() -> None:
    for media_type in ("text/event-stream; charset=utf-8", "Text/Event-Stream"):
        assert received(await body_of(["a\n", [1]], media_type)) == ["a\n", "[1]"]


@pytest.mark.parametrize(
    "item",
    [b"\xff", object(), {1, 2}, float("nan")],
    ids=["bytes", "object", "set", "nan"],
)
async def test_an_item_that_is_no_event_is_refused(item: object) -> None:
    message = "sends text, bytes of UTF-8 text, and items .* but the stream yielded"
    await raises(errors.MisuseError, body_of([item]), match=message)


async def test_only_an_error_before_the_first_item_has_a_status(
    aiogpu_node: Any,
) -> None:
    early = await answered(app, "/items/at once")
    assert (early.status, early.text) == (422, "no")
    for name, message in (
        ("later", "response already started"),
        ("other", "str and byt"),
    ):
        broken = Exchange(app, f"/items/{name}")
        await raises((RuntimeError, errors.MisuseError), broken.done, match=message)
    late = Exchange(app, "/items/later")
    await asyncio.wait([late.done])
    assert late.done.exception() is not None
    assert (late.text, late.is_complete) == ("a", False)


async def test_a_stream_stops_with_its_client(aiogpu_node: Any, gate: Gate) -> None:
    exchange = Exchange(app, f"/stopping{gate.path}")
    await exchange.head.wait()
    await exchange.leave()
    await gate.entered("stopped")
    assert (exchange.text, exchange.is_complete) == ("first", False)


async def test_a_call_stops_with_its_client(aiogpu_node: Any, gate: Gate) -> None:
    body = gate.path.encode()
    exchange = Exchange(app, "/wait", body)
    await gate.entered("call")
    await exchange.leave()
    await gate.entered("call-cancelled")
    assert exchange.status == 499
    gate.forget("call", "call-cancelled")

    exchange = Exchange(app, "/wait", body)
    await gate.let_pass("call")
    await exchange.done
    assert exchange.text == f'"call {len(body)}"'
    gate.forget("call")

    # The call also stops when the server stops waiting.
    exchange = Exchange(app, "/wait", body)
    await gate.entered("call")
    exchange.done.cancel()
    await asyncio.wait([exchange.done])
    await gate.entered("call-cancelled")


async def test_work_with_another_waiter_runs_on(aiogpu_node: Any, gate: Gate) -> None:
    shared[:] = [waiting.remote(gate.path, "shared")]
    try:
        first, second = (Exchange(app, "/wait", b"any") for _ in range(2))
        await gate.entered("shared")
        await first.leave()
        gate.release("shared")
        await second.done
        assert (first.status, second.text) == (499, '"shared 3"')
    finally:
        shared.clear()


async def test_a_handler_that_has_read_its_body_awaits_calls(aiogpu_node: Any) -> None:
    assert (await answered(app, "/read", b"hi")).text == '"hi hi"'


# The node of an application.


async def generator(app: FastAPI) -> AsyncIterator[dict[str, int]]:
    assert aiogpu.is_initialized()
    yield {"answer": 42}
    assert aiogpu.is_initialized()


@pytest.mark.parametrize("own", [None, generator, asynccontextmanager(generator)])
async def test_a_node_lives_as_long_as_the_application(
    own: Any, no_leaks: None
) -> None:
    served = FastAPI(
        lifespan=helpers.lifespan(own, address="inline", num_cpus=3, num_gpus=2)
    )
    for _ in range(2):
        async with served.router.lifespan_context(served) as state:
            assert (await aiogpu.cluster_resources())["GPU"] == 2
            assert state == (None if own is None else {"answer": 42})
        assert not aiogpu.is_initialized()


async def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(errors.MisuseError, match=r"takes the .*, not 'auto'"):
        helpers.lifespan("auto")  # type: ignore[arg-type]
    with pytest.raises(errors.MisuseError, match=r"takes the stream .*, not 'abc'"):
        helpers.StreamResponse("abc")  # type: ignore[arg-type]
    with pytest.raises(errors.OptionError, match="num_gpu"):
        async with helpers.lifespan(num_gpu=1)(FastAPI()):
            pass


def test_the_import_without_starlette_says_what_to_install() -> None:
    code = "import sys; sys.modules['starlette'] = None; import aiogpu.fastapi"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "pip install 'aiogpu[serve]'" in ran.stderr
