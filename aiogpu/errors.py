"""Every exception that aiogpu raises, in one tree; and its one warning.

Each is an `AiogpuError` and also the builtin that it specialises, so that
`except ValueError` and `except TimeoutError` keep meaning what a reader expects.
A message says whose fault it is, what was asked, what there is and what to do.
A user's own exception is never wrapped when it can travel as itself.

This file imports nothing.
"""

from __future__ import annotations


class AiogpuError(Exception):
    """Base of all errors that aiogpu itself raises."""


class MisuseError(AiogpuError, TypeError):
    """An object was used in a way that it does not allow.

    Calling a remote function directly, truth-testing a handle, decorating
    something that is not a function.
    """


class OptionError(AiogpuError, ValueError):
    """An option of `init`, `@remote` or `.options` is unknown or ill-valued."""


class InfeasibleError(AiogpuError, RuntimeError):
    """The request asks for more than this node has even when it is idle."""


class LimitError(AiogpuError, RuntimeError):
    """This program has as many unfinished tasks as its node lets it have."""


class NoLoopError(AiogpuError, RuntimeError):
    """`.remote()` or `init()` was called where no event loop is running."""


class NodeError(AiogpuError, RuntimeError):
    """Base of what goes wrong with a node as a whole."""


class NodeRunningError(NodeError):
    """`init` was called while this event loop already has a node."""


class NodeClosedError(NodeError):
    """The node was shut down before the work could end, or before it was asked."""


class NodeDiedError(NodeError, ConnectionError):
    """The node that this program had joined has ended, or cannot be reached."""


class NodeStartError(NodeError):
    """The node could not start its zygote, its socket or its directory."""


class PreloadError(NodeStartError, ImportError):
    """A module named in `init(preload=...)` could not be imported."""


class DeviceError(AiogpuError, ValueError):
    """`CUDA_VISIBLE_DEVICES` names a device that is not there, or too few."""


class TaskError(AiogpuError, RuntimeError):
    """A task failed with an exception that cannot travel as itself.

    Raised in place of exceptions that cannot be pickled and of those that would
    upset the driver's loop: `StopIteration` and all that is not an `Exception`.

    Attributes:
        type_name: qualified name of the exception's class in the worker.
        remote_traceback: the traceback's text as the worker saw it.
    """

    def __init__(
        self, message: str, type_name: str = "", remote_traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.type_name = type_name
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self),), vars(self).copy()


class DeadlockError(AiogpuError, RuntimeError):
    """A wait that could never end: those that wait hold what the awaited one needs."""


class TaskCancelledError(AiogpuError, RuntimeError):
    """The task was stopped before it could end, by `cancel()` or with its parent."""


class TaskTimeoutError(AiogpuError, TimeoutError):
    """A task's `timeout` passed before its result arrived."""


class WorkerDiedError(AiogpuError, RuntimeError):
    """The worker process ended while it ran the task.

    Attributes:
        pid: process id of the worker, 0 if it never started.
        exitcode: its exit code, None if a signal ended it.
        signal: number of the signal that ended it, None if it exited.
        last_output: the last lines that it wrote, oldest first.
        cause: the probable cause, one of "not started", "exit" (os._exit, or exit in
            native code), "segfault", "bus error", "arithmetic error", "illegal
            instruction", "abort", "out of memory", "killed" (SIGKILL from outside),
            "signal" (another one), "keeper died" (the process that kept the worker),
            "disconnected" (it had closed its connection), "ended" (by aiogpu, because
            of another task) and "internal" (by aiogpu, after an error of its own); ""
            where nobody has looked.
    """

    def __init__(
        self,
        message: str,
        pid: int = 0,
        exitcode: int | None = None,
        signal: int | None = None,
        last_output: tuple[str, ...] = (),
        cause: str = "",
    ) -> None:
        super().__init__(message)
        self.pid = pid
        self.exitcode = exitcode
        self.signal = signal
        self.last_output = last_output
        self.cause = cause

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self),), vars(self).copy()


class ActorDiedError(AiogpuError, RuntimeError):
    """The actor is dead, or its process died while it ran the call.

    Why is told by `__cause__` where another error stands behind it: that of the
    constructor, or a `WorkerDiedError`.

    Attributes:
        actor: name of the actor.
        is_restarting: another process takes its place; only this call is lost.
    """

    def __init__(
        self, message: str, actor: str = "", is_restarting: bool = False
    ) -> None:
        super().__init__(message)
        self.actor = actor
        self.is_restarting = is_restarting

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self),), vars(self).copy()


class ActorNameError(AiogpuError, ValueError):
    """No actor has that name, or another one has it already."""


class PlacementRemovedError(AiogpuError, RuntimeError):
    """The placement in which the work was to run was removed, or never granted.

    Of an actor it is the `__cause__` of its `ActorDiedError`.

    Attributes:
        placement: name of the placement.
    """

    def __init__(self, message: str, placement: str = "") -> None:
        super().__init__(message)
        self.placement = placement

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self),), vars(self).copy()


class NoSuchTaskError(AiogpuError, LookupError):
    """The node knows no task of that number, or knows it no more."""


class OutOfMemoryError(WorkerDiedError, MemoryError):
    """The task was ended because all together used more memory than is safe.

    Attributes:
        asked: bytes that the task had asked for by `memory=`, 0 for none.
        used: bytes that its process and all that it had started used when it was
            ended, as anonymous and shared memory.
        limit: bytes that could be used safely.
    """

    def __init__(
        self,
        message: str,
        *,
        pid: int = 0,
        last_output: tuple[str, ...] = (),
        asked: int = 0,
        used: int = 0,
        limit: int = 0,
    ) -> None:
        # SIGKILL, which this file has no import to name.
        super().__init__(message, pid, None, 9, last_output, "out of memory")
        self.asked = asked
        self.used = used
        self.limit = limit


class GpuOutOfMemoryError(AiogpuError, MemoryError):
    """The task ran out of device memory, or used more of it than it had asked for.

    The framework's own error is told by `__cause__`, with its traceback.

    Attributes:
        asked: bytes on each GPU by `gpu_memory=`; 0 for none, for "share", and in the
            second try by `retry_oom`.
        limit: bytes that it could use on each, 0 where it was not limited.
        peak: the most bytes that it is known to have used of one GPU: PyTorch's peak,
            CuPy's pool, or what NVML has shown; else 0.
        devices: ids of its GPUs.
        neighbours: names of the tasks that had a share of these GPUs as well.
    """

    def __init__(
        self,
        message: str,
        *,
        asked: int = 0,
        limit: int = 0,
        peak: int = 0,
        devices: tuple[int | str, ...] = (),
        neighbours: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.asked = asked
        self.limit = limit
        self.peak = peak
        self.devices = devices
        self.neighbours = neighbours

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self),), vars(self).copy()


class ObjectMemoryError(AiogpuError, MemoryError):
    """A value has no room: neither in the object memory nor in a spill directory."""


class SerializationError(AiogpuError, TypeError):
    """A function, an argument or a result cannot be pickled."""


class DeserializationError(AiogpuError, ValueError):
    """A pickled object cannot be unpickled in the receiving process."""


class ProtocolError(AiogpuError, ConnectionError):
    """The peer sent bytes that are no message, or a message out of turn."""


class InternalError(AiogpuError, AssertionError):
    """aiogpu found itself in a state that it rules out; please report it."""


class AiogpuWarning(UserWarning):
    """Something works, but wastes time or memory; the text says what to do."""


class RemoteTraceback(Exception):  # noqa: N818 - a cause that carries text, not an error
    """Carries the worker's traceback as the `__cause__` of a task's exception."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'
