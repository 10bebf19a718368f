"""Checks the options of tasks, actors, methods and leases, and makes their requests.

One table, `CHECKS`, lists the options, who takes them and how each is checked. User
modules import this file in every worker, so asyncio and heavy modules are not imported
here. `accelerators.registry` knows which resource names are devices; in a worker the
node's own devices count as well, because a vendor that the program has registered is
not registered there. Both are consulted only for tasks that name resources, so that
other tasks load neither.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypedDict

from aiogpu.client.current import current
from aiogpu.core.model.request import Request
from aiogpu.core.model.units import (
    BY_SHARE,
    CPU,
    GPU,
    GPU_MEMORY,
    MEMORY,
    TYPE_PREFIX,
    UNIT,
    device_quantity,
    memory_size,
    quantity,
)
from aiogpu.errors import InfeasibleError, OptionError

if TYPE_CHECKING:
    from aiogpu.core.model.request import DeviceSelector, PlacementGroupSpec, TaskSpec


MOST_DEVICES: Final = 10**6
"""Devices of one kind on a node, at most; `num_gpus` included."""


_OWN_OPTIONS: Final = {
    CPU: "num_cpus",
    GPU: "num_gpus",
    MEMORY: "memory",
    GPU_MEMORY: "gpu_memory",
}


def check_resources(option: str, value: object) -> dict[str, int]:
    """Check the resources of a task; return amounts in units of 1/10 000.

    Raises:
        OptionError: the value is not a dict of names to quantities, names CPU or GPU,
            or has a quantity of devices that their vendor does not allow.
    """
    amounts = {}
    for name, amount in _named(option, value):
        amounts[name] = _amount(f"{option}[{name!r}]", name, amount)
    return amounts


def check_declared(option: str, value: object) -> dict[str, float]:
    """Check the resources of a node; return them unchanged.

    Raises:
        OptionError: as `check_resources`, and for a fraction of a device.
    """
    for name, amount in _named(option, value):
        parts = quantity(f"{option}[{name!r}]", amount)
        if is_device(name) and (parts % UNIT or parts > MOST_DEVICES * UNIT):
            raise OptionError(
                f"init({option}={{{name!r}: {amount!r}}}): a node has a whole number "
                f"of devices; give an int from 0 to {MOST_DEVICES}, or leave it out to "
                f"detect them."
            )
    return dict(value) if isinstance(value, Mapping) else {}


def is_device(name: str) -> bool:
    """Return whether a resource is a kind of device, assigned by a variable."""
    from aiogpu.accelerators.registry import kinds

    return name in kinds() or name in current.accelerators


def devices_among(resources: Mapping[str, int]) -> dict[str, int]:
    """Return the amounts of those resources that are devices."""
    return {name: parts for name, parts in resources.items() if is_device(name)}


def check_kinds(num_gpus: int, gpu_memory: int, resources: Mapping[str, int]) -> None:
    """Refuse devices of two vendors in one process: each needs its own runtime.

    Kinds that a user has registered may be combined with any other.

    Raises:
        OptionError: two options exclude each other.
    """
    if not resources:
        return
    from aiogpu.accelerators.registry import KNOWN

    options = ["num_gpus"] if num_gpus else ["gpu_memory"] if gpu_memory else []
    options += (
        f"resources[{entry.kind!r}]" for entry in KNOWN if resources.get(entry.kind)
    )
    if len(options) > 1:
        raise OptionError(
            f"{' and '.join(options)} ask for devices of different vendors, and a "
            f"process can use the devices of only one. Use a separate task or actor "
            f"for each vendor."
        )


def _amount(option: str, name: str, value: object) -> int:
    from aiogpu.accelerators.registry import amount, vendor_of

    vendor = vendor_of(name)
    if vendor is not None:
        return amount(vendor, value)
    if name in current.accelerators:
        return device_quantity(option, value)
    return quantity(option, value)


def _named(option: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping):
        raise OptionError(
            f"{option}={value!r} must be a dict of names to quantities, such as "
            f"{option}={{'license': 1}}."
        )
    for name, amount in value.items():
        if not isinstance(name, str) or not name:
            raise OptionError(
                f"{option} has the key {name!r}; a name must be a text that is not "
                f"empty."
            )
        if name in _OWN_OPTIONS:
            raise OptionError(
                f"{option} names {name!r}; write {_OWN_OPTIONS[name]}={amount!r} "
                f"instead."
            )
        yield name, amount


EXAMPLE: Final = 'aiogpu.placement([{"GPU": 1, "CPU": 2}, {"GPU": 0.5}])'


def _check_placement(option: str, value: object) -> PlacementGroupSpec:
    """Check the placement of a task or an actor; raises `OptionError`."""
    placement_group: PlacementGroupSpec | None = getattr(
        type(value), "placement_group_of", lambda _: None
    )(value)
    if placement_group is None:
        raise OptionError(
            f"{option}={value!r} must be the result of aiogpu.placement(...), or None."
        )
    return placement_group


def _check_bundle(option: str, value: object) -> int:
    from aiogpu.core.model.request import MOST_BUNDLES

    allowed = "the index of a bundle, or -1 for any bundle with room"
    return whole_number(option, value, -1, allowed, MOST_BUNDLES - 1)


def within(
    placement_group: PlacementGroupSpec | None,
    index: int,
    with_cpus: Callable[[int], Request],
    cpus: int | None,
) -> Request:
    """Return the request of a task or actor within a bundle of a placement group.

    Args:
        placement_group: the group.
        index: the index of the bundle, -1 for any.
        with_cpus: returns the request with an amount of CPUs.
        cpus: the amount of CPUs; None for one CPU if the bundle has one, else none.

    Raises:
        OptionError: there is no such bundle.
        InfeasibleError: the request does not fit in the bundle, or in any.
    """
    from dataclasses import replace

    from aiogpu.core.model.request import BundleRef

    if placement_group is None:
        raise OptionError(
            f"bundle={index} is the index of a bundle of a placement; give placement= "
            f"as well."
        )
    if index >= len(placement_group.bundles):
        raise OptionError(
            f"{placement_group.name} has no bundle {index}; its bundles are 0 to "
            f"{len(placement_group.bundles) - 1}: {placement_group}."
        )
    requests = [with_cpus(UNIT), with_cpus(0)] if cpus is None else [with_cpus(cpus)]
    for request in requests:
        if placement_group.holding(index, request):
            return replace(
                request,
                placement_group=BundleRef(
                    placement_group.key, placement_group.name, index
                ),
            )
    which = f"any bundle of {placement_group.name}, {placement_group}"
    if index >= 0:
        bundle = placement_group.bundles[index]
        which = f"bundle {index} of {placement_group.name}, {bundle}"
    raise InfeasibleError(
        f"{requests[-1]} does not fit into {which}. Ask for less, or use a placement "
        f"with larger bundles."
    )


def placement_group_of(
    bundles: object, strategy: object, name: str, key: str
) -> PlacementGroupSpec:
    """Return the specification of a placement group.

    Raises:
        OptionError: a value is invalid.
    """
    from aiogpu.core.model.request import MOST_BUNDLES, STRATEGIES, PlacementGroupSpec

    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        allowed = ", ".join(map(repr, STRATEGIES))
        raise OptionError(f"strategy={strategy!r} must be one of {allowed}.")
    if isinstance(bundles, str | bytes | Mapping) or not isinstance(bundles, Iterable):
        raise OptionError(
            f"bundles={bundles!r} must be a list of dicts, such as {EXAMPLE}."
        )
    requests = tuple(_bundle(f"bundles[{i}]", one) for i, one in enumerate(bundles))
    if not 0 < len(requests) <= MOST_BUNDLES:
        raise OptionError(
            f"bundles has {len(requests)} entries; give 1 to {MOST_BUNDLES}, such as "
            f"{EXAMPLE}."
        )
    return PlacementGroupSpec(key, name, strategy, requests)


def _bundle(option: str, value: object) -> Request:
    if not isinstance(value, Mapping):
        raise OptionError(
            f"{option}={value!r} must be a dict of names to quantities, such as "
            f'{{"GPU": 1, "CPU": 2}}.'
        )
    rest: dict[object, Any] = dict(value)
    for name, resource in (("num_cpus", CPU), ("num_gpus", GPU)):  # as for tasks
        if name in rest:
            if resource in rest:
                raise OptionError(f"{option}={value!r} has both {name} and {resource}.")
            rest[resource] = rest.pop(name)
    amounts = {name: rest.pop(name) for name in (CPU, GPU, MEMORY) if name in rest}
    gpu_memory = 0
    if GPU_MEMORY in rest:
        gpu_memory = check_size(f"{option}['gpu_memory']", rest.pop(GPU_MEMORY))
    of_types = [
        name.removeprefix(TYPE_PREFIX)
        for name in rest
        if isinstance(name, str) and name.startswith(TYPE_PREFIX)
    ]
    if len(of_types) > 1:
        raise OptionError(f"{option} names more than one accelerator_type.")
    for of_type in of_types:
        del rest[TYPE_PREFIX + of_type]
    scalars = check_resources(option, rest)
    devices = devices_among(scalars)
    for kind in devices:
        del scalars[kind]
    devices[GPU] = device_quantity(f"{option}['GPU']", amounts.get(GPU, 0))
    scalars[CPU] = quantity(f"{option}['CPU']", amounts.get(CPU, 0))
    scalars[MEMORY] = UNIT * memory_size(f"{option}['memory']", amounts.get(MEMORY, 0))
    request = Request.of(scalars, devices, *of_types, gpu_memory=gpu_memory)
    if not request.scalars and not request.devices:
        raise OptionError(
            f"{option}={value!r} asks for nothing; give at least one amount above 0, "
            f'such as {{"GPU": 1, "CPU": 2}}.'
        )
    return request


Check = Callable[[str, object], Any]


RetryOom = Literal["exclusive"] | Sequence[Literal["share", "exclusive"]]


def check_retry_oom(option: str, value: object) -> tuple[str, ...]:
    """Check a `retry_oom`; return the attempts in their order."""
    attempts = tuple(value) if isinstance(value, list | tuple) else (value,)
    if attempts in (("exclusive",), ("share", "exclusive")):
        return attempts
    raise OptionError(
        f"{option}={value!r} must be None, 'exclusive' (a task that ran out of GPU "
        f"memory is retried once on a whole GPU) or ['share', 'exclusive'] (before "
        f"this, once on twice its share)."
    )


_CAPABILITY: Final = r"([0-9]{1,3})(?:\.([0-9]{1,3}))?"


class GpuWhere(TypedDict, total=False):
    """Conditions that each GPU must meet, all of them.

    Attributes:
        memory: minimum device memory, in bytes or as a text, "40GiB".
        compute_capability: minimum version, such as "8.0".
        name: shell pattern for the product name, such as "*H100*"; case-insensitive.
    """

    memory: int | str
    compute_capability: str | float
    name: str


def check_size(option: str, value: object) -> int:
    """Check a number of bytes above 0 for each GPU; raises `OptionError`."""
    count = memory_size(option, value)
    if count == 0:
        raise OptionError(
            f"{option}={value!r} asks for nothing; leave it out, or give an amount of "
            f'memory on each GPU, such as "6GiB".'
        )
    return count


def _check_gpu_memory(option: str, value: object) -> int:
    """Return bytes for each GPU, `BY_SHARE` for "share"; raises `OptionError`."""
    if isinstance(value, str) and value == "share":
        return BY_SHARE
    try:
        return check_size(option, value)
    except OptionError as error:
        raise OptionError(
            f"{error} Or write {option}='share' for the same fraction of the memory as "
            f"num_gpus is of the GPU."
        ) from None


def _check_gpu_where(option: str, value: object) -> DeviceSelector:
    """Convert a `GpuWhere`; raises `OptionError`."""
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
    from aiogpu.core.model.request import DeviceSelector  # rarely used

    return DeviceSelector(**where)


def _capability(option: str, value: object) -> tuple[int, int]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    text = str(value) if is_number or isinstance(value, str) else ""
    match = re.fullmatch(_CAPABILITY, text.strip())
    if match is None:
        raise OptionError(
            f"{option}['compute_capability']={value!r} must be a version such as "
            f'"8.0"; `aiogpu gpus` lists the version of each GPU.'
        )
    return int(match[1]), int(match[2] or 0)


def _pattern(option: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise OptionError(
            f"{option}['name']={value!r} must be a pattern for the product name, such "
            f'as "*H100*".'
        )
    return value.lower()


CUDA: Final = "CUDA_VISIBLE_DEVICES"


ORDER: Final = "CUDA_DEVICE_ORDER"


HIP: Final = "HIP_VISIBLE_DEVICES"


ROCR: Final = "ROCR_VISIBLE_DEVICES"


BY_BUS: Final = "PCI_BUS_ID"


def check_runtime_env(option: str, value: object) -> dict[str, str]:
    """Check a `runtime_env`; return its variables.

    Raises:
        OptionError: the value is invalid, or sets a variable by which aiogpu assigns
            devices.
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
    """Refuse variables that conflict with the assignment of devices."""
    from aiogpu.accelerators.listed_devices import NOSET, is_left_alone
    from aiogpu.accelerators.registry import variables as managed

    for name in managed():
        if name in variables and not is_left_alone(name, variables):
            raise OptionError(
                f"{option}['env_vars'] sets {name}, which aiogpu sets to the devices "
                f"of the task. Leave it out, or add {NOSET}{name}='1' to manage it "
                f"yourself."
            )
    if ROCR in variables and not is_left_alone(HIP, variables):
        raise OptionError(
            f"{option}['env_vars'] sets {ROCR}, and {HIP} numbers only the GPUs that "
            f"{ROCR} leaves visible: the task would see GPUs that are not its own. "
            f"Leave it out, or add {NOSET}{HIP}='1' to manage both yourself."
        )
    order = variables.get(ORDER)
    if order not in (None, BY_BUS) and not is_left_alone(CUDA, variables):
        raise OptionError(
            f"{option}['env_vars'] sets {ORDER}={order!r}, but aiogpu sets {CUDA} in "
            f"bus order: the task would see GPUs that are not its own. Leave it out; "
            f"or set it in the environment of the whole program, so that aiogpu uses "
            f"UUIDs; or add {NOSET}{CUDA}='1' to manage both yourself."
        )


