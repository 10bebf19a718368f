"""Blocks of decisions of a scheduler alone, and a row of what they cost."""

from __future__ import annotations

from benchmarks.method import Block, Pair, Scale
from benchmarks.port import Paper
from benchmarks.rows import US, Goal, Row, judge, spread


async def decide(paper: Paper, count: int) -> Block:
    """So often finish a task and submit one like it; gives the scheduler's own time."""
    before = paper.spent
    for _ in range(count):
        paper.submit(paper.finish())
    return [paper.spent - before]


def decisions_row(
    name: str, pair: Pair, counts: tuple[int, int], goal: Goal | None, scale: Scale
) -> Row:
    """What one decision costs, beside what it costs in the easy case.

    Args:
        name: of the row.
        pair: blocks of the easy case, then of the hard one.
        counts: decisions in a block of each.
        goal: of the ratio of both.
        scale: whether there was enough of it.
    """
    each = Pair(
        [[block[0] // counts[0]] for block in pair.floor],
        [[block[0] // counts[1]] for block in pair.workload],
    )
    return Row(
        name,
        "us",
        judge(each.ratio, goal, scale),
        p50=sorted(each.workload)[len(each.workload) // 2][0] / US,
        floor=sorted(each.floor)[len(each.floor) // 2][0] / US,
        ratio=each.ratio,
        note=spread(each.ratios),
        goal=str(goal or ""),
        samples=pair.workload,
        floor_samples=pair.floor,
    )
