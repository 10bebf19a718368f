"""The table of the options of tasks, actors, methods and leases, and their effect.

`TaskOptions` has a row for each option: who takes it, how it is checked, its default,
its type and what it is. Everything else about options is made of the rows: the errors
for unknown names, the keywords for type checkers (`api.keywords`, written by `python -m
tests.docs.test_api_page`), and the tables of `docs/options.md`.

User modules import this file in every worker, so asyncio and heavy modules are not
imported here. `accelerators.registry` knows which resource names are devices; in a
worker the node's own devices count as well, because a vendor that the program has
registered is not registered there. Both are consulted only for tasks that name
resources, so that other tasks load neither.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    Self,
    TypedDict,
    TypeVar,
    overload,
)

from aiogpu.client.current import current
from aiogpu.core.model.request import Request
from aiogpu.core.model.units import (
    BY_SHARE,
    CPU,
    GPU,
    GPU_MEMORY,
    MEMORY,
    UNIT,
    device_quantity,
    memory_size,
    quantity,
)
from aiogpu.errors import InfeasibleError, OptionError

if TYPE_CHECKING:
    from aiogpu.core.model.request import DeviceSelector, PlacementGroupSpec, TaskSpec

T = TypeVar("T")


OPTION_OF_RESOURCE: Final = {
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
    for name, amount in named_amounts(option, value):
        amounts[name] = _amount(f"{option}[{name!r}]", name, amount)
    return amounts


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


def named_amounts(option: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield names and quantities, which are not checked; raise `OptionError`."""
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
        if name in OPTION_OF_RESOURCE:
            raise OptionError(
                f"{option} names {name!r}; write {OPTION_OF_RESOURCE[name]}={amount!r} "
                f"instead."
            )
        yield name, amount


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


Check = Callable[[str, object], T]


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


Choices = tuple[Mapping[str, Any], ...]
"""The checked entries of `any_of`."""

Retried = bool | tuple[type[BaseException], ...]


MAX_BUFFERED: Final = 64
"""Items that a generator may be ahead of its consumer by default."""


LARGEST_COUNT: Final = 2**31 - 1
"""The largest count that options take: of calls, items, retries."""


LONGEST_TIME: Final = 10**9
"""The longest time that options take, in seconds: 31 years."""


MOST_RETURNS: Final = 100_000
"""Results of one call at most; each has a handle."""


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


def duration(allowed: str) -> Check[float]:
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


def whole(least: int, allowed: str, most: int = LARGEST_COUNT) -> Check[int]:
    """Return a check for a whole number."""
    return lambda option, value: whole_number(option, value, least, allowed, most)


def choice(allowed: str, *known: str) -> Check[str]:
    """Return a check for one of the known texts."""

    def check(option: str, value: object) -> str:
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


def _check_any_of(option: str, value: object) -> tuple[dict[str, Any], ...]:
    known = TaskOptions.taken_by("choice")
    is_list = isinstance(value, list | tuple) and 0 < len(value) <= MOST_CHOICES
    entries: Any = value if is_list else ()
    if not entries or not all(
        isinstance(entry, Mapping) and entry and entry.keys() <= known.keys()
        for entry in entries
    ):
        raise OptionError(
            f"{option}={value!r} must be a list of 1 to {MOST_CHOICES} dicts, the most "
            f"wanted first, such as {option}=[{{'num_gpus': 1}}, {{'num_cpus': 8}}]; "
            f"an entry may have {', '.join(known)}."
        )
    return tuple(TaskOptions.check(entry, "choice") for entry in entries)


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


# The table of options.

Kind = Literal[
    "task", "actor", "method", "call", "lease", "choice", "gang", "node", "start"
]
"""Who takes an option. "call" is one call of a method, "choice" an entry of `any_of`,
"gang" the ranks of a gang, besides "task" or "actor", "start" is `aiogpu start`."""

Kinds = tuple[Kind, ...]


class Option(Generic[T]):
    """A row of a table of options; what the option is says the table's docstring.

    As an attribute of the options that were given, it is the value or the default.

    Attributes:
        name: the option's name, which is that of the attribute.
        check: returns the checked value of one that was given; raises `OptionError`.
        default: the checked value of an option that was not given.
        kinds: who takes the option.
        type: the type for type checkers, in the words of `api.keywords`.
        takes_none: None means the default; else `check` refuses it.
    """

    name = ""

    def __init__(
        self,
        kinds: Kinds,
        check: Callable[[str, object], T],
        default: T,
        type: str,  # noqa: A002 - what it is
        *,
        takes_none: bool = True,
    ) -> None:
        self.kinds = kinds
        self.check = check
        self.default = default
        self.type = f"{type} | None" if takes_none else type
        self.takes_none = takes_none

    def __set_name__(self, owner: type[OptionTable], name: str) -> None:
        self.name = name

    @overload
    def __get__(self, given: None, owner: object) -> Self: ...

    @overload
    def __get__(self, given: OptionTable, owner: object) -> T: ...

    def __get__(self, given: OptionTable | None, owner: object) -> Self | T:
        # A value that was given is in the instance, and found there first.
        return self if given is None else self.default

    def checked(self, value: object) -> T:
        """Return the checked value; raise `OptionError`."""
        if value is None and self.takes_none:
            return self.default
        return self.check(self.name, value)


