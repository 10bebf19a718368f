"""A `Why` in words, for people who wonder why nothing happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from aiogpu.core.resources import GPU_MEMORY, spoken, written
from aiogpu.core.wording import SHOWN, listing, span, terms

if TYPE_CHECKING:
    from aiogpu.core.holding import DeviceStatus, Holder
    from aiogpu.core.shortage import Shortage
    from aiogpu.core.why import Why


_PLAIN: Final = {
    "opening": "waits for its node, which is being opened",
    "delayed": "has failed before, and is tried again in a while",
}
_LEASED: Final = {
    "running": "is held by",
    "stopping": "is given back as soon as its processes have ended, asked for by",
}


def explain(why: Why) -> str:
    """The whole story, on one line or, of a task that waits, on several."""
    if why.placement:
        return f"{_who(why)} waits for {why.placement}, its placement."
    if why.state == "waiting":
        return "\n".join((*_waiting(why), *_notes(why)))
    if why.is_lease and why.state in _LEASED:
        told = f"{_LEASED[why.state]} pid {why.pid}{_for(why.runs_for)}"
        return f"{_who(why)} {told}."
    told = _sent(why) if why.state == "sent" else _standing(why)
    return "\n".join((f"{_who(why)} {told}.", *_notes(why)))


def _sent(why: Why) -> str:
    request = f"asks for {terms(why.request.items())} and " if why.request else ""
    return f"{request}was sent {span(why.seconds or 0.0)} ago"


def _notes(why: Why) -> Iterator[str]:
    for note in why.notes:
        yield f"  {note}"


def _who(why: Why) -> str:
    return f"{why.name} (task {why.task})" if why.task else why.name


def _standing(why: Why) -> str:
    """What a task does that does not wait in the queue."""
    request = terms(why.request.items())
    match why.state:
        case "opening" | "delayed":
            return _PLAIN[why.state]
        case "starting":
            return f"holds {request}; a worker is being forked for it"
        case "queued":
            return f"was sent ahead to {_worker(why)} and runs after {_behind(why)}"
        case "running":
            held = ", and waits for its consumer to take items" if why.is_ahead else ""
            return f"runs on {_worker(why)}{_for(why.runs_for)}{held}"
        case "blocked":
            return f"waits for {_children(why)}; meanwhile it holds no CPU"
        case "expecting":
            return f"waits for its arguments: the result of {_results(why)}"
        case "stopping":
            return f"is being stopped; its code on {_worker(why)} has not ended yet"
    return f"has ended: {why.outcome}" if why.outcome else "has ended"


def _worker(why: Why) -> str:
    return f"worker {why.worker} (pid {why.pid})"


def _for(seconds: float | None) -> str:
    return "" if seconds is None else f", for {span(seconds)} now"


def _behind(why: Why) -> str:
    return listing(why.behind, why.count)


def _children(why: Why) -> str:
    if not why.count:
        return "an actor"
    word = "its child" if why.count == 1 else "its children"
    return f"{word} {listing(why.children, why.count)}"


def _results(why: Why) -> str:
    return listing(why.children, why.count) if why.count else "an actor's call"


def _waiting(why: Why) -> Iterator[str]:
    begin = f"{_who(why)} has waited {span(why.seconds or 0.0)}"
    request = terms(why.request.items()) + (f" of {why.where}" if why.where else "")
    if why.is_held_up:
        yield f"{begin}: another is to run alone first, since memory ran out with it"
        return
    if why.limit:
        yield f"{begin} for its program's own limit: it holds {why.limit}"
        return
    if why.outage is not None:
        yield f"{begin} for a worker"
        yield f"  {why.outage}"
        return
    if not why.reasons:
        before = (why.position or 1) - 1
        yield f"{begin} for its turn: {before} before it"
        yield from _rivals(why)
        if why.bound:
            held = ", each held without end" if why.is_held_endlessly else ""
            yield (
                f"  workers: {why.bound}{held}, and no room for more at a time; "
                f"`aiogpu doctor` says what bounds them"
            )
        return
    if why.of > 1:
        yield f"{begin}, as number {why.position} of {why.of} that ask for {request}"
    else:
        yield f"{begin} for {request}"
    yield from _rivals(why)
    for shortage in why.reasons:
        yield f"  {_shortage(shortage)}"
        yield from _aside(shortage.devices)
        pairs = _held(shortage)
        for device, holder in pairs[:SHOWN]:
            yield f"    {_holder(holder, shortage.resource, device)}"
        if len(pairs) > SHOWN:
            yield f"    and {len(pairs) - SHOWN} more"
    yield from _reservation(why)


def _rivals(why: Why) -> Iterator[str]:
    """Which other programs' tasks go before it."""
    if why.rivals:
        rivals = listing(why.rivals, why.rival_count)
        yield f"  tasks of other programs go before it: {rivals}"


def _aside(devices: Sequence[DeviceStatus]) -> Iterator[str]:
    """Which are set aside and why; some reasons have the device's name already."""
    for device in [each for each in devices if each.aside][:SHOWN]:
        name, reason = f"{device.kind} {device.id}: ", device.aside or ""
        yield f"    set aside: {'' if name in reason else name}{reason}"


def _longest_first(holder: Holder) -> float:
    return -(holder.seconds or 0.0)


def _shortage(shortage: Shortage) -> str:
    name = shortage.resource
    told = (
        f"{spoken(name)} {written(name, shortage.asked)}: "
        f"{written(name, shortage.free)} of {written(name, shortage.total)} free"
    )
    if shortage.devices:
        shares = (
            f"{device.id}: {'set aside' if device.aside else _free(device, name)}"
            for device in shortage.devices
        )
        told += f" ({listing(shares, len(shortage.devices))})"
    kept = written(name, shortage.kept)
    return f"{told}, {kept} of it kept" if shortage.kept else told


def _free(device: DeviceStatus, name: str) -> str:
    if name == GPU_MEMORY:
        return written(name, device.memory - device.memory_reserved)
    return f"{device.free:g}"


def _held(shortage: Shortage) -> list[tuple[DeviceStatus | None, Holder]]:
    """Each holder with its device; of what is not made of devices, longest first."""
    if not shortage.devices:
        holders = sorted(shortage.holders, key=_longest_first)
        return [(None, holder) for holder in holders]
    return [(each, holder) for each in shortage.devices for holder in each.holders]


def _holder(holder: Holder, name: str, device: DeviceStatus | None) -> str:
    """Say who holds how much; the device, where there are some."""
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
