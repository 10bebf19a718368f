"""The pages as documents, without a browser: what they show and what they ask."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("bokeh", reason="the dashboard needs Bokeh")

from bokeh.document import Document
from bokeh.models import ColumnDataSource, FactorRange
from bokeh.models.widgets.markups import Div

from aiogpu.dashboard.collector import Collector
from aiogpu.dashboard.tabs import applications
from aiogpu.errors import NodeError
from aiogpu.observe.snapshot import why_ended
from aiogpu.observe.status import EndedTask
from aiogpu.observe.trace import Span
from aiogpu.observe.why import Why
from tests.cli.status_examples import BUSY, GIB

EVIL = "<img src=x onerror=alert(1)>"


class Answers(Collector):
    """A collector whose node gives these answers."""

    def __init__(self) -> None:
        super().__init__(lambda: "")
        self.take(BUSY, time.time())
        self.whys: dict[int, Why] = {}
        self.spans: list[Span] = []
        self.asked = 0
        self.problem_of_node = ""

    async def why(self, task: int) -> Why | None:
        self.asked += 1
        if self.problem_of_node:
            raise NodeError(self.problem_of_node)
        return self.whys.get(task)

    async def failed_calls(self, actor: int) -> tuple[EndedTask, ...]:
        return ()

    async def timeline(self) -> list[Span]:
        return self.spans


async def opened(collector: Collector, path: str, **arguments: str) -> Document:
    """A tab, after it has been updated once."""
    document = Document()
    request = SimpleNamespace(
        cookies={}, arguments={k: [v.encode()] for k, v in arguments.items()}
    )
    context: Any = SimpleNamespace(
        request=request, session=None, destroyed=False, server_context=None
    )
    document._session_context = lambda: context  # type: ignore[assignment]
    applications(collector)[path](document)
    await update(document)
    return document


async def update(document: Document) -> None:
    """Let a second pass for a tab: questions are answered, then shown."""
    for _ in range(2):
        for _ in range(5):
            await asyncio.sleep(0)
        for callback in document.session_callbacks:
            callback.callback()


def shown(document: Document) -> str:
    """The HTML of a tab."""
    texts = [root.text for root in document.roots if isinstance(root, Div)]
    assert len(texts) == 1
    return texts[0]


def sources(document: Document) -> list[ColumnDataSource]:
    return list(document.select({"type": ColumnDataSource}))  # type: ignore[arg-type]


async def test_the_devices_page_has_the_shares_by_program() -> None:
    collector = Answers()
    tab = await opened(collector, "/devices")
    assert "train.py (pid 4711)" in shown(tab)
    by_share = {source.data["busy"][0]: source.data for source in sources(tab)}
    data = by_share[0.87]
    assert data["memory"][0] == pytest.approx(10 * GIB / (40 * GIB))
    slots = sorted(data[f"c{slot}"][0] for slot in range(7))
    assert slots[-2:] == [0.25, 0.5]
    assert sum(slots) == 0.75

    collector.take(replace(BUSY, devices=()), time.time())
    await update(tab)
    assert all(len(source.data["time"]) == 2 for source in sources(tab))
    assert all(math.isnan(source.data["busy"][1]) for source in sources(tab))


async def test_a_failed_task_has_a_page_with_its_traceback() -> None:
    collector = Answers()
    ended = EndedTask(5, EVIL, "ValueError", EVIL, 3.0, ran=1.0, traceback=f"in {EVIL}")
    collector.whys[5] = why_ended(ended)
    tab = await opened(collector, "/task", id="5")
    assert shown(tab).count("in &lt;img src=x") == 1
    assert "<img" not in shown(tab)
    assert ", failed</small>" in shown(tab)
    asked = collector.asked
    await update(tab)
    assert collector.asked == asked, "an ended task does not change"


async def test_a_waiting_task_is_asked_for_until_it_has_ended() -> None:
    collector = Answers()
    collector.whys[7] = Why("train", 7, "waiting", seconds=3.0)
    tab = await opened(collector, "/task", id="7")
    assert "train <small>7, waiting</small>" in shown(tab)
    collector.problem_of_node = "the node has ended"
    await update(tab)
    assert "the node has ended" in shown(tab)
    collector.problem_of_node = ""
    collector.whys[7] = why_ended(EndedTask(7, "train", "", "", 1.0, state="finished"))
    await update(tab)
    assert "finished" in shown(tab)


@pytest.mark.parametrize("number", ["", "x", "-1", "٣", "1" * 19, "../etc/passwd"])
async def test_a_task_needs_a_number(number: str) -> None:
    collector = Answers()
    tab = await opened(collector, "/task", id=number)
    assert "must end in a number" in shown(tab)
    assert collector.asked == 0


async def test_an_unknown_task_is_said_to_be_unknown() -> None:
    tab = await opened(Answers(), "/task", id="99")
    assert "The node does not know task 99" in shown(tab)


async def test_the_timeline_has_rows_for_devices_and_for_tasks_without() -> None:
    collector = Answers()
    collector.spans = [
        Span(1, "a", 0, 10, 101, (("GPU", 0),), 0.0, 1.0, 5.0, "finished"),
        Span(2, "b", 0, 9, 102, (("GPU", 0),), 0.0, 2.0, 6.0, "failed"),
        Span(3, "c", 0, 9, 102, (), 0.0, 6.0, 7.5, "running"),
    ]
    tab = await opened(collector, "/timeline")
    rows = next(iter(tab.select({"type": FactorRange}))).factors  # type: ignore[arg-type]
    assert rows == ["no device", "GPU 0 (2)", "GPU 0"]
    (data,) = (source.data for source in sources(tab) if "task" in source.data)
    bars = list(zip(data["row"], data["task"], data["ran"], data["width"], strict=True))
    assert bars == [
        ("GPU 0", 1, "4.0 s", 1),
        ("GPU 0 (2)", 2, "4.0 s", 3),
        ("no device", 3, "1.5 s", 1),
    ]
