"""Quantities of resources in options: names checked, numbers counted in parts.

Which names are kinds of devices is said by `accelerators.registry`, and in a worker by
the devices that its node has too: a vendor that the program has registered is not known
there. Both are asked only where resources are named, so that a task without any loads
neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from aiogpu.client.current import current
from aiogpu.core.model.units import (
    CPU,
    GPU,
    GPU_MEMORY,
    MEMORY,
    UNIT,
    device_quantity,
    quantity,
)
from aiogpu.errors import OptionError

MOST_DEVICES: Final = 10**6
"""Of one kind on a node, as for `num_gpus`."""


_OWN_OPTIONS: Final = {
    CPU: "num_cpus",
    GPU: "num_gpus",
    MEMORY: "memory",
    GPU_MEMORY: "gpu_memory",
}


def check_resources(option: str, value: object) -> dict[str, int]:
    """Check what a task asks for; gives amounts in parts.

    Raises:
        OptionError: it is no dict of names to quantities, names CPU or GPU, or asks for
            a quantity of devices that their vendor does not allow.
    """
    amounts = {}
    for name, amount in _named(option, value):
        amounts[name] = _amount(f"{option}[{name!r}]", name, amount)
    return amounts


def check_declared(option: str, value: object) -> dict[str, float]:
    """Check what a node is said to have; gives the numbers as they are.

    Raises:
        OptionError: also where a number of devices is not whole.
    """
    for name, amount in _named(option, value):
        parts = quantity(f"{option}[{name!r}]", amount)
        if is_device(name) and (parts % UNIT or parts > MOST_DEVICES * UNIT):
            raise OptionError(
                f"init({option}={{{name!r}: {amount!r}}}): a node has a whole number "
                f"of devices; give an int from 0 to {MOST_DEVICES}, or leave it out to "
                f"detect them."
            )
    return dict(value) if isinstance(value, Mapping) else {}


def is_device(name: str) -> bool:
    """Whether a resource comes as single devices, with a variable that assigns them."""
    from aiogpu.accelerators.registry import kinds

    return name in kinds() or name in current.accelerators


def devices_among(resources: Mapping[str, int]) -> dict[str, int]:
    """Those amounts that are numbers of devices."""
    return {name: parts for name, parts in resources.items() if is_device(name)}


def check_kinds(num_gpus: int, gpu_memory: int, resources: Mapping[str, int]) -> None:
    """Refuse devices of two vendors for one process, which are two runtimes.

    Kinds that a user has registered go with any other.

    Raises:
        OptionError: names the options that exclude each other.
    """
    if not resources:
        return
    from aiogpu.accelerators.registry import KNOWN

    asked = ["num_gpus"] if num_gpus else ["gpu_memory"] if gpu_memory else []
    asked += (
        f"resources[{entry.kind!r}]" for entry in KNOWN if resources.get(entry.kind)
    )
    if len(asked) > 1:
        raise OptionError(
            f"{' and '.join(asked)} are asked for in one request: a process has the "
            f"devices of one vendor, whose runtime takes hold of it. Ask for one of "
            f"them here, and for the other in a task or actor of its own."
        )


def _amount(option: str, name: str, value: object) -> int:
    from aiogpu.accelerators.registry import amount, vendor_of

    vendor = vendor_of(name)
    if vendor is not None:
        return amount(vendor, value)
    if name in current.accelerators:
        return device_quantity(option, value)
    return quantity(option, value)


def _named(option: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping):
        raise OptionError(
            f"{option}={value!r} must be a dict of names to quantities, such as "
            f"{option}={{'license': 1}}."
        )
    for name, amount in value.items():
        if not isinstance(name, str) or not name:
            raise OptionError(f"{option} has the key {name!r}; names are strings.")
        if name in _OWN_OPTIONS:
            raise OptionError(
                f"{option} names {name!r}; say {_OWN_OPTIONS[name]}={amount!r} instead."
            )
        yield name, amount
