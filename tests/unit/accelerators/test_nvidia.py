"""NVIDIA's answers: pure ones here, NVML's by nvidia-ml-py unmodified on a stub."""

import subprocess
import sys
from dataclasses import replace
from itertools import combinations

import pytest

from aiogpu.accelerators.base import Accelerator
from aiogpu.accelerators.nvidia import Nvidia
from aiogpu.errors import OptionError
from tests.unit.accelerators.stub_nvml import (
    GIB,
    ROOT,
    StubGpu,
    StubNvml,
    gpus,
    migs,
    program,
)

NVIDIA = Nvidia()
ZERO, ONE, TWO = (gpu.uuid for gpu in gpus(3))
FASTEST = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}


# What is it called, which quantities are valid, which variable assigns it.


def test_nvidia_gives_the_four_answers():
    gpu: Accelerator = NVIDIA
    assert (gpu.kind, gpu.option) == ("GPU", "num_gpus")
    assert gpu.variable == "CUDA_VISIBLE_DEVICES"
    assert repr(NVIDIA) == "<Nvidia GPU>"


def test_quantities_are_shares_or_whole_devices():
    assert NVIDIA.quantity(0.25) == 2500
    assert NVIDIA.quantity(2) == 20_000
    with pytest.raises(OptionError, match=r"num_gpus=1\.5 mixes"):
        NVIDIA.quantity(1.5)


@pytest.mark.parametrize(
    ("ids", "value"),
    [((1, 3), "1,3"), ((0,), "0"), (("GPU-a", "MIG-b"), "GPU-a,MIG-b")],
)
def test_assignment_names_the_devices_and_the_order(ids, value):
    assert NVIDIA.assignment(ids, {}) == {
        "CUDA_VISIBLE_DEVICES": value,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def test_assignment_of_nothing_hides_every_device():
    assert NVIDIA.assignment((), {}) == {"CUDA_VISIBLE_DEVICES": ""}


def test_assignment_leaves_the_users_order_alone():
    assert NVIDIA.assignment((1,), FASTEST) == {"CUDA_VISIBLE_DEVICES": "1"}


def test_assignment_replaces_what_the_driver_had():
    assert NVIDIA.assignment((), {"CUDA_VISIBLE_DEVICES": "0,1"}) == {
        "CUDA_VISIBLE_DEVICES": ""
    }


@pytest.mark.parametrize("switch", ["1", "true", "TRUE", "Yes", "on", " 1 "])
@pytest.mark.parametrize("ids", [(), (0,)])
def test_the_noset_switch_leaves_all_variables_alone(switch, ids):
    environ = {"AIOGPU_NOSET_CUDA_VISIBLE_DEVICES": switch}
    assert NVIDIA.assignment(ids, environ) == {}


@pytest.mark.parametrize("switch", ["", "0", "false", "no", "off"])
def test_the_noset_switch_may_be_off(switch):
    environ = {"AIOGPU_NOSET_CUDA_VISIBLE_DEVICES": switch}
    assert NVIDIA.assignment((), environ) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("Tesla T4", "T4"),
        ("Tesla P4", "P4"),
        ("Tesla K80", "K80"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300", "B300"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA GeForce RTX 5090", "GeForce-RTX-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA TITAN V", "TITAN-V"),
        ("NVIDIA 7", "7"),  # one character is no type by the first rule
        ("Something", "Something"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100"),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", "H100"),
        ("NVIDIA Graphics Device MIG 1g.12gb+me", "Graphics-Device"),
        ("", None),
        ("  ", None),
        (None, None),
    ],
)
def test_the_type_is_read_from_the_products_name(name, expected):
    assert NVIDIA.type_of(name) == expected


# How is it detected: with NVML.


def test_detection_tells_all_that_nvml_says(nvml: StubNvml):
    mixed = StubGpu(ONE, "Tesla T4", "1:5e:0.0", 15 * GIB, capability=(7, 5))
    nvml.write([StubGpu(ZERO), mixed])
    assert nvml.run("result = shown(Nvidia().devices({}, None))") == [
        {
            "id": 0,
            "type": "A100",
            "uuid": ZERO,
            "name": "NVIDIA A100-SXM4-40GB",
            "memory": 40 * GIB,
            "compute_capability": [8, 0],
            "pci": "00000000:3B:00.0",
            "links": [],
            "parent": None,
        },
        {
            "id": 1,
            "type": "T4",
            "uuid": ONE,
            "name": "Tesla T4",
            "memory": 15 * GIB,
            "compute_capability": [7, 5],
            "pci": "00000001:5E:00.0",
            "links": [],
            "parent": None,
        },
    ]


