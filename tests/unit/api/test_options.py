"""Allowed and refused options of tasks, nodes, leases and placements."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pytest

import aiogpu
from aiogpu.accelerators.registry import variables
from aiogpu.api.node import check_node_options
from aiogpu.api.options import (
    LARGEST_COUNT,
    LONGEST_TIME,
    TaskOptions,
)
from aiogpu.api.reservation import Placement, lease_func, placement_group_of
from aiogpu.client.current import current
from aiogpu.core.model.request import MOST_BUNDLES, Request, TaskSpec
from aiogpu.core.model.units import BY_SHARE
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import MisuseError, OptionError


def check_options(options: dict[str, Any]) -> dict[str, Any]:
    return TaskOptions.check(options, "task")


def checked(**options: Any) -> TaskOptions:
    return TaskOptions(**check_options(options))


def spec(**options: Any) -> TaskSpec:
    return checked(**options).spec("train", 7)


class Flag(str):
    """A subclass of str."""


# Values of the options of tasks.

QUANTITIES = [
    *[(0, 0), (0.25, 2_500), (1, 10_000), (2.0, 20_000), (1 / 3, 3_333)],
    *[(0.57, 5_700), (0.0001, 1), (0.99999, 9_999), (np.float64(0.1), 1_000)],
]

NO_QUANTITIES = [
    *((value, "not a quantity") for value in (-1, -0.5, math.nan, math.inf, 10**400)),
    *[(1e-5, "finer than 1/10000"), ("1", "is a str"), (b"1", "is a bytes")],
    *[(True, "is a bool"), ([1], "is a list"), (1j, "is a complex")],
    (np.int64(1), "is an int64"),
]


@pytest.mark.parametrize(("value", "parts"), QUANTITIES)
def test_quantities_become_ten_thousandths(value: object, parts: int) -> None:
    for option in ("num_cpus", "num_gpus"):
        assert check_options({option: value}) == {option: parts}


@pytest.mark.parametrize(("value", "reason"), NO_QUANTITIES)
def test_other_values_are_no_quantities(value: object, reason: str) -> None:
    for options, name in (
        ({"num_cpus": value}, "num_cpus"),
        ({"num_gpus": value}, "num_gpus"),
        ({"resources": {"license": value}}, "resources['license']"),
    ):
        with pytest.raises(OptionError) as caught:
            check_options(options)
        assert f"{name}={value!r}" in str(caught.value)
        assert reason in str(caught.value)


GOOD: Final[dict[str, list[tuple[object, object]]]] = {
    "num_cpus": [(1.5, 15_000)],
    "resources": [
        ({}, {}),
        ({"license": 2, "tpu": 0.5}, {"license": 20_000, "tpu": 5_000}),
        (OrderedDict(a=1), {"a": 10_000}),
        (MappingProxyType({"a": 1}), {"a": 10_000}),
        ({"accelerator_type:A100": 0.001}, {"accelerator_type:A100": 10}),
    ],
    "accelerator_type": [("A100", "A100"), (None, None)],
    "gpu_strategy": [
        ("pack", "pack"),
        (Flag("spread"), "spread"),
        (None, "pack"),
    ],
    "max_calls": [(0, 0), (12, 12), (None, None)],
    "max_retries": [(-1, -1), (0, 0)],
    "retry_exceptions": [
        *((value, value) for value in (True, False)),
        (OSError, (OSError,)),
        ([OSError, KeyError], (OSError, KeyError)),
        ((ExceptionGroup,), (ExceptionGroup,)),
    ],
    "num_returns": [(1, 1), (None, 1), (1000, 1000)],
    "name": [("embed", "embed"), (Flag("embed"), "embed")],
    "priority": [(value, value) for value in (-5, LARGEST_COUNT, -LARGEST_COUNT)],
    "timeout": [(1, 1.0), (0.001, 0.001), (LONGEST_TIME, LONGEST_TIME)],
    "cancel_grace": [(None, None), (0, 0.0), (30, 30.0), (0.05, 0.05)],
    "runtime_env": [
        ({}, {}),
        ({"env_vars": {}}, {}),
        ({"env_vars": {"A": "b=c\n", "B": ""}}, {"A": "b=c\n", "B": ""}),
        ({"env_vars": {"A": "\udc80"}}, {"A": "\udc80"}),
        (MappingProxyType({"env_vars": {"A": "1"}}), {"A": "1"}),
    ],
    "lifetime": [(None, None), (Flag("detached"), "detached")],
}


@pytest.mark.parametrize("option", GOOD)
def test_valid_options_of_tasks_are_accepted(option: str) -> None:
    for value, expected in GOOD[option]:
        assert check_options({option: value}) == {option: expected}


class NoException:
    """A class that is no exception."""


NO_TIMES: Final = (-1, True, "1", math.nan, math.inf)
NO_EXCEPTIONS: Final = (
    *([], (), 1, "OSError", {OSError}, OSError(), NoException, list[int], [True]),
    *(BaseException, KeyboardInterrupt, SystemExit, asyncio.CancelledError),
    *([OSError, GeneratorExit], [OSError, None], BaseExceptionGroup),
)
NO_ENVIRONMENTS: Final = (
    *(None, [], "A=1", {"A": 1}, {1: "A"}, {"A": None}, {"": "1"}, {"A=B": "1"}),
    *({"A\0": "1"}, {"A": "\0"}, {"A": "\ud800"}),
)
NO_STRATEGIES: Final = ("Spread", "", True, 1, ["pack"], b"spread", np.zeros(2))
NO_LIFETIMES: Final = ("", "Detached", True, 0, ["detached"], np.zeros(2))
BAD: Final[list[tuple[str, str, tuple[object, ...]]]] = [
    ("num_gpus", "mixes whole devices", (1.5, 2.0001, 1.1)),
    ("resources", "a dict of names", ([("a", 1)], "a", 1, {"a"})),
    ("resources", "name must be a text", ({"": 1}, {1: 1})),
    ("resources", "NoneType", ({"a": None},)),
    ("resources", "write num_cpus=0.5 instead", ({"CPU": 0.5},)),
    ("resources", "write num_gpus=0.5 instead", ({"GPU": 0.5},)),
    ("accelerator_type", "a text", ("", 1, b"A100", ["A100"])),
    (
        "gpu_strategy",
        "must be 'pack' (a share goes to the fullest GPU with room) or 'spread'",
        NO_STRATEGIES,
    ),
    ("lifetime", "must be None (a task ends with", NO_LIFETIMES),
    ("max_calls", "0 for no limit", (-1, 1.0, True, "1")),
    ("max_retries", "-1 for no limit", (-2, 1.0, False, "1")),
    ("priority", "higher goes first", (1.5, True, "high")),
    ("num_returns", "its own handle", (0, -1, True, 2.0, "2", "dynamic", [2])),
    ("name", "a text", ("", 1, b"a")),
    ("timeout", "seconds above 0", (0, 10**400, *NO_TIMES)),
    (
        "cancel_grace",
        "seconds, 0 to kill at once, or None",
        (-0.1, False, np.zeros(2), *NO_TIMES),
    ),
    ("retry_exceptions", "True, False, or exception classes", NO_EXCEPTIONS),
    ("runtime_env", "'env_vars'", ([], "env", {"pip": []}, {1: 2})),
    ("runtime_env", "'env_vars'", ({"env_vars": {}, "pip": []},)),
    (
        "runtime_env",
        "a dict of texts to texts",
        tuple({"env_vars": value} for value in NO_ENVIRONMENTS),
    ),
]


@pytest.mark.parametrize(("option", "allowed", "values"), BAD)
def test_invalid_options_of_tasks_are_refused(
    option: str, allowed: str, values: tuple[object, ...]
) -> None:
    """The message names the option, the value and what is allowed."""
    for value in values:
        with pytest.raises(OptionError) as caught:
            check_options({option: value})
        message = str(caught.value)
        assert message.startswith(option)
        assert allowed in message
        wrong = value
        if isinstance(value, dict) and len(value) == 1:
            ((key, wrong),) = value.items()  # the wrong part is enough
            assert repr(key) in message
            wrong = key if allowed == "name must be a text" else wrong
        assert repr(wrong) in message or "instead" in allowed


@pytest.mark.parametrize(
    "call",
    [
        lambda: aiogpu.remote(gpu_memory=2),
        lambda: aiogpu.remote(memory=2),
        lambda: aiogpu.remote(gpu_where={"memory": 2}, num_gpus=1),
        lambda: aiogpu.lease(gpu_memory=2),
        lambda: aiogpu.placement([{"GPU": 1, "gpu_memory": 2}]),
        lambda: aiogpu.placement([{"CPU": 1, "memory": 2}]),
        lambda: aiogpu.init(gpu_memory=2),
        lambda: aiogpu.init(memory=2),
        lambda: aiogpu.init(object_memory=2),
    ],
)
def test_amount_of_memory_without_a_unit_is_refused(call: Callable[[], object]) -> None:
    """A user who writes 2 means gigabytes, not two bytes."""
    with pytest.raises(OptionError, match=r'=2 means 2 bytes, .*="2GiB"\.'):
        call()


# Bounds of numeric options.


@aiogpu.remote
def give() -> int:
    return 1


@aiogpu.remote
class Giver:
    def give(self) -> int:
        return 1


def method(**options: Any) -> object:
    return aiogpu.method(**options)(Giver)


def batch(**options: Any) -> object:
    return aiogpu.batch(**{"max_size": 1, **options})(lambda items: items)


COUNT: Final = 2**31 - 1
TIME: Final = 10**9
NUMERIC: Final[list[tuple[Callable[..., object], str, int, int]]] = [
    (give.options, "max_calls", 0, COUNT),
    (give.options, "max_retries", -1, COUNT),
    (give.options, "num_returns", 1, 100_000),
    (give.options, "max_buffered", 1, COUNT),
    (give.options, "priority", -COUNT, COUNT),
    (give.options, "timeout", 0, TIME),
    (give.options, "cancel_grace", 0, TIME),
    (give.options, "bundle", -1, 255),
    (give.options, "num_cpus", 0, 10**14),
    (give.options, "num_gpus", 0, 10**14),
    (give.options, "memory", 0, 2**60),
    (give.options, "gpu_memory", 0, 2**60),
    (Giver.options, "max_restarts", -1, COUNT),
    (Giver.options, "max_task_retries", -1, COUNT),
    (Giver.options, "max_concurrency", 1, COUNT),
    (Giver.options, "priority", -COUNT, COUNT),
    (method, "num_returns", 1, 100_000),
    (method, "max_buffered", 1, COUNT),
    (batch, "max_size", 1, COUNT),
    (batch, "max_wait", 0, TIME),
]
"""A call that takes a numeric option, the option, and its bounds."""


@pytest.mark.parametrize(("call", "option", "least", "most"), NUMERIC)
def test_numeric_option_beyond_its_bounds_is_refused(
    call: Callable[..., object], option: str, least: int, most: int
) -> None:
    """The error names the option, the value and the bound."""
    for value in (most + 1, 2**70, least - 1, -(2**70), math.inf, -math.inf, math.nan):
        with pytest.raises(OptionError) as caught:
            call(**{option: value})
        message = str(caught.value)
        assert message.startswith(f"{option}={value!r}")
        bound = f"{most:.0e}" if most == 10**14 else f"{most:_}"
        assert "memory" in option or bound in message, message


async def test_numeric_options_of_groups_pools_and_maps_have_bounds() -> None:
    limits = {"size": 1, "min_size": 1, "max_size": 2, "target": 1}
    for option in limits:
        with pytest.raises(OptionError, match=f"{option}={2**70} .* maximum {COUNT:_}"):
            aiogpu.ActorPool(Giver, **limits | {option: 2**70})
    with pytest.raises(
        OptionError, match=f"idle_after=1e[+]300 .* maximum is {TIME:_}"
    ):
        aiogpu.ActorPool(Giver, min_size=1, max_size=2, idle_after=1e300)
    for option in ("limit", "chunk"):
        with pytest.raises(OptionError, match=f"{option}={2**70} .* maximum {COUNT:_}"):
            give.map([1], **{option: 2**70})
    with pytest.raises(OptionError, match=r"concurrency_groups\['io'\]=2147483648"):
        Giver.options(concurrency_groups={"io": COUNT + 1})
    Giver.options(concurrency_groups={"io": COUNT})


# Effective options of tasks.


@pytest.mark.parametrize(
    ("options", "max_calls"),
    [
        ({}, 0),
        ({"num_gpus": 0}, 0),
        ({"num_gpus": 0.25}, 1),
        ({"num_gpus": 2}, 1),
        ({"num_gpus": 0.25, "max_calls": 0}, 0),
        ({"num_gpus": 0.25, "max_calls": 5}, 5),
        ({"max_calls": 5}, 5),
        ({"num_gpus": 1, "max_calls": None}, 1),
        ({"resources": {"neuron_cores": 1}}, 1),
        ({"resources": {"NPU": 0.5}}, 1),
        ({"resources": {"NPU": 0.5}, "max_calls": 0}, 0),
        ({"resources": {"TPU": 0, "license": 1}}, 0),
    ],
)
def test_task_with_a_device_gets_a_fresh_process_by_default(
    options: dict[str, Any], max_calls: int
) -> None:
    assert spec(**options).max_calls == max_calls


def test_options_that_need_a_gpu_are_refused_without_one() -> None:
    """`.options` may add the GPU, so the first call checks, not the decorator."""
    options = checked(gpu_where={"memory": "40GiB", "name": "*H100*"})
    with pytest.raises(OptionError) as caught:
        options.spec("train", 7)
    assert str(caught.value) == (
        "gpu_where selects GPUs with memory of 40GiB or more and a name like "
        "'*h100*', but the task asks for no GPU; give num_gpus= or gpu_memory= as "
        "well."
    )
    for more in ({"num_gpus": 5_000}, {"gpu_memory": 1}):
        assert options.replace(**more).request().where == options.gpu_where
    options = checked(retry_oom="exclusive")
    with pytest.raises(OptionError, match=r"retry_oom retries .* give num_gpus= or"):
        options.spec("train", 7)
    spec = options.replace(gpu_memory=1).spec("train", 7)
    assert (spec.retries_oom, spec.doubles_share) == (True, False)
    options = checked(retry_oom=["share", "exclusive"], num_gpus=0.25)
    spec = options.spec("train", 7)
    assert (spec.retries_oom, spec.doubles_share) == (True, True)
    for wrong in ("share", ["share"], ["exclusive", "share"], [], True, [[]]):
        with pytest.raises(OptionError, match=r"must be None, 'exclusive' .* or \["):
            checked(retry_oom=wrong)
    options = checked(gpu_memory="share")
    with pytest.raises(OptionError, match="num_gpus is 0; give num_gpus= as well"):
        options.request()
    assert options.replace(num_gpus=5_000).request().gpu_memory == BY_SHARE


# Variables of a task that would change its assigned devices.


def environment(**given: str) -> dict[str, str]:
    environ = checked(runtime_env={"env_vars": given}).runtime_env
    assert environ is not None
    return environ


@pytest.mark.parametrize("name", variables())
def test_task_cannot_set_the_device_variables_of_vendors(name: str) -> None:
    """The vendor's own switch leaves the variable to the task."""
    switch = f"AIOGPU_NOSET_{name}"
    for more in ({}, {switch: "0"}):
        with pytest.raises(OptionError) as caught:
            environment(**{name: "0"}, **more)
        assert str(caught.value) == (
            f"runtime_env['env_vars'] sets {name}, which aiogpu sets to the devices "
            f"of the task. Leave it out, or add {switch}='1' to manage it yourself."
        )
    for on in ("1", "true", " Yes ", "ON"):
        given = {name: "0", switch: on}
        assert environment(**given) == given
    other = next(variable for variable in variables() if variable != name)
    with pytest.raises(OptionError, match=f"sets {other}, which"):
        environment(**given, **{other: "0"})


