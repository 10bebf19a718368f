"""The status of a node: plain data, and its text for people.

`aiogpu.observe.snapshot` makes it from the state of the scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

from aiogpu.core.model.ids import OWN
from aiogpu.core.model.text import (
    SHOWN,
    aligned,
    count_hidden,
    in_words,
    listing,
    span,
    terms,
)
from aiogpu.core.model.units import GPU_MEMORY, MEMORY, format_amount, size
from aiogpu.core.queue.fair_share import Limits
from aiogpu.core.records import TaskState

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process on a device that is not a worker of the node or its descendant.

    Attributes:
        pid: its process id, as the device driver reports it.
        name: the name of its program, "" if it cannot be read.
        memory: bytes of device memory that it uses, None if the driver does not
            report them.
    """

    pid: int
    name: str = ""
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """The last reading of one device.

    Attributes:
        seen: the time of the reading, by the scheduler's clock.
        used: bytes of its memory that any process uses; None if unknown.
        utilisation: percent of the last sample period in which a kernel ran; None if
            unknown.
        others: processes that are not the node's; None if unknown.
        workers: bytes that each worker uses with its descendants, by worker id.
        outgrown: the workers that use more than their reservation.
        unknown: which of these values could not be read and why, None if all could.
        temperature: degrees Celsius, None if unknown.
        power: power draw in watts, None if unknown.
    """

    seen: float
    used: int | None = None
    utilisation: int | None = None
    others: tuple[OtherProcess, ...] | None = None
    workers: Mapping[int, int] = field(default_factory=dict)
    outgrown: frozenset[int] = frozenset()
    unknown: str | None = None
    temperature: int | None = None
    power: float | None = None


Observations = Mapping[tuple[str, int], Observed]
"""Readings by kind and index of the device."""


NOTHING: Final[Observations] = {}
UNSEEN: Final = Observed(0.0)
"""Stands for the reading of a device without one."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One worker's share of a device, or its amount of another resource.

    Attributes:
        share: the amount in whole units: 0.25 of a device, 2.0 CPUs.
        worker: the worker's id.
        pid: its process id, 0 while it starts.
        task: name of its current task, None while the worker ends.
        seconds: for how long it has run this task, up to one second less than the
            true value; None if unknown.
        is_endless: it holds its share until its owner releases it, or until a killed
            process ends.
        is_settling: its processes have ended, but the device driver has not confirmed
            yet that the device is free of them.
        memory: bytes of device memory reserved for it, by `gpu_memory=` or by its
            share; 0 if unknown, and for other resources than GPUs.
        used: bytes of device memory that it uses with its descendants, None if
            unknown.
        has_outgrown: `used` exceeds its reservation.
        unended: which processes of an ended worker, or of a returned lease, have not
            ended and keep the share; "" if there are none.
        is_ending: it is an actor that was told to end, and has not ended yet.
        is_evictable: it is an actor that leaves when others need its share and nobody
            calls it.
    """

    share: float
    worker: int
    pid: int
    task: str | None
    seconds: float | None = None
    is_endless: bool = False
    is_settling: bool = False
    memory: int = 0
    used: int | None = None
    has_outgrown: bool = False
    unended: str = ""
    is_ending: bool = False
    is_evictable: bool = False


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device: its identity, its free share, its holders, its readings.

    Attributes:
        kind: the name of the resource, "GPU".
        id: the id that tasks use: an index, or a UUID or MIG id.
        type: the accelerator type, such as "A100", if known.
        uuid: the vendor's unique id, if known.
        name: the vendor's product name, if known.
        memory: bytes of device memory, 0 if unknown.
        free: the free share, 1.0 for the whole device; 0.0 while it is set aside.
        holders: the holders of the other shares.
        aside: why the device is set aside, so that no task gets it; None if it is not.
        is_unverified: the last share was returned without a check that nothing is left
            on the device, because its driver does not report that.
        memory_reserved: bytes of its memory that all holders have reserved.
        used: bytes of its memory that any process uses; None if unknown.
        utilisation: percent of the last sample period in which a kernel ran; None if
            unknown.
        others: processes on it that are not the node's; None if unknown.
        seen: seconds since the last reading; None if the device is logical or its
            driver cannot be read.
        unknown: which of these values could not be read and why, None if all could.
        temperature: degrees Celsius, None if unknown.
        power: power draw in watts, None if unknown.
    """

    kind: str
    id: int | str
    type: str | None
    uuid: str | None
    name: str | None
    memory: int
    free: float
    holders: tuple[Holder, ...]
    aside: str | None = None
    is_unverified: bool = False
    memory_reserved: int = 0
    used: int | None = None
    utilisation: int | None = None
    others: tuple[OtherProcess, ...] | None = None
    seen: float | None = None
    unknown: str | None = None
    temperature: int | None = None
    power: float | None = None


_HOLD_NOTHING: Final = frozenset({TaskState.WAITING.value, TaskState.EXPECTING.value})


@dataclass(frozen=True, slots=True)
class ReservationStatus:
    """Resources reserved for a task that has waited long at the head of its queue.

    Attributes:
        task: the task's number.
        name: its name.
        devices: ids of the reserved devices, by kind: `{"GPU": (0, 1)}`.
        amounts: the reserved amounts of other resources: `{"CPU": 2.0}`.
        seconds: until the task can begin at the latest; None if unknown, because tasks
            without `timeout` hold the resources.
    """

    task: int
    name: str
    devices: Mapping[str, tuple[int | str, ...]]
    amounts: Mapping[str, float]
    seconds: float | None

    def __str__(self) -> str:
        # "GPU 1" could mean the device or the amount.
        parts = [
            f"device{'s' * (len(ids) > 1)} {kind} {listing(map(str, ids), len(ids))}"
            for kind, ids in self.devices.items()
        ]
        parts += [
            f"{format_amount(name, kept)} {name}" for name, kept in self.amounts.items()
        ]
        return in_words(parts)


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine of a cluster, or the machine of the node.

    Attributes:
        id: the machine's node id, as in `get_runtime_context().node_id`.
        host: the machine's host name.
        is_alive: the machine is alive; a cluster also lists lost machines.
        total: its resources by name, `{"CPU": 4.0, "GPU": 1.0}`.
    """

    id: str
    host: str
    is_alive: bool
    total: Mapping[str, float]


