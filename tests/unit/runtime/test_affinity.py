"""Which CPUs are near which devices, against made-up /sys and /proc trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiogpu.core.model.request import Device
from aiogpu.runtime.devices.binding import Affinity

FIRST = Device(0, pci="00000000:3B:00.0")
SECOND = Device(1, pci="0001:af:00.0")


class Machine:
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
def machine(tmp_path: Path, cpus: set[int]) -> Machine:
    return Machine(tmp_path)


def test_cpus_near_the_devices(machine: Machine) -> None:
    assert machine.near(0) == (0, 1, 2, 4)
    assert machine.near(1) == (4, 5, 6, 7)
    assert machine.near(0, 1) == (0, 1, 2, 4, 5, 6, 7)


def test_all_of_them_are_no_choice(machine: Machine) -> None:
    machine.has("sys/bus/pci/devices/0001:af:00.0/local_cpulist", "3,5-7\n")
    assert machine.near(0, 1) == ()


@pytest.mark.parametrize("text", ["", "\n", "three", "1-x", "é"])
def test_what_the_kernel_does_not_say_pins_nobody(machine: Machine, text: str) -> None:
    machine.has("sys/bus/pci/devices/0000:3b:00.0/local_cpulist", text)
    assert machine.near(0) == machine.near(0, 1) == ()
    assert machine.near(1) == (4, 5, 6, 7)


def test_devices_that_are_not_on_a_bus(machine: Machine) -> None:
    assert machine.near(0, devices=(Device(0),)) == ()
    assert machine.near(0, devices=(Device(0), FIRST)) == ()
    assert machine.near(1, devices=(Device(0), FIRST)) == (0, 1, 2, 4)
    assert Affinity((), machine.root).near([0]) == ()


def test_none_that_may_be_used(machine: Machine, cpus: set[int]) -> None:
    cpus -= {4, 5, 6, 7}
    machine.has("sys/devices/system/cpu/online", "0-3\n")
    assert machine.near(1) == ()
    assert machine.near(0) == (0, 1, 2)


def test_who_has_pinned_this_process_has_chosen(
    machine: Machine, cpus: set[int]
) -> None:
    cpus -= {0}
    assert machine.near(0) == ()


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/user/me", "user/cpuset.cpus.effective"),
        ("4:cpuset:/me", "cpuset/me/cpuset.effective_cpus"),
        ("4:cpuset:/me", "cpuset/cpuset.cpus"),
    ],
)
def test_a_cpuset_is_not_a_choice_of_the_users(
    machine: Machine, cpus: set[int], line: str, file: str
) -> None:
    cpus -= {0, 1, 5, 6, 7}
    groups = machine.root / "sys/fs/cgroup"
    machine.has("proc/self/cgroup", f"9:other:/\n{line}\n")
    machine.has(
        "proc/self/mountinfo",
        f"1 2 0:1 / {groups} rw - cgroup2 x rw\n"
        f"1 2 0:1 / {groups}/cpuset rw - cgroup x rw,cpuset\n",
    )
    assert machine.near(0) == ()
    machine.has(f"sys/fs/cgroup/{file}", "2-4\n")
    assert machine.near(0) == (2, 4)
    cpus -= {3}
    assert machine.near(0) == (), "fewer than the cpuset has"


def test_this_machine_can_be_asked() -> None:
    assert Affinity([FIRST]).near([0]) == ()
