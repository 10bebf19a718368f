"""Detection of NVIDIA GPUs by the real nvidia-ml-py on a stub of NVML."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from aiogpu.accelerators.nvidia import Nvidia
from tests.unit.accelerators.stub_nvml import (
    GIB,
    LIBRARY,
    ROOT,
    StubGpu,
    StubMig,
    StubNvml,
    compile_stub,
    gpus,
    migs,
    program,
    run_snippet,
    stub_environ,
)

NVIDIA = Nvidia()
ZERO, ONE, TWO = (gpu.uuid for gpu in gpus(3))


FASTEST = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}


@pytest.mark.parametrize(
    ("ids", "environ", "visible", "order"),
    [
        ((1, 3), {}, "1,3", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        (("GPU-a", "MIG-b"), {}, "GPU-a,MIG-b", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ((), {}, "", {}),
        ((1,), FASTEST, "1", {}),
    ],
)
def test_assignment_names_the_devices_and_the_order(ids, environ, visible, order):
    """An order set by the user is kept."""
    assignment = {"CUDA_VISIBLE_DEVICES": visible, **order}
    assert NVIDIA.assignment(ids, environ) == assignment


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GeForce RTX 5090", "GeForce-RTX-5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA TITAN V", "TITAN-V"),
        ("NVIDIA 7", "7"),  # too short for the first rule
        ("Something", "Something"),
        ("NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb", "H100"),
        ("NVIDIA Graphics Device MIG 1g.12gb+me", "Graphics-Device"),
        ("  ", None),
        (None, None),
    ],
)
def test_type_is_derived_from_the_product_name(name, expected):
    assert NVIDIA.type_of(name) == expected


# Answers of NVML


def test_devices_are_named_by_uuid_under_another_order(nvml: StubNvml):
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
    expected = [(1, None), (ZERO, ZERO)]
    assert [(device["id"], device["uuid"]) for device in typed] == expected


def test_indices_follow_the_bus_and_not_nvml(nvml: StubNvml):
    zero, one, two = gpus(3)
    nvml.write([two, zero, one])
    devices = nvml.run("result = shown(Nvidia().devices({}, None))")
    expected = [(0, ZERO), (1, ONE), (2, TWO)]
    assert [(device["id"], device["uuid"]) for device in devices] == expected


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
    pynvml.nvmlInit()  # a call of the user
    inventory()
    result += [pynvml.nvmlDeviceGetCount()]
    """
    assert nvml.run(snippet) == [True, 2]


@pytest.mark.slow
@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "in MIG mode"])
def test_stub_passes_the_tests_of_real_gpus(nvml: StubNvml, is_split: bool):
    """Keep those tests and the stub consistent, with and without a real GPU."""
    first, *others = (replace(gpu, used=GIB) for gpu in gpus(4))
    if is_split:
        first = replace(
            first, mig=tuple(replace(instance, used=1) for instance in migs(2))
        )
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


# NVML that is missing, broken or incomplete


def has_nvml() -> bool:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


OUTCOME = """
result = [ids({}), ids({}, 2), ids({"CUDA_VISIBLE_DEVICES": "7,GPU-ab"}),
          inventory().problem]
"""


