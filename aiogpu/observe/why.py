"""Reasons for the state of a task: plain data, and their text.

`explain` tells the whole story, `brief` the same in one line. `aiogpu.observe.snapshot`
makes a `Why` from the state of the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from aiogpu.core.model.text import SHOWN, listing, span, terms
from aiogpu.core.model.units import GPU_MEMORY, spoken, written
from aiogpu.observe.status import (
    DeviceStatus,
    EndedTask,
    Holder,
    OutageStatus,
    ReservationStatus,
)

WORTH_TELLING: Final = 0.1
"""Seconds of waiting of an ended task from which on they are told."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A resource of which a waiting task cannot get what it asks for.

    Attributes:
        resource: its name, "CPU" or "GPU"; "gpu_memory" if enough shares of GPUs are
            free, but too little of their memory. Amounts of memory are in bytes.
        asked: how much the task asks for; below 1, a share of one device. For memory,
            the most that it takes of a device.
        free: how much is free; for devices, the sum of the free shares of the devices
            that the task may use.
        total: how much there is; for devices, of those that the task may use.
        kept: how much of what is free is kept for another task.
        devices: the devices that the task may use, each with its free share and its
            holders; empty for a resource that is not made of devices.
        holders: who holds the rest.
    """

    resource: str
    asked: float
    free: float
    total: float
    kept: float
    devices: tuple[DeviceStatus, ...]
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class Why:
    """Why a task waits, or its state if it does not. `str()` gives the text.

    Attributes:
        name: the task's name.
        task: its number; 0 while its node is opening.
        state: "opening" (the node is), "waiting", "starting" (its worker is being
            forked), "queued" (sent ahead to a worker that runs another task),
            "running", "blocked" (it waits for tasks that it has started), "delayed" (it
            has failed and is retried soon), "expecting" (its arguments are results of
            other tasks that have not ended), "sent" (to an actor or a cluster, which
            does not tell whether it runs), "stopping" or "ended".
        seconds: since it was submitted; None if the node was not asked.
        request: what it asks for, `{"CPU": 1.0, "GPU": 0.5}`.
        position: its place among the waiting tasks of its program with the same
            request, 1 for the first; beyond some thousands, tasks that left the queue
            may still count. None unless it waits.
        of: how many tasks of its program wait with the same request.
        rivals: other programs whose tasks go before it, at most eight:
            "train.py (pid 4711)".
        rival_count: how many such programs there are.
        limit: what its program holds of what it may hold, if that is why it waits:
            "2 of at most 2 GPU".
        is_behind: whether it waits because its program does not read the results that
            it was sent.
        reasons: for a waiting task, one for each resource that is short.
        reservation: what is kept for it because it has waited long; or for another
            task, if that is why it waits.
        is_held_endlessly: whether it waits for something that others hold without end;
            then nothing is kept for it, however long it waits.
        bound: the number of workers, if it lacks nothing but a worker and there may be
            no more of them; `aiogpu doctor` says what limits them. 0 otherwise.
        is_held_up: whether it waits so that another task, which ran out of memory
            before, can run alone.
        worker: id of its worker, None without one.
        pid: process id of its worker, or of the program that asked for the lease; 0
            without one or while it starts.
        runs_for: seconds since its code began; None if unknown.
        behind: names of the tasks that go before it on its worker, the running one
            first; at most eight.
        children: names of the tasks that it waits for, or whose results it expects;
            at most eight.
        count: how many there are of `behind` or of `children`.
        is_ahead: whether it is a stream that waits for its consumer, because it is as
            far ahead as it may be.
        outcome: how it has ended, in words: "it was cancelled"; None before.
        where: the conditions on its GPUs in words, while it waits for some.
        is_lease: whether it is a lease, held by processes that are not workers.
        placement: name of its placement, while that is not granted.
        bundle: the bundle in which it is to run, in words; "" without one.
        notes: what else a cluster tells, a line each.
        outage: why no worker can be started for it, if that is why it waits.
        actor: of a call that was sent, the name of its actor; "" for others.
        ended: when and how it has ended, with its error and the traceback, if its node
            still knows; None before, and of a handle that has its outcome.
    """

    name: str
    task: int
    state: str
    seconds: float | None = None
    request: Mapping[str, float] = field(default_factory=dict)
    position: int | None = None
    of: int = 0
    reasons: tuple[Shortage, ...] = ()
    reservation: ReservationStatus | None = None
    is_held_endlessly: bool = False
    bound: int = 0
    is_held_up: bool = False
    worker: int | None = None
    pid: int = 0
    runs_for: float | None = None
    behind: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    count: int = 0
    is_ahead: bool = False
    outcome: str | None = None
    where: str = ""
    rivals: tuple[str, ...] = ()
    rival_count: int = 0
    limit: str = ""
    is_behind: bool = False
    is_lease: bool = False
    placement: str = ""
    notes: tuple[str, ...] = ()
    outage: OutageStatus | None = None
    bundle: str = ""
    ended: EndedTask | None = None
    actor: str = ""

    def __str__(self) -> str:
        return explain(self)


def brief(why: Why) -> str | None:
    """Return why a task's code does not run, in one line; None if it runs."""
    match why.state:
        case "waiting":
            return _waits(why)
        case "stopping" if why.is_lease:
            return "is given back; processes that it was for have not ended yet"
        case "starting":
            return "a worker is being forked for it"
        case "queued":
            return f"sent ahead to pid {why.pid}, behind {''.join(why.behind[:1])}"
        case "blocked" if why.count:
            return f"waits for its children: {listing(why.children, why.count)}"
        case "blocked":
            return "waits for an actor"
        case "delayed":
            return "has failed before, and is tried again in a while"
        case "expecting":
            return "waits for results that are its arguments"
    return None


