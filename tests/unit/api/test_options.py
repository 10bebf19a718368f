"""[B10] [B21] Options of tasks, nodes, leases and placements: what is allowed."""

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
from aiogpu.api.node import check_declared, check_node_options
from aiogpu.api.options import (
    LARGEST_COUNT,
    LONGEST_TIME,
    TaskOptions,
    check_options,
    placement_group_of,
)
from aiogpu.api.reservation import Placement, lease_func
from aiogpu.client.current import current
from aiogpu.core.model.request import MOST_BUNDLES, Request, TaskSpec
from aiogpu.core.model.units import BY_SHARE
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import MisuseError, OptionError


def checked(**options: Any) -> TaskOptions:
    return TaskOptions(**check_options(options))


def spec(**options: Any) -> TaskSpec:
    return checked(**options).spec("train", 7)


class Flag(str):
    """A text of a class of its own."""


# Values of the options of tasks.

QUANTITIES = [
    (0, 0),
    (0.25, 2_500),
    (1, 10_000),
    (2.0, 20_000),
    (1 / 3, 3_333),
    (0.57, 5_700),
    (0.0001, 1),
    (0.99999, 9_999),
    (np.float64(0.1), 1_000),
]

NO_QUANTITIES = [
    *((value, "not a quantity") for value in (-1, -0.5, math.nan, math.inf, 10**400)),
    (1e-5, "finer than 1/10000"),
    ("1", "is a str"),
    (b"1", "is a bytes"),
    (True, "is a bool"),
    ([1], "is a list"),
    (1j, "is a complex"),
    (np.int64(1), "is an int64"),
]


@pytest.mark.parametrize(("value", "parts"), QUANTITIES)
def test_quantities(value: object, parts: int) -> None:
    for option in ("num_cpus", "num_gpus"):
        assert check_options({option: value}) == {option: parts}


@pytest.mark.parametrize(("value", "why"), NO_QUANTITIES)
def test_what_is_no_quantity(value: object, why: str) -> None:
    for options, named in (
        ({"num_cpus": value}, "num_cpus"),
        ({"num_gpus": value}, "num_gpus"),
        ({"resources": {"license": value}}, "resources['license']"),
    ):
        with pytest.raises(OptionError) as caught:
            check_options(options)
        assert f"{named}={value!r}" in str(caught.value)
        assert why in str(caught.value)


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
    "strategy": [("pack", "pack"), (Flag("spread"), "spread"), (None, "pack")],
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
def test_what_a_task_may_ask_for(option: str) -> None:
    for value, held in GOOD[option]:
        assert check_options({option: value}) == {option: held}


class NoException:
    """No exception, though it is a class."""


BAD: Final[dict[str, list[tuple[tuple[object, ...], str]]]] = {
    "num_gpus": [((1.5, 2.0001, 1.1), "mixes whole devices")],
    "resources": [
        (([("a", 1)], "a", 1, {"a"}), "a dict of names"),
        (({"": 1}, {1: 1}), "name must be a text"),
        (({"a": None},), "NoneType"),
        (({"CPU": 0.5},), "write num_cpus=0.5 instead"),
        (({"GPU": 0.5},), "write num_gpus=0.5 instead"),
    ],
    "accelerator_type": [(("", 1, b"A100", ["A100"]), "a text")],
    "strategy": [
        (
            ("SPREAD", "", True, 1, ["pack"], b"spread", np.zeros(2)),
            "must be 'pack' (a share goes to the fullest GPU with room) or 'spread'",
        )
    ],
    "lifetime": [
        (
            ("", "Detached", True, 0, ["detached"], np.zeros(2)),
            "must be None (a task ends with",
        )
    ],
    "max_calls": [((-1, 1.0, True, "1"), "0 for no limit")],
    "max_retries": [((-2, 1.0, False, "1"), "-1 for no limit")],
    "priority": [((1.5, True, "high"), "higher goes first")],
    "num_returns": [((0, -1, True, 2.0, "2", "dynamic", [2]), "its own handle")],
    "name": [(("", 1, b"a"), "a text")],
    "timeout": [((0, -1, True, "1", math.nan, math.inf, 10**400), "seconds above 0")],
    "cancel_grace": [
        (
            (-1, -0.1, False, True, "1", math.nan, math.inf, np.zeros(2)),
            "seconds, 0 to kill at once, or None",
        )
    ],
    "retry_exceptions": [
        (
            (
                *([], (), 1, "OSError", {OSError}, OSError(), NoException, list[int]),
                *(BaseException, KeyboardInterrupt, SystemExit, asyncio.CancelledError),
                *(
                    [OSError, GeneratorExit],
                    [OSError, None],
                    [True],
                    BaseExceptionGroup,
                ),
            ),
            "True, False, or exception classes",
        )
    ],
    "runtime_env": [
        (([], "env", {"pip": []}, {"env_vars": {}, "pip": []}, {1: 2}), "'env_vars'"),
        (
            (
                *({"env_vars": value} for value in (None, [], "A=1", {"A": 1})),
                *({"env_vars": value} for value in ({1: "A"}, {"A": None}, {"": "1"})),
                *({"env_vars": value} for value in ({"A=B": "1"}, {"A\0": "1"})),
                *({"env_vars": value} for value in ({"A": "\0"}, {"A": "\ud800"})),
            ),
            "a dict of texts to texts",
        ),
    ],
}


