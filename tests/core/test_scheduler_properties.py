"""Properties under random events: no share is lost, each owner gets one answer.

`World.check()` holds the scheduler to its invariants after every single event;
the rules only choose what happens. At the end all that runs is let end, and then
nothing may be left: no lease, no record, no alarm.
"""

from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from aiogpu.core.model.config import SchedulerConfig
from aiogpu.core.model.request import (
    Device,
    DeviceSelector,
    PlacementGroupSpec,
    Request,
)
from aiogpu.core.model.units import CPU, GPU, UNIT, parse_size
from aiogpu.core.queue import ready
from aiogpu.core.queue.fair_share import LONGEST, Limits
from aiogpu.core.queue.ready import precedence
from aiogpu.core.records import Memory, TaskRecord, TaskState, sort_key
from aiogpu.core.resources.devices import Cause
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.core.resources.placement_group import take_grouped
from aiogpu.core.scheduler.placement import SLICE
from aiogpu.core.scheduler.scheduler import Scheduler
from aiogpu.core.scheduler.turns import FRONT
from aiogpu.core.scheduler.workers import UNLIMITED_WORKERS
from aiogpu.errors import InfeasibleError, LimitError
from tests.core.builders import GIB, World
from tests.support.sampling import examples

TYPES = ["A100", "A100", "T4"]


SIZES = {"A100": 80 * GIB, "T4": 16 * GIB}


LINKS = {0: frozenset({"GPU-2"})}


DEVICES = [
    Device(i, kind, f"GPU-{i}", memory=SIZES[kind], links=LINKS.get(i, frozenset()))
    for i, kind in enumerate(TYPES)
]


SHARES = st.integers(1, 10_000).map(lambda parts: parts / 10_000)


GPUS = st.one_of(
    st.just(0), st.sampled_from([0.1, 0.25, 1 / 3, 0.5, 0.7]), SHARES, st.integers(1, 4)
)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "num_cpus": st.sampled_from([0, 0.5, 1, 2]),
        "num_gpus": GPUS,
        "resources": st.sampled_from([{"license": 0.3}, {"license": 1}]),
        "accelerator_type": st.sampled_from(["A100", "T4", "H200"]),
        "where": st.sampled_from([DeviceSelector(20 * GIB), DeviceSelector(100 * GIB)]),
        "gpu_memory": st.sampled_from(["share", "1GiB", "10GiB", "16GiB", "50GiB"]),
        "retries_oom": st.booleans(),
        "doubles_share": st.booleans(),
        "strategy": st.sampled_from(["pack", "spread"]),
        "environment": st.sampled_from([{"X": "1"}, {"X": "2"}]),
        "function": st.integers(0, 2),
        "max_calls": st.integers(0, 2),
        "max_retries": st.integers(-1, 2),
        "priority": st.integers(-1, 1),
        "timeout": st.sampled_from([0, 0.5, 3.0, 60.0]),
        "run_timeout": st.sampled_from([0.1, 0.5, 3.0]),
        "stop_grace": st.sampled_from([0.0, 0.4, 30.0]),
        "is_detached": st.booleans(),
        "is_endless": st.booleans(),
        "is_evictable": st.booleans(),
        "client": st.integers(0, 3),
        "others": st.sampled_from(
            [[{"num_cpus": 2}], [{"num_gpus": 0.5}, {"num_cpus": 0.5}]]
        ),
    },
)


PATIENCE = st.builds(
    SchedulerConfig,
    cancel_grace=st.sampled_from([0, 0.3, 2.0]),
    interrupt_every=st.sampled_from([0.05, 0.5, 5.0]),
    exit_grace=st.sampled_from([0, 1.0]),
    idle_workers=st.integers(0, 3),
    reserve_after=st.sampled_from([0, 0.3, 1.0]),
    spare_workers=st.integers(0, 3),
    refill_after=st.sampled_from([0.0, 0.1]),
    spares_for=st.sampled_from([0.5, 20.0]),
    retry_after=st.sampled_from([0.0, 0.1, 1.0]),
    exclusive_wait=st.sampled_from([0.0, 5.0, 30.0]),
    start_retry_after=st.sampled_from([0.05, 1.0]),
    max_start_retry_delay=st.sampled_from([0.05, 5.0]),
    warn_after=st.sampled_from([0.5, 5.0]),
    # Drawing any float would include pauses of 1e-130 s, which never end.
    long_task=st.sampled_from([0.01, 0.1]),
    unresponsive_after=st.sampled_from([0.1, 1.0]),
    max_retry_delay=st.just(10.0),
    stable_after=st.sampled_from([0.0, 60.0]),
    restarts_in_a_row=st.sampled_from([0, 2, 12]),
)


