"""Every message between processes, and the few other structures that they exchange.

A message on the wire is a msgpack array with its tag first (`codec`). Ids are plain
integers here.

- Processes: a zygote forks keepers; a keeper forks the workers of its slot.
- Clients: a client is a program that has joined the node of another process. Its
  messages about tasks, actors and values are those of a worker about the children of
  its task.
- Values: the node counts each segment, value and actor that it lends to a worker: once
  for each payload that names it, until the worker has returned it as often. A worker
  that creates an actor, or finds one, is lent it once.
- Streams: a task or call whose `limit` is not 0 is a stream. The items that its
  generator yields are sent before its answer. A limit counts from the first item,
  whichever attempt yields it.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, get_args

VERSION: Final = 16
"""Version of the protocol. The greeting carries it; both ends must have the same."""


class Hello(NamedTuple):
    """First message on every connection, from the end that connects.

    `id` is the slot of a keeper, the id of a worker or a client, the generation of a
    zygote.
    """

    version: int
    role: str
    id: int
    pid: int


class Refused(NamedTuple):
    """Node to a peer that has sent `Hello`: it is refused; the connection ends.

    Its tag is the same in all versions, since a peer of another version reads it.
    """

    reason: str


class Close(NamedTuple):
    """Driver to zygote or keeper: end, with all processes that you have started."""


# Zygotes and keepers


LOG_LEVEL: Final = "aiogpu_log_level"
"""The -X option with the level from which on workers log."""


LIMIT: Final = 1 << 30
"""The longest frame in bytes, without its header."""


LARGEST_PAYLOAD: Final = LIMIT - 4096
"""Bytes that a call's arguments may have; the rest of a frame is small."""


class Setup(NamedTuple):
    """The configuration of a zygote and its forks, given at its start; no message.

    Passed as plain values: `aiogpu` can be imported only once `sys_path` is set.

    Attributes:
        sys_path: the driver's import path.
        node: the node's id.
        directory: where the node's socket and pipes are.
        driver: process id of the driver.
        page: descriptor of the control page.
        preload: modules to import before the first fork.
        cgroup: directory of the node's cgroup, "" where none is available.
        generation: number of this zygote among the node's.
        learns: whether workers report what they import.
        learnt: further modules to import, if the zygote can still fork afterwards.
        proven: those of `learnt` after which forking worked before.
        spill: directory for values that do not fit into memory.
    """

    sys_path: list[str]
    node: str
    directory: str
    driver: int
    page: int
    preload: list[str]
    cgroup: str = ""
    generation: int = 0
    learns: bool = False
    learnt: Sequence[str] = ()
    proven: Sequence[str] = ()
    spill: str = ""


def socket_path(directory: str) -> str:
    """Path of the node's socket."""
    return f"{directory}/node.sock"


def descriptor_path(directory: str) -> str:
    """Path of the socket that passes the descriptors of shared memory."""
    return f"{directory}/memory.sock"


def output_path(directory: str, slot: int, stream: int) -> str:
    """Path of the pipe for what a slot's workers write to descriptor 1 or 2."""
    return f"{directory}/{slot}.{stream}"


class Keep(NamedTuple):
    """Driver to zygote: fork a keeper for this slot."""

    slot: int


class Ready(NamedTuple):
    """Zygote to driver: all modules are imported; it can fork.

    `modules`: the top-level modules that this loaded, without the standard library's.
    `variables`: names of the environment variables that were read meanwhile.
    """

    modules: tuple[str, ...]
    variables: tuple[str, ...]


class Unfit(NamedTuple):
    """Zygote to driver: this module makes forking unsafe or cannot be imported.

    `is_missing`: the import failed. Otherwise it left threads or an open device.
    """

    module: str
    reason: str
    is_missing: bool


class LeftOut(NamedTuple):
    """Zygote to driver: this learnt module is unfit, and was not imported."""

    module: str
    reason: str


class Lost(NamedTuple):
    """Zygote to driver: this slot's keeper has died, and all processes below it.

    `unforked`: why the keeper could not be forked, "" if it was.
    """

    slot: int
    unforked: str = ""


class Check(NamedTuple):
    """Driver to zygote: answer `Stale` if a module that you have was edited since."""


class Stale(NamedTuple):
    """Zygote to driver: the file of this imported module was edited."""

    module: str


class Fork(NamedTuple):
    """Driver to keeper: fork a worker with this id."""

    worker: int


class Forked(NamedTuple):
    """Keeper to driver: the worker exists."""

    worker: int
    pid: int


class Unforked(NamedTuple):
    """Keeper to driver: the worker could not be forked, for this reason."""

    worker: int
    reason: str


class Signal(NamedTuple):
    """Driver to keeper: interrupt this worker's task, as the control page says."""

    worker: int


