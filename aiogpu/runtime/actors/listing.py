"""The actors of a node as `status()` shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from aiogpu.observe.snapshot import LISTED
from aiogpu.observe.status import ActorStatus
from aiogpu.runtime.actors.actor import Actor, ActorState


def listed_actors(
    actors: Iterable[Actor],
    place_of: Callable[[Actor], tuple[int, int] | None],
    client_of: Callable[[int], int],
) -> tuple[ActorStatus, ...]:
    """Those that have a process, by number, then the first of those that wait for one.

    Args:
        actors: all that are known, whether they live or not.
        place_of: gives an actor's worker and the process id of that, None without one.
        client_of: gives whose an actor is, by its number.
    """
    placed: list[ActorStatus] = []
    pending: list[Actor] = []
    for actor in actors:
        place = place_of(actor)
        if actor.state is ActorState.DEAD:
            continue
        if place is None:
            pending.append(actor)
        else:
            placed.append(_status(actor, place, client_of(actor.id)))
    placed.sort(key=lambda status: status.id)
    rest = [_status(one, None, client_of(one.id)) for one in islice(pending, LISTED)]
    return (*placed, *rest)


def _status(actor: Actor, place: tuple[int, int] | None, client: int) -> ActorStatus:
    namespace, name = actor.key or ("", None)
    worker, pid = place or (None, 0)
    suffix = f" {name!r}" if name is not None else ""
    return ActorStatus(
        *(actor.id, name, namespace, actor.name.removesuffix(suffix)),
        actor.state.value,
        actor.holders,
        *(worker, pid, len(actor.calls)),
        is_detached=actor.site.spec.is_detached,
        client=client,
    )
