"""What the dashboard answers, and to whom: without a browser, over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from html import unescape
from urllib.parse import urlsplit

import httpx
import pytest

pytest.importorskip("bokeh", reason="the dashboard needs Bokeh")

from bokeh.util.token import get_token_payload
from tornado.httpclient import HTTPClientError, HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from aiogpu.dashboard.collector import HOUR, Collector, Sample
from aiogpu.dashboard.guard import Guard, is_loopback
from aiogpu.dashboard.server import SCRIPTS, listening
from aiogpu.observe.overview import overview
from aiogpu.observe.status import EndedTask
from aiogpu.observe.why import Why
from tests.cli.status_examples import BUSY, IDLE

EVIL = "<img src=x onerror=alert(1)>\x1b[2J"


def nowhere() -> str:
    raise AssertionError("this collector is given its statuses")


@asynccontextmanager
async def dashboard(host: str = "127.0.0.1") -> AsyncIterator[tuple[str, str]]:
    """A dashboard of a busy node; its origin, and the path with the token."""
    collector = Collector(nowhere)
    collector.take(BUSY, time.time())
    async with listening(collector, host, 0) as url:
        parts = urlsplit(url)
        yield f"http://{parts.netloc}", f"/?{parts.query}"


@asynccontextmanager
async def visitor(origin: str, token: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """A client; with a token, it has logged in."""
    async with httpx.AsyncClient(base_url=origin, trust_env=False) as client:
        if token:
            assert (await client.get(token)).status_code == 200
        yield client


async def test_the_token_gives_a_cookie_that_scripts_and_other_sites_cannot_use() -> (
    None
):
    async with dashboard() as (origin, token), visitor(origin) as client:
        answer = await client.get(token)
        assert answer.status_code == 200
        name, *attributes = answer.headers["Set-Cookie"].split("; ")
        assert name.startswith(f"aiogpu-dashboard-{urlsplit(origin).port}=")
        assert set(attributes) == {"HttpOnly", "Path=/", "SameSite=Strict"}
        assert token.partition("=")[2] not in answer.text + name
        page = await client.get("/")
        assert page.status_code == 200
        assert "bokeh.min.js" in page.text


@pytest.mark.parametrize(
    "path", ["/", "/ws", "/metadata", "/static/js/bokeh.min.js", "/timeline.json"]
)
@pytest.mark.parametrize("query", ["", "?token=", "?token=wrong", "?token=%ff"])
async def test_without_the_token_nothing_is_served(path: str, query: str) -> None:
    async with dashboard() as (origin, _), visitor(origin) as client:
        answer = await client.get(path + query)
        assert answer.status_code == 403
        assert "Set-Cookie" not in answer.headers
        assert "token" in answer.text or "Origin" in answer.text


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example", "10.0.0.7"])
async def test_a_foreign_host_is_refused_even_with_token_and_cookie(name: str) -> None:
    async with dashboard() as (origin, token), visitor(origin, token) as client:
        port = urlsplit(origin).port
        for path in ("/", token, "/static/js/bokeh.min.js"):
            answer = await client.get(path, headers={"Host": f"{name}:{port}"})
            assert answer.status_code == 403
            assert name in answer.text
        other_port = await client.get("/", headers={"Host": "127.0.0.1:1"})
        assert other_port.status_code == 403


@pytest.mark.parametrize(
    "foreign", ["http://evil.example", "null", "https://127.0.0.1"]
)
async def test_a_foreign_origin_is_refused(foreign: str) -> None:
    async with dashboard() as (origin, token), visitor(origin, token) as client:
        assert (await client.get("/", headers={"Origin": foreign})).status_code == 403
        assert (await client.get("/", headers={"Origin": origin})).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD"])
async def test_the_dashboard_can_only_be_read(method: str) -> None:
    async with dashboard() as (origin, token), visitor(origin, token) as client:
        answer = await client.request(method, "/")
        assert answer.status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        "/static/js/../../../server.py",
        "/static/%2e%2e/%2e%2e/server.py",
        "/static//etc/passwd",
        "/static/js/bokeh.js",
        "/static/extensions/x/package.json",
        "/metadata",
        "/autoload.js",
        "/favicon.ico",
        "/etc/passwd",
    ],
)
async def test_no_path_reaches_a_file_or_an_unlisted_handler(path: str) -> None:
    async with dashboard() as (origin, token), visitor(origin, token) as client:
        cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
        host, port = urlsplit(origin).hostname, urlsplit(origin).port
        reader, writer = await asyncio.open_connection(
            host, port
        )  # as it is, with ".."
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nCookie: {cookie}\r\n"
            f"Connection: close\r\n\r\n".encode()
        )
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        assert answer.startswith("HTTP/1.1 404"), answer


async def test_the_scripts_of_the_page_come_from_here_and_need_its_number() -> None:
    async with dashboard() as (origin, token), visitor(origin, token) as client:
        first, second = await client.get("/"), await client.get("/")
        policy = first.headers["Content-Security-Policy"]
        assert policy != second.headers["Content-Security-Policy"]
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert rules["default-src"] == rules["frame-ancestors"] == "'none'"
        nonce = re.fullmatch(r"'self' 'nonce-([\w-]+)'", rules["script-src"])
        assert nonce is not None, rules
        scripts = re.findall(r"<script[^>]*>", first.text)
        assert len(scripts) >= 4
        assert all(f'nonce="{nonce[1]}"' in script for script in scripts)
        sources = re.findall(r'(?:src|href)="([^"]*)"', first.text)
        assert all(re.match(r"/(?!/)|data:,$", src) for src in sources), sources
        for script in SCRIPTS:
            answer = await client.get(f"/static/{script}")
            assert answer.status_code == 200
            assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_the_page_does_not_tell_its_scripts_the_cookie() -> None:
    async with dashboard() as (origin, token), visitor(origin, token) as client:
        page = await client.get("/")
        secrets = [value for value in client.cookies.values() if len(value) > 20]
        assert secrets
        payload = str(get_token_payload(session_token(page.text)))
        assert all(secret not in page.text + payload for secret in secrets)


def session_token(page: str) -> str:
    """The token of Bokeh's session in a page; it holds what the page includes."""
    token = re.search(r'"token":"([^"]+)"', page)
    assert token is not None, page
    return token[1]


