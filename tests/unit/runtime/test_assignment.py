"""From a lease to a worker's environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from aiogpu.core.model.ids import LeaseId
from aiogpu.core.model.request import Device, Request
from aiogpu.core.model.units import BY_SHARE, UNIT
from aiogpu.core.resources.devices import DeviceSet
from aiogpu.core.resources.ledger import Lease, Ledger
from aiogpu.runtime.devices import binding as affinity
from aiogpu.runtime.devices import binding as mps
from aiogpu.runtime.devices.binding import Assignment, variables_of
from aiogpu.wire.messages import Bind


@dataclass
class PaperVendor:
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


def node(
    **environ: str,
) -> tuple[Assignment, Ledger, PaperVendor, PaperVendor]:
    ledger = Ledger(
        {"CPU": 8 * UNIT},
        [
            DeviceSet("GPU", [Device(4), Device("GPU-abc")]),
            DeviceSet("TPU", [Device(0)]),
        ],
    )
    gpus, tpus = PaperVendor("GPU", "GPUS"), PaperVendor("TPU", "TPUS")
    return Assignment([gpus, tpus], ledger, environ), ledger, gpus, tpus  # type: ignore[list-item]


def bind(
    assignment: Assignment, ledger: Ledger, amounts: dict[str, int], **environ: str
) -> Bind:
    lease = ledger.take(Request.of({"CPU": UNIT}, amounts))
    assert lease is not None
    return assignment.bind(lease, environ)


def test_devices_are_named_by_their_ids() -> None:
    assignment, ledger, _, _ = node()
    told = bind(assignment, ledger, {"GPU": 2 * UNIT})
    assert told == Bind(
        {"GPUS": "4,GPU-abc", "TPUS": ""}, {"GPU": (4, "GPU-abc"), "TPU": ()}
    )


def test_several_kinds_at_once() -> None:
    assignment, ledger, _, _ = node()
    told = bind(assignment, ledger, {"GPU": UNIT // 2, "TPU": UNIT})
    assert told.environ == {"GPUS": "4", "TPUS": "0"}
    assert told.accelerators == {"GPU": (4,), "TPU": (0,)}


def test_without_devices_all_are_hidden() -> None:
    assignment, ledger, _, _ = node()
    told = bind(assignment, ledger, {})
    assert told == Bind({"GPUS": "", "TPUS": ""}, {"GPU": (), "TPU": ()})


def test_the_tasks_own_variables_come_along_and_are_seen() -> None:
    assignment, ledger, gpus, _ = node(A="node's", B="node's")
    told = bind(assignment, ledger, {}, A="task's", C="task's")
    assert told.environ == {"A": "task's", "C": "task's", "GPUS": "", "TPUS": ""}
    assert gpus.seen == {"A": "task's", "B": "node's", "C": "task's"}


def test_the_assignment_wins_unless_it_is_switched_off() -> None:
    assignment, ledger, _, _ = node()
    assert bind(assignment, ledger, {}, GPUS="0").environ["GPUS"] == ""
    kept = bind(assignment, ledger, {}, GPUS="0", NOSET="1")
    assert kept.environ == {"GPUS": "0", "NOSET": "1"}


def test_later_changes_of_the_environment_are_not_seen() -> None:
    environ = {"A": "1"}
    vendor = PaperVendor("GPU", "GPUS")
    ledger = Ledger({}, [DeviceSet("GPU", [Device(0)])])
    assignment = Assignment([vendor], ledger, environ)  # type: ignore[list-item]
    environ["A"] = "2"
    lease = ledger.take(Request.of({}, {}))
    assert lease is not None
    assignment.bind(lease, {})
    assert vendor.seen == {"A": "1"}


GIB = 1 << 30
GPUS = [
    Device(0, memory=80 * GIB, uuid="GPU-a", pci="00000000:3B:00.0"),
    Device(1, memory=40 * GIB, uuid="GPU-b", pci="00000000:AF:00.0"),
    Device(2),
]


def told(
    *indices: int,
    share: int = UNIT,
    cpus: int = 1,
    gpu_memory: int = 0,
    options: Mapping[str, str] | None = None,
    **environ: str,
) -> Bind:
    """What a worker is told that has these devices."""
    ledger = Ledger({}, [DeviceSet("GPU", GPUS)])
    vendor = PaperVendor("GPU", "GPUS")
    assignment = Assignment([vendor], ledger, {}, **(options or {}))  # type: ignore[list-item]
    request = Request.of(
        {"CPU": cpus * UNIT}, {"GPU": share * len(indices)}, gpu_memory=gpu_memory
    )
    shares = (tuple((index, share) for index in indices),)
    return assignment.bind(Lease(LeaseId(1), request, shares, Ledger({})), environ)


def test_whole_devices_are_not_limited() -> None:
    assert told(0, 1) == Bind({"GPUS": "0,1"}, {"GPU": (0, 1)})
    assert told(0, share=2500) == Bind({"GPUS": "0"}, {"GPU": (0,)})


def test_limits_and_the_variables_that_tell_them() -> None:
    assert told(0, share=2500, gpu_memory=BY_SHARE) == Bind(
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
    both = told(0, 1, gpu_memory=6 * GIB)
    assert both.gpu_memory == (6 * GIB, 6 * GIB)
    assert both.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.075", "of the smallest"
    unknown = told(0, 2, gpu_memory=6 * GIB)
    assert unknown.gpu_memory == (6 * GIB, 6 * GIB)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in unknown.environ
    assert unknown.environ["CUPY_GPU_MEMORY_LIMIT"] == str(6 * GIB)
    alone = told(1, share=0, gpu_memory=10 * GIB)
    assert (alone.gpu_memory, alone.accelerators) == ((10 * GIB,), {"GPU": (1,)})


@pytest.mark.parametrize(
    ("limit", "capacity", "fraction"),
    [
        (1, 3, "0.3333"),
        (2, 3, "0.6666"),
        (3, 3, "1"),
        (9, 3, "1"),
        (1, 10**9, "0.0001"),
        (1, 8, "0.125"),
    ],
)
def test_the_fraction_of_jax(limit: int, capacity: int, fraction: str) -> None:
    found = variables_of([limit], [capacity], {})
    assert found["XLA_PYTHON_CLIENT_MEM_FRACTION"] == fraction


def test_what_the_user_has_set_stays() -> None:
    wanted = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
        "CUPY_GPU_MEMORY_LIMIT": "50%",
        "TF_FORCE_GPU_ALLOW_GROWTH": "false",
        "XLA_CLIENT_MEM_FRACTION": ".9",
    }
    found = told(0, gpu_memory=GIB, **wanted)  # type: ignore[arg-type]
    assert found.environ == {**wanted, "GPUS": "0"}
    assert variables_of([1], [2], {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".1"}).keys() == {
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "CUPY_GPU_MEMORY_LIMIT",
        "TF_FORCE_GPU_ALLOW_GROWTH",
    }
    assert variables_of([], [], {}) == variables_of([0], [1], {}) == {}


def test_cpus_near_the_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, cpus in (("0000:3b:00.0", "0-1"), ("0000:af:00.0", "2-3")):
        (tmp_path / "sys/bus/pci/devices" / name).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / name / "local_cpulist").write_text(cpus)
    monkeypatch.setattr(affinity, "ROOT", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(4)))
    on = {"cpu_affinity": "auto"}
    assert told(1, options=on).cpus == told(1, cpus=2, options=on).cpus == (2, 3)
    assert told(1, cpus=3, options=on).cpus == (), "it asks for more than are near"
    assert told(0, 1, options=on).cpus == told(2, options=on).cpus == ()
    assert told(1).cpus == told(1, options={"cpu_affinity": "off"}).cpus == ()


def test_shares_by_mps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    on = {"mps": "auto"}
    caplog.set_level("INFO")
    # The node's environment counts, and not the task's.
    assert told(0, share=2500, options=on).environ == {"GPUS": "0"}
    assert [record.levelname for record in caplog.records] == ["INFO"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mps, "runs", lambda _environ: True)
        assert told(0, share=2500, options=on).environ == {
            "GPUS": "GPU-a",
            mps.THREADS: "25",
        }
        limited = told(1, share=5000, gpu_memory=GIB, options=on)
        assert limited.environ[mps.MEMORY] == "0=1024M"
        assert limited.accelerators == {"GPU": (1,)}, "tasks see the ids as ever"
        assert told(1, 2, options=on).environ == {"GPUS": "GPU-b,2"}
        assert told(0, share=2500).environ == {"GPUS": "0"}, "off unless wanted"
