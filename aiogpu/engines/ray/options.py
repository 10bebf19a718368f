"""What a function asks for, as Ray is asked for it; and what Ray cannot do is refused.

Quantities are exact here, parts of 1/10 000; Ray truncates a float to such parts, so
that 0.57 would be 0.5699. What it is given is the float that it truncates rightly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiogpu.accelerators.listed_devices import NOSET, is_left_alone
from aiogpu.core.model.units import CPU, GPU, MEMORY, UNIT
from aiogpu.engines.ray.errors import RetriedFailure
from aiogpu.engines.ray.ray_api import NAMESPACE
from aiogpu.engines.ray.tasks import ahead_at_ray
from aiogpu.errors import OptionError
from aiogpu.serialization.serializer import (
    load_function,
)
from aiogpu.wire.messages import ASYNC, DEFAULT_GROUP, THREADED, Define
from aiogpu.worker.invoke import RetryRules

if TYPE_CHECKING:
    from aiogpu.client.function_spec import ActorTerms, FunctionSpec
    from aiogpu.core.model.request import Bundle, Request, TaskSpec
    from aiogpu.engines.ray.values import Terms


kinds_here: Final[list[str]] = []
"""The kinds of devices that the cluster has whose task this process is."""


_adopted: Final[set[tuple[str, ...]]] = set()


_retrying: Final = RetryRules()


Place = tuple[str, int]
"""The node and the process of an actor."""


RAY_NOSET: Final = "RAY_EXPERIMENTAL_NOSET_"
"""Ray's own switch, before a variable's name; see `accelerators.listing.NOSET`."""


WAITING: Final = 10_000
"""Calls of an actor with coroutines that wait in it for a place in their group."""


CALLS: Final = "aiogpu calls"
"""To Ray, the group of those methods of a threaded actor that name none."""


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


def as_float(parts: int) -> float:
    """The float that Ray, multiplying and truncating, takes for so many parts."""
    whole = parts / UNIT
    if parts % UNIT == 0:
        return whole
    # Half a part more is never a part, and hides what a product falls short of.
    return whole if int(whole * UNIT) == parts else (parts + 0.5) / UNIT


def options_of_task(func: FunctionSpec) -> dict[str, Any]:
    """All that Ray is told once of a function."""
    spec = func.spec
    options = resources_of(spec.shape.request)
    options |= {
        "name": spec.name,
        "max_calls": spec.max_calls,
        "max_retries": spec.max_retries,
    }
    if func.retried:
        options["retry_exceptions"] = [RetriedFailure]
    environ = environ_of(func)
    if environ:
        options["runtime_env"] = {"env_vars": environ}
    if func.window:
        options["num_returns"] = "streaming"
        options["_generator_backpressure_num_objects"] = ahead_at_ray(func.window)
    return options


def environ_of(func: FunctionSpec) -> dict[str, str]:
    """The variables of `runtime_env`, and what they mean in Ray's terms.

    Ray sets the variables of devices by itself, unless its own switch is on.
    """
    switches = {n: v for n, v in os.environ.items() if n.startswith(NOSET)}
    environ = {**switches, **func.environ}
    for variable in [name.removeprefix(NOSET) for name in environ]:
        if is_left_alone(variable, environ):
            environ[RAY_NOSET + variable] = "1"
    return environ


def terms_of(terms: ActorTerms) -> Terms:
    """Return what others need to know who are given a handle."""
    return terms.mode, dict(terms.limits), dict(terms.groups)


def request_of_actor(func: FunctionSpec) -> Request:
    """Return what must be free for an actor to be placed, as Ray is told."""
    request, terms = func.spec.shape.request, func.actor
    assert terms is not None, func
    others = tuple(one for one in request.scalars if one[0] != CPU)
    if terms.keeps_cpus or not (others or request.devices):
        return request
    # Ray would hold the CPU for life of an actor that asks for more than that.
    return replace(request, scalars=others)


def options_of_actor(func: FunctionSpec, key: tuple[str, str] | None) -> dict[str, Any]:
    """All that Ray is told of an actor, but for where it is placed.

    Args:
        func: its class.
        key: its namespace and name, None without.
    """
    spec, terms = func.spec, func.actor
    assert terms is not None, func
    options = resources_of(request_of_actor(func))
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
    environ = environ_of(func)
    if environ:
        options["runtime_env"] = {"env_vars": environ}
    return options


def search_path() -> tuple[str, ...]:
    """Where this program finds its modules, for workers that have these places too."""
    return tuple(os.path.abspath(place) for place in sys.path)


def adopt(places: tuple[str, ...]) -> None:
    """Find modules where the program does, after where this process does."""
    if places in _adopted:
        return
    _adopted.add(places)
    there = [one for one in places if one not in sys.path and os.path.exists(one)]
    sys.path.extend(there)


class Work:
    """A function with what its calls have in common, as it comes to a worker.

    Attributes:
        name: of the task.
        resources: what it holds.
        retried: after which exceptions it is tried again; see `wire.retried`.
        kinds: the kinds of devices that the cluster has.
    """

    def __init__(self, func: FunctionSpec, kinds: tuple[str, ...]) -> None:
        self.name = func.spec.name
        self.resources = dict(func.resources)
        self.retried = func.retried
        self.kinds = kinds
        self._places = search_path()
        self._payload = func.function.payload
        self._loaded: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return f"<Work {self.name}>"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": None}

    def load(self) -> Callable[..., Any]:
        """The function; raises whatever unpickling it raises."""
        if self._loaded is None:
            adopt(self._places)
            self._loaded = load_function(self._payload)
        return self._loaded

    def wants_retry(self, error: BaseException) -> bool:
        """Return whether the options want it tried again after that."""
        if not self.retried:
            return False
        asked = Define(0, 0, self.name, {}, b"", self.retried)
        return _retrying.wants(asked, error)


class Blueprint:
    """A class with its options, as it comes to the process of an actor.

    Attributes:
        name: how errors call the actor.
        resources: what it holds.
        limits: by concurrency group, how many coroutines run at once.
        groups: by method, its group, where it is not the default one.
        kinds: the kinds of devices that the cluster has.
    """

    def __init__(self, func: FunctionSpec, kinds: tuple[str, ...]) -> None:
        assert func.actor is not None, func
        self.name = func.spec.name
        self.resources = dict(func.resources)
        self.limits = dict(func.actor.limits)
        self.groups = dict(func.actor.groups)
        self.kinds = kinds
        self._payload = func.function.payload
        self._places = search_path()

    def __repr__(self) -> str:
        return f"<Blueprint {self.name}>"

    def load(self) -> Any:
        """The class; raises whatever unpickling it raises."""
        adopt(self._places)
        return load_function(self._payload)


class RemoteCode(NamedTuple):
    """What Ray is given to run in its processes, which comes from above the engine.

    Attributes:
        runner, streamer: make of `Work` the function of a task, or of a generator.
        plain_actor, async_actor: the classes that host an actor's object.
    """

    runner: Callable[[Work], Callable[..., Any]]
    streamer: Callable[[Work], Callable[..., Any]]
    plain_actor: type
    async_actor: type