@dataclass(frozen=True, slots=True, repr=False)
class NodeStatus:
    """The node at one moment. `print` shows it as a table.

    Attributes:
        total: all resources by name, `{"CPU": 4.0, "GPU": 1.0}`.
        available: the free amount of each resource.
        devices: the devices, with their holders.
        workers: the worker processes.
        tasks: all tasks that have a worker, and all held leases, by number; then the
            first 100 waiting tasks in the order of their turn, or fewer if thousands
            between them were cancelled.
        waiting_count: the number of all waiting tasks, listed or not.
        shapes: the requests of the waiting tasks, in the order of their turn; at most
            100.
        shape_count: the number of different requests that wait, listed or not.
        reservation: the reservation for a task that has waited long, or None.
        clients: the programs that share the node, by number; empty if only one uses
            it.
        actors: all actors with a process; then the first 100 of the others.
        failures: the last 100 failed tasks and calls, the latest first, without their
            tracebacks.
        draining: seconds left for running tasks while the node is being stopped and
            accepts no new work; None otherwise.
        placements: all placements, in the order of their requests.
        outages: why no worker can be started now, for which tasks, and when the next
            attempt is; empty while workers start.
        nodes: the machines: one, or all of a Ray cluster.
        unended: the killed workers and returned leases of which processes have not
            ended; they keep their shares.
        ended_idle: the last 16 idle workers that were ended because memory ran out,
            the latest first.
        departed: names and process ids of the last 256 programs that have left the
            node, `{"3": "train.py 4711"}`; their ended tasks are still listed.
        outcomes: how many attempts have ended since the node began, by outcome:
            `{"finished": 12, "failed": 1}`; empty on a cluster.
        evictions: how often actors with `evict_after` have left so that others could
            start, since the node began.
        reloads: how often such actors have come back in a new process.
    """

    total: Mapping[str, float]
    available: Mapping[str, float]
    devices: tuple[DeviceStatus, ...]
    workers: tuple[WorkerStatus, ...]
    tasks: tuple[TaskStatus, ...]
    waiting_count: int
    shapes: tuple[ShapeStatus, ...]
    shape_count: int
    reservation: ReservationStatus | None
    clients: tuple[ClientStatus, ...] = ()
    actors: tuple[ActorStatus, ...] = ()
    failures: tuple[EndedTask, ...] = ()
    draining: float | None = None
    placements: tuple[PlacementStatus, ...] = ()
    outages: tuple[OutageStatus, ...] = ()
    nodes: tuple[Machine, ...] = ()
    unended: tuple[UnendedStatus, ...] = ()
    ended_idle: tuple[IdleEndStatus, ...] = ()
    departed: Mapping[str, str] = field(default_factory=dict)
    outcomes: Mapping[str, int] = field(default_factory=dict)
    evictions: int = 0
    reloads: int = 0

    @property
    def waiting(self) -> tuple[TaskStatus, ...]:
        """The tasks that hold nothing yet; at most 100."""
        return tuple(t for t in self.tasks if t.state in _HOLD_NOTHING)

    def __repr__(self) -> str:
        return f"<NodeStatus {summary(self)}>"

    def _repr_html_(self) -> str:
        """Return tables for a notebook."""
        return status_html(self)

    def __str__(self) -> str:
        return report(self)


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """One task that has not ended.

    Attributes:
        id: the task's number.
        name: its name.
        state: "waiting", "starting", "queued", "running", "blocked", "delayed",
            "expecting" or "stopping"; docs/waiting.md explains each. "sent" on a
            cluster that does not report whether the task runs.
        request: its request, `{"CPU": 1.0, "GPU": 0.25}`.
        worker: id of its worker, None while it waits.
        reason: why its code does not run, None if it runs.
        client: the number of its program, 0 for the node's own.
        is_lease: it is a lease, held by processes that are not workers.
        pid: process id of its worker, or of the program that asked for the lease; 0
            while it waits or its worker starts.
    """

    id: int
    name: str
    state: str
    request: Mapping[str, float]
    worker: int | None
    reason: str | None
    client: int = 0
    is_lease: bool = False
    pid: int = 0

    @property
    def is_held(self) -> bool:
        """True if the task has a worker, or is a held lease."""
        is_leased = self.is_lease and self.state not in _HOLD_NOTHING
        return is_leased or self.worker is not None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker process.

    Attributes:
        id: the worker's number.
        pid: its process id, 0 while it starts.
        state: "starting", "idle", "busy", "ending" or "settling".
        task: name of its current task, or None.
    """

    id: int
    pid: int
    state: str
    task: str | None


@dataclass(frozen=True, slots=True)
class OutageStatus:
    """The reason why no worker can be started, for `status()` and `why()`.

    Attributes:
        reason: why the last attempt failed.
        failures: the number of failed attempts in a row.
        seconds: seconds since the first of them.
        retry_in: seconds until the next attempt; 0 during an attempt, and if no task
            waits for a worker.
        variables: names of the variables of the affected `runtime_env`; empty for tasks
            without variables, and if all tasks are affected.
        is_joined: the affected tasks belong to a program that has joined the node.
    """

    reason: str
    failures: int
    seconds: float
    retry_in: float
    variables: tuple[str, ...] = ()
    is_joined: bool = False

    def __str__(self) -> str:
        named = ", ".join(self.variables)
        program = " of a program that has joined" if self.is_joined else ""
        tasks = program + (f" with {named}" if named else "")
        tasks = f" for tasks{tasks}" if tasks else ""
        tries = "try has" if self.failures == 1 else "tries have"
        when = f"in {span(self.retry_in)}" if self.retry_in > 0 else "now"
        return (
            f"no worker can be started{tasks}: {self.reason} ({self.failures} {tries} "
            f"failed in {span(self.seconds)}; next try {when})"
        )


@dataclass(frozen=True, slots=True)
class ActorStatus:
    """An actor that has not ended.

    Attributes:
        id: its number; the scheduler has a task of the same number for it.
        name: the name for `aiogpu.get_actor`, or None.
        namespace: the namespace of the name, "" if it has no name.
        class_name: the name of its class.
        state: "pending" (it waits for resources, or its constructor runs), "alive",
            "evicted" (it has left so that others can start, and its next call brings it
            back) or "leaving" (it ends after the calls that were sent to it).
        holders: the number of processes that hold a handle to it.
        worker: id of its worker, or None.
        pid: process id of its worker, 0 if it has none.
        calls: the number of its unanswered calls.
        is_detached: it outlives the program that created it.
        client: the number of its program, 0 for the node's own.
        evictions: how often it has left so that others could start.
    """

    id: int
    name: str | None
    namespace: str
    class_name: str
    state: str
    holders: int
    worker: int | None
    pid: int
    calls: int
    is_detached: bool
    client: int = 0
    evictions: int = 0


STATES: Final = {
    "D": "waits in the kernel",
    "S": "sleeps",
    "R": "runs",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "its main thread has ended",
}
"""The states of proc(5), in words."""


@dataclass(frozen=True, slots=True)
class UnendedStatus:
    """Processes that have not ended with their worker or with their lease.

    Attributes:
        worker: the number of the worker that was killed, or of the holder of the lease
            that was returned.
        pids: the processes; empty if they are not known.
        states: the state of each, a letter of proc(5): "D" if it waits in the kernel.
        seconds: seconds since they were told to end, or the lease was returned.
        is_lease: they use a returned lease; nothing kills them.
    """

    worker: int
    pids: tuple[int, ...]
    states: tuple[str, ...]
    seconds: float
    is_lease: bool = False

    def __str__(self) -> str:
        pairs = zip(self.pids, self.states, strict=True)
        each = (f"{pid} (state {s}, {STATES.get(s, 'ends')})" for pid, s in pairs)
        names = listing(each, len(self.pids))
        count = len(self.pids)
        who = f"process{'es' * (count > 1)} {names}" if count else "a process of it"
        have = "have" if count > 1 else "has"
        if self.is_lease:
            return f"{who} {have} used it for {span(self.seconds)} since its return"
        return f"{who} {have} not ended {span(self.seconds)} after SIGKILL"


@dataclass(frozen=True, slots=True)
class IdleEndStatus:
    """An idle worker that was ended because memory ran out.

    Attributes:
        worker: the worker's number.
        pid: its process id.
        used: bytes of memory that it and its descendants used.
        seconds: seconds since then.
    """

    worker: int
    pid: int
    used: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"idle worker {self.worker} (pid {self.pid}) was ended "
            f"{span(self.seconds)} ago: it kept {size(self.used)} while memory ran out"
        )


class Program(NamedTuple):
    """The name and the process of a client, which the scheduler does not know.

    Attributes:
        name: the program's name, such as "train.py".
        pid: its process id.
    """

    name: str
    pid: int


THE_NODES: Final = "the node's own program"


NOBODY: Final[Mapping[int, Program]] = MappingProxyType({})
"""No programs."""


ALL_ENDED: Final[Mapping[int, UnendedStatus]] = MappingProxyType({})
"""No process is left of a killed worker or a returned lease."""


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """One of the programs that share a node.

    Attributes:
        id: its number; 0 for the program that the node belongs to, which is listed
            only if it has tasks.
        name: its name, such as "train.py"; "" if unknown.
        pid: its process id, 0 if unknown.
        weight: its fair share, relative to a program of weight 1.
        running: the number of its tasks that have a worker or were sent to one.
        waiting: the number of its other unfinished tasks.
        holds: the amounts that it holds, by resource, `{"CPU": 2.0, "GPU": 0.5}`.
        limits: its limits.
        has_left: its process has ended and only its tasks are left.
    """

    id: int
    name: str
    pid: int
    weight: float
    running: int
    waiting: int
    holds: Mapping[str, float]
    limits: Limits
    has_left: bool = False


@dataclass(frozen=True, slots=True)
class EndedTask:
    """A task that has ended, or a call of an actor that has failed.

    Attributes:
        task: the number of the task or, for a call, of the actor.
        name: the name of the task, or "Model.predict" for a call.
        error: the exception's type, "ValueError" or "torch.OutOfMemoryError"; "" if
            there is none.
        message: the first line of the exception's message.
        seconds: seconds since the end.
        client: the number of its program, 0 for the node's own.
        state: "finished", "failed" or "cancelled".
        waited: seconds from the submission until the code began, in the last attempt,
            or until the end if the code never began.
        ran: seconds that the code ran; None if it never began, and for a call.
        worker: id of the worker that ran it, or None.
        pid: process id of this worker, 0 if there was none.
        devices: the worker's devices, each a kind and an index: `("GPU", 0)`.
        request: its request, `{"CPU": 1.0, "GPU": 0.5}`; empty for a call.
        traceback: the exception's traceback, without the middle if it is long; "" if
            there is none, and in lists of tasks.
        is_call: it is a call of an actor.
    """

    task: int
    name: str
    error: str
    message: str
    seconds: float
    client: int = 0
    state: str = "failed"
    waited: float = 0.0
    ran: float | None = None
    worker: int | None = None
    pid: int = 0
    devices: tuple[tuple[str, int], ...] = ()
    request: Mapping[str, float] = field(default_factory=dict)
    traceback: str = ""
    is_call: bool = False


@dataclass(frozen=True, slots=True)
class ShapeStatus:
    """All waiting tasks with the same request.

    Attributes:
        request: the request of each task, `{"CPU": 1.0, "GPU": 0.25}`.
        gpu_strategy: "pack" or "spread".
        variables: names of the variables of their `runtime_env`.
        count: the number of tasks.
        first: name of the first task in the queue.
        seconds: for how long the oldest task has waited.
        reason: why the first task waits.
        where: the conditions on their GPUs in words, "memory of 40GiB or more".
        client: the number of their program, 0 for the node's own.
    """

    request: Mapping[str, float]
    gpu_strategy: str
    variables: tuple[str, ...]
    count: int
    first: str
    seconds: float
    reason: str
    where: str = ""
    client: int = 0


@dataclass(frozen=True, slots=True)
class BundleStatus:
    """One bundle of a placement.

    Attributes:
        request: its resources, `{"CPU": 2.0, "GPU": 1.0}`.
        free: the amounts that no member uses; all amounts until it is granted.
        devices: ids of its devices by kind, `{"GPU": (0, 1)}`; empty until it is
            granted.
    """

    request: Mapping[str, float]
    free: Mapping[str, float]
    devices: Mapping[str, tuple[int | str, ...]]

    def __str__(self) -> str:
        text = terms(self.request.items())
        for kind, ids in self.devices.items():
            text += f" on {kind} {listing(map(str, ids), len(ids))}"
        amounts = {name: n - self.free[name] for name, n in self.request.items()}
        used = {name: amount for name, amount in amounts.items() if amount}
        return f"{text}, used: {terms(used.items())}" if used else text


@dataclass(frozen=True, slots=True)
class PlacementStatus:
    """One placement.

    Attributes:
        task: its task number, for `why`.
        name: its name.
        id: its unique id.
        state: "waiting", "ready", or "removing" while its members stop.
        strategy: how its bundles are placed on devices.
        bundles: its bundles, in order.
        members: the number of its unfinished tasks and actors.
        client: the number of its program, 0 for the node's own.
        pid: process id of the program; 0 while it waits.
        reason: why it waits, None if it does not.
        is_detached: it outlives the program that requested it.
    """

    task: int
    name: str
    id: str
    state: str
    strategy: str
    bundles: tuple[BundleStatus, ...]
    members: int
    client: int = 0
    pid: int = 0
    reason: str | None = None
    is_detached: bool = False


WIDEST: Final = 100
"""The most columns of a line; the readings of a wide device get a second line."""
STALE: Final = 5.0
"""Seconds after which the age of a reading is shown."""
_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20))
_STATES: Final = (
    "running",
    "blocked",
    "stopping",
    "starting",
    "queued",
    "sent",
    "waiting",
)


def amount(count: int, none: str = "") -> str:
    """Format bytes as "3.2 GiB"; return `none` for less than a MiB."""
    for unit, unit_bytes in _UNITS:
        if count >= unit_bytes:
            units = count / unit_bytes
            return f"{units:.0f} {unit}" if units >= 100 else f"{units:.3g} {unit}"
    return none


def memory_use(used: int | None, total: int) -> str:
    """Describe the used and the total memory, as far as known."""
    size_text = amount(total)
    if used is None:
        return size_text
    return f"{amount(used, '0')} used" + (f" of {size_text}" if size_text else "")


def pid_of(pid: int) -> str:
    """Describe a worker's process, which may not exist yet."""
    return f"pid {pid}" if pid else "(starting)"


