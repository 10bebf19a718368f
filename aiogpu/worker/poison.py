"""Errors after which a process can use its GPU no more.

Some CUDA errors stick: every later call in the process fails likewise, until it
ends. Which they are, NVIDIA says in the descriptions of `cudaError_t` ("the process
must be terminated and relaunched", CUDA Runtime API). They reach Python as texts of
many exception classes; running out of memory is not among them.
"""

from __future__ import annotations

from typing import Final

MOST_CAUSES: Final = 16
"""Exceptions of one chain that are looked at."""
STICKY: Final = {
    "illegal memory access": "cudaErrorIllegalAddress",
    "illegaladdress": "cudaErrorIllegalAddress",
    "illegal_address": "cudaErrorIllegalAddress",
    "device-side assert": "cudaErrorAssert",
    "cudaerrorassert": "cudaErrorAssert",
    "cuda_error_assert": "cudaErrorAssert",
    "unspecified launch failure": "cudaErrorLaunchFailure",
    "launchfailure": "cudaErrorLaunchFailure",
    "cuda_error_launch_failed": "cudaErrorLaunchFailure",
    "launch timed out": "cudaErrorLaunchTimeout",
    "launchtimeout": "cudaErrorLaunchTimeout",
    "launch_timeout": "cudaErrorLaunchTimeout",
    "misaligned address": "cudaErrorMisalignedAddress",
    "misalignedaddress": "cudaErrorMisalignedAddress",
    "misaligned_address": "cudaErrorMisalignedAddress",
    "illegal instruction": "cudaErrorIllegalInstruction",
    "illegalinstruction": "cudaErrorIllegalInstruction",
    "illegal_instruction": "cudaErrorIllegalInstruction",
    "invalid program counter": "cudaErrorInvalidPc",
    "invalidpc": "cudaErrorInvalidPc",
    "invalid_pc": "cudaErrorInvalidPc",
    "operation not supported on global/shared address space": (
        "cudaErrorInvalidAddressSpace"
    ),
    "invalidaddressspace": "cudaErrorInvalidAddressSpace",
    "invalid_address_space": "cudaErrorInvalidAddressSpace",
    "hardware stack error": "cudaErrorHardwareStackError",
    "hardwarestackerror": "cudaErrorHardwareStackError",
    "hardware_stack_error": "cudaErrorHardwareStackError",
    "uncorrectable ecc error": "cudaErrorECCUncorrectable",
    "eccuncorrectable": "cudaErrorECCUncorrectable",
    "ecc_uncorrectable": "cudaErrorECCUncorrectable",
    "uncorrectable nvlink error": "cudaErrorNvlinkUncorrectable",
    "nvlinkuncorrectable": "cudaErrorNvlinkUncorrectable",
    "nvlink_uncorrectable": "cudaErrorNvlinkUncorrectable",
}
"""What texts say, in small letters, of the error that is meant. The first words are
`cudaGetErrorString`'s, as PyTorch shows them; the others CuPy's, Numba's and XLA's."""


def poisoned_by(error: BaseException) -> str | None:
    """The name of the sticky CUDA error that an exception tells of, None for none.

    Its causes are looked at too, and what it was raised during.
    """
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen and len(seen) < MOST_CAUSES:
        seen.append(following)
        following = following.__cause__ or following.__context__
    for one in seen:
        found = _name_in(_text_of(one))
        if found is not None:
            return found
    return None


def _name_in(text: str) -> str | None:
    if "cuda" not in text:
        return None
    for words, name in STICKY.items():
        if words in text:
            return name
    return None


def _text_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__} {error}".lower()
    except Exception:  # noqa: BLE001 - its own __str__ may raise anything
        return ""


def tell(error: BaseException, name: str, pid: int) -> None:
    """Add to an exception what was done about it."""
    try:
        error.add_note(
            f"aiogpu ended the worker process (pid {pid}): after {name} it could not "
            f"have used its GPU any more. Other tasks are not affected."
        )
    except Exception:  # noqa: BLE001 - a class of the user's may refuse attributes
        return
