"""Processes, memory and health of GPUs, by the real nvidia-ml-py on a stub."""

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

def look(uuid=ZERO):
    sample = watch.look(device(uuid))
    listed = sample.processes
    return [
        None if listed is None else sorted(listed.items()),
        sorted(sample.living), sample.used, sample.problem, sample.is_lost,
    ]

def check(uuid=ZERO):
    health = watch.check(device(uuid))
    return [list(health.errors), health.action, health.is_lost]

"""
IDLE = [[], [], 0, None, False]


def test_watch_does_not_shut_down_the_programs_own_nvml(nvml: StubNvml) -> None:
    nvml.write(gpus(1))
    snippet = f"""{WATCH}
pynvml.nvmlInit()
nvml.write(gpus(1), lost=[0])
result = [look()[3], look()[3]]
nvml.write(gpus(1))
result += [look()[3]]
watch.close()
result += [pynvml.nvmlDeviceGetCount()]
pynvml.nvmlShutdown()
try:
    pynvml.nvmlShutdown()
except pynvml.NVMLError_Uninitialized:
    result += ["even"]
"""
    assert nvml.run(snippet) == ["GPU is lost", "GPU is lost", None, 1, "even"]


def test_gpu_recovers_from_a_failure_and_a_loss(nvml: StubNvml) -> None:
    snippet = f"""{WATCH}
result = []
failure = {{"nvmlDeviceGetComputeRunningProcesses_v3": 999}}
for state in ({{"lost": [0]}}, {{}}, {{"fail": failure}}, {{}}):
    nvml.write(gpus(1), **state)
    result += [look()]
"""
    nvml.write(gpus(1))
    assert nvml.run(snippet) == [
        [None, [], None, "GPU is lost", True],
        IDLE,
        [None, [], None, "Unknown Error", False],
        IDLE,
    ]


def test_problem_is_reported_without_an_answer(nvml: StubNvml) -> None:
    nvml.write(gpus(1))
    snippet = f"""{WATCH}
result = [look(ONE)]
pynvml.nvmlShutdown()
result += [look()]
watch.close()
watch.close()
result += [repr(watch), look()]
"""
    unknown = [None, [], None]
    assert nvml.run(snippet) == [
        [*unknown, "Not Found", False],
        IDLE,  # NVML is started again
        "<NvmlWatch NVML was closed>",
        [*unknown, "NVML was closed", False],
    ]
    nvml.write(gpus(1), init_error=9)
    problem = "NVML does not start: Driver Not Loaded"
    assert nvml.run(f"{WATCH}result = look()") == [*unknown, problem, False]


def test_utilisation_is_read_where_it_is_supported(nvml: StubNvml) -> None:
    """A GPU that does not support it is asked only once."""
    snippet = f"""{WATCH}
calls, rates = [], pynvml.nvmlDeviceGetUtilizationRates
def counted(handle):
    calls.append(handle)
    return rates(handle)
pynvml.nvmlDeviceGetUtilizationRates = counted
def busy(first, **how):
    zero, one = StubGpu(ZERO, utilisation=first), StubGpu(ONE, utilisation=None)
    nvml.write([zero, one], **how)
    return [watch.look(device(uuid)).utilisation for uuid in (ZERO, ONE)]
result = [busy(37), busy(37), len(calls), busy(5)]
result += [busy(5, fail={{"nvmlDeviceGetUtilizationRates": 999}}), look()[3]]
"""
    nvml.write(gpus(2))
    assert nvml.run(snippet) == [
        *([37, None], [37, None], 3, [5, None]),
        *([None, None], None),
    ]


def test_temperature_and_power_are_read_where_supported(nvml: StubNvml) -> None:
    snippet = f"""{WATCH}
def read(first, **how):
    nvml.write([first, StubGpu(ONE)], **how)
    seen = [watch.look(device(uuid)) for uuid in (ZERO, ONE)]
    return [(s.temperature, s.power, s.utilisation) for s in seen]
