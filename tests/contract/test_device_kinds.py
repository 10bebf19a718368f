"""Devices of several kinds: detected, declared, refused, given to tasks."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import aiogpu
from aiogpu.accelerators import AWS_NEURON_CORE, registry
from aiogpu.client.function_spec import Function, FunctionSpec
from aiogpu.core.model.request import Device, DeviceSelector, Request, Shape, TaskSpec
from aiogpu.core.model.units import TYPE_PREFIX, UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.engines.base import NodeOptions, check_func
from aiogpu.engines.devices import build_ledger, detect, in_thread
from aiogpu.errors import DeviceError, InfeasibleError
from aiogpu.linux.cgroup import usable_cpus
from tests.contract.device_tasks import Holder, seen, starts_another
from tests.support.waits import until_free
from tests.unit.accelerators.vendors import Fpga, listing

pytestmark = pytest.mark.either_loop


# All vendors list their devices at the same time; one of them has the node's GPUs


@dataclass
class Paper:
    """A vendor with made-up devices; it records the calls."""

    kind: str
    name: str
    present: tuple[Device, ...] = ()
    error: BaseException | None = None
    hangs: bool = False
    given: Any = field(default_factory=dict)
    calls: list[int | None] = field(default_factory=list)
    may_end: threading.Event = field(default_factory=threading.Event)

    option = "num_paper"
    variable = "PAPER"

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        self.calls.append(wanted)
        if self.hangs:
            self.may_end.wait()
        if self.error is not None:
            raise self.error
        if wanted is None:
            return self.present
        logical = (Device(number) for number in range(len(self.present), wanted))
        return (*self.present, *logical)[:wanted]

    def assignment(self, ids: Sequence[int | str], environ: Mapping[str, str]) -> Any:
        return self.given


def cards(number: int) -> tuple[Device, ...]:
    return tuple(Device(index, name="card") for index in range(number))


async def found(
    *vendors: Paper, limit: float = 60, **wanted: int
) -> list[tuple[str, int]]:
    sets = await detect(vendors, {}, wanted, limit)  # type: ignore[arg-type]
    return [(repr(each.vendor), len(each.devices)) for each in sets]


DECLARED = Paper("GPU", "A", (Device(0), Device(1)))
ONE = Paper("GPU", "A", cards(1))
A0, A1, B2 = ("<A>", 0), ("<A>", 1), ("<B>", 2)
CASES: list[tuple[list[Paper], dict[str, int], list[tuple[str, int]]]] = [
    # The first vendor with devices has the GPUs; without any, the first vendor.
    ([Paper("GPU", "A"), Paper("GPU", "B", cards(2)), Paper("GPU", "C")], {}, [B2]),
    ([Paper("GPU", "A"), Paper("GPU", "B")], {}, [("<A>", 0)]),
    # A given number is of the vendor with cards, else of the first.
    ([Paper("GPU", "A"), Paper("GPU", "B", cards(2))], {"GPU": 3}, [("<B>", 3)]),
    ([Paper("GPU", "A"), Paper("GPU", "B")], {"GPU": 3}, [("<A>", 3)]),
    ([Paper("GPU", "A", cards(1)), Paper("GPU", "B", cards(2))], {"GPU": 0}, [A0]),
    # A card counts more than devices that only a variable names.
    ([DECLARED, Paper("GPU", "B", cards(1))], {}, [("<B>", 1)]),
    ([DECLARED, Paper("GPU", "B")], {}, [("<A>", 2)]),
    # Other kinds are there beside the GPUs.
    ([ONE, Paper("cores", "N", cards(2)), Paper("TPU", "T")], {}, [A1, ("<N>", 2)]),
    ([ONE, Paper("cores", "N", cards(2))], {"cores": 1}, [A1, ("<N>", 1)]),
    # An error of a vendor without the GPUs is ignored.
    ([ONE, Paper("GPU", "B", error=DeviceError("not there"))], {}, [A1]),
]


@pytest.mark.parametrize(("vendors", "wanted", "expected"), CASES)
async def test_one_vendor_has_the_gpus(
    vendors: list[Paper], wanted: dict[str, int], expected: list[tuple[str, int]]
) -> None:
    assert await found(*vendors, **wanted) == expected


async def test_gpus_of_a_second_vendor_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, two = Paper("GPU", "A", cards(1)), Paper("GPU", "B", cards(2))
    assert await found(one, two, Paper("GPU", "C")) == [("<A>", 1)]
    (record,) = caplog.records
    assert record.message == (
        "! the GPUs of this node are those of <A>; 2 of <B> are not shared out."
    )


async def test_a_vendor_that_fails_is_an_error() -> None:
    error = DeviceError("not there")
    with pytest.raises(DeviceError) as caught:
        await found(Paper("GPU", "A"), Paper("GPU", "B", error=error))
    assert caught.value is error
    for raised in (error, KeyError("a"), TimeoutError("mine")):
        message = "not there" if raised is error else r"<N> cannot list.*: \w+: "
        with pytest.raises(DeviceError, match=message) as caught:
            await found(ONE, Paper("cores", "N", error=raised))
        assert raised in (caught.value, caught.value.__cause__)


async def test_a_vendor_that_hangs_is_skipped_after_a_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpus, cores = Paper("GPU", "A", cards(1)), Paper("cores", "N", hangs=True)
    assert await found(gpus, cores, limit=0.05) == [("<A>", 1)]
    (record,) = caplog.records
    assert record.message == (
        "! <N> has not listed its devices within 0.05 s; none is shared out."
    )
    cores.may_end.set()


async def test_devices_wanted_of_a_vendor_that_hangs_are_an_error() -> None:
    gpus = Paper("GPU", "A", hangs=True)
    with pytest.raises(
        DeviceError,
        match=r"num_paper=2, but <A> has not listed its devices within 0\.0",
    ):
        await found(gpus, GPU=2, limit=0.05)
    gpus.may_end.set()


async def test_vendors_are_asked_at_the_same_time() -> None:
    """Each vendor waits until the other is asked."""
    together = threading.Barrier(2)

    class Meeting(Paper):
        def devices(
            self, environ: Mapping[str, str], wanted: int | None
        ) -> tuple[Device, ...]:
            together.wait(60)
            return super().devices(environ, wanted)

    assert await found(Meeting("GPU", "A"), Meeting("cores", "N", cards(1))) == [
        ("<A>", 0),
        ("<N>", 1),
    ]


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Paper:
    vendor = Paper("mine", "M", cards(2))
    monkeypatch.setitem(registry._registered, "mine", vendor)  # type: ignore[arg-type]
    return vendor


@pytest.mark.parametrize(
    ("present", "given", "wanted", "why"),
    [
        ((1, 2), {}, {}, r"devices\(\) returned \(1, 2\), which are no Devices"),
        ((Device(0), Device(0)), {}, {}, r"the ids \[0, 0\], one of them twice"),
        (cards(2), {"A": 1}, {}, r"assignment\(\[0, 1\]\) returned {'A': 1}, no dict"),
        (cards(2), None, {}, "returned None, no dict of str"),
    ],
)
async def test_a_users_vendor_is_checked_before_a_task_needs_it(
    registered: Paper,
    present: tuple[Any, ...],
    given: object,
    wanted: dict[str, int],
    why: str,
) -> None:
    registered.present, registered.given = present, given
    with pytest.raises(DeviceError, match=f"<M> cannot list.*{why}"):
        await found(Paper("GPU", "A"), registered, **wanted)


async def test_a_users_vendor_must_give_the_wanted_number(registered: Paper) -> None:
    assert await found(Paper("GPU", "A"), registered, mine=3) == [
        ("<A>", 0),
        ("<M>", 3),
    ]
    registered.devices = lambda environ, wanted: cards(2)  # type: ignore[method-assign]
    with pytest.raises(
        DeviceError, match=r"devices\(\) returned 2 devices instead of 3"
    ):
        await found(Paper("GPU", "A"), registered, mine=3)


# The ledger of a node, and the threads that detect


def gpus(*types: str | None) -> list[DeviceSet]:
    return [DeviceSet("GPU", [Device(i, type=t) for i, t in enumerate(types)])]


def test_a_node_has_the_resources_of_its_options() -> None:
    options = NodeOptions(num_cpus=2.5, resources={"license": 2})
    ledger = build_ledger(options, gpus(None, None))
    expected = {"CPU": 2.5, "license": 2.0, "GPU": 2.0}
    assert expected.items() <= ledger.totals().items()


def test_detected_types_become_resources() -> None:
    ledger = build_ledger(NodeOptions(num_cpus=1), gpus("A100", "T4", "A100"))
    totals = ledger.totals()
    assert totals["accelerator_type:A100"] == totals["accelerator_type:T4"] == 1.0


@pytest.mark.parametrize(
    "options",
    [
        NodeOptions(num_cpus=1, accelerator_type="A100"),
        NodeOptions(num_cpus=1, resources={"accelerator_type:A100": 1}),
    ],
)
def test_a_declared_type_is_for_devices_without_a_type(options: NodeOptions) -> None:
    ledger = build_ledger(options, gpus(None, "T4"))
    types = [device.type for device in ledger.device_sets["GPU"].devices]
    assert types == ["A100", "T4"]


async def test_a_blocking_function_runs_in_a_thread() -> None:
    thread = await in_thread(threading.current_thread)
    assert thread is not threading.current_thread()
    with pytest.raises(KeyError):
        await in_thread(lambda: {}["a"])


@pytest.mark.parametrize("type_", ["A100", "T4"])
def test_a_declared_type_does_not_change_a_detected_type(type_: str) -> None:
    options = NodeOptions(
        num_cpus=1, accelerator_type=type_, resources={f"accelerator_type:{type_}": 3}
    )
    ledger = build_ledger(options, gpus("H100", None))
    types = [device.type for device in ledger.device_sets["GPU"].devices]
    assert types == ["H100", type_]
    totals = ledger.totals()
    assert totals[f"accelerator_type:{type_}"] == 3.0, "the amount given is kept"
    assert totals["accelerator_type:H100"] == 1.0


def test_two_declared_types_give_no_device_a_type() -> None:
    resources = {"accelerator_type:A100": 1, "accelerator_type:T4": 1}
    ledger = build_ledger(NodeOptions(num_cpus=1, resources=resources), gpus(None))
    assert ledger.device_sets["GPU"].devices[0].type is None


def test_the_cpus_are_those_usable_unless_given() -> None:
    assert build_ledger(NodeOptions(), gpus()).totals()["CPU"] == usable_cpus()
    assert build_ledger(NodeOptions(num_cpus=0), gpus()).totals()["CPU"] == 0.0


class Halt(BaseException):
    """An error that is no `Exception`."""


async def test_any_error_of_a_thread_is_raised_at_the_await() -> None:
    error = Halt()

    def fail() -> None:
        raise error

    with pytest.raises(Halt) as caught:
        await in_thread(fail)
    assert caught.value is error


GIB = 1 << 30


def both_kinds(*types: str | None) -> list[DeviceSet]:
    cores = DeviceSet("neuron_cores", [Device(0, type="aws-neuron-core")])
    return [*gpus(*types), cores]


def test_options_of_gpus_apply_to_no_other_kind() -> None:
    options = NodeOptions(
        num_cpus=1,
        num_gpus=1,
        accelerator_type="A100",
        gpu_memory=40 * GIB,
        resources={"neuron_cores": 1},
    )
    ledger = build_ledger(options, both_kinds(None))
    gpu, core = (each.devices[0] for each in ledger.device_sets.values())
    assert (gpu.type, gpu.memory) == ("A100", 40 * GIB)
    assert (core.type, core.memory) == ("aws-neuron-core", 0)
    totals = ledger.totals()
    assert totals["accelerator_type:aws-neuron-core"] == 1.0
    assert (totals["GPU"], totals["neuron_cores"]) == (1.0, 1.0)
    assert "neuron_cores" not in ledger.capacity, "the cores are single devices"


def test_a_type_of_another_kind_does_not_apply_to_gpus() -> None:
    resources = {"accelerator_type:aws-neuron-core": 1}
    ledger = build_ledger(NodeOptions(resources=resources), both_kinds(None))
    assert ledger.device_sets["GPU"].devices[0].type is None


def test_a_kind_that_is_declared_as_0_is_absent() -> None:
    options = NodeOptions(num_cpus=1, resources={"neuron_cores": 0})
    assert "neuron_cores" not in build_ledger(options, gpus()).totals()


@pytest.mark.parametrize(
    ("detected", "warned"), [(79 * GIB, False), (80 * GIB, False), (40 * GIB, True)]
)
def test_declared_memory_is_for_gpus_without_known_memory(
    detected: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Detected memory counts; a different declaration is logged."""
    sets = [DeviceSet("GPU", [Device(0), Device(1, memory=detected)])]
    ledger = build_ledger(NodeOptions(gpu_memory=80 * GIB), sets)
    memory = [device.memory for device in ledger.device_sets["GPU"].devices]
    assert memory == [80 * GIB, detected]
    assert [record.message for record in caplog.records] == [
        "! init(gpu_memory='80GiB') applies only to GPUs whose memory is not "
        "detected; GPU 1 has 40GiB, which is used."
    ] * warned


