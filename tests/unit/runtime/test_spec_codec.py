"""Encoding and decoding of function specs."""

from __future__ import annotations

import pickle
import tracemalloc
from dataclasses import replace
from typing import Any, cast

import pytest

from aiogpu.api.options import TaskOptions
from aiogpu.api.reservation import placement_func, placement_group_of
from aiogpu.client.function_spec import (
    ActorTerms,
    Function,
    FunctionSpec,
    new_func_id,
    new_function_id,
)
from aiogpu.client.spec_codec import dump_spec, load_spec
from aiogpu.serialization.serializer import dump_retried
from aiogpu.wire.messages import DEFAULT_GROUP, SERIAL, ProtocolError
from tests.contract.raw_client import changed
from tests.unit.runtime import fakes


def func_of(**options: Any) -> FunctionSpec:
    checked = TaskOptions(**TaskOptions.check(options, "task"))
    function = fakes.function()
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
    {"num_cpus": 0, "num_gpus": 0.25, "gpu_strategy": "spread"},
    {"num_gpus": 2, "accelerator_type": "A100", "max_calls": 0},
    {"resources": {"license": 0.5, "a": 2}, "priority": -3, "timeout": 2.5},
    {"runtime_env": {"env_vars": {"B": "1", "A": "2"}}, "max_retries": -1},
    {"name": "coroutine", "retry_exceptions": True, "lifetime": "detached"},
    {"retry_exceptions": [OSError, KeyError], "cancel_grace": 0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options))
def test_function_spec_survives_encoding(options: dict[str, Any]) -> None:
    ours = func_of(**options)
    function = Function(new_function_id(), ours.function.payload)
    theirs = load_spec(dump_spec(ours), function)
    assert theirs.spec.shape == ours.spec.shape
    assert hash(theirs.spec.shape) == hash(ours.spec.shape)
    assert theirs.spec.function == function.id != ours.spec.function
    assert theirs.id != ours.id
    for name in ("resources", "environ", "is_coroutine", "retried"):
        assert getattr(theirs, name) == getattr(ours, name), name
    names = ("name", "max_calls", "max_retries", "priority", "timeout", "is_detached")
    for name in (*names, "cancel_grace", "lane", "is_endless"):
        assert getattr(theirs.spec, name) == getattr(ours.spec, name), name


def test_placement_group_survives_encoding() -> None:
    bundles: list[dict[str, float]] = [{"GPU": 1, "CPU": 2}, {"GPU": 0.5}]
    group = placement_group_of(bundles, "SPREAD", "group", "key")
    ours = placement_func(group, 3)
    theirs = load_spec(dump_spec(ours), fakes.function())
    assert theirs.spec.shape == ours.spec.shape
    assert theirs.spec.shape.request.placement_group == group
    assert theirs.spec.is_lease
    assert theirs.spec.is_grouped


def test_pickles_of_the_user_are_never_loaded() -> None:
    unloadable = b"cno_such_module\nNoError\n."
    acting = ActorTerms(SERIAL, {DEFAULT_GROUP: 1}, {}, interface=unloadable)
    ours = replace(func_of(), retried=unloadable, actor=acting)
    theirs: Any = load_spec(dump_spec(ours), fakes.function())
    assert theirs.retried == unloadable
    assert theirs.actor == acting
    assert theirs.actor.packed_interface() == unloadable


@pytest.mark.parametrize(
    "wrong",
    [
        {"scalars": (("CPU", -1),)},
        *({"scalars": ((name, 1), ("a", 1))} for name in "ab"),
        *({"gpu_memory": -2}, {"max_calls": -1}, {"is_lease": True}),
        *({"timeout": float("nan")}, {"cancel_grace": float("inf")}),
    ],
    ids=str,
)
def test_impossible_requests_are_refused(wrong: dict[str, Any]) -> None:
    ours = fakes.func()
    ours = replace(ours, spec=changed(ours.spec, wrong))
    with pytest.raises(ProtocolError, match="would refuse"):
        load_spec(dump_spec(ours), fakes.function())


def test_run_limits_of_methods_survive_encoding() -> None:
    terms = ActorTerms(SERIAL, {}, {}, interface=b"")
    ours = replace(fakes.func(), actor=terms._replace(run_limits={"slow": 0.5}))
    actor: Any = load_spec(dump_spec(ours), fakes.function()).actor
    assert actor.run_limits == {"slow": 0.5}
    for wrong in ({"slow": 0.0}, {"slow": float("inf")}, {"slow": "soon"}, ["slow"]):
        theirs = replace(ours, actor=terms._replace(run_limits=cast("Any", wrong)))
        with pytest.raises(ProtocolError):
            load_spec(dump_spec(theirs), fakes.function())


@pytest.mark.parametrize(
    "wrong",
    [{"scalars": (("CPU", "many"),)}, {"timeout": "soon"}, {"max_calls": None}],
    ids=str,
)
def test_malformed_specs_are_refused(wrong: dict[str, Any]) -> None:
    ours = fakes.func()
    packed = dump_spec(replace(ours, spec=changed(ours.spec, wrong)))
    for data in (packed, packed[:-3], pickle.dumps(packed), b""):
        with pytest.raises(ProtocolError):
            load_spec(data, fakes.function())


def test_short_spec_allocates_little_memory() -> None:
    """As a pickle, these bytes would allocate gigabytes."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            load_spec(b"\x80\x05Nr\x00\x00\x00\x10.", fakes.function())
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
