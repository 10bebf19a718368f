"""What a task on Ray knows of the cluster, and that no event loop waits for it."""

from __future__ import annotations

import threading

import pytest

from aiogpu.core.model.request import Request
from aiogpu.core.model.units import UNIT
from aiogpu.errors import InfeasibleError

pytest.importorskip("ray", reason="Ray is not installed here")
from aiogpu.engines.ray import status as module
from aiogpu.engines.ray.cluster import ClusterNode
from aiogpu.engines.ray.status import Overview

pytestmark = pytest.mark.ray

ONE = ClusterNode("a" * 6, {"CPU": 2.0})
WIDE = Request.of({"CPU": 8 * UNIT}, {})


class Cluster:
    """Answers when it is let; says how often it was asked."""

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


async def test_a_coroutine_does_not_wait_for_it(cluster: Cluster) -> None:
    """Ray has it wait for a node."""
    overview = Overview()
    overview.check_request("f", WIDE)
    assert overview.room_for(WIDE) is None
    assert cluster.asked == 0


def test_plain_code_waits_and_is_refused(cluster: Cluster) -> None:
    cluster.may_answer.set()
    overview = Overview()
    with pytest.raises(InfeasibleError, match="which no node of this Ray cluster"):
        overview.check_request("f", WIDE)


def test_plain_code_waits_no_longer_than_it_may(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TASK_LIMIT", 0.01)
    overview = Overview()
    overview.check_request("f", WIDE)
    cluster.may_answer.set()