def _waits(why: Why) -> str:
    if simple := _simple_cause(why):
        return f"waits {simple}"
    if why.outage is not None:
        return str(why.outage)
    if why.reasons:
        short = " and ".join(_shortage_in_brief(one, why) for one in why.reasons)
        return f"waits for {short}" + (f" in {why.bundle}" if why.bundle else "")
    if why.placement:
        return f"waits for {why.placement}, its placement"
    if why.bound:
        return f"waits for a worker: there are {why.bound}, and no room for more"
    return "waits for its turn"


def explain(why: Why) -> str:
    """The whole story; several lines for a task that waits or has failed."""
    if why.ended is not None:
        return "\n".join(_end(why.ended))
    if why.placement:
        return f"{_who(why)} waits for {why.placement}, its placement."
    told = _waiting(why) if why.state == "waiting" else [f"{_who(why)} {_does(why)}."]
    return "\n".join((*told, *(f"  {note}" for note in why.notes)))


def end_in_brief(ended: EndedTask) -> str:
    """Describe how and when a task has ended: "failed 3.0 s ago"."""
    return f"{ended.state} {span(ended.seconds)} ago"


def _end(ended: EndedTask) -> Iterator[str]:
    cause = f": {ended.message}" if ended.message else ""
    cause = f": {ended.error}{cause}" if ended.error else ""
    number = f"call of actor {ended.task}" if ended.is_call else f"task {ended.task}"
    yield f"{ended.name} ({number}) {end_in_brief(ended)}{cause}"
    if not ended.is_call:  # when and where that ran is not kept
        yield f"  {_run_of(ended)}"
    for line in ended.traceback.rstrip().splitlines():
        yield f"  {line}"


def _run_of(ended: EndedTask) -> str:
    """Describe where a task has run, for how long, and its wait before."""
    waited = f"it had waited {duration(ended.waited)}"
    if ended.ran is None:
        return f"{waited}, and never ran"
    devices = ", ".join(f"{kind} {index}" for kind, index in ended.devices)
    where = f"worker {ended.worker} (pid {ended.pid})"
    where += f" with {devices}" if devices else ""
    after = f", after {waited}" if ended.waited >= WORTH_TELLING else ""
    return f"it ran {duration(ended.ran)} on {where}{after}"


def duration(seconds: float) -> str:
    """A length of time that may be short: "under 1 ms", "3 ms", "1.2 s"."""
    if seconds >= 0.1:
        return span(seconds)
    return f"{seconds * 1e3:.0f} ms" if seconds >= 1e-3 else "under 1 ms"