def _is_variable(name: str, text: str) -> bool:
    try:
        os.fsencode(name + text)
    except UnicodeEncodeError:
        return False
    return bool(name) and "=" not in name and "\0" not in name + text


Retried = bool | tuple[type[BaseException], ...]


GpuStrategy = Literal["pack", "spread"]


Lifetime = Literal["detached"] | None


MAX_BUFFERED: Final = 64
"""Items that a generator may be ahead of its consumer by default."""


LARGEST_COUNT: Final = 2**31 - 1
"""The largest count that options take: of calls, items, retries."""


LONGEST_TIME: Final = 10**9
"""The longest time that options take, in seconds: 31 years."""


MOST_RETURNS: Final = 100_000
"""Results of one call at most; each has a handle."""


NO_ENTRIES: Final[Mapping[str, Any]] = {}
"""The default of options that are dicts; never written to."""


class TaskOptions(NamedTuple):
    """The options of a task or an actor, checked, with their defaults.

    Quantities are in units of 1/10 000; `num_cpus` is None unless it was given.
    """

    num_cpus: int | None = None
    num_gpus: int = 0
    memory: int = 0
    resources: Mapping[str, int] = NO_ENTRIES
    accelerator_type: str | None = None
    gpu_where: DeviceSelector | None = None
    gpu_memory: int = 0
    retry_oom: tuple[str, ...] | None = None
    any_of: tuple[Mapping[str, Any], ...] = ()
    gpu_strategy: GpuStrategy = "pack"
    max_calls: int | None = None
    max_retries: int = 3
    retry_exceptions: Retried = False
    num_returns: int = 1
    max_buffered: int | None = None
    name: str | None = None
    priority: int = 0
    timeout: float | None = None
    run_timeout: float | None = None
    cancel_grace: float | None = None
    stop_grace: float = 0.0
    runtime_env: Mapping[str, str] = NO_ENTRIES
    setup: Callable[[], object] | None = None
    lifetime: Lifetime = None
    placement: PlacementGroupSpec | None = None
    bundle: int = -1
    scheduling_strategy: object = None
    label_selector: Mapping[str, str] = NO_ENTRIES
    namespace: str | None = None
    get_if_exists: bool = False
    max_restarts: int = 0
    max_task_retries: int = 0
    evict_after: float | None = None
    max_concurrency: int | None = None
    concurrency_groups: Mapping[str, int] = NO_ENTRIES

    def request(self) -> Request:
        """Return the request of the task.

        Raises:
            OptionError: an option about GPUs (`gpu_where`, `retry_oom`,
                `gpu_memory="share"`) is given without a GPU.
        """
        if self.gpu_where is not None and not (self.num_gpus or self.gpu_memory):
            raise OptionError(
                f"gpu_where selects GPUs with {self.gpu_where}, but the task asks for "
                f"no GPU; give num_gpus= or gpu_memory= as well."
            )
        if self.retry_oom and not (self.num_gpus or self.gpu_memory):
            raise OptionError(
                "retry_oom retries a task that ran out of GPU memory, but the task "
                "asks for no GPU; give num_gpus= or gpu_memory= as well."
            )
        if self.gpu_memory == BY_SHARE and not self.num_gpus:
            raise OptionError(
                "gpu_memory='share' is the same fraction of a GPU's memory as num_gpus "
                "is of the GPU, but num_gpus is 0; give num_gpus= as well, or an "
                'amount such as gpu_memory="6GiB".'
            )
        scalars, devices = self.resources, {GPU: self.num_gpus}
        if scalars:
            devices |= devices_among(scalars)
            scalars = {k: v for k, v in scalars.items() if k not in devices}

        def with_cpus(cpus: int) -> Request:
            return Request.of(
                {CPU: cpus, MEMORY: self.memory, **scalars},
                devices,
                self.accelerator_type,
                spread=self.gpu_strategy == "spread",
                where=self.gpu_where,
                gpu_memory=self.gpu_memory,
            )

        if self.placement is not None or self.bundle >= 0:
            return within(self.placement, self.bundle, with_cpus, self.num_cpus)
        return with_cpus(UNIT if self.num_cpus is None else self.num_cpus)

    def ray_options(self) -> dict[str, object]:
        """Return the options that choose among the nodes of a Ray cluster.

        Raises:
            OptionError: two of the options place the task.
        """
        strategy = self.scheduling_strategy
        if strategy is not None and self.placement is not None:
            raise OptionError(
                "scheduling_strategy= and placement= each say where a task runs on a "
                "Ray cluster; give one of them."
            )
        options: dict[str, object] = {}
        if strategy is not None:
            options["scheduling_strategy"] = strategy
        if self.label_selector:
            options["label_selector"] = dict(self.label_selector)
        return options

    def spec(self, name: str, function: int) -> TaskSpec:
        """Return the specification for the scheduler.

        A task with GPUs or other devices runs in a process of its own unless
        `max_calls` is given: a vendor's runtime frees device memory only when the
        process ends. `.options(num_gpus=1)` on a CPU function has the same effect.

        Args:
            name: the function's name.
            function: the function's id.
        """
        from aiogpu.core.model.request import Shape, TaskSpec

        if self.any_of:
            choices = self.choices(name, function)
            return choices[0] if len(choices) == 1 else TaskSpec.any_of(choices)
        request, max_calls = self.request(), self.max_calls
        if max_calls is None:
            max_calls = 1 if request.devices else 0
        return TaskSpec(
            name=self.name or name,
            shape=Shape(request, tuple(sorted(self.runtime_env.items()))),
            function=function,
            max_calls=max_calls,
            max_retries=self.max_retries,
            priority=self.priority,
            timeout=self.timeout,
            run_timeout=self.run_timeout,
            cancel_grace=self.cancel_grace,
            stop_grace=self.stop_grace,
            is_detached=self.lifetime is not None,
            retries_oom=self.retry_oom is not None,
            doubles_share="share" in (self.retry_oom or ()),
        )

    def choices(self, name: str, function: int) -> tuple[TaskSpec, ...]:
        """Return a specification for each request of `any_of`; empty without it.

        Raises:
            OptionError: a request is invalid, or options beside `any_of` ask for
                resources.
        """
        given = [
            option
            for option in OF_A_CHOICE
            if self.any_of and getattr(self, option) != _DEFAULTS[option]
        ]
        given += ["placement"] if self.any_of and self.placement is not None else []
        if given:
            raise OptionError(
                f"any_of lists whole requests, and {given[0]} is given beside it. "
                f"Write {given[0]}= in each entry of any_of, or leave any_of out."
            )
        specs = []
        for entry in self.any_of:
            options = self._replace(any_of=(), **entry)
            check_kinds(options.num_gpus, options.gpu_memory, options.resources)
            specs.append(options.spec(name, function))
        return tuple(specs)

    def actor_spec(self, name: str, function: int) -> TaskSpec:
        """Return the specification for an actor, which holds its lease for life.

        There is no grace period: an orderly end is a message to the actor, not a
        cancelled task.
        """
        from dataclasses import replace

        options = self._replace(
            max_calls=1,
            max_retries=self.max_restarts,
            name=self.name and f"{name} {self.name!r}",
            cancel_grace=0.0,
        )
        return replace(
            options.spec(name, function),
            is_endless=True,
            is_evictable=self.evict_after is not None,
        )


