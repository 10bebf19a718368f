"""The documents of the open tabs, one for each tab, fed from one collector."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from bokeh.core.templates import FILE
from bokeh.document import Document
from bokeh.models import (
    ColumnDataSource,
    DataRange1d,
    FactorRange,
    HoverTool,
    InlineStyleSheet,
    OpenURL,
    TapTool,
)
from bokeh.models.widgets.buttons import Button
from bokeh.models.widgets.markups import Div

from aiogpu.dashboard import charts, pages
from aiogpu.dashboard.collector import HOUR, KINDS, SPANS, Collector, Sample
from aiogpu.dashboard.log_tail import LogTail
from aiogpu.errors import AiogpuError
from aiogpu.observe.overview import STYLE, key, overview, text
from aiogpu.observe.owners import Owners
from aiogpu.observe.snapshot import why_ended
from aiogpu.observe.status import EndedTask
from aiogpu.observe.task_list import TaskPage, TaskQuery
from aiogpu.observe.trace import Span
from aiogpu.observe.why import Why
from aiogpu.wire.messages import CANCEL, END_LEASE, KILL

PERIOD: Final = 1000
"""Milliseconds between two updates of a tab."""
SEARCH_PERIOD: Final = 5.0
"""Seconds between two searches of a tab. A search among 100 000 waiting tasks takes
0.1 s of the node's time, in pieces, and delays the next status by 2 s."""
SCHEME: Final = "aiogpu-scheme"
"""Cookie with the colour scheme of the browser: a canvas cannot ask the style sheet."""
PAGES: Final = {
    "/": "Overview",
    "/devices": "Devices",
    "/timeline": "Timeline",
    "/tasks": "Tasks",
    "/actors": "Actors and programs",
    "/logs": "Logs",
}
"""The pages that the head of each page leads to."""
TEMPLATE: Final = FILE.environment.from_string(
    Path(__file__).with_name("page.html").read_text(encoding="utf-8"), {"base": FILE}
)


def _problem(reason: str) -> str:
    return f'<p class="problem" role="alert">{text(reason)}</p>' if reason else ""


class Overview:
    """The overview, drawn once for each status and shared by all tabs."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        self._drawn: tuple[int, str, int] | None = None
        self._html = ""

    def html(self) -> str:
        """Return the page as it is now."""
        collector = self._collector
        age = time.time() - collector.seen if collector.seen else 0.0
        # Without news the page changes only by the age that it tells.
        state = collector.count, collector.problem, int(age)
        if state != self._drawn:
            self._drawn = state
            self._html = overview(
                collector.status,
                age=age,
                problem=collector.problem,
                throughput=collector.throughput(),
            )
        return self._html


class Tab:
    """One open tab: what all pages have."""

    path = "/"
    title = "Overview"

    def __init__(
        self, page: Overview, collector: Collector, document: Document
    ) -> None:
        self.page = page
        self.collector = collector
        self.document = document
        context: Any = document.session_context
        request = None if context is None else context.request
        cookies = {} if request is None else request.cookies
        self.arguments = {} if request is None else request.arguments
        self.is_dark = cookies.get(SCHEME) == "dark"
        self.count = collector.count
        self.text = self._new_text()
        document.title = f"aiogpu: {self.title.lower()}"
        document.template = TEMPLATE
        document.template_variables.update(
            style=STYLE, scheme=SCHEME, pages=PAGES, here=self.path
        )
        if fixed := self.head():
            above = self._new_text()
            above.text = fixed
            document.add_root(above)
        document.add_root(self.text)
        for chart in self.charts():
            document.add_root(chart)
        self.show(self.html())
        document.add_periodic_callback(self.update, PERIOD)

    def _new_text(self) -> Div:
        return Div(
            stylesheets=[InlineStyleSheet(css=STYLE)], sizing_mode="stretch_width"
        )

    def argument(self, name: str) -> str:
        """Return an argument of the page's URL; "" without one."""
        values = self.arguments.get(name) or [b""]
        return str(values[0].decode("utf-8", "replace"))

    def number(self, name: str) -> int | None:
        """Return an argument that is a whole number; None if it is none."""
        value = self.argument(name)
        is_number = value.isascii() and value.isdecimal()
        return int(value) if is_number and len(value) < LONGEST_NUMBER else None

    def head(self) -> str:
        """Return what stands above the text and does not change; "" for nothing."""
        return ""

    def html(self) -> str:
        """Return the text of the page as it is now."""
        raise NotImplementedError

    def charts(self) -> Iterable[Any]:
        """Return the charts and buttons below the text."""
        return ()

    def add(self, samples: list[Sample]) -> None:
        """Add new samples to the charts."""

    def show(self, html: str) -> None:
        """Show a text, unless it is shown already: each change goes to the browser."""
        if html != self.text.text:
            self.text.text = html

    def update(self) -> None:
        """Show what is new; called once a second while the tab is open."""
        self.show(self.html())
        samples = self.collector.samples
        if new := min(self.collector.count - self.count, len(samples)):
            self.add([samples[-n] for n in range(new, 0, -1)])
            self.count = self.collector.count


