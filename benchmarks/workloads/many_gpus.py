"""Does a decision cost more where there are very many GPUs?"""

from __future__ import annotations

from functools import partial
from typing import Final

from benchmarks.decisions import decide, decisions_row
from benchmarks.method import Scale, alternate
from benchmarks.port import Environment, Need, Paper
from benchmarks.rows import Goal, Row

KINDS: Final = tuple(Need(num_gpus=amount) for amount in (0.25, 0.5, 1, 2))
ONE_OF_EACH: Final = sum(need.num_gpus for need in KINDS)
FEW: Final = 4
"""GPUs on which one task of each kind fits."""
MANY: Final = 1_000
ALIVE: Final = 100
"""Tasks of each kind that run on many."""
WAITING: Final = 16
"""Tasks of each kind that wait, where the GPUs are full."""
GOAL: Final = Goal(3, "x 4 GPUs")


async def measure(environment: Environment, scale: Scale) -> list[Row]:
    """A task ends and one like it is submitted: with room to spare, and without."""
    few, many = _node(environment, FEW, 1), _node(environment, MANY, ALIVE)
    rows = [await _beside("many_gpus: room to spare", few, many, scale)]
    for paper, gpus, alive in ((few, FEW, 1), (many, MANY, ALIVE)):
        _submit(paper, int(gpus / ONE_OF_EACH) - alive + WAITING)
    return [*rows, await _beside("many_gpus: full", few, many, scale)]


def _node(environment: Environment, gpus: int, alive: int) -> Paper:
    paper = environment.paper(4 * gpus, gpus)
    _submit(paper, alive)
    return paper


def _submit(paper: Paper, count: int) -> None:
    for _ in range(count):
        for need in KINDS:
            paper.submit(need)


async def _beside(name: str, few: Paper, many: Paper, scale: Scale) -> Row:
    pair = await alternate(
        partial(decide, few, scale.cycles),
        partial(decide, many, scale.cycles),
        scale.blocks,
    )
    return decisions_row(name, pair, (scale.cycles, scale.cycles), GOAL, scale)