def _who(why: Why) -> str:
    return f"{why.name} (task {why.task})" if why.task else why.name


def _does(why: Why) -> str:
    """Describe the state of a task that is not in the queue."""
    request, worker = terms(why.request.items()), f"worker {why.worker} (pid {why.pid})"
    runs = "" if why.runs_for is None else f", for {span(why.runs_for)} now"
    match why.state:
        case "running" if why.is_lease:
            return f"is held by pid {why.pid}{runs}"
        case "stopping" if why.is_lease:
            return (
                f"is given back as soon as its processes have ended, asked for by pid "
                f"{why.pid}{runs}"
            )
        case "sent" if why.actor:
            return (
                f"was sent to {why.actor} on {worker}, which does not tell which of "
                f"its calls run"
            )
        case "sent":
            asks = f"asks for {request} and " if why.request else ""
            return f"{asks}was sent {span(why.seconds or 0.0)} ago"
        case "opening":
            return "waits for its node, which is being opened"
        case "delayed":
            return "has failed before, and is tried again in a while"
        case "starting":
            return f"holds {request}; a worker is being forked for it"
        case "queued":
            before = listing(why.behind, why.count)
            return f"was sent ahead to {worker} and runs after {before}"
        case "running":
            held = ", and waits for its consumer to take items" if why.is_ahead else ""
            return f"runs on {worker}{runs}{held}"
        case "blocked":
            word = "its child" if why.count == 1 else "its children"
            children = f"{word} {listing(why.children, why.count)}"
            awaited = children if why.count else "an actor"
            return f"waits for {awaited}; meanwhile it holds no CPU"
        case "expecting":
            results = listing(why.children, why.count) or "an actor's call"
            return f"waits for its arguments: the result of {results}"
        case "stopping":
            return f"is being stopped; its code on {worker} has not ended yet"
    return f"has ended: {why.outcome}" if why.outcome else "has ended"


def _simple_cause(why: Why) -> str:
    """Describe a cause that is neither a resource nor a worker."""
    if why.is_held_up:
        return "until another has run alone, for which memory ran out before"
    if why.is_behind:
        return "for its program to read the results that it was sent"
    if why.limit:
        return f"for its program's own limit: it holds {why.limit}"
    return ""


def _waiting(why: Why) -> Iterator[str]:
    begin = f"{_who(why)} has waited {span(why.seconds or 0.0)}"
    request = terms(why.request.items()) + (f" of {why.where}" if why.where else "")
    if simple := _simple_cause(why):
        yield f"{begin} {simple}"
    elif why.outage is not None:
        yield f"{begin} for a worker"
        yield f"  {why.outage}"
    elif why.reasons:
        turn = f", as number {why.position} of {why.of} that ask" if why.of > 1 else ""
        yield f"{begin}{turn} for {request}"
        yield from _rivals(why)
        for shortage in why.reasons:
            yield from _shortage(shortage)
        yield from _reservation(why)
    else:
        yield f"{begin} for its turn: {(why.position or 1) - 1} before it"
        yield from _rivals(why)
        if why.bound:
            held = ", each held without end" if why.is_held_endlessly else ""
            yield (
                f"  workers: {why.bound}{held}, and no room for more at a time; "
                f"`aiogpu doctor` says what bounds them"
            )


def _rivals(why: Why) -> Iterator[str]:
    """The other programs whose tasks go before it."""
    if why.rivals:
        rivals = listing(why.rivals, why.rival_count)
        yield f"  tasks of other programs go before it: {rivals}"


def _shortage_in_brief(shortage: Shortage, why: Why) -> str:
    name = shortage.resource
    told = f"free: {written(name, shortage.free)}"
    if shortage.devices:
        told = f"free by device: {_by_device(shortage)}"
    if shortage.kept and why.reservation is not None:
        told += f"; kept for {why.reservation.name}"
    return f"{spoken(name)} {written(name, shortage.asked)} ({told})"


