"""What is on a GPU, asked by nvidia-ml-py unmodified on a stub, while it changes."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from aiogpu.accelerators.nvidia import Nvidia
from aiogpu.accelerators.nvml.watch import NvmlWatch, is_alive
from aiogpu.core.model.request import Device
from tests.unit.accelerators.stub_nvml import (
    GIB,
    StubGpu,
    StubNvml,
    compile_stub,
    gpus,
    migs,
)

ZERO, ONE = (gpu.uuid for gpu in gpus(2))
DEAD = 2**22 + 1
"""No process has this id: it is above the largest that Linux gives (proc(5))."""
ASK = f"""
from aiogpu.accelerators.nvml.watch import NvmlWatch
from aiogpu.core.resources.devices import Device

ZERO = Device(0, uuid="{ZERO}")
watch = NvmlWatch()
watch.open()

def told(device=ZERO):
    found = watch.look(device)
    listed = found.processes
    return [
        None if listed is None else sorted(listed.items()),
        sorted(found.living), found.used, found.problem, found.is_lost,
    ]
"""
LOOK = ASK + "result = told()"
REWRITE = """
import os
def rewrite(change):
    path = os.environ["AIOGPU_STUB_NVML_STATE"]
    with open(path) as file:
        text = file.read()
    with open(path, "w") as file:
        file.write(change(text))
"""


def one(**details: object) -> list[StubGpu]:
    return [StubGpu(ZERO, used=GIB, **details)]


def test_processes_of_all_lists_and_the_memory_in_use(nvml: StubNvml) -> None:
    mine = os.getpid()
    nvml.write(
        one(
            processes=((mine, 5), (DEAD, 7)),
            mps=((DEAD + 1, 1),),
            graphics=((mine, 9), (DEAD + 2, -1)),
        )
    )
    processes, living, used, problem, is_lost = nvml.run(LOOK)
    assert processes == [[mine, 9], [DEAD, 7], [DEAD + 1, 1], [DEAD + 2, None]]
    assert (living, used, problem, is_lost) == ([mine], GIB, None, False)


def test_an_idle_gpu_lists_nobody(nvml: StubNvml) -> None:
    nvml.write(one())
    assert nvml.run(LOOK) == [[], [], GIB, None, False]


V3 = [
    f"nvmlDeviceGet{name}RunningProcesses_v3"
    for name in ("Compute", "MPSCompute", "Graphics")
]
V2 = [name.replace("v3", "v2") for name in V3 if "MPS" not in name]


def test_older_drivers_are_asked_by_older_calls(tmp_path: Path) -> None:
    nvml = StubNvml(compile_stub(tmp_path, V3), tmp_path / "state")
    nvml.write(one(processes=((DEAD, 7),), mps=((DEAD + 1, 1),), graphics=((1, 2),)))
    assert nvml.run(LOOK)[:2] == [[[1, 2], [DEAD, 7]], [1]]


def test_without_any_list_memory_is_known(tmp_path: Path) -> None:
    nvml = StubNvml(compile_stub(tmp_path, [*V3, *V2]), tmp_path / "state")
    nvml.write(one(processes=((DEAD, 7),)))
    assert nvml.run(LOOK) == [None, [], GIB, None, False]


@pytest.mark.parametrize("code", [3, 4], ids=["not supported", "not permitted"])
def test_what_a_gpu_does_not_tell_is_unknown(nvml: StubNvml, code: int) -> None:
    refused = dict.fromkeys([*V3, *V2, "nvmlDeviceGetMemoryInfo"], code)
    nvml.write(one(processes=((DEAD, 7),)), fail=refused)
    assert nvml.run(LOOK) == [None, [], None, None, False]


def test_a_refused_list_is_not_asked_for_again(
    nvml: StubNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("AIOGPU_STUB_NVML_CALLS", str(calls))
    nvml.write(one(), fail={V3[1]: 3})
    nvml.run(f"{LOOK}\nopen({str(calls)!r}, 'w').close()\ntold()\nwatch = None")
    assert calls.read_text().split() == [
        *(V3[0], V3[2]),
        *("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates"),
    ]


def test_a_lost_gpu_says_so_and_may_come_back(nvml: StubNvml) -> None:
    nvml.write(one(), lost=[0])
    snippet = f"{ASK}{REWRITE}first = told()\n"
    snippet += "rewrite(lambda text: text.replace('lost 0', 'driver 1'))\n"
    snippet += "result = [first, told()]"
    first, second = nvml.run(snippet)
    assert first == [None, [], None, "GPU is lost", True]
    assert second == [[], [], GIB, None, False]


def test_for_a_lost_gpu_nvml_is_started_anew_more_and_more_seldom(
    nvml: StubNvml,
) -> None:
    """NVML never finds again what it has lost, although a reset brought it back."""
    nvml.write(gpus(2))
    snippet = f"""{ASK}