@pytest.mark.parametrize("option", BAD)
def test_what_a_task_may_not_ask_for(option: str) -> None:
    """[B9] The message names the option, the value and what is allowed."""
    for values, allowed in BAD[option]:
        for value in values:
            with pytest.raises(OptionError) as caught:
                check_options({option: value})
            message = str(caught.value)
            assert message.startswith(option)
            assert allowed in message
            told = value
            if isinstance(value, dict) and len(value) == 1:
                ((key, told),) = value.items()  # the part that is wrong is enough
                assert repr(key) in message
                told = key if allowed == "name must be a text" else told
            assert repr(told) in message or "instead" in allowed


@pytest.mark.parametrize(
    "ask",
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
def test_a_forgotten_unit(ask: Callable[[], object]) -> None:
    """Two bytes are nobody's wish; whoever writes 2 means gigabytes."""
    with pytest.raises(OptionError, match=r'=2 is read as 2 bytes, .*="2GiB"\.'):
        ask()


# Bounds of numbers, wherever an option takes one.


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
TAKERS: Final[list[tuple[Callable[..., object], str, int, int]]] = [
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
"""What takes a numeric option, the option, and its bounds."""


@pytest.mark.parametrize(("take", "option", "least", "most"), TAKERS)
def test_a_number_beyond_its_bounds_is_refused(
    take: Callable[..., object], option: str, least: int, most: int
) -> None:
    """By an error that names the option, the value and what is allowed."""
    for value in (most + 1, 2**70, least - 1, -(2**70), math.inf, -math.inf, math.nan):
        with pytest.raises(OptionError) as caught:
            take(**{option: value})
        told = str(caught.value)
        assert told.startswith(f"{option}={value!r}")
        is_size = "memory" in option
        bound = f"{most:.0e}" if most == 10**14 else f"{most:_}"
        assert is_size or bound in told, told


async def test_so_are_those_of_groups_pools_and_maps() -> None:
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


# What a task's options come to.


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
def test_a_task_with_a_device_has_a_process_of_its_own_unless_said(
    options: dict[str, Any], max_calls: int
) -> None:
    """[B26]"""
    assert spec(**options).max_calls == max_calls


def test_options_that_need_a_gpu() -> None:
    """Perhaps by `.options`, so they are not refused before the first call."""
    alone = checked(gpu_where={"memory": "40GiB", "name": "*H100*"})
    with pytest.raises(OptionError) as caught:
        alone.spec("train", 7)
    assert str(caught.value) == (
        "gpu_where selects GPUs with memory of 40GiB or more and a name like "
        "'*h100*', but the task asks for no GPU; give num_gpus= or gpu_memory= as "
        "well."
    )
    for more in ({"num_gpus": 5_000}, {"gpu_memory": 1}):
        assert alone._replace(**more).request().where == alone.gpu_where
    alone = checked(retry_oom="exclusive")
    with pytest.raises(
        OptionError, match=r"retry_oom='exclusive' .* give num_gpus= or"
    ):
        alone.spec("train", 7)
    assert alone._replace(gpu_memory=1).spec("train", 7).retries_oom
    alone = checked(gpu_memory="share")
    with pytest.raises(OptionError, match="num_gpus is 0; give num_gpus= as well"):
        alone.request()
    assert alone._replace(num_gpus=5_000).request().gpu_memory == BY_SHARE


# Variables of a task that would fight what it is assigned.


def environment(**given: str) -> dict[str, str]:
    found = checked(runtime_env={"env_vars": given}).runtime_env
    assert found is not None
    return found


@pytest.mark.parametrize("name", variables())
def test_the_variables_of_all_vendors_are_set_by_aiogpu(name: str) -> None:
    """[B25] Unless the task says by the vendor's own switch that it sets them."""
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
    other = next(each for each in variables() if each != name)
    with pytest.raises(OptionError, match=f"sets {other}, which"):
        environment(**given, **{other: "0"})


@pytest.mark.parametrize(
    ("name", "bad", "told", "switch"),
    [
        (
            *("CUDA_DEVICE_ORDER", "FASTEST_FIRST"),
            *("sets CUDA_DEVICE_ORDER='FASTEST_FIRST', but", "CUDA_VISIBLE_DEVICES"),
        ),
        (
            *("ROCR_VISIBLE_DEVICES", "1"),
            *("sets ROCR_VISIBLE_DEVICES, and HIP_VIS", "HIP_VISIBLE_DEVICES"),
        ),
    ],
)
def test_variables_that_change_what_an_index_means_are_refused(
    name: str, bad: str, told: str, switch: str
) -> None:
    with pytest.raises(OptionError, match=told):
        environment(**{name: bad})
    given = {name: bad, f"AIOGPU_NOSET_{switch}": "1"}
    assert environment(**given) == given
    assert environment(CUDA_DEVICE_ORDER="PCI_BUS_ID")


# [B35] Resources by name: which are devices, and how many may be asked for.


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (
            {"num_gpus": 1, "resources": {"neuron_cores": 1}},
            "num_gpus and resources['n",
        ),
        ({"num_gpus": 0.5, "resources": {"TPU": 1}}, "num_gpus and resources['TPU'] "),
        ({"gpu_memory": "1GiB", "resources": {"TPU": 1}}, "gpu_memory and resources["),
        ({"resources": {"neuron_cores": 1, "TPU": 1}}, "resources['neuron_cores'] and"),
    ],
)
def test_a_process_has_the_devices_of_one_vendor(
    options: dict[str, Any], names: str
) -> None:
    """The effective options are what counts."""
    for remote in (give, Giver):
        with pytest.raises(OptionError) as caught:
            remote.options(**options)
        assert "ask for devices of different vendors" in str(caught.value)
        assert str(caught.value).startswith(names)
    made = aiogpu.remote(num_gpus=1)(lambda: None)
    with pytest.raises(OptionError, match=r"^num_gpus and resources\['neuron_cores'\]"):
        made.options(resources={"neuron_cores": 1})
    made.options(num_gpus=0, resources={"neuron_cores": 1})
    made.options(resources={"neuron_cores": 0, "license": 1})


