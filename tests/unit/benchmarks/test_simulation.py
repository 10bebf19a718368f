"""The simulation: its figures depend on the seed alone, its policies obey the rules."""

import json
from itertools import pairwise
from random import Random

import pytest
from click.testing import CliRunner

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.ids import TaskId
from aiogpu.core.model.units import UNIT
from benchmarks.simulation.__main__ import compare, main
from benchmarks.simulation.policies import (
    FirstFit,
    NodesFirstFit,
    RayPolicy,
)
from benchmarks.simulation.scheduler import AiogpuPolicy, SimulatedNode, task_spec
from benchmarks.simulation.simulate import simulate
from benchmarks.simulation.trace import LOAD, draw

POLICIES = [AiogpuPolicy, FirstFit, NodesFirstFit, RayPolicy]
TRACE = draw(600, 64, seed=3)


class Checked:
    """A policy that is checked after each event: no GPU is overcommitted."""

    def __init__(self, trace, policy):
        self.name = policy.name
        self.free = policy.free
        self._amounts = [trace.classes[size].amount for size in trace.sizes]
        self._policy = policy
        self._waiting, self._running = set(), set()

    def submit(self, task, size, now):
        self._waiting.add(task)
        return self._check(self._policy.submit(task, size, now))

    def end(self, task, now):
        self._running.remove(task)
        return self._check(self._policy.end(task, now))

    def _check(self, started):
        for task in started:
            self._waiting.remove(task)
            self._running.add(task)
        assert all(0 <= remaining <= UNIT for remaining in self.free)
        held = sum(self._amounts[task] for task in self._running)
        assert sum(self.free) == len(self.free) * UNIT - held
        return started


def test_a_trace_requests_the_stated_load():
    assert draw(600, 64, seed=3) == TRACE != draw(600, 64, seed=4)
    assert TRACE.work / (64 * TRACE.span) == pytest.approx(LOAD)
    assert all(a <= b for a, b in pairwise(TRACE.arrivals))
    assert 0 <= TRACE.arrivals[0] <= TRACE.arrivals[-1] <= TRACE.span


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_runs_each_task_once_and_shares_no_gpu_twice(policy):
    checked = policy(TRACE)
    outcome = simulate(TRACE, Checked(TRACE, checked))
    assert min(outcome.waits) >= 0
    assert set(checked.free) == {UNIT}
    assert outcome == simulate(TRACE, policy(TRACE))


def test_large_tasks_wait_less_under_aiogpus_policy_than_under_first_fit():
    """Under first fit they wait until smaller tasks leave room."""
    policies = (AiogpuPolicy, FirstFit)
    ours, first_fit = (simulate(TRACE, policy(TRACE)).waits for policy in policies)
    largest = len(TRACE.classes) - 1
    wide = [task for task, size in enumerate(TRACE.sizes) if size >= largest - 1]
    longest = max(ours[task] for task in wide)
    assert longest < max(TRACE.durations)
    assert longest < max(first_fit[task] for task in wide)


@pytest.mark.parametrize("max_calls", [0, 1])
def test_a_simulated_node_runs_tasks_sent_ahead_in_order_and_ends_its_workers(
    max_calls,
):
    node, random = SimulatedNode(2, 0, SchedulerConfig(idle_workers=2)), Random(0)
    spec = task_spec(0, max_calls=max_calls)
    started, now, ahead = [], 0.0, 0
    for number in range(1, 301):
        now += 1e-5
        started += node.submit(TaskId(number), spec, now)
    while busy := [worker for worker, tasks in node.running.items() if tasks]:
        now += 1e-5
        ahead = max(ahead, *(len(tasks) for tasks in node.running.values()))
        # Five microseconds each: short enough to be sent ahead of need.
        started += node.finish(random.choice(busy), now, False, 5e-6)
    assert sorted(task for task, _ in started) == [*range(1, 301)]
    assert (ahead > 20) is (max_calls == 0)
    assert node.spent > 0
    assert not node.scheduler.tasks
    assert len(node.scheduler.workers) == (0 if max_calls else 2)
    node.scheduler.check()


def test_the_command_gives_the_same_figures_for_a_seed(tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["--tasks", "200", "--gpus", "16", "--seed", "2", "--json", str(file)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    (figures,) = json.loads(file.read_text(encoding="utf-8"))["runs"]
    assert figures["policies"] == compare(200, 16, 2)["policies"]
    assert all(each["policy"] in result.output for each in figures["policies"])
    assert figures["seconds"] > 0
    assert CliRunner().invoke(main, ["--tasks", "9", "--gpus", "12"]).exit_code == 2
    assert "go together" in CliRunner().invoke(main, ["--gpus", "16"]).output
