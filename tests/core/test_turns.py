"""Turns between children and other tasks: none starves, and trees stay narrow."""

from collections import Counter

import pytest

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.scheduler.turns import EXAMINED
from tests.core.builders import World, starve, submit

AFTER = 1.0
CONFIG = SchedulerConfig(reserve_after=AFTER, refill_after=0.0)


class Pump:
    """A parent that keeps many children waiting; each runs for a moment."""

    def __init__(self, w: World, *, is_actor: bool) -> None:
        self.w = w
        self.ended: list[str] = []
        self._waits = not is_actor
        self._count = 0
        self._left: dict[str, None] = {}
        options = {"is_endless": is_actor, "max_calls": int(is_actor)}
        w.submit("pump", num_cpus=0, function=9, **options)
        self.refill()

    def refill(self) -> None:
        """Keep eight children in flight."""
        while len(self._left) < 8:
            self._count += 1
            name = f"child {self._count}"
            self._left[name] = None
            self.w.submit(name, parent="pump", function=1)
        if self._waits:
            self.w.wait_for("pump", *self._left)

    def step(self) -> None:
        """Finish the task that runs first, and refill."""
        name = min(self.w.running - {"pump"}, key=self.w.now_running.index)
        self.ended.append(name)
        self._left.pop(name, None)
        self.w.finish(name)
        self.w.advance(1e-3)
        self.refill()


class Line(World):
    """A world that knows in which order tasks began."""

    @property
    def now_running(self) -> list[str]:
        """The running tasks by number."""
        return sorted(self.running, key=lambda name: self.tasks[name].id)


def steps_until(pump: Pump, names: set[str]) -> int:
    """Let children run until all of some tasks have ended; return the steps."""
    steps = 0
    while not names <= set(pump.ended):
        pump.step()
        steps += 1
        assert steps < 1000, (names - set(pump.ended), pump.w.running)
    return steps


@pytest.mark.parametrize("took", [0.0, 1e-5], ids=["long", "short"])
@pytest.mark.parametrize("is_actor", [False, True], ids=["task", "actor"])
def test_own_calls_take_turns_with_endless_children(is_actor, took):
    w = Line(cpus=2, config=CONFIG, took=took)
    pump = Pump(w, is_actor=is_actor)
    own = [f"own {number}" for number in range(20)]
    submit(w, own, function=2)
    assert steps_until(pump, set(own)) <= 3 * len(own) + 20


@pytest.mark.parametrize("is_actor", [False, True], ids=["task", "actor"])
def test_tasks_of_other_shapes_take_turns_with_endless_children(is_actor):
    w = Line(cpus=2, gpus=1, config=CONFIG)
    pump = Pump(w, is_actor=is_actor)
    w.submit("own", num_gpus=0.5)
    w.submit("new actor", is_endless=True, max_calls=1)
    w.submit("other variables", environment={"A": "b"})
    submit(w, ["a", "b", "c"], num_gpus=0.25, priority=0, function=3)
    w.submit("low", priority=-1)
    w.submit("low too", priority=-1, environment={"B": "c"})
    steps_until(pump, {"own", "new actor", "other variables", "a", "b", "c"})
    assert not {"low", "low too"} & set(pump.ended)


def test_children_of_a_waiting_task_go_on_under_endless_calls():
    """The same for children: others that arrive for ever do not pass them for ever."""
    w = Line(cpus=1, config=CONFIG)
    w.submit("parent")
    submit(w, [f"child {n}" for n in range(20)], parent="parent", function=1)
    w.wait_for("parent", *(f"child {n}" for n in range(20)))
    ended, count = Counter(), 0
    while ended["child"] < 20:
        while len(w.waiting) < 40:
            count += 1
            w.submit(f"own {count}", function=2)
        [running] = w.running - {"parent"}
        ended[running.split()[0]] += 1
        w.finish(running)
    assert ended["own"] <= 2 * ended["child"] + 2
    assert w.running >= {"parent"}


def blocked_at_most(w: World, roots: int, leaves: int, seconds: float) -> int:
    """Work off trees of a root and its leaves; return the most roots that wait."""
    submit(w, [f"root {n}" for n in range(roots)], function=1)
    most, begun = 0, set()
    while running := w.running - w.blocked:
        name = min(running, key=lambda name: w.tasks[name].id)
        if name.startswith("root") and name not in begun:
            begun.add(name)
            own = [f"leaf {n} of {name}" for n in range(leaves)]
            submit(w, own, function=2, parent=name)
            w.wait_for(name, *own)
            most = max(most, len(w.blocked))
        else:
            w.finish(name)
            w.advance(seconds * name.startswith("leaf"))
    assert len(begun) == roots
    return most


@pytest.mark.parametrize("seconds", [1e-3, 0.1, 1.0])
def test_few_trees_are_begun_at_a_time(seconds):
    """Each root holds a process while it waits."""
    w = World(cpus=1, config=CONFIG)
    most = blocked_at_most(w, roots=30, leaves=20, seconds=seconds)
    # 600 seconds, at most: 1 + 4 + 9 + ... up to 12 squared.
    assert most <= (12 if seconds == 1.0 else 5)


def test_roots_do_not_wait_for_ever():
    """A tree is begun some time although an earlier one never ends."""
    w = Line(cpus=1, config=CONFIG)
    w.submit("first", function=3)
    w.submit("below", parent="first")
    w.wait_for("first", "below")
    w.play("finish below first")
    pump = Pump(w, is_actor=False)
    w.submit("second", function=3)
    w.submit("own")
    steps_until(pump, {"own"})
    began = w.now
    while "second" not in w.running:
        assert w.now - began < 5 * AFTER
        pump.step()


def test_no_more_buckets_are_examined_if_many_have_their_turn():
    """Tasks that do not fit keep their turns; the others have theirs."""
    w = Line(cpus=4, gpus=1, config=CONFIG)
    w.submit("holds", num_gpus=1, num_cpus=0)
    pump = Pump(w, is_actor=False)
    submit(w, [f"b{n}" for n in range(3 * EXAMINED)], num_gpus=0.5, function=4)
    for number in range(3 * EXAMINED):
        w.submit(f"c{number}", num_gpus=0.5, environment={"A": str(number)})
    w.submit("own", environment={"A": "own"})
    steps_until(pump, {"own"})


def test_children_of_an_actor_do_not_keep_a_task_from_running_alone():
    """A task is retried alone after host memory ran out; no actor ends before it."""
    w = World(cpus=3, config=CONFIG)
    w.submit("actor", num_cpus=0, is_endless=True, max_calls=1)
    w.play("submit large other")
    starve(w, "large")
    w.play("submit child parent=actor; running = actor other; finish other")
    w.play(
        "running = actor large; waiting = child; finish large; running = actor child"
    )
