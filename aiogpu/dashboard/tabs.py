"""The documents of the open tabs, one for each tab, fed from one collector."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import nan
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
from bokeh.models.annotations import Title
from bokeh.models.ranges import Range
from bokeh.models.widgets.markups import Div
from bokeh.plotting import figure

from aiogpu.core.model.text import escaped, span
from aiogpu.dashboard.collector import HOUR, SPANS, Collector, Sample
from aiogpu.dashboard.overview import COLORS, STYLE, key, overview, text
from aiogpu.dashboard.owners import Owners
from aiogpu.errors import AiogpuError
from aiogpu.observe.snapshot import why_ended
from aiogpu.observe.status import EndedTask
from aiogpu.observe.trace import DEVICES, WORKERS, Rows, Span
from aiogpu.observe.why import Why

PERIOD: Final = 1000
"""Milliseconds between two updates of a tab."""
SCHEME: Final = "aiogpu-scheme"
"""Cookie with the colour scheme of the browser: a canvas cannot ask the style sheet."""
PAGES: Final = {"/": "Overview", "/devices": "Devices", "/timeline": "Timeline"}
"""The pages that the head of each page leads to."""
TEMPLATE: Final = """\
{% from macros import embed %}{% extends base %}
{% block preamble %}
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<script>
  const dark = matchMedia("(prefers-color-scheme: dark)")
  const note = () => {
    const wanted = "SCHEME=" + (dark.matches ? "dark" : "light")
    if (document.cookie.split("; ").includes(wanted)) return
    document.cookie = wanted + "; SameSite=Strict; Path=/"
    if (document.cookie.split("; ").includes(wanted)) location.reload()
  }
  note()
  dark.addEventListener("change", note)
