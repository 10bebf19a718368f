"""The cost of a task, in function calls, does not grow with the waiting tasks."""

import gc
import sys
from collections import deque
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from aiogpu.core.effects import Ahead, Assign, Fail, Spawn
from aiogpu.core.model.ids import OWN, ClientId, TaskId
from aiogpu.core.model.request import Device, Request, Shape, TaskSpec
from aiogpu.core.model.units import UNIT
from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.queue.timers import SWEPT
from aiogpu.core.records import TaskState
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.core.scheduler.contention.deadlock import FAILED_AT_ONCE
from aiogpu.core.scheduler.placement import SLICE
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.core.scheduler.state import DeadlockSearch
from tests.core.builders import placement_group_of

FEW, MANY = 100, 10_000
ROUNDS = 60
CPU = Request.of({"CPU": UNIT}, {})
QUARTER = Request.of({"CPU": UNIT}, {"GPU": UNIT // 4})
WHOLE = Request.of({"CPU": UNIT}, {"GPU": UNIT})
HALF = Request.of({"CPU": UNIT}, {"GPU": UNIT // 2})


class Node:
    """A scheduler of four CPUs and one GPU, with simulated workers."""

    def __init__(self, *specs: TaskSpec, took: float = 0.0, programs: int = 0) -> None:
        gpus = DeviceSet("GPU", [Device(0)])
        self.scheduler = Scheduler(Ledger({"CPU": 4 * UNIT}, [gpus]))
        self.now = 0.0
        self.sent: dict[int, deque[int]] = {}
        self._specs = specs
        self._took = took
        self._count = 0
        self._programs = programs
        self.failed: list[TaskId] = []
        for number in range(1, programs + 1):
            self.handle(Scheduler.join, ClientId(number))

    def submit(self) -> None:
        """Submit a task with the next spec and program in turn."""
        spec = self._specs[self._count % len(self._specs)]
        client = ClientId(self._count % self._programs + 1) if self._programs else OWN
        self._count += 1
        task, submit = TaskId(self._count), self.scheduler.submit
        self._apply(submit(self.now, task, spec, client=client))

    def finish(self) -> None:
        """Finish the oldest running task."""
        worker = min(self.sent, key=lambda w: self.sent[w][0] if self.sent[w] else 1e9)
        task = self.sent[worker].popleft()
        self.handle(Scheduler.finish, task, worker, took=self._took)

    def cancel(self, task: TaskId) -> None:
        """Cancel a task."""
        self.handle(Scheduler.cancel, task)

    def handle(self, step, *args, **kwargs) -> None:
        """Pass an event to the scheduler and carry out the effects."""
        self._apply(step(self.scheduler, self.now, *args, **kwargs))

    def _apply(self, effects) -> None:
        for effect in effects:
            match effect:
                case Spawn(worker):
                    self.sent[worker] = deque()
                    self.handle(Scheduler.worker_started, worker)
                case Assign(task, worker):
                    self.sent[worker].append(task)
                case Ahead(worker, tasks):
                    self.sent[worker].extend(tasks)
                case Fail(task):
                    self.failed.append(task)


def calls_of(work) -> int:
    """Count the calls of Python and C functions."""
    count = 0

    def note(_frame, what, _argument):
        nonlocal count
        count += what in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # libraries of tests have themselves called by it
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def calls_a_round(
    waiting: int, *specs: TaskSpec, took: float = 0.0, age=0.0, programs=0, passes=0.0
) -> float:
    """Count the calls for one task's life while others wait."""
    node = Node(*specs, took=took, programs=programs)
    for _ in range(waiting):
        node.submit()
    node.now += age
    node.handle(Scheduler.wake)

    def rounds() -> None:
        for _ in range(ROUNDS):
            node.submit()
            node.now += passes
            node.finish()

    rounds()
    count = calls_of(rounds)
    node.scheduler.check()
    assert len(node.scheduler.tasks) == waiting
    return count / ROUNDS


def spec(request: Request = CPU, environment=(), **options) -> TaskSpec:
    """Make a spec."""
    return TaskSpec("f", Shape(request, environment), **options)


@pytest.mark.parametrize("age", [0.0, 60.0], ids=["new", "old"])
@pytest.mark.parametrize(
    "specs",
    [
        [spec()],
        [spec(QUARTER)],
        [spec(priority=priority) for priority in (0, 0, 0, 1)],
        [spec(QUARTER), spec(HALF)],
        [spec(QUARTER), spec(HALF), spec()],
        [spec(CPU, (("X", text),)) for text in "abc"],
    ],
    ids=["CPU", "GPU", "priorities", "two requests", "three", "environments"],
)
def test_task_cost_does_not_grow_with_waiting_tasks(specs, age):
    few = calls_a_round(FEW, *specs, age=age)
    assert calls_a_round(MANY, *specs, age=age) == pytest.approx(few, abs=2)
    assert few < 300


def test_cost_with_a_timeout_does_not_grow():
    """Not counting the alarm, which costs one call of `heapq`."""
    few, many = (calls_a_round(n, spec(timeout=1e6)) for n in (FEW, MANY))
    assert many == pytest.approx(few, abs=8 + 4 * SWEPT)


def test_submit_cost_does_not_grow_during_a_reservation():
    """A task behind others causes no placement."""
    calls = []
    for passed in (0.0, 2.0):
        node = Node(spec())
        for _ in range(FEW):
            node.submit()
        node.handle(Scheduler.wake)
        node.now += passed
        node.handle(Scheduler.wake)
        assert (node.scheduler.reservation is not None) == bool(passed)
        calls.append(calls_of(node.submit))
    assert calls[1] <= calls[0] + 4


@pytest.mark.parametrize("is_last_first", [False, True])
def test_cancel_cost_does_not_grow_with_waiting_tasks(is_last_first):
    """Cancelling does not search the queue."""
    most = []
    for waiting in (FEW, MANY):
        node = Node(spec())
        for _ in range(4 + waiting):
            node.submit()
        order = [TaskId(number) for number in range(5, 5 + waiting)]
        if is_last_first:
            order.reverse()
        most.append(max(calls_of(partial(node.cancel, task)) for task in order))
        node.scheduler.check()
    assert most[0] == pytest.approx(most[1], abs=4)


@pytest.mark.parametrize("passes", [1e-6, 0.1], ids=["in a slice", "in turns"])
@pytest.mark.parametrize("programs", [1, 4, 16])
def test_task_cost_does_not_grow_with_waiting_tasks_of_programs(programs, passes):
    own = [spec(CPU, (("P", str(number)),)) for number in range(programs)]
    options = {"programs": programs, "passes": passes}
    few = calls_a_round(20 * programs, *own, **options)
    assert calls_a_round(200 * programs, *own, **options) < few * 1.1 + 8
    # The turn is computed over all waiting programs, but not within a slice.
    assert few < (300 if passes < SLICE else 400 + 60 * programs)


@pytest.mark.parametrize("order", ["as submitted", "backwards", "from both ends"])
def test_cost_of_a_supplied_argument_does_not_grow(order):
    """A task whose argument has come takes its place without a walk."""
    costs = []
    for count in (FEW, MANY):
        node = Node(spec())
        for _ in range(5):
            node.submit()
        tasks = [TaskId(number) for number in range(6, 6 + count)]
        for task in tasks:
            node.handle(Scheduler.submit, task, spec(), needs=(TaskId(1),))
        if order == "backwards":
            tasks.reverse()
        elif order == "from both ends":
            pairs = zip(tasks, tasks[::-1], strict=True)
            tasks = [task for pair in pairs for task in pair][:count]

        def supply(tasks=tasks, node=node) -> None:
            for task in tasks:
                node.handle(Scheduler.supply, task)

        costs.append(calls_of(supply) / count)
        node.scheduler.check()
    # The logarithm of the queue's length counts.
    assert costs[1] < costs[0] + 30


def test_requests_cost_the_same_while_all_workers_are_taken():
    """None of the others is tried if no worker can serve it."""
    costs = []
    for count in (100, 1_600):
        specs = [
            spec(Request.of({"CPU": UNIT // 100, "memory": size}, {}))
            for size in range(1, count + 1)
        ]
        node = Node(*specs)
        node.scheduler = Scheduler(Ledger({"CPU": 100 * UNIT, "memory": 1 << 40}))
        node.scheduler.worker_limit.bound(4)

        def live(node=node, count=count) -> None:
            for _ in range(count):
                node.submit()
            for _ in range(ROUNDS):
                node.finish()

        costs.append(calls_of(live) / count)
        node.scheduler.check()
    assert costs[1] < costs[0]


class Family(Node):
    """A parent that waits for many children, on a node of one GPU and four CPUs."""

    def __init__(self, count: int, *, is_chain: bool = False) -> None:
        super().__init__()
        self.parent = self.enter(spec(QUARTER))
        self.children: list[TaskId] = []
        for number in range(count):
            needs = (self.children[-1],) if is_chain and number else None
            self.children.append(self.enter(spec(), parent=self.parent, needs=needs))
        awaited = self.children[-1:] if is_chain else self.children
        self.handle(Scheduler.wait_for, self.parent, tuple(awaited))

    def enter(self, its_spec: TaskSpec, **options) -> TaskId:
        """Submit a task; return its id."""
        self._count += 1
        self.handle(Scheduler.submit, TaskId(self._count), its_spec, **options)
        return TaskId(self._count)

    def end(self, task: TaskId) -> None:
        """Finish a running task."""
        worker = self.scheduler.tasks[task].worker.id
        self.sent[worker].remove(task)
        self.handle(Scheduler.finish, task, worker)

    def live(self, child: TaskId, of: TaskSpec) -> None:
        """Let a child wait for a child of its own, and end."""
        below = self.enter(of, parent=child)
        self.handle(Scheduler.wait_for, child, (below,))
        if self.scheduler.tasks[below].state is TaskState.WAITING:
            return
        self.end(below)
        self.handle(Scheduler.wait_for, child, ())
        self.end(child)


def test_waits_of_siblings_cost_the_same_however_many_they_are():
    """The search for deadlocks does not look at all siblings each time."""
    costs = []
    for count in (100, 1_600):
        family = Family(count)

        def live(family=family) -> None:
            for child in family.children:
                family.live(child, spec())

        costs.append(calls_of(live) / count)
        family.scheduler.check()
    assert costs[1] < costs[0] * 1.2 + 30


def test_links_of_a_chain_cost_the_same_however_many_they_are():
    costs = []
    for count in (100, 1_600):
        family = Family(count, is_chain=True)

        def unroll(family=family) -> None:
            for child, following in pairwise([*family.children, None]):
                family.live(child, spec())
                if following is not None:
                    family.handle(Scheduler.supply, following)

        costs.append(calls_of(unroll) / count)
        family.scheduler.check()
    assert costs[1] < costs[0] * 1.2 + 30


def test_search_for_deadlocks_is_put_off_if_it_is_expensive():
    """Many tasks wait for what a blocked task holds, which can end."""
    costs = []
    for count in (100, 1_600):
        family = Family(count)
        holder = family.enter(spec(HALF))
        last = family.enter(spec(), parent=holder)
        for child in family.children[:4]:
            family.live(child, spec())
        family.handle(Scheduler.wait_for, holder, (last,))
        contended = tuple(
            family.enter(spec(HALF), parent=family.parent) for _ in range(count)
        )
        awaited = (*family.children[4:], *contended)
        family.handle(Scheduler.wait_for, family.parent, awaited)
        assert {family.scheduler.tasks[task].state for task in contended} == {
            TaskState.WAITING
        }

        def live(family=family) -> None:
            for child in family.children[4:]:
                family.live(child, spec())

        costs.append(calls_of(live) / count)
        family.scheduler.check()
        assert family.failed == []
    assert costs[1] < costs[0] * 1.2 + 30


def test_many_deadlocks_are_found_in_batches():
    """Each turn fails some tasks; none of the others waits for ever."""
    count = 3 * FAILED_AT_ONCE
    family = Family(0)
    asks = [family.enter(spec(WHOLE), parent=family.parent) for _ in range(count)]
    family.handle(Scheduler.wait_for, family.parent, tuple(asks))
    assert len(family.failed) == FAILED_AT_ONCE
    while (when := family.scheduler.deadline()) is not None and len(
        family.failed
    ) < count:
        family.now = when
        family.handle(Scheduler.wake)
    assert sorted(family.failed) == asks
    assert family.scheduler.tasks[family.parent].state is TaskState.RUNNING


def test_deadlock_is_found_later_if_the_search_was_put_off():
    count = 2_000
    family = Family(count)
    asks = family.enter(spec(WHOLE), parent=family.children[0])
    family.scheduler.search.steps = 1 << 20  # as if the last search had been expensive
    family.handle(Scheduler.wait_for, family.children[0], (asks,))
    family.handle(Scheduler.wait_for, family.children[0], (asks,))
    assert family.failed == []
    family.now += DeadlockSearch.DELAY
    family.handle(Scheduler.wake)
    assert family.failed == [asks]


@pytest.mark.parametrize("age", [0.0, 60.0], ids=["new", "old"])
def test_cost_of_a_placement_group_does_not_grow_with_waiting_ones(age):
    """Groups with equal bundles are one line: if one does not fit, none does."""
    costs = []
    for count in (50, 1_000):
        node = Node()
        for number in range(count + 20):
            placement_group = placement_group_of({"GPU": 1}, name=f"g{number}")
            shape = Shape(placement_group.request())
            options = {"max_calls": 1, "is_endless": True, "is_lease": True}
            its_spec = TaskSpec("g", shape, max_retries=0, **options)
            node.handle(Scheduler.submit, TaskId(number + 1), its_spec)
        node.now += age
        node.handle(Scheduler.wake)

        def rounds(node=node) -> None:
            for task in range(1, 21):
                assert node.scheduler.tasks[TaskId(task)].worker is not None
                node.cancel(TaskId(task))

        costs.append(calls_of(rounds) / 20)
        node.scheduler.check()
    assert costs[1] < costs[0] + 30


def test_submission_cost_does_not_grow_with_waiting_shapes():
    """A new shape that does not fit has nothing placed, also during a reservation."""
    costs = []
    for count in (50, 1_000):
        node = Node(spec(Request.of({"CPU": 4 * UNIT}, {})))
        node.submit()
        others = [spec(Request.of({"CPU": UNIT + n}, {})) for n in range(count + 20)]

        def submit(specs, node=node) -> None:
            for number, each in enumerate(specs, start=len(node.scheduler.tasks) + 1):
                node.handle(Scheduler.submit, TaskId(number), each)

        submit(others[:count])
        node.now += 2.0
        node.handle(Scheduler.wake)
        assert node.scheduler.reservation is not None
        costs.append(calls_of(partial(submit, others[count:])) / 20)
        node.scheduler.check()
    assert costs[1] < costs[0] + 30


def asking(number: int, what: str) -> TaskSpec:
    """Make a spec with a request of its own, which two CPUs limit at the same time."""
    extent = UNIT // 2 + number
    match what:
        case "memory":
            return spec(Request.of({"CPU": UNIT, "memory": extent}, {}))
        case "custom":
            return spec(Request.of({"slot": extent}, {}))
        case "fraction":
            return spec(Request.of({}, {"GPU": extent}))
        case "placement":
            group = placement_group_of({"GPU": extent / UNIT}, name=f"g{number}")
            options = {"max_calls": 1, "is_endless": True, "is_lease": True}
            shape = Shape(group.request())
            return TaskSpec("g", shape, max_retries=0, **options)
    raise AssertionError(what)


class ManyRequests(Node):
    """A node with tasks of as many different requests, each of which ends in turn."""

    def __init__(self, count: int, what: str, programs: int = 0) -> None:
        specs = [asking(number, what) for number in range(count)]
        super().__init__(*specs, programs=programs)
        self.scheduler.ledger = Ledger(
            {"CPU": 4 * UNIT, "memory": UNIT, "slot": UNIT},
            [DeviceSet("GPU", [Device(0)])],
        )
        for _ in specs:
            self.submit()

    def end(self, task: TaskId) -> None:
        """End a task, which runs."""
        record = self.scheduler.tasks[task]
        assert record.worker is not None, record
        if record.spec.is_lease:
            self.cancel(task)
        else:
            self.sent[record.worker.id].remove(task)
            self.handle(Scheduler.finish, task, record.worker.id)


@pytest.mark.parametrize("count", [50, 1_000])
def test_new_and_cancelled_placement_groups_try_no_other_group(count):
    """They free nothing, so that nothing else can be placed or reserved."""
    node = ManyRequests(count, "placement")
    node.now += 60.0
    node.handle(Scheduler.wake)
    assert node.scheduler.reservation is None
    submitted = TaskId(count + 1)
    new = asking(count, "placement")
    handle = node.handle
    assert calls_of(partial(handle, Scheduler.submit, submitted, new)) < 150
    assert calls_of(partial(node.cancel, submitted)) < 150
    node.scheduler.check()


@pytest.mark.parametrize("programs", [0, 2])
@pytest.mark.parametrize("passes", [0.0, 0.4], ids=["at once", "with reservations"])
@pytest.mark.parametrize("what", ["memory", "custom", "fraction", "placement"])
def test_release_cost_does_not_grow_with_different_requests(what, passes, programs):
    """The groups that do not fit are not tried one by one."""
    costs = []
    for count in (200, 400, 800):
        node = ManyRequests(count, what, programs)

        def work(node=node) -> None:
            for _ in range(100):
                holders = node.scheduler.holders
                node.now += passes
                node.end(min(each.task.id for each in holders if each.task))

        costs.append(calls_of(work) / 100)
        node.scheduler.check()
    for few, many in pairwise(costs):
        assert many < few + 120  # the logarithm


@pytest.mark.parametrize("what", ["limits of a program", "timeouts"])
def test_release_cost_does_not_grow_with_requests_that_are_held_back(what):
    """They fit what is free, but a limit or a reservation keeps it from them."""
    is_limited = what == "limits of a program"
    costs = []
    for count in (200, 400, 800):
        specs = [asking(number, "memory") for number in range(count)]
        if not is_limited:
            specs = [
                replace(each, timeout=1e6 + number) for number, each in enumerate(specs)
            ]
        node = Node(*specs, programs=int(is_limited))
        memory = 10 * UNIT if is_limited else UNIT
        node.scheduler.ledger = Ledger({"CPU": 4 * UNIT, "memory": memory}, [])
        if is_limited:
            node.scheduler.clients = None
            limits = Limits(max_share={"memory": 0.1})
            node.handle(Scheduler.join, ClientId(1), 1.0, limits)
        for _ in specs:
            node.submit()

        def work(node=node) -> None:
            for _ in range(20):
                node.now += 0.4
                busy = [worker for worker in node.scheduler.workers if worker.task]
                first = min(busy, key=lambda worker: worker.task.id)
                task = first.task.id
                node.sent[first.id].remove(task)
                node.handle(Scheduler.finish, task, first.id)

        work()
        costs.append(calls_of(work) / 20)
        node.scheduler.check()
    for few, many in pairwise(costs):
        assert many < few + 200
