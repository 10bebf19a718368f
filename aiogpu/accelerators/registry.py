"""The vendors that aiogpu knows, and vendors that a user adds.

A vendor's module is loaded when its kind is first used, because every worker imports
this module. `KNOWN` holds the most used facts; a test compares it with the vendors'
modules.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from aiogpu.core.model.units import CPU, GPU, MEMORY, TYPE_PREFIX, UNIT
from aiogpu.errors import OptionError

if TYPE_CHECKING:
    from .base import Accelerator


class Entry(NamedTuple):
    """The facts about a vendor that are known without importing its module."""

    kind: str
    variable: str
    module: str
    name: str


KNOWN: Final = (
    Entry(GPU, "CUDA_VISIBLE_DEVICES", "nvidia", "Nvidia"),
    Entry(GPU, "HIP_VISIBLE_DEVICES", "amd", "Amd"),
    Entry(GPU, "ZE_AFFINITY_MASK", "intel_gpu", "IntelGpu"),
    Entry("neuron_cores", "NEURON_RT_VISIBLE_CORES", "neuron", "Neuron"),
    Entry("TPU", "TPU_VISIBLE_CHIPS", "tpu", "Tpu"),
    Entry("HPU", "HABANA_VISIBLE_MODULES", "gaudi", "Gaudi"),
    Entry("NPU", "ASCEND_RT_VISIBLE_DEVICES", "ascend", "Ascend"),
)
"""All vendors, in the order in which they are asked."""

_QUESTIONS: Final = ("devices", "assignment", "quantity", "type_of", "watch")
_NAMES: Final = ("kind", "option", "variable")

_registered: Final[dict[str, Accelerator]] = {}


def kinds() -> tuple[str, ...]:
    """Return the names of all kinds of devices, "GPU" first."""
    return tuple(dict.fromkeys([entry.kind for entry in KNOWN] + [*_registered]))


def variables() -> tuple[str, ...]:
    """Return the variables that assign devices."""
    own = (vendor.variable for vendor in _registered.values())
    return tuple(dict.fromkeys([*(entry.variable for entry in KNOWN), *own]))


def vendor_of(kind: str) -> Accelerator | None:
    """Return the vendor of a kind of devices; None for other resources.

    "GPU" has several vendors; the first is returned.
    """
    for entry in KNOWN:
        if entry.kind == kind:
            return _load(entry)
    return _registered.get(kind)


def is_registered(kind: str) -> bool:
    """Return whether a user has added this kind."""
    return kind in _registered


def vendors() -> tuple[Accelerator, ...]:
    """Return all vendors, in the order in which they are asked."""
    return (*map(_load, KNOWN), *_registered.values())


def amount(vendor: Accelerator, value: object) -> int:
    """Convert a quantity by the vendor's rule into units of 1/10 000 device.

    Raises:
        OptionError: the vendor refuses it, or returns neither a share of one device
            nor whole devices.
    """
    parts = vendor.quantity(value)
    if type(parts) is int and parts >= 0 and (parts <= UNIT or not parts % UNIT):
        return parts
    raise OptionError(
        f"{vendor.option}={value!r}: `quantity` of {vendor!r} returned {parts!r}. It "
        f"must return units of 1/{UNIT}: up to {UNIT} for a share of one device, or a "
        f"multiple of {UNIT}."
    )


def register(vendor: Accelerator) -> None:
    """Add a kind of devices to the nodes that this process starts from now on.

    Tasks request it by its name, `resources={"FPGA": 1}`. Workers get its variable, and
    `get_runtime_context().get_accelerator_ids()` returns its ids. `Accelerator`
    documents the methods; they run in the program, not in workers.

    ```python
    from aiogpu.accelerators import Device, Unwatched

    class Fpga:
        kind = "FPGA"
        option = "resources['FPGA']"
        variable = "FPGA_VISIBLE"

        def devices(self, environ, wanted):
            return tuple(Device(i) for i in range(2 if wanted is None else wanted))

        def assignment(self, ids, environ):
            return {"FPGA_VISIBLE": ",".join(map(str, ids))}

        def quantity(self, value):
            return int(value) * 10_000

        def type_of(self, name):
            return name

        def watch(self):
            return Unwatched()

    aiogpu.accelerators.register(Fpga())
    ```

    Registering a vendor of the same class again replaces it, so a module or a notebook
    cell may run twice.

    Args:
        vendor: an object of the shape of `Accelerator`.

    Raises:
        OptionError: the vendor lacks an attribute or a method, or another vendor has
            its kind or variable.
    """
    _check_answers(vendor)
    _check_names(vendor)
    _registered[vendor.kind] = vendor


def _check_answers(vendor: Accelerator) -> None:
    missing = [name for name in _QUESTIONS if not callable(getattr(vendor, name, None))]
    for name in _NAMES:
        text = getattr(vendor, name, None)
        if not isinstance(text, str) or not text:
            missing.append(name)
    if missing or isinstance(vendor, type):
        what = f"lacks {', '.join(missing)}" if missing else "is a class, not an object"
        raise OptionError(
            f"register({vendor!r}): it {what}. A vendor has the texts "
            f"{', '.join(_NAMES)} and the methods {', '.join(_QUESTIONS)}; see "
            f"aiogpu.accelerators.Accelerator."
        )


def _check_names(vendor: Accelerator) -> None:
    kind, variable = vendor.kind, vendor.variable
    own = {CPU, MEMORY, *(entry.kind for entry in KNOWN)}
    if kind in own or kind.startswith(TYPE_PREFIX):
        raise OptionError(
            f"register({vendor!r}): {kind!r} is one of aiogpu's own resources. Choose "
            f"another name."
        )
    before = _registered.get(kind)
    if before is not None and _class(before) != _class(vendor):
        raise OptionError(
            f"register({vendor!r}): {kind!r} is already the kind of {before!r}. Choose "
            f"another name."
        )
    taken = {entry.variable for entry in KNOWN}
    taken |= {other.variable for name, other in _registered.items() if name != kind}
    if variable in taken:
        raise OptionError(
            f"register({vendor!r}): {variable} already assigns another vendor's "
            f"devices, and can be set for one vendor only."
        )


def _class(vendor: object) -> tuple[str, str]:
    return type(vendor).__module__, type(vendor).__qualname__


@cache
def _load(entry: Entry) -> Accelerator:
    from importlib import import_module

    made: Accelerator = getattr(
        import_module(f"aiogpu.accelerators.{entry.module}"), entry.name
    )()
    return made