def name_of(client: int, programs: Mapping[int, Program]) -> str:
    """Return the name of a program."""
    program = programs.get(client)
    if program is not None and program.name:
        return program.name
    return THE_NODES if client == OWN else f"program {client}"


def name_and_pid(client: int, programs: Mapping[int, Program]) -> str:
    """Return the name and the process of a program, as names need not be unique."""
    program, name = programs.get(client), name_of(client, programs)
    return f"{name} (pid {program.pid})" if program and program.pid else name


def client_name(client: ClientStatus) -> str:
    """Return the name of a program from its status."""
    return name_of(client.id, {client.id: Program(client.name, client.pid)})


def shown_clients(status: NodeStatus) -> list[ClientStatus]:
    """Return the programs to show: the node's own only if it has tasks."""
    return [c for c in status.clients if c.id != OWN or c.running or c.waiting]


def held_tasks(status: NodeStatus) -> list[TaskStatus]:
    """Return the tasks that have a worker, and the held leases."""
    return [task for task in status.tasks if task.is_held]


def state_of(task: TaskStatus) -> str:
    """Return the state in one word: "leased" for a held lease."""
    is_leased = task.is_lease and task.state == TaskState.RUNNING.value
    return "leased" if is_leased else task.state


def summary(status: NodeStatus) -> str:
    """Summarise resources, workers and tasks in one line."""
    resources = ", ".join(
        f"{name} {format_amount(name, free)}/{format_amount(name, total)}"
        for name, free, total in _notable_resources(status)
    )
    drain = "" if status.draining is None else f"{_draining(status.draining)}; "
    outage = "no worker can be started; " if status.outages else ""
    workers = f"{len(status.workers)} workers"
    return f"{drain}{outage}{resources}; {workers}; {_task_counts(status)}"


