"""The HTTP server of a node's metrics: small, since any user of the machine reaches it.

A connection carries one request and has a thread of its own. The number of connections
is bounded, and so is the time in which a request must be read and its answer be sent.
"""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Event, Lock, Thread
from time import monotonic
from typing import Any, Final
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

ADDRESS: Final = "127.0.0.1"
"""Only this machine can read the metrics: they name what runs on it."""
HOSTS: Final = {ADDRESS, "localhost"}
"""Names in the header `Host`. Other names come from a web page whose name was made to
resolve to this machine, so that a browser lets the page read the metrics."""
MOST: Final = 16
"""Connections at a time. For one more, the oldest with an incomplete request is closed,
so that complete requests are answered even if thousands of others are never complete.
"""
PACE: Final = 2e-3
"""Seconds to wait for the end of a connection before another is closed. This bounds the
processor time that connections without a request cost: 500 of them a second."""
LIMIT: Final = 5.0
"""Seconds in which a request must be complete, and in which the client must read."""
BACKLOG: Final = 128
"""Connections that wait in the kernel."""
NO_DESCRIPTORS: Final = 0.1
"""Seconds before the next try to accept after an error, as without descriptors."""

_log: Final = logging.getLogger(__name__)
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class HttpServer(ThreadingMixIn, WSGIServer):
    """Serves an application on `ADDRESS` until closed."""

    request_queue_size = BACKLOG

    def __init__(self, port: int, application: Application) -> None:
        """Listen, and serve in a thread.

        Args:
            port: the port; 0 for any free port, see `server_port`.
            application: a WSGI application.

        Raises:
            OSError: the port is taken.
        """
        self._lock = Lock()
        self._slots = BoundedSemaphore(MOST)
        self._closed = Event()
        # Connections whose request is not complete, with the time of their begin.
        self._incomplete: dict[socket.socket, float] = {}
        super().__init__((ADDRESS, port), _Handler)
        self.set_app(_for_this_host(application))
        self._thread = Thread(
            target=self.serve_forever, name="aiogpu-metrics", daemon=True
        )
        self._thread.start()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection; see socketserver."""
        try:
            return super().get_request()
        except OSError:
            # The connection stays in the queue, so `serve_forever` would try for ever.
            self._closed.wait(NO_DESCRIPTORS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, when there is room; see socketserver."""
        if not self._slots.acquire(timeout=PACE):
            self._end_incomplete(oldest=1)
            self._slots.acquire()
        with self._lock:
            self._incomplete[request] = monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End connections that have taken too long; socketserver calls this often."""
        self._end_incomplete(before=monotonic() - LIMIT)

    def on_request(self, request: socket.socket) -> None:
        """Note that the request of a connection is complete."""
        with self._lock:
            self._incomplete.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; called once for each, see socketserver."""
        self.on_request(request)
        super().shutdown_request(request)
        self._slots.release()

    def handle_error(self, _request: Any, _client_address: Any) -> None:
        """Log an error, unless the client has gone or was too slow."""
        if not isinstance(sys.exception(), OSError):
            _log.exception("a request for metrics failed")

    def _end_incomplete(
        self, oldest: int | None = None, before: float = float("inf")
    ) -> None:
        """End reading from connections; their threads close them."""
        with self._lock:
            for request, begun in list(self._incomplete.items())[:oldest]:
                if begun < before:
                    with suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop serving; returns when all threads have ended."""
        self._closed.set()
        self.shutdown()
        self._thread.join()
        self._end_incomplete()
        self.server_close()


class _Handler(WSGIRequestHandler):
    """Serves one request."""

    timeout = LIMIT
    server: HttpServer

    def get_environ(self) -> dict[str, Any]:
        """See wsgiref, which calls this once the request is complete."""
        self.server.on_request(self.connection)
        return super().get_environ()

    def log_message(self, *_: object) -> None:
        """Do not log requests."""


def _for_this_host(application: Application) -> Application:
    """Wrap an application: refuse requests whose `Host` is another one's."""

    def checked(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST")
        if host is None or _name(host) in HOSTS:
            return application(environ, start)
        start("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"Host must be 127.0.0.1 or localhost, with any port.\n"]

    return checked


def _name(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