class End(NamedTuple):
    """Driver to keeper: kill this worker and all processes that it has started."""

    worker: int


class Ended(NamedTuple):
    """Keeper to driver: the worker and all processes that it started have ended.

    `status` is the worker's wait status, as `os.waitpid` gives it.
    """

    worker: int
    status: int


# Workers and tasks


class Bind(NamedTuple):
    """Driver to worker: your environment and devices, for life.

    The holder of a lease is told the same, as the payload of a `ChildDone`.

    `environ`: all variables to set. `accelerators`: device ids by kind, as integers or
    strings. `gpu_memory`: usable bytes of each GPU, in their order, 0 for no limit;
    empty if no GPU has one. `cpus`: CPUs to pin the process to, empty for no pinning.
    """

    environ: dict[str, str]
    accelerators: dict[str, tuple[int | str, ...]]
    gpu_memory: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()


LEASE_MARK: Final = "AIOGPU_LEASE"
"""Environment variable that marks the processes a lease is for; all of them inherit it,
and it is how they are found."""


class Define(NamedTuple):
    """Driver to worker: the function and options of this function.

    `function` is the id of the function alone, without options. `payload` is empty if
    the function was sent before. `retried`: `serializer.dump_retried`. `is_timed`: say
    by `Began` when its code begins.
    """

    func: int
    function: int
    name: str
    resources: dict[str, float]
    payload: bytes
    retried: bytes = b""
    is_timed: bool = False


class Forget(NamedTuple):
    """Driver to worker: drop all functions and functions."""


class Run(NamedTuple):
    """Driver to worker: run a function with these arguments; `is_last`: then end.

    `number` counts what is sent to workers; by it they tell what they have begun. For
    a generator `limit` is as in `Demand`, and the first `skip` items are not sent,
    since an earlier attempt sent them; otherwise both are 0.
    """

    task: int
    func: int
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
    """Worker to driver: the task has no result; see `serialization.exceptions`.

    `is_retried`: the task's options ask for another attempt after this exception.
    `peak`: it has run out of device memory, of which this process is known to have used
    so many bytes at most, 0 where that is unknown; -1 for any other failure.
    `is_spoilt`: the process is unfit for another task, and ends after this answer.
    """

    task: int
    kind: str
    type_name: str
    message: str
    traceback: str
    payload: bytes | None
    is_retried: bool = False
    peak: int = -1
    is_spoilt: bool = False

    @property
    def why(self) -> tuple[str, str, str, str, bytes | None]:
        """The fields that `ChildFailed` and `PutFailed` repeat: `kind` to `payload`."""
        return self[1:6]


class Began(NamedTuple):
    """Worker to driver: the code of a task or call begins, whose run is timed.

    `when`: microseconds of CLOCK_MONOTONIC, which all processes share.
    """

    task: int
    when: int


class Skipped(NamedTuple):
    """Worker to driver: the task was revoked just as it was about to begin."""

    task: int
    number: int


class Imported(NamedTuple):
    """Worker to driver: what it imported since its last report, and the cost."""

    names: tuple[str, ...]
    microseconds: tuple[int, ...]


# Children: tasks that a task, or a client, starts


class Declare(NamedTuple):
    """Worker to driver: the function and options of its children at this function.

    `terms`: the options, as plain values; the rest is as in `Define`.
    """

    func: int
    name: str
    terms: bytes
    payload: bytes


class Submit(NamedTuple):
    """Worker to driver: start a child of the running task; the worker numbers it."""

    task: int
    child: int
    func: int
    payload: bytes


class Wait(NamedTuple):
    """Worker to driver: the task waits for these children, or for none.

    The main thread waits for the first `bound` of them: in plain code, with no time
    limit, and it does nothing else before all have ended or one has failed.
    """

    task: int
    children: tuple[int, ...]
    bound: int = 0


class Withdraw(NamedTuple):
    """Worker to driver: cancel this child."""

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


class Sync(NamedTuple):
    """Worker to driver: answer `Synced` once you have read my earlier messages.

    A child may have ended before the driver was told that its result is shared. Its
    answer is on the way then, and arrives before `Synced`.
    """


class Synced(NamedTuple):
    """Driver to worker: the answer to `Sync`."""


# Actors

SERIAL: Final = "serial"
"""Plain methods, one at a time, in the order in which they were sent."""

THREADED: Final = "threaded"
"""Plain methods, each in a thread of its group's pool."""

ASYNC: Final = "async"
"""Coroutine methods interleave on one event loop; plain ones run there as well."""

DEFAULT_GROUP: Final = ""
"""The concurrency group of methods that name none."""

CHUNKED: Final = "[]"
"""At the end of a method's name: it is called with a chunk."""

IN_GROUP: Final = "@"
"""Between a method's name and the concurrency group that one call of it names."""