LIMITS = [
    Limits(),
    Limits(),
    Limits(max_waiting=6, max_share={"GPU": 0.5, "CPU": 0.5}),
    Limits(max_share={"gpu_memory": 0.5}),
]


BEGUN = (TaskState.STARTING, TaskState.RUNNING)


class Judge(World):
    """A world that checks the rules of precedence after every event."""

    def __init__(self, **options) -> None:
        self._waited: set[str] = set()
        self._since: dict[int, float] = {}
        self._slices: dict[int, float] = {}
        self._kept = False
        self._turns = 0
        super().__init__(**options)

    def check(self) -> None:
        """Check the tasks that the last event has started."""
        super().check()
        scheduler = self.scheduler
        is_kept = scheduler.reservation is not None
        tasks = scheduler.tasks.values()
        waited = [task for task in tasks if task.spec.name in self._waited]
        still = [task for task in waited if task.state is TaskState.WAITING]
        begun = [task for task in waited if task.state in BEGUN]
        begun = [
            task
            for task in begun
            if not (task.spec.is_grouped or self._is_in_its_slice(task))
        ]
        if begun and scheduler.ledger.is_overdrawn:
            for record in begun:
                assert CPU not in dict(record.spec.shape.request.scalars), record
        is_kept = is_kept or scheduler.exclusive.is_wanted
        if not is_kept and not self._kept:
            for record in begun:
                if self.has_room:
                    self._check_turn(record, still)
            self._check_shares(begun, still)
        self._kept = is_kept
        self._turns = scheduler.turns_given
        self._waited = self.waiting
        self._since = {c.id: c.since for c in scheduler.clients or ()}
        self._slices = {
            lease.id: lease.usage.turn_since
            for lease in scheduler.ledger.leases.values()
            if lease.usage is not None
        }

    @property
    def has_room(self) -> bool:
        """Return True if no task has to wait for a worker."""
        return len(self.scheduler.workers) < self.scheduler.worker_limit.now

    def _is_in_its_slice(self, record: TaskRecord) -> bool:
        """Return True if the program kept a lease within its slice.

        It must be its own turn all the same, among those of its program.
        """
        begun = self._slices.get(record.worker.lease.id)
        return begun is not None and self.now - begun < SLICE

    def _may_hold(self, record: TaskRecord) -> bool:
        """Return True if the program's limits allow a task and its worker can start."""
        clients = self.scheduler.clients
        if record.state is TaskState.WAITING:
            # A lease needs no worker, but waits behind tasks of the same shape.
            lanes = self.scheduler.ready.by_shape[record.client, record.spec.shape]
            if self.scheduler.has_outage(lanes[min(lanes)].head()):
                return False
        return clients is None or not clients.bars(record)

    def _check_shares(self, begun: list[TaskRecord], still: list[TaskRecord]) -> None:
        """Check that no program was overtaken although it would have held no more."""
        clients, ledger = self.scheduler.clients, self.scheduler.ledger
        if clients is None or not self.has_room:
            return
        for id_ in {record.client for record in begun}:
            mine = [record for record in begun if record.client == id_]
            if self._since.get(id_, 0.0) <= self.now - LONGEST:
                continue
            parts: Counter[str] = Counter()
            for record in mine:
                parts.update(dict(clients.amounts_of(record.spec.shape.request)))
            for record in mine:
                had = share(clients, id_, record, parts)
                passed = [
                    other
                    for other in still
                    if other.client != id_
                    and sort_key(other)[0] == sort_key(record)[0]
                    and self._may_hold(other)
                    and share_then(clients, other) <= had
                    # Otherwise the program was represented by another task.
                    and not any(goes_before(each, other) for each in begun)
                ]
                if passed:
                    lease = record.worker.lease
                    usage, lease.usage = lease.usage, None
                    ledger.give_back(lease)
                    for other in passed:
                        first = [each for each in still if goes_before(each, other)]
                        if not any(could_take(ledger, each) for each in first):
                            assert not could_take(ledger, other), (record, other)
                    take_again(ledger, lease)
                    lease.usage = usage

    def _has_new_turn(self, record: TaskRecord) -> bool:
        """Return True if the start of a child has just moved a task to the front."""
        return FRONT + self._turns < sort_key(record)[1] < FRONT >> 1

    def _check_turn(self, record: TaskRecord, still: list[TaskRecord]) -> None:
        """Check that no earlier task could have taken this lease."""
        turn = precedence(record)
        passed = [
            other
            for other in still
            if self._may_hold(other)
            and not self._has_new_turn(other)
            and (
                precedence(other) < turn
                if other.client == record.client or self.scheduler.clients is None
                else sort_key(other)[0] < turn[0][0]
            )
        ]
        if passed:
            ledger, lease = self.scheduler.ledger, record.worker.lease
            usage, lease.usage = lease.usage, None
            ledger.give_back(lease)
            for other in passed:
                assert not could_take(ledger, other), (record, other)
            take_again(ledger, lease)
            lease.usage = usage


