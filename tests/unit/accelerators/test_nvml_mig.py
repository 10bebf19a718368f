"""GPUs in MIG mode, whose instances are the devices, by nvidia-ml-py on a stub."""

from pathlib import Path

from tests.unit.accelerators.stub_nvml import (
    GIB,
    StubGpu,
    StubMig,
    StubNvml,
    compile_stub,
    gpus,
    migs,
)

ZERO, ONE, TWO = (gpu.uuid for gpu in gpus(3))
FIRST, SECOND = migs(2)
LARGE = StubMig(
    "MIG-3ec1be0e-1b5a-5a1e-9b6e-3d8b5a0f1c2d",
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
    (9, 1),
    20 * GIB,
)


def box() -> list[StubGpu]:
    """Two instances on GPU 0, one on GPU 2, GPU 1 whole; counted from the back."""
    zero, one, two = gpus(3)
    return [
        StubGpu(two.uuid, pci=two.pci, mig=(LARGE,)),
        StubGpu(one.uuid, "Tesla T4", one.pci, capability=(7, 5)),
        StubGpu(zero.uuid, pci=zero.pci, mig=(FIRST, SECOND)),
    ]


SHOWN = "result = [shown(Nvidia().devices({}, None)), inventory().problem]"


def test_instances_are_devices_in_place_of_their_gpu(nvml: StubNvml):
    nvml.write(box(), links=[(0, 1), (0, 2)])
    found, problem = nvml.run(SHOWN)
    assert problem is None
    assert found[0] == {
        "id": FIRST.uuid,
        "type": "A100",
        "uuid": FIRST.uuid,
        "name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "memory": 5 * GIB,
        "compute_capability": [8, 0],
        "pci": "00000000:01:00.0",
        "links": [],
        "parent": ZERO,
    }
    # A whole GPU goes by UUID here: what CUDA counts beside MIG is open.
    assert [
        (each["id"], each["parent"], each["memory"] // GIB, each["type"])
        for each in found[1:]
    ] == [
        (SECOND.uuid, ZERO, 5, "A100"),
        (ONE, None, 40, "T4"),
        (LARGE.uuid, TWO, 20, "A100"),
    ]


def test_the_variable_names_instances(nvml: StubNvml):
    nvml.write(box())
    snippet = f"""
    def visible(text, wanted=None):
        return ids({{"CUDA_VISIBLE_DEVICES": text}}, wanted)

    def refusal(text):
        return error({{"CUDA_VISIBLE_DEVICES": text}})

    result = [
        visible("{LARGE.uuid},1,{SECOND.uuid}"),
        visible("MIG-{ZERO}/2/0,MIG-{TWO}/9/1,MIG-{ZERO}/1/0"),
        visible("0,2", 1), visible("GPU-2,{SECOND.uuid}"), ids({{}}, 2), ids({{}}, 5),
        refusal("MIG-{ZERO}/7/0"), refusal("{LARGE.uuid},2"),
    ]
    """
    *found, gone, twice = nvml.run(snippet)
    assert found == [
        [LARGE.uuid, ONE, SECOND.uuid],
        [SECOND.uuid, LARGE.uuid, FIRST.uuid],
        [FIRST.uuid],
        [LARGE.uuid, SECOND.uuid],
        [FIRST.uuid, SECOND.uuid],
        [FIRST.uuid, SECOND.uuid, ONE, LARGE.uuid, 3],
    ]
    assert f"there is no MIG instance 'MIG-{ZERO}/7/0'. This machine has" in gone
    assert f"'2' names the same device as '{LARGE.uuid}' before it" in twice


def test_a_gpu_without_an_instance_is_no_device_and_one_line_says_so(nvml: StubNvml):
    nvml.write([StubGpu(ZERO, mig=()), *gpus(2)[1:]])
    snippet = """
    import io, logging
    log = io.StringIO()
    logging.basicConfig(stream=log, format="%(levelname)s %(message)s")
    result = [ids({}), log.getvalue(), error({"CUDA_VISIBLE_DEVICES": "1"})]
    """
    found, told, refusal = nvml.run(snippet)
    assert found == [ONE]
    assert told == (
        f"WARNING ! GPU 1 ({ZERO}, NVIDIA A100-SXM4-40GB) is in MIG mode and has no "
        f"instance, so no task can use it; make some (`nvidia-smi mig -cgi`), or leave "
        f"MIG mode\n"
    )
    assert "'1' is a GPU in MIG mode without an instance" in refusal


def test_what_is_not_told_of_an_instance_is_unknown(nvml: StubNvml):
    snippet = """
    there = inventory()
    [mig] = there.mig
    result = [
        [place for place, _ in mig.instances], shown(there.devices),
        there.problem, there.sees_mig,
    ]
    """
    one = [StubGpu(ZERO, mig=(FIRST, SECOND))]
    nvml.write(one, fail={"nvmlDeviceGetGpuInstanceId": 3, "nvmlDeviceGetName": 999})
    places, devices, problem, sees_mig = nvml.run(snippet)
    assert places == ["?/0", "?/1"]
    assert [device["uuid"] for device in devices] == [FIRST.uuid, SECOND.uuid]
    assert (problem, sees_mig) == ("nvmlDeviceGetName fails: Unknown Error", True)
    nvml.write(one, fail={"nvmlDeviceGetMigDeviceHandleByIndex": 999})
    assert nvml.run(snippet) == [
        [],
        [],
        "MIG instance 0 of GPU 0 is unknown: Unknown Error",
        False,
    ]
    nvml.write(one, fail={"nvmlDeviceGetMigDeviceHandleByIndex": 4})
    assert nvml.run(snippet) == [[], [], None, True]


def test_a_gpu_that_is_lost_while_its_instances_are_asked(nvml: StubNvml):
    nvml.write(
        [StubGpu(ZERO, mig=(FIRST,)), *gpus(2)[1:]],
        fail={"nvmlDeviceGetMigDeviceHandleByIndex": 15},
    )
    snippet = "there = inventory(); result = [ids({}), there.count, there.problem]"
    assert nvml.run(snippet) == [[ONE], 2, "GPU 0 does not answer: GPU is lost"]


def test_a_driver_older_than_mig_has_none(tmp_path: Path):
    nvml = StubNvml(compile_stub(tmp_path, ["nvmlDeviceGetMigMode"]), tmp_path / "s")
    nvml.write(gpus(2))
    assert nvml.run("result = [ids({}), inventory().problem]") == [[0, 1], None]
