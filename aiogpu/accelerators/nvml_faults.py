"""What NVML's numbers for faults mean: XIDs and recovery actions, in words.

Decides which errors make a GPU unfit and which only its program. Asks nobody.
"""

from __future__ import annotations

from typing import Final

APPLICATION: Final = frozenset({13, 31, 43, 45, 68, 109})
"""XIDs that a program brings upon itself; the GPU is well. They are those that
NVIDIA's device plugin for Kubernetes leaves out (internal/rm/health.go)."""

RECOVERY_CHANGED: Final = 154
"""The XID that only says that the recovery action has changed, also to none."""

_XIDS: Final = {
    46: "the GPU has stopped processing",
    48: "a double-bit ECC error",
    61: "a breakpoint or warning of the internal micro-controller",
    62: "the internal micro-controller has halted",
    63: "a memory page or row is to be replaced",
    64: "a memory page or row could not be replaced",
    74: "an error of NVLink",
    79: "the GPU has fallen off the bus",
    92: "a high rate of single-bit ECC errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "an error of the GPU's system processor",
    140: "an unrecovered memory error",
}
"""The best known, after NVIDIA's catalogue of XIDs."""

ACTION_FIELD: Final = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION; older bindings have no name for it."""

RESET: Final = "GPU reset"

_ACTIONS: Final = (
    "",
    RESET,
    "node reboot",
    "drain P2P",
    "drain and reset",
    "recover the IMEX domain",
    "bus reset",
    "system reboot",
)
"""By nvmlDeviceGpuRecoveryAction_t."""


def is_fault(xid: int, action: str | None) -> bool:
    """Whether an XID says that the GPU, and not a program, has failed.

    Args:
        xid: its number.
        action: the recovery action, None where NVML cannot tell; where it can, the
            XID that tells of its change adds nothing to it.
    """
    if xid == RECOVERY_CHANGED:
        return action is None
    return xid not in APPLICATION


def told_xid(xid: int) -> str:
    """An XID for people: "XID 79 (the GPU has fallen off the bus)"."""
    words = _XIDS.get(xid)
    return f"XID {xid} ({words})" if words else f"XID {xid}"


def told_action(action: int) -> str:
    """A recovery action for people, "" if nothing has to be done."""
    if 0 <= action < len(_ACTIONS):
        return _ACTIONS[action]
    return f"recovery action {action}"  # Not known here, but surely not none.