def check_options(options: Mapping[str, Any], taker: str = "task") -> dict[str, Any]:
    """Check options by name; return them in the form of `TaskOptions`.

    Args:
        options: the options as given.
        taker: a key of `CHECKS`: "task", "actor", "method" or "lease".

    Raises:
        OptionError: an option is unknown or invalid.
    """
    checks = CHECKS[taker]
    for name in options:
        if name not in checks:
            what = f"an {taker}" if taker == "actor" else f"a {taker}"
            raise unknown_option(name, checks, what)
    return {
        name: _DEFAULTS[name] if value is None else checks[name](name, value)
        for name, value in options.items()
    }


def merged(
    base: TaskOptions, options: Mapping[str, Any], taker: str = "task"
) -> TaskOptions:
    """Return `base` with checked options replaced; raises `OptionError`."""
    result = base._replace(**check_options(options, taker))
    check_kinds(result.num_gpus, result.gpu_memory, result.resources)
    return result


def not_buffered(name: str) -> OptionError:
    """Return the error for `max_buffered` on a function that is no generator."""
    return OptionError(
        f"max_buffered is an option of generators, and {name} is not a generator; "
        f"leave it out, or let {name} yield items."
    )


def not_counted(name: str, value: int) -> OptionError:
    """Return the error for `num_returns` on a generator."""
    return OptionError(
        f"num_returns={value!r} does not apply to {name}, a generator, whose items "
        f"come one by one; leave it out."
    )


