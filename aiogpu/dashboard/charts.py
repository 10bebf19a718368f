"""The charts of the pages, and the columns of their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any, Final

from bokeh.models import ColumnDataSource
from bokeh.models.annotations import Title
from bokeh.models.ranges import Range
from bokeh.plotting import figure

from aiogpu.core.model.text import escaped, span
from aiogpu.dashboard.collector import Sample
from aiogpu.observe.overview import COLORS
from aiogpu.observe.owners import Owners
from aiogpu.observe.trace import DEVICES, WORKERS, Rows, Span

LINES: Final = {False: ("#0072b2", "#b35900"), True: ("#56b4e9", "#e69f00")}
"""Colours of lines, on light and on dark."""
AREAS: Final = (
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#f0e442",
    "#0072b2",
    "#d55e00",
    "#cc79a7",
)
"""Colours of programs, as in the style sheet."""
ALPHA: Final = {False: 0.75, True: 0.55}
"""Opacity of areas, so that a line over them is seen."""
TEXTS: Final = {False: "#1b1f24", True: "#e8eaed"}
"""Colours of text, and of lines over areas."""
SLOTS: Final = [f"c{slot}" for slot in range(COLORS)]


def task_columns(samples: list[Sample]) -> dict[str, Any]:
    """Return samples as columns of a chart; times in milliseconds."""
    return {
        "time": [sample.time * 1000 for sample in samples],
        "running": [float(sample.running) for sample in samples],
        "waiting": [float(sample.waiting) for sample in samples],
    }


def device_columns(samples: list[Sample], name: str) -> dict[str, Any]:
    """Return the samples of one device as columns: a column for each colour."""
    columns: dict[str, Any] = {slot: [0.0] * len(samples) for slot in SLOTS}
    columns["time"] = [sample.time * 1000 for sample in samples]
    for figure_ in ("busy", "temperature", "memory"):
        columns[figure_] = [nan] * len(samples)
    for index, sample in enumerate(samples):
        device = sample.devices.get(name)
        if device is None:
            continue
        for client, share in device.shares:
            columns[f"c{client % COLORS}"][index] += share
        if device.utilisation is not None:
            columns["busy"][index] = float(device.utilisation)
        if device.temperature is not None:
            columns["temperature"][index] = float(device.temperature)
        if device.memory is not None:
            columns["memory"][index] = device.memory
    return columns


def bars_of(
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
            AREAS[each.client % COLORS],
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


def chart_over_time(
    title: str, unit: str, *, is_dark: bool, y_range: Range, height: int = 240
) -> Any:
    """Return an empty chart over time."""
    text_color, line = TEXTS[is_dark], "#3a4048" if is_dark else "#cfd4da"
    chart = figure(
        title=Title(text=title, text_color=text_color),
        height=height,
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
    ticker: Any = chart.xaxis.ticker
    ticker.desired_num_ticks = 4  # more do not fit on a telephone
    chart.toolbar.logo = None
    return chart


def stack_shares(chart: Any, source: ColumnDataSource, *, is_dark: bool) -> None:
    """Draw the shares of programs as stacked areas, and the used memory over them."""
    alpha = ALPHA[is_dark]
    chart.varea_stack(SLOTS, x="time", color=AREAS, alpha=alpha, source=source)
    names, colors = {"memory": "memory used"}, (TEXTS[is_dark],)
    draw_lines(chart, source, names, colors, is_dark=is_dark)


def draw_lines(
    chart: Any,
    source: ColumnDataSource,
    names: Mapping[str, str],
    colors: Sequence[str],
    *,
    is_dark: bool,
) -> None:
    """Draw columns over time, the first as a solid line, with a legend.

    Args:
        chart: the chart.
        source: has the columns.
        names: the label of each column.
        colors: the colour of each line.
        is_dark: the colour scheme.
    """
    for (column, label), color, dash in zip(
        names.items(), colors, ("solid", "dashed"), strict=False
    ):
        chart.line(
            "time",
            column,
            source=source,
            legend_label=label,
            color=color,
            line_dash=dash,
            line_width=2,
        )
    legend = chart.legend[0]
    legend.orientation = "horizontal"
    legend.background_fill_alpha, legend.border_line_color = 0.0, None
    legend.label_text_color = TEXTS[is_dark]
    legend.margin = legend.padding = 0
    legend.spacing = 14
    chart.add_layout(legend, "above")