def overview(status: NodeStatus) -> Iterator[str]:
    """Summarise free resources, workers and tasks in several lines."""
    if status.draining is not None:
        yield _draining(status.draining)
    states = Counter(worker.state for worker in status.workers)
    workers = ", ".join(f"{count} {state}" for state, count in states.items())
    yield from aligned(
        [
            *(
                (
                    name,
                    f"{format_amount(name, free)} of {format_amount(name, total)} free",
                )
                for name, free, total in _notable_resources(status)
            ),
            ("workers", workers or "none"),
            ("tasks", _task_counts(status)),
        ]
    )
    yield from map(str, status.outages)
    yield from unended_lines(status, is_all=True)
    yield from map(str, status.ended_idle[:1])


def unended_lines(status: NodeStatus, *, is_all: bool = False) -> Iterator[str]:
    """Yield a sentence for each killed worker that has not ended.

    `is_all`: also for returned leases, whose processes may go on.
    """
    shown = [each for each in status.unended if is_all or not each.is_lease]
    for left in shown[:SHOWN]:
        kind = "a returned lease" if left.is_lease else f"worker {left.worker}"
        yield f"{kind} keeps what it holds: {left}"
    yield from count_hidden(len(shown) - SHOWN)


def _notable_resources(status: NodeStatus) -> Iterator[tuple[str, float, float]]:
    """Yield each resource with free and total amount; memory only if it is used."""
    for name, total in status.total.items():
        free = status.available.get(name, 0.0)
        if name not in (MEMORY, GPU_MEMORY) or free != total:
            yield name, free, total