def test_in_a_worker_the_nodes_kinds_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spec(resources={"FPGA": 0.5}).shape.request.devices == ()
    monkeypatch.setattr(current, "accelerators", {"GPU": (), "FPGA": ()})
    assert spec(resources={"FPGA": 0.5}).shape.request.devices == (("FPGA", 5_000),)
    with pytest.raises(OptionError, match=r"resources\['FPGA'\]=1\.5 mixes"):
        spec(resources={"FPGA": 1.5})


def test_a_node_has_any_whole_number_of_devices() -> None:
    for resources in ({"neuron_cores": 2, "TPU": 5, "license": 0.5}, {"NPU": 2.0}, {}):
        assert check_declared("resources", resources) == resources
    for name in ("neuron_cores", "NPU"):
        for value in (1.5, 10**6 + 1):
            with pytest.raises(OptionError) as caught:
                check_declared("resources", {name: value})
            told = f"init(resources={{{name!r}: {value!r}}}): a n"
            assert str(caught.value).startswith(told)


# [B1] [B3] The options of `init`.


def node_options(**options: Any) -> NodeOptions:
    """Check options as `init` does, with its own defaults for the others."""
    parameters = inspect.signature(aiogpu.init).parameters.items()
    return check_node_options(
        **{name: each.default for name, each in parameters} | options
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
def test_what_a_node_may_be_given(option: str) -> None:
    assert node_options() == NodeOptions()
    for value, held in NODE_GOOD[option]:
        found = getattr(node_options(**{option: value}), option)
        assert found == held
        assert type(found) is type(held)


NODE_BAD: Final[dict[str, list[tuple[tuple[object, ...], str]]]] = {
    "num_cpus": [
        (("1", True, [1]), "give an int or a float"),
        ((-1, math.nan, math.inf), "not a quantity"),
        ((1e-5,), "at least 0.0001"),
    ],
    "num_gpus": [
        ((1.5, 1.0, -1, "1", True, math.nan, math.inf, 10**7), "a whole number of GPUs")
    ],
    "resources": [
        (([1], "license", 1), "a dict of names"),
        (({"CPU": 1},), "write num_cpus=1 instead"),
        (({"GPU": 1},), "write num_gpus=1 instead"),
        (({"gpu_memory": 1},), "write gpu_memory=1 instead"),
        (({"memory": 1},), "write memory=1 instead"),
        (({"license": -1},), "not a quantity"),
        (({"license": True},), "is a bool"),
    ],
    "gpu_memory": [(("0GiB",), "a GPU must have memory")],
    "accelerator_type": [(("", 1, ["A100"]), "a text")],
    "preload": [
        (
            ("numpy", None, {"numpy"}, [""], [1], ["numpy", b"json"]),
            "a sequence of module names",
        )
    ],
    "log_to_driver": [((0, 1, None, "no"), "True or False")],
    "cancel_grace": [
        ((0, -1, None, True, "2", math.nan, math.inf, 10**400), "seconds above 0")
    ],
    "spare_workers": [((-1, 1.5, True, None, "2", 1025), "a whole number, 0 for none")],
    "memory": [
        (
            (-1, 1.5, True, "6", "GiB", "-1GB", "nanGB", "1e99GB", [1]),
            "not an amount of memory",
        )
    ],
    "object_memory": [(("lots",), "not an amount of memory")],
    "spill_directory": [
        ((5, b"/tmp"), "must be the path of a directory"),
        (("/no/such",), "there is no such directory"),
    ],
    "memory_guard": [((0, None), "True or False")],
    "ignore_reinit_error": [((0, 1, None), "True or False")],
    "address": [(("", 1, b"local"), "a text")],
}


@pytest.mark.parametrize("option", NODE_BAD)
def test_what_a_node_may_not_be_given(option: str) -> None:
    """It is told where `init` is called, not at the await."""
    for values, allowed in NODE_BAD[option]:
        for value in values:
            with pytest.raises(OptionError) as caught:
                aiogpu.init(**{option: value})  # type: ignore[arg-type]
            message = str(caught.value)
            assert option in message
            assert allowed in message
            told = next(iter(value.values())) if isinstance(value, dict) else value
            assert repr(told) in message
    with pytest.raises(TypeError):
        aiogpu.init("local")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("preload", "modules", "learns"),
    [
        ("auto", (), True),
        (("auto",), (), True),
        (["numpy", "auto", "json"], ("numpy", "json"), True),
        ((), (), False),
        (["json"], ("json",), False),
    ],
)
def test_what_is_preloaded(
    preload: object, modules: tuple[str, ...], learns: bool
) -> None:
    options = node_options(preload=preload)
    assert (options.preload, options.learns) == (modules, learns)


