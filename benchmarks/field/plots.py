"""Charts of a run: a file for each family, the same for the same figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.field.figures import Line, spread
from benchmarks.field.page import FAMILIES
from benchmarks.field.question import Question

COLOURS: Final = {
    "floor": "#7f7f7f",
    "aiogpu": "#d62728",
    "node": "#ff9d9a",
    "executor": "#1f77b4",
    "loky": "#17a2b8",
    "dask": "#e6a700",
    "xoscar": "#2ca02c",
    "ray": "#6f42c1",
}
MARKERS: Final = dict(zip(COLOURS, "|osDv^PX", strict=True))
UNITS: Final = {"s": "seconds, log scale; less is better", "B": "bytes, log scale"}
SETTINGS: Final = {
    "svg.hashsalt": "aiogpu",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
}
WIDTH: Final = 9.0
HEIGHT: Final = 0.62
"""Inches of a metric."""


def draw(
    folder: Path,
    questions: Mapping[str, Question],
    found: Mapping[str, Sequence[Line]],
) -> list[Path]:
    """Draw all families that have figures; gives the files."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    with mpl.rc_context(SETTINGS):
        for family, title in FAMILIES.items():
            metrics = [
                each
                for each in found.values()
                if questions[each[0].question].family == family
                and any(line.p50 for line in each)
            ]
            if metrics:
                files.append(folder / f"{family}.svg")
                figure = _chart(Figure, title, metrics)
                # Without it the file would tell the time, and differ each time.
                figure.savefig(files[-1], format="svg", metadata={"Date": None})
    return files


def _chart(make: Any, title: str, metrics: Sequence[Sequence[Line]]) -> Any:
    """A panel for each unit, a row for each metric, a dot for each contestant."""
    units = list(dict.fromkeys(each[0].metric.unit for each in metrics))
    panels = [[each for each in metrics if each[0].metric.unit == u] for u in units]
    heights = [len(panel) + 0.9 for panel in panels]
    figure = make(figsize=(WIDTH, HEIGHT * sum(heights) + 0.9), layout="constrained")
    every = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axes, panel, unit in zip(every[:, 0], panels, units, strict=True):
        _panel(axes, panel, unit)
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    handles: dict[str, Any] = {}
    for axes in every[:, 0]:
        marks, names = axes.get_legend_handles_labels()
        handles |= dict(zip(names, marks, strict=True))
    present = [name for name in COLOURS if name in handles]
    figure.legend(
        [handles[name] for name in present],
        present,
        loc="outside lower center",
        ncols=len(present),
        frameon=False,
        columnspacing=1.0,
        handletextpad=0.2,
    )
    return figure


def _panel(axes: Any, metrics: Sequence[Sequence[Line]], unit: str) -> None:
    for row, each in enumerate(metrics):
        axes.axhspan(row - 0.5, row + 0.5, color="#f4f4f4" if row % 2 else "white")
        for line in each:
            if line.p50:
                _dot(axes, row, line)
    axes.set_xscale("log")
    axes.set_yticks(range(len(metrics)), [each[0].metric.title for each in metrics])
    axes.set_ylim(len(metrics) - 0.5, -0.5)
    axes.set_xlabel(UNITS[unit])
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _dot(axes: Any, row: int, line: Line) -> None:
    """The median of the blocks, with a line from quartile to quartile."""
    found = spread([turn for turn in line.turns if turn > 0])
    if found is None:
        return
    names = list(COLOURS)
    place = names.index(line.contestant) if line.contestant in names else 0
    height = row + (place - (len(names) - 1) / 2) * 0.1
    colour = COLOURS.get(line.contestant, "black")
    axes.plot([found.low, found.high], [height] * 2, color=colour, linewidth=1.5)
    axes.plot(
        [found.middle],
        [height],
        MARKERS.get(line.contestant, "o"),
        color=colour,
        markersize=9 if line.contestant == "floor" else 6,
        markeredgewidth=2 if line.contestant == "floor" else 0.5,
        label=line.contestant,
    )