def could_take(ledger: Ledger, record: TaskRecord) -> bool:
    """Return True if a task's request is free."""
    lease = take_grouped(ledger, record.spec.shape.request)
    if lease is None:
        return False
    ledger.give_back(lease)
    return True


def goes_before(record: TaskRecord, other: TaskRecord) -> bool:
    """Return True if a task of the same program goes first."""
    return record.client == other.client and precedence(record) < precedence(other)


def lies_in_bundles(request: Request) -> bool:
    """Return True for a placement group, whose bundles may share devices."""
    return isinstance(request.placement_group, PlacementGroupSpec)


def share(clients, id_, record, less) -> float:
    """Return a program's share, by weight, of a task's resources, without `less`."""
    client = clients.of(id_)
    amounts = clients.portion_of(record.spec.shape.request).amounts
    held = [(client.held.get(n, 0) - less[n]) * one for n, _, one in amounts]
    return max(held, default=0.0) / client.weight


def share_then(clients, record) -> float:
    """Return the share that a program would have with a waiting task."""
    client = clients.of(record.client)
    return clients.share_of(client, record.spec.shape.request)[1]


def take_again(ledger: Ledger, lease: Lease) -> None:
    """Undo `give_back`."""
    ledger.leases[lease.id] = lease
    for name, amount in lease.request.scalars:
        ledger.free[name] -= amount
    for kind, share, memory in lease.held():
        ledger.device_sets[kind].take((share,), memory)


def could_serve(options) -> int:
    """Count the devices that a task with these options may use."""
    where, memory = options.get("where", DeviceSelector()), options.get("gpu_memory", 0)
    least = 0 if memory in (0, "share") else parse_size("gpu_memory", memory)
    return sum(
        options.get("accelerator_type") in (None, device.type)
        and where.fits(device)
        and device.memory >= least
        for device in DEVICES
    )


BEGINNING = {
    **dict.fromkeys(("starts", "exits", "revokes"), st.booleans()),
    "config": PATIENCE,
    "most": st.one_of(st.just(UNLIMITED_WORKERS), st.integers(1, 4)),
}