@pytest.mark.parametrize(
    ("name", "bad", "message", "switch"),
    [
        ("CUDA_DEVICE_ORDER", "FASTEST_FIRST", "='FASTEST_FIRST', but", "CUDA"),
        ("ROCR_VISIBLE_DEVICES", "1", ", and HIP_VIS", "HIP"),
    ],
)
def test_task_cannot_set_variables_that_reorder_devices(
    name: str, bad: str, message: str, switch: str
) -> None:
    with pytest.raises(OptionError, match=f"sets {name}{message}"):
        environment(**{name: bad})
    given = {name: bad, f"AIOGPU_NOSET_{switch}_VISIBLE_DEVICES": "1"}
    assert environment(**given) == given
    assert environment(CUDA_DEVICE_ORDER="PCI_BUS_ID")


# Named resources: devices, and their numbers.


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (
            {"num_gpus": 1, "resources": {"neuron_cores": 1}},
            "num_gpus and resources['neuron_cores'] ",
        ),
        ({"num_gpus": 0.5, "resources": {"TPU": 1}}, "num_gpus and resources['TPU'] "),
        ({"gpu_memory": "1GiB", "resources": {"TPU": 1}}, "gpu_memory and resources["),
        ({"resources": {"neuron_cores": 1, "TPU": 1}}, "resources['neuron_cores'] and"),
    ],
)
def test_devices_of_two_vendors_are_refused(
    options: dict[str, Any], names: str
) -> None:
    """The effective options count."""
    for remote in (give, Giver):
        with pytest.raises(OptionError) as caught:
            remote.options(**options)
        assert "ask for devices of different vendors" in str(caught.value)
        assert str(caught.value).startswith(names)
    task = aiogpu.remote(num_gpus=1)(lambda: None)
    with pytest.raises(OptionError, match=r"^num_gpus and resources\['neuron_cores'\]"):
        task.options(resources={"neuron_cores": 1})
    task.options(num_gpus=0, resources={"neuron_cores": 1})
    task.options(resources={"neuron_cores": 0, "license": 1})


