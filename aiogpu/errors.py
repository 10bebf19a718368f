"""Every exception that aiogpu raises, in one tree; and its warning.

Each is an `AiogpuError` and also the builtin exception that it specialises, so that
`except ValueError` and `except TimeoutError` work as expected. A message says what was
asked, what there is and what to do. A user's exception is wrapped only if it cannot be
sent to another process. This module imports nothing.
"""

from __future__ import annotations


class AiogpuError(Exception):
    """Base of all errors that aiogpu itself raises."""


class MisuseError(AiogpuError, TypeError):
    """An object was used in a way that is not allowed.

    For example: a remote function was called directly, a handle was tested for truth,
    something other than a function or class was decorated.
    """


class OptionError(AiogpuError, ValueError):
    """An option of `init`, `@remote` or `.options` is unknown or has a wrong value."""


class InfeasibleError(AiogpuError, RuntimeError):
    """The request asks for more than this node has when it is idle."""


class LimitError(AiogpuError, RuntimeError):
    """This program has reached its limit of unfinished tasks on its node."""


class NoLoopError(AiogpuError, RuntimeError):
    """`.remote()` or `init()` was called where no event loop is running."""


class NodeError(AiogpuError, RuntimeError):
    """Base of the errors that concern a node as a whole."""


class NodeRunningError(NodeError):
    """`init` was called while this event loop already has a node."""


class NodeClosedError(NodeError):
    """The node was shut down before the work ended or was submitted."""


class NodeDiedError(NodeError, ConnectionError):
    """The node that this program has joined has ended, or cannot be reached."""


class NodeStartError(NodeError):
    """The node could not start its zygote, its socket or its directory."""


class PreloadError(NodeStartError, ImportError):
    """A module named in `init(preload=...)` could not be imported."""


class DeviceError(AiogpuError, ValueError):
    """`CUDA_VISIBLE_DEVICES` names a device that does not exist, or too few devices."""


class TaskError(AiogpuError, RuntimeError):
    """A task failed with an exception that cannot be raised in this process.

    Raised in place of an exception that cannot be pickled, and of an exception that
    would break the event loop: `StopIteration`, or one that is not an `Exception`.

    Attributes:
        type_name: qualified name of the exception's class in the worker.
        remote_traceback: text of the traceback in the worker.
    """

    def __init__(
        self, message: str, type_name: str = "", remote_traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.type_name = type_name
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self),), vars(self).copy()


class WorkerSetupError(AiogpuError, RuntimeError):
    """The `setup` of a function has raised in a worker, so that the task did not run.

    The traceback of the setup is part of the error's traceback.
    """


class DeadlockError(AiogpuError, RuntimeError):
    """The wait can never end: tasks that wait hold what the awaited task needs."""


class TaskCancelledError(AiogpuError, RuntimeError):
    """The task was stopped before its end, by `cancel()` or with its parent."""


class TaskTimeoutError(AiogpuError, TimeoutError):
    """A task's `timeout` or `run_timeout` passed before its result arrived."""


class WorkerDiedError(AiogpuError, RuntimeError):
    """The worker process ended while it ran the task.

    Attributes:
        pid: process id of the worker, 0 if it never started.
        exitcode: its exit code, None if a signal ended it.
        signal: number of the signal that ended it, None if it exited.
        last_output: the last lines of its output, oldest first.
        cause: the probable cause, one of "not started", "exit" (os._exit, or exit in
            native code), "segfault", "bus error", "arithmetic error", "illegal
            instruction", "abort", "out of memory", "killed" (SIGKILL from outside),
            "signal" (another signal), "keeper died" (the worker's parent process),
            "disconnected" (the worker closed its connection), "ended" (by aiogpu,
            because of another task) and "internal" (by aiogpu, after an internal
            error); "" if unknown.
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

    If another error is the reason, it is the `__cause__`: the constructor's exception,
    or a `WorkerDiedError`.

    Attributes:
        actor: name of the actor.
        is_restarting: the actor restarts in a new process; only this call is lost.
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
    """No actor has that name, or another actor has it already."""


class PlacementRemovedError(AiogpuError, RuntimeError):
    """The placement for the work was removed, or was never granted.

    For an actor this is the `__cause__` of its `ActorDiedError`.

    Attributes:
        placement: name of the placement.
    """

    def __init__(self, message: str, placement: str = "") -> None:
        super().__init__(message)
        self.placement = placement

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self),), vars(self).copy()


class QueueFullError(AiogpuError, RuntimeError):
    """A queue had no room for an item within the `timeout`.

    Attributes:
        count: number of items of a batch that were put before the time was up.
    """

    def __init__(self, message: str, count: int = 0) -> None:
        super().__init__(message)
        self.count = count

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self),), vars(self).copy()


class QueueEmptyError(AiogpuError, LookupError):
    """A queue had no item within the `timeout`."""


class QueueClosedError(AiogpuError, RuntimeError):
    """A queue was shut down: it accepts no items, and has none left."""


class NoSuchTaskError(AiogpuError, LookupError):
    """The node knows no task with that number, or has forgotten it."""


class StackError(AiogpuError, RuntimeError):
    """A task or an actor has no stack to show: it does not run, or does not answer."""


class OutOfMemoryError(WorkerDiedError, MemoryError):
    """The task was killed because host memory was about to run out.

    Attributes:
        asked: bytes that the task requested with `memory=`, 0 for none.
        used: bytes of anonymous and shared memory that its process and all descendants
            used when the task was killed.
        limit: bytes that all tasks together can use safely.
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
        # 9 is SIGKILL; this module does not import `signal`.
        super().__init__(message, pid, None, 9, last_output, "out of memory")
        self.asked = asked
        self.used = used
        self.limit = limit


class GpuOutOfMemoryError(AiogpuError, MemoryError):
    """The task ran out of device memory, or used more than it had requested.

    The framework's error, with its traceback, is the `__cause__`.

    Attributes:
        asked: bytes of each GPU requested with `gpu_memory=`; 0 for none, for "share",
            and in the retry on a whole GPU by `retry_oom`.
        limit: bytes of each GPU that the task could use, 0 for no limit.
        peak: the most bytes of one GPU that the task is known to have used, by
            PyTorch's peak, CuPy's pool, or NVML; 0 if unknown.
        devices: ids of its GPUs.
        neighbours: names of the tasks with a share of the same GPUs.
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
    """A value fits neither into the object memory nor into a spill directory."""


class SerializationError(AiogpuError, TypeError):
    """A function, an argument or a result cannot be pickled."""


class DeserializationError(AiogpuError, ValueError):
    """A pickled object cannot be unpickled in the receiving process."""


class InternalError(AiogpuError, AssertionError):
    """aiogpu is in a state that should be impossible; please report this."""


class AiogpuWarning(UserWarning):
    """Something works, but wastes time or memory; the text says what to do."""
