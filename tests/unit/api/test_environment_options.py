"""Variables of a task that would fight what it is assigned."""

from __future__ import annotations

import pytest

from aiogpu.accelerators.registry import variables
from aiogpu.api.options import check_runtime_env
from aiogpu.errors import OptionError


def checked(**given: str) -> dict[str, str]:
    return check_runtime_env("runtime_env", {"env_vars": given})


@pytest.mark.parametrize("name", variables())
def test_the_variables_of_all_vendors_are_aiogpus(name: str) -> None:
    with pytest.raises(OptionError) as caught:
        checked(**{name: "0"})
    assert str(caught.value) == (
        f"runtime_env['env_vars'] sets {name}, which aiogpu sets to the devices that "
        f"the task is given. Leave it out, or add AIOGPU_NOSET_{name}='1' to see to it "
        f"yourself."
    )


@pytest.mark.parametrize("name", variables())
def test_each_has_a_switch_of_its_own(name: str) -> None:
    given = {name: "0", f"AIOGPU_NOSET_{name}": "on"}
    assert checked(**given) == given
    other = next(each for each in variables() if each != name)
    with pytest.raises(OptionError, match=f"sets {other}, which"):
        checked(**given, **{other: "0"})


def test_an_order_of_ones_own_would_change_what_an_index_says() -> None:
    with pytest.raises(
        OptionError, match="sets CUDA_DEVICE_ORDER='FASTEST_FIRST', but"
    ):
        checked(CUDA_DEVICE_ORDER="FASTEST_FIRST")
    for given in (
        {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        {
            "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
            "AIOGPU_NOSET_CUDA_VISIBLE_DEVICES": "1",
        },
    ):
        assert checked(**given) == given


def test_what_changes_how_hip_counts_is_refused() -> None:
    with pytest.raises(OptionError, match="sets ROCR_VISIBLE_DEVICES, and HIP_VIS"):
        checked(ROCR_VISIBLE_DEVICES="1")
    given = {"ROCR_VISIBLE_DEVICES": "1", "AIOGPU_NOSET_HIP_VISIBLE_DEVICES": "1"}
    assert checked(**given) == given