def test_a_machine_without_gpus_has_none(nvml: StubNvml):
    assert nvml.run("result = [ids({}), inventory().problem]") == [[], None]


def test_a_given_number_counts_logical_devices_too(nvml: StubNvml):
    nvml.write(gpus(2))
    found = nvml.run("result = [shown(Nvidia().devices({}, n)) for n in (1, 2, 4)]")
    assert [[device["id"] for device in devices] for devices in found] == [
        [0],
        [0, 1],
        [0, 1, 2, 3],
    ]
    assert [device["uuid"] for device in found[2]] == [ZERO, ONE, None, None]


def test_nobody_is_asked_where_no_device_can_come_of_it(nvml: StubNvml):
    nvml.write(gpus(2))
    snippet = """
    def visible(text, wanted=None):
        return ids({"CUDA_VISIBLE_DEVICES": text}, wanted)

    found = [ids({}, 0), visible("?", 0), visible(""), visible("NoDevFiles")]
    assert not any(found), found
    result = "pynvml" in sys.modules or "libnvidia-ml" in open("/proc/self/maps").read()
    """
    assert nvml.run(snippet) is False


def test_the_variable_restricts_detection(nvml: StubNvml):
    nvml.write(gpus(4))
    snippet = """
    def visible(text, wanted=None):
        return ids({"CUDA_VISIBLE_DEVICES": text}, wanted)

    result = [
        visible("1,3"), visible("3, 1"), visible("2,-1,9"), visible("1,3,0", 2),
        visible("GPU-1,0"),
    ]
    """
    assert nvml.run(snippet) == [[1, 3], [3, 1], [2], [1, 3], [ONE, 0]]


def test_entries_that_nvml_does_not_know_are_refused(nvml: StubNvml):
    nvml.write(gpus(2))
    snippet = """
    def refusal(text, wanted=None):
        return error({"CUDA_VISIBLE_DEVICES": text}, wanted)

    result = [refusal("0,5"), refusal("GPU-9"), refusal("GPU-0,0"), refusal("a"),
              refusal("0,1", 3)]
    """
    unknown, no_uuid, twice, ill, many = nvml.run(snippet)
    assert "there is no device '5'. This machine has 0 (GPU-0000" in unknown
    assert "there is no device 'GPU-9'" in no_uuid
    assert "'0' names the same device as 'GPU-0' before it" in twice
    assert "'a' is neither an index" in ill
    assert many == (
        "num_gpus=3, but CUDA_VISIBLE_DEVICES='0,1' names 2 devices; ask for at most "
        "2, or name more."
    )


def test_under_another_order_detected_devices_go_by_uuid(nvml: StubNvml):
    nvml.write(gpus(2))
    snippet = f"""
    fastest = {FASTEST}
    result = [
        ids(fastest), ids(fastest, 3), ids({{"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}}),
        ids({{"CUDA_DEVICE_ORDER": ""}}),
        shown(Nvidia().devices(fastest | {{"CUDA_VISIBLE_DEVICES": "1,GPU-0"}}, None)),
    ]
    """
    detected, three, by_bus, empty, typed = nvml.run(snippet)
    assert detected == [ZERO, ONE]
    assert three == [ZERO, ONE, 2]
    assert by_bus == empty == [0, 1]
    assert [(device["id"], device["uuid"]) for device in typed] == [
        (1, None),
        (ZERO, ZERO),
    ]


def test_indices_count_by_bus_where_nvml_does_not(nvml: StubNvml):
    zero, one, two = gpus(3)
    nvml.write([two, zero, one])
    found = nvml.run("result = shown(Nvidia().devices({}, None))")
    assert [(device["id"], device["uuid"]) for device in found] == [
        (0, ZERO),
        (1, ONE),
        (2, TWO),
    ]


