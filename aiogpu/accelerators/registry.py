"""Which vendors aiogpu knows, and those that a user adds.

Apart from `base`, which every vendor's file describes itself by, so that no two
files import each other. A vendor's file is loaded when its kind is first asked about:
tasks' modules come here in every worker. `KNOWN` says beforehand what they ask; a
test holds it against the files.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Final, NamedTuple

from aiogpu.core.resources import CPU, GPU, MEMORY, TYPE_PREFIX, UNIT
from aiogpu.errors import OptionError

if TYPE_CHECKING:
    from .base import Accelerator


class Entry(NamedTuple):
    """What is known of a vendor without its file."""

    kind: str
    variable: str
    file: str
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
    """The names of all kinds of devices, "GPU" first."""
    return tuple(dict.fromkeys([entry.kind for entry in KNOWN] + [*_registered]))


def variables() -> tuple[str, ...]:
    """The variables by which devices are assigned."""
    own = (vendor.variable for vendor in _registered.values())
    return tuple(dict.fromkeys([*(entry.variable for entry in KNOWN), *own]))


def vendor_of(kind: str) -> Accelerator | None:
    """The vendor of a kind of devices, of "GPU" the first; None for other resources."""
    for entry in KNOWN:
        if entry.kind == kind:
            return _load(entry)
    return _registered.get(kind)


def is_registered(kind: str) -> bool:
    """Whether a user has added this kind."""
    return kind in _registered


def vendors() -> tuple[Accelerator, ...]:
    """All vendors, in the order in which they are asked."""
    return (*map(_load, KNOWN), *_registered.values())


def amount(vendor: Accelerator, value: object) -> int:
    """A quantity in parts by the vendor's rule, as far as devices can be counted.

    Raises:
        OptionError: the vendor refuses it, or gives what is no number of parts.
    """
    parts = vendor.quantity(value)
    if type(parts) is int and parts >= 0 and (parts <= UNIT or not parts % UNIT):
        return parts
    raise OptionError(
        f"{vendor.option}={value!r}: {vendor!r} makes {parts!r} of it. `quantity` "
        f"gives parts of 1/{UNIT}: up to {UNIT} for one device, or a multiple of it."
    )


def register(vendor: Accelerator) -> None:
    """Add a kind of devices, for the nodes that this process starts from now on.

    Tasks ask for it by its name, `resources={"FPGA": 1}`; workers get its variable,
    and `get_runtime_context().get_accelerator_ids()` tells its ids. What its methods
    have to do is said by `Accelerator`; they run in the program, not in workers.

    ```python
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

    The same again is harmless, as when a module or a notebook's cell is run twice.

    Args:
        vendor: its answers.

    Raises:
        OptionError: it lacks an answer, or its kind or its variable is another's.
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
            f"register({vendor!r}): {kind!r} is a resource of aiogpu's own. Give yours "
            f"another name."
        )
    before = _registered.get(kind)
    if before is not None and _class(before) != _class(vendor):
        raise OptionError(
            f"register({vendor!r}): {kind!r} is the kind of {before!r} already. Give "
            f"yours another name."
        )
    taken = {entry.variable for entry in KNOWN}
    taken |= {other.variable for name, other in _registered.items() if name != kind}
    if variable in taken:
        raise OptionError(
            f"register({vendor!r}): {variable} assigns another vendor's devices "
            f"already, and can only be set for one."
        )


def _class(vendor: object) -> tuple[str, str]:
    return type(vendor).__module__, type(vendor).__qualname__


@cache
def _load(entry: Entry) -> Accelerator:
    from importlib import import_module

    made: Accelerator = getattr(
        import_module(f"aiogpu.accelerators.{entry.file}"), entry.name
    )()
    return made
