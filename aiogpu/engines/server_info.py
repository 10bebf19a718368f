"""A node's description for programs that join it, and the check of their options.

The resources of a running node are fixed. Options of `init` that the node satisfies are
accepted, so that the same program runs on its own node and on a shared one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from aiogpu.core.model.request import Device
from aiogpu.core.model.text import terms
from aiogpu.core.model.units import CPU, GPU, MEMORY, TYPE_PREFIX, format_amount, size
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import OptionError
from aiogpu.wire.codec import RecordCodec
from aiogpu.wire.messages import ProtocolError, descriptor_path

if TYPE_CHECKING:
    from aiogpu.core.queue.fair_share import Limits
    from aiogpu.runtime.callers.programs import ServerInfo


Policies = Mapping[str, object]
"""Options of a node that are no amounts; see `POLICIES`."""


POLICIES: Final = (
    "gpu_memory_enforce",
    "foreign",
    "mps",
    "cpu_affinity",
    "cancel_grace",
    "spare_workers",
    "memory_guard",
    "spill_directory",
)


NEARLY: Final = 1 / 16
"""Tolerance of a GPU's memory, as a fraction: its driver keeps some of "80 GB"."""


def check_joining_options(
    options: NodeOptions, ledger: Ledger, policies: Policies, path: str
) -> None:
    """Check that a node satisfies the options of `init`.

    Args:
        options: options of `init`, in the program that joins.
        ledger: the node's resources.
        policies: the node's options by the names of `POLICIES`, and its object_memory.
        path: path of its socket.

    Raises:
        OptionError: the node does not satisfy an option.
    """
    for option, value, has in _unmet(options, ledger, policies):
        address = os.environ.get("AIOGPU_ADDRESS")
        why = f" since AIOGPU_ADDRESS={address!r}" if address else ""
        raise OptionError(
            f"init({option}={value}): this program joins the node at {path}{why}, "
            f"which has {has}. Ask for no more than it has, or leave {option} out here "
            f"and set it where the node is started, such as `aiogpu start --head`."
        )


def _unmet(
    options: NodeOptions, ledger: Ledger, policies: Policies
) -> Iterator[tuple[str, str, str]]:
    """Yield unsatisfied options: name, value, and the node's value."""
    total = ledger.totals()
    amounts = {
        "num_cpus": (CPU, options.num_cpus),
        "num_gpus": (GPU, options.num_gpus),
        "memory": (MEMORY, options.memory),
    }
    for option, (name, amount) in amounts.items():
        there = total.get(name, 0)
        if amount is not None and there < amount:
            text = repr(size(amount)) if name == MEMORY else f"{amount:g}"
            yield option, text, f"{name} {format_amount(name, there)}"
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
        value, policy = getattr(options, option), policies.get(option)
        if value not in (getattr(defaults, option), policy):
            yield option, repr(value), f"{option}={policy!r}"


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
    """Return the description of a node for its clients.

    Args:
        directory: directory of the node's own sockets.
        ledger: its resources.
        options: options with which it was started.
        object_memory: bytes of shared memory for values.
        limits: limits of each client; None for no limits.

    Raises:
        OptionError: `limits` names a resource that the node does not have.
    """
    from aiogpu.core.queue.fair_share import Limits
    from aiogpu.runtime.callers.programs import ServerInfo
    from aiogpu.version import __version__

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
    """Pack a node's resources and policies; see `unpack_capacity`."""
    sets = [
        (
            devices.kind,
            [_with_links(device, sorted(device.links)) for device in devices.devices],
        )
        for devices in ledger.device_sets.values()
    ]
    return _codec.dump((dict(ledger.capacity), sets, dict(policies)))


def unpack_capacity(packed: bytes) -> tuple[Ledger, Policies]:
    """Undo `pack_capacity`: return an unused ledger, and the policies.

    Raises:
        ProtocolError: the bytes are invalid.
    """
    try:
        capacity, sets, policies = _codec.load(packed)
        if not all(type(amount) is int for amount in capacity.values()):
            raise TypeError("an amount is no whole number")
        ledger = Ledger(capacity, [_device_set(*packed_set) for packed_set in sets])
        return ledger, dict(policies)
    except (AttributeError, TypeError, ValueError) as error:
        raise ProtocolError(f"a node's resources cannot be read: {error}") from None


def _device_set(kind: str, devices: tuple[Device, ...]) -> DeviceSet:
    linked = (_with_links(device, frozenset(device.links)) for device in devices)
    return DeviceSet(kind, tuple(linked))


def _with_links(device: Device, links: Any) -> Device:
    """Return the device with its links as a list, for packing, or as a set."""
    return replace(device, links=links)
