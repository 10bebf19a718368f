"""The answers of each vendor, and the registry of vendors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import aiogpu
from aiogpu import accelerators
from aiogpu.accelerators import (
    Device,
    DeviceWatch,
    Health,
    Unwatched,
    register,
    registry,
)
from aiogpu.accelerators.amd import Amd
from aiogpu.accelerators.ascend import Ascend
from aiogpu.accelerators.base import Accelerator
from aiogpu.accelerators.gaudi import Gaudi
from aiogpu.accelerators.intel_gpu import IntelGpu
from aiogpu.accelerators.neuron import Neuron
from aiogpu.accelerators.nvidia import Nvidia
from aiogpu.accelerators.registry import KNOWN, amount, kinds, variables, vendor_of
from aiogpu.accelerators.tpu import Tpu
from aiogpu.errors import OptionError
from tests.unit.accelerators.vendors import Fpga, write

ANSWERS = [
    (Nvidia(), "GPU", "num_gpus", "CUDA_VISIBLE_DEVICES", ""),
    (Amd(), "GPU", "num_gpus", "HIP_VISIBLE_DEVICES", "-1"),
    (IntelGpu(), "GPU", "num_gpus", "ZE_AFFINITY_MASK", "999999"),
    (Neuron(), "neuron_cores", None, "NEURON_RT_VISIBLE_CORES", ""),
    (Tpu(), "TPU", None, "TPU_VISIBLE_CHIPS", ""),
    (Gaudi(), "HPU", None, "HABANA_VISIBLE_MODULES", ""),
    (Ascend(), "NPU", None, "ASCEND_RT_VISIBLE_DEVICES", ""),
]


@pytest.mark.parametrize(
    ("vendor", "kind", "option", "variable", "none"), ANSWERS, ids=repr
)
def test_vendor_answers_and_assigns_devices(
    vendor: Accelerator, kind: str, option: str | None, variable: str, none: str
) -> None:
    assert (vendor.kind, vendor.variable) == (kind, variable)
    assert vendor.option == (option or f"resources['{kind}']")
    assert repr(vendor) == f"<{type(vendor).__name__} {kind}>"
    assert not vendor.watch().knows(Device(0))
    assert vendor.assignment((0, 3), {})[variable] == "0,3"
    assert vendor.assignment((), {variable: "0,1"}) == {variable: none}
    for value in ("1", "TRUE", "Yes", " on "):
        switch = {f"AIOGPU_NOSET_{variable}": value}
        assert vendor.assignment((0,), switch) == vendor.assignment((), switch) == {}
    for value in ("", "0", "false", "no", "off"):
        assert vendor.assignment((), {f"AIOGPU_NOSET_{variable}": value}) != {}


@pytest.mark.parametrize(
    ("vendor", "quantities"),
    [
        (Nvidia(), {0.25: 2500, 2: 20_000}),
        (Amd(), {0.25: 2500}),
        (IntelGpu(), {0.25: 2500}),
        (Ascend(), {0.5: 5000}),
        (Gaudi(), {2: 20_000}),
        (Neuron(), {0: 0, 1: 10_000, 2.0: 20_000}),
        (Tpu(), {0: 0, 1: 10_000, 2.0: 20_000, 4: 40_000, 8: 80_000}),
    ],
    ids=repr,
)
def test_valid_quantities_become_ten_thousandths(
    vendor: Accelerator, quantities: dict[float, int]
) -> None:
    assert {value: vendor.quantity(value) for value in quantities} == quantities


@pytest.mark.parametrize(
    ("vendor", "values", "message"),
    [
        *((gpu, [1.5], "num_gpus={} mixes") for gpu in (Nvidia(), Amd(), IntelGpu())),
        (Ascend(), [1.5], "resources['NPU']={} mixes"),
        (Gaudi(), [0.5], "resources['HPU']={}: a Gaudi cannot be shared"),
        (Neuron(), [0.5, 1.5, 2.00001], "resources['neuron_cores']={}: a NeuronCore"),
        (Neuron(), [-1, "2", True, None], ""),
        (Tpu(), [3, 0.5, 16, 1.5, 2.00001], "resources['TPU']={}: a process can have"),
    ],
    ids=repr,
)
def test_other_quantities_are_refused(
    vendor: Accelerator, values: list[object], message: str
) -> None:
    for value in values:
        with pytest.raises(OptionError) as caught:
            vendor.quantity(value)
        assert message.format(value) in str(caught.value)


@pytest.mark.parametrize(
    ("vendor", "types"),
    [
        (Amd(), {"0x74a1": "AMD-Instinct-MI300X-OAM", "740F": "AMD-Instinct-MI210"}),
        (Amd(), dict.fromkeys(["0x1", "MI210", "", None])),
        (IntelGpu(), {"Intel(R) Data Center GPU Max 1550": "Intel-GPU-Max-1550"}),
        (IntelGpu(), dict.fromkeys(["", None])),
        (Neuron(), {None: "aws-neuron-core"}),
        (
            Tpu(),
            {"v4-16": "TPU-V4", "v5litepod-8": "TPU-V5LITEPOD", "tpu7x-8": "TPU-V7X"},
        ),
        (Tpu(), dict.fromkeys(["v4", "A100-40G", "v-8", "", None])),
        (Gaudi(), {"0x1000": "Intel-GAUDI", None: None}),
        (Ascend(), {"Ascend910B": "Ascend910B", "": None}),
    ],
    ids=repr,
)
def test_type_is_derived_from_the_name_of_a_device(
    vendor: Accelerator, types: dict[str | None, str | None]
) -> None:
    assert {name: vendor.type_of(name) for name in types} == types


def test_tpus_are_assigned_with_their_layout(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path, {f"dev/accel{number}": ""})
    tpu = Tpu(str(tmp_path))
    one = {"TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1", "TPU_HOST_BOUNDS": "1,1,1"}
    two = {"TPU_CHIPS_PER_HOST_BOUNDS": "1,2,1", "TPU_HOST_BOUNDS": "1,1,1"}
    assert tpu.assignment((3,), {}) == {"TPU_VISIBLE_CHIPS": "3", **one}
    assert tpu.assignment((0, 1), {}) == {"TPU_VISIBLE_CHIPS": "0,1", **two}
    assert tpu.assignment((0, 1, 2, 3), {}) == {}, "all chips of the machine"
    other = Tpu(str(tmp_path / "other")).assignment((0, 1, 4, 5), {})
    assert other == {"TPU_VISIBLE_CHIPS": "0,1,4,5"}


def test_assignment_of_intel_gpus_replaces_the_selector() -> None:
    environ = {"ONEAPI_DEVICE_SELECTOR": "level_zero:2,3"}
    assert IntelGpu().assignment((3, "1.0"), environ) == {
        "ZE_AFFINITY_MASK": "3,1.0",
        "ONEAPI_DEVICE_SELECTOR": "level_zero:gpu",
    }


# Names of types


def test_module_has_exactly_its_public_names() -> None:
    assert aiogpu.accelerators is accelerators
    names: dict[str, object] = {}
    exec("from aiogpu.accelerators import *", names)
    assert set(accelerators.__all__) <= set(names)
    assert sorted(dir(accelerators)) == sorted(accelerators.__all__)
    with pytest.raises(AttributeError, match=r"'aiogpu\.accelerators' has no attr"):
        _ = accelerators.NVIDIA_A1000  # type: ignore[attr-defined]


# The registry


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    yield
    registry._registered.clear()


def test_table_of_vendors_agrees_with_their_classes() -> None:
    table = [(entry.kind, entry.variable, entry.name) for entry in KNOWN]
    classes = [(v.kind, v.variable, type(v).__name__) for v in registry.vendors()]
    assert table == classes
    assert kinds() == ("GPU", "neuron_cores", "TPU", "HPU", "NPU")
    assert len(set(variables())) == len(KNOWN)


def test_unwatched_devices_are_unknown_and_well() -> None:
    watch: DeviceWatch = Unwatched()
    watch.open()
    assert not watch.knows(Device(0))
    assert watch.look(Device(3)).problem == "the driver of 3 is not asked"
    assert watch.check(Device(3)) == Health()
    watch.close()


def test_vendor_can_be_registered_twice() -> None:
    known = [repr(vendor_of(kind)) for kind in ("GPU", "TPU")]
    assert known == ["<Nvidia GPU>", "<Tpu TPU>"]
    assert vendor_of("license") is None
    first, second = Fpga(), Fpga()
    register(first)
    register(first)
    assert vendor_of("FPGA") is registry.vendors()[-1] is first
    assert (kinds()[-1], variables()[-1]) == ("FPGA", "FPGA_VISIBLE")
    register(second)
    assert vendor_of("FPGA") is second, "a notebook may run its cell again"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"watch": None}, "it lacks watch."),
        ({"quantity": 1, "kind": ""}, "it lacks quantity, kind."),
        ({"variable": None}, "it lacks variable."),
    ],
)
def test_incomplete_vendor_is_refused(missing: dict[str, object], message: str) -> None:
    methods = "the methods devices, assignment, quantity, type_of, watch"
    with pytest.raises(OptionError) as caught:
        register(type("Incomplete", (Fpga,), missing)())
    assert message in str(caught.value)
    assert methods in str(caught.value)
    assert vendor_of("FPGA") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"kind": kind}, f"'{kind}' is one of aiogpu's own resources")
            for kind in ("GPU", "neuron_cores", "memory", "accelerator_type:X")
        ),
        ({"variable": "OTHER"}, "'FPGA' is already the kind of <Fpga>"),
        *(
            ({"kind": "OTHER", "variable": v}, f"{v} already assigns another vendor's")
            for v in ("CUDA_VISIBLE_DEVICES", "FPGA_VISIBLE")
        ),
    ],
)
def test_kind_belongs_to_one_vendor(changes: dict[str, object], message: str) -> None:
    register(Fpga())
    with pytest.raises(OptionError, match=message):
        register(type("Other", (Fpga,), changes)())
    with pytest.raises(OptionError, match="it is a class, not an object"):
        register(Fpga)  # type: ignore[arg-type]


def test_quantity_of_a_vendor_must_be_valid_ten_thousandths() -> None:
    for parts in (0, 1, 10_000, 30_000):
        assert amount(Fpga(), parts) == parts
    for wrong in (None, "1", 1.0, True, -1, 10_001, 15_000):
        with pytest.raises(OptionError, match=r"`quantity` of <Fpga> returned"):
            amount(Fpga(), wrong)
