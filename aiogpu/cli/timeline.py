"""Which task ran on which device when: pure facts, neither drawn nor measured here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Span(NamedTuple):
    """One task's time in its worker.

    Attributes:
        task: its number.
        gpus: the devices that it held.
        pid: its process.
        begin: when its code began, by `time.monotonic()`.
        end: when it ended.
    """

    task: int
    gpus: tuple[int | str, ...]
    pid: int
    begin: float
    end: float


def lanes(spans: Iterable[Span], gpu: int | str) -> list[list[Span]]:
    """Spread a device's spans over as few lanes as hold them without overlap."""
    found: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        if gpu not in span.gpus:
            continue
        for lane in found:
            if lane[-1].end <= span.begin:
                lane.append(span)
                break
        else:
            found.append([span])
    return found


def peak(spans: Iterable[Span], gpu: int | str) -> int:
    """Return how many tasks ran on a device at the same time, at most."""
    # Of an end and a beginning at the same moment, the end comes first.
    changes = sorted(
        change
        for span in spans
        if gpu in span.gpus
        for change in ((span.begin, 1), (span.end, -1))
    )
    running = highest = 0
    for _, change in changes:
        running += change
        highest = max(highest, running)
    return highest


def device_label(gpu: int | str) -> str:
    """A short name: an index with its kind, or the beginning of a UUID."""
    return gpu[:12] if isinstance(gpu, str) else f"GPU {gpu}"
