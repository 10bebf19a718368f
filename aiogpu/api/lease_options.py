"""What a lease is asked for, checked as a task's options are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from aiogpu.api.options import CHECKS, TaskOptions, unknown_option
from aiogpu.api.resource_options import check_kinds
from aiogpu.core.model.request import Shape, TaskSpec
from aiogpu.errors import OptionError
from aiogpu.runtime.calls import Function, Site, new_function_id, new_site_id

if TYPE_CHECKING:
    from aiogpu.core.model.request import PlacementGroupSpec

OPTIONS: Final = (
    *("num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "gpu_where"),
    *("gpu_memory", "strategy", "name", "priority", "timeout"),
)
"""Those of a task that a lease has as well."""
NAME: Final = "lease"

_nothing: Final = Function(new_function_id(), b"")


def lease_site(asked: Mapping[str, Any]) -> tuple[Site, float | None]:
    """What the node is asked for a lease with these options, and how long it waits.

    Raises:
        OptionError: names the option, the value and what is allowed; or nothing is
            asked for.
    """
    checked: dict[str, Any] = {}
    for option, value in asked.items():
        if option not in OPTIONS:
            raise unknown_option(option, dict.fromkeys(OPTIONS), "a lease")
        checked[option] = CHECKS[option](option, value)
    if asked.get("num_cpus") is None:
        checked["num_cpus"] = 0
    options = TaskOptions(**checked)
    check_kinds(options.num_gpus, options.gpu_memory, options.resources)
    request = options.request()
    if not request.scalars and not request.devices:
        raise OptionError(
            "a lease of nothing is no lease; say what is to be kept from others, such "
            "as num_gpus=1 or gpu_memory='6GiB'."
        )
    return site_of(options.spec(NAME, _nothing.id)), options.timeout


def placement_site(
    gang: PlacementGroupSpec, priority: int, *, is_detached: bool = False
) -> Site:
    """What the node is asked for a placement."""
    spec = TaskSpec(
        gang.name,
        Shape(gang.request()),
        _nothing.id,
        priority=priority,
        is_detached=is_detached,
    )
    return site_of(spec)


def site_of(spec: TaskSpec) -> Site:
    """A lease's site: nothing runs, and nobody but its owner gives it back."""
    # How long it may wait is not how long it may be held.
    spec = replace(
        spec,
        timeout=None,
        max_calls=1,
        max_retries=0,
        is_endless=True,
        is_lease=True,
    )
    return Site(
        id=new_site_id(),
        function=_nothing,
        spec=spec,
        resources=spec.shape.request.as_numbers(),
        environ={},
        is_coroutine=False,
        retry_exceptions=False,
    )
