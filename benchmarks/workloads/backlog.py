"""What do very many waiting tasks weigh, and how long do they hold the loop?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.method import Scale
from benchmarks.port import Environment, UnsupportedError
from benchmarks.rows import BUSY, MS, NO_GOAL, US, Goal, Row, judge

LONGEST: Final = Goal(20, "ms")
HEAVIEST: Final = Goal(1024, "bytes")


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """Once without the garbage collector, which is the user's, and once with it."""
    return [
        *_rows(_look(environment, scale), scale),
        *_rows_with_collector(_look(environment, scale, "collected")),
    ]


def _look(environment: Environment, scale: Scale, *options: str) -> dict[str, Any]:
    """What a process of its own finds. The loop waits; it has nothing else to do."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.backlog"),
            *(environment.name, str(scale.waiting), *options),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    if "unsupported" in found:
        raise UnsupportedError(found["unsupported"])
    return found


def _rows(found: dict[str, Any], scale: Scale) -> Iterator[Row]:
    weight = found["weight"]
    yield Row(
        "backlog: memory of a waiting task",
        "bytes",
        judge(weight["bytes"], HEAVIEST, scale),
        p50=weight["bytes"],
        note="its handle included",
        goal=str(HEAVIEST),
    )
    yield Row(
        "backlog: objects of a waiting task",
        "tracked",
        NO_GOAL,
        p50=weight["tracked"],
        note="by the collector; its handle included",
    )
    for name, hold in found["holds"].items():
        longest, on_cpu = hold["longest"] / MS, hold["on_cpu"] / MS
        fault = ""
        if not LONGEST.admits(longest) and LONGEST.admits(on_cpu):
            # Code of ours that waits would show so too, and on a quiet machine still.
            fault = f"it ran {on_cpu:.1f} ms of these; {BUSY}"
        yield Row(
            f"backlog: {name}",
            "ms held",
            judge(longest, LONGEST, scale, fault),
            p50=longest,
            note=f"on CPU {on_cpu:.1f} ms{_calls(hold, name, scale)}",
            goal=str(LONGEST),
        )


def _calls(hold: dict[str, int], name: str, scale: Scale) -> str:
    if not hold["calls"]:
        return f"; {hold['whole'] / MS:,.0f} ms in all"
    count = scale.waiting if name == "submitting" else scale.waiting // 10
    return f"; {hold['calls'] / count / US:.1f} us a call"


def _rows_with_collector(found: dict[str, Any]) -> Iterator[Row]:
    for name, hold in found["holds"].items():
        yield Row(
            f"backlog: {name}, collector on",
            "ms held",
            NO_GOAL,
            p50=hold["longest"] / MS,
            note=f"longest collection {hold['collecting'] / MS:.1f} ms",
        )