@pytest.mark.parametrize(
    ("types", "warned"), [(["A100", "H100"], True), (["T4", "H100"], False)]
)
def test_a_declared_type_that_no_gpu_has_is_logged(
    types: list[str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sets = [DeviceSet("GPU", [Device(n, type_) for n, type_ in enumerate(types)])]
    build_ledger(NodeOptions(accelerator_type="T4"), sets)
    assert [record.message for record in caplog.records] == [
        "! init(accelerator_type='T4') applies only to GPUs whose type is not "
        "detected; GPU 0 is of type 'A100', which is used."
    ] * warned


def test_options_of_gpus_on_a_node_without_gpus_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = NodeOptions(accelerator_type="A100", gpu_memory=GIB)
    assert build_ledger(options, gpus()).totals()["GPU"] == 0
    assert [record.message for record in caplog.records] == [
        "! init(accelerator_type='A100', gpu_memory='1GiB') has no effect, since "
        "this node has no GPUs; pass num_gpus= as well for logical GPUs."
    ]


# Requests that a node can never fulfil are refused with advice


CARDS = [Device(number, "A100", memory=80 * GIB) for number in range(2)]
NODE = Ledger(
    {"CPU": 4 * UNIT, "memory": 8 * GIB * UNIT, TYPE_PREFIX + "A100": UNIT},
    [DeviceSet("GPU", CARDS)],
)


def asking(request: Request) -> FunctionSpec:
    """Return a function with this request."""
    spec = TaskSpec("work", Shape(request))
    return FunctionSpec(1, Function(1, b""), spec, {}, {}, False, False)


@pytest.mark.parametrize(
    ("request_", "message"),
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
def test_a_refusal_names_the_request_and_the_resources(
    request_: Request, message: str
) -> None:
    with pytest.raises(InfeasibleError) as caught:
        check_func(asking(request_), NODE)
    assert message in str(caught.value)


def test_a_refusal_for_unknown_memory_does_not_advise_to_ask_for_less() -> None:
    node = Ledger({"CPU": UNIT}, [DeviceSet("GPU", [Device(0)])])
    with pytest.raises(InfeasibleError) as caught:
        check_func(asking(Request.of({}, {}, gpu_memory=GIB)), node)
    assert "or leave gpu_memory= out. It has {CPU: 1, GPU: 1}." in str(caught.value)
    assert "less" not in str(caught.value)


def test_a_refusal_without_gpus_names_num_gpus() -> None:
    with pytest.raises(InfeasibleError, match="num_gpus=, which may be more GPUs than"):
        check_func(asking(Request.of({}, {"GPU": UNIT})), Ledger({"CPU": UNIT}, []))


def test_a_request_that_fits_the_node_is_accepted() -> None:
    check_func(asking(Request.of({"CPU": UNIT}, {"GPU": 2 * UNIT}, "A100")), NODE)


# Tasks and actors on nodes with several kinds

usual = pytest.mark.usefixtures("no_leaks", "plain")
CORES = "NEURON_RT_VISIBLE_CORES"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove variables of this machine that change what a program sees."""
    for name in ("CUDA_VISIBLE_DEVICES", CORES):
        monkeypatch.delenv(name, raising=False)


@usual
async def test_a_node_has_gpus_and_cores(address: str) -> None:
    """Each task has devices of one kind; devices of the other kind are hidden."""
    resources = {"neuron_cores": 4, "license": 1}
    async with aiogpu.init(
        address=address, num_cpus=2, num_gpus=2, resources=resources
    ):
        total = await aiogpu.cluster_resources()
        expected = {"GPU": 2.0, "neuron_cores": 4.0, "license": 1.0}
        assert expected.items() <= total.items()
        assert total[f"accelerator_type:{AWS_NEURON_CORE}"] == 1.0
        cores = await seen.options(resources={"neuron_cores": 2}).remote()
        assert cores["ids"] == {"neuron_cores": ["0", "1"]}
        assert (cores[CORES], cores["CUDA_VISIBLE_DEVICES"]) == ("0,1", "")
        assert cores["resources"] == {"CPU": 1.0, "neuron_cores": 2.0}
        gpu = await seen.options(num_gpus=1, resources={"license": 1}).remote()
        assert gpu["ids"] == {"GPU": ["0"]}
        assert (gpu[CORES], gpu["CUDA_VISIBLE_DEVICES"]) == ("", "0")
        none = await seen.remote()
        assert none["ids"] == {}
        assert (none[CORES], none["CUDA_VISIBLE_DEVICES"]) == ("", "")
        typed = seen.options(
            resources={"neuron_cores": 1}, accelerator_type=AWS_NEURON_CORE
        )
        await until_free(neuron_cores=4)  # the process of `cores` has ended
        assert (await typed.remote())["ids"] == {"neuron_cores": ["0"]}
        with pytest.raises(aiogpu.InfeasibleError, match="neuron_cores 5 of 4"):
            await seen.options(resources={"neuron_cores": 5}).remote()
        with pytest.raises(aiogpu.InfeasibleError, match="TPU 1 of 0"):
            await seen.options(resources={"TPU": 1}).remote()


@pytest.mark.needs("processes")
@usual
async def test_a_task_with_cores_has_a_process_of_its_own(address: str) -> None:
    """Like every task with devices, unless its options say otherwise."""
    async with aiogpu.init(
        address=address, num_cpus=1, num_gpus=0, resources={"neuron_cores": 1}
    ):
        isolated = seen.options(resources={"neuron_cores": 1})
        pids = [(await isolated.remote())["pid"] for _ in range(3)]
        assert len(set(pids)) == 3
        reused = isolated.options(max_calls=0)
        pids = [(await reused.remote())["pid"] for _ in range(3)]
        assert len(set(pids)) == 1


@pytest.mark.needs("waiting for resources")
@usual
async def test_an_actor_holds_its_cores_for_life(address: str) -> None:
    async with aiogpu.init(
        address=address, num_cpus=1, num_gpus=0, resources={"neuron_cores": 3}
    ):
        holding = Holder.options(resources={"neuron_cores": 2})
        async with holding.remote() as actor:
            assert await actor.seen.remote() == ["0", "1"]
            assert (await aiogpu.available_resources())["neuron_cores"] == 1.0
            one = await seen.options(resources={"neuron_cores": 1}).remote()
            assert one["ids"] == {"neuron_cores": ["2"]}


@pytest.mark.needs("detection")
@usual
async def test_cores_are_detected_by_their_tool(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{os.environ['PATH']}:{listing(tmp_path)['PATH']}"
    monkeypatch.setenv("PATH", path)
    async with aiogpu.init(address=address, num_cpus=1, num_gpus=1):
        assert (await aiogpu.cluster_resources())["neuron_cores"] == 4.0
        all_ = await seen.options(resources={"neuron_cores": 4}).remote()
        assert all_[CORES] == "0,1,2,3"
    monkeypatch.setenv(CORES, "1-2")
    async with aiogpu.init(address=address, num_cpus=1):
        both = await seen.options(resources={"neuron_cores": 2}).remote()
        assert (both[CORES], both["ids"]) == ("1,2", {"neuron_cores": ["1", "2"]})
    with pytest.raises(
        aiogpu.errors.DeviceError, match=f"=3, but {CORES}='1-2' names 2"
    ):
        await aiogpu.init(address=address, resources={"neuron_cores": 3})


@usual
async def test_a_node_without_cores_leaves_their_variable_alone(address: str) -> None:
    """GPUs are hidden all the same."""
    async with aiogpu.init(address=address, num_cpus=1, num_gpus=0):
        facts = await seen.remote()
        assert (facts[CORES], facts["CUDA_VISIBLE_DEVICES"]) == (None, "")
        assert "neuron_cores" not in await aiogpu.cluster_resources()


class Counted(Fpga):
    """A user's vendor with two boards, which tasks have whole."""

    def devices(
        self, environ: Mapping[str, str], wanted: int | None
    ) -> tuple[Device, ...]:
        return tuple(replace(d, type="U280") for d in super().devices(environ, wanted))

    def quantity(self, value: object) -> int:
        return int(str(value)) * 10_000


@pytest.fixture
def counted() -> Iterator[None]:
    aiogpu.accelerators.register(Counted())
    yield
    registry._registered.clear()


@pytest.mark.usefixtures("counted")
@pytest.mark.needs("own vendors")
@usual
async def test_tasks_have_devices_of_a_users_vendor(address: str) -> None:
    async with aiogpu.init(address=address, num_cpus=2, num_gpus=1):
        assert (await aiogpu.cluster_resources())["FPGA"] == 2.0
        both = seen.options(num_gpus=1, resources={"FPGA": 2})
        facts = await both.remote()
        assert facts["ids"] == {"GPU": ["0"], "FPGA": ["0", "1"]}
        assert (facts["FPGA_VISIBLE"], facts["CUDA_VISIBLE_DEVICES"]) == ("0,1", "0")
        none = await seen.remote()
        assert none["FPGA_VISIBLE"] == ""
        assert "FPGA" in none["knows"], "its worker knows the kind from the node"
        assert await starts_another.remote() == {"FPGA": ["0"]}
        typed = seen.options(accelerator_type="U280", resources={"FPGA": 1})
        # The process of the first task may still hold its board.
        assert (await typed.remote())["ids"] in ({"FPGA": ["0"]}, {"FPGA": ["1"]})
    async with aiogpu.init(address=address, resources={"FPGA": 3}, num_gpus=0):
        assert (await aiogpu.cluster_resources())["FPGA"] == 3.0
