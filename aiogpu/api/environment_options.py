"""The environment that a task asks for, checked against what aiogpu sets in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from aiogpu.errors import OptionError

NOSET: Final = "AIOGPU_NOSET_"
"""Before a variable's name: a switch that leaves it to the task."""
CUDA: Final = "CUDA_VISIBLE_DEVICES"
ORDER: Final = "CUDA_DEVICE_ORDER"
HIP: Final = "HIP_VISIBLE_DEVICES"
ROCR: Final = "ROCR_VISIBLE_DEVICES"
BY_BUS: Final = "PCI_BUS_ID"
_ON: Final = ("1", "true", "yes", "on")


def check_runtime_env(option: str, value: object) -> dict[str, str]:
    """Check a `runtime_env`; gives its variables.

    Raises:
        OptionError: it is no such dict, or sets what says which devices a task has.
    """
    if not isinstance(value, Mapping) or set(value) - {"env_vars"}:
        raise OptionError(
            f"{option}={value!r} must be a dict with the one key 'env_vars', such as "
            f"{option}={{'env_vars': {{'A': '1'}}}}."
        )
    variables = value.get("env_vars", {})
    if not isinstance(variables, Mapping) or not all(
        isinstance(name, str) and isinstance(text, str) and _is_variable(name, text)
        for name, text in variables.items()
    ):
        raise OptionError(
            f"{option}['env_vars']={variables!r} must be a dict of texts to texts, "
            f"without '=' in a name, without NUL and without lone surrogates."
        )
    if variables:
        _check_managed(option, variables)
    return dict(variables)


def _check_managed(option: str, variables: Mapping[str, str]) -> None:
    """Refuse variables that would fight the assignment of devices."""
    from aiogpu.accelerators.registry import variables as managed

    for name in managed():
        if name in variables and not _is_left_alone(name, variables):
            raise OptionError(
                f"{option}['env_vars'] sets {name}, which aiogpu sets to the devices "
                f"that the task is given. Leave it out, or add {NOSET}{name}='1' to "
                f"see to it yourself."
            )
    if ROCR in variables and not _is_left_alone(HIP, variables):
        raise OptionError(
            f"{option}['env_vars'] sets {ROCR}, and {HIP} counts what that leaves: the "
            f"task would see other GPUs than it is given. Leave it out, or add "
            f"{NOSET}{HIP}='1' to see to both yourself."
        )
    order = variables.get(ORDER)
    if order not in (None, BY_BUS) and not _is_left_alone(CUDA, variables):
        raise OptionError(
            f"{option}['env_vars'] sets {ORDER}={order!r}, but {CUDA} is set by the "
            f"order of the bus: the task would see other GPUs than it is given. Leave "
            f"it out; set it for the whole program, before it starts, and GPUs go by "
            f"their UUIDs; or add {NOSET}{CUDA}='1' to see to both yourself."
        )


def _is_left_alone(name: str, variables: Mapping[str, str]) -> bool:
    return variables.get(NOSET + name, "").strip().lower() in _ON


def _is_variable(name: str, text: str) -> bool:
    try:
        os.fsencode(name + text)
    except UnicodeEncodeError:
        return False
    return bool(name) and "=" not in name and "\0" not in name + text
