"""[B1] [B3] The options of `init`, good and bad."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu.api.node import check_node_options
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import OptionError

DEFAULTS: dict[str, Any] = {
    "num_cpus": None,
    "num_gpus": None,
    "resources": None,
    "accelerator_type": None,
    "gpu_memory": None,
    "gpu_memory_enforce": False,
    "foreign": "ignore",
    "mps": "off",
    "cpu_affinity": "auto",
    "preload": "auto",
    "log_to_driver": True,
    "cancel_grace": 2.0,
    "spare_workers": 2,
    "memory": None,
    "memory_guard": True,
    "object_memory": None,
    "spill_directory": None,
}


def checked(**options: Any) -> NodeOptions:
    return check_node_options(**{**DEFAULTS, **options})


def test_the_defaults() -> None:
    assert checked() == NodeOptions()


@pytest.mark.parametrize(
    ("option", "value", "held"),
    [
        ("num_cpus", 0, 0.0),
        ("num_cpus", 4, 4.0),
        ("num_cpus", 0.5, 0.5),
        ("num_gpus", 0, 0),
        ("num_gpus", 8, 8),
        ("resources", {}, {}),
        ("resources", OrderedDict(license=2), {"license": 2}),
        ("resources", {"accelerator_type:A100": 1}, {"accelerator_type:A100": 1}),
        ("accelerator_type", "A100", "A100"),
        ("preload", ["numpy", "json.decoder"], ("numpy", "json.decoder")),
        ("preload", (), ()),
        ("log_to_driver", False, False),
        ("cancel_grace", 1, 1.0),
        ("cancel_grace", 0.05, 0.05),
        ("spare_workers", 0, 0),
        ("spare_workers", 1024, 1024),
        ("memory", 0, 0),
        ("memory", 1 << 33, 1 << 33),
        ("memory", "6GiB", 6 << 30),
        ("memory", "1.5 GB", 1_500_000_000),
        ("memory_guard", False, False),
        ("object_memory", 0, 0),
        ("object_memory", "2GiB", 2 << 30),
        ("spill_directory", "/", "/"),
        ("spill_directory", Path("/"), "/"),
    ],
)
def test_what_is_allowed(option: str, value: object, held: object) -> None:
    found = getattr(checked(**{option: value}), option)
    assert found == held
    assert type(found) is type(held)


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        *(("num_cpus", value, "give an int or a float") for value in ("1", True, [1])),
        *(("num_cpus", value, "not a quantity") for value in (-1, math.nan, math.inf)),
        ("num_cpus", 1e-5, "at least 0.0001"),
        *(
            ("num_gpus", value, "a whole number of GPUs")
            for value in (1.5, 1.0, -1, "1", True, math.nan, math.inf, 10**7)
        ),
        *(("resources", value, "a dict of names") for value in ([1], "license", 1)),
        ("resources", {"CPU": 1}, "say num_cpus=1 instead"),
        ("resources", {"GPU": 1}, "say num_gpus=1 instead"),
        ("resources", {"gpu_memory": 1}, "say gpu_memory=1 instead"),
        ("gpu_memory", "0GiB", "a GPU without memory serves nobody"),
        ("resources", {"memory": 1}, "say memory=1 instead"),
        ("resources", {"license": -1}, "not a quantity"),
        ("resources", {"license": True}, "is a bool"),
        *(("accelerator_type", value, "a text") for value in ("", 1, ["A100"])),
        *(
            ("preload", value, "a sequence of module names")
            for value in ("numpy", None, {"numpy"}, [""], [1], ["numpy", b"json"])
        ),
        *(("log_to_driver", value, "True or False") for value in (0, 1, None, "no")),
        *(
            ("cancel_grace", value, "seconds above 0")
            for value in (0, -1, None, True, "2", math.nan, math.inf, 10**400)
        ),
        *(
            ("spare_workers", value, "a whole number from 0")
            for value in (-1, 1.5, True, None, "2", 1025)
        ),
        *(
            ("memory", value, "not an amount of memory")
            for value in (-1, 1.5, True, "6", "GiB", "-1GB", "nanGB", "1e99GB", [1])
        ),
        ("object_memory", "lots", "not an amount of memory"),
        ("spill_directory", 5, "must be the path of a directory"),
        ("spill_directory", b"/tmp", "must be the path of a directory"),
        ("spill_directory", "/no/such", "there is no such directory"),
        *(("memory_guard", value, "True or False") for value in (0, None)),
        *(("ignore_reinit_error", value, "True or False") for value in (0, 1, None)),
        *(("address", value, "a text") for value in ("", 1, b"local")),
    ],
)
def test_what_is_not(option: str, value: object, allowed: str) -> None:
    """It is told where `init` is called, not at the await."""
    with pytest.raises(OptionError) as caught:
        aiogpu.init(**{option: value})
    message = str(caught.value)
    assert option in message
    assert allowed in message
    told = next(iter(value.values())) if isinstance(value, dict) else value
    assert repr(told) in message


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
    options = checked(preload=preload)
    assert (options.preload, options.learns) == (modules, learns)


def test_what_was_given_is_copied() -> None:
    resources, preload = {"license": 1}, ["json"]
    options = checked(resources=resources, preload=preload)
    resources["license"] = 2
    preload.append("numpy")
    assert options.resources == {"license": 1}
    assert options.preload == ("json",)


def test_there_is_nothing_else() -> None:
    with pytest.raises(OptionError, match=r"^num_gpu is .* Did you mean num_gpus\?"):
        aiogpu.init(num_gpu=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        aiogpu.init("local")  # type: ignore[call-arg]
