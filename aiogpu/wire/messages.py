"""Every message between processes: one small tuple each, and one table of tags.

A message on the wire is a msgpack array with its tag first (`codec`). Ids are plain
integers here.

- Processes: a zygote forks keepers, a keeper forks the workers of its slot.
- Clients: a client is a program that has joined the node of another process. What it
  says of tasks, actors and values is what a worker says of its task's children.
- Values: segments and values that a worker was lent are counted, each time that a
  payload which names one comes to it, and each time that it has returned it.
- Streams: a task or call whose `limit` is not 0 is a stream. What its generator yields
  goes ahead of its answer. Limits count from the first item, whichever attempt yields
  it.
"""

from typing import Final, NamedTuple, get_args


class Keep(NamedTuple):
    """Driver to zygote: fork a keeper for this slot."""

    slot: int


class Ready(NamedTuple):
    """Zygote to driver: all is imported and it may fork.

    `modules`: top-level modules that came by that, but for the standard library's.
    `variables`: names of the environment variables that were read meanwhile.
    """

    modules: tuple[str, ...]
    variables: tuple[str, ...]


class Unfit(NamedTuple):
    """Zygote to driver: this module spoils forking or cannot be imported.

    `is_missing`: the import failed; otherwise it succeeded and left threads or an
    open device behind.
    """

    module: str
    reason: str
    is_missing: bool


class LeftOut(NamedTuple):
    """Zygote to driver: this learnt module is unfit, and was not imported."""

    module: str
    reason: str


class Lost(NamedTuple):
    """Zygote to driver: this slot's keeper has died; all below it has ended.

    `unforked` says why it was not even forked, "" where it was.
    """

    slot: int
    unforked: str = ""


class Unforked(NamedTuple):
    """Keeper to driver: the worker could not be forked, and why."""

    worker: int
    reason: str


class Check(NamedTuple):
    """Driver to zygote: say so if what you have imported was edited since."""


class Stale(NamedTuple):
    """Zygote to driver: the file of this module, which it has, was edited."""

    module: str


FIRST_CLIENT: Final = 1 << 26
"""Ids of clients begin here; those of workers are below. A client chooses its own."""

END_OF_CLIENTS: Final = FIRST_CLIENT + (1 << 24)
"""Those of clients are below."""

RESOURCES: Final = "resources"
"""Asks for all resources by name."""

AVAILABLE: Final = "available"
"""Asks for what is free of each."""

STATUS: Final = "status"
"""Asks who holds what, what waits and why."""

WHY: Final = "why"
"""Asks why a child waits, by its number; 0 for nobody's."""

WHY_TASK: Final = "why task"
"""The same of any task, by the node's number."""

TIMELINE: Final = "timeline"
"""Asks what has run where and when."""


class Refused(NamedTuple):
    """Node to whoever has greeted: go away, for this reason; the connection ends.

    Its tag is the same in all versions, since one of another version reads it.
    """

    reason: str


class Join(NamedTuple):
    """Client to node: what its tasks' workers are to begin with.

    `release`: its version of aiogpu. `executable`, `flags`, `sys_path`, `directory`
    and `environ` are its own. `preload`: modules for its zygote. `shows`: whether it is
    sent what its tasks print. `only_looks`: it will run nothing. `weight`:
    what it gets where another of weight 1 gets 1.
    """

    release: str
    name: str
    executable: str
    flags: tuple[str, ...]
    sys_path: tuple[str, ...]
    directory: str
    environ: dict[str, str]
    preload: tuple[str, ...]
    shows: bool
    only_looks: bool
    weight: float


class Welcome(NamedTuple):
    """Node to client: it has joined.

    `descriptors` is the path of the socket for shared memory, `page` that of the
    control page, `spill` where values go for which there is no memory, "" for the
    system's choice. `ledger` is what the node has to share out and how it
    works, as plain values.
    """

    node: str
    descriptors: str
    page: str
    spill: str
    ledger: bytes


class Inquire(NamedTuple):
    """Client to node: tell something of the node, as the result of a child.

    The answer is `ChildDone` with plain values, see `runtime.status_codec`. `what` is
    one of the above, `number` the child or the task that is meant.
    """

    child: int
    what: str
    number: int


class Carried(NamedTuple):
    """Node to whoever asked: the child's answer, which follows, has handles to these.

    They count as held by whoever is told until he says `Release` of each.
    """

    child: int
    actors: tuple[int, ...]


