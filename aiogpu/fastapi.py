"""Helpers for HTTP servers on FastAPI or Starlette: `pip install 'aiogpu[serve]'`.

`lifespan` opens a node with the application, `cancel_on_disconnect` stops a call when
its client leaves, and `StreamResponse` sends the items of a stream.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    asynccontextmanager,
    suppress,
)
from functools import wraps
from inspect import isasyncgenfunction
from typing import Any, Final, TypeVar

from aiogpu.api.map import Results
from aiogpu.api.node import init
from aiogpu.api.results.stream import Stream
from aiogpu.errors import MisuseError

try:
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import StreamingResponse
    from starlette.types import Receive, Scope, Send
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "aiogpu.fastapi needs FastAPI or Starlette: pip install 'aiogpu[serve]'.",
        name=error.name,
    ) from None

__all__ = ["StreamResponse", "cancel_on_disconnect", "lifespan"]

T = TypeVar("T")

Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]
"""The type of the argument `FastAPI(lifespan=...)`."""

CLIENT_HAS_GONE: Final = 499
"""The status in logs of a request whose client has left before the response."""

EVENTS: Final = "text/event-stream"

LINE_END: Final = re.compile("\r\n|\r|\n")
"""The ends of lines in an event stream, by https://html.spec.whatwg.org/#event-stream.
`str.splitlines` also splits at others, such as U+2028 and U+0085."""


def lifespan(
    inner: Lifespan | Callable[[Any], AsyncIterator[Any]] | None = None,
    /,
    **options: Any,
) -> Lifespan:
    """Return a lifespan that opens a node with the application and closes it.

    Args:
        inner: the application's own lifespan, which runs while the node is open: a
            function of the application with one `yield`, with or without
            `@asynccontextmanager`. The yielded value is the lifespan's state.
        **options: options of `aiogpu.init`. With several server processes, give
            `address="auto"`, so that all join the node of `aiogpu start`.

    Raises:
        MisuseError: `inner` is not a function.

    Example:
        `app = FastAPI(lifespan=aiogpu.fastapi.lifespan(num_gpus=1))`
    """
    if inner is not None and not callable(inner):
        raise MisuseError(
            f"aiogpu.fastapi.lifespan() takes the application's own lifespan function "
            f"or no positional argument, not {inner!r}; options of aiogpu.init are "
            f"keyword arguments."
        )
    own: Any = asynccontextmanager(inner) if isasyncgenfunction(inner) else inner

    @asynccontextmanager
    async def run(app: Any) -> AsyncGenerator[Any]:
        async with init(**options):
            if own is None:
                yield None
            else:
                async with own(app) as state:
                    yield state

    return run if own is None else wraps(own)(run)


async def cancel_on_disconnect(request: Request, handle: Awaitable[T], /) -> T:
    """Await a call; stop the call if the client of the request leaves before its end.

    The call is stopped as by a cancelled `await`: its GPU is free when its code has
    stopped, and work that other code awaits as well goes on. The body of the request is
    read first, and stays available.

    Args:
        request: the request that is being answered.
        handle: a handle that `.remote()` returned, or another awaitable, such as
            `asyncio.gather(...)` of several handles.

    Returns:
        The result.

    Raises:
        HTTPException: the client has left; the status is 499, for the log.
        Exception: the error of the call.

    Example:
        `return await cancel_on_disconnect(request, model.predict.remote(text))`
    """
    result = asyncio.ensure_future(_result_of(handle))
    try:
        with suppress(RuntimeError):  # the body was read as a form or a stream
            await request.body()
        return await _while_connected(request.receive, result)
    except ClientDisconnect:
        raise HTTPException(CLIENT_HAS_GONE, "the client has gone") from None
    finally:
        result.cancel()


async def _result_of(awaitable: Awaitable[T]) -> T:
    return await awaitable


async def _while_connected(receive: Receive, result: asyncio.Future[T]) -> T:
    """Await a future; cancel it, and raise `ClientDisconnect`, if the client leaves."""
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((result, gone), return_when=asyncio.FIRST_COMPLETED)
        if result.done():
            return result.result()
        gone.result()  # raises the error of the connection, if any
        raise ClientDisconnect
    finally:
        gone.cancel()
        result.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamResponse(StreamingResponse):
    """A response that sends the items of a stream as they come.

    The generator stops when the client leaves, even while it computes the next item. It
    waits while the client does not read: at most `max_buffered` items are ahead. An
    error before the first item is raised like an error of the endpoint, with the
    status of that error. A later error breaks the connection, so that the client sees
    that the response is incomplete.

    Args:
        stream: the stream that `.remote()` of a generator returned, the results of
            `map`, or an async generator.
        media_type: "text/plain" (default), or another type: items must be `str` or
            `bytes`, and are sent unchanged. With "text/event-stream", each item is a
            server-sent event. Its data is the text, of a `str` or of `bytes` in UTF-8,
            or else the item as JSON. A client gets the text as it was yielded, except
            that a carriage return, with or without a line feed, arrives as a line feed.
        status_code: status of the response; default 200.
        headers: additional headers.
        background: a background task of Starlette, run after the response.

    Raises:
        MisuseError: `stream` is not an async generator.

    Example:
        `return StreamResponse(model.generate.remote(prompt))`
    """

    def __init__(
        self,
        stream: Stream[Any] | Results[Any] | AsyncGenerator[Any],
        media_type: str = "text/plain",
        *,
        status_code: int = 200,
        headers: Mapping[str, str] | None = None,
        background: Any = None,
    ) -> None:
        if not (hasattr(stream, "__anext__") and hasattr(stream, "aclose")):
            raise MisuseError(
                f"StreamResponse() takes the stream that .remote() of a generator "
                f"returns, or another async generator, not {stream!r}."
            )
        self._items = stream
        headers = dict(headers or {})
        # A media type may have parameters, as in "text/event-stream; charset=utf-8".
        self._is_of_events = media_type.partition(";")[0].strip().lower() == EVENTS
        if self._is_of_events:
            headers.setdefault("Cache-Control", "no-store")
        super().__init__(self._chunks(), status_code, headers, media_type, background)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; the server calls this."""
        sending = asyncio.ensure_future(self.stream_response(send))
        with suppress(ClientDisconnect):
            await _while_connected(receive, sending)
        if self.background is not None:
            await self.background()

    async def stream_response(self, send: Send) -> None:
        """Send the status and headers when the first item has come, then each item."""
        async with aclosing(self._items):
            chunks = aiter(self.body_iterator)
            chunk = await anext(chunks, None)
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            while chunk is not None:
                await send(_body(chunk, more_body=True))
                chunk = await anext(chunks, None)
            await send(_body(b"", more_body=False))

    async def _chunks(self) -> AsyncGenerator[bytes]:
        encode = _event if self._is_of_events else self._encoded
        async for item in self._items:
            yield encode(item)

    def _encoded(self, item: object) -> bytes:
        if isinstance(item, str):
            return item.encode(self.charset)
        if isinstance(item, bytes | bytearray | memoryview):
            return bytes(item)
        raise MisuseError(
            f"a StreamResponse of {self.media_type} sends str and bytes, but the "
            f"stream yielded {item!r}; encode items in the generator, or write "
            f'media_type="{EVENTS}", which sends other items as JSON.'
        )


def _body(chunk: object, more_body: bool) -> dict[str, object]:
    return {"type": "http.response.body", "body": chunk, "more_body": more_body}


def _event(item: object) -> bytes:
    """Return an item as a server-sent event."""
    lines = LINE_END.split(_text(item))
    return "".join(f"data: {line}\n" for line in lines).encode() + b"\n"


def _text(item: object) -> str:
    """Return the data of the event of an item.

    Raises:
        MisuseError: the item is neither text nor can be written as JSON.
    """
    if isinstance(item, str):
        return item
    try:
        if isinstance(item, bytes | bytearray | memoryview):
            return bytes(item).decode()
        return json.dumps(item, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise MisuseError(
            f"a StreamResponse of {EVENTS} sends text, bytes of UTF-8 text, and items "
            f"that JSON can express, but the stream yielded {item!r} ({error}); "
            f"convert items in the generator."
        ) from error
