"""Leases are taken whole or not at all, in exact amounts."""

import pytest

from aiogpu.core.model.request import Device, DeviceSelector, Request
from aiogpu.core.model.units import (
    BY_SHARE,
    TYPE_PREFIX,
    UNIT,
    device_quantity,
    quantity,
)
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from tests.core.builders import GIB


def ledger(cpus: float = 4, gpus: int = 2, **others: float) -> Ledger:
    """Make a node with CPUs and GPUs."""
    scalars = {"CPU": cpus, **others}
    return Ledger(
        {name: quantity(name, amount) for name, amount in scalars.items()},
        [DeviceSet("GPU", [Device(index, "A100") for index in range(gpus)])],
    )


def node(*devices: Device, kind: str = "GPU") -> Ledger:
    """Make a node of four CPUs and these devices."""
    scalars = {"CPU": 4 * UNIT}
    scalars.update(
        {TYPE_PREFIX + device.type: UNIT for device in devices if device.type}
    )
    return Ledger(scalars, [DeviceSet(kind, devices)])


def sized(*sizes: int) -> Ledger:
    """Make a node with GPUs of these GiB; 0 for unknown."""
    cards = [Device(number, memory=size * GIB) for number, size in enumerate(sizes)]
    return Ledger({}, [DeviceSet("GPU", cards)])


def cards(
    count: int, kind: str | None = None, memory: int = 0, **facts
) -> list[Device]:
    """Make equal devices."""
    return [
        Device(number, kind, memory=memory * GIB, **facts) for number in range(count)
    ]


def asking(cpus: float = 0, gpus: float = 0, **others) -> Request:
    """Make a request from the user's numbers."""
    scalars = {"CPU": cpus, **others}
    return Request.of(
        {name: quantity(name, amount) for name, amount in scalars.items()},
        {"GPU": device_quantity("GPU", gpus)},
    )


def need(gpus: float, memory=0, *, kind="GPU", gpu_memory=0, **options) -> Request:
    """Make a request for devices with a least memory in GiB, or for bytes."""
    gpu_memory = gpu_memory or (BY_SHARE if memory == BY_SHARE else int(memory * GIB))
    amounts = {kind: int(gpus * UNIT)}
    return Request.of({}, amounts, gpu_memory=gpu_memory, **options)


def test_lease_is_taken_and_given_back_once():
    node = ledger()
    lease = node.take(asking(1, 0.25))
    assert lease.shares == (((0, 2_500),),)
    assert node.available() == {"CPU": 3.0, "GPU": 1.75}
    assert repr(node) == "<Ledger CPU 3/4, GPU 1.75/2; 1 leases>"
    node.check()
    node.give_back(lease)
    assert node.available() == node.totals() == {"CPU": 4.0, "GPU": 2.0}
    node.check()
    with pytest.raises(KeyError):
        node.give_back(lease)


def test_lent_cpus_are_taken_back_at_once():
    """Only CPUs are lent; the free amount can become negative."""
    node = ledger(cpus=2, gpus=1, license=1)
    lent = node.take(asking(2, 0.5, license=1))
    node.lend(lent)
    assert lent.is_lent
    assert node.available() == {"CPU": 2.0, "license": 0.0, "GPU": 0.5}
    node.check()
    other = node.take(asking(1))
    node.resume(lent)
    assert not lent.is_lent
    assert node.free["CPU"] == -UNIT
    assert node.is_overdrawn
    assert node.available() == {"CPU": 0.0, "license": 0.0, "GPU": 0.5}
    assert node.take(asking(0.5)) is None
    node.check()
    node.give_back(other)
    assert not node.is_overdrawn
    node.lend(lent)
    node.give_back(lent)
    assert node.available() == node.totals()
    node.check()


def test_would_help_compares_a_lease_with_the_lack():
    node = ledger(cpus=2, license=1)
    plain, licensed = node.take(asking(1)), node.take(asking(0, license=1))
    assert plain is not None
    assert licensed is not None
    short = asking(1, license=1)
    assert not node.would_help(plain, short)
    assert node.would_help(licensed, short)