import pynvml
from tests.unit.accelerators.stub_nvml import StubNvml, gpus
starts, start = [], pynvml.nvmlInit
def counted():
    starts.append(looks)
    start()
pynvml.nvmlInit = counted
ONE = Device(1, uuid="{ONE}")
looks = 0
def look():
    global looks
    looks += 1
    lost, well = watch.look(ZERO), watch.look(ONE)
    return [lost.is_lost, watch.check(ZERO).is_lost, well.problem]
result = [look()]
StubNvml.here().write(gpus(2), gone=[0])
result += [look()]
StubNvml.here().write(gpus(2))
result += [look()]
StubNvml.here().write(gpus(2), lost=[0])
lost = [look() for _ in range(100)]
result += [all(told == [True, True, None] for told in lost), starts]
StubNvml.here().write(gpus(2))
result += [look(), look()]
"""
    well = [False, False, None]
    first, gone, back, is_lost, starts, *later = nvml.run(snippet)
    assert (first, back, is_lost) == (well, well, True)
    assert gone[0] is True
    assert gone[2] is None
    assert len(starts) < 20
    assert max(starts) > 90
    assert later == [well, well]


def test_the_programs_own_nvml_is_left_to_it(nvml: StubNvml) -> None:
    nvml.write(one())
    snippet = f"""{ASK}
import pynvml
from tests.unit.accelerators.stub_nvml import StubGpu, StubNvml
pynvml.nvmlInit()
box = StubGpu("{ZERO}")
StubNvml.here().write([box], lost=[0])
result = [told()[3], told()[3]]
StubNvml.here().write([box])
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


def test_a_failure_midway_is_a_problem_and_passes(nvml: StubNvml) -> None:
    nvml.write(one())
    snippet = f"{ASK}{REWRITE}first = told()\n"
    snippet += f"rewrite(lambda text: text + 'fail {V3[0]} 999\\n')\nsecond = told()\n"
    snippet += "rewrite(lambda text: text.replace('fail', 'driver'))\n"
    snippet += "result = [first, second, told()]"
    first, second, third = nvml.run(snippet)
    assert first == third == [[], [], GIB, None, False]
    assert second == [None, [], None, "Unknown Error", False]


def test_an_nvml_that_the_program_has_shut_down_is_started_again(
    nvml: StubNvml,
) -> None:
    nvml.write(one())
    snippet = f"{ASK}import pynvml\npynvml.nvmlShutdown()\nresult = told()"
    assert nvml.run(snippet) == [[], [], GIB, None, False]


def test_how_busy_a_gpu_is(nvml: StubNvml) -> None:
    nvml.write([StubGpu(ZERO, utilisation=37), StubGpu(ONE, utilisation=None)])
    snippet = f"""{ASK}{REWRITE}
import pynvml
asked, rates = [], pynvml.nvmlDeviceGetUtilizationRates
def counted(handle):
    asked.append(handle)
    return rates(handle)
pynvml.nvmlDeviceGetUtilizationRates = counted
ONE = Device(1, uuid="{ONE}")
def busy():
    return [watch.look(device).utilisation for device in (ZERO, ONE)]
result = [busy(), busy(), len(asked)]
rewrite(lambda text: text.replace(" 37", " 5"))
result += [busy()]
rewrite(lambda text: text + "fail nvmlDeviceGetUtilizationRates 999\\n")
result += [busy(), told()[3]]
"""
    assert nvml.run(snippet) == [
        *([37, None], [37, None], 3, [5, None]),
        *([None, None], None),
    ]


