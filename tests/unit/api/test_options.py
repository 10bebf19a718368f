"""[B10] [B21] Every option's good and bad values, and what is said of the bad."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

import aiogpu
from aiogpu.api.keywords import ActorKeywords, Options
from aiogpu.api.options import (
    LARGEST_COUNT,
    LONGEST_TIME,
    TaskOptions,
    check_options,
    check_seconds,
)
from aiogpu.core.model.request import TaskSpec
from aiogpu.core.model.units import BY_SHARE
from aiogpu.errors import OptionError


def checked(**options: Any) -> TaskOptions:
    return TaskOptions(**check_options(options))


def spec(**options: Any) -> TaskSpec:
    return checked(**options).spec("train", 7)


class Flag(str):
    """A text of a class of its own."""


QUANTITIES = [
    (0, 0),
    (0.0, 0),
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
    (-1, "not a quantity"),
    (-0.5, "not a quantity"),
    (math.nan, "not a quantity"),
    (math.inf, "not a quantity"),
    (-math.inf, "not a quantity"),
    (10**400, "not a quantity"),
    (1e-5, "finer than 1/10000"),
    ("1", "is a str"),
    (b"1", "is a bytes"),
    (True, "is a bool"),
    ([1], "is a list"),
    (1j, "is a complex"),
    (np.int64(1), "is an int64"),
]


@pytest.mark.parametrize("option", ["num_cpus", "num_gpus"])
@pytest.mark.parametrize(("value", "parts"), QUANTITIES)
def test_quantities(option: str, value: object, parts: int) -> None:
    assert check_options({option: value}) == {option: parts}


@pytest.mark.parametrize("option", ["num_cpus", "num_gpus"])
@pytest.mark.parametrize(("value", "why"), NO_QUANTITIES)
def test_what_is_no_quantity(option: str, value: object, why: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_options({option: value})
    assert f"{option}={value!r}" in str(caught.value)
    assert why in str(caught.value)


@pytest.mark.parametrize(("value", "why"), NO_QUANTITIES)
def test_custom_resources_are_quantities_too(value: object, why: str) -> None:
    with pytest.raises(OptionError) as caught:
        check_options({"resources": {"license": value}})
    assert f"resources['license']={value!r}" in str(caught.value)
    assert why in str(caught.value)


@pytest.mark.parametrize("value", [1.5, 2.0001, 1.1])
def test_devices_above_one_are_whole(value: float) -> None:
    assert checked(num_cpus=value).num_cpus == round(value * 10_000)
    with pytest.raises(OptionError, match=rf"num_gpus={value} mixes whole devices"):
        checked(num_gpus=value)


GOOD = [
    ("resources", {}, {}),
    ("resources", {"license": 2, "tpu": 0.5}, {"license": 20_000, "tpu": 5_000}),
    ("resources", OrderedDict(a=1), {"a": 10_000}),
    ("resources", MappingProxyType({"a": 1}), {"a": 10_000}),
    ("resources", {"accelerator_type:A100": 0.001}, {"accelerator_type:A100": 10}),
    ("accelerator_type", "A100", "A100"),
    ("accelerator_type", None, None),
    ("strategy", "pack", "pack"),
    ("strategy", "spread", "spread"),
    ("strategy", Flag("spread"), "spread"),
    ("strategy", None, "pack"),
    ("max_calls", 0, 0),
    ("max_calls", 12, 12),
    ("max_calls", None, None),
    ("max_retries", -1, -1),
    ("max_retries", 0, 0),
    ("retry_exceptions", True, True),
    ("retry_exceptions", False, False),
    ("retry_exceptions", OSError, (OSError,)),
    ("retry_exceptions", [OSError, KeyError], (OSError, KeyError)),
    ("retry_exceptions", (ExceptionGroup,), (ExceptionGroup,)),
    ("num_returns", 1, 1),
    ("num_returns", None, 1),
    ("num_returns", 1000, 1000),
    ("name", "embed", "embed"),
    ("name", Flag("embed"), "embed"),
    ("priority", -5, -5),
    ("priority", LARGEST_COUNT, LARGEST_COUNT),
    ("priority", -LARGEST_COUNT, -LARGEST_COUNT),
    ("timeout", 1, 1.0),
    ("timeout", 0.001, 0.001),
    ("timeout", LONGEST_TIME, LONGEST_TIME),
    ("cancel_grace", None, None),
    ("cancel_grace", 0, 0.0),
    ("cancel_grace", 0.0, 0.0),
    ("cancel_grace", 30, 30.0),
    ("cancel_grace", 0.05, 0.05),
    ("runtime_env", {}, {}),
    ("runtime_env", {"env_vars": {}}, {}),
    ("runtime_env", {"env_vars": {"A": "1", "B": ""}}, {"A": "1", "B": ""}),
    ("runtime_env", {"env_vars": {"A": "b=c\n"}}, {"A": "b=c\n"}),
    ("runtime_env", {"env_vars": {"A": "\udc80"}}, {"A": "\udc80"}),
    ("runtime_env", MappingProxyType({"env_vars": {"A": "1"}}), {"A": "1"}),
    ("lifetime", None, None),
    ("lifetime", "detached", "detached"),
    ("lifetime", Flag("detached"), "detached"),
]


@pytest.mark.parametrize(("option", "value", "held"), GOOD)
def test_what_is_allowed(option: str, value: object, held: object) -> None:
    assert check_options({option: value}) == {option: held}


class Weird:
    """No exception, though it is a class."""


RETRIED = "True, False, or exception classes"
ENVIRONMENT = "'env_vars'"
STRATEGIES = (
    "must be 'pack', a share goes to the fullest GPU with room for it, or 'spread'"
)
TEXTS = "a dict of texts to texts"
BAD = [
    *(("resources", value, "a dict of names") for value in ([("a", 1)], "a", 1, {"a"})),
    ("resources", {"": 1}, "names are strings"),
    ("resources", {1: 1}, "names are strings"),
    ("resources", {"a": None}, "NoneType"),
    *(("accelerator_type", value, "a text") for value in ("", 1, b"A100", ["A100"])),
    *(
        ("strategy", value, STRATEGIES)
        for value in ("SPREAD", "", True, 1, ["pack"], b"spread", np.zeros(2))
    ),
    *(
        ("lifetime", value, "must be None, a task ends with")
        for value in ("", "Detached", True, 0, ["detached"], np.zeros(2))
    ),
    *(("max_calls", value, "0 for no limit") for value in (-1, 1.0, True, "1")),
    *(("max_retries", value, "-1 for no limit") for value in (-2, 1.0, False, "1")),
    *(("priority", value, "higher goes first") for value in (1.5, True, "high")),
    *(
        ("num_returns", value, "a handle of its own")
        for value in (0, -1, True, 2.0, "2", "dynamic", [2])
    ),
    *(("name", value, "a text") for value in ("", 1, b"a")),
    *(
        ("timeout", value, "seconds above 0")
        for value in (0, -1, True, "1", math.nan, math.inf, 10**400)
    ),
    *(
        ("cancel_grace", value, "seconds, 0 to kill at once, or None")
        for value in (-1, -0.1, False, True, "1", math.nan, math.inf, np.zeros(2))
    ),
    *(
        ("retry_exceptions", value, RETRIED)
        for value in (
            *([], (), 1, "OSError", {OSError}, OSError(), Weird, list[int]),
            *(BaseException, KeyboardInterrupt, SystemExit, asyncio.CancelledError),
            *([OSError, GeneratorExit], [OSError, None], [True], BaseExceptionGroup),
        )
    ),
    *(
        ("runtime_env", value, ENVIRONMENT)
        for value in ([], "env", {"pip": []}, {"env_vars": {}, "pip": []}, {1: 2})
    ),
    *(
        ("runtime_env", {"env_vars": value}, TEXTS)
        for value in (
            *(None, [], "A=1", {"A": 1}, {1: "A"}, {"A": None}, {"": "1"}),
            *({"A=B": "1"}, {"A\0": "1"}, {"A": "\0"}, {"A": "\ud800"}),
        )
    ),
]


@pytest.mark.parametrize(("option", "value", "allowed"), BAD)
def test_what_is_not(option: str, value: object, allowed: str) -> None:
    """[B9] The message names the option, the value and what is allowed."""
    with pytest.raises(OptionError) as caught:
        check_options({option: value})
    message = str(caught.value)
    assert message.startswith(option)
    assert allowed in message
    told = value
    if isinstance(value, dict) and len(value) == 1:
        ((key, told),) = value.items()  # the part that is wrong is enough
        assert repr(key) in message
        told = key if allowed == "names are strings" else told
    assert repr(told) in message


@pytest.mark.parametrize(("name", "option"), [("CPU", "num_cpus"), ("GPU", "num_gpus")])
def test_resources_leave_cpus_and_gpus_to_their_options(name: str, option: str) -> None:
    with pytest.raises(OptionError, match=f"{name!r}; say {option}=0.5 instead"):
        check_options({"resources": {name: 0.5}})


@pytest.mark.parametrize("on", ["1", "true", " Yes ", "ON"])
def test_the_devices_may_be_set_by_who_asks_for_it(on: str) -> None:
    """[B25]"""
    variables = {
        "CUDA_VISIBLE_DEVICES": "0",
        "AIOGPU_NOSET_CUDA_VISIBLE_DEVICES": on,
    }
    assert checked(runtime_env={"env_vars": variables}).runtime_env == variables


@pytest.mark.parametrize("more", [{}, {"AIOGPU_NOSET_CUDA_VISIBLE_DEVICES": "0"}])
def test_the_devices_are_otherwise_aiogpus_to_set(more: dict[str, str]) -> None:
    variables = {"CUDA_VISIBLE_DEVICES": "0", **more}
    with pytest.raises(OptionError, match="AIOGPU_NOSET_CUDA_VISIBLE_DEVICES='1'"):
        check_options({"runtime_env": {"env_vars": variables}})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("num_gpu", "num_gpus"),
        ("num_cpu", "num_cpus"),
        ("resource", "resources"),
        ("max_retry", "max_retries"),
        ("time_out", "timeout"),
        ("runtime_envs", "runtime_env"),
    ],
)
def test_an_unknown_option_brings_the_nearest_to_mind(name: str, nearest: str) -> None:
    with pytest.raises(
        OptionError, match=rf"^{name} is not an .* Did you mean {nearest}\?"
    ):
        check_options({name: 1})


def test_an_option_like_no_other() -> None:
    with pytest.raises(OptionError) as caught:
        check_options({"zzz": 1})
    assert "Did you mean" not in str(caught.value)
    assert "There are: num_cpus, num_gpus, " in str(caught.value)


def test_none_means_the_default() -> None:
    names = Options.__annotations__
    assert checked(**dict.fromkeys(names)) == checked() == TaskOptions()
    both = check_options(dict.fromkeys(names)) | check_options(
        dict.fromkeys(ActorKeywords.__annotations__), "actor"
    )
    assert set(both) == set(TaskOptions._fields)


def test_the_error_is_a_value_error_too() -> None:
    """[B40]"""
    with pytest.raises(ValueError, match="num_gpus"):
        check_options({"num_gpus": -1})
    with pytest.raises(aiogpu.AiogpuError):
        check_options({"num_gpus": -1})


def test_what_was_given_is_copied() -> None:
    resources, variables = {"a": 1}, {"A": "1"}
    options = checked(resources=resources, runtime_env={"env_vars": variables})
    resources["a"], variables["A"] = 2, "2"
    assert (options.resources, options.runtime_env) == ({"a": 10_000}, {"A": "1"})


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
    ],
)
def test_a_gpu_task_has_a_process_of_its_own_unless_said(
    options: dict[str, Any], max_calls: int
) -> None:
    """[B26]"""
    assert spec(**options).max_calls == max_calls


def test_the_request() -> None:
    """[B34] A type is worth a thousandth of its own resource."""
    asked = spec(num_cpus=0, num_gpus=0.5, resources={"a": 2}, accelerator_type="A100")
    assert str(asked.shape.request) == "{a: 2, accelerator_type:A100: 0.001, GPU: 0.5}"
    assert asked.shape.request.accelerator_type == "A100"
    assert spec().shape.request.as_numbers() == {"CPU": 1.0}


def test_who_says_which_gpus_asks_for_some() -> None:
    """Perhaps by `.options`, so it is not asked before the first call."""
    where = {"memory": "40GiB", "name": "*H100*"}
    alone = checked(gpu_where=where)
    with pytest.raises(OptionError) as caught:
        alone.spec("train", 7)
    assert str(caught.value) == (
        "gpu_where asks for GPUs with memory of 40GiB or more and a name like "
        "'*h100*', but no GPU is asked for; say num_gpus= or gpu_memory= as well."
    )
    assert alone._replace(num_gpus=5_000).request().where == alone.gpu_where
    assert alone._replace(gpu_memory=1).request().where == alone.gpu_where


def test_who_is_tried_again_for_want_of_gpu_memory_asks_for_some() -> None:
    alone = checked(retry_oom="exclusive")
    with pytest.raises(OptionError, match=r"retry_oom='exclusive' .* say num_gpus= or"):
        alone.spec("train", 7)
    assert alone._replace(gpu_memory=1).spec("train", 7).retries_oom


def test_a_share_of_the_memory_is_that_of_a_share() -> None:
    alone = checked(gpu_memory="share")
    with pytest.raises(OptionError, match="num_gpus is 0; say num_gpus=, or gpu_m"):
        alone.request()
    assert alone._replace(num_gpus=5_000).request().gpu_memory == BY_SHARE


def test_only_a_detached_task_outlives_its_parent() -> None:
    assert not spec().is_detached
    assert spec(lifetime="detached").is_detached


def test_the_strategy_is_part_of_the_request() -> None:
    """[B24] Packing is what is done unless said otherwise."""
    pack, spread = (spec(num_gpus=0.5, strategy=name) for name in ("pack", "spread"))
    assert spec(num_gpus=0.5).shape == pack.shape
    assert pack.shape != spread.shape
    assert (pack.shape.request.spread, spread.shape.request.spread) == (False, True)


def test_the_spec() -> None:
    asked = spec(priority=3, timeout=2, max_retries=-1)
    assert (asked.name, asked.function) == ("train", 7)
    assert (asked.priority, asked.timeout, asked.max_retries) == (3, 2.0, -1)
    assert spec(name="embed").name == "embed"


def test_variables_make_a_shape_whatever_their_order() -> None:
    one = spec(runtime_env={"env_vars": {"A": "1", "B": "2"}})
    other = spec(runtime_env={"env_vars": {"B": "2", "A": "1"}})
    assert one.shape == other.shape
    assert one.shape != spec().shape


def test_seconds_are_floats() -> None:
    assert isinstance(check_seconds("timeout", 3), float)


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
