"""What a task asks of its children's scheduler, there and back."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from aiogpu.api.options import TaskOptions, check_options, placement_group_of
from aiogpu.api.reservation import Placement, placement_func
from aiogpu.client.function_spec import (
    ActorTerms,
    Function,
    FunctionSpec,
    new_func_id,
    new_function_id,
)
from aiogpu.client.spec_codec import Terms
from aiogpu.core.model.request import BundleRef
from aiogpu.errors import ProtocolError
from aiogpu.serialization.serializer import dump_retried, load_result
from aiogpu.wire.codec import unpack
from aiogpu.wire.messages import DEFAULT_GROUP, SERIAL
from tests.program import environment
from tests.runtime import funcs


def func_of(**options: Any) -> FunctionSpec:
    checked = TaskOptions(**check_options(options))
    function = funcs.function()
    spec = checked.spec("train", function.id)
    return FunctionSpec(
        new_func_id(),
        function,
        spec,
        spec.shape.request.as_numbers(),
        dict(checked.runtime_env),
        options.get("name") == "coroutine",
        retried=dump_retried(checked.retry_exceptions),
    )


OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_cpus": 0, "num_gpus": 0.25, "strategy": "spread"},
    {"num_gpus": 2, "accelerator_type": "A100", "max_calls": 0},
    {"resources": {"license": 0.5, "a": 2}, "priority": -3, "timeout": 2.5},
    {"runtime_env": {"env_vars": {"B": "1", "A": "2"}}, "max_retries": -1},
    {"name": "coroutine", "retry_exceptions": True, "lifetime": "detached"},
    {"retry_exceptions": [OSError, KeyError], "cancel_grace": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options))
def test_a_site_there_and_back(options: dict[str, Any]) -> None:
    ours = func_of(**options)
    function = Function(new_function_id(), ours.function.payload)
    theirs = Terms.unpack(Terms.of(ours).pack()).func(function)
    assert theirs.spec.shape == ours.spec.shape
    assert hash(theirs.spec.shape) == hash(ours.spec.shape)
    assert theirs.spec.function == function.id != ours.spec.function
    assert theirs.id != ours.id
    for name in ("resources", "environ", "is_coroutine", "retried"):
        assert getattr(theirs, name) == getattr(ours, name), name
    names = ("name", "max_calls", "max_retries", "priority", "timeout", "is_detached")
    for name in (*names, "cancel_grace", "lane", "is_endless"):
        assert getattr(theirs.spec, name) == getattr(ours.spec, name), name


GANG = placement_group_of(
    [{"GPU": 1, "CPU": 2}, {"GPU": 0.5}], "SPREAD", "group", "key"
)


def test_a_placement_there_and_back() -> None:
    ours = placement_func(GANG, 3)
    theirs = Terms.unpack(Terms.of(ours).pack()).func(funcs.function())
    assert theirs.spec.shape == ours.spec.shape
    assert theirs.spec.shape.request.placement_group == GANG
    assert theirs.spec.is_lease
    assert theirs.spec.is_grouped


def test_a_member_there_and_back() -> None:
    ours = func_of(placement=Placement(GANG), bundle=1, num_gpus=0.25)
    theirs = Terms.unpack(Terms.of(ours).pack()).func(funcs.function())
    assert theirs.spec.shape == ours.spec.shape
    assert theirs.spec.shape.request.placement_group == BundleRef("key", "group", 1)


BUNDLE = ((("CPU", 20_000),), (("GPU", 10_000),), None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"placement_group": ("key", "group", -2, "", ())},
        {
            "placement_group": ("key", "group", 0, "", ()),
            "is_lease": True,
            "is_endless": True,
        },
        {"placement_group": ("key", "group", -1, "PACK", (BUNDLE,))},
        {
            "placement_group": ("key", "group", -1, "PACK", (BUNDLE,) * 300),
            "is_lease": True,
        },
        {"placement_group": ("key", "group", -1, "TIGHT", (BUNDLE,)), "is_lease": True},
        {
            "placement_group": ("key", "group", -1, "PACK", ((), BUNDLE)),
            "is_lease": True,
        },
        {
            "placement_group": (
                "key",
                "g",
                -1,
                "PACK",
                (((), (("GPU", 15_000),), None),),
            ),
            "is_lease": True,
            "scalars": (),
            "devices": (("GPU", 15_000),),
        },
    ],
)
def test_a_placement_that_nobody_can_ask_for(wrong: dict[str, Any]) -> None:
    terms = Terms.of(placement_func(GANG, 0))
    like = {"scalars": BUNDLE[0], "devices": BUNDLE[1], "is_lease": False}
    with pytest.raises(ProtocolError):
        Terms.unpack(terms._replace(**{**like, **wrong}).pack())


ELSEWHERE = """
import sys
from tests.runtime.test_terms import OPTIONS, func_of
from aiogpu.runtime.callers.requests import Terms
for options in OPTIONS:
    site = func_of(**options)
    print(hash(site.spec.shape), Terms.of(site).pack().hex())
"""


def test_shapes_of_another_process_equal_ours() -> None:
    """Its hashes of texts are not ours."""
    told = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        env=environment(PYTHONHASHSEED="1"),
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    hashes = set()
    for options, line in zip(OPTIONS, told, strict=True):
        number, packed = line.split()
        ours = func_of(**options).spec.shape
        theirs = Terms.unpack(bytes.fromhex(packed)).func(funcs.function()).spec.shape
        assert {ours: 1}[theirs] == 1
        hashes.add(int(number) == hash(ours))
    assert False in hashes, "else this test shows nothing"


def test_only_plain_values_travel() -> None:
    packed = Terms.of(func_of(retry_exceptions=[OSError])).pack()
    assert b"aiogpu" not in packed
    assert type(unpack(packed)) is tuple


def test_equal_terms_are_equal_keys() -> None:
    one, two = (
        Terms.unpack(Terms.of(func_of(name="a", timeout=1)).pack()) for _ in "12"
    )
    assert one == two
    assert hash(one) == hash(two)


def test_what_is_the_users_is_never_loaded() -> None:
    unloadable = b"cno_such_module\nNoError\n."
    acting = ActorTerms(SERIAL, {DEFAULT_GROUP: 1}, {}, interface=unloadable)
    ours = replace(func_of(), retried=unloadable, actor=acting)
    theirs = Terms.unpack(Terms.of(ours).pack()).func(funcs.function())
    assert theirs.retried == unloadable
    assert theirs.actor == acting
    assert theirs.actor is not None
    assert theirs.actor.packed_interface() == unloadable


def test_the_programs_own_face_is_packed_for_others() -> None:
    acting = ActorTerms(SERIAL, {DEFAULT_GROUP: 1}, {}, interface=["a", "face"])
    assert load_result(acting.packed_interface()) == ["a", "face"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"scalars": (("CPU", -1),)},
        {"devices": (("GPU", -1),)},
        {"scalars": (("a", 1), ("a", 1))},
        {"scalars": (("b", 1), ("a", 1))},
        {"gpu_memory": -2},
        {"max_calls": -1},
        {"max_retries": -2},
        {"window": -1},
        {"timeout": float("nan")},
        {"cancel_grace": float("inf")},
        {"is_lease": True},
    ],
    ids=str,
)
def test_what_nobody_can_ask_for_is_refused(wrong: dict[str, Any]) -> None:
    packed = Terms.of(funcs.func())._replace(**wrong).pack()
    with pytest.raises(ProtocolError, match="nobody can ask for"):
        Terms.unpack(packed)