def plain_name(called: str) -> str:
    """The method's name, of what a call names as its method."""
    return called.removesuffix(CHUNKED).partition(IN_GROUP)[0]


class Create(NamedTuple):
    """Driver to worker: be this actor from now on.

    `number` is as in `Run`; its calls have higher ones. `func` stands for its class,
    `payload` for the constructor's arguments. `mode` is one of the above; `limits`
    says how many methods of a group run at once; `groups` names the group of each
    method that has one.
    """

    task: int
    func: int
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
    """Driver to worker: this call's answer is not wanted; do not begin it, or stop it.

    The control page counts these messages, so that a busy worker sees that there is
    one to read.
    """

    call: int


class Leave(NamedTuple):
    """Driver to actor: end in an orderly way, after all calls that you were sent."""


class Make(NamedTuple):
    """Worker to driver: create an actor of a declared class, with this id.

    The worker chooses the id, below zero and unique on the node, so its next messages
    can name the actor. `name` is empty for none.
    """

    actor: int
    func: int
    payload: bytes
    name: str
    namespace: str
    get_if_exists: bool


class Find(NamedTuple):
    """Worker to driver: look up the actor with that name; the answer is a child's."""

    child: int
    name: str
    namespace: str


READY: Final = " ready"
"""Pseudo-method: returns once the actor was created."""

ENDED: Final = " ended"
"""Pseudo-method: returns once the actor's process has ended."""

CAPACITY: Final = " capacity"
"""Pseudo-method: returns how many actors of its kind can live at once."""


class Ask(NamedTuple):
    """Worker to driver: call a method of an actor; the answer is a child's.

    `method` may be one of the above, which no class has.
    """

    task: int
    child: int
    actor: int
    method: str
    payload: bytes


class Hold(NamedTuple):
    """Worker to driver: this process has a handle to the actor, which counts as lent.

    Sent for a handle in a function; those in payloads count as lent with these.
    """

    actor: int


AT_ONCE: Final = "at once"

AFTER_ALL: Final = "after all"
"""After all calls that it was sent."""

AGAIN: Final = "again"
"""End its process; the actor may be restarted."""


class Stop(NamedTuple):
    """Worker to driver: end an actor; `how` is one of the above."""

    actor: int
    how: str


# Values and shared memory

FIRST_SEGMENT: Final = 1 << 60
"""Ids of segments begin here."""

FIRST_VALUE: Final = 1 << 59
"""Ids of the driver's own values begin here; those of its actors are below."""

WARM_BYTES: Final = 1 << 28
"""Bytes of segments that one worker keeps mapped for reuse."""

NUMBER_BITS: Final = 32
"""Bits of the id of a value or actor below those of the process that chose it. An id
that a worker or client chose is below zero."""

OWNER_BITS: Final = 36
"""Bits of a segment's id below those of its owner: a worker's id, or 0."""


class Recycle(NamedTuple):
    """Driver to worker: your segments have no readers; you may reuse them.

    Those with a negated id are to be closed: the node has no memory to spare.
    """

    segments: tuple[int, ...]


class Returned(NamedTuple):
    """Worker to driver: these references, received so often, are released.

    See `READ_DESCRIPTORS` for none.
    """

    things: tuple[int, ...]
    counts: tuple[int, ...]


READ_DESCRIPTORS: Final = Returned((), ())
"""Read the descriptors that I have sent: there is no room for more, and they are for
one message, which cannot be sent before all of them."""


class Put(NamedTuple):
    """Worker to driver: keep this value; it counts as lent.

    The worker chooses the id, below zero and unique on the node.
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
    """Worker to driver: the result of this child is also a value, with that id.

    If the child has several results, `part` is the index of one, or -1 for all.
    """

    value: int
    child: int
    part: int


class Fetch(NamedTuple):
    """Worker to driver: send a value, as the result of a child."""

    task: int
    child: int
    value: int


class Discard(NamedTuple):
    """Worker to driver: cancel the task that makes this value."""

    value: int


# Streams


class Items(NamedTuple):
    """Worker to driver: what the generator of this task has yielded, in order.

    `payloads` are pickles, as a result's payload is.
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


# Output

PROGRESS: Final = "\r"
"""Ends a line that the next line replaces, as progress bars print it. No other line
ends so. A line that is nothing else erases what was shown."""


