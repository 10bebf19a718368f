"""Spans in the Trace Event Format, which Perfetto and Chrome's tracing open.

One group of rows shows devices, the other workers. Tasks that share a device get a row
each, because the format shows overlapping events of one row as nested.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, Final, NamedTuple

DEVICES: Final = 1
"""The `pid` of the format: the group of the rows of devices."""
WORKERS: Final = 2
Event = dict[str, Any]


class Span(NamedTuple):
    """One attempt at a task.

    Attributes:
        task: its number.
        name: its name.
        client: the number of its program, 0 for the node's own.
        worker: the worker that ran it.
        pid: the process of the worker, 0 if no longer known.
        devices: its devices, each a kind and an index: `("GPU", 0)`.
        queued: seconds since the epoch, when it was submitted.
        started: likewise, when it was sent to its worker or begun.
        ended: likewise, or the time of asking if it is running.
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
    """The rows of one group: as many of each device or worker as spans overlap."""

    def __init__(self, group: int) -> None:
        self._group = group
        self._rows: dict[Hashable, list[tuple[int, float]]] = {}
        self._last = 0
        self.names: list[Event] = []

    def place(self, thing: Hashable, name: str, span: Span) -> int:
        """The row in which a span has room; spans come in the order of their begin."""
        rows = self._rows.setdefault(thing, [])
        for place, (row, free_from) in enumerate(rows):
            if free_from <= span.started:
                rows[place] = row, span.ended
                return row
        self._last += 1
        rows.append((self._last, span.ended))
        nth = f" ({len(rows)})" if len(rows) > 1 else ""
        ids = {"pid": self._group, "tid": self._last}
        self.names += _named("thread", f"{name}{nth}", self._last, **ids)
        return self._last


def trace_of(spans: Iterable[Span]) -> dict[str, Any]:
    """The spans as an object to be written as JSON."""
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


def _named(what: str, name: str, index: int, **ids: int) -> Iterator[Event]:
    """The events that name a group or a row, and give its place."""
    for key, value in (("name", name), ("sort_index", index)):
        yield {"name": f"{what}_{key}", "ph": "M", **ids, "args": {key: value}}
