"""What `init` was asked for, against what the node has that the program joins.

A node that runs has what it has. So that one program runs on a node of its own and on
a shared one, options that the node satisfies anyway are accepted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

from aiogpu.core.model.text import terms
from aiogpu.core.model.units import CPU, GPU, MEMORY, TYPE_PREFIX, size, written
from aiogpu.core.resources.ledger import Ledger
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import OptionError

Policies = Mapping[str, object]
"""Options of a node by which it works, and that are no amounts: see `POLICIES`."""
POLICIES: Final = (
    *("gpu_memory_enforce", "foreign", "mps", "cpu_affinity", "cancel_grace"),
    *("spare_workers", "memory_guard", "spill_directory"),
)
NEARLY: Final = 1 / 16
"""By how much the memory of a GPU may be off: its driver keeps some of "80 GB"."""


def check_joining_options(
    options: NodeOptions, ledger: Ledger, policies: Policies, path: str
) -> None:
    """Check that a node gives what `init` was asked for.

    Args:
        options: of `init`, in the program that joins.
        ledger: what the node has.
        policies: how it works, by the names of `POLICIES`, and its object_memory.
        path: of its socket.

    Raises:
        OptionError: it does not; says what the node has.
    """
    for option, told, has in _unmet(options, ledger, policies):
        address = os.environ.get("AIOGPU_ADDRESS")
        why = f" since AIOGPU_ADDRESS={address!r}" if address else ""
        raise OptionError(
            f"init({option}={told}): this program joins the node at {path}{why}, and "
            f"that has {has}. Ask for no more than it has, or leave {option} out here: "
            f"it is given where the node is started, as `aiogpu start --head` does."
        )


def _unmet(
    options: NodeOptions, ledger: Ledger, policies: Policies
) -> Iterator[tuple[str, str, str]]:
    """Options that the node does not satisfy: name, value, and what the node has."""
    total = ledger.totals()
    amounts = {
        "num_cpus": (CPU, options.num_cpus),
        "num_gpus": (GPU, options.num_gpus),
        "memory": (MEMORY, options.memory),
    }
    for option, (name, amount) in amounts.items():
        there = total.get(name, 0)
        if amount is not None and there < amount:
            told = repr(size(amount)) if name == MEMORY else f"{amount:g}"
            yield option, told, f"{name} {written(name, there)}"
    short = [
        name
        for name, amount in options.resources.items()
        if total.get(name, 0) < amount
    ]
    if short:
        has = terms((name, total.get(name, 0)) for name in short)
        yield "resources", repr(dict(options.resources)), has
    wanted = options.accelerator_type
    if wanted is not None and TYPE_PREFIX + wanted not in total:
        types = [
            name.removeprefix(TYPE_PREFIX)
            for name in total
            if name.startswith(TYPE_PREFIX)
        ]
        has = f"GPUs of type {', '.join(types)}" if types else "GPUs of unknown type"
        yield "accelerator_type", repr(wanted), has
    yield from _unmet_memory(options, ledger, policies)
    defaults = NodeOptions()
    for option in POLICIES:
        asked, policy = getattr(options, option), policies.get(option)
        if asked not in (getattr(defaults, option), policy):
            yield option, repr(asked), f"{option}={policy!r}"


def _unmet_memory(
    options: NodeOptions, ledger: Ledger, policies: Policies
) -> Iterator[tuple[str, str, str]]:
    least = options.gpu_memory
    gpus = ledger.device_sets.get(GPU)
    if least is not None:
        sizes = [gpu.memory for gpu in gpus.devices] if gpus is not None else []
        if not sizes:
            yield "gpu_memory", repr(size(least)), "no GPU"
        elif not min(sizes):
            yield "gpu_memory", repr(size(least)), "GPUs of unknown memory"
        elif min(sizes) < least * (1 - NEARLY):
            yield "gpu_memory", repr(size(least)), f"a GPU of {size(min(sizes))}"
    there = policies.get("object_memory")
    wanted = options.object_memory
    if wanted is not None and isinstance(there, int) and there < wanted:
        yield "object_memory", repr(size(wanted)), f"{size(there)} of it"