def test_worker_knows_the_kinds_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spec(resources={"FPGA": 0.5}).shape.request.devices == ()
    monkeypatch.setattr(current, "accelerators", {"GPU": (), "FPGA": ()})
    assert spec(resources={"FPGA": 0.5}).shape.request.devices == (("FPGA", 5_000),)
    with pytest.raises(OptionError, match=r"resources\['FPGA'\]=1\.5 mixes"):
        spec(resources={"FPGA": 1.5})


def test_node_has_a_whole_number_of_devices() -> None:
    for resources in ({"neuron_cores": 2, "TPU": 5, "license": 0.5}, {"NPU": 2.0}, {}):
        assert node_options(resources=resources).resources == resources
    for name in ("neuron_cores", "NPU"):
        for value in (1.5, 10**6 + 1):
            with pytest.raises(OptionError) as caught:
                node_options(resources={name: value})
            start = f"init(resources={{{name!r}: {value!r}}}): a n"
            assert str(caught.value).startswith(start)


# The options of `init`.


def node_options(**options: Any) -> NodeOptions:
    """Check options as `init` does, with the defaults in its signature."""
    parameters = inspect.signature(aiogpu.init).parameters.items()
    return check_node_options(
        {name: parameter.default for name, parameter in parameters} | options
    )


