"""What a lease is asked for: checked as a task's options are."""

from __future__ import annotations

from typing import Any

import pytest

import aiogpu
from aiogpu.api.reservation import lease_func
from aiogpu.errors import MisuseError, OptionError


def test_it_has_no_cpu_and_its_timeout_is_no_end() -> None:
    func, timeout = lease_func({"num_gpus": 0.5, "timeout": 3, "priority": 2})
    spec = func.spec
    assert func.resources == {"GPU": 0.5}
    assert (timeout, spec.timeout) == (3.0, None)
    assert (spec.name, spec.priority) == ("lease", 2)
    assert (spec.is_lease, spec.is_endless, spec.max_calls) == (True, True, 1)


def test_none_is_as_if_it_was_not_said() -> None:
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
def test_what_is_wrong_is_named(options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        lease_func(options)


async def test_what_is_not_granted_has_no_ids() -> None:
    asked = aiogpu.lease(num_gpus=1)
    assert repr(asked) == "<Lease lease not asked for>"
    assert not asked.is_held
    with pytest.raises(MisuseError, match="not granted yet"):
        _ = asked.ids
    with pytest.raises(MisuseError, match="not asked for yet"):
        await asked.why()
    await asked.release()
