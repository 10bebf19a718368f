"""What is told of a Ray cluster, from what it says of itself."""

from __future__ import annotations

import pytest

from aiogpu.core.model.request import Request
from aiogpu.core.model.units import UNIT

pytest.importorskip("ray", reason="Ray is not installed here")
from aiogpu.engines.ray.cluster import ClusterNode, names_node_types
from aiogpu.engines.ray.options import amounts
from aiogpu.engines.ray.status import (
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


def test_a_request_is_for_one_node():
    nodes = [node("a", CPU=2, GPU=2), node("b", CPU=8, GPU=2)]
    assert fits(nodes, amounts(GPU_1))
    assert not fits(nodes, amounts(GPU_4))
    assert room(nodes, amounts(GPU_1)) == 4
    assert describe_shortage(nodes, amounts(GPU_4)) == "each lacks GPU 4 of 2 at most"
    assert describe_shortage([], amounts(GPU_4)) == "it has no nodes"


def test_what_is_there_but_not_together_is_told_so():
    nodes = [node("a", CPU=8), node("b", CPU=1, GPU=4)]
    both = Request.of({"CPU": 4 * UNIT}, {"GPU": UNIT})
    assert describe_shortage(nodes, amounts(both)) == "none has all of it at once"


def test_a_name_that_is_near_is_hinted_at():
    nodes = [node("a", CPU=8, license=1)]
    asked = amounts(Request.of({"licence": UNIT}, {}))
    assert (
        describe_shortage(nodes, asked)
        == "each lacks licence 1 of 0 (did you mean 'license'?)"
    )


def test_nodes_alike_are_counted():
    nodes = [node("a", CPU=2, memory=5.0), node("b", CPU=2, memory=6.0), node("c")]
    assert describe_nodes(nodes, {}) == "2 x {CPU: 2}, 1 x {}"
    many = [node("a", CPU=number) for number in range(10)]
    assert describe_nodes(many, {}).endswith(", 2 kinds more")


def test_what_ray_keeps_for_itself_is_left_out():
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
def test_types_of_nodes_that_may_come(told, grows):
    assert names_node_types(told) is grows