NODE_GOOD: Final[dict[str, list[tuple[object, object]]]] = {
    "num_cpus": [(0, 0.0), (4, 4.0), (0.5, 0.5)],
    "num_gpus": [(0, 0), (8, 8)],
    "resources": [
        ({}, {}),
        (OrderedDict(license=2), {"license": 2}),
        ({"accelerator_type:A100": 1}, {"accelerator_type:A100": 1}),
    ],
    "accelerator_type": [("A100", "A100")],
    "preload": [(["numpy", "json.decoder"], ("numpy", "json.decoder")), ((), ())],
    "log_to_driver": [(False, False)],
    "cancel_grace": [(1, 1.0), (0.05, 0.05)],
    "spare_workers": [(0, 0), (1024, 1024)],
    "memory": [
        *((value, value) for value in (0, 1 << 33)),
        *(("6GiB", 6 << 30), ("1.5 GB", 1_500_000_000)),
    ],
    "memory_guard": [(False, False)],
    "object_memory": [(0, 0), ("2GiB", 2 << 30)],
    "spill_directory": [("/", "/"), (Path("/"), "/")],
}


@pytest.mark.parametrize("option", NODE_GOOD)
def test_valid_options_of_a_node_are_accepted(option: str) -> None:
    assert node_options() == check_node_options({}) == NodeOptions()
    for value, expected in NODE_GOOD[option]:
        checked = getattr(node_options(**{option: value}), option)
        assert checked == expected
        assert type(checked) is type(expected)


