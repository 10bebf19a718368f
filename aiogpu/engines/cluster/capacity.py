"""What the nodes of a cluster have, beside what is asked of one of them.

A request is for one node: Ray divides none between two, and no share of a device
between two devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from aiogpu.core.model.text import SHOWN, in_words, terms
from aiogpu.core.model.units import GPU, MEMORY, UNIT, number, spoken, written

if TYPE_CHECKING:
    from aiogpu.core.model.request import Request
    from aiogpu.engines.cluster.census import Node

DEVICES: Final = (GPU, "neuron_cores", "TPU", "NPU", "HPU")
"""Resources that are devices to Ray."""
OWN: Final = "object_store_memory"
"""A resource that Ray keeps for itself, as it does those of a node's name."""
OF_GROUPS: Final = "_group_"
"""In the names of what placement groups hold, beside the resources themselves."""


def amounts(request: Request) -> dict[str, int]:
    """Return what is asked for, in parts, without what is 0."""
    asked = (*request.scalars, *request.devices)
    return {name: parts for name, parts in asked if parts}


def parts_of(amount: float) -> int:
    """Return what Ray tells of a resource, in parts."""
    return round(amount * UNIT)


def told(resources: Mapping[str, float]) -> dict[str, float]:
    """Ray's resources without those that it keeps for itself, sorted by name."""
    return {
        name: resources[name]
        for name in sorted(resources)
        if not name.startswith("node:") and name != OWN and OF_GROUPS not in name
    }


def short_of(there: Mapping[str, float], asked: Mapping[str, int]) -> tuple[str, ...]:
    """The names of what there is too little of."""
    return tuple(
        name for name, parts in asked.items() if parts_of(there.get(name, 0.0)) < parts
    )


def fits_one(nodes: Iterable[Node], asked: Mapping[str, int]) -> bool:
    """Return whether a node has all of it, be it in use now."""
    return any(not short_of(node.total, asked) for node in nodes)


def at_once(nodes: Iterable[Node], asked: Mapping[str, int]) -> int:
    """How many that ask for this the nodes could have running together at most."""
    return sum(
        min(
            (parts_of(node.total.get(name, 0.0)) // parts)
            for name, parts in asked.items()
        )
        for node in nodes
        if asked
    )


def name_of(node: Node) -> str:
    """A node in a word: its machine, and the begin of its id."""
    return f"{node.host}/{node.id[:6]}"


def lacking(nodes: Sequence[Node], asked: Mapping[str, int]) -> str:
    """Return what no node has, in words: "each lacks GPU 4 of 2 at most"."""
    if not nodes:
        return "it has no nodes"
    found = list(_lacking(nodes, asked))
    return f"each lacks {in_words(found)}" if found else "none has all of it at once"


def _lacking(nodes: Sequence[Node], asked: Mapping[str, int]) -> Iterator[str]:
    for name, parts in asked.items():
        most = max(node.total.get(name, 0.0) for node in nodes)
        if parts_of(most) < parts:
            wanted = f"{spoken(name)} {written(name, number(parts))}"
            had = f"of {written(name, most)} at most" if most else "of 0"
            known = {one for node in nodes for one in told(node.total)}
            near = () if most else get_close_matches(name, known, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            yield f"{wanted} {had}{hint}"


def kinds(nodes: Sequence[Node], asked: Mapping[str, int]) -> str:
    """The nodes in words, alike ones together: "2 x {CPU: 4, GPU: 1}"."""
    counts = Counter(
        terms(
            (name, amount)
            for name, amount in told(node.total).items()
            if name != MEMORY or MEMORY in asked
        )
        for node in nodes
    )
    shown = [f"{count} x {kind}" for kind, count in counts.most_common(SHOWN)]
    if len(counts) > SHOWN:
        shown.append(f"{len(counts) - SHOWN} kinds more")
    return ", ".join(shown)
