"""Serves the dashboard by Bokeh: one document for each tab, fed from one collector.

`GuardedTornado` asks the guard about every request, before any handler sees it, and
serves four things: the pages, their WebSockets, the scripts of `SCRIPTS`, and the
timeline as a file. No other path of Bokeh's server is reachable, and none names a file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, cast

from bokeh.embed.server import server_html_page_for_session
from bokeh.resources import Resources
from bokeh.server.server import BaseServer
from bokeh.server.session import ServerSession
from bokeh.server.tornado import BokehTornado
from bokeh.server.views.doc_handler import DocHandler
from bokeh.server.views.static_handler import StaticHandler
from bokeh.server.views.ws import WSHandler
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPServerRequest
from tornado.ioloop import IOLoop
from tornado.netutil import bind_sockets
from tornado.web import RequestHandler

from aiogpu.dashboard.collector import Collector
from aiogpu.dashboard.guard import Guard, Verdict
from aiogpu.dashboard.tabs import SCHEME, TRACE, applications
from aiogpu.errors import NodeError

UNUSED: Final = 15_000
"""Milliseconds after which the document of a closed tab is dropped."""
LARGEST: Final = 1 << 20
"""Bytes of a message of a browser."""
SCRIPTS: Final = ("js/bokeh.min.js", "js/bokeh-widgets.min.js")
"""The files of Bokeh that a page needs."""
POLICY: Final = (
    "default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' ws://{host}; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""The content-security policy. Bokeh puts style sheets into its widgets, which needs
'unsafe-inline' for styles; scripts need a number that is new for each page."""
HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
LOGIN: Final = (
    '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>aiogpu</title>'
    '<meta http-equiv="refresh" content="0;url=/"><a href="/">Go to the dashboard</a>'
)
"""Answer to the URL with the token. Not a redirect: the browser would withhold a
SameSite=Strict cookie if another page had led to this one."""


class Page(DocHandler):
    """Serves the page of a new tab, with its policy."""

    async def get(self, *_: Any, **__: Any) -> None:
        """Serve the page."""
        # Tornado's decorator makes the annotation an optional one.
        session = await cast("Awaitable[ServerSession]", self.get_session())
        document, nonce = session.document, secrets.token_urlsafe(16)
        page = server_html_page_for_session(
            session,
            resources=Resources(
                mode="server",
                root_url="/",
                components=["bokeh", "bokeh-widgets"],
                path_versioner=StaticHandler.append_version,
            ),
            title=document.title,
            template=document.template,
            template_variables=document.template_variables,
        )
        for name, value in HEADERS.items():
            self.set_header(name, value)
        policy = POLICY.format(nonce=nonce, host=self.request.host)
        self.set_header("Content-Security-Policy", policy)
        self.set_header("Content-Type", "text/html; charset=utf-8")
        # The page has no text of programs, only the numbers of Bokeh's models.
        self.write(page.replace("<script", f'<script nonce="{nonce}"'))


class Socket(WSHandler):
    """The WebSocket of a tab."""

    def check_origin(self, origin: str) -> bool:
        """See Bokeh; only requests that the guard allows reach this handler."""
        return True


class Script(StaticHandler):
    """Serves a file of `SCRIPTS`."""

    def set_extra_headers(self, path: str) -> None:
        """See tornado."""
        self.set_header("X-Content-Type-Options", "nosniff")


class Answer(RequestHandler):
    """Answers by itself: a refusal, a page that does not exist, or the login."""

    def initialize(self, verdict: Verdict, guard: Guard) -> None:
        """See tornado."""
        self._verdict, self._guard = verdict, guard

    async def prepare(self) -> None:
        """Answer, whatever the method."""
        for name, value in HEADERS.items():
            self.set_header(name, value)
        self.set_header("Content-Security-Policy", "default-src 'none'")
        self.set_status(self._verdict.status)
        if not self._verdict.is_login:
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.finish(f"{self._verdict.reason}\n")
            return
        self.set_cookie(
            self._guard.cookie_name,
            self._guard.cookie,
            httponly=True,
            samesite="Strict",
            path="/",
        )
        self.finish(LOGIN)


class Trace(RequestHandler):
    """Serves the timeline as a file for Perfetto."""

    def initialize(self, collector: Collector) -> None:
        """See tornado."""
        self._collector = collector

    async def get(self) -> None:
        """Send the file; a text with the reason if no node answers."""
        for name, value in HEADERS.items():
            self.set_header(name, value)
        self.set_header("Content-Security-Policy", "default-src 'none'")
        try:
            trace = await self._collector.trace()
        except NodeError as error:
            self.set_status(503)
            self.set_header("Content-Type", "text/plain; charset=utf-8")
            self.finish(f"{error}\n")
            return
        self.set_header("Content-Disposition", 'attachment; filename="timeline.json"')
        self.finish(trace)


