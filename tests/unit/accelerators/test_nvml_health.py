"""Whether a GPU is well, asked by nvidia-ml-py unmodified on a stub, as it changes."""

from pathlib import Path

import pytest

from tests.unit.accelerators.stub_nvml import (
    StubGpu,
    StubNvml,
    compile_stub,
    gpus,
    migs,
)

ZERO, ONE = (gpu.uuid for gpu in gpus(2))
WELL = [[], "", False]
UNKNOWN = [[], None, False]
FALLEN = "XID 79 (the GPU has fallen off the bus)"
CONTAINED = "XID 94 (a contained memory error)"
CHECK = f"""
import io, logging
from aiogpu.accelerators.nvml.watch import NvmlWatch
from aiogpu.core.resources.devices import Device
from tests.unit.accelerators.stub_nvml import StubGpu, StubNvml, gpus, migs

log = io.StringIO()
logging.basicConfig(stream=log, format="%(levelname)s %(message)s")
ZERO, ONE = "{ZERO}", "{ONE}"
zero, one = gpus(2)
nvml = StubNvml.here()
watch = NvmlWatch()
watch.open()

def check(uuid=ZERO):
    told = watch.check(Device(uuid, uuid=uuid))
    return [list(told.errors), told.action, told.is_lost]

"""


def test_xids_are_told_once_and_of_the_gpu_that_has_them(nvml: StubNvml) -> None:
    nvml.write(gpus(2))
    nvml.xid(0, 48)  # before anybody asked
    found = nvml.run(
        CHECK
        + """
result = [check(), check(ONE)]
nvml.xid(0, 13, 31, 43, 45, 68, 109, 154)
result += [check(), check(ONE)]
nvml.xid(1, 94, 79, 94)
result += [check(), check(ONE), check(ONE)]
nvml.xid(0, 79)
result += [check(ONE), check()]
"""
    )
    assert found[:4] == [WELL] * 4
    assert found[4:7] == [WELL, [[CONTAINED, FALLEN], "", False], WELL]
    assert found[7:] == [WELL, [[FALLEN], "", False]]


def test_an_event_of_no_known_gpu_concerns_them_all(nvml: StubNvml) -> None:
    nvml.write(gpus(2))
    snippet = f"{CHECK}check(), check(ONE), nvml.xid(-1, 62)\n"
    snippet += "result = [check(), check(ONE), check()]"
    halted = ["XID 62 (the internal micro-controller has halted)"]
    assert nvml.run(snippet) == [[halted, "", False], [halted, "", False], WELL]


def test_the_action_to_recover_and_its_end(nvml: StubNvml) -> None:
    nvml.write([StubGpu(ZERO, action=1), StubGpu(ONE, action=None)])
    snippet = f"{CHECK}result = [check(), check(ONE)]\n"
    snippet += "for action in (2, 9, 0):\n"
    snippet += "    nvml.write([StubGpu(ZERO, action=action)])\n"
    snippet += "    result.append(check()[1])\n"
    assert nvml.run(snippet) == [
        [[], "GPU reset", False],
        UNKNOWN,
        *("node reboot", "recovery action 9", ""),
    ]


def test_a_gpu_falls_off_the_bus_and_comes_back(nvml: StubNvml) -> None:
    """Whose XID it is is known, although a lost GPU does not even tell its UUID."""
    nvml.write(gpus(2))
    found = nvml.run(
        CHECK
        + """
check(), check(ONE)
nvml.write(gpus(2), lost=[0])
nvml.xid(0, 79)
result = [check(ONE), check(), check(), check(ONE)]
nvml.write(gpus(2))
result += [check(), check(ONE)]
nvml.xid(0, 94)
result += [check(ONE), check()]
"""
    )
    assert found[:4] == [WELL, [[FALLEN], None, True], [[], None, True], WELL]
    assert found[4:] == [WELL, WELL, WELL, [[CONTAINED], "", False]]


def test_instances_are_told_what_is_theirs(nvml: StubNvml) -> None:
    first, second = (mig.uuid for mig in migs(2))
    found = nvml.run(
        CHECK
        + f"""
def each():
    return [check(uuid) for uuid in ("{first}", "{second}", ONE)]

box = [StubGpu(ZERO, mig=migs(2)), one]
nvml.write(box)
result = [each()]
nvml.xid(0, 94, place=(2, 0))
result += [each()]
nvml.xid(0, 79)
result += [each()]
nvml.write([StubGpu(ZERO, mig=migs(2), action=4), one])
result += [each()]
nvml.write(box, lost=[0])
result += [each()]
nvml.write([StubGpu(ZERO, mig=migs(2)[:1]), one])
result += [each()]
"""
    )
    fallen, drain = [[FALLEN], "", False], [[], "drain and reset", False]
    lost = [[], None, True]
    assert found == [
        [WELL, WELL, WELL],
        [WELL, [[CONTAINED], "", False], WELL],
        [fallen, fallen, WELL],
        [drain, drain, WELL],
        [lost, lost, WELL],
        [WELL, lost, WELL],  # the instance was taken away
    ]