def unknown_option(name: str, known: Mapping[str, object], of_what: str) -> OptionError:
    """Return the error for an unknown option, with the most similar known one."""
    return OptionError(
        f"{name} is not an option of {of_what}.{did_you_mean(name, known)} The options "
        f"are: {', '.join(known)}."
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "Did you mean ...?" with the most similar known name, or ""."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def check_text(option: str, value: object) -> str | None:
    """Check a text that may be None; raises `OptionError`."""
    if value is None or (isinstance(value, str) and value):
        return value
    raise OptionError(f"{option}={value!r} must be a text that is not empty, or None.")


def check_duration(
    option: str, value: object, allowed: str, is_zero_allowed: bool = True
) -> float:
    """Check a number of seconds; raises `OptionError` with `allowed`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= LONGEST_TIME
        or not (value or is_zero_allowed)
    ):
        raise OptionError(
            f"{option}={value!r} must be {allowed}. The maximum is {LONGEST_TIME:_}."
        )
    return float(value)


def check_seconds(option: str, value: object) -> float:
    """Check a duration above zero; raises `OptionError`."""
    allowed = "a number of seconds above 0, such as 2.5"
    return check_duration(option, value, allowed, is_zero_allowed=False)


def check_wait(option: str, value: object) -> float:
    """Check how long to wait, which may be 0; raises `OptionError`."""
    return check_duration(option, value, "a number of seconds, 0 or more, such as 2.5")


def duration(allowed: str) -> Check:
    """Return a check for a number of seconds, 0 or more."""
    return lambda option, value: check_duration(option, value, allowed)


def whole_number(
    option: str, value: object, least: int, allowed: str, most: int = LARGEST_COUNT
) -> int:
    """Check a whole number; raises `OptionError` with `allowed`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not least <= value <= most
    ):
        raise OptionError(
            f"{option}={value!r} must be {allowed}. The minimum is {least:_}, the "
            f"maximum {most:_}."
        )
    return value