async def connect(origin: str, page: str, **headers: str) -> WebSocketClientConnection:
    request = HTTPRequest(f"{origin.replace('http', 'ws')}/ws", headers=headers)
    return await websocket_connect(request, subprotocols=["bokeh", session_token(page)])


async def test_a_websocket_needs_cookie_origin_and_host() -> None:
    async with dashboard() as (origin, token), visitor(origin, token) as client:
        page = (await client.get("/")).text
        cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
        own = {"Cookie": cookie, "Origin": origin}
        foreign_host = f"evil.example:{urlsplit(origin).port}"
        for refused in (
            {"Origin": origin},
            {"Cookie": cookie},
            {"Cookie": cookie, "Origin": "http://evil.example"},
            {**own, "Host": foreign_host},
            {
                "Cookie": cookie,
                "Host": foreign_host,
                "Origin": f"http://{foreign_host}",
            },
        ):
            with pytest.raises(HTTPClientError, match="403"):
                await connect(origin, page, **refused)
        socket = await connect(origin, page, **own)
        received = await socket.read_message()
        assert received is not None
        assert '"msgtype":"ACK"' in str(received).replace(" ", "")
        socket.close()
        while await socket.read_message() is not None:
            pass


async def test_names_and_messages_are_text() -> None:
    failure = EndedTask(7, EVIL, EVIL, EVIL, 1.0)
    status = replace(
        BUSY,
        failures=(failure,),
        tasks=tuple(replace(task, name=EVIL) for task in BUSY.tasks),
        shapes=tuple(replace(s, first=EVIL, reason=EVIL) for s in BUSY.shapes),
        clients=tuple(replace(client, name=EVIL) for client in BUSY.clients),
        devices=tuple(
            replace(
                device,
                name=EVIL,
                aside=device.aside and EVIL,
                holders=tuple(replace(holder, task=EVIL) for holder in device.holders),
                others=tuple(replace(o, name=EVIL) for o in device.others or ()),
            )
            for device in BUSY.devices
        ),
    )
    shown = overview(status, age=0.0, problem=EVIL, throughput=None)
    assert "<img" not in shown
    assert "\x1b" not in shown
    assert shown.count("&lt;img src=x onerror=alert(1)&gt;\\x1b[2J") > 12


def test_the_overview_answers_who_holds_what_why_tasks_wait_and_what_failed() -> None:
    shown = overview(BUSY, age=0.0, problem="", throughput=2.0)
    words = " ".join(unescape(re.sub(r"<[^>]*>", " ", shown)).split())
    assert (
        "GPU 0 NVIDIA A100-SXM4-40GB 0.75 of 1 held · 87 % busy · 63 °C 286 W" in words
    )
    assert "train.py (pid 4711) train 0.25 7GiB used, 6GiB reserved 12 s" in words
    assert "Not of this node: Xorg (pid 13) with 2GiB." in words
    assert "Set aside: XID 79" in words
    assert (
        "3 train the node's own program {CPU: 1, GPU: 1} 75 s waits for GPU 1" in words
    )
    assert "75 s ago 5 train train.py (pid 4711) ValueError no such key" in words
    assert "2 tasks/s" in words


