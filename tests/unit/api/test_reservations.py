"""What leases and placements are asked for, and what is said of mistakes."""

from __future__ import annotations

from typing import Any

import pytest

import aiogpu
from aiogpu.api.options import TaskOptions, check_options, placement_group_of
from aiogpu.api.reservation import Placement, lease_func
from aiogpu.core.model.request import MOST_BUNDLES, Request
from aiogpu.errors import MisuseError, OptionError


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
        ({"num_gpus": 1, "resources": {"neuron_cores": 1}}, "two vendors|one vendor"),
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
        ([], {}, "from 1 to 256"),
        ([{"CPU": 1}] * (MOST_BUNDLES + 1), {}, "from 1 to 256"),
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
        ([{1: 1}], {}, "names are strings"),
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
        ({"bundle": 1}, "none of group, which has the bundl"),
        ({"bundle": 0, "placement": None}, "say placement= as well"),
        ({"placement": [{"CPU": 1}]}, "must be what aiogpu"),
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
