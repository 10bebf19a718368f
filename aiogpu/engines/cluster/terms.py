"""What a site asks for, as Ray is asked for it; and what Ray cannot do is refused.

Quantities are exact here, parts of 1/10 000; Ray truncates a float to such parts, so
that 0.57 would be 0.5699. What it is given is the float that it truncates rightly.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from aiogpu.accelerators.listed_devices import NOSET, is_left_alone
from aiogpu.accelerators.types import AWS_NEURON_CORE
from aiogpu.core.model.units import CPU, GPU, MEMORY, TYPE_PREFIX, UNIT
from aiogpu.errors import DeviceError, OptionError
from aiogpu.wire.messages import ASYNC, DEFAULT_GROUP, THREADED

if TYPE_CHECKING:
    from aiogpu.client.function_spec import ActorTerms, Site
    from aiogpu.core.model.request import Bundle, Request, TaskSpec
    from aiogpu.engines.cluster.payload import Terms

NAMESPACE: Final = "aiogpu"
"""In which names of actors are that were given without a namespace."""

RAY_NOSET: Final = "RAY_EXPERIMENTAL_NOSET_"
"""Ray's own switch, before a variable's name; see `accelerators.listing.NOSET`."""

NEURON: Final = "neuron_cores"
"""Ray's name, and ours, for the cores of AWS Neuron."""
WAITING: Final = 10_000
"""Calls of an actor with coroutines that wait in it for a place in their group."""
CALLS: Final = "aiogpu calls"
"""To Ray, the group of those methods of a threaded actor that name none."""


def check_possible(site: Site) -> None:
    """Refuse what Ray cannot do.

    Raises:
        OptionError: names the option, and what to do.
    """
    spec, request = site.spec, site.spec.shape.request
    check_priority(spec)
    if spec.is_detached and site.actor is None:
        raise OptionError(
            f"{spec.name} asks for lifetime='detached'. Ray ends a task with the "
            f"process that has started it. Leave it out, or have an actor with "
            f"lifetime='detached' do the work."
        )
    asked = {
        "gpu_memory": request.gpu_memory != 0,
        "gpu_where": request.where is not None,
        "strategy='spread'": request.spread,
        "retry_oom": spec.retries_oom,
    }
    for option, is_asked in asked.items():
        if is_asked:
            raise OptionError(
                f"{spec.name} asks for {option}, which a Ray cluster cannot do; leave "
                f"it out, or run on a node of aiogpu's own (docs/engines.md)."
            )


def check_priority(spec: TaskSpec) -> None:
    """Refuse to have something go first.

    Raises:
        OptionError: says what to do.
    """
    if spec.priority:
        raise OptionError(
            f"{spec.name} asks for priority, which a Ray cluster cannot do; leave it "
            f"out, or run on a node of aiogpu's own (docs/engines.md)."
        )


def resources_of(request: Request) -> dict[str, Any]:
    """Return what is asked for, as Ray's options name it."""
    options: dict[str, Any] = {"num_cpus": 0, "resources": {}}
    for name, parts in (*request.scalars, *request.devices):
        if name == CPU:
            options["num_cpus"] = as_float(parts)
        elif name == GPU:
            options["num_gpus"] = as_float(parts)
        elif name == MEMORY:
            options["memory"] = parts // UNIT
        else:
            options["resources"][name] = as_float(parts)
    if not options["resources"]:
        del options["resources"]
    return options


def bundle_of(bundle: Bundle) -> dict[str, float]:
    """A bundle of a placement, as Ray names what it holds."""
    amounts = (*bundle.scalars, *bundle.devices)
    return {
        name: parts // UNIT if name == MEMORY else as_float(parts)
        for name, parts in amounts
    }


def typed(resources: Mapping[str, float]) -> dict[str, float]:
    """What a node has, with the type of the devices that Ray does not look for."""
    of_cores = {TYPE_PREFIX + AWS_NEURON_CORE: 1.0} if NEURON in resources else {}
    return {**of_cores, **resources}