LONGEST_NUMBER: Final = 19
"""Digits of a number of a task, and one more."""


class OverviewTab(Tab):
    """The overview: the state of now, and the tasks of the last hour."""

    def html(self) -> str:
        """Return the overview."""
        return self.page.html()

    def charts(self) -> Iterable[Any]:
        """Return the chart of running and waiting tasks."""
        self._source = ColumnDataSource(
            charts.task_columns(list(self.collector.samples))
        )
        chart = charts.chart_over_time(
            "Tasks in the last hour",
            "tasks",
            is_dark=self.is_dark,
            y_range=DataRange1d(start=0),
        )
        lines = {"running": "running", "waiting": "waiting"}
        colors = charts.LINES[self.is_dark]
        charts.draw_lines(chart, self._source, lines, colors, is_dark=self.is_dark)
        yield chart

    def add(self, samples: list[Sample]) -> None:
        """Add new samples to the chart."""
        self._source.stream(charts.task_columns(samples), rollover=HOUR)


class DevicesTab(Tab):
    """The last hour of each device: whose share, memory, utilisation, temperature."""

    path = "/devices"
    title = "Devices"

    def html(self) -> str:
        """Return the programs with their colours."""
        status = self.collector.status
        if self.collector.problem or status is None:
            return _problem(self.collector.problem)
        if not status.devices:
            return "<p>This node has no devices.</p>"
        owners, samples = Owners(status), self.collector.samples
        # Samples that do not differ share their devices; see `Collector.take`.
        seen = {
            client
            for devices in {id(s.devices): s.devices for s in samples}.values()
            for device in devices.values()
            for client, _ in device.shares
        }
        keys = (
            f"<li>{key(client)}{text(owners.name(client))}</li>"
            for client in sorted(seen)
        )
        return (
            f'<h2>Whose share, in the last hour</h2><ul class="keys">{"".join(keys)}'
            "</ul><p>Areas: the held share of each device, by program. The line: the "
            "used part of its memory. The second chart: how busy and warm it was.</p>"
        )

    def charts(self) -> Iterable[Any]:
        """Return two charts for each device; all show the same time."""
        self._sources: dict[str, ColumnDataSource] = {}
        status, samples = self.collector.status, list(self.collector.samples)
        shared: Any = None
        for device in () if status is None else status.devices:
            name = f"{device.kind} {device.id}"
            source = ColumnDataSource(charts.device_columns(samples, name))
            self._sources[name] = source
            shares = charts.chart_over_time(
                f"{name}  {device.name or device.type or ''}".strip(),
                "part of 1",
                is_dark=self.is_dark,
                y_range=DataRange1d(start=0, end=1.02),
            )
            readings = charts.chart_over_time(
                f"{name}: utilisation and temperature",
                "% or °C",
                is_dark=self.is_dark,
                y_range=DataRange1d(start=0, end=102),
                height=200,
            )
            shared = shared or shares.x_range
            shares.x_range = readings.x_range = shared
            charts.stack_shares(shares, source, is_dark=self.is_dark)
            colors = charts.LINES[self.is_dark]
            both = {"busy": "busy, %", "temperature": "temperature, °C"}
            charts.draw_lines(readings, source, both, colors, is_dark=self.is_dark)
            yield from (shares, readings)

    def add(self, samples: list[Sample]) -> None:
        """Add new samples to the charts."""
        for name, source in self._sources.items():
            source.stream(charts.device_columns(samples, name), rollover=HOUR)


