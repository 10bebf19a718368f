"""The vocabulary: one small tuple per message, one table of tags.

A message on the wire is a msgpack array, its tag first; see `wire.fields`. Ids are
plain integers here.
"""

from typing import Final, NamedTuple, get_args

from aiogpu.wire.acting import Acting
from aiogpu.wire.forking import (
    Check,
    Keep,
    LeftOut,
    Lost,
    Ready,
    Stale,
    Unfit,
    Unforked,
)
from aiogpu.wire.joining import Joining, Refused
from aiogpu.wire.printing import Log, Printed, Warned
from aiogpu.wire.sharing import Sharing, Sync, Synced
from aiogpu.wire.shortage import RanOut
from aiogpu.wire.streaming import Streaming

VERSION: Final = 10
"""Of the protocol; the greeting carries it and both ends must agree."""


class Hello(NamedTuple):
    """First message on every connection, from the one that connects.

    `id` is the slot of a keeper, the id of a worker or a client, the generation of a
    zygote.
    """

    version: int
    role: str
    id: int
    pid: int


class Close(NamedTuple):
    """Driver to zygote or keeper: end, with all that you have started."""


class Fork(NamedTuple):
    """Driver to keeper: fork a worker of that id."""

    worker: int


class Signal(NamedTuple):
    """Driver to keeper: interrupt this worker's task, as the control page says."""

    worker: int


class End(NamedTuple):
    """Driver to keeper: kill this worker and all that it has started."""

    worker: int


class Forked(NamedTuple):
    """Keeper to driver: the worker exists."""

    worker: int
    pid: int


class Ended(NamedTuple):
    """Keeper to driver: the worker and all that it had started have ended.

    `status` is the worker's wait status, as `os.waitpid` gives it.
    """

    worker: int
    status: int


class Bind(NamedTuple):
    """Driver to worker: your environment and devices, for life.

    `environ`: all variables that are to be set. `accelerators`: device ids by
    kind, as integers or strings. `gpu_memory`: bytes that it may use of each of its
    GPUs, in their order, 0 where no limit is set; empty without any. `cpus`: those to
    which it is pinned, empty for no pinning.
    """

    environ: dict[str, str]
    accelerators: dict[str, tuple[int | str, ...]]
    gpu_memory: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()


class Define(NamedTuple):
    """Driver to worker: what calls of this site run.

    `site` stands for a function with its options, `function` for the function
    alone. `payload` is empty when the function was sent before. `retried`: see there.
    """

    site: int
    function: int
    name: str
    resources: dict[str, float]
    payload: bytes
    retried: bytes = b""


class Forget(NamedTuple):
    """Driver to worker: drop all sites and functions."""


class Run(NamedTuple):
    """Driver to worker: run a site with these arguments; `is_last`: then end.

    `number` counts what is sent to workers; by it they tell what they have begun.
    Where a generator runs, `limit` is as in `Demand`, and its first `skip` items are
    not sent, since they came from an attempt before; else both are 0.
    """

    task: int
    site: int
    payload: bytes
    is_last: bool
    number: int = 0
    limit: int = 0
    skip: int = 0


class Cancel(NamedTuple):
    """Driver to worker: cancel this task if it is a running coroutine."""

    task: int


class Exit(NamedTuple):
    """Driver to worker: end in an orderly way."""


class Done(NamedTuple):
    """Worker to driver: the task's pickled result; it `took` so many microseconds."""

    task: int
    payload: bytes
    took: int = 0


class Failed(NamedTuple):
    """Worker to driver: the task has no result; see `wire.failure`.

    `is_retried`: its options want it tried again after that.
    """

    task: int
    kind: str
    type_name: str
    message: str
    traceback: str
    payload: bytes | None
    is_retried: bool = False

    @property
    def why(self) -> tuple[str, str, str, str, bytes | None]:
        """What others are told of it: `kind` to `payload`."""
        return self[1:6]


class Skipped(NamedTuple):
    """Worker to driver: the task was revoked in the moment that it came up."""

    task: int
    number: int


class Spoilt(NamedTuple):
    """Worker to driver: I end after the answer that follows, unfit for another task."""

    task: int


class Declare(NamedTuple):
    """Worker to driver: what the children of this site are; see `Define`.

    `terms` is what its function asks for, as plain values.
    """

    site: int
    name: str
    terms: bytes
    payload: bytes


class Submit(NamedTuple):
    """Worker to driver: start a task for the one that runs.

    `child` is the worker's own number for it.
    """

    task: int
    child: int
    site: int
    payload: bytes


class Wait(NamedTuple):
    """Worker to driver: the task waits until these children have ended, or goes on.

    For the first `bound` of them its main thread waits: in plain code, with no time
    limit, and it does nothing else before all have ended or one has failed.
    """

    task: int
    children: tuple[int, ...]
    bound: int = 0


class Withdraw(NamedTuple):
    """Worker to driver: nobody wants this child's result any more."""

    task: int
    child: int


class ChildDone(NamedTuple):
    """Driver to worker: the child's pickled result."""

    child: int
    payload: bytes


class ChildFailed(NamedTuple):
    """Driver to worker: the child has no result; see `Failed`."""

    child: int
    kind: str
    type_name: str
    message: str
    traceback: str
    payload: bytes | None


class Imported(NamedTuple):
    """Worker to driver: what it has imported since it said so last, and the cost."""

    names: tuple[str, ...]
    microseconds: tuple[int, ...]


Message = (
    Hello
    | Refused
    | Keep
    | Ready
    | Unfit
    | Lost
    | Close
    | Fork
    | Signal
    | End
    | Forked
    | Ended
    | Bind
    | Define
    | Forget
    | Run
    | Cancel
    | Exit
    | Done
    | Failed
    | Log
    | Skipped
    | Declare
    | Submit
    | Wait
    | Withdraw
    | ChildDone
    | ChildFailed
    | LeftOut
    | Check
    | Stale
    | Imported
    | Spoilt
    | RanOut
    | Unforked
    | Acting
    | Sharing
    | Streaming
    | Joining
    | Printed
    | Sync
    | Synced
    | Warned
)

TAGS: Final[dict[type[Message], int]] = {
    kind: tag for tag, kind in enumerate(get_args(Message), start=1)
}
"""The tag of each message; a change here is a new `VERSION`."""