NODE_BAD: Final[list[tuple[str, str, tuple[object, ...]]]] = [
    ("num_cpus", "give an int or a float", ("1", True, [1])),
    ("num_cpus", "not a quantity", (-1, math.nan, math.inf)),
    ("num_cpus", "at least 0.0001", (1e-5,)),
    ("num_gpus", "a whole number of GPUs", (1.5, 1.0, 10**7, *NO_TIMES)),
    ("resources", "a dict of names", ([1], "license", 1)),
    ("resources", "write num_cpus=1 instead", ({"CPU": 1},)),
    ("resources", "write num_gpus=1 instead", ({"GPU": 1},)),
    ("resources", "write gpu_memory=1 instead", ({"gpu_memory": 1},)),
    ("resources", "write memory=1 instead", ({"memory": 1},)),
    ("resources", "not a quantity", ({"license": -1},)),
    ("resources", "is a bool", ({"license": True},)),
    ("gpu_memory", "a GPU must have memory", ("0GiB",)),
    ("accelerator_type", "a text", ("", 1, ["A100"])),
    ("preload", "a sequence of module names", ("numpy", None, {"numpy"})),
    ("preload", "a sequence of module names", ([""], [1], ["numpy", b"json"])),
    ("log_to_driver", "True or False", (0, 1, None, "no")),
    ("cancel_grace", "seconds above 0", (0, None, "2", 10**400, *NO_TIMES)),
    ("spare_workers", "a whole number, 0 for none", (-1, 1.5, True, None, "2", 1025)),
    ("memory", "not an amount of memory", (-1, 1.5, True, "6", "GiB", "-1GB", [1])),
    ("memory", "not an amount of memory", ("nanGB", "1e99GB")),
    ("object_memory", "not an amount of memory", ("lots",)),
    ("spill_directory", "must be the path of a directory", (5, b"/tmp")),
    ("spill_directory", "there is no such directory", ("/no/such",)),
    ("memory_guard", "True or False", (0, None)),
    ("ignore_reinit_error", "True or False", (0, 1, None)),
    ("address", "a text", ("", 1, b"local")),
]


