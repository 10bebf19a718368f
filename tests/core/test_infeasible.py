"""What a node can never give is told in words: what was asked, and what there is."""

import pytest

from aiogpu.core.model.request import Device, DeviceSelector, Request
from aiogpu.core.model.units import BY_SHARE, TYPE_PREFIX, UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger

GIB = 1 << 30


def node(*devices: Device, kind: str = "GPU") -> Ledger:
    """A node of four CPUs and these devices."""
    scalars = {"CPU": 4 * UNIT}
    scalars.update({TYPE_PREFIX + one.type: UNIT for one in devices if one.type})
    return Ledger(scalars, [DeviceSet(kind, devices)])


def cards(
    count: int, kind: str | None = None, memory: int = 0, **facts
) -> list[Device]:
    """Devices that are alike."""
    return [
        Device(number, kind, memory=memory * GIB, **facts) for number in range(count)
    ]


def asking(gpus: float, *options, kind: str = "GPU", **named) -> Request:
    """A request for devices."""
    return Request.of({}, {kind: int(gpus * UNIT)}, *options, **named)


MIXED = node(*cards(4, "A100", 80), *cards(2, "H100", 94))
NAMED = node(
    *cards(2, "H100", 80, name="NVIDIA H100 PCIe", compute_capability=(9, 0)),
    *cards(1, name="NVIDIA T4"),
)
SPLIT = node(*cards(3, "A100", 20, parent="GPU-1"), *cards(1, "A100", 80))