def whole(least: int, allowed: str, most: int = LARGEST_COUNT) -> Check:
    """Return a check for a whole number."""
    return lambda option, value: whole_number(option, value, least, allowed, most)


def choice(allowed: str, *known: str) -> Check:
    """Return a check for one of the known texts."""

    def check(option: str, value: object) -> Any:
        if isinstance(value, str) and value in known:
            return value
        raise OptionError(f"{option}={value!r} must be {allowed}.")

    return check


def _check_scheduling_strategy(option: str, value: object) -> object:
    """Check one of Ray's strategies, which Ray itself reads; raises `OptionError`."""
    is_of_ray = type(value).__module__.partition(".")[0] == "ray"
    if is_of_ray or value in ("SPREAD", "DEFAULT"):
        return value
    raise OptionError(
        f"{option}={value!r} must be 'SPREAD', 'DEFAULT' or a strategy of "
        f"ray.util.scheduling_strategies, such as NodeAffinitySchedulingStrategy(...)."
    )


def _check_labels(option: str, value: object) -> dict[str, str]:
    """Check a selector of nodes; raises `OptionError`."""
    if isinstance(value, Mapping) and all(
        isinstance(text, str) for item in value.items() for text in item
    ):
        return dict(value)
    raise OptionError(
        f"{option}={value!r} must be a dict of labels of nodes to values, such as "
        f"{{'ray.io/accelerator-type': 'H100'}}."
    )


