"""What is on a GPU and whether it is well: nvidia-ml-py, unmodified, on a stub."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from aiogpu.accelerators.nvml.health import WHOLE, Xid, action_in_words, is_fault
from aiogpu.accelerators.nvml.watch import is_alive
from tests.unit.accelerators.stub_nvml import GIB, StubGpu, StubNvml, gpus, migs

ZERO, ONE = (gpu.uuid for gpu in gpus(2))


DEAD = 2**22 + 1


WATCH = f"""
import io, logging, os
import pynvml
from aiogpu.accelerators.nvml.watch import NvmlWatch
from aiogpu.core.resources.devices import Device
from tests.unit.accelerators.stub_nvml import GIB, StubGpu, StubNvml, gpus, migs

log = io.StringIO()
logging.basicConfig(stream=log, format="%(levelname)s %(message)s")
ZERO, ONE = "{ZERO}", "{ONE}"
zero, one = gpus(2)
nvml = StubNvml.here()
watch = NvmlWatch()
watch.open()

def device(uuid):
    return Device(uuid, uuid=uuid)

def told(uuid=ZERO):
    found = watch.look(device(uuid))
    listed = found.processes
    return [
        None if listed is None else sorted(listed.items()),
        sorted(found.living), found.used, found.problem, found.is_lost,
    ]

def check(uuid=ZERO):
    found = watch.check(device(uuid))
    return [list(found.errors), found.action, found.is_lost]

"""
LOOK = WATCH + "result = told()"
IDLE = [[], [], 0, None, False]


def one(**details: object) -> list[StubGpu]:
    return [StubGpu(ZERO, used=GIB, **details)]


V3 = [
    f"nvmlDeviceGet{name}RunningProcesses_v3"
    for name in ("Compute", "MPSCompute", "Graphics")
]


def test_the_programs_own_nvml_is_left_to_it(nvml: StubNvml) -> None:
    nvml.write(gpus(1))
    snippet = f"""{WATCH}
pynvml.nvmlInit()
nvml.write(gpus(1), lost=[0])
result = [told()[3], told()[3]]
nvml.write(gpus(1))
result += [told()[3]]
watch.close()
result += [pynvml.nvmlDeviceGetCount()]
pynvml.nvmlShutdown()
try:
    pynvml.nvmlShutdown()
except pynvml.NVMLError_Uninitialized:
    result += ["even"]
"""
    assert nvml.run(snippet) == ["GPU is lost", "GPU is lost", None, 1, "even"]


def test_a_failure_passes_and_a_lost_gpu_may_come_back(nvml: StubNvml) -> None:
    snippet = f"""{WATCH}
result = []
for how in ({{"lost": [0]}}, {{}}, {{"fail": {{"{V3[0]}": 999}}}}, {{}}):
    nvml.write(gpus(1), **how)
    result += [told()]
"""
    nvml.write(gpus(1))
    assert nvml.run(snippet) == [
        [None, [], None, "GPU is lost", True],
        IDLE,
        [None, [], None, "Unknown Error", False],
        IDLE,
    ]


def test_without_an_answer_the_problem_is_reported(nvml: StubNvml) -> None:
    nvml.write(gpus(1))
    snippet = f"""{WATCH}
result = [told(ONE)]
pynvml.nvmlShutdown()
result += [told()]
watch.close()
watch.close()
result += [repr(watch), told()]
"""
    unknown = [None, [], None]
    assert nvml.run(snippet) == [
        [*unknown, "Not Found", False],
        IDLE,  # it is started again
        "<NvmlWatch NVML was closed>",
        [*unknown, "NVML was closed", False],
    ]
    nvml.write(gpus(1), init_error=9)
    problem = "NVML does not start: Driver Not Loaded"
    assert nvml.run(LOOK) == [*unknown, problem, False]


def test_how_busy_a_gpu_is(nvml: StubNvml) -> None:
    """One that does not tell is not asked again."""
    snippet = f"""{WATCH}
asked, rates = [], pynvml.nvmlDeviceGetUtilizationRates
def counted(handle):
    asked.append(handle)
    return rates(handle)
