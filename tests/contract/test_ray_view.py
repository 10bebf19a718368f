"""Errors and status of Ray clusters, and of addresses without a cluster."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from aiogpu.core.model.request import Request
from aiogpu.core.model.units import UNIT
from aiogpu.errors import InfeasibleError, NodeError

pytest.importorskip("ray", reason="Ray is not installed here")
from aiogpu.engines.ray import status as module
from aiogpu.engines.ray.cluster import (
    GREETING,
    ClusterNode,
    check_reachable,
    host_and_port,
    names_node_types,
)
from aiogpu.engines.ray.options import amounts
from aiogpu.engines.ray.status import (
    Overview,
    describe_nodes,
    describe_shortage,
    fits,
    public_resources,
    room,
)

pytestmark = pytest.mark.ray


GPU_1 = Request.of({"CPU": UNIT}, {"GPU": UNIT})
GPU_4 = Request.of({"CPU": UNIT}, {"GPU": 4 * UNIT})


def node(name: str, **total: float) -> ClusterNode:
    return ClusterNode(name * 6, total)


def test_a_request_must_fit_one_node():
    nodes = [node("a", CPU=2, GPU=2), node("b", CPU=8, GPU=2)]
    assert fits(nodes, amounts(GPU_1))
    assert not fits(nodes, amounts(GPU_4))
    assert room(nodes, amounts(GPU_1)) == 4
    assert describe_shortage(nodes, amounts(GPU_4)) == "each lacks GPU 4 of 2 at most"
    assert describe_shortage([], amounts(GPU_4)) == "it has no nodes"


def test_an_error_tells_that_no_single_node_fits():
    nodes = [node("a", CPU=8), node("b", CPU=1, GPU=4)]
    both = Request.of({"CPU": 4 * UNIT}, {"GPU": UNIT})
    assert describe_shortage(nodes, amounts(both)) == "none has all of it at once"


def test_an_error_suggests_a_similar_name():
    nodes = [node("a", CPU=8, license=1)]
    asked = amounts(Request.of({"licence": UNIT}, {}))
    assert (
        describe_shortage(nodes, asked)
        == "each lacks licence 1 of 0 (did you mean 'license'?)"
    )


def test_equal_nodes_are_counted():
    nodes = [node("a", CPU=2, memory=5.0), node("b", CPU=2, memory=6.0), node("c")]
    assert describe_nodes(nodes, {}) == "2 x {CPU: 2}, 1 x {}"
    many = [node("a", CPU=number) for number in range(10)]
    assert describe_nodes(many, {}).endswith(", 2 kinds more")


def test_resources_of_ray_itself_are_left_out():
    own = {"node:10.0.0.1": 1.0, "object_store_memory": 5.0, "CPU_group_0_ab": 1.0}
    assert public_resources({**own, "CPU": 2.0}) == {"CPU": 2.0}


@pytest.mark.parametrize(
    ("told", "grows"),
    [
        (None, False),
        (b"{}", False),
        (b'{"autoscaler_report": null}', False),
        (b'{"autoscaler_report": {"node_type_mapping": {"a": "node_a"}}}', False),
        (b'{"autoscaler_report": {"node_type_mapping": {"a": "gpu"}}}', True),
    ],
)
def test_node_types_of_an_autoscaler_are_known(told, grows):
    assert names_node_types(told) is grows


ONE = ClusterNode("a" * 6, {"CPU": 2.0})
WIDE = Request.of({"CPU": 8 * UNIT}, {})


class Cluster:
    """Answers when a test allows it; counts the questions."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = threading.Event()

    def __call__(self) -> tuple[list[ClusterNode], bool]:
        self.asked += 1
        assert self.may_answer.wait(60)
        return [ONE], False


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(module, "_nodes_and_growth", cluster)
    return cluster


async def test_a_coroutine_does_not_wait_for_the_cluster(cluster: Cluster) -> None:
    """Ray queues the coroutine's call until there is a node."""
    overview = Overview()
    overview.check_request("f", WIDE)
    assert overview.room_for(WIDE) is None
    assert cluster.asked == 0


def test_plain_code_waits_for_the_cluster_and_is_refused(cluster: Cluster) -> None:
    cluster.may_answer.set()
    overview = Overview()
    with pytest.raises(InfeasibleError, match="which no node of this Ray cluster"):
        overview.check_request("f", WIDE)


def test_plain_code_waits_for_a_limited_time(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TASK_LIMIT", 0.01)
    overview = Overview()
    overview.check_request("f", WIDE)
    cluster.may_answer.set()


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SETTINGS = bytes((0, 0, 0, 4)) + bytes(5)


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[int]:
    """Serve in this way; return the port."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def saying(said: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(len(GREETING)) == GREETING
        writer.write(said)
        writer.close()

    return serve


async def staying_silent(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await reader.read(-1)
    writer.close()


async def test_a_ray_server_answers():
    async with listening(saying(SETTINGS)) as port:
        await check_reachable(f"127.0.0.1:{port}", 10)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"", "is not Ray, and answers b''"),
        (b"SSH-2.0-OpenSSH", "is not Ray, and answers b'SSH-2.0-O'"),
        (b"no", "is not Ray, and answers b'no'"),
    ],
)
async def test_another_server_at_the_address_is_named(said, told):
    async with listening(saying(said)) as port:
        with pytest.raises(NodeError) as caught:
            await check_reachable(f"127.0.0.1:{port}", 10)
    assert told in str(caught.value)
    assert f"`ray start --head --port={port}`" in str(caught.value)


async def test_a_silent_server_is_given_up():
    async with listening(staying_silent) as port:
        with pytest.raises(NodeError, match=r"no answer within 0\.1 s"):
            await check_reachable(f"127.0.0.1:{port}", 0.1)


async def test_an_address_without_a_server_is_named():
    with pytest.raises(NodeError, match=r"Errno 111.*--port=1`"):
        await check_reachable("127.0.0.1:1", 10)


async def test_a_server_with_tls_is_left_to_ray(monkeypatch):
    monkeypatch.setenv("RAY_USE_TLS", "1")
    async with listening(staying_silent) as port:
        await check_reachable(f"127.0.0.1:{port}", 10)


@pytest.mark.parametrize("address", ["head", "head:", "head:many", ":6379"])
def test_an_address_names_host_and_port(address):
    assert host_and_port("head:6379") == ("head", 6379)
    assert host_and_port("[::1]:7") == ("::1", 7)
    with pytest.raises(NodeError, match=f"RAY_ADDRESS='{address}' names no host"):
        host_and_port(address)
