"""What `init` is asked for, checked; every mistake is named."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

from aiogpu.api.options import check_seconds, check_text
from aiogpu.api.resources import check_declared
from aiogpu.core.model.units import memory_size, quantity
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import OptionError

MOST_SPARES: Final = 1024
"""Clean workers that may be asked for; each is a process."""
FOREIGN: Final = ("ignore", "avoid", "wait")
AUTO = "auto"
"""In `preload`: modules that workers import again and again, as they are learnt."""


def check_node_options(
    *,
    num_cpus: object,
    num_gpus: object,
    resources: object,
    accelerator_type: object,
    gpu_memory: object,
    gpu_memory_enforce: object,
    foreign: object,
    mps: object,
    cpu_affinity: object,
    preload: object,
    log_to_driver: object,
    cancel_grace: object,
    spare_workers: object,
    memory: object,
    memory_guard: object,
    object_memory: object,
    spill_directory: object,
) -> NodeOptions:
    """Check the options of a node; raises `OptionError`."""
    modules = _check_preload(preload)
    return NodeOptions(
        num_cpus=_check_cpus(num_cpus),
        num_gpus=_check_gpus(num_gpus),
        resources=_check_custom(resources),
        accelerator_type=check_text("accelerator_type", accelerator_type),
        gpu_memory=_check_gpu_memory(gpu_memory),
        gpu_memory_enforce=check_flag("gpu_memory_enforce", gpu_memory_enforce),
        foreign=_check_foreign(foreign),
        mps=_check_switch("mps", mps, "to use an MPS server where one runs"),
        cpu_affinity=_check_switch(
            "cpu_affinity", cpu_affinity, "to keep workers on CPUs near their GPUs"
        ),
        preload=tuple(name for name in modules if name != AUTO),
        learns=AUTO in modules,
        log_to_driver=check_flag("log_to_driver", log_to_driver),
        cancel_grace=check_seconds("cancel_grace", cancel_grace),
        spare_workers=_check_spares(spare_workers),
        memory=None if memory is None else memory_size("memory", memory),
        memory_guard=check_flag("memory_guard", memory_guard),
        object_memory=(
            None
            if object_memory is None
            else memory_size("object_memory", object_memory)
        ),
        spill_directory=_check_directory("spill_directory", spill_directory),
    )


def _check_cpus(value: object) -> float | None:
    if value is None:
        return None
    quantity("num_cpus", value)
    assert isinstance(value, int | float)
    return float(value)


def _check_gpus(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 10**6:
        raise OptionError(
            f"init(num_gpus={value!r}): a node has a whole number of GPUs; give an "
            f"int from 0 to {10**6}, or leave it out to detect them."
        )
    return value


def _check_foreign(value: object) -> str:
    if isinstance(value, str) and value in FOREIGN:
        return value
    raise OptionError(
        f"init(foreign={value!r}): give 'ignore', 'avoid' or 'wait'. Where processes "
        f"outside of aiogpu are on a device, 'avoid' has others chosen first, and "
        f"'wait' waits until they have gone."
    )


def _check_spares(value: object) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not 0 <= value <= MOST_SPARES
    ):
        raise OptionError(
            f"init(spare_workers={value!r}): give a whole number from 0, for none, to "
            f"{MOST_SPARES}."
        )
    return value


def _check_custom(value: object) -> Mapping[str, float]:
    return {} if value is None else check_declared("resources", value)


def _check_preload(value: object) -> tuple[str, ...]:
    if value == AUTO:
        return (AUTO,)
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not all(isinstance(name, str) and name for name in value)
    ):
        raise OptionError(
            f"preload={value!r} must be a sequence of module names, such as "
            f"preload=('numpy',), or 'auto', or a sequence that holds 'auto' too; "
            f"preload=() is for no module at all."
        )
    return tuple(value)


def _check_directory(option: str, value: object) -> str | None:
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise OptionError(f"{option}={value!r} must be the path of a directory.")
    if not os.path.isdir(path):
        raise OptionError(
            f"{option}={value!r}: there is no such directory; make it, or leave the "
            f"option out for the system's temporary one."
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise OptionError(f"{option}={value!r}: this user may not write there.")
    return os.path.abspath(path)


def _check_gpu_memory(value: object) -> int | None:
    if value is None:
        return None
    size = memory_size("gpu_memory", value)
    if size == 0:
        raise OptionError(
            f"init(gpu_memory={value!r}): a GPU without memory serves nobody; give "
            f'that of each GPU, such as gpu_memory="80GiB", or leave it out.'
        )
    return size


def _check_switch(option: str, value: object, purpose: str) -> str:
    if isinstance(value, str) and value in ("auto", "off"):
        return str(value)
    raise OptionError(f"{option}={value!r} must be 'auto', {purpose}, or 'off'.")


def check_flag(option: str, value: object) -> bool:
    """Check a switch; raises `OptionError`."""
    if not isinstance(value, bool):
        raise OptionError(f"{option}={value!r} must be True or False.")
    return value