class TakeLease(NamedTuple):
    """Client to node: I want a lease of what this site, which I declared, asks for.

    `ChildDone` grants it, with a `leasing.Grant`; `Withdraw` gives it up, or back.
    """

    child: int
    site: int


class FindPlacement(NamedTuple):
    """Client to node: tell me the placement of that name that outlives its program.

    `ChildDone` tells it as plain values; `TakeLease` of it says when it is granted.
    """

    child: int
    name: str


class Depart(NamedTuple):
    """Client to node: stop all that is mine, and tell me when it has stopped."""


class Departed(NamedTuple):
    """Node to client: nothing of yours is left."""


Joining = (
    Join | Welcome | Inquire | Carried | TakeLease | FindPlacement | Depart | Departed
)
"""Everything that concerns clients, but for `Refused`."""

SERIAL: Final = "serial"
"""Plain methods, one at a time, in the order of their sending."""

THREADED: Final = "threaded"
"""Plain methods, each in a thread of its group's."""

ASYNC: Final = "async"
"""Coroutine methods interleave on one event loop; plain ones run there as well."""

DEFAULT_GROUP: Final = ""
"""The concurrency group of methods that name none."""


class Create(NamedTuple):
    """Driver to worker: be this actor from now on.

    `number` is as in `Run`; those of its calls are higher. `site` stands for its
    class, `payload` for the constructor's arguments. `mode` is one of the above;
    `limits` says how many methods of a group run at once; `groups` names the group of
    each method that has one.
    """

    task: int
    site: int
    payload: bytes
    number: int
    mode: str
    limits: dict[str, int]
    groups: dict[str, str]


class Created(NamedTuple):
    """Worker to driver: the constructor has returned."""

    task: int


class Invoke(NamedTuple):
    """Driver to worker: call a method of the actor with these arguments.

    `limit` and `skip` are as in `Run`.
    """

    call: int
    method: str
    payload: bytes
    limit: int = 0
    skip: int = 0


class Drop(NamedTuple):
    """Driver to worker: nobody wants this call's answer; begin it no more, stop it.

    The control page counts them, so that a worker which is busy sees that there is
    one to read.
    """

    call: int


class Leave(NamedTuple):
    """Driver to actor: end in an orderly way, after all that you were sent."""


class Make(NamedTuple):
    """Worker to driver: make an actor of a declared class, under this id.

    The id is the worker's own choice, below zero and the only one of its kind on the
    node; so what it says next can name the actor. `name` is empty for none.
    """

    actor: int
    site: int
    payload: bytes
    name: str
    namespace: str
    get_if_exists: bool


class Find(NamedTuple):
    """Worker to driver: tell who has that name, as the result of a child."""

    child: int
    name: str
    namespace: str


class Ask(NamedTuple):
    """Worker to driver: call a method of an actor; the answer is that of a child.

    `method` may be one of those below, which no class has.
    """

    task: int
    child: int
    actor: int
    method: str
    payload: bytes


class Hold(NamedTuple):
    """Worker to driver: this process has a handle to the actor."""

    actor: int


class Release(NamedTuple):
    """Worker to driver: this process has no handle to the actor any more."""

    actor: int


class Carry(NamedTuple):
    """Worker to driver: what follows holds handles to these actors.

    `task` is the one whose result follows, 0 for a `Submit`, an `Ask` or a `Make`.
    """

    task: int
    actors: tuple[int, ...]


class Stop(NamedTuple):
    """Worker to driver: end an actor, `how` is one of those below."""

    actor: int
    how: str


READY: Final = " ready"
"""Tell when the actor was made."""

ENDED: Final = " ended"
"""Tell when its process has ended."""

ROOM: Final = " room"
"""Tell how many actors of its kind can live at once."""

AT_ONCE: Final = "at once"

AFTER_ALL: Final = "after all"
"""After what it was sent."""

AGAIN: Final = "again"
"""End its process; it may be made anew."""

Acting = (
    Create
    | Created
    | Invoke
    | Drop
    | Leave
    | Make
    | Find
    | Ask
    | Hold
    | Release
    | Carry
    | Stop
)
"""Everything that concerns actors."""

SEGMENTS: Final = 1 << 60
"""Ids of segments begin here; those of values are below."""

