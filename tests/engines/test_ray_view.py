"""What is told of a Ray cluster, from what it says of itself; needs no Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aiogpu.core.model.request import Request
from aiogpu.core.model.units import UNIT

pytest.importorskip("ray", reason="Ray is not installed here")
from aiogpu.engines.ray.ray_api import Node, Survey, has_types, survey_of
from aiogpu.engines.ray.status import (
    amounts,
    at_once,
    fits_one,
    kinds,
    lacking,
    status_of,
    told,
    why,
)

pytestmark = pytest.mark.ray

GPU_1 = Request.of({"CPU": UNIT}, {"GPU": UNIT})
GPU_4 = Request.of({"CPU": UNIT}, {"GPU": 4 * UNIT})


def node(name: str, free: dict[str, float] | None = None, **total: float) -> Node:
    return Node(name * 6, f"host-{name}", total, total if free is None else free, {})


def survey(*nodes: Node, demands: Any = (), **more: Any) -> Survey:
    rest: dict[str, Any] = {"coming": (), "failed": (), "grows": False, **more}
    return Survey(nodes, demands, **rest)


def call(request: Request | None = GPU_1, name: str = "train", **more: Any) -> Any:
    known: dict[str, Any] = {"refs": (object(),), "stop": None, "actor": 0}
    rest = {"since": 1.0, **known, **more}
    return SimpleNamespace(name=name, request=request, **rest)


def test_a_request_is_for_one_node():
    nodes = [node("a", CPU=2, GPU=2), node("b", CPU=8, GPU=2)]
    assert fits_one(nodes, amounts(GPU_1))
    assert not fits_one(nodes, amounts(GPU_4))
    assert at_once(nodes, amounts(GPU_1)) == 4
    assert lacking(nodes, amounts(GPU_4)) == "each lacks GPU 4 of 2 at most"
    assert lacking([], amounts(GPU_4)) == "it has no nodes"


def test_what_is_there_but_not_together_is_told_so():
    nodes = [node("a", CPU=8), node("b", CPU=1, GPU=4)]
    both = Request.of({"CPU": 4 * UNIT}, {"GPU": UNIT})
    assert lacking(nodes, amounts(both)) == "none has all of it at once"


def test_a_name_that_is_near_is_hinted_at():
    nodes = [node("a", CPU=8, license=1)]
    asked = amounts(Request.of({"licence": UNIT}, {}))
    assert (
        lacking(nodes, asked) == "each lacks licence 1 of 0 (did you mean 'license'?)"
    )


def test_nodes_alike_are_counted():
    nodes = [node("a", CPU=2, memory=5.0), node("b", CPU=2, memory=6.0), node("c")]
    assert kinds(nodes, {}) == "2 x {CPU: 2}, 1 x {}"
    many = [node("a", CPU=number) for number in range(10)]
    assert kinds(many, {}).endswith(", 2 kinds more")


def test_what_ray_keeps_for_itself_is_left_out():
    own = {"node:10.0.0.1": 1.0, "object_store_memory": 5.0, "CPU_group_0_ab": 1.0}
    assert told({**own, "CPU": 2.0}) == {"CPU": 2.0}


def test_a_call_like_which_some_have_no_place_says_how_many_and_what_there_is():
    demands = [({"CPU": 1.0, "GPU": 1.0}, 2), ({"x": 1.0}, 5)]
    told = why(4, call(), survey(node("a", CPU=2, GPU=1), demands=demands), 3.0)
    assert (told.state, told.request["GPU"]) == ("sent", 1.0)
    assert "of all programs: 2 tasks alike" in str(told)
    assert "the cluster has 1 x {CPU: 2, GPU: 1}" in str(told)


def test_a_call_of_which_nothing_waits_was_sent():
    told = why(4, call(), survey(node("a", CPU=2, GPU=1)), 3.0)
    assert (told.state, told.notes) == ("sent", ())
    bare = why(4, call(None), survey(), 3.0)
    assert (bare.state, bare.request) == ("sent", {})


def test_a_stream_that_waits_for_its_consumer_says_so():
    for request in (GPU_4, None):
        held = call(request)
        held.stop = type("Held", (), {"is_held": True, "__call__": lambda _: None})()
        told = why(4, held, survey(), 3.0)
        assert told.state == "sent"
        assert "waits for its consumer" in str(told)


def test_a_call_that_is_not_sent_yet_waits_for_its_arguments():
    told = why(4, call(refs=()), survey(), 3.0)
    assert told.state == "expecting"
    assert "calls that are still to be sent" in str(told)


def test_nodes_that_may_come_are_told():
    waits = {"demands": [({"CPU": 1.0, "GPU": 4.0}, 1)]}
    alone = node("a", CPU=2)
    plain = str(why(4, call(GPU_4), survey(alone, **waits), 3.0))
    assert "1 task alike" in plain
    assert "autoscaler" not in plain
    grows = str(why(4, call(GPU_4), survey(alone, grows=True, **waits), 3.0))
    assert "the cluster has an autoscaler" in grows
    comes = survey(alone, grows=True, coming=["1 x gpu"], failed=["gpu: no"], **waits)
    told = str(why(4, call(GPU_4), comes, 3.0))
    assert "nodes that come: 1 x gpu" in told
    assert "nodes that could not be started: gpu: no" in told


def test_the_picture_shows_devices_calls_and_what_waits():
    nodes = [
        node("a", {"CPU": 1.0, "GPU": 1.5}, CPU=2, GPU=3, **{"accelerator_type:T4": 1}),
        node("b", CPU=4, GPU=1)._replace(labels={"ray.io/accelerator-type": "H100"}),
    ]
    seen = survey(*nodes, demands=[({"CPU": 1.0, "GPU": 1.0}, 3), ({"x": 1.0}, 1)])
    live: Any = {7: call(), 8: call(None, "load"), 9: call(refs=())}
    status = status_of(seen, SimpleNamespace(live=live), 3.0)  # type: ignore[arg-type]
    assert status.total["GPU"] == 4.0
    assert status.available["GPU"] == 2.5
    assert [(one.id, one.type, one.free) for one in status.devices] == [
        ("host-a/aaaaaa:0", "T4", 1.0),
        ("host-a/aaaaaa:1", "T4", 0.5),
        ("host-a/aaaaaa:2", "T4", 0.0),
        ("host-b/bbbbbb:0", "H100", 1.0),
    ]
    assert [task.state for task in status.tasks] == ["sent", "sent", "expecting"]
    assert status.waiting_count == 4
    assert [shape.first for shape in status.shapes] == ["train", "others"]
    assert "not of which, nor to whom" in str(status)


def test_a_status_of_rays_is_read():
    def seen(name: str) -> Any:
        return SimpleNamespace(
            node_id=name * 6, available_resources=lambda: {"CPU": 1.0}
        )

    demand = SimpleNamespace(
        bundles_by_count=[SimpleNamespace(bundle={"CPU": 4.0}, count=2)]
    )
    coming = SimpleNamespace(ray_node_type_name="gpu", count=2, details="no quota")
    status = SimpleNamespace(
        active_nodes=[seen("a")],
        idle_nodes=[seen("z")],
        pending_launches=[coming],
        pending_nodes=[coming],
        failed_launches=[coming],
        resource_demands=SimpleNamespace(ray_task_actor_demand=[demand]),
    )
    found = survey_of(status, [node("a", CPU=2), node("b", CPU=2)], True)
    assert [one.free for one in found.nodes] == [{"CPU": 1.0}]
    assert found.demands == [({"CPU": 4.0}, 2)]
    assert found.coming == ["2 x gpu", "gpu"]
    assert found.failed == ["gpu: no quota"]
    assert found.grows


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
    assert has_types(told) is grows
