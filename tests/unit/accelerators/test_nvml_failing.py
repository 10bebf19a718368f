"""What is left of detection where NVML is missing, broken or half answering."""

import ctypes
import subprocess
from pathlib import Path

import pytest

from tests.unit.accelerators.stub_nvml import (
    LIBRARY,
    StubNvml,
    compile_stub,
    gpus,
    program,
    run_snippet,
    stub_environ,
)

ZERO, ONE, TWO = (gpu.uuid for gpu in gpus(3))


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
def test_without_the_library_nothing_is_said(tmp_path: Path):
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


def test_a_damaged_library_is_a_problem(tmp_path: Path):
    (tmp_path / LIBRARY).write_bytes(b"")
    environ = stub_environ(tmp_path, tmp_path / "none")
    *found, problem = run_snippet(OUTCOME, environ)
    assert found == [[], [0, 1], [7, "GPU-ab"]]
    assert problem.startswith("NVML cannot be loaded: ")


def test_a_failing_start_is_a_problem(nvml: StubNvml):
    nvml.write(gpus(4), init_error=9)
    *found, problem = nvml.run(OUTCOME)
    assert found == [[], [0, 1], [7, "GPU-ab"]]
    assert problem == "NVML does not start: Driver Not Loaded"


def test_a_failing_count_is_a_problem(nvml: StubNvml):
    nvml.write(gpus(4), fail={"nvmlDeviceGetCount_v2": 999})
    *found, problem = nvml.run(OUTCOME)
    assert found == [[], [0, 1], [7, "GPU-ab"]]
    assert problem == "NVML cannot count the GPUs: Unknown Error"


def test_ill_formed_entries_are_refused_without_nvml_too(nvml: StubNvml):
    nvml.write(init_error=9)
    message = nvml.run('result = error({"CUDA_VISIBLE_DEVICES": "0,a"})')
    assert "'a' is neither an index" in message
    assert "unknown (NVML does not start: Driver Not Loaded)" in message


@pytest.mark.parametrize(
    ("devices", "how", "warnings"),
    [
        (gpus(1), {}, []),
        (gpus(1), {"fail": {"nvmlDeviceGetMemoryInfo": 3}}, []),
        (gpus(2), {"forbidden": [0]}, []),
        (gpus(1), {"init_error": 9}, ["! NVML does not start: Driver Not Loaded"]),
        (gpus(3), {"lost": [1, 2]}, ["! GPU 1 does not answer: GPU is lost"]),
    ],
    ids=["well", "not supported", "forbidden", "no start", "lost"],
)
def test_each_detection_warns_once_and_only_of_failures(nvml, devices, how, warnings):
    nvml.write(devices, **how)
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


def test_a_lost_device_is_left_out_and_the_rest_go_by_uuid(nvml: StubNvml):
    """Whether CUDA counts a lost device is open, so an index would be a guess."""
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
    "function",
    [
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetPciInfo_v3",
    ],
)
def test_a_device_lost_midway_is_left_out_too(nvml: StubNvml, function):
    nvml.write(gpus(1), fail={function: 15})
    found, count, problem = nvml.run(
        "there = inventory(); result = [there.devices, there.count, there.problem]"
    )
    assert (found, count) == ([], 1)
    assert problem == "GPU 0 does not answer: GPU is lost"


def test_a_device_that_may_not_be_used_is_not_there(nvml: StubNvml):
    """NVML counts devices that a cgroup withholds; CUDA numbers the others."""
    nvml.write(gpus(3), forbidden=[0])
    snippet = "result = [shown(Nvidia().devices({}, None)), inventory().problem]"
    found, problem = nvml.run(snippet)
    assert [(device["id"], device["uuid"]) for device in found] == [(0, ONE), (1, TWO)]
    assert problem is None


