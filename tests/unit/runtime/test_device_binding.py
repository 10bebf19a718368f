"""The environment, the CPUs and the memory limits that a lease gives a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from aiogpu.core.model.request import Device
from aiogpu.core.model.units import BY_SHARE, UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Ledger
from aiogpu.runtime.devices import binding
from aiogpu.runtime.devices.binding import Affinity, Assignment, variables_of
from aiogpu.wire.messages import Bind
from tests.support.program import run
from tests.unit.runtime.fakes import lease_of

FIRST = Device(0, pci="00000000:3B:00.0")
SECOND = Device(1, pci="0001:af:00.0")


class CpuTree:
    """A directory that describes a machine with eight CPUs and two GPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("sys/devices/system/cpu/online", "0-7\n")
        self.write("sys/bus/pci/devices/0000:3b:00.0/local_cpulist", "0-2,4\n")
        self.write("sys/bus/pci/devices/0001:af:00.0/local_cpulist", "4-7\n")

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def near(self, *indices: int) -> tuple[int, ...]:
        return Affinity((FIRST, SECOND), self.root).near(indices)


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The CPUs that this process may use."""
    usable = set(range(8))
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: usable)
    return usable


@pytest.fixture
def cpu_tree(tmp_path: Path, cpus: set[int]) -> CpuTree:
    return CpuTree(tmp_path)


@pytest.mark.parametrize("text", ["", "\n", "three", "1-x", "é"])
def test_unreadable_cpu_list_pins_no_worker(cpu_tree: CpuTree, text: str) -> None:
    cpu_tree.write("sys/bus/pci/devices/0000:3b:00.0/local_cpulist", text)
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
def test_cpuset_does_not_count_as_a_choice_of_the_user(
    cpu_tree: CpuTree, cpus: set[int], line: str, file: str
) -> None:
    cpus -= {0, 1, 5, 6, 7}
    groups = cpu_tree.root / "sys/fs/cgroup"
    cpu_tree.write("proc/self/cgroup", f"9:other:/\n{line}\n")
    cpu_tree.write(
        "proc/self/mountinfo",
        f"1 2 0:1 / {groups} rw - cgroup2 x rw\n"
        f"1 2 0:1 / {groups}/cpuset rw - cgroup x rw,cpuset\n",
    )
    assert cpu_tree.near(0) == ()
    cpu_tree.write(f"sys/fs/cgroup/{file}", "2-4\n")
    assert cpu_tree.near(0) == (2, 4)
    cpus -= {3}
    assert cpu_tree.near(0) == (), "the user allows fewer CPUs than the cpuset"


class FakeVendor:
    """A vendor that assigns GPUs by one variable."""

    kind = "GPU"

    def assignment(
        self, ids: Sequence[int | str], environ: Mapping[str, str]
    ) -> dict[str, str]:
        return {"GPUS": ",".join(map(str, ids))}


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
    """The message that binds a worker to these devices."""
    ledger = Ledger({}, [DeviceSet("GPU", GPUS)])
    assignment = Assignment([FakeVendor()], ledger, {}, **(options or {}))  # type: ignore[list-item]
    lease = lease_of(*indices, share=share, cpus=cpus, gpu_memory=gpu_memory)
    return assignment.bind(lease, environ)


def test_memory_limits_become_variables_of_the_frameworks() -> None:
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
    assert both.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.075", "smallest GPU"
    unknown = bound(0, 2, gpu_memory=6 * GIB)
    assert unknown.gpu_memory == (6 * GIB, 6 * GIB)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in unknown.environ
    assert unknown.environ["CUPY_GPU_MEMORY_LIMIT"] == str(6 * GIB)
    alone = bound(1, share=0, gpu_memory=10 * GIB)
    assert (alone.gpu_memory, alone.accelerators) == ((10 * GIB,), {"GPU": (1,)})


def test_limits_set_by_the_user_are_kept() -> None:
    wanted = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "CUPY_GPU_MEMORY_LIMIT": "50%",
        "TF_FORCE_GPU_ALLOW_GROWTH": "false",
        "XLA_CLIENT_MEM_FRACTION": ".9",
    }
    environ = bound(0, gpu_memory=GIB, **wanted).environ  # type: ignore[arg-type]
    assert environ == {**wanted, "GPUS": "0"}
    assert variables_of([1], [2], {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".1"}).keys() == {
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "CUPY_GPU_MEMORY_LIMIT",
        "TF_FORCE_GPU_ALLOW_GROWTH",
    }
    assert variables_of([], [], {}) == variables_of([0], [1], {}) == {}


def test_workers_that_need_no_more_than_the_local_cpus_are_pinned(
    cpu_tree: CpuTree, cpus: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus -= {4, 5, 6, 7}
    cpu_tree.write("sys/devices/system/cpu/online", "0-3")
    cpu_tree.write("sys/bus/pci/devices/0000:3b:00.0/local_cpulist", "0-1")
    cpu_tree.write("sys/bus/pci/devices/0000:af:00.0/local_cpulist", "2-3")
    monkeypatch.setattr(binding, "ROOT", cpu_tree.root)
    on = {"cpu_affinity": "auto"}
    assert bound(1, options=on).cpus == bound(1, cpus=2, options=on).cpus == (2, 3)
    assert bound(1, cpus=3, options=on).cpus == (), "only two CPUs are local"
    assert bound(0, 1, options=on).cpus == bound(2, options=on).cpus == ()
    assert bound(1).cpus == bound(1, options={"cpu_affinity": "off"}).cpus == ()


def test_mps_gives_workers_a_share_of_threads_and_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on = {"mps": "auto"}
    caplog.set_level("INFO")
    # The environment of the node counts, not the environment of the task.
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
        assert limited.accelerators == {"GPU": (1,)}, "tasks see the usual ids"
        assert bound(1, 2, options=on).environ == {"GPUS": "GPU-b,2"}
        assert bound(0, share=2500).environ == {"GPUS": "0"}, "MPS is off by default"


PID = "nvidia-cuda-mps-control.pid"


def runs_in(directory: Path) -> bool:
    return binding.runs({binding.PIPES: str(directory)})


def test_mps_of_another_user_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int, _signal: int) -> None:
        raise PermissionError

    (tmp_path / PID).write_text("1")
    monkeypatch.setattr("os.kill", refuse)
    assert runs_in(tmp_path)


@pytest.mark.parametrize("text", ["", "0", "-1", str(1 << 22), "9" * 30, "é"])
def test_mps_is_not_found_after_its_process_ended(tmp_path: Path, text: str) -> None:
    (tmp_path / PID).write_text(text)
    assert not runs_in(tmp_path)
    os.mkfifo(tmp_path / "control")
    assert runs_in(tmp_path), "a container sees no process ids of the host"


def test_a_pidfile_that_is_a_pipe_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / PID)
    # In a process of its own, which can be ended if the open waits.
    program = f"""
    from pathlib import Path
    from tests.unit.runtime.test_device_binding import runs_in
    print(runs_in(Path({str(tmp_path)!r})))
    """
    assert run(program) == "False\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a second user")
def test_mps_files_of_plain_users_are_not_used(tmp_path: Path) -> None:
    (tmp_path / PID).write_text(str(os.getpid()))
    assert runs_in(tmp_path)
    os.chown(tmp_path / PID, 54321, 54321)
    assert not runs_in(tmp_path)
    os.mkfifo(tmp_path / "control")
    os.chown(tmp_path / "control", 54321, 54321)
    assert not runs_in(tmp_path)
    os.chown(tmp_path / "control", 0, 0)
    assert runs_in(tmp_path)


def test_an_mps_pidfile_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "other").write_text(str(os.getpid()))
    (tmp_path / PID).symlink_to("other")
    assert not runs_in(tmp_path)


@pytest.mark.parametrize(
    ("share", "limits", "variables"),
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
def test_mps_variables_follow_from_share_and_memory_limits(
    share: int, limits: tuple[int, ...], variables: dict[str, str]
) -> None:
    assert binding.mps_variables(share, limits, {}) == variables
