"""A node in numbers: what is told of it, to whom, and when it cannot be."""

from __future__ import annotations

import builtins
import socket
from typing import Any
from urllib.request import urlopen

import pytest

import aiogpu
from aiogpu.errors import NodeStartError
from aiogpu.observe.metrics import MetricsServer, Seen, amounts
from tests.support.gate import Gate, pass_gate


@aiogpu.remote(num_gpus=0.25)
def held(path: str) -> None:
    pass_gate(path, "held")


async def seen(gate: Gate) -> Seen:
    """A node on which one task runs and one waits."""
    async with aiogpu.init(address="local", num_cpus=1, num_gpus=1):
        handles = [held.remote(gate.path) for _ in range(2)]
        await gate.entered("held")
        status = await aiogpu.status()
        for handle in handles:
            handle.cancel()
    return Seen(status, {"finished": 7, "failed": 1})


async def test_what_is_told(gate: Gate) -> None:
    found = await seen(gate)
    told = {(one.name, *one.labels.values()): one.value for one in amounts(found)}
    assert told["aiogpu_resource_total", "GPU"] == 1
    assert told["aiogpu_resource_free", "GPU"] == 0.75
    assert told["aiogpu_tasks", "running"] == 1
    assert told["aiogpu_tasks_waiting",] == 1
    assert told["aiogpu_tasks_ended", "finished"] == 7
    assert told["aiogpu_device_free_share", "GPU", "0"] == 0.75
    assert told["aiogpu_device_aside", "GPU", "0"] == 0


async def test_it_is_fetched_on_this_machine_alone(gate: Gate) -> None:
    found = await seen(gate)
    server = MetricsServer(0, lambda: found)
    try:
        assert server._server.server_address[0] == "127.0.0.1"
        with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    assert 'aiogpu_resource_free{resource="GPU"} 0.75' in text
    assert 'aiogpu_tasks_ended_total{outcome="finished"} 7.0' in text
    assert "# TYPE aiogpu_tasks gauge" in text


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(NodeStartError, match=f"127.0.0.1:{port}.*--metrics"):
            MetricsServer(port, lambda: Seen(None, {}))  # type: ignore[arg-type]


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fail(name: str, *rest: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(NodeStartError, match=r"pip install 'aiogpu\[metrics\]'"):
        MetricsServer(0, lambda: Seen(None, {}))  # type: ignore[arg-type]
