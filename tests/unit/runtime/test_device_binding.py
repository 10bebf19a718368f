"""From a lease to the environment, the CPUs and the memory limits of a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from aiogpu.core.model.ids import LeaseId
from aiogpu.core.model.request import Device, Request
from aiogpu.core.model.units import BY_SHARE, UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.runtime.devices import binding
from aiogpu.runtime.devices.binding import Affinity, Assignment, variables_of
from aiogpu.wire.messages import Bind

FIRST = Device(0, pci="00000000:3B:00.0")
SECOND = Device(1, pci="0001:af:00.0")


class CpuTree:
    """A made-up machine of eight CPUs and two GPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.has("sys/devices/system/cpu/online", "0-7\n")
        self.has("sys/bus/pci/devices/0000:3b:00.0/local_cpulist", "0-2,4\n")
        self.has("sys/bus/pci/devices/0001:af:00.0/local_cpulist", "4-7\n")

    def has(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def near(self, *indices: int, devices: tuple[Device, ...] = ()) -> tuple[int, ...]:
        return Affinity(devices or (FIRST, SECOND), self.root).near(indices)


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Those that this process may use."""
    usable = set(range(8))
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: usable)
    return usable


@pytest.fixture
def cpu_tree(tmp_path: Path, cpus: set[int]) -> CpuTree:
    return CpuTree(tmp_path)


@pytest.mark.parametrize("text", ["", "\n", "three", "1-x", "é"])
def test_an_unreadable_list_of_cpus_pins_nothing(cpu_tree: CpuTree, text: str) -> None:
    cpu_tree.has("sys/bus/pci/devices/0000:3b:00.0/local_cpulist", text)
    assert cpu_tree.near(0) == cpu_tree.near(0, 1) == ()
    assert cpu_tree.near(1) == (4, 5, 6, 7)


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/user/me", "user/cpuset.cpus.effective"),
        ("4:cpuset:/me", "cpuset/me/cpuset.effective_cpus"),
        ("4:cpuset:/me", "cpuset/cpuset.cpus"),
    ],
)
def test_a_cpuset_is_not_a_choice_of_the_users(
    cpu_tree: CpuTree, cpus: set[int], line: str, file: str
) -> None:
    cpus -= {0, 1, 5, 6, 7}
    groups = cpu_tree.root / "sys/fs/cgroup"
    cpu_tree.has("proc/self/cgroup", f"9:other:/\n{line}\n")
    cpu_tree.has(
        "proc/self/mountinfo",
        f"1 2 0:1 / {groups} rw - cgroup2 x rw\n"
        f"1 2 0:1 / {groups}/cpuset rw - cgroup x rw,cpuset\n",
    )
    assert cpu_tree.near(0) == ()
    cpu_tree.has(f"sys/fs/cgroup/{file}", "2-4\n")
    assert cpu_tree.near(0) == (2, 4)
    cpus -= {3}
    assert cpu_tree.near(0) == (), "fewer than the cpuset has"


@dataclass
class FakeVendor:
    """Assigns by one variable, and tells what it has seen."""

    kind: str
    variable: str
    option: str = ""
    seen: Mapping[str, str] | None = None

    def assignment(
        self, ids: Sequence[int | str], environ: Mapping[str, str]
    ) -> dict[str, str]:
        self.seen = dict(environ)
        if environ.get("NOSET"):
            return {}
        return {self.variable: ",".join(map(str, ids))}


def bind(
    assignment: Assignment, ledger: Ledger, amounts: dict[str, int], **environ: str
) -> Bind:
    lease = ledger.take(Request.of({"CPU": UNIT}, amounts))
    assert lease is not None
    return assignment.bind(lease, environ)


GIB = 1 << 30
GPUS = [
    Device(0, memory=80 * GIB, uuid="GPU-a", pci="00000000:3B:00.0"),
    Device(1, memory=40 * GIB, uuid="GPU-b", pci="00000000:AF:00.0"),
    Device(2),
]


def bound(
    *indices: int,
    share: int = UNIT,
    cpus: int = 1,
    gpu_memory: int = 0,
    options: Mapping[str, str] | None = None,
    **environ: str,
) -> Bind:
    """What a worker is told that has these devices."""
    ledger = Ledger({}, [DeviceSet("GPU", GPUS)])
    vendor = FakeVendor("GPU", "GPUS")
    assignment = Assignment([vendor], ledger, {}, **(options or {}))  # type: ignore[list-item]
    request = Request.of(
        {"CPU": cpus * UNIT}, {"GPU": share * len(indices)}, gpu_memory=gpu_memory
    )
    shares = (tuple((index, share) for index in indices),)
    return assignment.bind(Lease(LeaseId(1), request, shares, Ledger({})), environ)


def test_memory_limits_are_set_as_variables_of_the_frameworks() -> None:
    assert bound(0, share=2500, gpu_memory=BY_SHARE) == Bind(
        {
            "GPUS": "0",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.25",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "CUPY_GPU_MEMORY_LIMIT": str(20 * GIB),
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        },
        {"GPU": (0,)},
        (20 * GIB,),
    )
    both = bound(0, 1, gpu_memory=6 * GIB)
    assert both.gpu_memory == (6 * GIB, 6 * GIB)
    assert both.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.075", "of the smallest"
    unknown = bound(0, 2, gpu_memory=6 * GIB)
    assert unknown.gpu_memory == (6 * GIB, 6 * GIB)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in unknown.environ
    assert unknown.environ["CUPY_GPU_MEMORY_LIMIT"] == str(6 * GIB)
    alone = bound(1, share=0, gpu_memory=10 * GIB)
    assert (alone.gpu_memory, alone.accelerators) == ((10 * GIB,), {"GPU": (1,)})


def test_limits_that_the_user_has_set_stay() -> None:
    wanted = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "CUPY_GPU_MEMORY_LIMIT": "50%",
        "TF_FORCE_GPU_ALLOW_GROWTH": "false",
        "XLA_CLIENT_MEM_FRACTION": ".9",
    }
    found = bound(0, gpu_memory=GIB, **wanted)  # type: ignore[arg-type]
    assert found.environ == {**wanted, "GPUS": "0"}
    assert variables_of([1], [2], {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".1"}).keys() == {
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "CUPY_GPU_MEMORY_LIMIT",
        "TF_FORCE_GPU_ALLOW_GROWTH",
    }
    assert variables_of([], [], {}) == variables_of([0], [1], {}) == {}


def test_workers_are_pinned_if_they_ask_for_no_more_cpus_than_are_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, cpus in (("0000:3b:00.0", "0-1"), ("0000:af:00.0", "2-3")):
        (tmp_path / "sys/bus/pci/devices" / name).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / name / "local_cpulist").write_text(cpus)
    monkeypatch.setattr(binding, "ROOT", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(4)))
    on = {"cpu_affinity": "auto"}
    assert bound(1, options=on).cpus == bound(1, cpus=2, options=on).cpus == (2, 3)
    assert bound(1, cpus=3, options=on).cpus == (), "it asks for more than are near"
    assert bound(0, 1, options=on).cpus == bound(2, options=on).cpus == ()
    assert bound(1).cpus == bound(1, options={"cpu_affinity": "off"}).cpus == ()


def test_shares_by_mps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    on = {"mps": "auto"}
    caplog.set_level("INFO")
    # The node's environment counts, and not the task's.
    assert bound(0, share=2500, options=on).environ == {"GPUS": "0"}
    assert [record.levelname for record in caplog.records] == ["INFO"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(binding, "runs", lambda _environ: True)
        assert bound(0, share=2500, options=on).environ == {
            "GPUS": "GPU-a",
            binding.THREADS: "25",
        }
        limited = bound(1, share=5000, gpu_memory=GIB, options=on)
        assert limited.environ[binding.MEMORY] == "0=1024M"
        assert limited.accelerators == {"GPU": (1,)}, "tasks see the ids as ever"
        assert bound(1, 2, options=on).environ == {"GPUS": "GPU-b,2"}
        assert bound(0, share=2500).environ == {"GPUS": "0"}, "off unless wanted"


PID = "nvidia-cuda-mps-control.pid"


def runs_in(directory: Path) -> bool:
    return binding.runs({binding.PIPES: str(directory)})


def test_mps_of_another_user_runs_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int, _signal: int) -> None:
        raise PermissionError

    (tmp_path / PID).write_text("1")
    monkeypatch.setattr("os.kill", refuse)
    assert runs_in(tmp_path)


@pytest.mark.parametrize("text", ["", "0", "-1", str(1 << 22), "9" * 30, "é"])
def test_mps_whose_process_has_ended_does_not_run(tmp_path: Path, text: str) -> None:
    (tmp_path / PID).write_text(text)
    assert not runs_in(tmp_path)
    os.mkfifo(tmp_path / "control")
    assert runs_in(tmp_path), "seen from a container"


@pytest.mark.parametrize(
    ("parts", "limits", "told"),
    [
        (2500, (), {binding.THREADS: "25"}),
        (3333, (), {binding.THREADS: "33"}),
        (1, (), {binding.THREADS: "1"}),
        (10_000, (), {}),
        (0, (6 * GIB,), {binding.MEMORY: "0=6144M"}),
        (5000, (6 * GIB,), {binding.THREADS: "50", binding.MEMORY: "0=6144M"}),
        (10_000, (GIB, 0, 5), {binding.MEMORY: "0=1024M,2=1M"}),
    ],
)
def test_a_share_under_mps(
    parts: int, limits: tuple[int, ...], told: dict[str, str]
) -> None:
    assert binding.mps_variables(parts, limits, {}) == told