def test_an_instance_of_unknown_place_has_all_errors_of_its_gpu(
    nvml: StubNvml,
) -> None:
    [mig] = migs(1)
    nvml.write([StubGpu(ZERO, mig=(mig,))], fail={"nvmlDeviceGetGpuInstanceId": 3})
    snippet = f"{CHECK}check('{mig.uuid}'), nvml.xid(0, 94, place=(5, 0))\n"
    snippet += f"result = check('{mig.uuid}')"
    assert nvml.run(snippet) == [[CONTAINED], "", False]


EVENTS = [
    "nvmlEventSetCreate",
    "nvmlDeviceRegisterEvents",
    "nvmlEventSetWait_v2",
]
QUIET = "a GPU that fails is noticed only where its driver says so otherwise.\n"


@pytest.mark.parametrize("function", EVENTS)
def test_without_events_one_line_says_so_and_the_rest_is_told(
    nvml: StubNvml, function: str
) -> None:
    fail = f"fail={{'{function}': 3}}"
    snippet = f"""{CHECK}
nvml.write(gpus(2), {fail})
result = [check(), check(ONE)]
nvml.xid(0, 79)
result += [check()]
nvml.write([zero, StubGpu(ONE, action=1)], lost=[0], {fail})
result += [check(), check(ONE), log.getvalue()]
"""
    assert nvml.run(snippet) == [
        *(WELL, WELL, WELL, [[], None, True], [[], "GPU reset", False]),
        f"WARNING ! NVML does not tell of XIDs (Not Supported); {QUIET}",
    ]


def test_a_driver_that_is_too_old_for_all_of_it(tmp_path: Path) -> None:
    absent = [*EVENTS, "nvmlDeviceGetFieldValues", "nvmlDeviceGetUtilizationRates"]
    nvml = StubNvml(compile_stub(tmp_path, absent), tmp_path / "state")
    nvml.write(gpus(2))
    snippet = f"{CHECK}result = [check(), watch.look(Device(0, uuid=ZERO)).utilisation]"
    snippet += "\nnvml.write(gpus(2), lost=[0])\nresult += [check(), check(ONE)]"
    snippet += "\nresult += [log.getvalue()]"
    assert nvml.run(snippet) == [
        *(UNKNOWN, None, [[], None, True], UNKNOWN),
        f"WARNING ! NVML does not tell of XIDs (Function Not Found); {QUIET}",
    ]


@pytest.mark.parametrize(
    ("fail", "told"),
    [
        ({"nvmlDeviceGetFieldValues": 999}, UNKNOWN),
        ({"nvmlDeviceGetFieldValues": 15}, [[], None, True]),
        ({"nvmlDeviceGetFieldValues": 16}, [[], "GPU reset", False]),
        ({"nvmlDeviceGetMemoryInfo": 16}, [[], "GPU reset", False]),
        ({"nvmlDeviceGetMemoryInfo": 15}, [[], None, True]),
        ({"nvmlDeviceGetMemoryInfo": 999}, WELL),
        ({"nvmlDeviceGetHandleByUUID": 999}, UNKNOWN),
        ({"nvmlDeviceGetHandleByUUID": 6}, [[], None, True]),
        ({"nvmlEventSetWait_v2": 15}, WELL),
        ({"nvmlDeviceRegisterEvents": 15}, WELL),
    ],
    ids=lambda value: next(iter(value.items())) if isinstance(value, dict) else "",
)
def test_what_failing_calls_mean(
    nvml: StubNvml, fail: dict[str, int], told: list[object]
) -> None:
    nvml.write(gpus(1), fail=fail)
    assert nvml.run(f"{CHECK}result = [check(), log.getvalue()]") == [told, ""]


def test_an_nvml_that_the_program_has_shut_down_is_started_again(
    nvml: StubNvml,
) -> None:
    nvml.write(gpus(1))
    snippet = f"""{CHECK}
import pynvml
result = [check()]
pynvml.nvmlShutdown()
result += [check()]
nvml.xid(0, 79)
result += [check()]
pynvml.nvmlShutdown()
nvml.write(gpus(1), init_error=9)
result += [check()]
nvml.write(gpus(1))
result += [check()]
watch.close()
result += [check()]
"""
    fallen = [[FALLEN], "", False]
    assert nvml.run(snippet) == [WELL, WELL, fallen, UNKNOWN, WELL, UNKNOWN]


def test_a_gpu_that_reports_without_end_holds_nobody_up(nvml: StubNvml) -> None:
    nvml.write(gpus(2))
    snippet = f"""{CHECK}
import pynvml
from aiogpu.accelerators.nvml.health import AT_ONCE
result = [check(), check(ONE)]
nvml.xid(0, 79)
event = pynvml.nvmlEventSetWait_v2(watch._health._events._set, 0)
asked = []
def endless(events, timeout):
    asked.append(timeout)
    return event
pynvml.nvmlEventSetWait_v2 = endless
result += [check(ONE), set(asked) == {{0}}, len(asked) == AT_ONCE, check()]
"""
    fallen = [[FALLEN], "", False]
    assert nvml.run(snippet) == [WELL, WELL, WELL, True, True, fallen]


def test_of_logical_devices_nothing_is_known(nvml: StubNvml) -> None:
    snippet = f"{CHECK}told = watch.check(Device(0))\n"
    snippet += "result = [list(told.errors), told.action, told.is_lost]"
    nvml.write(gpus(1))
    assert nvml.run(snippet) == UNKNOWN