@pytest.mark.parametrize(("option", "allowed", "values"), NODE_BAD)
def test_invalid_options_of_a_node_are_refused(
    option: str, allowed: str, values: tuple[object, ...]
) -> None:
    """`init` itself raises, not its await."""
    for value in values:
        with pytest.raises(OptionError) as caught:
            aiogpu.init(**{option: value})  # type: ignore[arg-type]
        message = str(caught.value)
        assert option in message
        assert allowed in message
        wrong = next(iter(value.values())) if isinstance(value, dict) else value
        assert repr(wrong) in message
    with pytest.raises(TypeError):
        aiogpu.init("local")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("preload", "modules", "learns"),
    [
        *[("auto", (), True), (("auto",), (), True), ((), (), False)],
        (["numpy", "auto", "json"], ("numpy", "json"), True),
        (["json"], ("json",), False),
    ],
)
def test_preload_lists_modules_and_auto(
    preload: object, modules: tuple[str, ...], learns: bool
) -> None:
    options = node_options(preload=preload)
    assert (options.preload, options.learns) == (modules, learns)


def group(*bundles: dict[str, Any]) -> Placement:
    return Placement(placement_group_of(bundles, "PACK", "group", "key"))


def request(**options: Any) -> Request:
    return checked(**options).request()


def test_lease_requests_only_the_named_resources() -> None:
    """A lease has no CPU by default, and its timeout does not end it."""
    func, timeout = lease_func({"num_gpus": 0.5, "timeout": 3, "priority": 2})
    spec = func.spec
    assert func.resources == {"GPU": 0.5}
    assert (timeout, spec.timeout) == (3.0, None)
    assert (spec.name, spec.priority) == ("lease", 2)
    assert (spec.is_lease, spec.is_endless, spec.max_calls) == (True, True, 1)
    func, _ = lease_func({"num_cpus": None, "num_gpus": None, "gpu_memory": "1GiB"})
    assert func.resources == {"gpu_memory": float(1 << 30)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a lease must hold something"),
        ({"num_gpus": 1.5}, "num_gpus=1.5"),
        ({"num_gpus": 1, "timeout": 0}, "timeout=0"),
        ({"num_gpus": 1, "max_calls": 1}, "max_calls is not an option of a lease"),
        ({"accelerator_type": ""}, "accelerator_type=''"),
        ({"num_gpus": 1, "resources": {"neuron_cores": 1}}, "different vendors"),
    ],
)
def test_invalid_leases_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        lease_func(options)