def _task_counts(status: NodeStatus) -> str:
    counts = Counter(task.state for task in status.tasks)
    counts["waiting"] = status.waiting_count
    terms_ = [f"{counts[name]} {name}" for name in _STATES if counts[name]]
    return ", ".join(terms_) or "no tasks"


def _draining(seconds: float) -> str:
    return f"is being stopped: no new work; running tasks have {span(seconds)} to end"


def reservation_line(status: NodeStatus) -> Iterator[str]:
    """Describe the reservation, if there is one."""
    plan = status.reservation
    if plan is not None:
        when = "" if plan.seconds is None else f", for {span(plan.seconds)} at most"
        yield f"kept for {plan.name} (task {plan.task}): {plan}{when}"


def report(status: NodeStatus) -> str:
    """Return the whole status as text, with a section for each kind of entry."""
    tasks, placements = status.tasks, {group.task for group in status.placements}
    clients = shown_clients(status)
    if all(client.id == OWN for client in clients):
        clients = []
    clients.sort(key=lambda client: (-client.running, -client.waiting, client.id))
    rows = [
        *overview(status),
        *device_rows(status.devices),
        *_section(
            "programs",
            clients,
            lambda client: (
                client_name(client),
                f"pid {client.pid}" if client.pid else "",
                f"{client.running} run",
                f"{client.waiting} wait",
                "" if client.weight == 1 else f"weight {client.weight:g}",
                terms(client.holds.items()) if client.holds else "",
                "has left" if client.has_left else "",
            ),
        ),
        *_section(
            "on workers",
            [task for task in tasks if task.worker is not None],
            lambda task: _task_cells(task, task.state, pid_of(task.pid)),
        ),
        # A cluster does not report the workers of these.
        *_section("sent", [t for t in tasks if t.state == "sent"], _task_cells),
        *_section(
            "leases",
            [
                task
                for task in tasks
                if task.is_lease and task.is_held and task.id not in placements
            ],
            lambda task: _task_cells(task, f"pid {task.pid}"),
        ),
        *_placement_rows(status.placements),
        *_shape_rows(status),
        *reservation_line(status),
        *_section(
            "actors",
            status.actors,
            lambda actor: (
                str(actor.id),
                actor.name or "",
                actor.class_name,
                actor.state,
                pid_of(actor.pid) if actor.worker is not None else "",
                f"held by {actor.holders}",
                f"{actor.calls} calls" if actor.calls else "",
            ),
        ),
        *_section(
            "failed",
            status.failures,
            lambda task: (
                f"{span(task.seconds)} ago",
                str(task.task),
                task.name,
                f"{task.error}: {task.message}" if task.message else task.error,
            ),
        ),
    ]
    return "\n".join(rows)