pynvml.nvmlDeviceGetUtilizationRates = counted
def busy(first, **how):
    box = [StubGpu(ZERO, utilisation=first), StubGpu(ONE, utilisation=None)]
    nvml.write(box, **how)
    return [watch.look(device(uuid)).utilisation for uuid in (ZERO, ONE)]
result = [busy(37), busy(37), len(asked), busy(5)]
result += [busy(5, fail={{"nvmlDeviceGetUtilizationRates": 999}}), told()[3]]
"""
    nvml.write(gpus(2))
    assert nvml.run(snippet) == [
        *([37, None], [37, None], 3, [5, None]),
        *([None, None], None),
    ]


def test_temperature_and_power_are_read_where_there_are_sensors(nvml: StubNvml) -> None:
    snippet = f"""{WATCH}
def read(first, **how):
    nvml.write([first, StubGpu(ONE)], **how)
    seen = [watch.look(device(uuid)) for uuid in (ZERO, ONE)]
    return [(one.temperature, one.power, one.utilisation) for one in seen]
result = [read(StubGpu(ZERO, temperature=63, power=286_500))]
result += [read(StubGpu(ZERO, power=1), fail={{"nvmlDeviceGetPowerUsage": 999}})]
"""
    nvml.write(gpus(2))
    assert nvml.run(snippet) == [
        [[63, 286.5, 0], [None, None, 0]],
        [[None, None, 0], [None, None, 0]],
    ]


def test_an_instance_is_looked_at_by_itself(nvml: StubNvml) -> None:
    first, second = migs(2)
    first = replace(first, used=7, processes=((DEAD, 3),))
    second = replace(second, used=GIB, processes=((DEAD + 1, 5), (DEAD + 2, 9)))
    box = [StubGpu(ZERO, used=2 * GIB, mig=(first, second))]
    nvml.write(box)
    snippet = f"""{WATCH}
FIRST, SECOND = {[first.uuid, second.uuid]}
result = [told(FIRST), told(SECOND), told()[0], watch.look(device(FIRST)).utilisation]
nvml.write([StubGpu(ZERO, mig=migs(2)[1:])])
result += [told(FIRST), told(SECOND)]
"""
    assert nvml.run(snippet) == [
        [[[DEAD, 3]], [], 7, None, False],
        [[[DEAD + 1, 5], [DEAD + 2, 9]], [], GIB, None, False],
        [[DEAD, 3], [DEAD + 1, 5], [DEAD + 2, 9]],
        None,
        [None, [], None, "Not Found", False],
        [[], [], 0, None, False],
    ]


def test_foreign_process_ids_are_logged_once(nvml: StubNvml) -> None:
    snippet = f"""{WATCH}
def lines(*pids, sure=False, looks=2):
    log.truncate(0), log.seek(0)
    watch = NvmlWatch()
    watch._reads_pids = sure
    watch.open()
    processes = tuple((pid, 5) for pid in pids)
    for listed in [processes] * looks + [((({DEAD}, 5)),)]:
        nvml.write([StubGpu(ZERO, processes=listed)])
        watch.look(device(ZERO))
    watch.close()
    return log.getvalue().splitlines()