@pytest.mark.parametrize(
    ("ledger", "request_", "reason"),
    [
        (MIXED, asking(6), None),
        (MIXED, asking(0.5, gpu_memory=90 * GIB), None),
        (MIXED, asking(2, gpu_memory=94 * GIB), None),
        (MIXED, asking(0.5, gpu_memory=BY_SHARE), None),
        (MIXED, Request.of({"CPU": 5 * UNIT}, {}), "it lacks CPU 5 of 4"),
        (
            MIXED,
            Request.of({"licence": UNIT}, {}),
            "it lacks licence 1 of 0",
        ),
        (
            MIXED,
            Request.of({"CPUs": UNIT}, {}),
            "it lacks CPUs 1 of 0 (did you mean 'CPU'?)",
        ),
        (
            MIXED,
            Request.of({"gpu": UNIT}, {}),
            "it lacks gpu 1 of 0 (did you mean 'GPU'?)",
        ),
        (
            Ledger({"CPU": 0}, ()),
            Request.of({"CPU": UNIT}, {}),
            "it lacks CPU 1 of 0",
        ),
        (
            MIXED,
            asking(1, "A1000"),
            "there is no GPU of type 'A1000' (there are: 4 x A100, 2 x H100; did you "
            "mean 'A100'?)",
        ),
        (
            MIXED,
            asking(1, "h100"),
            "there is no GPU of type 'h100' (there are: 4 x A100, 2 x H100; did you "
            "mean 'H100'?)",
        ),
        (
            MIXED,
            asking(1, "MI300X"),
            "there is no GPU of type 'MI300X' (there are: 4 x A100, 2 x H100)",
        ),
        (
            node(*cards(2)),
            asking(1, "A100"),
            "there is no GPU of type 'A100' (there are: 2 x of unknown type; if "
            'they are, start it with init(accelerator_type="...") or `aiogpu start '
            "--accelerator-type ...`)",
        ),
        (
            node(),
            asking(1, "A100"),
            "there is no GPU of type 'A100' (there is none at all)",
        ),
        (
            node(),
            Request.of({}, {}, "A100"),
            "it lacks accelerator_type:A100 0.001 of 0",
        ),
        (
            # Declared as a resource, but no device is of it.
            Ledger({TYPE_PREFIX + "T4": UNIT}, [DeviceSet("GPU", cards(2, "A100"))]),
            asking(1, "T4"),
            "there is no GPU of type 'T4' (there are: 2 x A100)",
        ),
        (
            node(*cards(1, name="NVIDIA L4", memory=24), *cards(1)),
            asking(0.5, gpu_memory=30 * GIB),
            "it lacks 1 GPU with gpu_memory 30GiB (there are: 1 x NVIDIA L4 of 24GiB, "
            "1 x of unknown type)",
        ),
        (MIXED, asking(3, "H100"), "it lacks GPU 3 of 2 of type H100"),
        (MIXED, asking(7), "it lacks GPU 7 of 6"),
        (node(), asking(0, gpu_memory=GIB), "it lacks GPU 1 of 0"),
        (MIXED, asking(1, kind="NPU"), "it lacks NPU 1 of 0"),
        (
            MIXED,
            asking(1, where=DeviceSelector(100 * GIB)),
            "of its 6 GPUs, none fulfils memory of 100GiB or more (there are: 4 x A100 "
            "of 80GiB, 2 x H100 of 94GiB)",
        ),
        (
            MIXED,
            asking(3, where=DeviceSelector(90 * GIB)),
            "of its 6 GPUs, only 2 fulfil memory of 90GiB or more (there are: 4 x A100 "
            "of 80GiB, 2 x H100 of 94GiB)",
        ),
        (
            MIXED,
            asking(1, "H100", where=DeviceSelector(name="*sxm*")),
            "of its 2 GPUs of type H100, none fulfils a name like '*sxm*' (there are: "
            "2 x H100 of 94GiB without a name)",
        ),
        (
            NAMED,
            asking(1, where=DeviceSelector(name="h100")),
            "of its 3 GPUs, none fulfils a name like 'h100' (there are: 2 x 'NVIDIA "
            "H100 PCIe' of 80GiB, 1 x 'NVIDIA T4'; did you mean '*h100*'?)",
        ),
        (
            node(*cards(1, memory=80)),
            asking(1, where=DeviceSelector(100 * GIB)),
            "of its 1 GPU, none fulfils memory of 100GiB or more (there are: 1 x "
            "80GiB)",
        ),
        (
            NAMED,
            asking(3, where=DeviceSelector(name="nvidia h100*")),
            "of its 3 GPUs, only 2 fulfil a name like 'nvidia h100*' (there are: 2 x "
            "'NVIDIA H100 PCIe' of 80GiB, 1 x 'NVIDIA T4')",
        ),
        (
            NAMED,
            asking(1, where=DeviceSelector(least_capability=(10, 0))),
            "of its 3 GPUs, none fulfils compute capability 10.0 or more (there are: 2 "
            "x H100 of 80GiB (compute capability 9.0), 1 x NVIDIA T4 (compute "
            "capability not known))",
        ),
        (
            SPLIT,
            asking(2),
            "a process can use one MIG instance only, and all but 1 of its 4 GPUs are "
            "MIG instances: ask for GPU 1 at most",
        ),
        (
            node(*cards(2, parent="GPU-1")),
            asking(2),
            "a process can use one MIG instance only, and its 2 GPUs are MIG "
            "instances: ask for GPU 1 at most",
        ),
        (
            MIXED,
            asking(0.5, gpu_memory=100 * GIB),
            "it lacks 1 GPU with gpu_memory 100GiB (there are: 4 x A100 of 80GiB, 2 x "
            "H100 of 94GiB)",
        ),
        (
            MIXED,
            asking(3, gpu_memory=90 * GIB),
            "it lacks 3 GPUs with gpu_memory 90GiB (there are: 4 x A100 of 80GiB, 2 x "
            "H100 of 94GiB)",
        ),
        (
            node(*cards(2)),
            asking(0.5, gpu_memory=GIB),
            "it does not know how much memory its GPUs have: start it "
            'with init(gpu_memory="80GiB") or `aiogpu start --gpu-memory 80GiB`, or '
            "leave gpu_memory= out",
        ),
        (
            node(*cards(2), *cards(1, memory=80)),
            asking(2, gpu_memory=BY_SHARE),
            "it does not know how much memory 2 of its GPUs have: start it "
            'with init(gpu_memory="80GiB") or `aiogpu start --gpu-memory 80GiB`, or '
            "leave gpu_memory= out",
        ),
        (
            MIXED,
            asking(0, gpu_memory=BY_SHARE),
            "gpu_memory='share' is the part of a GPU's memory that num_gpus is of the "
            "GPU, and num_gpus is 0",
        ),
    ],
)
def test_what_a_node_can_never_give_is_told_in_words(ledger, request_, reason):
    assert ledger.why_infeasible(request_) == reason


def test_of_many_sorts_the_commonest_are_told():
    devices = [Device(number, memory=number * GIB) for number in range(1, 12)]
    told = node(*devices).why_infeasible(asking(1, where=DeviceSelector(name="x")))
    assert told is not None
    assert told.endswith("1 x 8GiB without a name, and others)")


def test_what_is_said_of_gpu_memory_says_nothing_of_other_kinds():
    ledger = node(*cards(2, kind="TPU"), kind="TPU")
    request = Request((), (("TPU", UNIT),), gpu_memory=GIB)
    assert ledger.why_infeasible(request) is None
    lease = ledger.take(request)
    assert lease is not None
    assert ledger.reserved(lease) == (("TPU", 0, 0),)
    ledger.check()
    ledger.give_back(lease)
    ledger.check()
