"""What NVML's numbers for faults mean, and whom an event concerns: pure rules."""

import pytest

from aiogpu.accelerators.nvml.health import (
    WHOLE,
    Xid,
    action_in_words,
    is_fault,
    xid_in_words,
)


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 68, 109])
def test_what_a_program_brings_upon_itself_is_no_fault(xid: int) -> None:
    assert not is_fault(xid, None)
    assert not is_fault(xid, "GPU reset")


@pytest.mark.parametrize("xid", [1, 48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 999])
@pytest.mark.parametrize("action", [None, "", "GPU reset"])
def test_all_else_is_a_fault(xid: int, action: str | None) -> None:
    assert is_fault(xid, action)


def test_the_xid_of_an_action_adds_nothing_where_the_action_is_known() -> None:
    assert [is_fault(154, action) for action in (None, "", "GPU reset")] == [
        True,
        False,
        False,
    ]


def test_xids_are_told_in_words() -> None:
    assert xid_in_words(79) == "XID 79 (the GPU has fallen off the bus)"
    assert xid_in_words(48) == "XID 48 (a double-bit ECC error)"
    assert xid_in_words(1000) == "XID 1000"


def test_recovery_actions_are_told_in_words() -> None:
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
def test_whom_an_event_concerns(
    xid: Xid, place: tuple[int, int] | None, concerned: bool
) -> None:
    assert xid.concerns("GPU-a", place) == concerned