class OptionTable:
    """Base of tables of options; an instance has the checked values that were given.

    A table's docstring has a section for each kind: "Of a task:". An option that others
    take as well means the same for them, unless their section says something else.
    """

    _takers: ClassVar[dict[Kind, dict[str, Option[Any]]]]

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]

    def replace(self, **given: Any) -> Self:
        """Return the same options with other checked values for some."""
        return type(self)(**{**vars(self), **given})

    def __init_subclass__(cls) -> None:
        cls._takers = {}
        for row in vars(cls).values():
            for kind in row.kinds if isinstance(row, Option) else ():
                cls._takers.setdefault(kind, {})[row.name] = row

    @classmethod
    def taken_by(cls, kind: Kind) -> Mapping[str, Option[Any]]:
        """Return the options that a function, an actor or so takes, by name."""
        return cls._takers[kind]

    @classmethod
    def check(cls, given: Mapping[str, object], kind: Kind) -> dict[str, Any]:
        """Return the checked values of options.

        Raises:
            OptionError: an option is unknown or invalid.
        """
        known = cls.taken_by(kind)
        for name in given:
            if name not in known:
                raise unknown_option(name, known, _TAKERS[kind])
        return {name: known[name].checked(value) for name, value in given.items()}

    @classmethod
    def docs(cls, kind: Kind) -> dict[str, str]:
        """Return what the options of a kind are, by name, in the order of the table."""
        _, *sections = re.split(r"\n\nOf an? (\w+):\n", inspect.getdoc(cls) or "")
        known = cls.taken_by(kind)
        if not sections:
            return dict.fromkeys(known, "")  # without docstrings, by `python -OO`
        kinds: list[Any] = sections[::2]
        texts = dict(zip(kinds, map(_entries, sections[1::2]), strict=True))
        docs: dict[str, str] = {}
        for of, named in texts.items():
            docs = {**dict.fromkeys(named, f"as for {_TAKERS[of]}."), **docs}
        docs |= texts.get(kind, {})
        return {name: docs[name] for name in known}


def _entries(section: str) -> dict[str, str]:
    """Return the entries "name, name: text" of a section of a docstring, by name."""
    entry = r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)"
    return {
        name: " ".join(text.split())
        for names, text in re.findall(entry, section, re.MULTILINE)
        for name in names.split(", ")
    }


_check_strategy: Final = choice(
    "'pack' (a share goes to the fullest GPU with room) or 'spread' (to the emptiest)",
    "pack",
    "spread",
)
_check_lifetime: Final = choice(
    "None (a task ends with the task that started it) or 'detached' (it goes on until "
    "the node ends)",
    "detached",
)
_check_priority: Final = whole(-LARGEST_COUNT, "a whole number; higher goes first")
_check_max_calls: Final = whole(0, "None, 0 for no limit, or a whole number of calls")
_check_returns: Final = whole(
    1,
    "the number of objects that the function returns; each has its own handle",
    MOST_RETURNS,
)
_check_buffer: Final = whole(1, "a whole number of items, 1 or more, or None for 64")
_check_concurrency: Final = whole(
    1, "a whole number of calls at once, 1 or more, or None"
)
_check_cancel_grace: Final = duration(
    "a number of seconds, 0 to kill at once, or None for the value of init()"
)
_check_stop_grace: Final = duration("a number of seconds, 0 or None for none")
_check_evict_after: Final = duration(
    "a number of seconds, 0 for at once, or None for an actor that always stays"
)


_TAKERS: Final[Mapping[Kind, str]] = {
    "task": "a task",
    "actor": "an actor",
    "method": "a method",
    "call": "a method",
    "lease": "a lease",
    "gang": "a gang",
    "node": "a node",
    "start": "a node",
}


def unknown_option(name: str, known: Iterable[str], of_what: str) -> OptionError:
    """Return the error for an unknown option, with the most similar known one."""
    return OptionError(
        f"{name} is not an option of {of_what}.{did_you_mean(name, known)} The options "
        f"are: {', '.join(known)}."
    )