def optional(check: Check, none_is: object) -> Check:
    """Return a check that replaces None by `none_is`."""
    return lambda option, value: none_is if value is None else check(option, value)


def _check_retried(option: str, value: object) -> Retried:
    if isinstance(value, bool):
        return value
    kinds = tuple(value) if isinstance(value, list | tuple) else (value,)
    retried = tuple(
        kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Exception)
    )
    if kinds and len(retried) == len(kinds):
        return retried
    raise OptionError(
        f"{option}={value!r} must be True, False, or exception classes, such as "
        f"{option}=[OSError]."
    )


MOST_CHOICES: Final = 8
"""The most requests of one `any_of`."""


OF_A_CHOICE: Final = (
    "num_cpus",
    "num_gpus",
    "memory",
    "resources",
    "accelerator_type",
    "gpu_where",
    "gpu_memory",
    "max_calls",
)
"""The options that an entry of `any_of` may have."""


def _check_any_of(option: str, value: object) -> tuple[dict[str, Any], ...]:
    is_list = isinstance(value, list | tuple) and 0 < len(value) <= MOST_CHOICES
    entries: Any = value if is_list else ()
    if not entries or not all(
        isinstance(entry, Mapping) and entry and set(entry) <= set(OF_A_CHOICE)
        for entry in entries
    ):
        raise OptionError(
            f"{option}={value!r} must be a list of 1 to {MOST_CHOICES} dicts, the most "
            f"wanted first, such as {option}=[{{'num_gpus': 1}}, {{'num_cpus': 8}}]; "
            f"an entry may have {', '.join(OF_A_CHOICE)}."
        )
    return tuple(check_options(entry) for entry in entries)