def group(*bundles: dict[str, Any]) -> Placement:
    return Placement(placement_group_of(bundles, "PACK", "group", "key"))


def asked(**options: Any) -> Request:
    return TaskOptions(**check_options(options)).request()


def test_a_lease_asks_for_what_is_named_alone() -> None:
    """It has no CPU, and its timeout is not its end."""
    func, timeout = lease_func({"num_gpus": 0.5, "timeout": 3, "priority": 2})
    spec = func.spec
    assert func.resources == {"GPU": 0.5}
    assert (timeout, spec.timeout) == (3.0, None)
    assert (spec.name, spec.priority) == ("lease", 2)
    assert (spec.is_lease, spec.is_endless, spec.max_calls) == (True, True, 1)
    func, _ = lease_func({"num_cpus": None, "num_gpus": None, "gpu_memory": "1GiB"})
    assert func.resources == {"gpu_memory": float(1 << 30)}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "a lease of nothing"),
        ({"num_gpus": 1.5}, "num_gpus=1.5"),
        ({"num_gpus": 1, "timeout": 0}, "timeout=0"),
        ({"num_gpus": 1, "max_calls": 1}, "max_calls is not an option of a lease"),
        ({"accelerator_type": ""}, "accelerator_type=''"),
        ({"num_gpus": 1, "resources": {"neuron_cores": 1}}, "different vendors"),
    ],
)
def test_a_lease_that_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        lease_func(options)


