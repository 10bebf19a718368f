"""The options of tasks and actors as Ray's; what Ray cannot do is refused.

Quantities are exact in aiogpu, in parts of 1/10 000. Ray truncates a float to such
parts, so that 0.57 would be 0.5699. It is given the float that it truncates rightly.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from aiogpu.accelerators.listed_devices import NOSET, is_left_alone
from aiogpu.core.model.units import CPU, GPU, MEMORY, UNIT
from aiogpu.engines.ray.cluster import NAMESPACE
from aiogpu.engines.ray.errors import RetriedFailure
from aiogpu.engines.ray.values import Terms
from aiogpu.errors import OptionError
from aiogpu.wire.messages import ASYNC, DEFAULT_GROUP, THREADED

if TYPE_CHECKING:
    from aiogpu.client.function_spec import ActorTerms, FunctionSpec
    from aiogpu.core.model.request import Request, TaskSpec

RAY_NOSET: Final = "RAY_EXPERIMENTAL_NOSET_"
"""Ray's own switch, before a variable's name; see `listed_devices.NOSET`."""
WAITING_CALLS: Final = 10_000
"""Calls of an actor with coroutines that wait in its process for a place."""
METHODS_GROUP: Final = "aiogpu calls"
"""Ray's group for those methods of a threaded actor that name none."""


def check_possible(func: FunctionSpec) -> None:
    """Refuse what Ray cannot do.

    Raises:
        OptionError: names the option, and what to do.
    """
    spec, request = func.spec, func.spec.shape.request
    check_priority(spec)
    if spec.is_detached and func.actor is None:
        raise OptionError(
            f"{spec.name} asks for lifetime='detached'. Ray ends a task with the "
            f"process that has started it. Leave it out, or have an actor with "
            f"lifetime='detached' do the work."
        )
    has_timed = func.actor is not None and bool(func.actor.run_limits)
    asked = {
        "gpu_memory": request.gpu_memory != 0,
        "gpu_where": request.where is not None,
        "strategy='spread'": request.spread,
        "retry_oom": spec.retries_oom,
        "run_timeout": spec.run_timeout is not None or has_timed,
        "stop_grace": spec.stop_grace > 0,
    }
    for option, is_asked in asked.items():
        if is_asked:
            _refuse(spec, option)


def check_priority(spec: TaskSpec) -> None:
    """Refuse a priority by an `OptionError`."""
    if spec.priority:
        _refuse(spec, "priority")


def _refuse(spec: TaskSpec, option: str) -> None:
    raise OptionError(
        f"{spec.name} asks for {option}, which a Ray cluster cannot do; leave it out, "
        f"or run on a node of aiogpu's own (docs/engines.md)."
    )


def amounts(request: Request | None) -> dict[str, int]:
    """Return the requested amounts above 0, in units of 1/10 000."""
    asked = () if request is None else (*request.scalars, *request.devices)
    return {name: parts for name, parts in asked if parts}


def as_float(parts: int) -> float:
    """Return the float which Ray, multiplying and truncating, reads as `parts`."""
    whole = parts / UNIT
    if parts % UNIT == 0 or int(whole * UNIT) == parts:
        return whole
    # Half a part more is never a part, and hides what a product falls short of.
    return (parts + 0.5) / UNIT


def bundle_of(bundle: Request) -> dict[str, float]:
    """Return a bundle of a placement group, as Ray names what it holds."""
    return {
        name: parts // UNIT if name == MEMORY else as_float(parts)
        for name, parts in (*bundle.scalars, *bundle.devices)
    }


def resources_of(request: Request) -> dict[str, Any]:
    """Return the request as Ray's options."""
    options: dict[str, Any] = {"num_cpus": 0}
    resources: dict[str, float] = {}
    for name, parts in (*request.scalars, *request.devices):
        if name == CPU:
            options["num_cpus"] = as_float(parts)
        elif name == GPU:
            options["num_gpus"] = as_float(parts)
        elif name == MEMORY:
            options["memory"] = parts // UNIT
        else:
            resources[name] = as_float(parts)
    return {**options, "resources": resources} if resources else options


def task_options(func: FunctionSpec) -> dict[str, Any]:
    """Return Ray's options for a function."""
    spec = func.spec
    options = resources_of(spec.shape.request)
    options |= {
        "name": spec.name,
        "max_calls": spec.max_calls,
        "max_retries": spec.max_retries,
    }
    if func.retried:
        options["retry_exceptions"] = [RetriedFailure]
    if func.window:
        options |= stream_options(func.window)
    return options | _runtime_env(func)


def stream_options(window: int) -> dict[str, Any]:
    """Return Ray's options for a generator that may be ahead by `window` items.

    Half of them wait in the consumer's process, see `Stream`.
    """
    return {
        "num_returns": "streaming",
        "_generator_backpressure_num_objects": max(window - step_of(window), 1),
    }


def step_of(window: int) -> int:
    """Return after how many items a consumer says that it has taken them."""
    return (window + 1) // 2


def _runtime_env(func: FunctionSpec) -> dict[str, Any]:
    """Return the option that sets a task's variables.

    Ray sets the variables of devices by itself, unless its own switch is on.
    """
    switches = {n: v for n, v in os.environ.items() if n.startswith(NOSET)}
    variables = {**switches, **func.environ}
    for variable in [name.removeprefix(NOSET) for name in variables]:
        if is_left_alone(variable, variables):
            variables[RAY_NOSET + variable] = "1"
    return {"runtime_env": {"env_vars": variables}} if variables else {}


def terms_of(terms: ActorTerms) -> Terms:
    """Return what others need to know who are given a handle of an actor."""
    return terms.mode, dict(terms.limits), dict(terms.groups)


def actor_request(func: FunctionSpec) -> Request:
    """Return what must be free for an actor to be placed."""
    request, terms = func.spec.shape.request, func.actor
    assert terms is not None, func
    others = tuple(one for one in request.scalars if one[0] != CPU)
    if terms.keeps_cpus or not (others or request.devices):
        return request
    # Ray would hold the CPU for life of an actor that asks for more than that.
    return replace(request, scalars=others)


def actor_options(func: FunctionSpec, key: tuple[str, str] | None) -> dict[str, Any]:
    """Return Ray's options for an actor.

    Args:
        func: its class.
        key: its namespace and name; None without.
    """
    spec, terms = func.spec, func.actor
    assert terms is not None, func
    options = resources_of(actor_request(func))
    if not terms.keeps_cpus and options["num_cpus"]:
        # Ray takes one CPU then to place it, and none while it runs.
        del options["num_cpus"]
    options |= {
        "max_restarts": spec.max_retries,
        "max_task_retries": terms.max_task_retries,
    }
    if terms.mode == THREADED:
        # In Ray's own default group, calls that run at once have no order.
        groups = {name: limit for name, limit in terms.limits.items() if name}
        limit = terms.limits[DEFAULT_GROUP]
        options["concurrency_groups"] = {METHODS_GROUP: limit, **groups}
    elif terms.mode == ASYNC:
        # The actor's process keeps the limits of its groups, on one loop.
        options["max_concurrency"] = sum(terms.limits.values()) + WAITING_CALLS
    if key is not None:
        options["name"] = key[1]
        options["namespace"] = key[0] or NAMESPACE
    if spec.is_detached:
        options["lifetime"] = "detached"
        options.setdefault("namespace", NAMESPACE)
    return options | _runtime_env(func)