result = [read(StubGpu(ZERO, temperature=63, power=286_500))]
result += [read(StubGpu(ZERO, power=1), fail={{"nvmlDeviceGetPowerUsage": 999}})]
"""
    nvml.write(gpus(2))
    assert nvml.run(snippet) == [
        [[63, 286.5, 0], [None, None, 0]],
        [[None, None, 0], [None, None, 0]],
    ]


def test_mig_instance_has_its_own_samples(nvml: StubNvml) -> None:
    first, second = migs(2)
    first = replace(first, used=7, processes=((DEAD, 3),))
    second = replace(second, used=GIB, processes=((DEAD + 1, 5), (DEAD + 2, 9)))
    nvml.write([StubGpu(ZERO, used=2 * GIB, mig=(first, second))])
    snippet = f"""{WATCH}
FIRST, SECOND = {[first.uuid, second.uuid]}
result = [look(FIRST), look(SECOND), look()[0], watch.look(device(FIRST)).utilisation]
nvml.write([StubGpu(ZERO, mig=migs(2)[1:])])
result += [look(FIRST), look(SECOND)]
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


def test_is_alive_finds_existing_processes() -> None:
    assert is_alive(os.getpid())
    assert is_alive(1)
    assert [is_alive(pid) for pid in (DEAD, 0, -1, 2**32 - 1)] == [False] * 4


# Faults


def test_recovery_actions_have_names() -> None:
    assert [action_in_words(action) for action in range(9)] == [
        *("", "GPU reset", "node reboot", "drain P2P", "drain and reset"),
        *("recover the IMEX domain", "bus reset", "system reboot"),
        "recovery action 8",
    ]


@pytest.mark.parametrize(
    ("xid", "place", "expected"),
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
def test_event_concerns_its_gpu_and_instance(
    xid: Xid, place: tuple[int, int] | None, expected: bool
) -> None:
    assert xid.concerns("GPU-a", place) == expected


def test_errors_caused_by_programs_are_no_faults() -> None:
    actions = (None, "", "GPU reset")
    for xid in (13, 31, 43, 45, 68, 109):
        assert not any(is_fault(xid, action) for action in actions)
    for xid in (1, 48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 999):
        assert all(is_fault(xid, action) for action in actions)
    # The XID of an action adds nothing if the action is known.
    assert [is_fault(154, action) for action in actions] == [True, False, False]


# Health


WELL = [[], "", False]


UNKNOWN = [[], None, False]


FALLEN = "XID 79 (the GPU has fallen off the bus)"


CONTAINED = "XID 94 (a contained memory error)"


def test_xids_are_reported_once_and_for_their_gpu(nvml: StubNvml) -> None:
    nvml.write(gpus(2))
    nvml.xid(0, 48)  # before the first check
    healths = nvml.run(
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
    assert healths[:4] == [WELL] * 4
    assert healths[4:7] == [WELL, [[CONTAINED, FALLEN], "", False], WELL]
    assert healths[7:9] == [WELL, [[FALLEN], "", False]]
    halted = [["XID 62 (the internal micro-controller has halted)"], "", False]
    assert healths[9:] == [halted, halted, WELL], "the GPU of this XID is unknown"


def test_gpu_that_fell_off_the_bus_can_return(nvml: StubNvml) -> None:
    """The XID is attributed although a lost GPU does not report its UUID."""
    nvml.write(gpus(2))
    healths = nvml.run(
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
    assert healths[:4] == [WELL, [[FALLEN], None, True], [[], None, True], WELL]
    assert healths[4:] == [WELL, WELL, WELL, [[CONTAINED], "", False]]


QUIET = "a failed GPU is noticed only if its driver reports it otherwise.\n"


@pytest.mark.parametrize(
    "function",
    ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"],
)
def test_missing_events_are_logged_once_and_other_facts_are_reported(
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
    ("fail", "health"),
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
def test_failing_calls_give_the_right_health(
    nvml: StubNvml, fail: dict[str, int], health: list[object]
) -> None:
    nvml.write(gpus(1), fail=fail)
    assert nvml.run(f"{WATCH}result = [check(), log.getvalue()]") == [health, ""]


def test_nvml_that_the_program_shut_down_is_started_again(nvml: StubNvml) -> None:
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