@pytest.mark.parametrize("what", ["scalar", "device"])
def test_check_detects_amounts_without_a_lease(what):
    node = ledger()
    node.take(asking(1, 0.5))
    if what == "scalar":
        node.free["CPU"] += 1
    else:
        node.device_sets["GPU"].free[1] -= 1
    with pytest.raises(AssertionError):
        node.check()


@pytest.mark.parametrize(
    ("node", "asked", "most"),
    [
        *((ledger(license=3), asking(1.5), 2), (ledger(), asking(), None)),
        *((ledger(), asking(1, 1), 2), (ledger(), asking(0, 0.3), 6)),
        *((ledger(), asking(0, 2), 1), (ledger(), asking(0, 3), 0)),
        (ledger(license=3), asking(0, 0.25, license=1), 3),
        *((sized(80, 20), need(0, 30), 2), (sized(80, 0), need(0.5, 30), 2)),
        *((sized(80, 80), need(0.25, 30), 4), (sized(80, 80), need(0.75, 30), 2)),
        *((sized(80, 0), need(0.25, BY_SHARE), 4), (sized(80, 40), need(2, 60), 0)),
    ],
    ids=str,
)
def test_room_for_equals_the_number_of_leases_taken(node, asked, most):
    assert node.room_for(asked) == most
    leases = [node.take(asked) for _ in range(most or 0)]
    assert all(leases)
    assert most is None or node.take(asked) is None
    assert node.room_for(asked) == most
    for lease in leases:
        node.give_back(lease)


def test_room_for_counts_types_and_lent_cpus():
    node = ledger(license=3, **{"accelerator_type:A100": 1})
    assert node.room_for(need(0.5, accelerator_type="A100")) == 4
    assert node.room_for(need(0.5, accelerator_type="H100")) == 0
    assert node.room_for(asking(1), are_lent=True) is None
    assert node.room_for(asking(1, 0.5), are_lent=True) == 4
    assert node.room_for(asking(1, phone=1), are_lent=True) == 0


MIXED = node(*cards(4, "A100", 80), *cards(2, "H100", 94))
NAMED = node(
    *cards(2, "H100", 80, name="NVIDIA H100 PCIe", compute_capability=(9, 0)),
    *cards(1, name="NVIDIA T4"),
)
SPLIT = node(*cards(3, "A100", 20, parent="GPU-1"), *cards(1, "A100", 80))


