"""Reasons for the state of a task: plain data, and their text.

`explain` gives all details, `brief` one line. `aiogpu.observe.snapshot` makes a `Why`
from the state of the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from aiogpu.core.model.text import SHOWN, listing, span, terms
from aiogpu.core.model.units import GPU_MEMORY, display_name, format_amount
from aiogpu.observe.status import (
    DeviceStatus,
    EndedTask,
    Holder,
    OutageStatus,
    ReservationStatus,
)

NOT_ENDED: Final = "a killed worker of which a process has not ended"
"""Stands for the task of a holder without one."""

SHORT_WAIT: Final = 0.1
"""Seconds below which the wait of an ended task is not mentioned."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A resource that a waiting task lacks.

    Attributes:
        resource: its name, "CPU" or "GPU"; "gpu_memory" if enough shares of GPUs are
            free, but too little of their memory. Amounts of memory are in bytes.
        asked: the amount that the task asks for; below 1, a share of one device. For
            memory, the most that it takes of a device.
        free: the free amount; for devices, the sum of the free shares of the devices
            that the task may use.
        total: the capacity; for devices, the number that the task may use.
        kept: the part of the free amount that is kept for another task.
        devices: the devices that the task may use, each with its free share and its
            holders; empty for a resource without devices.
        holders: the holders of the resource.
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
            unfinished tasks), "sent" (to an actor or a cluster, which does not report
            whether it runs), "stopping" or "ended".
        seconds: seconds since it was submitted; None if the node was not asked.
        request: its request, `{"CPU": 1.0, "GPU": 0.5}`.
        position: its place among the waiting tasks of its program with the same
            request, 1 for the first; beyond some thousands, tasks that left the queue
            may still count. None unless it waits.
        of: the number of waiting tasks of its program with the same request.
        rivals: other programs whose tasks go before it, at most eight:
            "train.py (pid 4711)".
        rival_count: the number of these programs.
        limit: the limit of its program for which it waits: "2 of at most 2 GPU"; "" if
            it waits for no limit.
        is_behind: it waits because its program does not read its results.
        reasons: for a waiting task, one entry for each resource that is short.
        reservation: the reservation for it, if it has waited long; or for another task,
            if it waits because of that.
        is_held_endlessly: it waits for resources that others hold without end; then
            nothing is kept for it, however long it waits.
        bound: the number of workers, if it lacks only a worker and the number cannot
            grow; `aiogpu doctor` says what limits it. 0 otherwise.
        is_held_up: it waits so that another task, which ran out of memory before, can
            run alone.
        worker: id of its worker, or None.
        pid: process id of its worker, or of the program that asked for the lease; 0
            without a worker or while the worker starts.
        runs_for: seconds since its code began; None if unknown.
        behind: names of the tasks that go before it on its worker, the running one
            first; at most eight.
        children: names of the tasks that it waits for, or whose results it expects;
            at most eight.
        count: the number of tasks of which `behind` or `children` names the first.
        is_ahead: it is a stream that is as far ahead of its consumer as allowed.
        outcome: how it has ended, in words: "it was cancelled"; None before.
        where: the conditions on its GPUs in words, while it waits for GPUs.
        is_lease: it is a lease, held by processes that are not workers.
        placement: name of its placement, while that is not granted.
        bundle: the bundle in which it will run, in words; "" without one.
        notes: further reports of a cluster, one line each.
        outage: why no worker can be started for it, if it waits because of that.
        imports: what is imported before its worker is forked: "torch (1.2 of about 3
            s)"; "" if it does not wait for that.
        halted: the place of the `breakpoint()` at which its code stands, or that of a
            call: "train.py:31 in train"; "" if it does not stand at one.
        debugger: the socket on which it waits for a debugger; "" if one is attached.
        actor: for a call that was sent, the name of its actor; "" if it is no call.
        ended: when and how it has ended, with the error and the traceback, if the node
            still knows; None before, and for a handle that has its outcome.
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
    imports: str = ""
    halted: str = ""
    debugger: str = ""

    def __str__(self) -> str:
        return explain(self)


