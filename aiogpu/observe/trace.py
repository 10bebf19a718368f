"""Spans in the Trace Event Format, which Perfetto and Chrome's tracing open.

One group of rows shows devices, the other workers. Tasks that share a device are shown
in different rows, because the format shows overlapping events of one row as nested.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Final, NamedTuple

DEVICES: Final = 1
"""The group of rows for devices; a `pid` in the format."""
WORKERS: Final = 2
"""The group of rows for workers."""
Event = dict[str, Any]


class Span(NamedTuple):
    """One attempt at a task.

    Attributes:
        task: the task's number.
        name: the task's name.
        client: the number of its program, 0 for the node's own.
        worker: the worker that ran it.
        pid: the process of the worker, 0 if no longer known.
        devices: its devices, each a kind and an index: `("GPU", 0)`.
        queued: when it was submitted, in seconds since the epoch.
        started: when it was sent to its worker or begun, likewise.
        ended: when it ended, likewise; the present time if it is running.
        outcome: "finished", "failed", "cancelled", "died", "retried" or "running".
    """

    task: int
    name: str
    client: int
    worker: int
    pid: int
    devices: tuple[tuple[str, int], ...]
    queued: float
    started: float
    ended: float
    outcome: str


class Rows:
    """The rows of one group: for each device or worker, as many as spans overlap."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._rows: dict[Hashable, list[tuple[int, float]]] = {}
        self._last = 0
        self.names: list[Event] = []

    def place(self, owner: Hashable, name: str, span: Span) -> int:
        """Return the row for a span of a device or worker.

        Spans must come in the order in which they started.
        """
        rows = self._rows.setdefault(owner, [])
        for index, (row, free_from) in enumerate(rows):
            if free_from <= span.started:
                rows[index] = row, span.ended
                return row
        self._last += 1
        rows.append((self._last, span.ended))
        nth = f" ({len(rows)})" if len(rows) > 1 else ""
        ids = {"pid": self._group, "tid": self._last}
        self.names += _named("thread", f"{name}{nth}", self._last, **ids)
        return self._last


def trace_of(spans: Iterable[Span]) -> dict[str, Any]:
    """Return the spans as an object to be written as JSON."""
    devices, workers = Rows(DEVICES), Rows(WORKERS)
    events: list[Event] = []
    for span in sorted(spans, key=lambda span: span.started):
        for kind, index in span.devices:
            row = devices.place((kind, index), f"{kind} {index}", span)
            events.append(_event(span, DEVICES, row))
        row = workers.place(span.worker, f"worker {span.worker}", span)
        events.append(_event(span, WORKERS, row))
    groups = [
        event
        for group, name in ((DEVICES, "devices"), (WORKERS, "workers"))
        for event in _named("process", name, group, pid=group)
    ]
    names = [*groups, *devices.names, *workers.names]
    return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def _event(span: Span, group: int, row: int) -> Event:
    return {
        "name": span.name,
        "cat": span.outcome,
        "ph": "X",
        "ts": round(span.started * 1e6),
        "dur": max(round((span.ended - span.started) * 1e6), 1),
        "pid": group,
        "tid": row,
        "args": {
            "task": span.task,
            "client": span.client,
            "worker": span.worker,
            "pid": span.pid,
            "waited": round(max(span.started - span.queued, 0.0), 6),
            "outcome": span.outcome,
            "devices": [f"{kind} {index}" for kind, index in span.devices],
        },
    }


def _named(level: str, name: str, index: int, **ids: int) -> Iterator[Event]:
    """Yield the events that give a group or a row its name and its position."""
    for key, value in (("name", name), ("sort_index", index)):
        yield {"name": f"{level}_{key}", "ph": "M", **ids, "args": {key: value}}