def _check_setup(option: str, value: object) -> Callable[[], object]:
    if callable(value) and not hasattr(value, "__aiogpu_function__"):
        from inspect import iscoroutinefunction, signature

        try:
            signature(value).bind()
            is_fit = not iscoroutinefunction(value)
        except TypeError:
            is_fit = False  # it needs arguments
        except ValueError:
            is_fit = True  # a builtin without a signature
        if is_fit:
            return value
    raise OptionError(
        f"{option}={value!r} must be a plain function without arguments, which runs "
        f"once in each worker process before the first task of the function; no "
        f"`async def` and no remote function."
    )


def _check_memory(option: str, value: object) -> int:
    return memory_size(option, value) * UNIT


THREADS: Final = 1
"""Default of `max_concurrency` for a class of plain methods."""


INTERLEAVED: Final = 1000
"""Default of `max_concurrency` for a class with coroutine methods."""


class MethodOptions(NamedTuple):
    """The options of one method, as `@aiogpu.method` takes them."""

    num_returns: int = 1
    max_buffered: int | None = None
    run_timeout: float | None = None
    concurrency_group: str | None = None


def _check_groups(option: str, value: object) -> dict[str, int]:
    if isinstance(value, Mapping) and all(isinstance(n, str) and n for n in value):
        allowed = "a whole number of calls at once, 1 or more"
        return {
            name: whole_number(f"{option}[{name!r}]", limit, 1, allowed)
            for name, limit in value.items()
        }
    raise OptionError(
        f"{option}={value!r} must be a dict of group names to numbers of calls that "
        f"run at once, such as {option}={{'io': 2}}."
    )