HANDLERS: Final[dict[type, type[RequestHandler]]] = {
    DocHandler: Page,
    WSHandler: Socket,
    StaticHandler: Script,
    Trace: Trace,
}
"""What is served in place of Bokeh's handlers, and beside them; no other handler is."""


class GuardedTornado(BokehTornado):
    """Bokeh's application, behind the guard."""

    def __init__(self, guard: Guard, *args: Any, **settings: Any) -> None:
        self._guard = guard
        super().__init__(*args, **settings)

    def get_handler_delegate(
        self,
        request: HTTPServerRequest,
        target_class: type[RequestHandler],
        target_kwargs: dict[str, Any] | None = None,
        path_args: list[bytes] | None = None,
        path_kwargs: dict[str, bytes] | None = None,
    ) -> Any:
        """Return the handler of a request; tornado asks here for each."""
        token = request.query_arguments.get("token", [b""])[-1].decode(
            "ascii", "replace"
        )
        is_socket = issubclass(target_class, WSHandler)
        verdict = self._guard.judge(request.headers, token, is_socket=is_socket)
        handler = HANDLERS.get(target_class)
        is_unknown = handler is None or (
            target_class is StaticHandler
            and (path_args or [b""])[0].decode("utf-8", "replace") not in SCRIPTS
        )
        if verdict.status == 200 and is_unknown and not verdict.is_login:
            verdict = Verdict(404, "The dashboard has no such page.")
        if verdict.status != 200 or verdict.is_login:
            given = {"verdict": verdict, "guard": self._guard}
            return super().get_handler_delegate(request, Answer, given)
        assert handler is not None
        return super().get_handler_delegate(
            request, handler, target_kwargs, path_args, path_kwargs
        )


@asynccontextmanager
async def listening(collector: Collector, host: str, port: int) -> AsyncIterator[str]:
    """Serve the dashboard for the time of the block, and yield its URL.

    Raises:
        OSError: the port is taken, or the address is not one of this machine.
    """
    # A closed tab is no event; its document is dropped a moment later.
    logging.getLogger(WSHandler.__module__).setLevel(logging.ERROR)
    guard = Guard(host)
    application = GuardedTornado(
        guard,
        applications(collector),
        extra_patterns=[(TRACE, Trace, {"collector": collector})],
        log_function=lambda _: None,  # a URL has the token
        include_headers=[],
        include_cookies=[SCHEME],  # a page shows what it includes to its scripts
        unused_session_lifetime_milliseconds=UNUSED,
        check_unused_sessions_milliseconds=UNUSED // 3,
        websocket_max_message_size_bytes=LARGEST,
    )
    sockets = bind_sockets(port, host)
    guard.port = sockets[0].getsockname()[1]
    http = HTTPServer(application)
    http.add_sockets(sockets)
    server = BaseServer(IOLoop.current(), application, http)
    server.start()
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{guard.port}/?token={guard.token}"
    finally:
        server.stop()
        await http.close_all_connections()


async def serve(
    locate: Callable[[], str],
    host: str,
    port: int,
    on_ready: Callable[[str], None],
    *,
    is_read_only: bool = False,
    until: int = 0,
) -> None:
    """Serve the dashboard until SIGINT or SIGTERM.

    Args:
        locate: see `Collector`.
        host: the address to listen on.
        port: the port; 0 for any free port.
        on_ready: called with the URL, once the server listens.
        is_read_only: offer nothing that stops tasks, actors or leases.
        until: a process id; the dashboard ends with this process. 0 for none.

    Raises:
        OSError: the port is taken, or the address is not one of this machine.
    """
    loop, ended, collector = (
        asyncio.get_running_loop(),
        asyncio.Event(),
        Collector(locate, is_read_only=is_read_only),
    )
    pidfd = os.pidfd_open(until) if until else None
    if pidfd is not None:
        loop.add_reader(pidfd, ended.set)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with listening(collector, host, port) as url:
        collecting = asyncio.create_task(collector.run())
        collecting.add_done_callback(lambda _: ended.set())
        try:
            on_ready(url)
            await ended.wait()
        finally:
            collecting.cancel()
            with suppress(asyncio.CancelledError):
                await collecting