@dataclass(frozen=True, slots=True)
class StopReport:
    """What became of the tasks or actors with a name that were to be stopped.

    Attributes:
        numbers: the numbers of the first ones with the name, at most eight.
        count: how many have the name. If there are several and not all were to be
            stopped, nothing was done, and the other fields are empty.
        counts: how many of each kind there were; for the kinds see
            `RemoteEngine.stop_task`.
        first: the first ones of each kind, at most eight, with their state before; also
            fewer, as the states of thousands are not looked up.
    """

    numbers: tuple[int, ...]
    count: int
    counts: Mapping[str, int] = field(default_factory=dict)
    first: tuple[tuple[str, Why], ...] = ()


def brief(why: Why) -> str | None:
    """Return why a task's code does not run, in one line; None if it runs."""
    if why.halted:
        return f"{'waits for' if why.debugger else 'is in'} a debugger at {why.halted}"
    match why.state:
        case "waiting":
            return _waits(why)
        case "stopping" if why.is_lease:
            return "is being returned; its processes have not ended yet"
        case "starting" if why.imports:
            return f"waits for the zygote with {why.imports}"
        case "starting":
            return "a worker is being forked for it"
        case "queued":
            return f"sent ahead to pid {why.pid}, behind {''.join(why.behind[:1])}"
        case "blocked" if why.count:
            return f"waits for its children: {listing(why.children, why.count)}"
        case "blocked":
            return "waits for an actor"
        case "delayed":
            return "has failed before, and is retried soon"
        case "expecting":
            return "waits for results that are its arguments"
        case "evicted":
            return "has left so that others can start; its next call brings it back"
    return None


def _waits(why: Why) -> str:
    if simple := _simple_cause(why):
        return f"waits {simple}"
    if why.outage is not None:
        return str(why.outage)
    if why.reasons:
        short = " and ".join(_brief_shortage(reason, why) for reason in why.reasons)
        return f"waits for {short}" + (f" in {why.bundle}" if why.bundle else "")
    if why.placement:
        return f"waits for {why.placement}, its placement"
    if why.bound:
        return f"waits for a worker: there are {why.bound}, and no room for more"
    return "waits for its turn"


def explain(why: Why) -> str:
    """Explain the state of a task; several lines if it waits or has failed."""
    if why.ended is not None:
        return "\n".join(_describe_end(why.ended))
    task = _identify(why)
    if why.placement:
        return f"{task} waits for {why.placement}, its placement."
    is_waiting = why.state == "waiting"
    lines = _describe_wait(why) if is_waiting else [f"{task} {_describe_state(why)}."]
    return "\n".join((*lines, *(f"  {note}" for note in why.notes)))


def end_in_brief(ended: EndedTask) -> str:
    """Describe how and when a task has ended: "failed 3.0 s ago"."""
    return f"{ended.state} {span(ended.seconds)} ago"


def _describe_end(ended: EndedTask) -> Iterator[str]:
    cause = f": {ended.message}" if ended.message else ""
    cause = f": {ended.error}{cause}" if ended.error else ""
    number = f"call of actor {ended.task}" if ended.is_call else f"task {ended.task}"
    yield f"{ended.name} ({number}) {end_in_brief(ended)}{cause}"
    if not ended.is_call:  # time and place of a call are not recorded
        yield f"  {_describe_run(ended)}"
    for line in ended.traceback.rstrip().splitlines():
        yield f"  {line}"


def _describe_run(ended: EndedTask) -> str:
    """Describe where a task ran, for how long, and how long it had waited."""
    waited = f"it had waited {duration(ended.waited)}"
    if ended.ran is None:
        return f"{waited}, and never ran"
    devices = ", ".join(f"{kind} {index}" for kind, index in ended.devices)
    where = f"worker {ended.worker} (pid {ended.pid})"
    where += f" with {devices}" if devices else ""
    after = f", after {waited}" if ended.waited >= SHORT_WAIT else ""
    return f"it ran {duration(ended.ran)} on {where}{after}"


