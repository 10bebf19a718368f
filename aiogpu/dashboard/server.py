"""Serves the dashboard by Bokeh: one document for each tab, fed from one collector.

`GuardedTornado` asks the guard about every request, before any handler sees it, and
serves three things: the pages, their WebSockets, and the scripts of `SCRIPTS`. No other
path of Bokeh's server is reachable, and none names a file.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, cast

from bokeh.core.templates import FILE
from bokeh.document import Document
from bokeh.embed.server import server_html_page_for_session
from bokeh.models import ColumnDataSource, DataRange1d, InlineStyleSheet
from bokeh.models.annotations import Title
from bokeh.models.widgets.markups import Div
from bokeh.plotting import figure
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

from aiogpu.dashboard.collector import Collector, Sample
from aiogpu.dashboard.guard import Guard, Verdict
from aiogpu.dashboard.overview import STYLE, overview

PERIOD: Final = 1000
"""Milliseconds between two updates of a tab."""
UNUSED: Final = 15_000
"""Milliseconds after which the document of a closed tab is dropped."""
LARGEST: Final = 1 << 20
"""Bytes of a message of a browser."""
SCRIPTS: Final = ("js/bokeh.min.js", "js/bokeh-widgets.min.js")
"""The files of Bokeh that a page needs."""
SCHEME: Final = "aiogpu-scheme"
"""Cookie with the colour scheme of the browser: a canvas cannot ask the style sheet."""
POLICY: Final = (
    "default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; "
    "connect-src 'self' ws://{host}; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The content-security policy. Bokeh puts style sheets into its widgets, which needs
'unsafe-inline' for styles; scripts need a number that is new for each page."""
HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
TEMPLATE: Final = """\
{% from macros import embed %}{% extends base %}
{% block preamble %}
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<script>
  const dark = matchMedia("(prefers-color-scheme: dark)")
  const note = () => {
    const wanted = "SCHEME=" + (dark.matches ? "dark" : "light")
    if (document.cookie.split("; ").includes(wanted)) return
    document.cookie = wanted + "; SameSite=Strict; Path=/"
    if (document.cookie.split("; ").includes(wanted)) location.reload()
  }
  note()
  dark.addEventListener("change", note)
</script>
{% endblock %}
{% block postamble %}<style>{{ style }}</style>{% endblock %}
{% block contents %}
<header><h1>aiogpu</h1><span>Overview</span></header>
<main>{% for doc in docs %}{% for root in doc.roots %}{{ embed(root) }}{% endfor %}
{% endfor %}</main>
{% endblock %}
""".replace("SCHEME", SCHEME)
TEMPLATE_OF_PAGE: Final = FILE.environment.from_string(TEMPLATE, {"base": FILE})
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


HANDLERS: Final[dict[type, type[RequestHandler]]] = {
    DocHandler: Page,
    WSHandler: Socket,
    StaticHandler: Script,
}
"""What is served in place of Bokeh's handlers; its other handlers are not."""


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


class Overview:
    """The overview, drawn once for each status and shared by all tabs."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._drawn: tuple[int, str, int] | None = None
        self._html = ""

    def html(self) -> str:
        """Return the page as it is now."""
        collector = self._collector
        age = time.time() - collector.seen if collector.seen else 0.0
        # Without news the page changes only by the age that it tells.
        state = collector.count, collector.problem, int(age)
        if state != self._drawn:
            self._drawn = state
            self._html = overview(
                collector.status,
                age=age,
                problem=collector.problem,
                throughput=collector.throughput(),
            )
        return self._html


def columns(samples: list[Sample]) -> dict[str, Any]:
    """Return samples as columns of a chart; times in milliseconds."""
    return {
        "time": [sample.time * 1000 for sample in samples],
        "running": [float(sample.running) for sample in samples],
        "waiting": [float(sample.waiting) for sample in samples],
    }


class Tab:
    """One open tab."""

    def __init__(
        self, page: Overview, collector: Collector, document: Document
    ) -> None:
        self._page = page
        self._collector = collector
        sheet = InlineStyleSheet(css=STYLE)
        self._text = Div(
            text=page.html(), stylesheets=[sheet], sizing_mode="stretch_width"
        )
        context: Any = document.session_context
        cookies = {} if context is None else context.request.cookies
        self._source = ColumnDataSource(columns(list(collector.samples)))
        self._count = collector.count
        chart = _chart(self._source, is_dark=cookies.get(SCHEME) == "dark")
        document.title = "aiogpu: overview"
        document.add_root(self._text)
        document.add_root(chart)
        document.template = TEMPLATE_OF_PAGE
        document.template_variables.update(style=STYLE)
        document.add_periodic_callback(self._update, PERIOD)

    def _update(self) -> None:
        if (text := self._page.html()) != self._text.text:
            self._text.text = text
        collector = self._collector
        new = min(collector.count - self._count, len(collector.samples))
        if new:
            samples = [collector.samples[-n] for n in range(new, 0, -1)]
            self._source.stream(columns(samples), rollover=collector.samples.maxlen)
            self._count = collector.count


def _chart(source: ColumnDataSource, *, is_dark: bool) -> Any:
    """Return the chart of running and waiting tasks in the last hour."""
    text, line = ("#e8eaed", "#3a4048") if is_dark else ("#1b1f24", "#cfd4da")
    chart = figure(
        title=Title(text="Tasks in the last hour", text_color=text),
        height=240,
        y_range=DataRange1d(start=0),
        sizing_mode="stretch_width",
        x_axis_type="datetime",
        x_axis_label="time (UTC)",
        y_axis_label="tasks",
        tools="xpan,xwheel_zoom,box_zoom,reset,hover",
        active_scroll=None,
        tooltips=[("running", "@running tasks"), ("waiting", "@waiting tasks")],
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=line,
    )
    blue, orange = ("#56b4e9", "#e69f00") if is_dark else ("#0072b2", "#b35900")
    for name, color, dash in (
        ("running", blue, "solid"),
        ("waiting", orange, "dashed"),
    ):
        chart.line(
            "time", name, source=source, legend_label=name, color=color,
            line_dash=dash, line_width=2,
        )  # fmt: skip
    for axis in chart.axis:
        axis.axis_label_text_color = axis.major_label_text_color = text
        axis.axis_line_color = axis.major_tick_line_color = line
        axis.minor_tick_line_color = None
    chart.grid.grid_line_color = line
    chart.legend.location = "top_left"
    chart.legend.background_fill_alpha = 0.0
    chart.legend.border_line_color = None
    chart.legend.label_text_color = text
    chart.toolbar.logo = None
    return chart


@asynccontextmanager
async def listening(collector: Collector, host: str, port: int) -> AsyncIterator[str]:
    """Serve the dashboard for the time of the block, and yield its URL.

    Raises:
        OSError: the port is taken, or the address is not one of this machine.
    """
    guard = Guard(host)
    application = GuardedTornado(
        guard,
        {"/": partial(Tab, Overview(collector), collector)},
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
    locate: Callable[[], str], host: str, port: int, on_ready: Callable[[str], None]
) -> None:
    """Serve the dashboard until SIGINT or SIGTERM.

    Args:
        locate: see `Collector`.
        host: the address to listen on.
        port: the port; 0 for any free port.
        on_ready: called with the URL, once the server listens.

    Raises:
        OSError: the port is taken, or the address is not one of this machine.
    """
    loop, ended, collector = (
        asyncio.get_running_loop(),
        asyncio.Event(),
        Collector(locate),
    )
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