async def test_lease_that_is_not_granted_has_no_ids() -> None:
    lease = aiogpu.lease(num_gpus=1)
    assert repr(lease) == "<Lease lease not requested>"
    assert not lease.is_held
    with pytest.raises(MisuseError, match="not granted yet"):
        _ = lease.ids
    with pytest.raises(MisuseError, match="not requested yet"):
        await lease.why()
    await lease.release()


def test_bundles_hold_resources_and_devices() -> None:
    placement = group(
        {"GPU": 1, "CPU": 2, "memory": "1GiB", "license": 0.5},
        {"neuron_cores": 2},
        {"GPU": 0.5, "accelerator_type:A100": 0.001},
    )
    assert placement.bundles == (
        {"CPU": 2.0, "license": 0.5, "memory": float(1 << 30), "GPU": 1.0},
        {"neuron_cores": 2.0},
        {"accelerator_type:A100": 0.001, "GPU": 0.5},
    )


TYPES = {"GPU": 1, "accelerator_type:A": 0.001, "accelerator_type:B": 0.001}


@pytest.mark.parametrize(
    ("bundles", "options", "message"),
    [
        ([], {}, "give 1 to 256"),
        ([{"CPU": 1}] * (MOST_BUNDLES + 1), {}, "give 1 to 256"),
        *(
            (bundles, {}, "must be a list of dicts")
            for bundles in ("GPU", {"GPU": 1}, 7)
        ),
        ([7], {}, r"bundles\[0\]=7 must be a dict"),
        ([{"GPU": 1}, {}], {}, r"bundles\[1\]={} asks for nothing"),
        ([{"GPU": 0, "CPU": 0}], {}, "asks for nothing"),
        ([{"GPU": 1.5}], {}, r"bundles\[0\]\['GPU'\]=1.5 mixes whole devices"),
        ([{"GPU": -1}], {}, "is not a quantity"),
        ([{"CPU": "1"}], {}, "is a str"),
        ([{"memory": "lots"}], {}, "memory"),
        ([{"license": True}], {}, "is a bool"),
        ([{1: 1}], {}, "name must be a text"),
        ([TYPES], {}, "more than one accelerator_type"),
        *(
            ([{"CPU": 1}], {"strategy": strategy}, "'STRICT_SPREAD'")
            for strategy in ("pack", None, 1)
        ),
        ([{"CPU": 1}], {"lifetime": "detached"}, "lifetime"),
        ([{"CPU": 1}], {"name": ""}, "name=''"),
        ([{"CPU": 1}], {"priority": "high"}, "priority"),
    ],
)
def test_invalid_placements_are_refused(
    bundles: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        aiogpu.placement(bundles, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"bundle": bundle}, "bundle=") for bundle in (-2, 0.5, "0", True)),
        ({"bundle": 1}, "group has no bundle 1; its bundles are"),
        ({"bundle": 0, "placement": None}, "give placement= as well"),
        ({"placement": [{"CPU": 1}]}, "must be the result of aiogpu.placement"),
    ],
)
def test_missing_bundle_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        request(**{"placement": group({"CPU": 1}), **options})
    assert request(placement=None, bundle=None) == request()
    assert request(placement=None, bundle=-1).placement_group is None


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            {"num_gpus": 2},
            [
                "{GPU: 2} does not fit into any bundle of group",
                "[{CPU: 1, GPU: 1}, {GPU: 0.5}]",
            ],
        ),
        ({"num_gpus": 1, "bundle": 1}, ["bundle 1 of group, {GPU: 0.5}"]),
        ({"num_cpus": 2}, ["CPU: 2"]),
    ],
)
def test_request_that_fits_no_bundle_names_the_request_and_the_bundles(
    options: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(aiogpu.InfeasibleError) as caught:
        request(placement=group({"GPU": 1, "CPU": 1}, {"GPU": 0.5}), **options)
    for part in parts:
        assert part in str(caught.value)


def test_a_task_is_placed_on_a_cluster_by_one_option() -> None:
    group = placement_group_of([{"CPU": 1}], "PACK", "group", "key")
    options = TaskOptions(placement=group, scheduling_strategy="SPREAD")
    with pytest.raises(OptionError, match=r"scheduling_strategy= and placement= each"):
        options.ray_options()
