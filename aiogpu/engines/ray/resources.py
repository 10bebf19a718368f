"""Requests and options in Ray's terms, and what the nodes of a cluster can give.

Quantities are exact in aiogpu, in parts of 1/10 000. Ray truncates a float to such
parts, so 0.57 would become 0.5699. So Ray gets a float that it truncates to the right
value.

A request is for one node: Ray splits no request between nodes, and no share of a device
between devices.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from aiogpu.accelerators.listed_devices import NOSET, is_left_alone
from aiogpu.core.model import units
from aiogpu.core.model.text import SHOWN, terms
from aiogpu.core.model.units import CPU, GPU, MEMORY, UNIT
from aiogpu.engines.ray import cluster
from aiogpu.engines.ray.cluster import NAMESPACE, ClusterNode
from aiogpu.engines.ray.values import RetriedFailure
from aiogpu.errors import InfeasibleError, OptionError
from aiogpu.wire.messages import ASYNC, DEFAULT_GROUP, THREADED

if TYPE_CHECKING:
    from aiogpu.client.function_spec import FunctionSpec
    from aiogpu.core.model.request import Request

# Options

RAY_NOSET: Final = "RAY_EXPERIMENTAL_NOSET_"
"""Prefix of Ray's own switch; see `listed_devices.NOSET`."""
WAITING_CALLS: Final = 10_000
"""Waiting calls in the process of an actor with coroutines, at most."""
METHODS_GROUP: Final = "aiogpu calls"
"""Ray's group for methods of a threaded actor without a group."""
REFUSED: Final[dict[str, tuple[Callable[[FunctionSpec], object], str]]] = {
    "priority": (
        lambda func: func.spec.priority,
        "Ray starts tasks in its own order; give urgent tasks a custom resource of "
        "their own, by resources=",
    ),
    "gpu_memory": (
        lambda func: func.spec.shape.request.gpu_memory,
        "ask for a share of a GPU, by num_gpus=0.5; or name the memory of the "
        "cluster's GPUs once, by init(address='ray', gpu_memory='80GiB')",
    ),
    "gpu_where": (
        lambda func: func.spec.shape.request.where,
        "accelerator_type= names a type of GPU, and label_selector= a node",
    ),
    "gpu_strategy='spread'": (
        lambda func: func.spec.shape.request.spread,
        "Ray packs the shares of a device; scheduling_strategy='SPREAD' spreads tasks "
        "over the nodes",
    ),
    "retry_oom": (
        lambda func: func.spec.retries_oom,
        "retry_exceptions=[aiogpu.GpuOutOfMemoryError] retries the task",
    ),
    "any_of": (
        lambda func: func.spec.alternatives,
        "aiogpu.available_resources() says what is free, and .options(...) asks for it",
    ),
    "run_timeout": (
        lambda func: (
            func.spec.run_timeout is not None or (func.actor and func.actor.run_limits)
        ),
        "timeout= limits the time since .remote()",
    ),
    "evict_after": (
        lambda func: func.spec.is_evictable,
        "aiogpu.kill() ends an idle actor, whose resources are then free",
    ),
    "stop_grace": (
        lambda func: func.spec.stop_grace > 0,
        "cancel_grace= is the time from a cancel to the kill",
    ),
    "lifetime='detached' for a task": (
        lambda func: func.spec.is_detached and func.actor is None,
        "Ray ends a task with the process that started it; an actor may be detached",
    ),
    "accelerator_type in a placement": (
        lambda func: (
            func.spec.shape.request.accelerator_type
            and func.spec.shape.request.placement_group
        ),
        "the bundle asks for it, as for {'GPU': 1, 'accelerator_type:A100': 0.001}",
    ),
}
"""For each option that Ray cannot do: whether a function uses it, and what comes
closest on Ray."""


def check_possible(func: FunctionSpec, gpu_memory: int | None) -> None:
    """Check that Ray supports the options of a function.

    Args:
        func: the function.
        gpu_memory: the memory of each GPU, if `init` names it.

    Raises:
        OptionError: Ray does not support an option.
    """
    for option, (is_used, _) in REFUSED.items():
        is_known = option == "gpu_memory" and gpu_memory is not None
        if is_used(func) and not is_known:
            refuse(func.spec.name, option)