@pytest.mark.skipif(has_nvml(), reason="this machine has NVML, which is found")
def test_missing_library_is_not_reported(tmp_path: Path):
    done = subprocess.run(
        program(OUTCOME + "print(json.dumps([*result, 'pynvml' in sys.modules]))"),
        env=stub_environ(tmp_path, tmp_path / "none"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.startswith(
        '[[], [0, 1], [7, "GPU-ab"], "NVML cannot be loaded: libnvidia-ml.so.1: '
    )
    assert done.stdout.endswith(", false]\n")


NO_COUNT = {"fail": {"nvmlDeviceGetCount_v2": 999}}


@pytest.mark.parametrize(
    ("state", "setup", "problem"),
    [
        ({"init_error": 9}, "", "NVML does not start: Driver Not Loaded"),
        (NO_COUNT, "", "NVML cannot count the GPUs: Unknown Error"),
        ({}, 'sys.modules["pynvml"] = None', "pynvml cannot be imported: "),
    ],
    ids=["start", "count", "no pynvml"],
)
def test_devices_are_logical_without_answers(nvml: StubNvml, state, setup, problem):
    nvml.write(gpus(4), **state)
    *ids, message = nvml.run(setup + OUTCOME)
    assert ids == [[], [0, 1], [7, "GPU-ab"]]
    assert message.startswith(problem)


def test_damaged_library_and_failed_start_are_problems(tmp_path: Path):
    (tmp_path / LIBRARY).write_bytes(b"")
    *ids, problem = run_snippet(OUTCOME, stub_environ(tmp_path, tmp_path / "none"))
    assert ids == [[], [0, 1], [7, "GPU-ab"]]
    assert problem.startswith("NVML cannot be loaded: ")
    (tmp_path / "without").mkdir()
    library = compile_stub(tmp_path / "without", ["nvmlInitWithFlags"])
    *again, problem = StubNvml(library, tmp_path / "state").run(OUTCOME)
    assert (again, problem) == (ids, "NVML does not start: Function Not Found")


@pytest.mark.parametrize(
    ("devices", "state", "warnings"),
    [
        (gpus(1), {}, []),
        (gpus(1), {"fail": {"nvmlDeviceGetMemoryInfo": 3}}, []),
        (gpus(2), {"forbidden": [0]}, []),
        (gpus(1), {"init_error": 9}, ["! NVML does not start: Driver Not Loaded"]),
        (gpus(3), {"lost": [1, 2]}, ["! GPU 1 does not answer: GPU is lost"]),
    ],
    ids=["well", "not supported", "forbidden", "no start", "lost"],
)
def test_detection_warns_once_and_only_of_failures(nvml, devices, state, warnings):
    nvml.write(devices, **state)
    snippet = """
    import io, logging
    log = io.StringIO()
    logging.basicConfig(stream=log, format="%(levelname)s %(name)s %(message)s")
    Nvidia().devices({}, None)
    result = log.getvalue().splitlines()
    """
    ending = "; GPUs are known only in part, or not at all."
    assert nvml.run(snippet) == [
        f"WARNING aiogpu.accelerators.nvidia {text}{ending}" for text in warnings
    ]


def test_lost_device_is_left_out_and_the_others_are_named_by_uuid(nvml: StubNvml):
    """CUDA may or may not count a lost device, so an index would be a guess."""
    nvml.write(gpus(3), lost=[1])
    snippet = """
    result = [ids({}), ids({}, 2), ids({}, 4), inventory().count,
              inventory().problem, ids({"CUDA_VISIBLE_DEVICES": "1,2,GPU-1"})]
    """
    assert nvml.run(snippet) == [
        [ZERO, TWO],
        [ZERO, TWO],
        [ZERO, TWO, 1, 3],
        3,
        "GPU 1 does not answer: GPU is lost",
        [1, 2, "GPU-1"],
    ]


@pytest.mark.parametrize(
    ("fail", "problem"),
    [
        ({"P2PStatus": 3, "MigMode": 3}, None),
        ({"P2PStatus": 999}, "nvmlDeviceGetP2PStatus fails: Unknown Error"),
        (
            {"CudaComputeCapability": 999, "P2PStatus": 15},
            "nvmlDeviceGetCudaComputeCapability fails: Unknown Error",
        ),
        ({"MigMode": 999}, "whether GPU 0 is in MIG mode is unknown: Unknown Error"),
    ],
    ids=["not supported", "links", "capability", "mig mode"],
)
def test_failing_call_does_not_hide_other_facts(nvml: StubNvml, fail, problem):
    fail = {f"nvmlDeviceGet{name}": code for name, code in fail.items()}
    nvml.write(gpus(3), fail=fail, links=[(0, 1)])
    snippet = """
    machine = inventory()
    result = [ids({}), machine.problem, machine.sees_mig, shown(machine.devices)]
    """
    ids, message, sees_mig, devices = nvml.run(snippet)
    assert (ids, message) == ([0, 1, 2], problem)
    assert sees_mig == ("MIG mode" not in str(problem))
    assert len(devices[0]["links"]) == ("nvmlDeviceGetP2PStatus" not in fail)


def test_missing_symbol_hides_only_its_own_fact(tmp_path: Path):
    absent = [
        *("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPciInfo_v3", "nvmlShutdown"),
        *("nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetP2PStatus"),
        "nvmlDeviceGetMigMode",
    ]
    nvml = StubNvml(compile_stub(tmp_path, absent), tmp_path / "state")
    nvml.write(gpus(2), links=[(0, 1)])
    snippet = "result = [shown(Nvidia().devices({}, None)), inventory().problem]"
    devices, problem = nvml.run(snippet)
    for device, uuid in zip(devices, [ZERO, ONE], strict=True):
        assert (device["uuid"], device["memory"], device["pci"]) == (uuid, 0, None)
        assert (device["compute_capability"], device["links"]) == (None, [])
    assert problem == "nvmlDeviceGetMemoryInfo fails: Function Not Found"


# MIG mode


FIRST, SECOND = migs(2)


LARGE = StubMig(
    "MIG-3ec1be0e-1b5a-5a1e-9b6e-3d8b5a0f1c2d",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    (9, 1),
    20 * GIB,
)


def mixed_gpus() -> list[StubGpu]:
    """Two instances on GPU 0, one on GPU 2, GPU 1 whole; in reverse order."""
    zero, one, two = gpus(3)
    return [
        StubGpu(two.uuid, pci=two.pci, mig=(LARGE,)),
        StubGpu(one.uuid, "Tesla T4", one.pci, capability=(7, 5)),
        StubGpu(zero.uuid, pci=zero.pci, mig=(FIRST, SECOND)),
    ]


SHOWN = "result = [shown(Nvidia().devices({}, None)), inventory().problem]"


def test_mig_instances_replace_their_gpu(nvml: StubNvml):
    nvml.write(mixed_gpus(), links=[(0, 1), (0, 2)])
    devices, problem = nvml.run(SHOWN)
    assert problem is None
    name = {"id": FIRST.uuid, "uuid": FIRST.uuid, "name": FIRST.name, "parent": ZERO}
    facts = {"type": "A100", "compute_capability": [8, 0], "links": []}
    place = {"memory": 5 * GIB, "pci": "00000000:01:00.0"}
    assert devices[0] == facts | name | place
    # The whole GPU has its UUID, because CUDA may count differently beside MIG.
    assert [
        (device["id"], device["parent"], device["memory"] // GIB, device["type"])
        for device in devices[1:]
    ] == [
        (SECOND.uuid, ZERO, 5, "A100"),
        (ONE, None, 40, "T4"),
        (LARGE.uuid, TWO, 20, "A100"),
    ]


def test_variable_selects_gpus_and_instances(nvml: StubNvml):
    nvml.write(mixed_gpus())
    snippet = f"""
    def visible(text, wanted=None):
        return ids({{"CUDA_VISIBLE_DEVICES": text}}, wanted)

    result = [
        visible("{LARGE.uuid},1,{SECOND.uuid}"), visible("0,2", 1), visible("0", 0),
        ids({{}}, 2), ids({{}}, 5), error({{"CUDA_VISIBLE_DEVICES": "0,1"}}, 3),
    ]
    """
    *ids, message = nvml.run(snippet)
    assert ids == [
        [LARGE.uuid, ONE, SECOND.uuid],
        [FIRST.uuid],
        [],
        [FIRST.uuid, SECOND.uuid],
        [FIRST.uuid, SECOND.uuid, ONE, LARGE.uuid, 3],
    ]
    assert message.startswith(
        "num_gpus=3, but CUDA_VISIBLE_DEVICES='0,1' names 2 devices"
    )


def test_facts_that_nvml_does_not_report_of_an_instance_are_unknown(nvml: StubNvml):
    snippet = """
    machine = inventory()
    [mig] = machine.mig
    result = [
        [place for place, _ in mig.instances], shown(machine.devices),
        machine.problem, machine.sees_mig,
    ]
    """
    split = [StubGpu(ZERO, mig=(FIRST, SECOND))]
    nvml.write(split, fail={"nvmlDeviceGetGpuInstanceId": 3, "nvmlDeviceGetName": 999})
    places, devices, problem, sees_mig = nvml.run(snippet)
    assert places == ["?/0", "?/1"]
    assert [device["uuid"] for device in devices] == [FIRST.uuid, SECOND.uuid]
    assert (problem, sees_mig) == ("nvmlDeviceGetName fails: Unknown Error", True)
    nvml.write(split, fail={"nvmlDeviceGetMigDeviceHandleByIndex": 999})
    assert nvml.run(snippet) == [
        [],
        [],
        "MIG instance 0 of GPU 0 is unknown: Unknown Error",
        False,
    ]
    nvml.write(split, fail={"nvmlDeviceGetMigDeviceHandleByIndex": 4})
    assert nvml.run(snippet) == [[], [], None, True]
