"""A node's introduction to programs that join it, and checks of it.

A node that runs has what it has. So that one program runs on a node of its own and on
a shared one, options of `init` that the node satisfies anyway are accepted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from aiogpu.core.model.request import Device
from aiogpu.core.model.text import terms
from aiogpu.core.model.units import CPU, GPU, MEMORY, TYPE_PREFIX, size, written
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import OptionError, ProtocolError
from aiogpu.wire.codec import RecordCodec
from aiogpu.wire.messages import descriptor_path

if TYPE_CHECKING:
    from aiogpu.core.queue.fair_share import Limits
    from aiogpu.runtime.callers.programs import ServerInfo


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


_codec: Final = RecordCodec(Device)


def server_info(
    directory: str,
    ledger: Ledger,
    options: NodeOptions,
    object_memory: int,
    limits: Limits | None = None,
) -> ServerInfo:
    """Return what clients find on a node.

    Args:
        directory: where the node's own sockets are.
        ledger: what it has.
        options: by which it was started.
        object_memory: bytes of shared memory for values.
        limits: what each client may have at once; None for no limits.

    Raises:
        OptionError: a resource is limited that the node does not have.
    """
    from aiogpu import __version__
    from aiogpu.core.queue.fair_share import Limits
    from aiogpu.runtime.callers.programs import ServerInfo

    policies = {option: getattr(options, option) for option in POLICIES}
    policies["object_memory"] = object_memory
    limits = limits or Limits()
    limits.on(ledger)
    return ServerInfo(
        os.path.basename(directory),
        descriptor_path(directory),
        options.spill_directory or "",
        pack_capacity(ledger, policies),
        __version__,
        limits,
    )


def pack_capacity(ledger: Ledger, policies: Policies) -> bytes:
    """Return what a node has to share out and how it works; see `unpack_capacity`."""
    sets = [
        (
            one.kind,
            [_with_links(device, sorted(device.links)) for device in one.devices],
        )
        for one in ledger.device_sets.values()
    ]
    return _codec.dump((dict(ledger.capacity), sets, dict(policies)))


def unpack_capacity(packed: bytes) -> tuple[Ledger, Policies]:
    """A ledger of which nothing is taken, and how the node works.

    Raises:
        ProtocolError: the bytes are something else.
    """
    try:
        capacity, sets, policies = _codec.load(packed)
        if not all(type(amount) is int for amount in capacity.values()):
            raise TypeError("an amount is no whole number")
        ledger = Ledger(capacity, [_device_set(*one) for one in sets])
        return ledger, dict(policies)
    except (AttributeError, TypeError, ValueError) as error:
        raise ProtocolError(f"what a node has cannot be read: {error}") from None


def _device_set(kind: str, devices: tuple[Device, ...]) -> DeviceSet:
    found = (_with_links(device, frozenset(device.links)) for device in devices)
    return DeviceSet(kind, tuple(found))


def _with_links(device: Device, links: Any) -> Device:
    """The device with its links as a list, which can be packed, or as a set."""
    return replace(device, links=links)
