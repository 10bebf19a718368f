"""Options of actors and methods: keywords for type checkers, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypedDict

from aiogpu.api.keywords import Options
from aiogpu.api.options import (
    CHECKS,
    NO_ENTRIES,
    GpuWhere,
    Lifetime,
    Strategy,
    TaskOptions,
    check_text,
    unknown_option,
    whole,
)
from aiogpu.api.reservation import Placement
from aiogpu.errors import OptionError

if TYPE_CHECKING:
    from aiogpu.core.model.request import DeviceSelector, PlacementGroupSpec, TaskSpec


class ActorKeywords(TypedDict, total=False):
    """The options of an actor, as `@remote(...)` and `.options(...)` take them.

    Counts are at most 2_147_483_647 (2**31 - 1).

    Attributes:
        num_cpus: CPUs that it holds for life; without it one CPU must be free for it
            to be placed, and none is held while it lives.
        num_gpus: below 1 a share of one GPU, else whole ones, held for life.
        memory: main memory in bytes or as a text, "6GiB".
        resources: by name, custom ones such as `{"license": 1}`, or other vendors'
            devices such as `{"neuron_cores": 2}`.
        accelerator_type: only devices of this type, such as "A100".
        gpu_where: only GPUs that fulfil all of these: `{"memory": "40GiB",
            "compute_capability": "8.0", "name": "*H100*"}`, the first two as the least.
        gpu_memory: device memory on each GPU, beside `num_gpus` or in its place, in
            bytes or as a text, "6GiB"; "share" is the part that `num_gpus` is of the
            GPU's. So much is kept for the task, and its frameworks are limited to it.
        strategy: where a share of a GPU goes: "pack", the default, or "spread".
        name: under which `get_actor` finds it; free again when it is dead.
        namespace: of its name; the program's own unless given.
        get_if_exists: give the living actor of that name, if there is one.
        lifetime: None: it ends with its last handle; "detached": it lives until it is
            killed, or its node ends.
        max_restarts: how often it is made anew after its process has died; 0 unless
            given, -1 without end.
        max_task_retries: how often a call is tried again that its process's death
            has hit; 0 unless given, -1 without end.
        max_concurrency: calls that run at once: in threads for plain methods (1
            unless given), interleaved for a class with coroutine methods (1000).
        concurrency_groups: further groups of methods by name, and how many calls of
            each run at once; see `@aiogpu.method(concurrency_group=...)`.
        priority: higher goes first; 0 unless given.
        runtime_env: `{"env_vars": {"A": "1"}}`, variables that its process has.
        placement, bundle: the bundle of a placement in which it lives, as for tasks.
    """

    num_cpus: float | None
    num_gpus: float | None
    memory: int | str | None
    resources: Mapping[str, float] | None
    accelerator_type: str | None
    gpu_where: GpuWhere | None
    gpu_memory: int | str | None
    strategy: Strategy | None
    name: str | None
    namespace: str | None
    get_if_exists: bool | None
    lifetime: Lifetime
    max_restarts: int | None
    max_task_retries: int | None
    max_concurrency: int | None
    concurrency_groups: Mapping[str, int] | None
    priority: int | None
    runtime_env: Mapping[str, Mapping[str, str]] | None
    placement: Placement | None
    bundle: int | None


class AnyKeywords(Options, total=False):
    """What `@remote(...)` takes before it is known what it decorates."""

    namespace: str | None
    get_if_exists: bool | None
    max_restarts: int | None
    max_task_retries: int | None
    max_concurrency: int | None
    concurrency_groups: Mapping[str, int] | None


THREADS: Final = 1
"""Plain methods that run at once unless the options say otherwise."""


INTERLEAVED: Final = 1000
"""Coroutine methods that run at once unless the options say otherwise."""


class ActorOptions(NamedTuple):
    """All options of an actor, checked, with their defaults.

    Quantities are in parts of 1/10 000; `num_cpus` is None unless it was given.
    """

    num_cpus: int | None = None
    num_gpus: int = 0
    memory: int = 0
    resources: Mapping[str, int] = NO_ENTRIES
    accelerator_type: str | None = None
    gpu_where: DeviceSelector | None = None
    gpu_memory: int = 0
    strategy: Any = "pack"
    name: str | None = None
    namespace: str | None = None
    get_if_exists: bool = False
    lifetime: Any = None
    max_restarts: int = 0
    max_task_retries: int = 0
    max_concurrency: int | None = None
    concurrency_groups: Mapping[str, int] = NO_ENTRIES
    priority: int = 0
    runtime_env: Mapping[str, str] = NO_ENTRIES
    placement: PlacementGroupSpec | None = None
    bundle: int = -1

    def spec(self, name: str, function: int) -> TaskSpec:
        """Return what the core is asked for the whole life of an actor.

        Ending its process is final, so no grace is given: whoever wants an orderly
        end tells the actor, and waits.
        """
        from dataclasses import replace

        spec = TaskOptions(
            num_cpus=self.num_cpus,
            num_gpus=self.num_gpus,
            memory=self.memory,
            resources=self.resources,
            accelerator_type=self.accelerator_type,
            gpu_where=self.gpu_where,
            gpu_memory=self.gpu_memory,
            strategy=self.strategy,
            max_calls=1,
            max_retries=self.max_restarts,
            name=self.name and f"{name} {self.name!r}",
            priority=self.priority,
            cancel_grace=0.0,
            runtime_env=self.runtime_env,
            lifetime=self.lifetime,
            placement=self.placement,
            bundle=self.bundle,
        ).spec(name, function)
        return replace(spec, is_endless=True)


class MethodOptions(NamedTuple):
    """The options of one method, as `@aiogpu.method` takes them."""

    num_returns: int = 1
    max_buffered: int | None = None
    concurrency_group: str | None = None


def check_actor_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check options by name; gives them in the form of `ActorOptions`.

    Raises:
        OptionError: names the option, the value and what is allowed.
    """
    return _check(options, ACTOR_CHECKS, "an actor")