def test_a_detail_that_fails_is_left_out(nvml: StubNvml):
    nvml.write(gpus(2), fail={"nvmlDeviceGetUUID": 999, "nvmlDeviceGetPciInfo_v3": 3})
    snippet = "result = [shown(Nvidia().devices({}, None)), inventory().problem]"
    found, problem = nvml.run(snippet)
    assert [(device["id"], device["uuid"]) for device in found] == [
        (0, None),
        (1, None),
    ]
    assert [device["type"] for device in found] == ["A100", "A100"]
    assert problem == "nvmlDeviceGetUUID fails: Unknown Error"


@pytest.mark.parametrize(
    ("fail", "problem"),
    [
        ({"nvmlDeviceGetP2PStatus": 3, "nvmlDeviceGetMigMode": 3}, None),
        (
            {"nvmlDeviceGetP2PStatus": 999},
            "nvmlDeviceGetP2PStatus fails: Unknown Error",
        ),
        (
            {"nvmlDeviceGetCudaComputeCapability": 999, "nvmlDeviceGetP2PStatus": 15},
            "nvmlDeviceGetCudaComputeCapability fails: Unknown Error",
        ),
        (
            {"nvmlDeviceGetMigMode": 999},
            "whether GPU 0 is in MIG mode is unknown: Unknown Error",
        ),
    ],
    ids=["not supported", "links", "capability", "mig mode"],
)
def test_what_is_known_beside_what_fails(nvml: StubNvml, fail, problem):
    nvml.write(gpus(3), fail=fail, links=[(0, 1)])
    snippet = """
    there = inventory()
    result = [ids({}), there.problem, there.sees_mig, shown(there.devices)]
    """
    found, told, sees_mig, devices = nvml.run(snippet)
    assert (found, told) == ([0, 1, 2], problem)
    assert sees_mig == ("MIG mode" not in str(problem))
    assert len(devices[0]["links"]) == ("nvmlDeviceGetP2PStatus" not in fail)


def test_a_name_that_is_no_text_is_left_out(nvml: StubNvml):
    nvml.write(gpus(1, "Tesla \udcff"))
    snippet = "result = [shown(Nvidia().devices({}, None)), inventory().problem]"
    [found], problem = nvml.run(snippet)
    assert (found["name"], found["type"], found["uuid"]) == (None, None, ZERO)
    assert problem.startswith("nvmlDeviceGetName fails: 'utf-8' codec")


def test_without_pynvml_devices_are_unknown(nvml: StubNvml):
    nvml.write(gpus(1))
    *found, problem = nvml.run('sys.modules["pynvml"] = None' + OUTCOME)
    assert found == [[], [0, 1], [7, "GPU-ab"]]
    assert problem.startswith("pynvml cannot be imported: ")


def test_a_missing_symbol_costs_only_what_it_tells(tmp_path: Path):
    absent = [
        *("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPciInfo_v3", "nvmlShutdown"),
        *("nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetP2PStatus"),
        "nvmlDeviceGetMigMode",
    ]
    nvml = StubNvml(compile_stub(tmp_path, absent), tmp_path / "state")
    nvml.write(gpus(2), links=[(0, 1)])
    snippet = "result = [shown(Nvidia().devices({}, None)), inventory().problem]"
    found, problem = nvml.run(snippet)
    for device, uuid in zip(found, [ZERO, ONE], strict=True):
        assert (device["uuid"], device["memory"], device["pci"]) == (uuid, 0, None)
        assert (device["compute_capability"], device["links"]) == (None, [])
    assert problem == "nvmlDeviceGetMemoryInfo fails: Function Not Found"


def test_a_library_without_a_start_is_a_problem(tmp_path: Path):
    library = compile_stub(tmp_path, ["nvmlInitWithFlags"])
    nvml = StubNvml(library, tmp_path / "state")
    *found, problem = nvml.run(OUTCOME)
    assert found == [[], [0, 1], [7, "GPU-ab"]]
    assert problem == "NVML does not start: Function Not Found"