</script>
{% endblock %}
{% block postamble %}<style>{{ style }}</style>{% endblock %}
{% block contents %}
<header><h1>aiogpu</h1><nav>
{% for path, name in pages.items() %}
<a href="{{ path }}"{% if path == here %} aria-current="page"{% endif %}>{{ name }}</a>
{% endfor %}
</nav></header>
<main>{% for doc in docs %}{% for root in doc.roots %}{{ embed(root) }}{% endfor %}
{% endfor %}</main>
{% endblock %}
""".replace("SCHEME", SCHEME)
TEMPLATE_OF_PAGE: Final = FILE.environment.from_string(TEMPLATE, {"base": FILE})


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
        context: Any = document.session_context
        request = None if context is None else context.request
        cookies = {} if request is None else request.cookies
        self.arguments = {} if request is None else request.arguments
        self.is_dark = cookies.get(SCHEME) == "dark"
        self.count = collector.count
        self.text = Div(
            stylesheets=[InlineStyleSheet(css=STYLE)], sizing_mode="stretch_width"
        )
        document.title = f"aiogpu: {self.title.lower()}"
        document.template = TEMPLATE_OF_PAGE
        document.template_variables.update(style=STYLE, pages=PAGES, here=self.path)
        document.add_root(self.text)
        for chart in self.charts():
            document.add_root(chart)
        self.show(self.html())
        document.add_periodic_callback(self.update, PERIOD)

    def html(self) -> str:
        """Return the text of the page as it is now."""
        return self.page.html()

    def charts(self) -> Iterable[Any]:
        """Return the charts below the text."""
        raise NotImplementedError

    def add(self, samples: list[Sample]) -> None:
        """Add new samples to the charts."""
        raise NotImplementedError

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


class OverviewTab(Tab):
    """The overview: the state of now, and the tasks of the last hour."""

    def charts(self) -> Iterable[Any]:
        """Return the chart of running and waiting tasks."""
        self._source = ColumnDataSource(_task_columns(list(self.collector.samples)))
        chart = _chart(
            "Tasks in the last hour",
            "tasks",
            is_dark=self.is_dark,
            y_range=DataRange1d(start=0),
        )
        blue, orange = _LINES[self.is_dark]
        for name, color, dash in (
            ("running", blue, "solid"),
            ("waiting", orange, "dashed"),
        ):
            chart.line(
                "time",
                name,
                source=self._source,
                legend_label=name,
                color=color,
                line_dash=dash,
                line_width=2,
            )
        yield _with_legend(chart, is_dark=self.is_dark)

    def add(self, samples: list[Sample]) -> None:
        """Add new samples to the chart."""
        self._source.stream(_task_columns(samples), rollover=HOUR)


class DevicesTab(Tab):
    """The last hour of each device: whose share, how busy, how much memory."""

    path = "/devices"
    title = "Devices"

    def html(self) -> str:
        """Return the programs with their colours."""
        status = self.collector.status
        if self.collector.problem or status is None:
            return f'<p class="problem" role="alert">{text(self.collector.problem)}</p>'
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
            "</ul><p>Areas: the held share of each device, by program. Lines: busy "
            "(solid) and used memory (dashed), as parts of 1.</p>"
        )

    def charts(self) -> Iterable[Any]:
        """Return a chart for each device; all show the same time."""
        self._sources: dict[str, ColumnDataSource] = {}
        status, samples = self.collector.status, list(self.collector.samples)
        shared: Any = None
        for device in () if status is None else status.devices:
            name = f"{device.kind} {device.id}"
            product = device.name or device.type or ""
            source = ColumnDataSource(_device_columns(samples, name))
            self._sources[name] = source
            title = f"{name}  {product}".strip()
            chart = _chart(
                title,
                "part of 1",
                is_dark=self.is_dark,
                y_range=DataRange1d(start=0, end=1.02),
            )
            if shared is None:
                shared = chart.x_range
            chart.x_range = shared
            chart.varea_stack(_SLOTS, x="time", color=_AREAS, alpha=0.75, source=source)
            line = "#ffffff" if self.is_dark else "#000000"
            for column, dash in (("busy", "solid"), ("memory", "dashed")):
                chart.line("time", column, source=source, color=line, line_dash=dash)
            yield chart

    def add(self, samples: list[Sample]) -> None:
        """Add new samples to the charts."""
        for name, source in self._sources.items():
            source.stream(_device_columns(samples, name), rollover=HOUR)


class TimelineTab(Tab):
    """What has run where and when: a row for each device, and for tasks without."""

    path = "/timeline"
    title = "Timeline"

    def __init__(self, *arguments: Any) -> None:
        self._problem = ""
        self._spans: list[Span] | None = None
        self._asking: asyncio.Task[None] | None = None
        super().__init__(*arguments)

    def html(self) -> str:
        """Return the head of the page, draw the last answer, and ask for the next."""
        if self._spans is not None:
            self._draw(self._spans)
            self._spans = None
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self._ask())
        problem = (
            f'<p class="problem" role="alert">{text(self._problem)}</p>'
            if self._problem
            else ""
        )
        return (
            f"{problem}<h2>What ran where</h2><p>The running tasks and the last "
            f"{SPANS} that have ended, in the last ten minutes. Colours: programs, as "
            "on the other pages; a thick red edge: failed. Click a bar for its task. "
            "All tasks, for Perfetto: <code>aiogpu timeline FILE</code>.</p>"
        )

    async def _ask(self) -> None:
        try:
            # Drawn at the next update: outside of one, Bokeh lets nobody change a tab.
            self._spans = await self.collector.timeline()
        except AiogpuError as error:
            self._problem = str(error)
            return
        self._problem = ""

    def _draw(self, spans: list[Span]) -> None:
        status = self.collector.status
        owners = None if status is None else Owners(status)
        rows, columns = _bars(spans, owners, is_dark=self.is_dark)
        if rows != self._chart.y_range.factors:
            self._chart.y_range.factors = rows
            self._chart.height = 120 + 26 * max(len(rows), 3)
        self._source.data = columns

    def charts(self) -> Iterable[Any]:
        """Return the chart of spans."""
        self._source = ColumnDataSource(_bars([], None, is_dark=self.is_dark)[1])
        self._chart = _chart(
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

    def add(self, samples: list[Sample]) -> None:
        """Do nothing: the chart has an answer of its own."""


TEN_MINUTES: Final = 600_000
"""Milliseconds of a timeline."""


class TaskTab(Tab):
    """One task: its state and the reason, or its end with the traceback."""

    path = "/task"
    title = "Task"

    def __init__(self, *arguments: Any) -> None:
        self._problem = "Asking the node."
        self._why: Why | None = None
        self._calls: tuple[EndedTask, ...] = ()
        self._answered = 0.0
        self._asking: asyncio.Task[None] | None = None
        super().__init__(*arguments)

    def html(self) -> str:
        """Return the last answer of the node, and ask again unless the task has ended.

        A closed tab is not updated, so it does not ask.
        """
        asked = self.arguments.get("id", [b""])[0].decode("ascii", "replace")
        if not (asked.isascii() and asked.isdecimal() and len(asked) < LONGEST_NUMBER):
            return (
                '<p class="problem">The address of this page must end in a number of a '
                "task, as in /task?id=12.</p>"
            )
        has_ended = self._why is not None and self._why.ended is not None
        if not has_ended and (self._asking is None or self._asking.done()):
            self._asking = asyncio.ensure_future(self._ask(int(asked)))
        if self._problem:
            return f'<p class="problem" role="alert">{text(self._problem)}</p>'
        ended = [*self._calls]
        if self._why is not None and self._why.ended is not None:
            ended.insert(0, self._why.ended)
        # An ended task does not change, so only its age is counted on.
        age = time.monotonic() - self._answered
        told = [why_ended(replace(e, seconds=e.seconds + age)) for e in ended]
        if self._why is not None and self._why.ended is None:
            told.insert(0, self._why)
        state = "failed calls" if self._why is None else _state(self._why)
        return (
            f"<h2>{text(told[0].name)} <small>{asked}, {text(state)}</small></h2>"
            + "".join(f"<pre>{text(str(part))}</pre>" for part in told)
        )

    async def _ask(self, number: int) -> None:
        try:
            self._why = await self.collector.why(number)
            self._calls = await self.collector.failed_calls(number)
        except AiogpuError as error:
            self._problem = str(error)
            return
        self._answered = time.monotonic()
        is_known = self._why is not None or self._calls
        self._problem = (
            ""
            if is_known
            else f"The node does not know task {number}: it keeps the last 10 000."
        )

    def charts(self) -> Iterable[Any]:
        """Return no chart."""
        return ()

    def add(self, samples: list[Sample]) -> None:
        """Do nothing: the page has no chart."""


LONGEST_NUMBER: Final = 19
"""Digits of a number of a task, and one more."""


def _state(why: Why) -> str:
    return why.state if why.ended is None else why.ended.state


def applications(collector: Collector) -> dict[str, Callable[[Document], None]]:
    """Return the pages by path, each a function that fills the document of a tab."""
    page = Overview(collector)

    def fill(tab: type[Tab], document: Document) -> None:
        tab(page, collector, document)  # the document keeps it

    return {
        tab.path: partial(fill, tab)
        for tab in (OverviewTab, DevicesTab, TimelineTab, TaskTab)
    }


_LINES: Final = {False: ("#0072b2", "#b35900"), True: ("#56b4e9", "#e69f00")}
"""Colours of lines, on light and on dark."""
_AREAS: Final = (
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#f0e442",
    "#0072b2",
    "#d55e00",
    "#cc79a7",
)
"""Colours of programs, as in the style sheet."""
_SLOTS: Final = [f"c{slot}" for slot in range(COLORS)]


def _task_columns(samples: list[Sample]) -> dict[str, Any]:
    """Return samples as columns of a chart; times in milliseconds."""
    return {
        "time": [sample.time * 1000 for sample in samples],
        "running": [float(sample.running) for sample in samples],
        "waiting": [float(sample.waiting) for sample in samples],
    }


def _device_columns(samples: list[Sample], name: str) -> dict[str, Any]:
    """Return the samples of one device as columns: a column for each colour."""
    columns: dict[str, Any] = {slot: [0.0] * len(samples) for slot in _SLOTS}
    columns["time"] = [sample.time * 1000 for sample in samples]
    columns["busy"], columns["memory"] = [nan] * len(samples), [nan] * len(samples)
    for index, sample in enumerate(samples):
        device = sample.devices.get(name)
        if device is None:
            continue
        for client, share in device.shares:
            columns[f"c{client % COLORS}"][index] += share
        if device.utilisation is not None:
            columns["busy"][index] = device.utilisation / 100
        if device.memory is not None:
            columns["memory"][index] = device.memory
    return columns


def _bars(
    spans: list[Span], owners: Owners | None, *, is_dark: bool
) -> tuple[list[str], dict[str, list[Any]]]:
    """Return the names of the rows of a timeline, the last first, and its columns."""
    devices, workers = Rows(DEVICES), Rows(WORKERS)
    names = (
        "row",
        "left",
        "right",
        "color",
        "edge",
        "width",
        "name",
        "task",
        "state",
        "ran",
        "waited",
        "program",
        "worker",
        "pid",
    )
    columns: dict[str, list[Any]] = {name: [] for name in names}
    placed = []
    for each in sorted(spans, key=lambda each: each.started):
        placed += [
            (devices, devices.place((kind, index), f"{kind} {index}", each), each)
            for kind, index in each.devices
        ]
        # Most tasks with devices have a worker of their own: a row each says nothing.
        if not each.devices:
            placed.append((workers, workers.place("", "no device", each), each))
    labels = {
        (rows, event["tid"]): event["args"]["name"]
        for rows in (devices, workers)
        for event in rows.names
        if event["name"] == "thread_name"
    }
    failed, edge = ("#ff9aa5", "#14171a") if is_dark else ("#a40e26", "#ffffff")
    for rows, row, each in placed:
        has_failed = each.outcome in ("failed", "died")
        values = (
            labels[rows, row],
            each.started * 1000,
            each.ended * 1000,
            _AREAS[each.client % COLORS],
            failed if has_failed else edge,
            3 if has_failed else 1,
            escaped(each.name),
            each.task,
            each.outcome,
            span(each.ended - each.started),
            span(each.started - each.queued),
            "" if owners is None else escaped(owners.name(each.client)),
            each.worker,
            each.pid,
        )
        for name, value in zip(names, values, strict=True):
            columns[name].append(value)
    of_devices = [name for (rows, _), name in labels.items() if rows is devices]
    of_workers = [name for (rows, _), name in labels.items() if rows is workers]
    ordered = sorted(of_devices, key=_natural) + sorted(of_workers, key=_natural)
    return ordered[::-1], columns


def _natural(name: str) -> list[str]:
    """Return a key by which "GPU 10" comes after "GPU 9"."""
    return [part.rjust(20) if part.isdecimal() else part for part in name.split(" ")]


def _chart(title: str, unit: str, *, is_dark: bool, y_range: Range) -> Any:
    """Return an empty chart over time."""
    text_color, line = ("#e8eaed", "#3a4048") if is_dark else ("#1b1f24", "#cfd4da")
    chart = figure(
        title=Title(text=title, text_color=text_color),
        height=240,
        y_range=y_range,
        sizing_mode="stretch_width",
        x_axis_type="datetime",
        x_axis_label="time (UTC)",
        y_axis_label=unit,
        tools="xpan,xwheel_zoom,box_zoom,reset",
        active_scroll=None,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=line,
    )
    for axis in chart.axis:
        axis.axis_label_text_color = axis.major_label_text_color = text_color
        axis.axis_line_color = axis.major_tick_line_color = line
        axis.minor_tick_line_color = None
    chart.grid.grid_line_color = line
    chart.toolbar.logo = None
    return chart


def _with_legend(chart: Any, *, is_dark: bool) -> Any:
    """Return a chart with its legend styled, which exists once lines are drawn."""
    chart.legend.location = "top_left"
    chart.legend.background_fill_alpha = 0.0
    chart.legend.border_line_color = None
    chart.legend.label_text_color = "#e8eaed" if is_dark else "#1b1f24"
    return chart