class ActorsTab(Tab):
    """The actors, programs, leases and placements."""

    path = "/actors"
    title = "Actors and programs"

    def html(self) -> str:
        """Return the tables."""
        status = self.collector.status
        return _problem(self.collector.problem) + (
            "" if status is None else pages.actors_page(status)
        )


class AskingTab(Tab):
    """A page with an answer of its own, which it asks for while it is open.

    Attributes:
        problem: why there is no answer; "" if there is one.
    """

    def __init__(self, *arguments: Any) -> None:
        self.problem = "Asking the node."
        self._asking: asyncio.Task[None] | None = None
        self._is_first = True
        super().__init__(*arguments)
        self.refresh()

    async def ask(self) -> str:
        """Ask, and keep the answer; return why there is none, or "".

        Raises:
            AiogpuError: there is no answer.
        """
        raise NotImplementedError

    def is_due(self) -> bool:
        """Return whether to ask again now."""
        return True

    def refresh(self) -> None:
        """Ask again, unless a question is open. A closed tab does not come here."""
        if self.is_due() and (self._asking is None or self._asking.done()):
            self._asking = asyncio.ensure_future(self._answer())

    async def _answer(self) -> None:
        try:
            self.problem = await self.ask()
        except AiogpuError as error:
            self.problem = str(error)
        context: Any = self.document.session_context
        if self._is_first and not context.destroyed:
            # Only within an update Bokeh lets a document change.
            self.document.add_next_tick_callback(self.draw)
        self._is_first = False

    def draw(self) -> None:
        """Show the answer."""
        self.show(self.html())

    def update(self) -> None:
        """Show the answer, and ask again."""
        self.draw()
        self.refresh()


class TimelineTab(AskingTab):
    """What has run where and when: a row for each device, and for tasks without."""

    path = "/timeline"
    title = "Timeline"

    def __init__(self, *arguments: Any) -> None:
        self._spans: list[Span] = []
        super().__init__(*arguments)

    async def ask(self) -> str:
        """Ask for the spans."""
        self._spans = await self.collector.timeline()
        return ""

    def html(self) -> str:
        """Return what the chart shows."""
        return (
            f"{_problem(self.problem)}<h2>What ran where</h2><p>The running tasks and "
            f"the last {SPANS} that have ended, in the last ten minutes. Colours: "
            "programs, as on the other pages; a thick red edge: failed. Click a bar "
            "for its task. All tasks that the node remembers, as a file for Perfetto: "
            f'<a href="{TRACE}" download>timeline.json</a>.</p>'
        )

    def draw(self) -> None:
        """Show the spans."""
        super().draw()
        status = self.collector.status
        owners = None if status is None else Owners(status)
        rows, columns = charts.bars_of(self._spans, owners, is_dark=self.is_dark)
        if rows != self._chart.y_range.factors:
            self._chart.y_range.factors = rows
            self._chart.height = 120 + 26 * max(len(rows), 3)
        self._source.data = columns

    def charts(self) -> Iterable[Any]:
        """Return the chart of spans."""
        self._source = ColumnDataSource(
            charts.bars_of([], None, is_dark=self.is_dark)[1]
        )
        self._chart = charts.chart_over_time(
            "The last ten minutes",
            "",
            is_dark=self.is_dark,
            y_range=FactorRange(factors=[]),
        )
        self._chart.x_range = DataRange1d(
            follow="end", follow_interval=TEN_MINUTES, range_padding=0
        )
        self._chart.hbar(
            y="row",
            left="left",
            right="right",
            height=0.8,
            fill_color="color",
            line_color="edge",
            line_width="width",
            source=self._source,
        )
        shown = ("name", "task", "state", "ran", "waited", "program", "worker", "pid")
        self._chart.add_tools(
            HoverTool(tooltips=[(name, f"@{name}") for name in shown]),
            TapTool(callback=OpenURL(url="/task?id=@task", same_tab=True)),
        )
        yield self._chart


TRACE: Final = "/timeline.json"
"""Path of the timeline as a file."""
TEN_MINUTES: Final = 600_000
"""Milliseconds of a timeline."""