WARM: Final = 1 << 28
"""Bytes of its segments that stand ready in one worker, to be written again."""

NUMBERS: Final = 32
"""Bits of the id of a value or an actor below those that say which process chose it.
The id of what a worker or a client has made is below zero."""

OWNER: Final = 36
"""Bits of a segment's id below those that say whose it is: a worker's id, or 0."""


class Recycle(NamedTuple):
    """Driver to worker: nobody reads these segments of yours; write them again.

    Those whose id comes negated are to be closed: the node has no memory to spare.
    """

    segments: tuple[int, ...]


class Returned(NamedTuple):
    """Worker to driver: these things that came so often are not used any more.

    See `PRESSING` for none.
    """

    things: tuple[int, ...]
    counts: tuple[int, ...]


PRESSING: Final = Returned((), ())
"""Read the descriptors that I have sent: there is no room for more, and they are for
one message, which cannot be sent before all of them."""


class Put(NamedTuple):
    """Worker to driver: keep this value, under an id of the worker's choice.

    That is below zero, and the only one of its kind on the node. It counts as lent.
    """

    value: int
    payload: bytes


class PutFailed(NamedTuple):
    """Worker to driver: the child whose result was to be this value has none."""

    value: int
    kind: str
    type_name: str
    message: str
    traceback: str
    payload: bytes | None


class Share(NamedTuple):
    """Worker to driver: the result of this child is a value as well, under that id.

    Or, where it has several results, the part of that index; -1 for all of it.
    """

    value: int
    child: int
    part: int


class Fetch(NamedTuple):
    """Worker to driver: tell a value, as the result of a child."""

    task: int
    child: int
    value: int


class Discard(NamedTuple):
    """Worker to driver: nobody wants this value any more: stop who makes it."""

    value: int


class Sync(NamedTuple):
    """Worker to driver: answer `Synced` once you have taken in what I said before.

    A child may have ended before the driver was told that its result is shared. Its
    answer is on the way then, and arrives before `Synced`.
    """


class Synced(NamedTuple):
    """Driver to worker: the answer to `Sync`."""


Sharing = Recycle | Returned | Put | PutFailed | Share | Fetch | Discard
"""Everything that concerns values and shared memory."""


class RanOut(NamedTuple):
    """Worker to driver: the task or call whose `Failed` follows ran out of it.

    `peak` is the most bytes of device memory that this process is known to have used,
    0 where nobody can tell.
    """

    task: int
    peak: int


class Items(NamedTuple):
    """Worker to driver: what the generator of this task has yielded, in order.

    `payloads` are pickles, as that of a result.
    """

    task: int
    payloads: tuple[bytes, ...]


class Demand(NamedTuple):
    """Driver to worker: this task's generator may yield so many items in all."""

    task: int
    limit: int


class ChildItems(NamedTuple):
    """Driver to worker: what the generator of this child has yielded, in order."""

    child: int
    payloads: tuple[bytes, ...]


class ChildDemand(NamedTuple):
    """Worker to driver: this child's generator may yield so many items in all."""

    child: int
    limit: int


Streaming = Items | Demand | ChildItems | ChildDemand
"""Everything that concerns streams."""

PROGRESS: Final = "\r"
"""Ends a line that the next one replaces, as progress bars want it. No other line ends
so; one that is nothing else takes away what was shown."""


def visible(line: bytes) -> bytes:
    """What a terminal would show of a line in which carriage returns go back.

    Parts that come later hide those before them, unless they are blank.
    """
    if b"\r" not in line:
        return line
    parts = line.removesuffix(b"\r").split(b"\r")
    return b"" if parts[-1].isspace() else parts[-1]


class Log(NamedTuple):
    """Worker to driver: a line that the task printed; `stream` is 1 or 2.

    `task` is 0 for output outside of any task. `line` may end with `PROGRESS`.
    """

    task: int
    stream: int
    line: bytes


class Printed(NamedTuple):
    """Node to client: a line that one of its tasks printed; `stream` is 1 or 2.

    `text` is as its terminal is to show it, with who has printed it before it. It may
    end with `PROGRESS`. It replaces the progress of `worker` on that stream; 0 stands
    for no worker.
    """

    stream: int
    text: str
    worker: int = 0


class Warned(NamedTuple):
    """Node to client: a warning about one of its tasks, for its log."""

    text: str


VERSION: Final = 11
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