class NodeMachine(RuleBasedStateMachine):
    """Random events on a node of three GPUs."""

    @initialize(
        **BEGINNING, programs=st.lists(st.sampled_from([1.0, 0.5, 3.0]), max_size=2)
    )
    def begin(self, starts, exits, revokes, config, most, programs) -> None:
        self.before = set()
        self.w = Judge(
            cpus=4,
            devices=DEVICES,
            resources={"license": 1},
            config=config,
            starts=starts,
            exits=exits,
            revokes=revokes,
        )
        self.w.scheduler.worker_limit.bound(most)
        for number, weight in enumerate(programs, start=1):
            self.w.join(number, weight, LIMITS[number])

    def joined(self, client):
        """Draw a program; the node's own if none has joined."""
        return client if self.w.scheduler.clients is not None else 0

    def of_joined(self, options):
        return {**options, "client": self.joined(options.get("client", 0))}

    @rule(client=st.integers(1, 3), weight=st.sampled_from([1.0, 2.0]))
    def join(self, client, weight):
        self.w.join(client, weight, LIMITS[client])

    @rule(client=st.integers(0, 3))
    def leave(self, client):
        self.w.leave(client)

    @rule(options=OPTIONS, data=st.data())
    def submit(self, options, data):
        parents = sorted(self.w.running | self.w.blocked)
        parent = data.draw(st.sampled_from([None, *parents])) if parents else None
        name = f"t{len(self.w.tasks)}"
        try:
            self.w.submit(name, parent=parent, **self.of_joined(options))
        except LimitError:
            assert self.w.scheduler.clients.of(2).unfinished >= 6
        except InfeasibleError as error:
            if "this program may hold only" in str(error):
                return
            asked, memory = options.get("num_gpus", 0), options.get("gpu_memory")
            is_void = memory == "share" and not asked
            wanted = max(asked, 1 if memory or "accelerator_type" in options else 0)
            assert is_void or wanted > could_serve(options), options

    @rule(options=OPTIONS, data=st.data())
    def submit_expecting(self, options, data):
        parents = sorted(self.w.running | self.w.blocked)
        parent = data.draw(st.sampled_from([None, *parents])) if parents else None
        known = st.sampled_from(sorted(self.w.tasks) or [""])
        needs = data.draw(st.lists(known, max_size=3)) if self.w.tasks else []
        options = {**options, "num_gpus": 0, "accelerator_type": None, "where": None}
        if options.get("gpu_memory") == "share":
            del options["gpu_memory"]
        name = f"t{len(self.w.tasks)}"
        with suppress(LimitError):
            self.w.submit(name, parent=parent, needs=needs, **self.of_joined(options))

    @precondition(lambda self: self.w.scheduler.expecting)
    @rule(data=st.data())
    def supply(self, data):
        expecting = sorted(self.w.scheduler.expecting)
        task = data.draw(st.sampled_from(expecting))
        self.w.supply(self.w.scheduler.tasks[task].spec.name)

    @precondition(lambda self: any(not w.has_started for w in self.w.workers.values()))
    @rule(data=st.data())
    def start(self, data):
        forked = [w.id for w in self.w.workers.values() if not w.has_started]
        self.w.start(data.draw(st.sampled_from(forked)))

    @precondition(lambda self: any(not w.has_started for w in self.w.workers.values()))
    @rule(data=st.data(), is_crowded=st.booleans())
    def find_no_room(self, data, is_crowded):
        forked = [w.id for w in self.w.workers.values() if not w.has_started]
        worker = data.draw(st.sampled_from(forked))
        why = {"is_crowded": is_crowded, "outage": "no process"}
        self.w.tell(Scheduler.worker_gone, worker, **why)

    @rule(
        count=st.integers(2, 12),
        priority=st.integers(-1, 1),
        client=st.integers(0, 3),
    )
    def submit_many(self, count, priority, client):
        options = {"function": 1, "priority": priority, "client": self.joined(client)}
        with suppress(LimitError):
            for _ in range(count):
                self.w.submit(f"t{len(self.w.tasks)}", **options)

    @rule(client=st.sampled_from([None, 0, 1, 2, 3]))
    def announce_stop(self, client):
        self.w.announce_stop(client)

    @precondition(lambda self: self.w.running)
    @rule(data=st.data(), ago=st.sampled_from([0.0, 0.2]))
    def begin_code(self, data, ago):
        self.w.begin(data.draw(st.sampled_from(sorted(self.w.running))), ago=ago)

    @precondition(lambda self: self.w.running)
    @rule(
        data=st.data(),
        retry=st.booleans(),
        ran_out=st.booleans(),
        took=st.sampled_from([0.0, 1e-6, 3e-4, 0.1]),
    )
    def finish(self, data, retry, ran_out, took):
        name = data.draw(st.sampled_from(sorted(self.w.running)))
        self.w.took = took
        self.w.finish(name, retry=retry, ran_out=ran_out)

    @rule(
        asked=st.fixed_dictionaries(
            {"num_cpus": st.sampled_from([0, 1]), "num_gpus": GPUS},
            optional={
                "gpu_memory": st.sampled_from(["1GiB", "50GiB"]),
                "priority": st.integers(-1, 1),
                "client": st.integers(0, 3),
            },
        )
    )
    def ask_for_a_lease(self, asked):
        name = f"t{len(self.w.tasks)}"
        try:
            self.w.lease(name, **self.of_joined(asked))
        except LimitError:
            assert self.w.scheduler.clients.of(2).unfinished >= 6
        except InfeasibleError as error:
            if "this program may hold only" not in str(error):
                assert max(asked["num_gpus"], 1) > could_serve(asked), asked

    @precondition(lambda self: self.w.leases)
    @rule(data=st.data(), settles=st.booleans())
    def give_a_lease_back(self, data, settles):
        name = data.draw(st.sampled_from(sorted(self.w.leases)))
        self.w.cancel(name)
        self.w.give_back(name, settles=settles)

    @precondition(lambda self: self.w.running)
    @rule(took=st.sampled_from([1e-6, 3e-4]), count=st.integers(2, 30))
    def finish_many(self, took, count):
        self.w.took = took
        for _ in range(count):
            if self.w.running:
                self.w.finish(min(self.w.running))

    @precondition(lambda self: self.w.running)
    @rule(data=st.data())
    def wait_for(self, data):
        name = data.draw(st.sampled_from(sorted(self.w.running)))
        record = self.w.scheduler.tasks.get(self.w.tasks[name].id)
        kin = record.kin if record else None
        children = [child.spec.name for child in kin.children.values()] if kin else []
        some = st.lists(st.sampled_from(children or [""]), unique=True)
        self.w.wait_for(name, *(data.draw(some) if children else []))

    @precondition(lambda self: self.w.running)
    @rule(data=st.data())
    def wait_for_an_actor(self, data):
        task = self.w.tasks[data.draw(st.sampled_from(sorted(self.w.running)))]
        if not task.spec.is_endless:
            self.w.tell(Scheduler.wait_for, task.id, (), elsewhere=True)

    @precondition(lambda self: self.w.running)
    @rule(data=st.data())
    def reside(self, data):
        task = self.w.tasks[data.draw(st.sampled_from(sorted(self.w.running)))]
        if task.spec.is_endless and task.spec.max_calls == 1:
            self.w.tell(Scheduler.release_cpus, task.id)

    @precondition(lambda self: self.w.running)
    @rule(data=st.data(), stay=st.sampled_from([0.0, 0.5]))
    def rest(self, data, stay):
        name = data.draw(st.sampled_from(sorted(self.w.running)))
        spec = self.w.tasks[name].spec
        if spec.is_endless and spec.is_evictable and spec.max_calls == 1:
            self.w.rest(name, stay=stay)

    @precondition(lambda self: self.w.scheduler.resting)
    @rule(data=st.data())
    def stir(self, data):
        resting = sorted(self.w.scheduler.resting)
        task = data.draw(st.sampled_from(resting))
        self.w.tell(Scheduler.stir, task)

    @precondition(lambda self: self.w.evicted)
    @rule(data=st.data())
    def bring_back(self, data):
        self.w.bring_back(data.draw(st.sampled_from(sorted(self.w.evicted))))

    @precondition(lambda self: self.w.tasks)
    @rule(data=st.data())
    def use_restart(self, data):
        task = self.w.tasks[data.draw(st.sampled_from(sorted(self.w.tasks)))]
        if task.spec.is_endless and not task.is_cancelled:
            self.w.tell(Scheduler.use_restart, task.id)

    @precondition(lambda self: any(w.revoking for w in self.w.workers.values()))
    @rule(data=st.data())
    def revoked(self, data):
        revoking = [w.id for w in self.w.workers.values() if w.revoking]
        self.w.revoked(data.draw(st.sampled_from(revoking)))

    @precondition(lambda self: self.skippable())
    @rule(data=st.data(), is_late=st.booleans())
    def skip(self, data, is_late):
        name = data.draw(st.sampled_from(self.skippable()))
        self.w.skip(name, is_late=is_late)

    def skippable(self):
        workers = self.w.workers.values()
        return [w.task.spec.name for w in workers if w.task and w.void]

    @precondition(lambda self: self.w.workers)
    @rule(data=st.data())
    def stop(self, data):
        self.w.stop(data.draw(st.sampled_from(sorted(self.w.workers))))

    @precondition(lambda self: self.w.tasks)
    @rule(data=st.data())
    def cancel(self, data):
        self.w.cancel(data.draw(st.sampled_from(sorted(self.w.tasks))))

    @precondition(lambda self: self.w.workers)
    @rule(data=st.data())
    def die(self, data):
        self.w.die(data.draw(st.sampled_from(sorted(self.w.workers))))

    @precondition(lambda self: self.w.running)
    @rule(data=st.data(), retry=st.booleans())
    def spoil(self, data, retry):
        name = data.draw(st.sampled_from(sorted(self.w.running)))
        self.w.spoil(name)
        self.w.finish(name, retry=retry)

    @precondition(lambda self: self.w.running)
    @rule(data=st.data())
    def run_out_of_memory(self, data):
        name = data.draw(st.sampled_from(sorted(self.w.running)))
        self.w.tell(Scheduler.kill_for_memory, self.w.worker_of(name), Memory.HOST)

    @precondition(lambda self: self.w.running)
    @rule(data=st.data())
    def outgrow(self, data):
        name = data.draw(st.sampled_from(sorted(self.w.running)))
        self.w.tell(Scheduler.kill_for_memory, self.w.worker_of(name), Memory.DEVICE)

    @rule(index=st.integers(0, len(TYPES) - 1), reason=st.sampled_from(["XID", "ECC"]))
    def fall_sick(self, index, reason):
        self.w.tell(Scheduler.device_changed, GPU, index, Cause.SICK, reason)

    @rule(index=st.integers(0, len(TYPES) - 1))
    def get_well(self, index):
        self.w.tell(Scheduler.device_changed, GPU, index, Cause.SICK, None)

    @rule(
        index=st.integers(0, len(TYPES) - 1),
        reason=st.sampled_from([None, "python"]),
        is_avoided=st.booleans(),
    )
    def others_come_and_go(self, index, reason, is_avoided):
        self.w.tell(
            Scheduler.device_changed, GPU, index, Cause.FOREIGN, reason, is_avoided
        )

    @rule(settles=st.booleans())
    def change_how_devices_settle(self, settles):
        self.w.settles = settles

    @precondition(lambda self: self.w.unsettled)
    @rule(data=st.data(), how=st.sampled_from(["seen", "unseen", "never"]))
    def settle(self, data, how):
        worker = data.draw(st.sampled_from(self.w.unsettled))
        if how == "never":
            self.w.tell(Scheduler.devices_stuck, worker, "it is stuck")
        else:
            self.w.tell(Scheduler.devices_free, worker, how == "seen")

    @rule(index=st.integers(0, len(TYPES) - 1))
    def recover(self, index):
        self.w.tell(Scheduler.device_changed, GPU, index, Cause.UNSETTLED, None)

    @rule(environment=st.sampled_from([(), (("X", "1"),)]))
    def outdate(self, environment):
        self.w.tell(Scheduler.environment_outdated, environment)

    @rule(seconds=st.sampled_from([0, 0.1, 0.5, 2.0, 30.0]))
    def advance(self, seconds):
        self.w.advance(seconds)

    @precondition(lambda self: len(self.w.tasks) > 8)
    @rule(at_once=st.booleans())
    def close(self, at_once):
        self.w.close(at_once)

    @invariant()
    def nobody_waits_for_what_is_free(self):
        ledger = self.w.scheduler.ledger
        if self.w.scheduler.reservation is not None:
            return
        if self.w.scheduler.exclusive.is_wanted or not self.w.has_room:
            return
        for record in list(self.w.scheduler.ready):
            if not self.w._may_hold(record):
                continue
            assert not could_take(ledger, record), record

    @invariant()
    def no_more_workers_than_there_is_room_for(self):
        scheduler = self.w.scheduler
        assert len(scheduler.workers) <= scheduler.worker_limit.most

    @invariant()
    def nobody_lacks_a_worker_that_fits_or_that_could_go(self):
        scheduler = self.w.scheduler
        room = scheduler.worker_limit
        if self.w.has_room or scheduler.is_closing or scheduler.exclusive.is_wanted:
            return
        assert room.leaving <= {w.id for w in self.w.workers.values() if w.is_ending}
        if scheduler.reservation is None and scheduler.ready.by_shape:
            line = sorted(scheduler.ready, key=precedence)
            first = next(filter(self.w._may_hold, line), None)
            if first is None:
                return
            if could_take(scheduler.ledger, first):
                is_lease = first.spec.is_lease
                assert is_lease or room.leaving or not scheduler.workers.idle, first

    @invariant()
    def what_is_kept_is_kept_for_one_who_needs_it(self):
        scheduler = self.w.scheduler
        reservation = scheduler.reservation
        if reservation is None:
            return
        record, request = reservation.record, reservation.record.spec.shape.request
        assert not scheduler.is_closing
        assert record.state is TaskState.WAITING
        assert self.w.now - record.since >= scheduler.config.reserve_after
        # Scalars serve others until the devices are free.
        whole = dict(request.scalars)
        assert reservation.kept in ([whole, {}] if request.devices else [whole])
        for kind, amount in request.devices if not lies_in_bundles(request) else ():
            wanted = max(1, amount // UNIT)
            assert reservation.barred[kind].bit_count() == wanted

    @invariant()
    def every_owner_is_told_once_and_then_never_again(self):
        """`World` refuses a second answer; this checks for the first."""
        for name, task in self.w.tasks.items():
            is_over = task.id not in self.w.scheduler.tasks
            assert not is_over or task.news or task.is_cancelled, name
            assert not (task.news and task.is_cancelled), name

    @invariant()
    def nothing_that_has_run_to_its_end_runs_again(self):
        for task in self.w.tasks.values():
            retries = task.spec.max_retries
            # One retry with twice the share and one with a whole device, in addition.
            most = 1 + retries + task.spec.retries_oom + task.spec.doubles_share
            assert retries < 0 or task.runs <= most, task

    @invariant()
    def nothing_stands_behind_one_that_waits(self):
        for worker in self.w.workers.values():
            if worker.task and worker.task.spec.name in self.w.blocked:
                assert len(worker.sent) == 1, worker

    @invariant()
    def no_device_is_shared_beyond_the_whole(self):
        shares = [0] * len(TYPES)
        for lease in self.w.scheduler.ledger.leases.values():
            for _, (index, parts), memory in lease.held():
                assert parts > 0 or memory > 0
                shares[index] += parts
        assert all(parts <= 10_000 for parts in shares), shares
        assert all(0 <= share <= 1 for share in self.w.free_gpus)

    @invariant()
    def no_memory_is_reserved_beyond_the_whole(self):
        ledger = self.w.scheduler.ledger
        reserved, shares = [0] * len(TYPES), 0
        for lease in ledger.leases.values():
            for _, index, count in ledger.reserved(lease):
                assert 0 <= count <= DEVICES[index].memory
                reserved[index] += count
                shares += 1
        for index, device in enumerate(DEVICES):
            held = ledger.device_sets[GPU].memory_reserved(index)
            # Each share's part is rounded down, and their sum as well.
            assert reserved[index] <= held <= reserved[index] + shares
            assert held <= device.memory

    @invariant()
    def a_share_is_held_until_the_process_is_gone(self):
        for worker in self.w.workers.values():
            is_bound = worker.binding is not None
            if is_bound and worker.is_ending and worker.id not in self.w.retired:
                record = self.w.scheduler.workers.get(worker.id)
                assert record.lease is not None, record
        for worker in self.w.unsettled:
            holders = {holder.id: holder for holder in self.w.scheduler.holders}
            assert holders[worker].lease is not None

    @invariant()
    def nobody_is_placed_on_what_was_set_aside(self):
        """Holders keep their shares; no new lease gets one."""
        gpus = self.w.scheduler.ledger.device_sets[GPU]
        for lease in self.w.scheduler.ledger.leases.values():
            held = {index for shares in lease.shares for index, _ in shares}
            aside = set(gpus.availability.aside)
            assert lease.id in self.before or not held & aside, lease
        self.before = set(self.w.scheduler.ledger.leases)

    @invariant()
    def no_more_workers_idle_than_are_wanted(self):
        scheduler = self.w.scheduler
        config = scheduler.config
        environments = max(1, len(scheduler.spares.wanted))
        wanted = config.idle_workers + config.spare_workers * environments
        assert scheduler.workers.idle <= (0 if scheduler.is_closing else wanted)

    def teardown(self):
        w = self.w
        scheduler = w.scheduler
        for index in range(len(TYPES)):
            w.tell(Scheduler.device_changed, GPU, index, Cause.UNSETTLED, None)
            w.tell(Scheduler.device_changed, GPU, index, Cause.SICK, None)
            w.tell(Scheduler.device_changed, GPU, index, Cause.FOREIGN, None)
        for client in [*(scheduler.clients or ())]:
            w.join(client.id)
        w.run_dry()
        w.check()
        assert scheduler.ledger.available() == scheduler.ledger.totals()
        assert not scheduler.ledger.leases
        assert not scheduler.tasks
        assert not scheduler.ready.by_shape
        assert len(scheduler.timers) == 0
        assert w.running == w.waiting == w.starting == set()
        for name, task in w.tasks.items():
            assert (task.news is None) == task.is_cancelled, name
        w.close()
        assert scheduler.is_closed
        assert w.worker_count == 0


SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=examples(250),
    stateful_step_count=50,
    suppress_health_check=list(HealthCheck),
)


