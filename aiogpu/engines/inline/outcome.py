"""How an attempt at a task ended."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final, NamedTuple

from aiogpu.runtime.callers.caller import Carrying
from aiogpu.serialization.exceptions import pack_failure
from aiogpu.wire.messages import Done, Failed

if TYPE_CHECKING:
    from aiogpu.client.interface import Receiver

OWN_FRAMES: Final = "/aiogpu/engines/inline/"
"""Marks this package's own frames, which a user's traceback leaves out."""


class Outcome(NamedTuple):
    """What a worker would answer, and what it would not send.

    Attributes:
        answer: the pickled result or error.
        error: the exception itself, with its frames, None for a result.
        is_ctrl_c: whether it is the user at the keyboard who ended it.
        carried: keeps the actors alive whose handles are in the result.
        original: the error as it was raised, where `answer` tells more of it.
    """

    answer: Done | Failed
    error: BaseException | None = None
    is_ctrl_c: bool = False
    carried: list[object] | None = None
    original: Failed | None = None

    @classmethod
    def failed(
        cls, task: int, kind: str, error: BaseException, is_ctrl_c: bool
    ) -> Outcome:
        """The outcome of an attempt that raised; see `pack_failure`."""
        return cls(pack_failure(task, kind, error, OWN_FRAMES), error, is_ctrl_c)

    def show_frames(self, revived: Exception) -> None:
        """Give the exception that the task's owner sees the frames of this one.

        A debugger that looks at it after its end finds the task's own frames.
        """
        trace = self.error.__traceback__ if self.error is not None else None
        while trace is not None and OWN_FRAMES in trace.tb_frame.f_code.co_filename:
            trace = trace.tb_next
        BaseException.with_traceback(revived, trace)


def hold_for(carried: list[object] | None, receiver: Receiver | None) -> None:
    """Keep what is carried alive for as long as who gets the result."""
    while isinstance(receiver, Carrying):
        receiver = receiver.receiver
    if carried and receiver is not None:
        weakref.finalize(receiver, carried.clear).atexit = False
