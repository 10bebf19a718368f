"""The cost of a decision of the scheduler alone, without processes and sockets."""

from __future__ import annotations

import gc
from functools import partial
from random import Random
from statistics import median
from time import perf_counter_ns, thread_time_ns
from typing import Final

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import TaskId, WorkerId
from aiogpu.core.model.request import TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.engines.local import WARM
from benchmarks.micro import rows
from benchmarks.micro.rows import BUSY, Goal, Row, Scale
from benchmarks.simulation.scheduler import SimulatedNode, Started, task_spec
from benchmarks.timing import Block, alternate

GPUS: Final = 4
RUNNING: Final = 4 * GPUS
LEAST_SHARE: Final = 0.9
"""Share of one core; with less, other processes ran on that core."""
RATE: Final = Goal(100_000, "cycles/s", is_least=True)
DEEP: Final = Goal(1.3, "x few")
WIDE: Final = Goal(3, "x 4 GPUs")
MIX: Final = [task_spec(UNIT * quarters // 4) for quarters in (1, 2, 4, 8)]
ONE_OF_EACH: Final = 3.75
"""GPUs that one task of each kind of the mix takes together."""
MANY_GPUS: Final = 1_000
ALIVE: Final = 100
"""Tasks of each kind of the mix that run on many GPUs."""
EXTRA: Final = 16
"""Tasks of each kind that wait, where the GPUs are full."""
EVENT: Final = 10e-6
"""Seconds of simulated time from one event to the next."""
TOOK: Final = 5e-6
"""Reported duration of every task in seconds: short enough to be sent ahead."""


class Load:
    """A simulated node whose tasks end in random order."""

    def __init__(self, cpus: int, gpus: int) -> None:
        config = SchedulerConfig(idle_workers=WARM + cpus)
        self.node = SimulatedNode(cpus, gpus, config, perf_counter_ns)
        self._random = Random(0)
        self._now = 0.0
        self._last = 0
        self._specs: dict[TaskId, TaskSpec] = {}
        self.busy: list[WorkerId] = []

    def submit(self, spec: TaskSpec) -> None:
        """Submit one task."""
        self._now += EVENT
        self._last += 1
        self._specs[TaskId(self._last)] = spec
        self._note(self.node.submit(TaskId(self._last), spec, self._now))

    def finish(self) -> TaskSpec:
        """End the task of a random busy worker; return the task's description."""
        self._now += EVENT
        place = self._random.randrange(len(self.busy))
        worker = self.busy[place]
        self.busy[place] = self.busy[-1]
        self.busy.pop()
        task = self.node.running[worker][0]
        self._note(self.node.finish(worker, self._now, False, TOOK))
        return self._specs.pop(task)

    def _note(self, started: Started) -> None:
        self.busy += [worker for _, worker in started]

    async def cycles(self, count: int) -> Block:
        """Finish tasks and submit the same again; return the scheduler's own time."""
        before = self.node.spent
        for _ in range(count):
            self.submit(self.finish())
        return [self.node.spent - before]


async def scheduler(scale: Scale) -> list[Row]:
    """Decisions by themselves; with a million waiting tasks; with a thousand GPUs."""
    table = [_rate(scale)]
    gc.collect()
    gc.disable()
    try:
        table.append(await _deep_cycles(scale))
    finally:
        gc.enable()
    return table + await _wide(scale)


def _rate(scale: Scale) -> Row:
    """Measure submission to end, one task after the other."""
    node, spec = SimulatedNode(4, GPUS), task_spec(UNIT // 4)
    step = node.scheduler
    worker = node.submit(TaskId(1), spec, 0.0)[0][1]
    node.finish(worker, 0.0)
    blocks: list[Block] = []
    began, began_on_cpu = perf_counter_ns(), thread_time_ns()
    for _ in range(scale(40, 2)):
        block = []
        for number in range(2, scale(500, 20) + 2):
            start = perf_counter_ns()
            step.submit(0.0, TaskId(number), spec)
            step.finish(0.0, TaskId(number), worker)
            block.append(perf_counter_ns() - start)
        blocks.append(block)
    share = (thread_time_ns() - began_on_cpu) / (perf_counter_ns() - began)
    fault = (
        "" if share >= LEAST_SHARE else f"the thread had {share:.0%} of a core; {BUSY}"
    )
    rates = [1e9 * len(block) / sum(block) for block in blocks]
    note = f"blocks {min(rates):,.0f} to {max(rates):,.0f}"
    return Row("scheduler: rate", "cycles/s", median(rates), RATE, note, fault)


async def _deep_cycles(scale: Scale) -> Row:
    """Measure an end and a submission while few or very many tasks wait."""
    loads, spec = (Load(RUNNING, GPUS), Load(RUNNING, GPUS)), task_spec(UNIT // 4)
    for load, waiting in zip(loads, (1_000, scale(1_000_000, 2_000)), strict=True):
        for _ in range(RUNNING + waiting):
            load.submit(spec)
    return await _cycles("deep queue", *loads, DEEP, scale)


async def _wide(scale: Scale) -> list[Row]:
    """Measure an end and a submission on few GPUs and on a thousand."""
    few, many, table = Load(4 * GPUS, GPUS), Load(4 * MANY_GPUS, MANY_GPUS), []
    for name, on_few, on_many in (
        ("room to spare", 1, ALIVE),
        ("full", EXTRA, int(MANY_GPUS / ONE_OF_EACH) - ALIVE + EXTRA),
    ):
        for load, count in ((few, on_few), (many, on_many)):
            for spec in MIX * count:
                load.submit(spec)
        table.append(await _cycles(f"1,000 GPUs, {name}", few, many, WIDE, scale))
    return table


async def _cycles(what: str, easy: Load, hard: Load, goal: Goal, scale: Scale) -> Row:
    count = scale(5_000, 50)
    runs = partial(easy.cycles, count), partial(hard.cycles, count)
    pair = await alternate(*runs, scale(40, 2))
    return rows.times(f"scheduler: {what}", "us", pair, goal, calls=count)