@pytest.mark.parametrize(
    ("ledger", "request_", "reason"),
    [
        (MIXED, need(6), None),
        (MIXED, need(2, gpu_memory=94 * GIB), None),
        (MIXED, need(0.5, gpu_memory=BY_SHARE), None),
        (MIXED, Request.of({"CPU": 5 * UNIT}, {}), "it lacks CPU 5 of 4"),
        (
            MIXED,
            Request.of({"gpu": UNIT}, {}),
            "it lacks gpu 1 of 0 (did you mean 'GPU'?)",
        ),
        (
            MIXED,
            need(1, accelerator_type="A1000"),
            "there is no GPU of type 'A1000' (there are: 4 x A100, 2 x H100; did you "
            "mean 'A100'?)",
        ),
        (
            node(*cards(2)),
            need(1, accelerator_type="A100"),
            "there is no GPU of type 'A100' (there are: 2 x of unknown type; if "
            'they are, start it with init(accelerator_type="...") or `aiogpu start '
            "--accelerator-type ...`)",
        ),
        (
            node(),
            need(1, accelerator_type="A100"),
            "there is no GPU of type 'A100' (there is none at all)",
        ),
        (
            # A custom resource names the type, but no device has it.
            Ledger({TYPE_PREFIX + "T4": UNIT}, [DeviceSet("GPU", cards(2, "A100"))]),
            need(1, accelerator_type="T4"),
            "there is no GPU of type 'T4' (there are: 2 x A100)",
        ),
        (
            node(*cards(1, name="NVIDIA L4", memory=24), *cards(1)),
            need(0.5, gpu_memory=30 * GIB),
            "it lacks 1 GPU with gpu_memory 30GiB (there are: 1 x NVIDIA L4 of 24GiB, "
            "1 x of unknown type)",
        ),
        (MIXED, need(3, accelerator_type="H100"), "it lacks GPU 3 of 2 of type H100"),
        (MIXED, need(1, kind="NPU"), "it lacks NPU 1 of 0"),
        (
            MIXED,
            need(3, where=DeviceSelector(90 * GIB)),
            "of its 6 GPUs, only 2 fulfil memory of 90GiB or more (there are: 4 x A100 "
            "of 80GiB, 2 x H100 of 94GiB)",
        ),
        (
            MIXED,
            need(1, accelerator_type="H100", where=DeviceSelector(name="*sxm*")),
            "of its 2 GPUs of type H100, none fulfils a name like '*sxm*' (there are: "
            "2 x H100 of 94GiB without a name)",
        ),
        (
            NAMED,
            need(1, where=DeviceSelector(name="h100")),
            "of its 3 GPUs, none fulfils a name like 'h100' (there are: 2 x 'NVIDIA "
            "H100 PCIe' of 80GiB, 1 x 'NVIDIA T4'; did you mean '*h100*'?)",
        ),
        (
            node(*cards(1, memory=80)),
            need(1, where=DeviceSelector(100 * GIB)),
            "of its 1 GPU, none fulfils memory of 100GiB or more (there are: 1 x "
            "80GiB)",
        ),
        (
            NAMED,
            need(1, where=DeviceSelector(least_capability=(10, 0))),
            "of its 3 GPUs, none fulfils compute capability 10.0 or more (there are: 2 "
            "x H100 of 80GiB (compute capability 9.0), 1 x NVIDIA T4 (compute "
            "capability not known))",
        ),
        (
            SPLIT,
            need(2),
            "a process can use only one MIG instance, and all but 1 of its 4 GPUs are "
            "MIG instances: ask for at most GPU 1",
        ),
        (
            node(*cards(2, parent="GPU-1")),
            need(2),
            "a process can use only one MIG instance, and its 2 GPUs are MIG "
            "instances: ask for at most GPU 1",
        ),
        (
            MIXED,
            need(3, gpu_memory=90 * GIB),
            "it lacks 3 GPUs with gpu_memory 90GiB (there are: 4 x A100 of 80GiB, 2 x "
            "H100 of 94GiB)",
        ),
        (
            node(*cards(2)),
            need(0.5, gpu_memory=GIB),
            "it does not know how much memory its GPUs have: start it "
            'with init(gpu_memory="80GiB") or `aiogpu start --gpu-memory 80GiB`, or '
            "leave gpu_memory= out",
        ),
        (
            node(*cards(2), *cards(1, memory=80)),
            need(2, gpu_memory=BY_SHARE),
            "it does not know how much memory 2 of its GPUs have: start it "
            'with init(gpu_memory="80GiB") or `aiogpu start --gpu-memory 80GiB`, or '
            "leave gpu_memory= out",
        ),
        (
            node(*cards(1, name="NVIDIA GB10")),
            need(0.5, gpu_memory=GIB),
            "it does not know how much memory GPU 0 (NVIDIA GB10), which uses the "
            "machine's, has: start it "
            'with init(gpu_memory="80GiB") or `aiogpu start --gpu-memory 80GiB`, or '
            "leave gpu_memory= out",
        ),
        (
            MIXED,
            need(0, gpu_memory=BY_SHARE),
            "gpu_memory='share' is the part of a GPU's memory that num_gpus is of the "
            "GPU, and num_gpus is 0",
        ),
    ],
)
def test_why_infeasible_explains_the_lack(ledger, request_, reason):
    assert ledger.why_infeasible(request_) == reason


def test_why_infeasible_lists_the_most_frequent_types():
    devices = [Device(number, memory=number * GIB) for number in range(1, 12)]
    reason = node(*devices).why_infeasible(need(1, where=DeviceSelector(name="x")))
    assert reason.endswith("1 x 8GiB without a name, and others)")