def test_links_are_told_of_the_devices_that_a_node_has(nvml: StubNvml):
    """They are asked of pairs: behind an NVSwitch all ends of links are switches."""
    zero, one, two, three = gpus(4)
    nvml.write([three, zero, one, two], links=[(1, 2), (0, 3), (3, 2)])
    snippet = """
    def links(text=None, wanted=None):
        environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
        found = shown(Nvidia().devices(environ, wanted))
        return [[peer[:5] for peer in device["links"]] for device in found]

    result = [links(), links("3,1"), links("2,1"), links(wanted=2)]
    """
    everything, apart, pair, two_of_them = nvml.run(snippet)
    assert everything == [["GPU-1"], ["GPU-0", "GPU-2"], ["GPU-1", "GPU-3"], ["GPU-2"]]
    assert apart == [[], []]
    assert pair == [["GPU-1"], ["GPU-2"]]
    assert two_of_them == [["GPU-1"], ["GPU-0"]]


@pytest.mark.parametrize("count", [1, 8])
def test_boxes_where_nvlink_joins_all(nvml: StubNvml, count):
    nvml.write(gpus(count), links=list(combinations(range(count), 2)))
    found = nvml.run("result = shown(Nvidia().devices({}, None))")
    uuids = {device["uuid"] for device in found}
    assert all(set(device["links"]) == uuids - {device["uuid"]} for device in found)
    assert len(uuids) == count


def test_a_state_changed_while_it_runs_is_seen(nvml: StubNvml):
    nvml.write(gpus(1))
    snippet = """
    for line in sys.stdin:
        print(json.dumps(ids({})), flush=True)
    """
    with subprocess.Popen(
        program(snippet),
        env=nvml.environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:

        def ask() -> str:
            process.stdin.write("\n")
            return process.stdout.readline()

        assert ask() == "[0]\n"
        nvml.write(gpus(3))
        assert ask() == "[0, 1, 2]\n"
        nvml.write(gpus(3), init_error=9)
        assert ask() == "[]\n"
        process.stdin.close()
    assert process.returncode == 0


def test_nvml_is_shut_down_after_each_detection(nvml: StubNvml):
    nvml.write(gpus(2))
    snippet = """
    import pynvml

    def is_shut():
        try:
            pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError_Uninitialized:
            return True

    inventory()
    result = [is_shut()]
    pynvml.nvmlInit()  # the user's own is left to the user
    inventory()
    result += [pynvml.nvmlDeviceGetCount()]
    """
    assert nvml.run(snippet) == [True, 2]


@pytest.mark.slow
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "in MIG mode"])
def test_what_is_asked_of_real_cards_is_fulfilled_by_the_stub(
    nvml: StubNvml, is_split: bool
):
    """So those tests do not rot where there is no card, nor the stub where there is."""
    first, *others = (replace(gpu, used=GIB) for gpu in gpus(4))
    if is_split:
        first = replace(first, mig=tuple(replace(each, used=1) for each in migs(2)))
    nvml.write([first, *others], links=[(1, 2), (1, 3)])
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "-rN", "tests/unit/accelerators/test_gpu.py"],
        cwd=ROOT,
        env=nvml.environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.split()[0].count("s") == (4 if is_split else 1)  # skipped


# The stub itself, in what detection does not touch.


def test_the_stub_speaks_the_rest_of_the_protocol(nvml: StubNvml):
    busy = StubGpu(ZERO, used=GIB, processes=((42, GIB), (43, 7)))
    nvml.write([busy, StubGpu(ONE)], driver="555.42.02")
    snippet = f"""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID("{ZERO}")
    other = pynvml.nvmlDeviceGetHandleByUUID("{ONE}")
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    running = pynvml.nvmlDeviceGetComputeRunningProcesses
    try:
        pynvml.nvmlDeviceGetHandleByUUID("GPU-unknown")
    except pynvml.NVMLError_NotFound:
        result = [
            pynvml.nvmlSystemGetDriverVersion(), memory.total, memory.used,
            [[process.pid, process.usedGpuMemory] for process in running(handle)],
            running(other), pynvml.nvmlDeviceGetPciInfo(other).busId,
        ]
    """
    assert nvml.run(snippet) == [
        "555.42.02",
        40 * GIB,
        GIB,
        [[42, GIB], [43, 7]],
        [],
        "00000000:3B:00.0",
    ]