def status_html(status: NodeStatus) -> str:
    """Return the status of a node as tables: devices, tasks, actors, failures."""
    from html import escape

    from aiogpu.observe.html import table

    summary = escape("\n".join(overview(status)))
    return "".join(
        (
            f"<pre>{summary}</pre>",
            table(
                "devices",
                ("device", "name", "free", "memory", "held by"),
                map(_device_cells, status.devices),
            ),
            table(
                "tasks",
                ("task", "name", "state", "asks for", "worker", "because"),
                (
                    (
                        str(task.id),
                        task.name,
                        task.state,
                        terms(task.request.items()),
                        f"pid {task.pid}" if task.pid else "",
                        task.reason or "",
                    )
                    for task in status.tasks
                ),
            ),
            table(
                "actors",
                ("actor", "name", "class", "state", "worker", "calls"),
                (
                    (
                        str(actor.id),
                        actor.name or "",
                        actor.class_name,
                        actor.state,
                        f"pid {actor.pid}" if actor.pid else "",
                        str(actor.calls or ""),
                    )
                    for actor in status.actors
                ),
            ),
            table(
                "failed",
                ("task", "name", "when", "error"),
                (
                    (
                        str(task.task),
                        task.name,
                        f"{span(task.seconds)} ago",
                        f"{task.error}: {task.message}".rstrip(": "),
                    )
                    for task in status.failures[:SHOWN]
                ),
            ),
        )
    )


