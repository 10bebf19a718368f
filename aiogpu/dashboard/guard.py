"""Decides which requests the dashboard answers, for HTTP and WebSocket alike.

A visitor shows the token of the printed URL once and gets a cookie. A page of another
site has neither, and cannot obtain them: its `Origin` differs, and a name that it makes
resolve to this machine is refused as `Host`.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from secrets import compare_digest, token_urlsafe
from typing import Final, NamedTuple
from urllib.parse import urlsplit

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
"""Names of this machine in a `Host` header; no other machine answers to them."""
COOKIE: Final = "aiogpu-dashboard"
"""Beginning of the cookie's name. The port follows, because a browser sends a cookie to
all ports of a host."""


Headers = Mapping[str, str]
"""The headers of a request; names are found in any case."""


class Verdict(NamedTuple):
    """The decision about a request.

    Attributes:
        status: the HTTP status: 200 to answer the request.
        reason: why it is refused, for the visitor; "" if it is not.
        is_login: the request shows the token and is to get the cookie.
    """

    status: int
    reason: str = ""
    is_login: bool = False


class Guard:
    """The token and the cookie of one dashboard, and the names by which it is reached.

    Attributes:
        token: the secret in the printed URL.
        cookie: the value of the cookie, another secret.
        port: the port of the server; set when it listens.
    """

    def __init__(self, host: str) -> None:
        """Make new secrets.

        Args:
            host: the address on which the server listens.
        """
        self.token = token_urlsafe(24)
        self.cookie = token_urlsafe(24)
        self.port = 0
        self._is_open = not is_loopback(host)
        self._names = {*LOOPBACK, host}
        if self._is_open:
            self._names |= {socket.gethostname(), socket.getfqdn()}

    def __repr__(self) -> str:
        return f"<Guard of port {self.port}>"

    @property
    def cookie_name(self) -> str:
        """The name of the cookie."""
        return f"{COOKIE}-{self.port}"

    def judge(self, headers: Headers, token: str, *, is_socket: bool) -> Verdict:
        """Decide about a request.

        Args:
            headers: the headers of the request.
            token: the token in its URL; "" without one.
            is_socket: it asks for a WebSocket.
        """
        host, origin = headers.get("Host", ""), headers.get("Origin", "")
        if not self._is_own(host):
            return Verdict(403, f"This dashboard is not served under the name {host}.")
        if origin and origin != f"http://{host}":
            return Verdict(403, f"Pages of {origin} cannot use this dashboard.")
        if is_socket and not origin:
            return Verdict(403, "A WebSocket needs the header Origin.")
        if token and not is_socket:
            if compare_digest(token.encode(), self.token.encode()):
                return Verdict(200, is_login=True)
            return Verdict(403, "The token in this address is wrong.")
        if compare_digest(self._shown(headers).encode(), self.cookie.encode()):
            return Verdict(200)
        return Verdict(
            403, "Open the address that `aiogpu dashboard` has printed, with its token."
        )

    def _is_own(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name, port = parts.hostname or "", parts.port or 80
        except ValueError:
            return False
        if port != self.port:
            return False
        return name in self._names or (self._is_open and _is_address(name))

    def _shown(self, headers: Headers) -> str:
        """Return the cookie of a request; "" without one."""
        try:
            shown = SimpleCookie(headers.get("Cookie", "")).get(self.cookie_name)
        except CookieError:
            return ""
        return "" if shown is None else shown.value


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    """Return whether a name is a numeric address, which no name server can change."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