def refuse(name: str, option: str) -> NoReturn:
    """Raise `OptionError` for an option that Ray does not support."""
    raise OptionError(
        f"{name} asks for {option}, which a Ray cluster cannot do. Closest: "
        f"{REFUSED[option][1]}. Or run on a node of aiogpu's own (docs/from-ray.md)."
    )


def with_gpu_share(request: Request, gpu_memory: int | None) -> Request:
    """Return a request with its `gpu_memory` as a share of a GPU.

    Raises:
        InfeasibleError: it is more than a GPU has.
    """
    if not request.gpu_memory or not gpu_memory:
        return request
    share = 0
    if request.gpu_memory != units.BY_SHARE:
        if request.gpu_memory > gpu_memory:
            raise InfeasibleError(
                f"gpu_memory={request.gpu_memory} bytes, and by init(gpu_memory=...) "
                f"each GPU of the cluster has {gpu_memory}. Ask for less."
            )
        share = -(-request.gpu_memory * UNIT // gpu_memory)
    devices = dict(request.devices)
    devices[GPU] = max(devices.get(GPU, 0), share)
    return replace(request, devices=tuple(devices.items()), gpu_memory=0)


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


def _options_of(request: Request, func: FunctionSpec) -> dict[str, Any]:
    """Return a request, and the placement and variables of a function, for Ray."""
    resources = {"CPU": 0.0, **bundle_of(request)}
    names = {CPU: "num_cpus", GPU: "num_gpus", MEMORY: "memory"}
    options: dict[str, Any] = {
        option: resources.pop(name)
        for name, option in names.items()
        if name in resources
    }
    if resources:
        options["resources"] = resources
    # Ray sets the variables of devices itself, unless its own switch is on.
    switches = {n: v for n, v in os.environ.items() if n.startswith(NOSET)}
    variables = {**switches, **func.environ}
    for variable in [name.removeprefix(NOSET) for name in variables]:
        if is_left_alone(variable, variables):
            variables[RAY_NOSET + variable] = "1"
    if variables:
        options["runtime_env"] = {"env_vars": variables}
    return options | dict(func.ray_options)


def task_options(func: FunctionSpec, request: Request) -> dict[str, Any]:
    """Return Ray's options for a function."""
    spec = func.spec
    options = _options_of(request, func) | {
        "name": spec.name,
        "max_calls": spec.max_calls,
        "max_retries": spec.max_retries,
    }
    if func.retried:
        options["retry_exceptions"] = [RetriedFailure]
    return options | (stream_options(func.window) if func.window else {})


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


def actor_request(func: FunctionSpec, request: Request) -> Request:
    """Return the resources that must be free to place an actor."""
    assert func.actor is not None, func
    others = tuple(scalar for scalar in request.scalars if scalar[0] != CPU)
    if func.actor.keeps_cpus or not (others or request.devices):
        return request
    # With other resources, Ray would hold the actor's CPU for its whole life.
    return replace(request, scalars=others)


def actor_options(
    func: FunctionSpec, request: Request, key: tuple[str, str] | None
) -> dict[str, Any]:
    """Return Ray's options for an actor; `key` is its namespace and name, if any."""
    spec, terms = func.spec, func.actor
    assert terms is not None, func
    options = _options_of(actor_request(func, request), func)
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
        groups[METHODS_GROUP] = terms.limits[DEFAULT_GROUP]
        options["concurrency_groups"] = groups
    elif terms.mode == ASYNC:
        # The actor's process enforces the limits of its groups, on one loop.
        options["max_concurrency"] = sum(terms.limits.values()) + WAITING_CALLS
    if key is not None:
        options["name"] = key[1]
        options["namespace"] = key[0] or NAMESPACE
    if spec.is_detached:
        options["lifetime"] = "detached"
        options.setdefault("namespace", NAMESPACE)
    return options


# Nodes


def public_resources(resources: Mapping[str, float]) -> dict[str, float]:
    """Return Ray's resources without its internal ones, sorted."""
    return {
        name: resources[name]
        for name in sorted(resources)
        if name != "object_store_memory"
        and not name.startswith("node:")
        and "_group_" not in name
    }


def _parts(node: ClusterNode, name: str) -> int:
    return round(node.total.get(name, 0.0) * UNIT)


def fits(node: ClusterNode, requested: Mapping[str, int]) -> bool:
    """Return whether a node has all requested amounts, free or in use."""
    return all(_parts(node, name) >= parts for name, parts in requested.items())


def room(nodes: Iterable[ClusterNode], requested: Mapping[str, int]) -> int:
    """Return how many such requests fit at the same time."""
    return sum(
        min(_parts(node, name) // requested[name] for name in requested)
        for node in nodes
    )


def describe_nodes(nodes: Sequence[ClusterNode], requested: Mapping[str, int]) -> str:
    """Describe the nodes, grouped by resources: "2 x {CPU: 4, GPU: 1}"."""
    counts = Counter(
        terms(
            (name, amount)
            for name, amount in public_resources(node.total).items()
            if name != MEMORY or MEMORY in requested
        )
        for node in nodes
    )
    shown = [f"{count} x {kind}" for kind, count in counts.most_common(SHOWN)]
    if len(counts) > SHOWN:
        shown.append(f"{len(counts) - SHOWN} kinds more")
    return ", ".join(shown)


class Overview:
    """The last known nodes of the cluster, against which requests are checked.

    Ray lets a request wait for ever that no node can meet.

    A program looks every few seconds, so that `.remote()` need not query the cluster. A
    task queries the cluster if a request fits no node that it knows.

    Attributes:
        nodes: the nodes.
        grows: an autoscaler may start nodes.
    """

    def __init__(self, *, is_in_task: bool) -> None:
        self.nodes: Sequence[ClusterNode] = ()
        self.grows = False
        self._is_in_task = is_in_task

    async def look(self, seconds: float = cluster.ANSWER_LIMIT) -> bool:
        """Update the list of nodes; return whether a node has left.

        Raises:
            NodeDiedError: the cluster does not answer within `seconds`.
        """
        before = {node.id for node in self.nodes}
        seen = await cluster.ask(cluster.nodes_and_growth, seconds)
        self.nodes, self.grows = seen
        return not before <= {node.id for node in self.nodes}

    def _may_fit(self, requested: Mapping[str, int], on_one_node: bool) -> bool:
        places = self.nodes if on_one_node else [ClusterNode("", self.total())]
        return self.grows or any(fits(place, requested) for place in places)

    def check(self, name: str, request: Request, *, on_one_node: bool = True) -> None:
        """Check that the nodes can meet a request when they are idle.

        Args:
            name: name of what asks for it.
            request: the request.
            on_one_node: one node must meet it; else all nodes together.

        Raises:
            InfeasibleError: they cannot.
        """
        requested = amounts(request)
        if self._may_fit(requested, on_one_node):
            return
        if self._is_in_task:
            self.nodes, self.grows = cluster.nodes_and_growth()
            if self._may_fit(requested, on_one_node):
                return
        who = "no node of this Ray cluster can" if on_one_node else "its nodes cannot"
        raise InfeasibleError(
            f"{name} asks for {request}, which {who} give. There are "
            f"{describe_nodes(self.nodes, requested)}. Ask for less, or add a node."
        )

    def total(self) -> dict[str, float]:
        """Return the resources of all nodes together."""
        total: dict[str, float] = {}
        for node in self.nodes:
            for name, amount in node.total.items():
                total[name] = total.get(name, 0.0) + amount
        return total

    def room_for(self, request: Request) -> int | None:
        """Return how many such requests fit at the same time; None for any number."""
        requested = amounts(request)
        if self._is_in_task:
            self.nodes, self.grows = cluster.nodes_and_growth()
        return room(self.nodes, requested) if requested and not self.grows else None