def _device_cells(device: DeviceStatus) -> Sequence[str]:
    name, memory = f"{device.kind} {device.id}", ""
    if device.memory:
        used = "" if device.used is None else f"{format_amount('memory', device.used)} "
        memory = f"{used}of {format_amount('memory', device.memory)}"
    held = ", ".join(
        f"{holder.task or 'a process that ends'} "
        f"{format_amount(device.kind, holder.share)}"
        for holder in device.holders
    )
    free = device.aside or format_amount(device.kind, device.free)
    return name, device.name or device.type or "", free, memory, held


def _section(
    title: str, entries: Sequence[T], cells: Callable[[T], Sequence[str]]
) -> Iterator[str]:
    """Yield the first few entries as lines, and the number of further ones."""
    if entries and title:
        yield title
    yield from aligned(map(cells, entries[:SHOWN]), indent="  ")
    yield from count_hidden(len(entries) - SHOWN)


def _task_cells(task: TaskStatus, *where: str) -> Sequence[str]:
    asked = terms(task.request.items())
    return (str(task.id), task.name, *where, asked, task.reason or "")


def _placement_rows(placements: Sequence[PlacementStatus]) -> Iterator[str]:
    if placements:
        yield "placements"
    for group in placements[:SHOWN]:
        owner = f"pid {group.pid}, " if group.pid else ""
        state = f"{group.state}, detached" if group.is_detached else group.state
        identity = f"{group.task}  {group.name}  {group.strategy}  {state}"
        yield f"  {identity}  {owner}{group.members} in it"
        if group.reason:
            yield f"    {group.reason}"
        for index, bundle in enumerate(group.bundles[:SHOWN]):
            yield f"    bundle {index}: {bundle}"
        yield from (f"  {line}" for line in count_hidden(len(group.bundles) - SHOWN))
    yield from count_hidden(len(placements) - SHOWN)