def duration(seconds: float) -> str:
    """Format a duration that may be short: "under 1 ms", "3 ms", "1.2 s"."""
    if seconds >= 0.1:
        return span(seconds)
    return f"{seconds * 1e3:.0f} ms" if seconds >= 1e-3 else "under 1 ms"


def _identify(why: Why) -> str:
    return f"{why.name} (task {why.task})" if why.task else why.name


def _describe_state(why: Why) -> str:
    """Describe the state of a task that is not in the queue."""
    request, worker = terms(why.request.items()), f"worker {why.worker} (pid {why.pid})"
    runs = "" if why.runs_for is None else f", for {span(why.runs_for)} now"
    if why.halted and why.debugger:
        return (
            f"waits for a debugger at {why.halted}, on {worker}; `aiogpu debug "
            f"{why.task}` attaches one"
        )
    if why.halted:
        return f"is in a debugger at {why.halted}, on {worker}"
    match why.state:
        case "running" if why.is_lease:
            return f"is held by pid {why.pid}{runs}"
        case "stopping" if why.is_lease:
            return f"is being returned by pid {why.pid}; its processes have not ended"
        case "sent" if why.actor:
            return (
                f"was sent to {why.actor} on {worker}, which does not report which of "
                f"its calls run"
            )
        case "sent":
            asks = f"asks for {request} and " if why.request else ""
            return f"{asks}was sent {span(why.seconds or 0.0)} ago"
        case "opening":
            return "waits for its node, which is being opened"
        case "delayed":
            return "has failed before, and is retried soon"
        case "starting" if why.imports:
            return (
                f"holds {request}; its worker is forked once a zygote has imported "
                f"{why.imports}, which is sooner than an import of its own"
            )
        case "starting":
            return f"holds {request}; a worker is being forked for it"
        case "queued":
            before = listing(why.behind, why.count)
            return f"was sent ahead to {worker} and runs after {before}"
        case "running":
            pause = ", and waits for its consumer to take items" if why.is_ahead else ""
            return f"runs on {worker}{runs}{pause}"
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
        return "until another task, which ran out of memory before, has run alone"
    if why.is_behind:
        return "for its program to read its results"
    if why.limit:
        return f"for its program's own limit: it holds {why.limit}"
    return ""


def _describe_wait(why: Why) -> Iterator[str]:
    begin = f"{_identify(why)} has waited {span(why.seconds or 0.0)}"
    request = terms(why.request.items()) + (f" of {why.where}" if why.where else "")
    if simple := _simple_cause(why):
        yield f"{begin} {simple}"
    elif why.outage is not None:
        yield f"{begin} for a worker"
        yield f"  {why.outage}"
    elif why.reasons:
        turn = f", as number {why.position} of {why.of} that ask" if why.of > 1 else ""
        yield f"{begin}{turn} for {request}"
        yield from _describe_rivals(why)
        for shortage in why.reasons:
            yield from _describe_shortage(shortage)
        yield from _describe_reservation(why)
    else:
        yield f"{begin} for its turn: {(why.position or 1) - 1} before it"
        yield from _describe_rivals(why)
        if why.bound:
            held = ", each held without end" if why.is_held_endlessly else ""
            yield (
                f"  workers: {why.bound}{held}, and no room for more at a time; "
                f"`aiogpu doctor` says what limits them"
            )


def _describe_rivals(why: Why) -> Iterator[str]:
    """Name the other programs whose tasks go before a task."""
    if why.rivals:
        rivals = listing(why.rivals, why.rival_count)
        yield f"  tasks of other programs go before it: {rivals}"


def _brief_shortage(shortage: Shortage, why: Why) -> str:
    name = shortage.resource
    free = f"free: {format_amount(name, shortage.free)}"
    if shortage.devices:
        free = f"free by device: {_by_device(shortage)}"
    if shortage.kept and why.reservation is not None:
        free += f"; kept for {why.reservation.name}"
    return f"{display_name(name)} {format_amount(name, shortage.asked)} ({free})"