class TestNode(NodeMachine.TestCase):
    """The same examples each time, in some seconds."""

    settings = SETTINGS


class WithIndex:
    """As if each program had many different requests."""

    def setUp(self) -> None:
        few, ready.FEW = ready.FEW, 0
        self.addCleanup(setattr, ready, "FEW", few)


class TestNodeWithIndex(WithIndex, NodeMachine.TestCase):
    """The same for programs with many different requests."""

    settings = SETTINGS


@pytest.mark.slow
class TestNodeWithIndexAtLength(WithIndex, NodeMachine.TestCase):
    """New examples each time."""

    settings = settings(SETTINGS, derandomize=False, max_examples=1_000)


@pytest.mark.slow
class TestNodeAtLength(NodeMachine.TestCase):
    """New examples each time. Write what it finds into `test_replays`."""

    settings = settings(SETTINGS, derandomize=False, max_examples=2_500)


BUNDLES = st.lists(
    st.sampled_from(
        [
            {"GPU": 1},
            {"GPU": 0.5},
            {"GPU": 0.3, "CPU": 1},
            {"CPU": 1},
            {"GPU": 1, "CPU": 1, "type": "A100"},
            {"license": 0.5},
            {"GPU": 0.5, "gpu_memory": 3 << 30},
            {"gpu_memory": 5 << 30},
        ]
    ),
    min_size=1,
    max_size=3,
)


