"""[B35] Resources by name: which are devices, and how many may be asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import aiogpu
from aiogpu.accelerators import registry
from aiogpu.api.node import check_declared
from aiogpu.api.options import TaskOptions, check_options
from aiogpu.client.current import current
from aiogpu.core.model.request import TaskSpec
from aiogpu.errors import OptionError
from tests.unit.accelerators.vendors import Fpga


class WholeFpga(Fpga):
    """One whose quantities are whole."""

    def quantity(self, value: object) -> int:
        assert isinstance(value, int)
        return value * 10_000


@pytest.fixture
def registered() -> Iterator[None]:
    aiogpu.accelerators.register(WholeFpga())
    yield
    registry._registered.clear()


def spec(**options: Any) -> TaskSpec:
    return TaskOptions(**check_options(options)).spec("train", 7)


def task(**options: Any) -> object:
    return aiogpu.remote(**options)(lambda: None)


@pytest.mark.parametrize(
    ("resources", "devices"),
    [
        ({"neuron_cores": 2}, (("neuron_cores", 20_000),)),
        ({"TPU": 4, "license": 1}, (("TPU", 40_000),)),
        ({"HPU": 8.0}, (("HPU", 80_000),)),
        ({"NPU": 0.25}, (("NPU", 2_500),)),
        ({"neuron_cores": 0, "TPU": 0}, ()),
        ({"tpu": 0.5}, ()),
    ],
)
def test_kinds_of_devices_are_asked_for_as_devices(
    resources: dict[str, float], devices: object
) -> None:
    asked = spec(resources=resources)
    assert asked.shape.request.devices == devices
    names = {name for name, _ in asked.shape.request.scalars} - {"CPU"}
    assert names == set(resources) & {"license", "tpu"}


@pytest.mark.parametrize(
    ("resources", "max_calls"),
    [({"neuron_cores": 1}, 1), ({"NPU": 0.5}, 1), ({"TPU": 0}, 0), ({"license": 1}, 0)],
)
def test_a_task_with_any_device_has_a_process_of_its_own(
    resources: dict[str, float], max_calls: int
) -> None:
    """[B26]"""
    assert spec(resources=resources).max_calls == max_calls
    assert spec(resources=resources, max_calls=0).max_calls == 0


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        ({"neuron_cores": 0.5}, "a NeuronCore cannot be shared; give a whole number"),
        ({"TPU": 3}, "is no number of chips that a process can have; give 1, 2, 4 or"),
        ({"HPU": 1.5}, "a Gaudi cannot be shared"),
        ({"NPU": 1.5}, "mixes whole devices and a share"),
        ({"TPU": "1"}, "is a str"),
    ],
)
@pytest.mark.parametrize("is_actor", [False, True])
def test_the_vendor_refuses_quantities_at_decoration(
    resources: dict[str, Any], why: str, is_actor: bool
) -> None:
    made = aiogpu.remote(num_cpus=1)(type("A", (), {}) if is_actor else lambda: None)
    ((name, value),) = resources.items()
    with pytest.raises(OptionError) as caught:
        made.options(resources=resources)
    assert str(caught.value).startswith(f"resources[{name!r}]={value!r}")
    assert why in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpus": 1, "resources": {"neuron_cores": 1}},
        {"num_gpus": 0.5, "resources": {"TPU": 1}},
        {"gpu_memory": "1GiB", "resources": {"neuron_cores": 1}},
        {"resources": {"neuron_cores": 1, "TPU": 1}},
    ],
)
def test_a_process_has_the_devices_of_one_vendor(options: dict[str, Any]) -> None:
    why = "in one request: a process has the devices of one vendor"
    with pytest.raises(OptionError, match=why):
        task(**options)
    with pytest.raises(OptionError, match=why):
        aiogpu.remote(**options)(type("A", (), {}))


def test_the_effective_options_are_what_counts() -> None:
    made = aiogpu.remote(num_gpus=1)(lambda: None)
    with pytest.raises(OptionError, match=r"^num_gpus and resources\['neuron_cores'\]"):
        made.options(resources={"neuron_cores": 1})
    made.options(num_gpus=0, resources={"neuron_cores": 1})
    task(num_gpus=1, resources={"neuron_cores": 0, "license": 1})


@pytest.mark.usefixtures("registered")
def test_a_registered_kind_is_one_of_devices() -> None:
    assert spec(resources={"FPGA": 2}).shape.request.devices == (("FPGA", 20_000),)
    both = spec(num_gpus=1, resources={"FPGA": 1}).shape.request
    assert both.devices == (("FPGA", 10_000), ("GPU", 10_000))
    task(num_gpus=1, resources={"FPGA": 1})


def test_in_a_worker_the_nodes_kinds_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert spec(resources={"FPGA": 0.5}).shape.request.devices == ()
    monkeypatch.setattr(current, "accelerators", {"GPU": (), "FPGA": ()})
    assert spec(resources={"FPGA": 0.5}).shape.request.devices == (("FPGA", 5_000),)
    with pytest.raises(OptionError, match=r"resources\['FPGA'\]=1\.5 mixes"):
        spec(resources={"FPGA": 1.5})


@pytest.mark.parametrize(
    "resources", [{"neuron_cores": 2, "TPU": 5, "license": 0.5}, {"NPU": 2.0}, {}]
)
def test_a_node_has_any_whole_number(resources: dict[str, float]) -> None:
    assert check_declared("resources", resources) == resources


@pytest.mark.parametrize("name", ["neuron_cores", "NPU"])
@pytest.mark.parametrize("value", [1.5, 10**6 + 1])
def test_a_node_has_no_part_of_a_device(name: str, value: float) -> None:
    with pytest.raises(OptionError) as caught:
        check_declared("resources", {name: value})
    assert str(caught.value).startswith(f"init(resources={{{name!r}: {value!r}}}): a n")


def test_the_option_that_asks_for_gpus_is_named() -> None:
    for option, amount in (("num_gpus", 1), ("gpu_memory", "1GiB")):
        with pytest.raises(OptionError) as caught:
            task(**{option: amount}, resources={"neuron_cores": 1})
        assert str(caught.value).startswith(f"{option} and resources['neuron_cores'] ")
