"""What a placement is asked for, and what is said of one, with every mistake named."""

from __future__ import annotations

from typing import Any

import pytest

import aiogpu
from aiogpu.api.options import TaskOptions, check_options, placement_group_of
from aiogpu.api.reservation import Placement
from aiogpu.core.model.request import MOST_BUNDLES, BundleRef, Request
from aiogpu.core.model.units import UNIT


def group(*bundles: dict[str, Any]) -> Placement:
    return Placement(placement_group_of(bundles, "PACK", "group", "key"))


def asked(**options: Any) -> Request:
    return TaskOptions(**check_options(options)).request()


@pytest.mark.parametrize(
    ("bundles", "why"),
    [
        ([], "from 1 to 256"),
        ([{"CPU": 1}] * (MOST_BUNDLES + 1), "from 1 to 256"),
        ("GPU", "must be a list of dicts"),
        ({"GPU": 1}, "must be a list of dicts"),
        (7, "must be a list of dicts"),
        ([7], r"bundles\[0\]=7 must be a dict"),
        ([{"GPU": 1}, {}], r"bundles\[1\]={} asks for nothing"),
        ([{"GPU": 0, "CPU": 0}], "asks for nothing"),
        ([{"GPU": 1.5}], r"bundles\[0\]\['GPU'\]=1.5 mixes whole devices"),
        ([{"GPU": -1}], "is not a quantity"),
        ([{"CPU": "1"}], "is a str"),
        ([{"memory": "lots"}], "memory"),
        ([{"license": True}], "is a bool"),
        ([{1: 1}], "names are strings"),
        (
            [{"GPU": 1, "accelerator_type:A": 0.001, "accelerator_type:B": 0.001}],
            "more than one accelerator_type",
        ),
    ],
)
def test_bundles_that_are_none(bundles: Any, why: str) -> None:
    with pytest.raises(aiogpu.OptionError, match=why):
        aiogpu.placement(bundles)


@pytest.mark.parametrize("strategy", ["pack", "TIGHT", None, 1])
def test_a_strategy_that_is_none(strategy: Any) -> None:
    with pytest.raises(aiogpu.OptionError, match="'STRICT_SPREAD'"):
        aiogpu.placement([{"CPU": 1}], strategy)


def test_options_that_are_none() -> None:
    with pytest.raises(aiogpu.OptionError, match="lifetime"):
        aiogpu.placement([{"CPU": 1}], lifetime="detached")  # type: ignore[call-arg]
    with pytest.raises(aiogpu.OptionError, match="name=''"):
        aiogpu.placement([{"CPU": 1}], name="")
    with pytest.raises(aiogpu.OptionError, match="priority"):
        aiogpu.placement([{"CPU": 1}], priority="high")  # type: ignore[arg-type]


def test_without_a_loop_there_is_none() -> None:
    with pytest.raises(aiogpu.NoLoopError):
        aiogpu.placement([{"CPU": 1}])


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


@pytest.mark.parametrize("bundle", [-2, 0.5, "0", True])
def test_a_number_that_no_bundle_has(bundle: Any) -> None:
    with pytest.raises(aiogpu.OptionError, match="bundle="):
        asked(placement=group({"CPU": 1}), bundle=bundle)


def test_a_bundle_that_is_not_there() -> None:
    with pytest.raises(aiogpu.OptionError, match="none of group, which has the bundl"):
        asked(placement=group({"CPU": 1}), bundle=1)
    with pytest.raises(aiogpu.OptionError, match="say placement= as well"):
        asked(bundle=0)
    with pytest.raises(aiogpu.OptionError, match="must be what aiogpu"):
        asked(placement=[{"CPU": 1}])


def test_none_is_no_placement() -> None:
    assert asked(placement=None, bundle=None) == asked()
    assert asked(placement=None, bundle=-1).placement_group is None


def test_what_fits_no_bundle_is_told_with_both() -> None:
    within = group({"GPU": 1, "CPU": 1}, {"GPU": 0.5})
    with pytest.raises(aiogpu.InfeasibleError) as anywhere:
        asked(placement=within, num_gpus=2)
    assert "{GPU: 2} does not fit into any bundle of group" in str(anywhere.value)
    assert "[{CPU: 1, GPU: 1}, {GPU: 0.5}]" in str(anywhere.value)
    with pytest.raises(aiogpu.InfeasibleError) as there:
        asked(placement=within, num_gpus=1, bundle=1)
    assert "bundle 1 of group, {GPU: 0.5}" in str(there.value)
    with pytest.raises(aiogpu.InfeasibleError, match="CPU: 2"):
        asked(placement=within, num_cpus=2)


@pytest.mark.parametrize(
    ("bundle", "options", "cpus"),
    [
        (0, {}, UNIT),
        (1, {}, 0),
        (-1, {}, UNIT),
        (-1, {"num_gpus": 0.5}, UNIT),
        (0, {"num_cpus": 0}, 0),
        (0, {"num_cpus": None}, UNIT),
    ],
)
def test_a_cpu_is_asked_for_where_there_is_one(
    bundle: int, options: dict[str, Any], cpus: int
) -> None:
    within = group({"GPU": 1, "CPU": 1}, {"GPU": 0.5})
    request = asked(placement=within, bundle=bundle, **options)
    assert dict(request.scalars).get("CPU", 0) == cpus
    assert request.placement_group == BundleRef("key", "group", bundle)
