"""`init(dashboard=True)`: a process beside the program; and the view in a notebook."""

from __future__ import annotations

import asyncio
import html
import re
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import aiogpu
from aiogpu import errors, sync
from aiogpu.api import dashboard
from aiogpu.observe.overview import overview, without_links
from tests.cli.sandbox import LIMIT, Sandbox
from tests.cli.status_examples import BUSY
from tests.contract import tasks
from tests.contract.node_here import node_here
from tests.support.program import start
from tests.support.waits import until

pytest.importorskip("bokeh", reason="the dashboard needs Bokeh")

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.either_loop]
PROGRAM = """
    import asyncio
    import aiogpu

    async def main():
        async with aiogpu.init(num_cpus=1, num_gpus=1, dashboard=True) as node:
            print(node.dashboard_url, flush=True)
            await asyncio.Event().wait()

    asyncio.run(main())
"""


def page_of(url: str) -> str:
    with httpx.Client(trust_env=False) as client:
        assert client.get(url).status_code == 200
        return client.get(url.partition("?")[0]).text


def dashboards() -> list[psutil.Process]:
    """The dashboards of this process."""
    children = psutil.Process().children()
    return [child for child in children if "dashboard" in child.cmdline()]


async def test_the_dashboard_is_served_as_long_as_the_node(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1, dashboard=True) as node:
        url = node.dashboard_url
        assert f"aiogpu dashboard: {url}\n" in capfd.readouterr().err
        assert "bokeh.min.js" in await asyncio.to_thread(page_of, url)
        assert len(dashboards()) == 1
    assert node.dashboard_url == ""
    assert dashboards() == []
    with pytest.raises(httpx.ConnectError):
        await asyncio.to_thread(page_of, url)


def timeline_of(url: str) -> dict[str, Any]:
    """The timeline as a file, once the dashboard has reached the node."""
    with httpx.Client(trust_env=False) as client:
        assert client.get(url).status_code == 200
        path = url.partition("?")[0] + "timeline.json"
        while (answer := client.get(path)).status_code == 503:
            assert "text/plain" in answer.headers["Content-Type"]
        assert answer.headers["Content-Disposition"].startswith("attachment")
        trace: dict[str, Any] = answer.json()
        return trace


async def test_the_timeline_is_a_file_for_perfetto() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=1, dashboard=True) as node:
        assert await tasks.add.remote(1) == 2
        trace = await asyncio.to_thread(timeline_of, node.dashboard_url)
    assert "add" in [event["name"] for event in trace["traceEvents"]]


async def test_a_joined_node_has_a_dashboard_too(tmp_path: Path) -> None:
    async with (
        node_here(tmp_path) as here,
        aiogpu.init(address=here.path, dashboard=True) as node,
    ):
        assert "bokeh.min.js" in await asyncio.to_thread(page_of, node.dashboard_url)


def test_the_dashboard_ends_with_a_killed_program() -> None:
    with start(PROGRAM) as program:
        assert program.stdout is not None
        url = program.stdout.readline().strip()
        assert page_of(url)
        (served,) = [
            child
            for child in psutil.Process(program.pid).children()
            if "dashboard" in child.cmdline()
        ]
        program.send_signal(signal.SIGKILL)
        served.wait(LIMIT)


@pytest.mark.parametrize(
    ("address", "reason"),
    [("inline", "an inline node runs tasks in this process")],
)
async def test_other_engines_refuse_it_in_words(address: str, reason: str) -> None:
    with pytest.raises(errors.OptionError, match=reason):
        await aiogpu.init(address=address, dashboard=True)
    assert not aiogpu.is_initialized()


@pytest.mark.ray
async def test_ray_refuses_it_in_words() -> None:
    with pytest.raises(errors.OptionError, match="include-dashboard"):
        await aiogpu.init(address="ray", dashboard=True)


async def test_without_bokeh_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    with pytest.raises(errors.OptionError, match=r"pip install 'aiogpu\[dashboard\]'"):
        await aiogpu.init(dashboard=True)


async def test_a_dashboard_that_does_not_start_ends_the_node(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "bokeh").mkdir()
    (tmp_path / "bokeh" / "__init__.py").write_text("raise RuntimeError('is broken')")
    with pytest.raises(errors.NodeStartError, match=r"did not start: (?s:.*)is broken"):
        await aiogpu.init(num_cpus=1, dashboard=True)
    assert dashboards() == []
    async with aiogpu.init(num_cpus=1):
        pass


async def test_an_init_that_is_cancelled_leaves_no_dashboard() -> None:
    opening = asyncio.ensure_future(aiogpu.init(num_cpus=1, dashboard=True)._open())
    await until(dashboards)
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert dashboards() == []


def test_the_command_ends_with_another_process(sandbox: Sandbox) -> None:
    sandbox.run("start", "--head", "--num-cpus=1", "--num-gpus=0")
    with start("import signal; signal.pause()") as other:
        command = sandbox.start("dashboard", "--no-browser", "--until", str(other.pid))
        assert command.stdout is not None
        assert command.stdout.readline().startswith("Dashboard:")
        assert command.poll() is None
        other.kill()
        _, err = command.communicate(timeout=LIMIT)
        assert (command.returncode, err) == (0, "")
    _, err = sandbox.run("dashboard", "--no-browser", "--until", "4194303", code=1)
    assert "there is no process 4194303" in err


# In a notebook


async def test_a_notebook_shows_the_overview() -> None:
    async with aiogpu.init(num_cpus=1, num_gpus=2) as node:
        view = await node.dashboard()
        assert "GPU 1" in str(view)
        frame = view._repr_html_()
    assert re.match(r'<iframe title="aiogpu" sandbox style="[^"]*" srcdoc="', frame)
    inside = html.unescape(frame)
    assert "<h3>GPU 1" in inside
    assert "<a href" not in inside
    assert frame.count('"') == 6, "the page is one attribute"


def test_a_view_has_the_text_of_links_only() -> None:
    drawn = overview(BUSY, age=0.0, problem="", throughput=None)
    plain = without_links(drawn)
    assert drawn.count("<a ") > 3
    assert "<a " not in plain
    assert "All failures" not in plain
    assert "Model &#x27;serve&#x27;" in plain
    view = dashboard.NodeView(BUSY)
    assert "<script" not in view._repr_html_()


def test_a_program_without_a_loop_has_a_view() -> None:
    with sync.init(num_cpus=1, num_gpus=1) as node:
        assert "GPU 0" in str(node.dashboard())
        assert node.dashboard_url == ""
