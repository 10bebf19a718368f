"""`aiogpu dashboard` as a process, and its collector on nodes that come and go."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress

import httpx
import pytest

pytest.importorskip("bokeh", reason="the dashboard needs Bokeh")

from aiogpu.dashboard.collector import Collector
from aiogpu.errors import NodeError
from tests.cli.sandbox import LIMIT, Sandbox
from tests.cli.test_embedded_nodes import program
from tests.support.waits import until


def test_the_command_serves_until_ctrl_c(sandbox: Sandbox) -> None:
    with program(sandbox, "train.py") as node:
        command = sandbox.start("dashboard", "--pid", str(node.pid), "--no-browser")
        try:
            assert command.stdout is not None
            word, url = command.stdout.readline().split()
            assert word == "Dashboard:"
            assert url.startswith("http://127.0.0.1:")
            with httpx.Client(trust_env=False) as client:
                assert client.get(url.partition("?")[0]).status_code == 403
                assert client.get(url).status_code == 200
                assert client.get(url.partition("?")[0]).status_code == 200
                port = str(httpx.URL(url).port)
                taken = sandbox.run(
                    *("dashboard", "--pid", str(node.pid), "--port", port), code=1
                )[1]
                assert f"cannot listen on 127.0.0.1, port {port}" in taken
        finally:
            command.send_signal(signal.SIGINT)
            _, err = command.communicate(timeout=LIMIT)
        assert (command.returncode, err) == (0, "")


def test_the_command_needs_a_node(sandbox: Sandbox) -> None:
    _, err = sandbox.run("dashboard", "--no-browser", code=1)
    assert "no node runs" in err


async def test_the_collector_follows_a_node_and_its_successor(sandbox: Sandbox) -> None:
    def start() -> None:
        sandbox.run("start", "--head", "--num-cpus=2", "--num-gpus=1")

    await asyncio.to_thread(start)
    collector = Collector(lambda: sandbox.place.socket)
    collecting = asyncio.create_task(collector.run())
    try:
        await until(lambda: collector.status)
        assert collector.problem == ""
        await asyncio.to_thread(sandbox.run, "stop")
        await until(lambda: collector.problem)
        seen = collector.count
        await asyncio.to_thread(start)
        await until(lambda: collector.count > seen)
        assert collector.problem == ""
        assert collector.status is not None
        assert collector.status.total["GPU"] == 1.0
    finally:
        collecting.cancel()
        with suppress(asyncio.CancelledError):
            await collecting


async def test_the_collector_says_that_there_is_no_node() -> None:
    def locate() -> str:
        raise NodeError("there is none")

    collector = Collector(locate)
    collecting = asyncio.create_task(collector.run())
    await until(lambda: collector.problem == "there is none")
    collecting.cancel()
    with suppress(asyncio.CancelledError):
        await collecting
    assert collector.status is None