def _shortage(shortage: Shortage) -> Iterator[str]:
    """Describe a shortage, the withheld devices, and the holders."""
    name = shortage.resource
    told = (
        f"  {spoken(name)} {written(name, shortage.asked)}: "
        f"{written(name, shortage.free)} of {written(name, shortage.total)} free"
    )
    if shortage.devices:
        told += f" ({_by_device(shortage)})"
    kept = written(name, shortage.kept)
    yield f"{told}, {kept} of it kept" if shortage.kept else told
    for device in [each for each in shortage.devices if each.aside][:SHOWN]:
        # Some reasons contain the name of the device.
        prefix, reason = f"{device.kind} {device.id}: ", device.aside or ""
        yield f"    set aside: {'' if prefix in reason else prefix}{reason}"
    pairs = _held(shortage)
    for held_device, holder in pairs[:SHOWN]:
        yield f"    {_holder(holder, name, held_device)}"
    if len(pairs) > SHOWN:
        yield f"    and {len(pairs) - SHOWN} more"


def _by_device(shortage: Shortage) -> str:
    """Describe the free share of each device that the task may use."""
    shares = (
        f"{device.id}: {_free_on(device, shortage.resource)}"
        for device in shortage.devices
    )
    return listing(shares, len(shortage.devices))


def _free_on(device: DeviceStatus, name: str) -> str:
    if device.aside:
        return "set aside"
    if name == GPU_MEMORY:
        return written(name, device.memory - device.memory_reserved)
    return f"{device.free:g}"


def _held(shortage: Shortage) -> Sequence[tuple[DeviceStatus | None, Holder]]:
    """Each holder with its device; without devices, those that hold longest first."""
    if not shortage.devices:
        held = sorted(shortage.holders, key=lambda one: -(one.seconds or 0.0))
        return [(None, holder) for holder in held]
    return [(each, holder) for each in shortage.devices for holder in each.holders]


def _holder(holder: Holder, name: str, device: DeviceStatus | None) -> str:
    """Describe a holder with its amount and its device, if there is one."""
    held = written(name, holder.share)
    if name == GPU_MEMORY or not holder.share:
        held = written(GPU_MEMORY, holder.memory)
    share = held if device is None else f"{held} of {device.kind} {device.id}"
    if holder.is_settling:
        return f"{share}: held by a process that has ended, until its driver agrees"
    where = f"pid {holder.pid}" if holder.pid else "its worker is being forked"
    if holder.task is None:
        return f"{share}: held by a process that is ending ({where})"
    if holder.is_endless:
        where += ", without end"
    elif holder.seconds is not None:
        where += f", for {span(holder.seconds)}"
    return f"{share}: held by {holder.task} ({where})"


def _reservation(why: Why) -> Iterator[str]:
    kept = why.reservation
    if kept is not None and kept.task != why.task:
        yield f"  kept for {kept.name} (task {kept.task}), which goes first: {kept}"
    elif kept is not None:
        soon = "as soon as all of that is free"
        when = soon if kept.seconds is None else f"within {span(kept.seconds)}"
        yield f"  kept for it: {kept}; it begins {when}"
    if why.is_held_endlessly:
        yield (
            "  nothing is kept for it, however long it waits: what it needs is held "
            "without end"
        )


def stall_in_words(why: Why) -> str:
    """The warning that a task waits for what is held without end, and who holds it."""
    waits = f"{_who(why)} has waited {span(why.seconds or 0)}"
    if why.bound:
        return (
            f"{waits} for a worker process: there are {why.bound}, each is held "
            f"without end, and there is no room for more. `aiogpu doctor` says what "
            f"bounds them."
        )
    held = []
    for shortage in why.reasons:
        for device, holder in _held(shortage):
            if holder.is_endless:
                name = shortage.resource
                amount = f"{name} {written(name, holder.share)}"
                if device is not None:
                    share = written(device.kind, holder.share)
                    amount = f"{share} of {device.kind} {device.id}"
                held.append(f"{holder.task} holds {amount}")
    return (
        f"{waits} for {terms(why.request.items())}, and what it needs is held without "
        f"end: {listing(held, len(held), '; ')}. It can start when a holder ends: an "
        f"actor ends by aiogpu.kill() or with its last handle (a notebook keeps those "
        f"that it has shown, in Out). Or ask for less."
    )