def check_visible(num_gpus: float | None, visible: str | None) -> None:
    """Refuse to share out more GPUs than a variable lets this machine have.

    Raises:
        DeviceError: says how many.
    """
    named = None if visible is None else [one for one in visible.split(",") if one]
    if named is not None and num_gpus is not None and num_gpus > len(named):
        raise DeviceError(
            f"num_gpus={num_gpus:g}, but CUDA_VISIBLE_DEVICES={visible!r} names "
            f"{len(named)}: ask for fewer, or unset the variable."
        )


def as_float(parts: int) -> float:
    """The float that Ray, multiplying and truncating, takes for so many parts."""
    whole = parts / UNIT
    if parts % UNIT == 0:
        return whole
    # Half a part more is never a part, and hides what a product falls short of.
    return whole if int(whole * UNIT) == parts else (parts + 0.5) / UNIT


def options_of_task(site: Site) -> dict[str, Any]:
    """All that Ray is told once of a function."""
    spec = site.spec
    options = resources_of(spec.shape.request)
    options |= {
        "name": spec.name,
        "max_calls": spec.max_calls,
        "max_retries": spec.max_retries,
    }
    if site.retried:
        # Late: what needs Ray comes with it.
        from aiogpu.engines.cluster.failure import RetriedFailure

        options["retry_exceptions"] = [RetriedFailure]
    environ = environ_of(site)
    if environ:
        options["runtime_env"] = {"env_vars": environ}
    if site.window:
        options["num_returns"] = "streaming"
        from aiogpu.engines.cluster.streams import ahead_at_ray

        options["_generator_backpressure_num_objects"] = ahead_at_ray(site.window)
    return options


def environ_of(site: Site) -> dict[str, str]:
    """The variables of `runtime_env`, and what they mean in Ray's terms.

    Ray sets the variables of devices by itself, unless its own switch is on.
    """
    switches = {n: v for n, v in os.environ.items() if n.startswith(NOSET)}
    environ = {**switches, **site.environ}
    for variable in [name.removeprefix(NOSET) for name in environ]:
        if is_left_alone(variable, environ):
            environ[RAY_NOSET + variable] = "1"
    return environ


def terms_of(terms: ActorTerms) -> Terms:
    """Return what others need to know who are given a handle."""
    return terms.mode, dict(terms.limits), dict(terms.groups)


def request_of_actor(site: Site) -> Request:
    """Return what must be free for an actor to be placed, as Ray is told."""
    request, terms = site.spec.shape.request, site.actor
    assert terms is not None, site
    others = tuple(one for one in request.scalars if one[0] != CPU)
    if terms.keeps_cpus or not (others or request.devices):
        return request
    # Ray would hold the CPU for life of an actor that asks for more than that.
    return replace(request, scalars=others)


def options_of_actor(site: Site, key: tuple[str, str] | None) -> dict[str, Any]:
    """All that Ray is told of an actor, but for where it is placed.

    Args:
        site: its class.
        key: its namespace and name, None without.
    """
    spec, terms = site.spec, site.actor
    assert terms is not None, site
    options = resources_of(request_of_actor(site))
    if not terms.keeps_cpus and options["num_cpus"]:
        # Ray takes one CPU then to place it, and none while it runs.
        del options["num_cpus"]
    options |= {
        "max_restarts": spec.max_retries,
        "max_task_retries": terms.max_task_retries,
    }
    groups = {name: limit for name, limit in terms.limits.items() if name}
    if terms.mode == THREADED:
        # Ray keeps no order of what runs at once in its own default group.
        options["concurrency_groups"] = {CALLS: terms.limits[DEFAULT_GROUP], **groups}
    elif terms.mode == ASYNC:
        # The host keeps them in order, and their groups apart on one loop.
        options["max_concurrency"] = sum(terms.limits.values()) + WAITING
    if key is not None:
        options["name"] = key[1]
        options["namespace"] = key[0] or NAMESPACE
    if spec.is_detached:
        options["lifetime"] = "detached"
        options.setdefault("namespace", NAMESPACE)
    environ = environ_of(site)
    if environ:
        options["runtime_env"] = {"env_vars": environ}
    return options