def test_the_overview_says_that_it_is_old() -> None:
    shown = overview(BUSY, age=90.0, problem="", throughput=None)
    assert "The node has not answered for 90 s. What follows is 90 s old." in shown
    assert overview(None, age=0.0, problem="no node", throughput=None).count("<") == 2


def test_the_hour_is_bounded_and_its_rates_survive_a_restart() -> None:
    collector = Collector(nowhere)
    for second in range(HOUR + 60):
        status = replace(IDLE, outcomes={"finished": 3 * second})
        collector.take(status, 1000.0 + second)
    assert len(collector.samples) == HOUR
    assert collector.samples[0] == Sample(1060.0, 0, 0, 180, {})
    assert collector.throughput() == pytest.approx(3.0)
    collector.take(replace(IDLE, outcomes={"finished": 1}), 1000.0 + HOUR + 60)
    assert collector.throughput() is None


@pytest.mark.parametrize(
    ("host", "is_own"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)],
)
def test_only_this_machine_reaches_a_loopback_address(host: str, is_own: bool) -> None:
    assert is_loopback(host) is is_own
    guard = Guard(host)
    guard.port = 80
    cookie = {"Cookie": f"{guard.cookie_name}={guard.cookie}"}
    by_address = guard.judge({"Host": "192.0.2.1", **cookie}, "", is_socket=False)
    by_name = guard.judge({"Host": "evil.example", **cookie}, "", is_socket=False)
    assert (by_address.status, by_name.status) == (403 if is_own else 200, 403)


PAGES = ["/devices", "/timeline", "/tasks", "/actors", "/logs", "/task?id=7"]


@pytest.mark.parametrize("path", PAGES)
async def test_every_page_has_a_policy_and_needs_the_cookie(path: str) -> None:
    async with dashboard() as (origin, token), visitor(origin) as client:
        assert (await client.get(path)).status_code == 403
        await client.get(token)
        page = await client.get(path)
        assert page.status_code == 200
        assert "script-src 'self' 'nonce-" in page.headers["Content-Security-Policy"]


class Stoppable(Collector):
    """A collector that notes what it is to stop."""

    def __init__(self) -> None:
        super().__init__(nowhere)
        self.stopped: list[int] = []
        self.take(BUSY, time.time())

    async def why(self, task: int) -> Why | None:
        return Why("train", task, "running", worker=2, pid=102)

    async def failed_calls(self, actor: int) -> tuple[EndedTask, ...]:
        return ()

    async def stop(self, what: str, number: int) -> str:
        self.stopped.append(number)
        return "Stopped."


async def test_no_request_and_no_foreign_page_stops_anything() -> None:
    collector, evil = Stoppable(), "http://evil.example"
    async with listening(collector, "127.0.0.1", 0) as url:
        origin = f"http://{urlsplit(url).netloc}"
        async with visitor(origin, f"/?{urlsplit(url).query}") as client:
            cookie = "; ".join(f"{k}={v}" for k, v in client.cookies.items())
            page = (await client.get("/task?id=7&stop=1&confirm=yes")).text
            for method in ("POST", "PUT", "DELETE"):
                for headers, code in (({}, 405), ({"Origin": evil}, 403)):
                    for path in ("/task?id=7", "/stop?id=7", "/cancel"):
                        answer = await client.request(method, path, headers=headers)
                        assert answer.status_code in (code, 404), path
            # Buttons are pressed over the WebSocket, which needs all three.
            for headers in (
                {"Cookie": cookie, "Origin": evil},
                {"Cookie": cookie, "Origin": "null"},
                {"Origin": origin},
                {"Cookie": cookie},
            ):
                with pytest.raises(HTTPClientError, match="403"):
                    await connect(f"{origin}/task", page, **headers)
    assert collector.stopped == []


async def test_a_read_only_page_gives_a_browser_no_button_to_press() -> None:
    for is_read_only in (False, True):
        collector = Stoppable()
        collector.is_read_only = is_read_only
        async with listening(collector, "127.0.0.1", 0) as url:
            origin = f"http://{urlsplit(url).netloc}"
            async with visitor(origin, f"/?{urlsplit(url).query}") as client:
                page = (await client.get("/task?id=7")).text
                cookie = "; ".join(f"{k}={v}" for k, v in client.cookies.items())
                socket = await connect(
                    f"{origin}/task", page, Cookie=cookie, Origin=origin
                )
                await socket.read_message()
                header = {"msgid": "1", "msgtype": "PULL-DOC-REQ"}
                for part in (json.dumps(header), "{}", "{}"):
                    await socket.write_message(part)
                answer = ""
                while '"Div"' not in answer:
                    answer = str(await socket.read_message())
                assert ('"Button"' in answer) is not is_read_only
                socket.close()
                while await socket.read_message() is not None:
                    pass
