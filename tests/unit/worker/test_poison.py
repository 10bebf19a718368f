"""Which errors mean that a process can use its GPU no more."""

from __future__ import annotations

import pytest

from aiogpu.worker.gpu import MOST_CAUSES, explain_poisoned, poisoned_by


class CUDARuntimeError(RuntimeError):
    """As CuPy's is called."""


class Mute(Exception):
    """Says nothing."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (
            RuntimeError(
                "CUDA error: an illegal memory access was encountered\n"
                "CUDA kernel errors might be asynchronously reported at some other "
                "API call, so the stacktrace below might be incorrect."
            ),
            "cudaErrorIllegalAddress",
        ),
        (
            RuntimeError("CUDA error: device-side assert triggered"),
            "cudaErrorAssert",
        ),
        (
            RuntimeError("CUDA error: unspecified launch failure"),
            "cudaErrorLaunchFailure",
        ),
        (
            CUDARuntimeError(
                "cudaErrorIllegalAddress: an illegal memory access was encountered"
            ),
            "cudaErrorIllegalAddress",
        ),
        (
            RuntimeError("[700] Call to cuMemcpyDtoH: CUDA_ERROR_ILLEGAL_ADDRESS"),
            "cudaErrorIllegalAddress",
        ),
        (
            RuntimeError("INTERNAL: CUDA error: CUDA_ERROR_LAUNCH_FAILED"),
            "cudaErrorLaunchFailure",
        ),
        (
            RuntimeError("CUDA error: uncorrectable ECC error encountered"),
            "cudaErrorECCUncorrectable",
        ),
        (RuntimeError("CUDA error: misaligned address"), "cudaErrorMisalignedAddress"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), None),
        (RuntimeError("CUDA error: out of memory"), None),
        (RuntimeError("CUDA error: invalid argument"), None),
        (RuntimeError("CUDA error: no kernel image is available"), None),
        (RuntimeError("an illegal memory access was encountered"), None),
        (ValueError("misaligned address"), None),
        (Mute(), None),
    ],
)
def test_what_sticks_and_what_does_not(error: Exception, name: str | None) -> None:
    assert poisoned_by(error) == name


def test_causes_are_looked_at() -> None:
    deep = RuntimeError("CUDA error: device-side assert triggered")
    try:
        try:
            raise deep
        except RuntimeError as error:
            raise ValueError("the step failed") from error
    except ValueError as error:
        raised = error
    assert poisoned_by(raised) == "cudaErrorAssert"
    circle = ValueError("a")
    circle.__context__ = raised
    deep.__cause__ = circle
    assert poisoned_by(circle) == "cudaErrorAssert"


def test_a_long_chain_is_looked_at_in_part() -> None:
    error: Exception = RuntimeError("CUDA error: device-side assert triggered")
    for number in range(MOST_CAUSES):
        outer = ValueError(number)
        outer.__cause__, error = error, outer
    assert poisoned_by(error) is None


def test_it_is_said_what_was_done() -> None:
    error = RuntimeError("CUDA error")
    explain_poisoned(error, "cudaErrorAssert", 4711)
    (note,) = error.__notes__
    assert "pid 4711" in note
    assert "cudaErrorAssert" in note


def test_an_exception_that_takes_no_notes_is_left_as_it_is() -> None:
    class Stubborn(Exception):
        def add_note(self, note: str, /) -> None:
            raise TypeError(note)

    explain_poisoned(Stubborn(), "cudaErrorAssert", 1)