def visible(line: bytes) -> bytes:
    """Return what a terminal shows of a line with carriage returns.

    Later parts hide earlier ones, unless they are blank.
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


class Record(NamedTuple):
    """Worker to driver: a record of `logging` that the task has made.

    `text`: as it would be printed. `fields`: its attributes, packed as plain values.
    """

    task: int
    text: str
    fields: bytes


class Logged(NamedTuple):
    """Node to client: a record that one of its tasks has made; see `Record`.

    `label` names the task where the text is printed.
    """

    label: str
    text: str
    fields: bytes


class Report(NamedTuple):
    """Worker to driver: a task or call reports on itself; see `api.results.reports`.

    `lost` of its reports before this one were not sent. `payload` is a pickle.
    """

    task: int
    lost: int
    payload: bytes


class ChildReport(NamedTuple):
    """Driver to worker: a report of this child; see `Report`."""

    child: int
    lost: int
    payload: bytes


class Printed(NamedTuple):
    """Node to client: a line that one of its tasks printed; `stream` is 1 or 2.

    `text` is what the terminal shows, with a prefix that names the task. It may end
    with `PROGRESS`, and then replaces the progress of `worker` on that stream; 0 stands
    for no worker.
    """

    stream: int
    text: str
    worker: int = 0


class Warned(NamedTuple):
    """Node to client: a warning about one of its tasks, for its log."""

    text: str


# Clients

FIRST_CLIENT: Final = 1 << 26
"""Ids of clients begin here; those of workers are below. A client chooses its own."""

END_OF_CLIENTS: Final = FIRST_CLIENT + (1 << 24)
"""Ids of clients are below."""


class Join(NamedTuple):
    """Client to node: it joins; its tasks' workers start with these settings.

    `release`: its version of aiogpu. `executable`, `flags`, `sys_path`, `directory`
    and `environ` are those of its process. `preload`: modules for its zygote. `shows`:
    whether to send it what its tasks print. `only_looks`: it will run nothing.
    `weight`: its share, relative to a client of weight 1.
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
    control page, `spill` the directory for values that do not fit into memory, "" for
    the system's choice. `ledger`: the node's resources and options, as plain values.
    """

    node: str
    descriptors: str
    page: str
    spill: str
    ledger: bytes


RESOURCES: Final = "resources"
"""Asks for all resources by name."""

AVAILABLE: Final = "available"
"""Asks how much of each resource is free."""

STATUS: Final = "status"
"""Asks who holds what, what waits and why."""

WHY: Final = "why"
"""Asks why a child waits, by its number; 0 for no child."""

WHY_TASK: Final = "why task"
"""Asks why any task waits, by the node's number."""

TIMELINE: Final = "timeline"
"""Asks what has run where and when."""

HISTORY: Final = "history"
"""Asks for the last tasks that have ended."""

CANCEL: Final = "cancel"
"""Cancels any task, by the node's number, for the user of the node."""

KILL: Final = "kill"
"""Kills any actor, by the number of its task, for the user of the node."""


class Inquire(NamedTuple):
    """Client to node: report something about it, or do it, as the result of a child.

    The answer is `ChildDone` with plain values, see `observe.status_codec`. `what` is
    one of the above, `number` the child or task in question.
    """

    child: int
    what: str
    number: int


class TakeLease(NamedTuple):
    """Client to node: grant a lease of the resources of this declared function.

    `ChildDone` grants it, with a packed `Bind`; `Withdraw` cancels or returns it.
    """

    child: int
    func: int


class Stopping(NamedTuple):
    """Client to node: I am about to stop my tasks; let them know."""


class Depart(NamedTuple):
    """Client to node: stop all my tasks, and answer when they have stopped."""


class Departed(NamedTuple):
    """Node to client: everything that was yours has stopped."""


# Who may send what

ToZygote = Keep | Check | Close
FromZygote = Ready | Unfit | LeftOut | Lost | Stale

ToKeeper = Fork | Signal | End | Close
FromKeeper = Forked | Unforked | Ended

_Answers = ChildDone | ChildFailed | ChildItems | ChildReport | Recycle
_ChildRequests = Declare | Submit | Withdraw | ChildDemand
_ActorRequests = Make | Find | Ask | Hold | Stop
_ValueRequests = Returned | Put | PutFailed | Share | Fetch | Discard
_Requests = _ChildRequests | _ActorRequests | _ValueRequests

_ToTask = Bind | Define | Forget | Run | Cancel | Exit | Demand | Synced
_ToActor = Create | Invoke | Drop | Leave
ToWorker = _ToTask | _ToActor | _Answers
_TaskReports = Done | Failed | Skipped | Began | Items | Created
FromWorker = _TaskReports | Log | Record | Report | Imported | Wait | Sync | _Requests

ToClient = Refused | Welcome | Close | Departed | Printed | Logged | Warned | _Answers
FromClient = Join | Stopping | Depart | Inquire | TakeLease | _Requests

_Processes = ToZygote | FromZygote | ToKeeper | FromKeeper
Message = Hello | Refused | _Processes | ToWorker | FromWorker | ToClient | FromClient

TAGS: Final[dict[type[Message], int]] = {
    kind: tag for tag, kind in enumerate(get_args(Message), start=1)
}
"""The tag of each message; a change here is a new `VERSION`."""