def check_flag(option: str, value: object) -> bool:
    """Check a switch; raises `OptionError`."""
    if isinstance(value, bool):
        return value
    raise OptionError(f"{option}={value!r} must be True or False.")


_retries: Final = "a whole number, 0 for none, -1 for no limit"


_COMMON: Final[dict[str, Check]] = {
    "num_cpus": quantity,
    "num_gpus": device_quantity,
    "memory": _check_memory,
    "resources": check_resources,
    "accelerator_type": check_text,
    "gpu_where": _check_gpu_where,
    "gpu_memory": _check_gpu_memory,
    "gpu_strategy": choice(
        "'pack' (a share goes to the fullest GPU with room) or 'spread' (to the "
        "emptiest)",
        "pack",
        "spread",
    ),
    "name": check_text,
    "priority": whole(-LARGEST_COUNT, "a whole number; higher goes first"),
}
"""Options of tasks, actors and leases."""


_OF_PROCESSES: Final[dict[str, Check]] = {
    "runtime_env": check_runtime_env,
    "lifetime": choice(
        "None (a task ends with the task that started it) or 'detached' (it goes on "
        "until the node ends)",
        "detached",
    ),
    "placement": _check_placement,
    "bundle": _check_bundle,
    "scheduling_strategy": _check_scheduling_strategy,
    "label_selector": _check_labels,
}
"""Options of tasks and actors."""


_OF_RESULTS: Final[dict[str, Check]] = {
    "num_returns": whole(
        1,
        "the number of objects that the function returns; each has its own handle",
        MOST_RETURNS,
    ),
    "max_buffered": whole(1, "a whole number of items, 1 or more, or None for 64"),
}
"""Options of tasks and methods."""


CHECKS: Final[dict[str, dict[str, Check]]] = {
    "task": {
        **_COMMON,
        "retry_oom": check_retry_oom,
        "any_of": _check_any_of,
        "max_calls": whole(0, "None, 0 for no limit, or a whole number of calls"),
        "max_retries": whole(-1, _retries),
        "retry_exceptions": _check_retried,
        **_OF_RESULTS,
        "timeout": check_seconds,
        "run_timeout": check_seconds,
        "cancel_grace": duration(
            "a number of seconds, 0 to kill at once, or None for the value of init()"
        ),
        "stop_grace": duration("a number of seconds, 0 or None for none"),
        "setup": _check_setup,
        **_OF_PROCESSES,
    },
    "actor": {
        **_COMMON,
        "namespace": check_text,
        "get_if_exists": check_flag,
        **_OF_PROCESSES,
        "max_restarts": whole(-1, _retries),
        "max_task_retries": whole(-1, _retries),
        "evict_after": duration(
            "a number of seconds, 0 for at once, or None for an actor that always stays"
        ),
        "max_concurrency": whole(
            1, "a whole number of calls at once, 1 or more, or None"
        ),
        "concurrency_groups": _check_groups,
    },
    "method": {
        **_OF_RESULTS,
        "run_timeout": check_seconds,
        "concurrency_group": check_text,
    },
    "lease": {**_COMMON, "timeout": check_seconds},
}
"""The checks of all options; each returns the value for `TaskOptions`.

None means the default of any option."""


_DEFAULTS: Final = TaskOptions._field_defaults | MethodOptions._field_defaults
