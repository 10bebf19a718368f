"""Ray's server for `ray://` is asked for a ping, within a time of ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from aiogpu.engines.cluster.ping import METHOD, PING, ping
from aiogpu.errors import NodeError

needs_grpc = pytest.mark.ray
"""It comes with Ray's client."""


@contextmanager
def serving(method: str, answer: Callable[[bytes, Any], bytes]) -> Iterator[int]:
    """The port of a server of gRPC that answers one method."""
    grpc = pytest.importorskip("grpc")
    _, service, name = method.split("/")
    handler = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {name: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(0)


@needs_grpc
def test_it_is_answered():
    asked = []

    def answer(request: bytes, context: Any) -> bytes:
        asked.append(request)
        return b""

    with serving(METHOD, answer) as port:
        assert ping("127.0.0.1", port, 10) == ("OK", "")
    assert asked == [PING]


@needs_grpc
def test_it_is_what_rays_client_sends():
    from ray.core.generated import ray_client_pb2

    request = ray_client_pb2.ClusterInfoRequest()
    request.type = ray_client_pb2.ClusterInfoType.PING
    assert request.SerializeToString() == PING


@needs_grpc
def test_who_does_not_know_it_says_so():
    with serving("/some.Other/Service", lambda request, context: b"") as port:
        assert ping("127.0.0.1", port, 10)[0] == "UNIMPLEMENTED"


@needs_grpc
def test_who_wants_a_token_says_so():
    grpc = pytest.importorskip("grpc")

    def refuse(request: bytes, context: Any) -> bytes:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        return b""

    with serving(METHOD, refuse) as port:
        assert ping("127.0.0.1", port, 10) == ("UNAUTHENTICATED", "no token")


@needs_grpc
def test_nobody_is_unavailable():
    assert ping("127.0.0.1", 1, 10)[0] == "UNAVAILABLE"
    assert ping("::1", 1, 10)[0] == "UNAVAILABLE"


def test_without_rays_client_it_is_told_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(NodeError, match=r"pip install 'aiogpu\[ray\]'"):
        ping("127.0.0.1", 1, 10)
