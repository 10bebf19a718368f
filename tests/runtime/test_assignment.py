"""From a lease to a worker's environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiogpu.core.devices import Device, DeviceSet
from aiogpu.core.ledger import Ledger
from aiogpu.core.resources import UNIT, Request
from aiogpu.runtime.assignment import Assignment
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
