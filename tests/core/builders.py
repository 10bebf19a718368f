"""Helpers of the core tests: requests, placement groups, worlds that play stories."""

import re
from ast import literal_eval
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

from aiogpu.core.model.request import (
    ANY,
    PACK,
    BundleRef,
    Device,
    PlacementGroupSpec,
    Request,
    Shape,
    TaskSpec,
)
from aiogpu.core.model.units import CPU, GPU, device_quantity, quantity
from aiogpu.core.records import Memory, TaskRecord
from aiogpu.core.resources.devices import Cause
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.observe.snapshot import snapshot, why
from aiogpu.observe.status import NodeStatus
from aiogpu.observe.why import Why
from tests.support import world

GIB = 1 << 30
HOLDER = 4711
"""The process that holds leases and placement groups."""
A100 = Device(
    0, "A100", name="NVIDIA A100-SXM4-80GB", memory=80 * GIB, compute_capability=(8, 0)
)
H100 = Device(
    1, "H100", name="NVIDIA H100 PCIe", memory=94 * GIB, compute_capability=(9, 0)
)
PLAIN = Device(2)


CHECKS = ("=", "has", "lacks")
AT_ONCE = ("wait_for", "placement_group", "submit_in")
OPTIONS = {"cpus": "num_cpus", "gpus": "num_gpus"}


def value(word: str) -> Any:
    """Parse a word of a story: a number, True, or a name."""
    try:
        return literal_eval(word)
    except (SyntaxError, ValueError):
        return option("", word) if ":" in word else word


def option(key: str, text: str) -> Any:
    """Parse the value of an option: `X:1,Y:2` for variables, `a,b` for tasks."""
    if key == "needs":
        return text.split(",")
    if ":" not in text:
        return text if key == "gpu_memory" else value(text)
    pairs = dict(pair.split(":") for pair in text.split(","))
    if key == "environment":
        return pairs
    return {name: value(amount) for name, amount in pairs.items()}


def pids_of(w: world.World) -> dict[int, int]:
    """Return the process ids: 101 for worker 1 once it has started, and so on."""
    holders = dict.fromkeys([*w.leases.values(), *w.placement_groups.values()], HOLDER)
    workers = [worker.id for worker in w.workers.values() if worker.has_started]
    return {worker: 100 + worker for worker in workers} | holders


def status_of(w: world.World, **more) -> NodeStatus:
    """Return the node's status."""
    return snapshot(w.scheduler, pids_of(w), w.now, **more)


def record_of(w: world.World, name: str) -> TaskRecord:
    """Return the scheduler's record of a task."""
    return w.scheduler.tasks[w.tasks[name].id]


def why_of(w: world.World, name: str) -> Why:
    """Return the `Why` of a task."""
    return why(w.scheduler, record_of(w, name), pids_of(w), w.now)


def pass_over(w: world.World) -> None:
    """Run an empty task, so that the scheduler considers all waiting tasks."""
    name = f"passes {len(w.tasks)}"
    w.submit(name, num_cpus=0)
    w.finish(name)


def kinds(w: world.World) -> list[type]:
    """Return the classes of the last event's effects."""
    return [type(effect) for effect in w.effects]


def request_of(
    amounts: dict[str, float], accelerator_type: str | None = None, **options
) -> Request:
    """Make a request from amounts by name."""
    scalars = {name: quantity(name, n) for name, n in amounts.items() if name != GPU}
    devices = {GPU: device_quantity(GPU, amounts.get(GPU, 0))}
    return Request.of(scalars, devices, accelerator_type, **options)


def bundle(amounts: dict[str, float]) -> Request:
    """Make a bundle from amounts by name; "type" names the type of its devices."""
    amounts = dict(amounts)
    memory = amounts.pop("gpu_memory", 0)
    of_type = amounts.pop("type", None)
    return request_of(amounts, of_type, gpu_memory=memory)


def placement_group_of(
    *bundles: dict[str, float], strategy: str = PACK, name="gang"
) -> PlacementGroupSpec:
    """Make a placement group whose key is its name."""
    return PlacementGroupSpec(name, name, strategy, tuple(map(bundle, bundles)))


def box(count: int, *pairs: tuple[int, int], parents: dict[int, str] | None = None):
    """Make devices with links between pairs."""
    return [
        Device(
            index,
            uuid=f"GPU-{index}",
            links=frozenset(f"GPU-{b}" for a, b in pairs if a == index),
            parent=(parents or {}).get(index),
        )
        for index in range(count)
    ]


def starve(w: world.World, name: str) -> None:
    """Kill a task because host memory runs out."""
    w.tell(Scheduler.kill_for_memory, w.worker_of(name), Memory.HOST)


def outgrow(w: world.World, name: str) -> None:
    """Kill a task because it exceeds its reserved device memory."""
    w.tell(Scheduler.kill_for_memory, w.worker_of(name), Memory.DEVICE)


def sicken(w: world.World, index: int) -> None:
    """Report that a GPU is sick."""
    w.tell(Scheduler.device_changed, GPU, index, Cause.SICK, "XID 79")


