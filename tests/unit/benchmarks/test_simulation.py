"""The simulation of a cluster: the same for a seed, and true to its own rules."""

import json
from itertools import pairwise

import pytest
from click.testing import CliRunner

from aiogpu.core.model.units import UNIT
from benchmarks.simulation.__main__ import main, simulate
from benchmarks.simulation.boxes import GPUS, Boxes, RayBoxes
from benchmarks.simulation.core import Core
from benchmarks.simulation.first_fit import FirstFit
from benchmarks.simulation.play import play
from benchmarks.simulation.trace import LOAD, Trace, draw

RULES = [Core, FirstFit, Boxes, RayBoxes]
TRACE = draw(600, 64, seed=3)


class Witness:
    """Holds a rule to what it may do."""

    def __init__(self, trace: Trace, rule) -> None:
        self.name = rule.name
        self.free = rule.free
        self._amounts = [trace.kinds[size].amount for size in trace.sizes]
        self._rule = rule
        self._coming: set[int] = set()
        self._running: set[int] = set()

    def submit(self, task, size, now):
        self._coming.add(task)
        return self._see(self._rule.submit(task, size, now))

    def end(self, task, now):
        self._running.remove(task)
        return self._see(self._rule.end(task, now))

    def _see(self, begun):
        for task in begun:
            self._coming.remove(task)
            self._running.add(task)
        assert all(0 <= left <= UNIT for left in self.free)
        held = sum(self._amounts[task] for task in self._running)
        assert sum(self.free) == len(self.free) * UNIT - held
        return begun


def test_a_trace_is_the_same_for_a_seed_and_asks_for_what_is_said():
    assert draw(600, 64, seed=3) == TRACE != draw(600, 64, seed=4)
    work = sum(
        TRACE.kinds[size].amount / UNIT * seconds
        for size, seconds in zip(TRACE.sizes, TRACE.seconds, strict=True)
    )
    assert work / (64 * TRACE.span) == pytest.approx(LOAD)
    assert all(a <= b for a, b in pairwise(TRACE.arrivals))
    assert 0 <= TRACE.arrivals[0] <= TRACE.arrivals[-1] <= TRACE.span


@pytest.mark.parametrize("rule", RULES)
def test_all_that_comes_runs_once_and_no_gpu_is_given_twice(rule):
    kept = rule(TRACE)
    outcome = play(TRACE, Witness(TRACE, kept))
    assert min(outcome.waits) >= 0
    assert set(kept.free) == {UNIT}
    assert outcome == play(TRACE, rule(TRACE))


@pytest.mark.parametrize("rule", [Boxes, RayBoxes])
def test_the_gpus_of_a_task_are_those_of_one_box(rule):
    boxes = rule(TRACE)
    size = next(i for i, kind in enumerate(TRACE.kinds) if kind.amount == 4 * UNIT)
    for task in range(GPUS + 8):
        boxes.submit(task, size, 0.0)
    for _, gpus in boxes._held.values():
        assert len({gpu // GPUS for gpu in gpus}) == 1


def test_under_the_nodes_rule_the_largest_wait_for_a_bounded_time():
    """Under first fit they wait until the others let them, here for much longer."""
    largest = len(TRACE.kinds) - 1
    mine, theirs = (play(TRACE, rule(TRACE)).waits for rule in (Core, FirstFit))
    wide = [task for task, size in enumerate(TRACE.sizes) if size >= largest - 1]
    assert wide
    assert max(mine[task] for task in wide) < max(TRACE.seconds)
    assert max(mine[task] for task in wide) < max(theirs[task] for task in wide)


def test_the_command_tells_the_same_twice(tmp_path):
    file = tmp_path / "found.json"
    arguments = ["--tasks", "200", "--gpus", "16", "--seed", "2", "--json", str(file)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    told = json.loads(file.read_text(encoding="utf-8"))
    assert told["rules"] == simulate(200, 16, 2)["rules"]
    assert all(rule["rule"] in result.output for rule in told["rules"])
    assert told["speed"]["tasks_per_second"] > 0


def test_gpus_are_whole_boxes():
    result = CliRunner().invoke(main, ["--gpus", "12"])
    assert result.exit_code == 2
    assert "multiple of 8" in result.output