class TasksTab(AskingTab):
    """The waiting, running or ended tasks, a page of them at a time."""

    path = "/tasks"
    title = "Tasks"

    def __init__(self, *arguments: Any) -> None:
        self._answer_page: TaskPage | None = None
        self._due = 0.0
        super().__init__(*arguments)

    def head(self) -> str:
        """Return the form for another list."""
        self._fault, self._query = "", TaskQuery()
        try:
            self._query = TaskQuery(
                state=self.argument("state") or self._query.state,
                text=self.argument("text"),
                sort=self.argument("sort"),
                start=self.number("start") or 0,
            )
        except ValueError:
            self._fault = "There is no such list of tasks; choose one below."
        return _problem(self._fault) + pages.task_form(self._query)

    def is_due(self) -> bool:
        """Return whether a second has passed, or more after a search."""
        return time.monotonic() >= self._due

    async def ask(self) -> str:
        """Ask for the page."""
        query = self._query
        is_search = bool(query.text or query.sort or query.start > query.count)
        self._answer_page = await self.collector.list_tasks(query)
        self._due = time.monotonic() + (SEARCH_PERIOD if is_search else 0.0)
        return ""

    def html(self) -> str:
        """Return the page of the list."""
        page, status = self._answer_page, self.collector.status
        if page is None or status is None:
            return _problem(self.problem)
        table = pages.task_table(page, self._query, Owners(status))
        return _problem(self.problem) + table


class LogsTab(AskingTab):
    """The last lines that tasks have printed, the latest first."""

    path = "/logs"
    title = "Logs"

    def __init__(self, *arguments: Any) -> None:
        self._lines: list[str] = []
        super().__init__(*arguments)
        self.document.on_session_destroyed(self._close)

    def head(self) -> str:
        """Return the form that filters the lines."""
        task, words = self.number("task"), self.argument("text")
        self._tail = LogTail(task or 0, words)
        shown = "" if task is None else str(task)
        fields = pages.field("Task number", "task", shown) + pages.field(
            "Text", "text", words
        )
        is_wrong = bool(self.argument("task")) and task is None
        fault = "The number of a task is a whole number." if is_wrong else ""
        return _problem(fault) + pages.form("/logs", fields)

    async def ask(self) -> str:
        """Read what is new."""
        address = self.collector.address
        if not address:
            return self.collector.problem
        self._lines = await asyncio.to_thread(self._tail.read, address)
        return ""

    def html(self) -> str:
        """Return the lines."""
        if self.problem or not self._lines:
            return _problem(self.problem) or "<p>No line matches yet.</p>"
        return pages.log_lines(self._lines)

    def _close(self, _: object) -> None:
        """Close the files, once they are not being read any more."""
        if self._asking is None or self._asking.done():
            self._tail.close()
        else:
            self._asking.add_done_callback(lambda _: self._tail.close())