def is_placement_group(task) -> bool:
    """Return True if a simulated task is a placement group."""
    return lies_in_bundles(task.spec.shape.request)


class SharedGroupMachine(NodeMachine):
    """Random events on a node of several programs with placement groups."""

    @rule(
        bundles=BUNDLES,
        strategy=st.sampled_from(["PACK", "SPREAD"]),
        priority=st.integers(-1, 1),
        client=st.integers(0, 3),
    )
    def ask_for_a_group(self, bundles, strategy, priority, client):
        name = f"t{len(self.w.tasks)}"
        options = {"strategy": strategy, "priority": priority}
        with suppress(LimitError, InfeasibleError):
            client = self.joined(client)
            self.w.placement_group(name, *bundles, **options, client=client)

    @rule(
        data=st.data(),
        index=st.integers(-1, 1),
        amounts=st.sampled_from([(0, 0.25), (0, 0.5), (1, 0), (1, 0.5), (0, 1)]),
        options=st.fixed_dictionaries(
            {},
            optional={
                "max_calls": st.integers(0, 2),
                "is_endless": st.booleans(),
                "retries_oom": st.booleans(),
                "timeout": st.sampled_from([0.5, 3.0]),
                "priority": st.integers(-1, 1),
            },
        ),
    )
    def submit_in_a_group(self, data, index, amounts, options):
        tasks = self.w.tasks
        groups = [name for name, task in tasks.items() if is_placement_group(task)]
        if not groups:
            return
        group = data.draw(st.sampled_from(groups))
        bundles = tasks[group].spec.shape.request.placement_group.bundles
        parents = sorted(self.w.running | self.w.blocked)
        parent = data.draw(st.sampled_from([None, *parents])) if parents else None
        options |= {"num_cpus": amounts[0], "num_gpus": amounts[1], "parent": parent}
        with suppress(LimitError):
            index = min(index, len(bundles) - 1)
            self.w.submit_in(group, f"t{len(tasks)}", index, **options)

    @precondition(lambda self: self.w.placement_groups)
    @rule(data=st.data())
    def remove_a_group(self, data):
        self.w.cancel(data.draw(st.sampled_from(sorted(self.w.placement_groups))))


class GroupMachine(SharedGroupMachine):
    """The same for a node of one program."""

    @initialize(**BEGINNING)
    def begin(self, starts, exits, revokes, config, most) -> None:
        super().begin(starts, exits, revokes, config, most, [])

    def join(self) -> None:
        """No other program joins."""


class TestGroups(GroupMachine.TestCase):
    """The same examples each time, in some seconds."""

    settings = settings(SETTINGS, max_examples=examples(150))


class TestGroupsWithIndex(WithIndex, GroupMachine.TestCase):
    """The same for programs with many different requests."""

    settings = settings(SETTINGS, max_examples=examples(150))


@pytest.mark.slow
class TestGroupsAtLength(SharedGroupMachine.TestCase):
    """New examples each time."""

    settings = settings(SETTINGS, derandomize=False, max_examples=1_000)