mine = os.getpid()
result = [lines({DEAD}), lines(), lines(mine, {DEAD}), lines({DEAD}, sure=True)]
"""
    once, nobody, known, sure = nvml.run(snippet)
    assert nobody == known == sure == []
    assert len(once) == 1
    assert once[0].startswith(
        f"WARNING ! NVML lists processes on {ZERO} by ids that do not exist"
    )


def test_who_is_alive() -> None:
    assert is_alive(os.getpid())
    assert is_alive(1)
    assert [is_alive(pid) for pid in (DEAD, 0, -1, 2**32 - 1)] == [False] * 4


# Faults, in words


def test_recovery_actions_in_words() -> None:
    assert [action_in_words(action) for action in range(9)] == [
        *("", "GPU reset", "node reboot", "drain P2P", "drain and reset"),
        *("recover the IMEX domain", "bus reset", "system reboot"),
        "recovery action 8",
    ]


@pytest.mark.parametrize(
    ("xid", "place", "concerned"),
    [
        (Xid(79, "GPU-a"), None, True),
        (Xid(79, "GPU-a"), (1, 0), True),
        (Xid(79, "GPU-b"), None, False),
        (Xid(79, "GPU-b", (1, 0)), (1, 0), False),
        (Xid(79, None), (1, 0), True),
        (Xid(94, "GPU-a", (1, 0)), (1, 0), True),
        (Xid(94, "GPU-a", (1, 0)), (1, 1), False),
        (Xid(94, "GPU-a", (2, 0)), (1, 0), False),
        (Xid(94, "GPU-a", (1, WHOLE)), (1, 3), True),
        (Xid(94, "GPU-a", (1, WHOLE)), (2, 3), False),
        (Xid(94, "GPU-a", (1, 0)), None, True),
    ],
)
def test_which_device_an_event_concerns(
    xid: Xid, place: tuple[int, int] | None, concerned: bool
) -> None:
    assert xid.concerns("GPU-a", place) == concerned


def test_what_a_program_causes_itself_is_no_fault_and_all_else_is() -> None:
    actions = (None, "", "GPU reset")
    for xid in (13, 31, 43, 45, 68, 109):
        assert not any(is_fault(xid, action) for action in actions)
    for xid in (1, 48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 999):
        assert all(is_fault(xid, action) for action in actions)
    # The XID of an action adds nothing where the action is known.
    assert [is_fault(154, action) for action in actions] == [True, False, False]


# Health


WELL = [[], "", False]


UNKNOWN = [[], None, False]


FALLEN = "XID 79 (the GPU has fallen off the bus)"


CONTAINED = "XID 94 (a contained memory error)"


def test_xids_are_reported_once_and_for_the_gpu_that_has_them(nvml: StubNvml) -> None:
    nvml.write(gpus(2))
    nvml.xid(0, 48)  # before anybody asked
    found = nvml.run(
        WATCH
        + """
result = [check(), check(ONE)]
nvml.xid(0, 13, 31, 43, 45, 68, 109, 154)
result += [check(), check(ONE)]
nvml.xid(1, 94, 79, 94)
result += [check(), check(ONE), check(ONE)]
nvml.xid(0, 79)
result += [check(ONE), check()]
nvml.xid(-1, 62)
result += [check(), check(ONE), check()]
"""
    )
    assert found[:4] == [WELL] * 4
    assert found[4:7] == [WELL, [[CONTAINED, FALLEN], "", False], WELL]
    assert found[7:9] == [WELL, [[FALLEN], "", False]]
    halted = [["XID 62 (the internal micro-controller has halted)"], "", False]
    assert found[9:] == [halted, halted, WELL], "it is of no known GPU"


def test_a_gpu_falls_off_the_bus_and_comes_back(nvml: StubNvml) -> None:
    """Whose XID it is is known, although a lost GPU does not even tell its UUID."""
    nvml.write(gpus(2))
    found = nvml.run(
        WATCH
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


EVENTS = ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"]


QUIET = "a failed GPU is noticed only if its driver reports it otherwise.\n"


@pytest.mark.parametrize("function", EVENTS)
def test_without_events_one_line_says_so_and_the_rest_is_reported(
    nvml: StubNvml, function: str
) -> None:
    fail = f"fail={{'{function}': 3}}"
    snippet = f"""{WATCH}
nvml.write(gpus(2), {fail})
result = [check(), check(ONE)]
nvml.xid(0, 79)
result += [check()]
nvml.write([zero, StubGpu(ONE, action=1)], lost=[0], {fail})
result += [check(), check(ONE), log.getvalue()]
"""
    assert nvml.run(snippet) == [
        *(WELL, WELL, WELL, [[], None, True], [[], "GPU reset", False]),
        f"WARNING ! NVML reports no XIDs (Not Supported); {QUIET}",
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
    assert nvml.run(f"{WATCH}result = [check(), log.getvalue()]") == [told, ""]


def test_an_nvml_that_the_program_has_shut_down_is_started_again(
    nvml: StubNvml,
) -> None:
    nvml.write(gpus(1))
    snippet = f"""{WATCH}
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
