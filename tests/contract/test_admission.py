"""[B23] What a node can never give is refused in a sentence that says what to do."""

import pytest

from aiogpu.client.function_spec import Function, FunctionSpec
from aiogpu.core.model.request import Device, DeviceSelector, Request, Shape, TaskSpec
from aiogpu.core.model.units import TYPE_PREFIX, UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.engines.base import check_func
from aiogpu.errors import InfeasibleError

GIB = 1 << 30
CARDS = [Device(number, "A100", memory=80 * GIB) for number in range(2)]
NODE = Ledger(
    {"CPU": 4 * UNIT, "memory": 8 * GIB * UNIT, TYPE_PREFIX + "A100": UNIT},
    [DeviceSet("GPU", CARDS)],
)


def func(request: Request) -> FunctionSpec:
    """A function that asks for this."""
    spec = TaskSpec("work", Shape(request))
    return FunctionSpec(1, Function(1, b""), spec, {}, {}, False, False)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (
            Request.of({"CPU": UNIT}, {"GPU": 3 * UNIT}),
            "work asks for {CPU: 1, GPU: 3}, which this node can never give: it lacks "
            "GPU 3 of 2. It has {CPU: 4, accelerator_type:A100: 1, GPU: 2}. Ask for "
            "less, or start the node with more.",
        ),
        (
            Request.of({}, {"GPU": UNIT}, "A10"),
            "which this node can never give: there is no GPU of type 'A10' (there are: "
            "2 x A100; did you mean 'A100'?). It has {",
        ),
        (
            Request.of({}, {"GPU": UNIT}, where=DeviceSelector(100 * GIB)),
            "which this node can never give: of its 2 GPUs, none fulfils memory of "
            "100GiB or more (there are: 2 x A100 of 80GiB). It has {",
        ),
        (
            Request.of({}, {}, gpu_memory=100 * GIB),
            "work asks for {gpu_memory: 100GiB}, which this node can never give: it "
            "lacks 1 GPU with gpu_memory 100GiB (there are: 2 x A100 of 80GiB). It has "
            "{CPU: 4, accelerator_type:A100: 1, GPU: 2, gpu_memory: 160GiB}. Ask for",
        ),
    ],
)
def test_what_is_asked_and_what_there_is_are_told(request_, said):
    with pytest.raises(InfeasibleError) as caught:
        check_func(func(request_), NODE)
    assert said in str(caught.value)


def test_without_any_gpu_it_says_that_more_than_there_are_may_be_declared():
    with pytest.raises(InfeasibleError, match="num_gpus=, which may be more GPUs than"):
        check_func(func(Request.of({}, {"GPU": UNIT})), Ledger({"CPU": UNIT}, {}))


def test_what_a_node_can_give_is_admitted():
    check_func(func(Request.of({"CPU": UNIT}, {"GPU": 2 * UNIT}, "A100")), NODE)