_AMOUNT: Final[Kinds] = ("task", "actor", "lease", "choice", "gang")
_WHICH: Final[Kinds] = ("task", "actor", "lease", "choice")
_ANY: Final[Kinds] = ("task", "actor", "lease", "gang")
_PROCESS: Final[Kinds] = ("task", "actor", "gang")
_PLACE: Final[Kinds] = ("task", "actor")
_TASK: Final[Kinds] = ("task", "gang")
_ACTOR: Final[Kinds] = ("actor", "gang")
_CALL: Final[Kinds] = ("method", "call")
_RESULT: Final[Kinds] = ("task", "method", "gang")
_NO_AMOUNTS: Final[Mapping[str, int]] = {}
_NO_TEXTS: Final[Mapping[str, str]] = {}
_RETRIES: Final = whole(-1, "a whole number, 0 for none, -1 for no limit")


class TaskOptions(OptionTable):
    """The options of tasks, actors, methods and leases.

    As a value, quantities are in units of 1/10 000; `num_cpus` is None unless it was
    given.

    Of a task:
        num_cpus: CPUs, may be a fraction; default 1.
        num_gpus: below 1 a share of one GPU, otherwise whole GPUs; default 0.
        memory: main memory, in bytes or as a text such as "6GiB". When the machine runs
            short of memory, a task that uses more than this is ended first
            (`OutOfMemoryError`) and retried alone, or beside others if these have not
            ended in 30 s.
        resources: amounts of other resources by name: `{"license": 1}`,
            `{"neuron_cores": 2}`.
        accelerator_type: only devices of this type, such as "A100".
        gpu_where: only GPUs that meet all conditions: `{"memory": "40GiB",
            "compute_capability": "8.0", "name": "*H100*"}`; the first two are minimums.
        gpu_memory: memory on each GPU, with or instead of `num_gpus`: bytes, "6GiB", or
            "share" for the same fraction as `num_gpus`. Frameworks are limited to it.
        retry_oom: "exclusive": when GPU memory runs out, retry once on a whole GPU;
            `["share", "exclusive"]`: before this, once on twice the share.
        any_of: requests of which the first that is free is taken, the most wanted
            first: `[{"num_gpus": 1}, {"num_cpus": 8}]`; instead of the options above.
        gpu_strategy: which GPU a share is taken from: "pack" (default), the fullest GPU
            with room; "spread", the emptiest.
        max_calls: calls of the function before its worker process is replaced, 0 for no
            limit; default 1 with GPUs, else 0.
        max_retries: retries after the worker has died; default 3, -1 for no limit.
        retry_exceptions: exceptions that also cause a retry: True for all, or classes.
        num_returns: number of results, each with its own handle; default 1.
        max_buffered: items that a generator may be ahead of its consumer; default 64.
        name: name in logs, errors and `status()`; default the function's name.
        priority: tasks with a higher number start first; default 0.
        timeout: seconds from `.remote()` until the task is stopped, time in the queue
            included; default no limit.
        run_timeout: seconds of running until the task is stopped; starts again with
            each retry; default no limit.
        cancel_grace: seconds between a cancel or timeout and the kill of the process;
            default the `cancel_grace` of `init`.
        stop_grace: seconds that the task may go on when the program or node stops;
            `get_runtime_context().is_stopping` is True meanwhile; default 0.
        runtime_env: `{"env_vars": {"A": "1"}}`, environment variables of the worker.
        setup: plain function without arguments that runs once in each worker process,
            before the first task of the function; errors are `WorkerSetupError`.
        lifetime: "detached": the task may outlive the task that started it.
        placement: the `aiogpu.placement(...)` to run in. Without `num_cpus` the task
            asks for a CPU only if the bundle has one.
        bundle: index of the bundle, from 0; default any bundle that fits.
        scheduling_strategy: on a Ray cluster, "SPREAD", "DEFAULT" or one of
            `ray.util.scheduling_strategies`, such as node affinity; refused elsewhere.
        label_selector: on a Ray cluster, labels of the node:
            `{"ray.io/accelerator-type": "H100"}`; refused elsewhere.

    Of an actor:
        num_cpus: CPUs held while the actor lives. By default one CPU must be free to
            start the actor, and none is held.
        num_gpus, memory, resources, gpu_memory: as for a task, held while the actor
            lives.
        name: name for `get_actor`; free again when the actor is dead.
        lifetime: "detached": the actor outlives its handles and its program, until it
            is killed or its node ends.
        namespace: namespace of the name; default the program's own.
        get_if_exists: return the living actor with this name, if there is one.
        max_restarts: restarts after the process has died; default 0, -1 for no limit.
        max_task_retries: retries of a call that was running when the process died;
            default 0, -1 for no limit.
        evict_after: the actor may leave the node when nobody calls it and others wait
            for what it holds, at the earliest so many seconds after its constructor has
            returned; its next call brings it back; default None: it always stays.
        max_concurrency: calls that run at once: plain methods in threads (default 1),
            coroutine methods interleaved (default 1000).
        concurrency_groups: calls that run at once in each named group, for
            `@aiogpu.method(concurrency_group=...)`.

    Of a method:
        run_timeout: seconds of running until the caller gets `TaskTimeoutError`; a
            chunk of `map` has this time for all its items together; default no limit.
        concurrency_group: one of the class's `concurrency_groups`.

    Of a lease:
        num_cpus: CPUs, may be a fraction; default 0.
        memory: main memory, in bytes or as a text such as "6GiB".
        name: name in `status()`; default "lease".
        priority: requests with a higher number are served first; default 0.
        timeout: seconds to wait for the lease; default no limit.
    """

    num_cpus = Option(_AMOUNT, quantity, None, "float")
    num_gpus = Option(_AMOUNT, device_quantity, 0, "float")
    memory = Option(_AMOUNT, _check_memory, 0, "int | str")
    resources = Option(_AMOUNT, check_resources, _NO_AMOUNTS, "Mapping[str, float]")
    accelerator_type = Option(_AMOUNT, check_text, None, "str")
    gpu_where = Option(_WHICH, _check_gpu_where, None, "GpuWhere")
    gpu_memory = Option(_AMOUNT, _check_gpu_memory, 0, "int | str")
    retry_oom = Option(("task",), check_retry_oom, None, "RetryOom")
    any_of = Option[Choices](("task",), _check_any_of, (), "Sequence[Choice]")
    gpu_strategy = Option(
        ("task", "actor", "lease"), _check_strategy, "pack", 'Literal["pack", "spread"]'
    )
    max_calls = Option(("task", "choice", "gang"), _check_max_calls, None, "int")
    max_retries = Option(("task",), _RETRIES, 3, "int")
    retry_exceptions = Option[Retried](
        ("task",), _check_retried, False, "RetryExceptions"
    )
    num_returns = Option(("task", *_CALL), _check_returns, 1, "int")
    max_buffered = Option(("task", "method"), _check_buffer, None, "int")
    name = Option(_ANY, check_text, None, "str")
    priority = Option(_ANY, _check_priority, 0, "int")
    timeout = Option(("task", "lease", "gang"), check_seconds, None, "float")
    run_timeout = Option(_RESULT, check_seconds, None, "float")
    cancel_grace = Option(_TASK, _check_cancel_grace, None, "float")
    stop_grace = Option(_TASK, _check_stop_grace, 0.0, "float")
    runtime_env = Option(
        _PROCESS, check_runtime_env, _NO_TEXTS, "Mapping[str, Mapping[str, str]]"
    )
    setup = Option(_TASK, _check_setup, None, "Callable[[], object]")
    lifetime = Option(_PLACE, _check_lifetime, None, 'Literal["detached"]')
    placement = Option(_PLACE, _check_placement, None, "Placement")
    bundle = Option(_PLACE, _check_bundle, -1, "int")
    scheduling_strategy = Option(_PLACE, _check_scheduling_strategy, None, "object")
    label_selector = Option(_PLACE, _check_labels, _NO_TEXTS, "Mapping[str, str]")
    namespace = Option(("actor",), check_text, None, "str")
    get_if_exists = Option(("actor",), check_flag, False, "bool")
    max_restarts = Option(_ACTOR, _RETRIES, 0, "int")
    max_task_retries = Option(("actor",), _RETRIES, 0, "int")
    evict_after = Option(("actor",), _check_evict_after, None, "float")
    max_concurrency = Option(_ACTOR, _check_concurrency, None, "int")
    concurrency_groups = Option(_ACTOR, _check_groups, _NO_AMOUNTS, "Mapping[str, int]")
    concurrency_group = Option(_CALL, check_text, None, "str")

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
            name
            for name, row in self.taken_by("choice").items()
            if self.any_of and getattr(self, name) != row.default
        ]
        given += ["placement"] if self.any_of and self.placement is not None else []
        if given:
            raise OptionError(
                f"any_of lists whole requests, and {given[0]} is given beside it. "
                f"Write {given[0]}= in each entry of any_of, or leave any_of out."
            )
        specs = []
        for entry in self.any_of:
            options = self.replace(any_of=(), **entry)
            check_kinds(options.num_gpus, options.gpu_memory, options.resources)
            specs.append(options.spec(name, function))
        return tuple(specs)

    def actor_spec(self, name: str, function: int) -> TaskSpec:
        """Return the specification for an actor, which holds its lease for life.

        There is no grace period: an orderly end is a message to the actor, not a
        cancelled task.
        """
        from dataclasses import replace

        options = self.replace(
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


def with_options(
    base: TaskOptions, given: Mapping[str, Any], kind: Kind
) -> TaskOptions:
    """Return `base` with other values for the given options; raise `OptionError`."""
    result = base.replace(**TaskOptions.check(given, kind))
    check_kinds(result.num_gpus, result.gpu_memory, result.resources)
    return result