def test_an_instance_is_looked_at_by_itself(nvml: StubNvml) -> None:
    first, second = migs(2)
    first = replace(first, used=7, processes=((DEAD, 3),))
    second = replace(second, used=GIB, processes=((DEAD + 1, 5), (DEAD + 2, 9)))
    box = [StubGpu(ZERO, used=2 * GIB, mig=(first, second))]
    nvml.write(box)
    snippet = f"""{ASK}
FIRST, SECOND = [Device(uuid, uuid=uuid) for uuid in {[first.uuid, second.uuid]}]
result = [told(FIRST), told(SECOND), told(ZERO)[0], watch.look(FIRST).utilisation]
from tests.unit.accelerators.stub_nvml import StubGpu, StubNvml, migs
StubNvml.here().write([StubGpu("{ZERO}", mig=migs(2)[1:])])
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


def test_memory_that_lingers_after_its_process(nvml: StubNvml) -> None:
    """The stub's own: what clearing a GPU has to wait for in truth."""
    snippet = f"""{ASK}
import subprocess
from tests.unit.accelerators.stub_nvml import GIB, StubGpu, StubNvml
process = subprocess.Popen(["sleep", "60"])
def listed(seconds):
    lingering = ((process.pid, GIB, seconds),)
    StubNvml.here().write([StubGpu("{ZERO}", lingering=lingering)])
    processes, living, used, *_ = told()
    return [len(processes), len(living), used]
result = [listed(0)]
process.kill(), process.wait()
result += [listed(60), listed(0)]
"""
    assert nvml.run(snippet) == [[1, 1, GIB], [1, 0, GIB], [0, 0, 0]]


def test_foreign_process_ids_are_told_of_once(nvml: StubNvml) -> None:
    snippet = f"""{ASK}
import io, logging, os
from tests.unit.accelerators.stub_nvml import StubGpu, StubNvml
log = io.StringIO()
logging.basicConfig(stream=log, format="%(message)s")
def lines(*pids, sure=False, looks=2):
    log.truncate(0), log.seek(0)
    watch = NvmlWatch()
    watch._reads_pids = sure
    watch.open()
    processes = tuple((pid, 5) for pid in pids)
    for listed in [processes] * looks + [((({DEAD}, 5)),)]:
        StubNvml.here().write([StubGpu("{ZERO}", processes=listed)])
        watch.look(ZERO)
    watch.close()
    return log.getvalue().splitlines()
mine = os.getpid()
result = [lines({DEAD}), lines(), lines(mine, {DEAD}), lines({DEAD}, sure=True)]
"""
    once, nobody, known, sure = nvml.run(snippet)
    assert nobody == known == sure == []
    assert len(once) == 1
    assert once[0].startswith(f"! NVML lists processes on {ZERO} whose ids nobody has")


def test_a_gpu_that_is_not_there(nvml: StubNvml) -> None:
    nvml.write(one())
    snippet = f"{ASK}result = told(Device(1, uuid='{ONE}'))"
    assert nvml.run(snippet) == [None, [], None, "Not Found", False]


def test_an_nvml_that_does_not_start(nvml: StubNvml) -> None:
    nvml.write(one(), init_error=9)
    problem = "NVML does not start: Driver Not Loaded"
    assert nvml.run(LOOK) == [None, [], None, problem, False]


def test_closed_it_knows_nothing(nvml: StubNvml) -> None:
    nvml.write(one())
    snippet = f"{ASK}watch.close()\nwatch.close()\nresult = [repr(watch), told()]"
    assert nvml.run(snippet) == [
        "<NvmlWatch NVML was closed>",
        [None, [], None, "NVML was closed", False],
    ]


def test_who_can_be_asked_about() -> None:
    watch = NvmlWatch()
    assert watch.knows(Device(0, uuid=ZERO))
    assert watch.knows(Device("MIG-3ec1be0e-1b5a-5a1e-9b6e-3d8b5a0f1c2d"))
    assert not watch.knows(Device(0))
    assert not watch.knows(Device("GPU-ab"))
    assert isinstance(Nvidia().watch(), NvmlWatch)


def test_who_is_alive() -> None:
    assert is_alive(os.getpid())
    assert is_alive(1)
    assert [is_alive(pid) for pid in (DEAD, 0, -1, 2**32 - 1)] == [False] * 4