def _shape_rows(status: NodeStatus) -> Iterator[str]:
    if status.shapes:
        yield "waiting"
    for shape in status.shapes[:SHOWN]:
        names = ", ".join(shape.variables)
        spread = ", spread" if shape.gpu_strategy == "spread" else ""
        variables = f" with {names}" if names else ""
        yield (
            f"  {shape.count} x {asked_for(shape)}{spread}{variables}: "
            f"{shape.first} first, the oldest for {span(shape.seconds)}"
        )
        yield f"    {shape.reason}"
    yield from count_hidden(status.shape_count - len(status.shapes[:SHOWN]))


def asked_for(shape: ShapeStatus) -> str:
    """Describe the request of a shape, with the conditions on GPUs."""
    where = f" of {shape.where}" if shape.where else ""
    return terms(shape.request.items()) + where


def device_rows(devices: Sequence[DeviceStatus]) -> Iterator[str]:
    """Yield the lines of each device, followed by its holders."""
    for device, lines in zip(devices, _device_lines(devices), strict=True):
        yield from lines
        if device.aside is not None:
            yield f"  set aside: {device.aside}"
        if device.is_unverified:
            yield "  unverified: ended tasks may have left something on it"
        yield from _section("", device.holders, _holder_cells)
        if device.others:
            others = listing(map(_other_process, device.others), len(device.others))
            yield f"  not ours: {others}"
    # One line for all devices with the same unknown values.
    unknown: dict[str, list[str]] = {}
    for device in devices:
        if device.unknown is not None:
            unknown.setdefault(device.unknown, []).append(f"{device.kind} {device.id}")
    for values, names in unknown.items():
        yield f"not known of {listing(names, len(names))}: {values}"


def _device_lines(devices: Sequence[DeviceStatus]) -> Iterator[list[str]]:
    """Yield one line for each device, or two if one line would be too wide."""
    identities = [
        (
            f"{device.kind} {device.id}",
            f"{device.free:g} free",
            device.name or device.type or "",
        )
        for device in devices
    ]
    readings = [_readings(device) for device in devices]
    paired = zip(identities, readings, strict=True)
    rows = [(*identity, *cells) for identity, cells in paired]
    used = [any(column) for column in zip(*rows, strict=True)]
    joined = aligned(
        [cell for cell, is_used in zip(row, used, strict=True) if is_used]
        for row in rows
    )
    short = aligned(identities)
    for line, identity, cells in zip(joined, short, readings, strict=True):
        if len(line) <= WIDEST:
            yield [line]
        else:
            yield [identity, "  " + "  ".join(filter(None, cells))]


def _readings(device: DeviceStatus) -> Sequence[str]:
    is_stale = device.seen is not None and device.seen > STALE
    return (
        memory_use(device.used, device.memory),
        f"{amount(device.memory_reserved)} reserved" if device.memory_reserved else "",
        "" if device.utilisation is None else f"{device.utilisation} % busy",
        heat_and_power(device),
        f"seen {span(device.seen or 0.0)} ago" if is_stale else "",
    )


def heat_and_power(device: DeviceStatus) -> str:
    """Describe temperature and power as far as known: "63 °C 287 W"."""
    heat = "" if device.temperature is None else f"{device.temperature} °C"
    power = "" if device.power is None else f"{device.power:.0f} W"
    return " ".join(filter(None, (heat, power)))


def _holder_cells(holder: Holder) -> Sequence[str]:
    share = f"{holder.share:g}" if holder.share else size(holder.memory)
    if holder.unended:
        return (share, holder.task or "(killed)", pid_of(holder.pid), "", "not ended")
    if holder.is_settling:
        return (share, "(ended)", "", "until the driver confirms", "")
    used = "" if holder.used is None else f"{amount(holder.used, '0')} used"
    if holder.has_outgrown:
        used += ", more than was reserved for it"
    until = "" if holder.seconds is None else span(holder.seconds)
    if holder.is_ending:
        until = "is ending"
    elif holder.is_endless:
        until = "without end"
    elif holder.is_evictable:
        until = "until others need it"
    return (
        share,
        holder.task or "(ending)",
        pid_of(holder.pid),
        until,
        used,
    )


def _other_process(process: OtherProcess) -> str:
    identity = " ".join(filter(None, (process.name, f"pid {process.pid}")))
    memory = "" if process.memory is None else amount(process.memory, "0")
    return f"{identity} with {memory}" if memory else identity
