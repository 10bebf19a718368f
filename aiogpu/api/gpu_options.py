"""What a task may say of the GPUs that it wants beside their number, checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict

from aiogpu.core.model.units import BY_SHARE, memory_size
from aiogpu.errors import OptionError

if TYPE_CHECKING:
    from aiogpu.core.model.request import DeviceSelector

RetryOom = Literal["exclusive"]
_CAPABILITY: Final = r"([0-9]{1,3})(?:\.([0-9]{1,3}))?"


class GpuWhere(TypedDict, total=False):
    """Conditions that each GPU must fulfil, all of them.

    Attributes:
        memory: device memory that it must have at least, in bytes or "40GiB".
        compute_capability: the least, such as "8.0".
        name: pattern of the product's name, as shells know them: "*H100*". Capital
            or small letters are the same.
    """

    memory: int | str
    compute_capability: str | float
    name: str


def check_gpu_memory(option: str, value: object) -> int:
    """Bytes on each GPU, `BY_SHARE` for "share"; raises `OptionError`."""
    if value is None:
        return 0
    if isinstance(value, str) and value == "share":
        return BY_SHARE
    try:
        count = memory_size(option, value)
    except OptionError as error:
        raise OptionError(
            f"{error} Or {option}='share', the part of its memory that num_gpus is of "
            f"the GPU."
        ) from None
    if count == 0:
        raise OptionError(
            f"{option}={value!r} asks for nothing; leave it out, or give what each GPU "
            f'is to have for the task, such as {option}="6GiB".'
        )
    return count


def check_retry_oom(option: str, value: object) -> bool:
    """Whether it is tried again alone; raises `OptionError`."""
    if value is None:
        return False
    if isinstance(value, str) and value == "exclusive":
        return True
    raise OptionError(
        f"{option}={value!r} must be None, or 'exclusive': a task that has run out of "
        f"GPU memory is tried once more, with a GPU of its own."
    )


def check_gpu_where(option: str, value: object) -> DeviceSelector | None:
    """The conditions of a `GpuWhere`; raises `OptionError`."""
    if value is None:
        return None
    known = GpuWhere.__annotations__
    if not isinstance(value, Mapping) or not value or not set(value) <= set(known):
        raise OptionError(
            f"{option}={value!r} must be a dict with some of the keys 'memory', "
            f"'compute_capability' and 'name', such as "
            f"{option}={{'memory': '40GiB', 'name': '*H100*'}}."
        )
    where: dict[str, Any] = {}
    if "memory" in value:
        where["least_memory"] = memory_size(f"{option}['memory']", value["memory"])
    if "compute_capability" in value:
        where["least_capability"] = _capability(option, value["compute_capability"])
    if "name" in value:
        where["name"] = _pattern(option, value["name"])
    from aiogpu.core.model.request import DeviceSelector  # few ask for it

    return DeviceSelector(**where)


def _capability(option: str, value: object) -> tuple[int, int]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    text = str(value) if is_number or isinstance(value, str) else ""
    match = re.fullmatch(_CAPABILITY, text.strip())
    if match is None:
        raise OptionError(
            f"{option}['compute_capability']={value!r} must be a version such as "
            f'"8.0"; that of each GPU is in `aiogpu gpus`.'
        )
    return int(match[1]), int(match[2] or 0)


def _pattern(option: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise OptionError(
            f"{option}['name']={value!r} must be a pattern of the product's name, such "
            f'as "*H100*".'
        )
    return value.lower()