class TaskTab(AskingTab):
    """One task, actor or lease: its state and the reason, or how it ended; its end."""

    path = "/task"
    title = "Task"

    def __init__(self, *arguments: Any) -> None:
        self._why: Why | None = None
        self._calls: tuple[EndedTask, ...] = ()
        self._answered = 0.0
        self._outcome = ""
        self._is_asked_back = False
        self._stopping: asyncio.Task[None] | None = None
        super().__init__(*arguments)

    def is_due(self) -> bool:
        """Return False for a wrong number, and once the task has ended."""
        has_ended = self._why is not None and self._why.ended is not None
        return self.number("id") is not None and not has_ended

    async def ask(self) -> str:
        """Ask for the state and for failed calls."""
        number = self.number("id") or 0
        self._why = await self.collector.why(number)
        self._calls = await self.collector.failed_calls(number)
        self._answered = time.monotonic()
        if self._why is not None or self._calls:
            return ""
        return f"The node does not know task {number}: it keeps the last 10 000."

    def html(self) -> str:
        """Return the last answer of the node."""
        number = self.number("id")
        if number is None:
            return (
                '<p class="problem">The address of this page must end in a number of a '
                "task, as in /task?id=12.</p>"
            )
        if self.problem:
            return _problem(self.problem)
        ended = [*self._calls]
        if self._why is not None and self._why.ended is not None:
            ended.insert(0, self._why.ended)
        # An ended task does not change, so only its age is counted on.
        age = time.monotonic() - self._answered
        told = [why_ended(replace(e, seconds=e.seconds + age)) for e in ended]
        if self._why is not None and self._why.ended is None:
            told.insert(0, self._why)
        state = "failed calls" if self._why is None else _state(self._why)
        question = f"<p><strong>{ASK[self._what]}</strong></p>"
        return (
            f"<h2>{text(told[0].name)} <small>{number}, {text(state)}</small></h2>"
            + "".join(f"<pre>{text(str(part))}</pre>" for part in told)
            + f'<p><a href="/logs?task={number}">What it has printed</a></p>'
            + (f'<p role="status">{text(self._outcome)}</p>' if self._outcome else "")
            + (question if self._is_asked_back else "")
        )

    @property
    def _what(self) -> str:
        """The request that stops this task, actor or lease."""
        number, status = self.number("id"), self.collector.status
        actors = () if status is None else status.actors
        if any(actor.id == number for actor in actors):
            return KILL
        tasks = () if status is None else status.tasks
        is_lease = any(task.id == number and task.is_lease for task in tasks)
        return END_LEASE if is_lease else CANCEL

    def charts(self) -> Iterable[Any]:
        """Return the buttons that stop it: the first asks back."""
        self._buttons: tuple[Button, ...] = ()
        if self.collector.is_read_only or self.number("id") is None:
            return
        actions = (self._ask_back, self._stop, self._keep)
        for action in actions:
            sheet = InlineStyleSheet(css=STYLE)
            button = Button(visible=False, stylesheets=[sheet])
            button.on_click(action)
            self._buttons = (*self._buttons, button)
            yield button

    def draw(self) -> None:
        """Show the answer, and the buttons that apply."""
        super().draw()
        if not self._buttons:
            return
        why, kind = self._why, KINDS[self._what]
        can_stop = why is not None and why.ended is None and why.state != "stopping"
        self._is_asked_back = self._is_asked_back and can_stop
        verb = VERBS[self._what]
        labels = (
            f"{verb} this {kind}",
            f"Yes, {verb.lower()} the {kind}",
            f"No, keep the {kind}",
        )
        shown = (not self._is_asked_back, self._is_asked_back, self._is_asked_back)
        for button, label, is_shown in zip(self._buttons, labels, shown, strict=True):
            button.label, button.visible = label, can_stop and is_shown

    def _ask_back(self) -> None:
        self._is_asked_back = True
        self.draw()

    def _keep(self) -> None:
        self._is_asked_back = False
        self.draw()

    def _stop(self) -> None:
        if self._is_asked_back:
            self._is_asked_back = False
            self._stopping = asyncio.ensure_future(self._stop_now())

    async def _stop_now(self) -> None:
        try:
            number = self.number("id") or 0
            self._outcome = await self.collector.stop(self._what, number)
        except AiogpuError as error:
            self._outcome = str(error)


VERBS: Final = {CANCEL: "Cancel", KILL: "Kill", END_LEASE: "End"}
ASK: Final = {
    CANCEL: "Cancel this task? Its program gets a TaskCancelledError. Running code is "
    "interrupted.",
    KILL: "Kill this actor? Its process ends at once, and its calls fail with "
    "ActorDiedError.",
    END_LEASE: "End this lease? Its program is told. The resources are free when the "
    "processes that use them have ended.",
}
"""What is asked before something is stopped."""


def _state(why: Why) -> str:
    return why.state if why.ended is None else why.ended.state


TABS: Final = (
    OverviewTab,
    DevicesTab,
    TimelineTab,
    TasksTab,
    ActorsTab,
    LogsTab,
    TaskTab,
)


def applications(collector: Collector) -> dict[str, Callable[[Document], None]]:
    """Return the pages by path, each a function that fills the document of a tab.

    A tab is made on the running event loop, to which the collector belongs. From 3.10
    on, Bokeh calls the functions in threads.
    """
    page = Overview(collector)
    loop, thread = asyncio.get_running_loop(), threading.get_ident()

    async def make(tab: type[Tab], document: Document) -> None:
        tab(page, collector, document)  # the document keeps it

    def fill(tab: type[Tab], document: Document) -> None:
        if threading.get_ident() == thread:
            tab(page, collector, document)
        else:
            asyncio.run_coroutine_threadsafe(make(tab, document), loop).result()

    return {tab.path: partial(fill, tab) for tab in TABS}