def heal(w: world.World, index: int) -> None:
    """Report that a GPU has recovered."""
    w.tell(Scheduler.device_changed, GPU, index, Cause.SICK, None)


def settle(w: world.World) -> None:
    """Report that the devices of the first settling worker are free."""
    w.tell(Scheduler.devices_free, w.unsettled[0])


def bound(w: world.World, most: int) -> None:
    """Set the limit of workers."""
    w.scheduler.worker_limit.bound(most)


def let(w: world.World, **behaviour: Any) -> None:
    """Set attributes of the world, such as `starts=False`."""
    for name, how in behaviour.items():
        setattr(w, name, how)


VERBS = {
    each.__name__: each
    for each in (starve, outgrow, pass_over, sicken, heal, settle, bound, let)
}
"""Events in addition to the methods of a world."""


class World(world.World):
    """A world that plays written stories and knows placement groups by name."""

    def play(self, story: str) -> Self:
        """Play the steps of a story, and check its expectations.

        `submit a b gpus=0.5; finish a` are events: a method, the names it is called
        with in turn, and its options. `running = b` and `running has b` are checks.
        What stands in parentheses is a remark.

        Returns:
            this world, after all that.
        """
        done: list[str] = []
        for step in re.split(r"[;\n]", re.sub(r" \(.*?\)", "", story)):
            if words := step.split():
                done.append(" ".join(words))
                if len(words) > 1 and words[1] in CHECKS:
                    self._look(words[0], words[1], words[2:], done)
                elif words[0] == "gpus_of":
                    assert self.gpus_of(words[1]) == list(map(value, words[3:])), done
                else:
                    self._do(words[0], words[1:])
        return self

    def _do(self, verb: str, words: list[str]) -> None:
        names = [value(word) for word in words if "=" not in word]
        pairs = [word.split("=", 1) for word in words if "=" in word]
        options = {OPTIONS.get(key, key): option(key, text) for key, text in pairs}
        step = VERBS.get(verb) or getattr(type(self), verb)
        if verb in AT_ONCE or not names:
            step(self, *names, **options)
        else:
            for name in names:
                step(self, name, **options)

    def _look(self, what: str, how: str, words: list[str], done: list[str]) -> None:
        actual = getattr(self, what)
        if how == "lacks":
            assert not set(words) & set(actual), (done, actual)
            return
        if isinstance(actual, dict) and ":" not in "".join(words):
            actual = set(actual)
        if actual is None or isinstance(actual, str | int | float):
            [expected] = map(value, words)
        elif isinstance(actual, dict):
            expected: Any = {
                key: value(text) for key, text in (word.split(":") for word in words)
            }
            part: Any = {key: actual.get(key) for key in expected}
        else:
            expected = type(actual)(map(value, words))
            part = [each for each in actual if each in expected]
        if how == "has":
            assert not isinstance(actual, str | int | float)
            actual = type(actual)(part)
        assert actual == expected, (done, actual)

    @property
    def kept(self) -> str | None:
        """The name of the task that has the reservation, or None."""
        reservation = self.scheduler.reservation
        return reservation.record.spec.name if reservation else None

    @property
    def warned(self) -> list[str]:
        """The names of the tasks with a warning."""
        return [name for name, _ in self.warnings]

    @property
    def worker_count(self) -> int:
        """The number of workers."""
        return len(self.workers)

    @property
    def left(self) -> int:
        """The number of unfinished tasks."""
        return len(self.scheduler.tasks)

    @property
    def is_closed(self) -> bool:
        """True if the node has closed."""
        return self.scheduler.is_closed

    @property
    def deadline(self) -> float | None:
        """The time of the scheduler's next alarm."""
        return self.scheduler.deadline()

    def placement_group(
        self,
        name: str,
        *bundles: dict[str, float],
        strategy: str = PACK,
        priority: int = 0,
        client: int = 0,
        key: str | None = None,
    ) -> None:
        """Request a placement group."""
        placement_group = placement_group_of(*bundles, strategy=strategy, name=name)
        placement_group = placement_group._replace(key=key or name)
        spec = TaskSpec(
            name,
            Shape(placement_group.request()),
            max_calls=1,
            max_retries=0,
            priority=priority,
            is_endless=True,
            is_lease=True,
        )
        self._enter(spec, None, None, client)

    def submit_in(
        self,
        placement_group: str,
        name: str,
        index: int = ANY,
        *,
        num_cpus: float = 0,
        num_gpus: float = 0,
        parent: str | None = None,
        needs=None,
        client: int = 0,
        request: Request | None = None,
        **options,
    ) -> None:
        """Submit a task that takes its resources from a bundle."""
        request = request or request_of({CPU: num_cpus, GPU: num_gpus})
        request = replace(
            request, placement_group=BundleRef(placement_group, placement_group, index)
        )
        by = self.tasks[parent].id if parent else None
        expected = None if needs is None else tuple(self.tasks[n].id for n in needs)
        spec = TaskSpec(name, Shape(request), **options)
        self._submit(spec, by, expected, client)


def submit(w: World, names: str | Sequence[str], **asked: Any) -> None:
    """Submit several tasks with the same request."""
    for name in names.split() if isinstance(names, str) else names:
        w.submit(name, **asked)