def check_method_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same for `MethodOptions`."""
    return _check(options, _METHOD_CHECKS, "a method")


def _check(
    options: Mapping[str, Any],
    checks: Mapping[str, Callable[[str, object], Any]],
    of_what: str,
) -> dict[str, Any]:
    checked = {}
    for name, value in options.items():
        check = checks.get(name)
        if check is None:
            raise unknown_option(name, checks, of_what)
        checked[name] = check(name, value)
    return checked


def _check_groups(option: str, value: object) -> dict[str, int]:
    if value is None:
        return {}
    check = whole(1, "a whole number of calls at once, 1 or more")
    if isinstance(value, Mapping) and all(isinstance(n, str) and n for n in value):
        return {
            name: int(check(f"{option}[{name!r}]", limit) or 1)
            for name, limit in value.items()
        }
    raise OptionError(
        f"{option}={value!r} must be a dict of names to how many calls run at once, "
        f"such as {option}={{'io': 2}}."
    )


def _check_flag(option: str, value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise OptionError(f"{option}={value!r} must be True or False.")


ACTOR_CHECKS: Final[dict[str, Callable[[str, object], Any]]] = {
    **{
        name: CHECKS[name]
        for name in (
            *("num_gpus", "memory", "resources", "accelerator_type", "strategy"),
            *("gpu_where", "gpu_memory"),
            *("name", "lifetime", "priority", "runtime_env", "placement", "bundle"),
        )
    },
    "num_cpus": CHECKS["num_cpus"],
    "namespace": check_text,
    "get_if_exists": _check_flag,
    "max_restarts": whole(-1, "a whole number, 0 for none, -1 for no limit", 0),
    "max_task_retries": whole(-1, "a whole number, 0 for none, -1 for no limit", 0),
    "max_concurrency": whole(1, "a whole number of calls at once, 1 or more, or None"),
    "concurrency_groups": _check_groups,
}


_METHOD_CHECKS: Final[dict[str, Callable[[str, object], Any]]] = {
    "num_returns": CHECKS["num_returns"],
    "max_buffered": CHECKS["max_buffered"],
    "concurrency_group": check_text,
}
