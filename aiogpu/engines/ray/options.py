"""Converts options of tasks and actors to Ray's, and refuses unsupported options.

Quantities are exact in aiogpu, in parts of 1/10 000. Ray truncates a float to such
parts, so 0.57 would become 0.5699. So Ray gets a float that it truncates to the right
value.
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
"""Prefix of Ray's own switch; see `listed_devices.NOSET`."""
WAITING_CALLS: Final = 10_000
"""Waiting calls in the process of an actor with coroutines, at most."""
METHODS_GROUP: Final = "aiogpu calls"
"""Ray's group for methods of a threaded actor without a group."""


def check_possible(func: FunctionSpec) -> None:
    """Check that Ray supports the options of a function.

    Raises:
        OptionError: Ray does not support an option.
    """
    spec, request = func.spec, func.spec.shape.request
    check_priority(spec)
    if spec.is_detached and func.actor is None:
        raise OptionError(
            f"{spec.name} asks for lifetime='detached'. Ray ends a task with the "
            f"process that started it. Leave the option out, or use an actor with "
            f"lifetime='detached'."
        )
    has_timed = func.actor is not None and bool(func.actor.run_limits)
    unsupported = {
        "gpu_memory": request.gpu_memory != 0,
        "gpu_where": request.where is not None,
        "strategy='spread'": request.spread,
        "retry_oom": spec.retries_oom,
        "run_timeout": spec.run_timeout is not None or has_timed,
        "stop_grace": spec.stop_grace > 0,
        "evict_after": spec.is_evictable,
    }
    for option, is_requested in unsupported.items():
        if is_requested:
            _refuse(spec, option)


def check_priority(spec: TaskSpec) -> None:
    """Raise `OptionError` if a priority is set."""
    if spec.priority:
        _refuse(spec, "priority")


def _refuse(spec: TaskSpec, option: str) -> None:
    raise OptionError(
        f"{spec.name} asks for {option}, which a Ray cluster cannot do; leave it out, "
        f"or run on a node of aiogpu's own (docs/engines.md)."
    )


def amounts(request: Request | None) -> dict[str, int]:
    """Return the requested amounts above 0, in parts of 1/10 000."""
    requested = () if request is None else (*request.scalars, *request.devices)
    return {name: parts for name, parts in requested if parts}


def as_float(parts: int) -> float:
    """Return the float that Ray, by multiplying and truncating, reads as `parts`."""
    whole = parts / UNIT
    if parts % UNIT == 0 or int(whole * UNIT) == parts:
        return whole
    # Half a part more is always truncated, and compensates for rounding errors.
    return (parts + 0.5) / UNIT


def bundle_of(bundle: Request) -> dict[str, float]:
    """Return a bundle of a placement group as Ray's resources."""
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

    Half of these items wait in the consumer's process; see `Stream`.
    """
    return {
        "num_returns": "streaming",
        "_generator_backpressure_num_objects": max(window - step_of(window), 1),
    }


def step_of(window: int) -> int:
    """Return the number of items after which a consumer confirms them."""
    return (window + 1) // 2


def _runtime_env(func: FunctionSpec) -> dict[str, Any]:
    """Return the option that sets a task's variables.

    Ray sets the variables of devices itself, unless its own switch is on.
    """
    switches = {n: v for n, v in os.environ.items() if n.startswith(NOSET)}
    variables = {**switches, **func.environ}
    for variable in [name.removeprefix(NOSET) for name in variables]:
        if is_left_alone(variable, variables):
            variables[RAY_NOSET + variable] = "1"
    return {"runtime_env": {"env_vars": variables}} if variables else {}


def terms_of(terms: ActorTerms) -> Terms:
    """Return the terms that receivers of an actor's handle need."""
    return terms.mode, dict(terms.limits), dict(terms.groups)


def actor_request(func: FunctionSpec) -> Request:
    """Return the resources that must be free to place an actor."""
    request, terms = func.spec.shape.request, func.actor
    assert terms is not None, func
    other_scalars = tuple(scalar for scalar in request.scalars if scalar[0] != CPU)
    if terms.keeps_cpus or not (other_scalars or request.devices):
        return request
    # With other resources, Ray would hold the actor's CPU for its whole life.
    return replace(request, scalars=other_scalars)


def actor_options(func: FunctionSpec, key: tuple[str, str] | None) -> dict[str, Any]:
    """Return Ray's options for an actor.

    Args:
        func: its class.
        key: its namespace and name; None without a name.
    """
    spec, terms = func.spec, func.actor
    assert terms is not None, func
    options = resources_of(actor_request(func))
    if not terms.keeps_cpus and options["num_cpus"]:
        # Ray then takes one CPU to place it, and none while it runs.
        del options["num_cpus"]
    options |= {
        "max_restarts": spec.max_retries,
        "max_task_retries": terms.max_task_retries,
    }
    if terms.mode == THREADED:
        # In Ray's own default group, concurrent calls have no order.
        groups = {name: limit for name, limit in terms.limits.items() if name}
        limit = terms.limits[DEFAULT_GROUP]
        options["concurrency_groups"] = {METHODS_GROUP: limit, **groups}
    elif terms.mode == ASYNC:
        # The actor's process enforces the limits of its groups, on one loop.
        options["max_concurrency"] = sum(terms.limits.values()) + WAITING_CALLS
    if key is not None:
        options["name"] = key[1]
        options["namespace"] = key[0] or NAMESPACE
    if spec.is_detached:
        options["lifetime"] = "detached"
        options.setdefault("namespace", NAMESPACE)
    return options | _runtime_env(func)