def _describe_shortage(shortage: Shortage) -> Iterator[str]:
    """Describe a shortage, the devices that are set aside, and the holders."""
    name = shortage.resource
    line = (
        f"  {display_name(name)} {format_amount(name, shortage.asked)}: "
        f"{format_amount(name, shortage.free)} of "
        f"{format_amount(name, shortage.total)} free"
    )
    if shortage.devices:
        line += f" ({_by_device(shortage)})"
    kept = format_amount(name, shortage.kept)
    yield f"{line}, {kept} of it kept" if shortage.kept else line
    for device in [each for each in shortage.devices if each.aside][:SHOWN]:
        # Some reasons contain the name of the device.
        prefix, reason = f"{device.kind} {device.id}: ", device.aside or ""
        yield f"    set aside: {'' if prefix in reason else prefix}{reason}"
    pairs = _holders(shortage)
    for held_device, holder in pairs[:SHOWN]:
        yield f"    {_describe_holder(holder, name, held_device)}"
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
        return format_amount(name, device.memory - device.memory_reserved)
    return f"{device.free:g}"


def _holders(shortage: Shortage) -> Sequence[tuple[DeviceStatus | None, Holder]]:
    """Return each holder with its device; without devices, the longest holder first."""
    if not shortage.devices:
        oldest = sorted(shortage.holders, key=lambda holder: -(holder.seconds or 0.0))
        return [(None, holder) for holder in oldest]
    return [(each, holder) for each in shortage.devices for holder in each.holders]


def _describe_holder(holder: Holder, name: str, device: DeviceStatus | None) -> str:
    """Describe a holder with its amount and its device, if there is one."""
    amount = format_amount(name, holder.share)
    if name == GPU_MEMORY or not holder.share:
        amount = format_amount(GPU_MEMORY, holder.memory)
    share = amount if device is None else f"{amount} of {device.kind} {device.id}"
    if holder.unended:
        return f"{share}: kept, because {holder.unended}"
    if holder.is_settling:
        return f"{share}: held until the driver confirms that its process has ended"
    where = f"pid {holder.pid}" if holder.pid else "its worker is being forked"
    if holder.task is None:
        return f"{share}: held by a process that is ending ({where})"
    if holder.is_ending:
        where += ", which is ending"
    elif holder.is_endless:
        where += ", without end"
    elif holder.is_evictable:
        where += ", until nobody calls it"
    elif holder.seconds is not None:
        where += f", for {span(holder.seconds)}"
    return f"{share}: held by {holder.task} ({where})"


def _describe_reservation(why: Why) -> Iterator[str]:
    plan = why.reservation
    if plan is not None and plan.task != why.task:
        yield f"  kept for {plan.name} (task {plan.task}), which goes first: {plan}"
    elif plan is not None:
        soon = "as soon as all of that is free"
        when = soon if plan.seconds is None else f"within {span(plan.seconds)}"
        yield f"  kept for it: {plan}; it begins {when}"
    if why.is_held_endlessly:
        yield (
            "  nothing is kept for it, however long it waits: what it needs is held "
            "without end"
        )


def stall_in_words(why: Why) -> str:
    """Return the warning that a task waits for resources held without end."""
    waits = f"{_identify(why)} has waited {span(why.seconds or 0)}"
    if why.bound:
        return (
            f"{waits} for a worker process: there are {why.bound}, each is held "
            f"without end, and there is no room for more. `aiogpu doctor` says what "
            f"limits them."
        )
    held = []
    for shortage in why.reasons:
        for device, holder in _holders(shortage):
            if holder.is_endless:
                name = shortage.resource
                amount = f"{name} {format_amount(name, holder.share)}"
                if device is not None:
                    share = format_amount(device.kind, holder.share)
                    amount = f"{share} of {device.kind} {device.id}"
                held.append(f"{holder.task or NOT_ENDED} holds {amount}")
    return (
        f"{waits} for {terms(why.request.items())}, and what it needs is held without "
        f"end: {listing(held, len(held), '; ')}. It can start when a holder ends: an "
        f"actor ends by aiogpu.kill() or with its last handle (a notebook keeps the "
        f"handles that it has displayed, in Out). Or ask for less."
    )
