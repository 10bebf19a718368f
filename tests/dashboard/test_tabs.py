"""The pages as documents, without a browser: what they show and what they ask."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs

import psutil
import pytest

pytest.importorskip("bokeh", reason="the dashboard needs Bokeh")

from bokeh.document import Document
from bokeh.events import ButtonClick
from bokeh.models import ColumnDataSource, FactorRange
from bokeh.models.widgets.buttons import Button
from bokeh.models.widgets.markups import Div

from aiogpu.dashboard.collector import Collector
from aiogpu.dashboard.tabs import TABS, applications
from aiogpu.errors import NodeError
from aiogpu.observe.snapshot import why_ended
from aiogpu.observe.status import EndedTask
from aiogpu.observe.task_list import TaskPage, TaskQuery, TaskRow
from aiogpu.observe.trace import Span
from aiogpu.observe.why import Why
from aiogpu.runtime.output import FILE
from aiogpu.wire.messages import CANCEL, END_LEASE, KILL
from tests.cli.status_examples import BUSY, GIB, JOB

EVIL = "<img src=x onerror=alert(1)>"


class Answers(Collector):
    """A collector whose node gives these answers."""

    def __init__(self) -> None:
        super().__init__(lambda: "")
        self.take(BUSY, time.time())
        self.whys: dict[int, Why] = {}
        self.spans: list[Span] = []
        self.pages: dict[TaskQuery, TaskPage] = {}
        self.stopped: list[tuple[str, int]] = []
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

    async def list_tasks(self, query: TaskQuery) -> TaskPage:
        return self.pages[query]

    async def stop(self, what: str, number: int) -> str:
        self.stopped.append((what, number))
        return f"Stopped {number}."


async def opened(
    collector: Collector, path: str, *, in_thread: bool = False, **arguments: str
) -> Document:
    """A tab, after it has been updated once."""
    document = Document()
    request = SimpleNamespace(
        cookies={}, arguments={k: [v.encode()] for k, v in arguments.items()}
    )
    context: Any = SimpleNamespace(
        request=request, session=None, destroyed=False, server_context=None
    )
    document._session_context = lambda: context  # type: ignore[assignment]
    fill = applications(collector)[path]
    if in_thread:
        await asyncio.to_thread(fill, document)
    else:
        fill(document)
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
    return "".join(root.text for root in document.roots if isinstance(root, Div))


def sources(document: Document) -> list[ColumnDataSource]:
    return list(document.select({"type": ColumnDataSource}))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [tab.path for tab in TABS])
async def test_a_page_is_made_on_the_loop_from_whatever_thread(path: str) -> None:
    """Bokeh asks for it in a thread from 3.10 on."""
    here, there = [
        await opened(Answers(), path, in_thread=in_thread)
        for in_thread in (False, True)
    ]
    assert len(there.roots) == len(here.roots) > 0


async def test_the_devices_page_has_the_shares_by_program() -> None:
    collector = Answers()
    tab = await opened(collector, "/devices")
    assert "train.py (pid 4711)" in shown(tab)
    by_share = {source.data["busy"][0]: source.data for source in sources(tab)}
    data = by_share[87.0]
    assert data["temperature"][0] == 63.0
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


# Tasks


async def test_the_tasks_page_has_reasons_and_leads_to_the_pages_beside_it() -> None:
    collector = Answers()
    query = TaskQuery(text=EVIL, start=50)
    row = TaskRow(12, EVIL, JOB, "waiting", 75.0, reason=f"waits for {EVIL}")
    collector.pages[query] = TaskPage((row,) * 50, 100_000)
    tab = await opened(collector, "/tasks", text=EVIL, start="50")
    html = shown(tab)
    assert '<a href="/task?id=12">12</a>' in html
    assert "train.py (pid 4711)" in html
    assert "Tasks 51 to 100 of 100,000." in html
    assert html.count("waits for &lt;img src=x onerror=alert(1)&gt;") == 50
    assert "<img" not in html
    links = dict(re.findall(r'<a href="/tasks\?([^"]*)">(Earlier|Further)</a>', html))
    assert [*links.values()] == ["Earlier", "Further"]
    further = parse_qs(next(link for link, label in links.items() if label[0] == "F"))
    assert (further["start"], further["text"]) == (["100"], [EVIL])
    assert f'value="{escape(EVIL)}"' in html


async def test_ended_tasks_have_their_durations_and_errors() -> None:
    collector = Answers()
    query = TaskQuery("failed", sort="ran")
    row = TaskRow(5, "train", JOB, "failed", 3.0, 12.0, 75.0, "ValueError: no key")
    collector.pages[query] = TaskPage((row,), 3000)
    html = shown(await opened(collector, "/tasks", state="failed", sort="ran"))
    for cell in ("3.0 s", "12 s", "75 s ago", "ValueError: no key", "failed"):
        assert f"<div>{cell}</div>" in html
    assert '<option value="failed" selected>' in html
    assert '<option value="ran" selected>' in html
    assert "In this order the first 1,000 are shown" in html


@pytest.mark.parametrize(
    "wrong", [{"state": EVIL}, {"sort": "size"}, {"state": "\xff", "start": "x"}]
)
async def test_a_wrong_list_of_tasks_is_named_and_the_usual_one_shown(
    wrong: dict[str, str],
) -> None:
    collector = Answers()
    collector.pages[TaskQuery()] = TaskPage((), 0)
    html = shown(await opened(collector, "/tasks", **wrong))
    assert "There is no such list of tasks" in html
    assert "<img" not in html


# Actors, programs and leases


async def test_actors_programs_and_leases_are_listed() -> None:
    collector = Answers()
    actors = tuple(replace(actor, name=EVIL) for actor in BUSY.actors)
    collector.take(replace(BUSY, actors=actors * 150), time.time())
    html = shown(await opened(collector, "/actors"))
    assert html.count("<div>&lt;img src=x onerror=alert(1)&gt;</div>") == 200
    assert "And 100 more." in html
    assert '<a href="/task?id=8">8</a>' in html, "the lease"
    assert "<div>leased</div>" in html
    assert "train.py (pid 4711)" in html
    assert "There is no placement." in html
    assert "<img" not in html


# Logs


@asynccontextmanager
async def log_tab(collector: Collector, **arguments: str) -> AsyncIterator[Document]:
    """A page of logs; its files are closed at the end."""
    tab = await opened(collector, "/logs", **arguments)
    yield tab
    (close,) = tab.callbacks.session_destroyed_callbacks
    close(tab.session_context)  # type: ignore[arg-type]
    # A read that has not begun yet opens the file later.
    reads = asyncio.all_tasks() - {asyncio.current_task()}
    async with asyncio.timeout(30):
        await asyncio.gather(*reads)
        while any(file.path.endswith(FILE) for file in psutil.Process().open_files()):
            await asyncio.sleep(0)


async def test_the_log_is_followed_and_filtered_by_task(tmp_path: Path) -> None:
    collector = Answers()
    collector.address = str(tmp_path / "node.sock")
    async with log_tab(collector) as tab:
        await seen(tab, "this node keeps no log")
    (tmp_path / "logs").mkdir(mode=0o700)
    log = tmp_path / "logs" / FILE
    line = "2026-01-01 10:00:00.000 client=9 task={} out (train pid=4) {}\n"
    log.write_text(line.format(7, "first") + line.format(8, EVIL))
    async with log_tab(collector) as tab:
        every = await seen(tab, "first")
        assert every.index("onerror") < every.index("first"), "the latest is first"
        assert "<img" not in every
    async with log_tab(collector, text="ONERROR") as tab:
        assert "first" not in await seen(tab, "onerror")
    async with log_tab(collector, task="7") as tab:
        html = await seen(
            tab, 'task=<a href="/task?id=7">7</a> out (train pid=4) first'
        )
        assert "onerror" not in html
        with log.open("a") as file:
            file.write(line.format(7, "second") + line.format(7, "x" * 5000))
        html = await seen(tab, "second")
        assert "x" * 1900 in html
        assert "x" * 2001 not in html
        with log.open("a") as file:
            file.write("2026-01-01 11:00:00.000 client=0 task=0 out (node pid=5) x\n")
        await seen(tab, "No line matches yet")
    async with log_tab(collector, task="x") as tab:
        assert "whole number" in shown(tab)


async def seen(tab: Document, words: str) -> str:
    """Update a tab until it shows some words; return its HTML."""
    async with asyncio.timeout(30):
        while words not in shown(tab):
            await update(tab)
    return shown(tab)


# What is stopped


def buttons(tab: Document) -> dict[str, Button]:
    """The buttons that are shown, by label."""
    roots = [root for root in tab.roots if isinstance(root, Button)]
    return {str(button.label): button for button in roots if button.visible}


def press(tab: Document, label: str) -> None:
    button = buttons(tab)[label]
    button._trigger_event(ButtonClick(button))


@pytest.mark.parametrize(
    ("number", "what", "verb"),
    [
        (7, CANCEL, "Cancel this task"),
        (1, KILL, "Kill this actor"),
        (8, END_LEASE, "End this lease"),
    ],
)
async def test_something_is_stopped_once_the_question_is_answered(
    number: int, what: str, verb: str
) -> None:
    collector = Answers()
    collector.whys[number] = Why("train", number, "running", worker=2, pid=102)
    tab = await opened(collector, "/task", id=str(number))
    kind = verb.rpartition(" ")[2]
    yes, no = (
        f"Yes, {verb.partition(' ')[0].lower()} the {kind}",
        f"No, keep the {kind}",
    )
    assert [*buttons(tab)] == [verb]
    press(tab, verb)
    assert [*buttons(tab)] == [yes, no]
    assert f"{verb}?" in shown(tab)
    press(tab, no)
    assert [*buttons(tab)] == [verb]
    await update(tab)
    assert collector.stopped == []
    press(tab, verb)
    press(tab, yes)
    await update(tab)
    assert collector.stopped == [(what, number)]
    assert f"Stopped {number}." in shown(tab)


async def test_without_a_question_nothing_is_stopped() -> None:
    collector = Answers()
    collector.whys[7] = Why("train", 7, "running", worker=2, pid=102)
    tab = await opened(collector, "/task", id="7")
    hidden = [root for root in tab.roots if isinstance(root, Button)]
    for button in hidden[1:]:
        button._trigger_event(ButtonClick(button))
    await update(tab)
    assert collector.stopped == []


async def test_what_has_ended_has_no_button() -> None:
    collector = Answers()
    collector.whys[7] = why_ended(EndedTask(7, "train", "", "", 1.0, state="finished"))
    assert not buttons(await opened(collector, "/task", id="7"))
    collector.whys[9] = Why("Cache", 9, "stopping", worker=2, pid=102)
    assert not buttons(await opened(collector, "/task", id="9"))


async def test_a_read_only_dashboard_has_no_buttons_and_stops_nothing() -> None:
    collector = Answers()
    collector.is_read_only = True
    collector.whys[7] = Why("train", 7, "running", worker=2, pid=102)
    tab = await opened(collector, "/task", id="7")
    assert not [root for root in tab.roots if isinstance(root, Button)]
    with pytest.raises(NodeError, match="--read-only"):
        await Collector.stop(collector, CANCEL, 7)