async def test_a_lease_that_is_not_granted_has_no_ids() -> None:
    lease = aiogpu.lease(num_gpus=1)
    assert repr(lease) == "<Lease lease not asked for>"
    assert not lease.is_held
    with pytest.raises(MisuseError, match="not granted yet"):
        _ = lease.ids
    with pytest.raises(MisuseError, match="not asked for yet"):
        await lease.why()
    await lease.release()


def test_what_a_bundle_may_hold() -> None:
    held = group(
        {"GPU": 1, "CPU": 2, "memory": "1GiB", "license": 0.5},
        {"neuron_cores": 2},
        {"GPU": 0.5, "accelerator_type:A100": 0.001},
    )
    assert held.bundles == (
        {"CPU": 2.0, "license": 0.5, "memory": float(1 << 30), "GPU": 1.0},
        {"neuron_cores": 2.0},
        {"accelerator_type:A100": 0.001, "GPU": 0.5},
    )


TYPES = {"GPU": 1, "accelerator_type:A": 0.001, "accelerator_type:B": 0.001}


@pytest.mark.parametrize(
    ("bundles", "options", "told"),
    [
        ([], {}, "give 1 to 256"),
        ([{"CPU": 1}] * (MOST_BUNDLES + 1), {}, "give 1 to 256"),
        ("GPU", {}, "must be a list of dicts"),
        ({"GPU": 1}, {}, "must be a list of dicts"),
        (7, {}, "must be a list of dicts"),
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
def test_a_placement_that_is_refused(
    bundles: Any, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(OptionError, match=told):
        aiogpu.placement(bundles, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *(({"bundle": bundle}, "bundle=") for bundle in (-2, 0.5, "0", True)),
        ({"bundle": 1}, "group has no bundle 1; its bundles are"),
        ({"bundle": 0, "placement": None}, "give placement= as well"),
        ({"placement": [{"CPU": 1}]}, "must be the result of aiogpu.placement"),
    ],
)
def test_a_bundle_that_is_not_there(options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        asked(**{"placement": group({"CPU": 1}), **options})
    assert asked(placement=None, bundle=None) == asked()
    assert asked(placement=None, bundle=-1).placement_group is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"num_gpus": 2},
            "{GPU: 2} does not fit into any bundle of group: "
            "[{CPU: 1, GPU: 1}, {GPU: 0.5}]",
        ),
        ({"num_gpus": 1, "bundle": 1}, "bundle 1 of group, {GPU: 0.5}"),
        ({"num_cpus": 2}, "CPU: 2"),
    ],
)
def test_what_fits_no_bundle_is_told_with_both(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(aiogpu.InfeasibleError) as caught:
        asked(placement=group({"GPU": 1, "CPU": 1}, {"GPU": 0.5}), **options)
    for part in told.split(": ["):
        assert part in str(caught.value)
