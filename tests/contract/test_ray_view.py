"""Errors and status of Ray clusters, and of addresses without a cluster."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from aiogpu.core.model.request import Request
from aiogpu.core.model.units import UNIT
from aiogpu.errors import InfeasibleError, NodeError

pytest.importorskip("ray", reason="Ray is not installed here")
from aiogpu.engines.ray import cluster as ray_cluster
from aiogpu.engines.ray.cluster import (
    ClusterNode,
    check_reachable,
    host_and_port,
    names_node_types,
)
from aiogpu.engines.ray.resources import (
    Overview,
    amounts,
    describe_nodes,
    fits,
    public_resources,
    room,
    with_gpu_share,
)

pytestmark = pytest.mark.ray


GPU_1 = Request.of({"CPU": UNIT}, {"GPU": UNIT})
GPU_4 = Request.of({"CPU": UNIT}, {"GPU": 4 * UNIT})


def node(name: str, **total: float) -> ClusterNode:
    return ClusterNode(name * 6, total)


def test_a_request_must_fit_one_node():
    nodes = [node("a", CPU=2, GPU=2), node("b", CPU=8, GPU=2)]
    assert fits(nodes[1], amounts(GPU_1))
    assert not any(fits(each, amounts(GPU_4)) for each in nodes)
    assert room(nodes, amounts(GPU_1)) == 4


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
SMALL = Request.of({"CPU": UNIT}, {})


def test_a_task_asks_the_cluster_only_for_what_fits_no_known_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[None] = []

    def answer() -> tuple[list[ClusterNode], bool]:
        asked.append(None)
        return [ONE], False

    monkeypatch.setattr(ray_cluster, "nodes_and_growth", answer)
    overview = Overview(is_in_task=True)
    overview.check("f", SMALL)
    overview.check("f", SMALL)
    assert len(asked) == 1
    with pytest.raises(InfeasibleError, match="which no node of this Ray cluster"):
        overview.check("f", WIDE)
    assert len(asked) == 2


def test_a_program_never_asks_the_cluster_for_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> NoReturn:
        raise AssertionError

    monkeypatch.setattr(ray_cluster, "nodes_and_growth", refuse)
    with pytest.raises(InfeasibleError):
        Overview(is_in_task=False).check("f", WIDE)


def test_bundles_may_be_met_by_several_nodes():
    overview = Overview(is_in_task=False)
    overview.nodes = [node("a", CPU=4), node("b", CPU=4)]
    overview.check("f", WIDE, on_one_node=False)
    with pytest.raises(InfeasibleError, match="which no node of this Ray cluster"):
        overview.check("f", WIDE)
    del overview.nodes[0]
    with pytest.raises(InfeasibleError, match=r"which its nodes cannot.*1 x \{CPU: 4"):
        overview.check("f", WIDE, on_one_node=False)


def test_memory_is_a_share_of_a_gpu_whose_memory_is_known():
    asked = Request.of({"CPU": UNIT}, {}, gpu_memory=6 << 30)
    assert dict(with_gpu_share(asked, 24 << 30).devices) == {"GPU": UNIT // 4}
    third = with_gpu_share(asked, 18 << 30)
    assert dict(third.devices) == {"GPU": UNIT // 3 + 1}, "a share is rounded up"
    assert not third.gpu_memory
    assert with_gpu_share(asked, None) is asked
    with pytest.raises(InfeasibleError, match=r"gpu_memory=6442450944 bytes"):
        with_gpu_share(asked, 4 << 30)


async def test_a_head_is_reachable_if_it_accepts_connections():
    closed = asyncio.Event()

    async def keep_open(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await reader.read(-1)
        writer.close()
        await writer.wait_closed()
        closed.set()

    server = await asyncio.start_server(keep_open, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        await check_reachable(f"127.0.0.1:{port}", 10)
        await asyncio.wait_for(closed.wait(), 60)


async def test_an_address_without_a_server_is_named():
    with pytest.raises(NodeError, match=r"Errno 111.*--port=1`"):
        await check_reachable("127.0.0.1:1", 10)


@pytest.mark.parametrize("address", ["head", "head:", "head:many", ":6379"])
def test_an_address_names_host_and_port(address):
    assert host_and_port("head:6379") == ("head", 6379)
    assert host_and_port("[::1]:7") == ("::1", 7)
    with pytest.raises(NodeError, match=f"RAY_ADDRESS='{address}' names no host"):
        host_and_port(address)
