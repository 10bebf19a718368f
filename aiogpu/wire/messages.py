"""Every message between processes, and the few other structures that they exchange.

A message on the wire is a msgpack array with its tag first (`codec`). Ids are plain
integers here.

- Processes: a zygote forks keepers; a keeper forks the workers of its slot.
- Clients: a client is a program that has joined the node of another process. Its
  messages about tasks, actors and values are those of a worker about the children of
  its task.
- Values: the node counts the references that it lends to a worker: each payload that
  names a segment, value or actor lends one reference. The worker returns each. Creating
  or finding an actor lends one as well.
- Streams: a task or call with a `limit` other than 0 is a stream. The items that its
  generator yields are sent before its answer. The limit counts from the first item,
  over all attempts.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, get_args

from aiogpu.errors import AiogpuError

VERSION: Final = 21
"""Version of the protocol. The greeting carries it; both ends must have the same."""


class ProtocolError(AiogpuError, ConnectionError):
    """The peer sent bytes that are not a message, or a message out of turn."""


class Hello(NamedTuple):
    """The first message on every connection, from the end that connects.

    `id`: the slot of a keeper, the id of a worker or a client, the generation of a
    zygote.
    """

    version: int
    role: str
    id: int
    pid: int


class Refused(NamedTuple):
    """Node to a peer that has sent `Hello`: you are refused; the connection ends.

    The tag is the same in all versions, since a peer of another version may read it.
    """

    reason: str


class Close(NamedTuple):
    """Driver to zygote or keeper: end, with all your descendants."""


# Zygotes and keepers


LOG_LEVEL: Final = "aiogpu_log_level"
"""The -X option with the lowest level that workers log."""


LIMIT: Final = 1 << 30
"""The longest frame in bytes, without its header."""


LARGEST_PAYLOAD: Final = LIMIT - 4096
"""The most bytes of a call's arguments; the other fields of a frame are small."""


class Setup(NamedTuple):
    """The configuration of a zygote and its forks, passed at its start; not a message.

    Passed as plain values: `aiogpu` can be imported only after `sys_path` is set.

    Attributes:
        sys_path: the driver's import path.
        node: the node's id.
        directory: the directory of the node's socket and pipes.
        driver: process id of the driver.
        page: descriptor of the control page.
        preload: modules to import before the first fork.
        cgroup: directory of the node's cgroup, "" if there is none.
        generation: number of this zygote among the node's.
        learns: workers report their imports.
        spill: directory for values that do not fit into memory.
        argv: the program's `sys.argv`.
        flags: the program's command-line options.
        environ: variables that are another for the start of the interpreter, with
            their values in the program; None: not set.
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
    spill: str = ""
    argv: Sequence[str] = ("",)
    flags: Sequence[str] = ()
    environ: Sequence[tuple[str, str | None]] = ()


def socket_path(directory: str) -> str:
    """Return the path of the node's socket."""
    return f"{directory}/node.sock"


def descriptor_path(directory: str) -> str:
    """Return the path of the socket that passes the descriptors of shared memory."""
    return f"{directory}/memory.sock"


def output_path(directory: str, slot: int, stream: int) -> str:
    """Return the path of the pipe for descriptor 1 or 2 of a slot's workers."""
    return f"{directory}/{slot}.{stream}"


class Keep(NamedTuple):
    """Driver to zygote: fork a keeper for this slot."""

    slot: int


class Branch(NamedTuple):
    """Driver to zygote: fork another zygote, which imports these modules as well."""

    generation: int
    modules: tuple[str, ...]


class BranchEnded(NamedTuple):
    """Zygote to driver: a zygote that I have forked has ended.

    `status`: its wait status. `unforked`: why it could not be forked; "" if it was.
    """

    generation: int
    status: int
    unforked: str = ""


class Importing(NamedTuple):
    """Zygote or worker to driver: the import of this module begins.

    A worker names a module that is installed and was not loaded; "" once it is loaded.
    """

    module: str


class Ready(NamedTuple):
    """Zygote to driver: all modules are imported; I can fork.

    `modules`: the top-level modules that this zygote has loaded, without the standard
    library's. `variables`: names of the environment variables that the imports have
    read. `microseconds`: how long each of the requested imports took. `memory`: the
    bytes of memory that the process uses.
    """

    modules: tuple[str, ...]
    variables: tuple[str, ...]
    microseconds: tuple[int, ...]
    memory: int = 0


class Unfit(NamedTuple):
    """Zygote to driver: this module makes forking unsafe or cannot be imported.

    `is_missing`: the import failed. Otherwise the module has started threads or opened
    a device.
    """

    module: str
    reason: str
    is_missing: bool


class Lost(NamedTuple):
    """Zygote to driver: this slot's keeper has died, with all its descendants.

    `unforked`: why the keeper could not be forked; "" if it was forked.
    """

    slot: int
    unforked: str = ""


class Check(NamedTuple):
    """Driver to zygote: answer `Stale` if an imported module was edited since."""


class Stale(NamedTuple):
    """Zygote to driver: the file of this imported module was edited."""

    module: str


class Fork(NamedTuple):
    """Driver to keeper: fork a worker with this id."""

    worker: int


class Forked(NamedTuple):
    """Keeper to driver: the worker was forked."""

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
    """Driver to keeper: kill this worker and all its descendants."""

    worker: int


class Ended(NamedTuple):
    """Keeper to driver: the worker and all its descendants have ended.

    `status`: the worker's wait status, as `os.waitpid` returns it.
    """

    worker: int
    status: int


# Workers and tasks


class Bind(NamedTuple):
    """Driver to worker: your environment and devices, for life.

    Also sent to the holder of a lease, as the payload of a `ChildDone`.

    `environ`: all variables to set. `accelerators`: device ids by kind, as integers or
    strings. `gpu_memory`: usable bytes of each GPU, in order, 0 for no limit; empty if
    no GPU has a limit. `cpus`: CPUs to pin the process to; empty for no pinning.
    """

    environ: dict[str, str]
    accelerators: dict[str, tuple[int | str, ...]]
    gpu_memory: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()


LEASE_MARK: Final = "AIOGPU_LEASE"
"""Environment variable that marks the processes that use a lease. All of them inherit
the variable, so the node can find them."""


ARGUMENTS: Final = "AIOGPU_PROGRAM_ARGUMENTS"
"""Name in `Bind.environ` for the `sys.argv` of a joined program, separated by NUL.

Programs that differ in it alone share a zygote, but no worker: a module may have parsed
the arguments when it was imported. Workers of the node's own program have them from the
zygote.
"""


class Define(NamedTuple):
    """Driver to worker: a function with its options.

    `func`: id of the function with its options. `function`: id of the function without
    options. `payload`: the pickled function; empty if it was sent before. `retried`:
    see `serializer.dump_retried`. `is_timed`: send `Began` when its code begins.
    """

    func: int
    function: int
    name: str
    resources: dict[str, float]
    payload: bytes
    retried: bytes = b""
    is_timed: bool = False


class Forget(NamedTuple):
    """Driver to worker: drop all functions."""


class Run(NamedTuple):
    """Driver to worker: run a function with these arguments; `is_last`: then exit.

    `number` counts the tasks sent to workers; a worker reports by it which task it has
    begun. For a generator, `limit` is as in `Demand`, and the first `skip` items are
    not sent, since an earlier attempt has sent them; otherwise both are 0.
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
    """Driver to worker: exit in an orderly way."""


class Done(NamedTuple):
    """Worker to driver: the task's pickled result; `took` is in microseconds."""

    task: int
    payload: bytes
    took: int = 0


class Failed(NamedTuple):
    """Worker to driver: the task has no result; see `serialization.exceptions`.

    `is_retried`: the task's options ask for a retry after this exception. `peak`: if
    device memory ran out, the most bytes that this process is known to have used, 0 if
    unknown; -1 for any other failure. `is_spoilt`: the process is unfit for another
    task, and exits after this answer.
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
    """Worker to driver: the code of a timed task or call begins.

    `when`: microseconds of CLOCK_MONOTONIC, which all processes share.
    """

    task: int
    when: int


class Halted(NamedTuple):
    """Worker to driver: this task or call stands at a breakpoint, or goes on.

    `where`: the place in the code; "" if it goes on. `path`: the socket to which a
    debugger connects; "" if a debugger is attached.
    """

    task: int
    where: str = ""
    path: str = ""


class Skipped(NamedTuple):
    """Worker to driver: the task was revoked just before it would have begun."""

    task: int
    number: int


class Imported(NamedTuple):
    """Worker to driver: modules imported since the last report, and their cost."""

    names: tuple[str, ...]
    microseconds: tuple[int, ...]


# Children: tasks that a task, or a client, starts


class Declare(NamedTuple):
    """Worker to driver: a function, with options, that children will run.

    `terms`: the options, as plain values. `modules`: those that calls will import. The
    other fields are as in `Define`.
    """

    func: int
    name: str
    terms: bytes
    payload: bytes
    modules: tuple[str, ...] = ()


class Submit(NamedTuple):
    """Worker to driver: start a child of the running task; the worker numbers it."""

    task: int
    child: int
    func: int
    payload: bytes


class Wait(NamedTuple):
    """Worker to driver: the task waits for these children, or for none any more.

    The main thread waits for the first `bound` of them: in plain code, without a time
    limit, until all have ended or one has failed.

    `is_more`: the task waits for these as well as for those of its earlier messages.
    """

    task: int
    children: tuple[int, ...]
    bound: int = 0
    is_more: bool = False


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
    """Worker to driver: answer `Synced` after reading my earlier messages.

    A child may have ended before the driver read that its result is shared (`Share`).
    Then its result was sent to this worker, and arrives before `Synced`.
    """


class Synced(NamedTuple):
    """Driver to worker: the answer to `Sync`."""


# Actors

SERIAL: Final = "serial"
"""Plain methods, one at a time, in the order in which they were sent."""

THREADED: Final = "threaded"
"""Plain methods, each in a thread of its group's pool."""

ASYNC: Final = "async"
"""Coroutine methods interleave on one event loop; plain methods run there as well."""

DEFAULT_GROUP: Final = ""
"""The concurrency group of methods that name none."""

CHUNKED: Final = "[]"
"""Suffix of a method's name: the method is called with a chunk."""

IN_GROUP: Final = "@"
"""Separates a method's name from the concurrency group of one call."""


def plain_name(called: str) -> str:
    """Return the method's name without chunk suffix and concurrency group."""
    return called.removesuffix(CHUNKED).partition(IN_GROUP)[0]


class Create(NamedTuple):
    """Driver to worker: become this actor.

    `number`: as in `Run`; calls have higher numbers. `func`: the class. `payload`: the
    constructor's arguments. `mode`: one of the modes above. `limits`: for each group,
    how many methods run at once. `groups`: the group of each method that names one.
    `kept`: what `on_evict` has returned in the previous process; b"" for nothing.
    """

    task: int
    func: int
    payload: bytes
    number: int
    mode: str
    limits: dict[str, int]
    groups: dict[str, str]
    kept: bytes = b""


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
    """Driver to worker: this call was cancelled; do not begin it, or stop it.

    The control page counts these messages, so that a busy worker notices new ones.
    """

    call: int


class Leave(NamedTuple):
    """Driver to actor: exit in an orderly way, after all calls sent so far.

    `is_eviction`: the actor comes back later, in another process.
    """

    is_eviction: bool = False


class Make(NamedTuple):
    """Worker to driver: create an actor of a declared class, with this id.

    The worker chooses the id, below zero and unique on the node, so that its next
    messages can name the actor. `name`: "" for none.
    """

    actor: int
    func: int
    payload: bytes
    name: str
    namespace: str
    get_if_exists: bool


class Find(NamedTuple):
    """Worker to driver: look up an actor by name; answered like a child."""

    child: int
    name: str
    namespace: str


READY: Final = " ready"
"""Pseudo-method: returns once the actor was created."""

ENDED: Final = " ended"
"""Pseudo-method: returns once the actor's process has ended."""

LOST: Final = " lost"
"""Pseudo-method: returns once the actor's process is lost, or takes no more calls; at
once if the actor is not ready."""

CAPACITY: Final = " capacity"
"""Pseudo-method: returns how many actors with its request can live at once."""

QUERIES: Final = frozenset({READY, ENDED, LOST, CAPACITY})
"""The pseudo-methods."""


class Ask(NamedTuple):
    """Worker to driver: call a method of an actor; answered like a child.

    `method` may be a pseudo-method; no class has a method of such a name.
    """

    task: int
    child: int
    actor: int
    method: str
    payload: bytes


class Hold(NamedTuple):
    """Worker to driver: this process has a handle to the actor; count a reference.

    Sent for a handle in a function; a payload lends the references of its handles.
    """

    actor: int


AT_ONCE: Final = "at once"
"""Kill the actor."""

AFTER_ALL: Final = "after all"
"""End the actor after all calls that were sent to it."""

AGAIN: Final = "again"
"""Kill the actor's process; the actor may be restarted."""


class Stop(NamedTuple):
    """Worker to driver: end an actor; `how` is one of the three constants above."""

    actor: int
    how: str


# Values and shared memory

FIRST_SEGMENT: Final = 1 << 60
"""The lowest id of a segment."""

FIRST_VALUE: Final = 1 << 59
"""The lowest id of the driver's own values; ids of its actors are below."""

WARM_BYTES: Final = 1 << 28
"""Bytes of segments that one worker keeps mapped for reuse."""

NUMBER_BITS: Final = 32
"""In the id of a value or actor, the number of bits below the id of the process that
chose it. Ids chosen by workers and clients are below zero."""

OWNER_BITS: Final = 36
"""In the id of a segment, the number of bits below the owner: a worker's id, or 0."""


class Recycle(NamedTuple):
    """Driver to worker: your segments have no readers; you may reuse them.

    A negated id means: close this segment, because the node is short of memory.
    """

    segments: tuple[int, ...]


class Returned(NamedTuple):
    """Worker to driver: these references are released, each as often as counted.

    Empty, it is `READ_DESCRIPTORS`.
    """

    things: tuple[int, ...]
    counts: tuple[int, ...]


READ_DESCRIPTORS: Final = Returned((), ())
"""Read the descriptors that I have sent: their socket is full, and the message to which
they belong must be sent after all of them."""


class Put(NamedTuple):
    """Worker to driver: keep this value; it counts as lent to me.

    The worker chooses the id, below zero and unique on the node.
    """

    value: int
    payload: bytes


class PutFailed(NamedTuple):
    """Worker to driver: the child that should have made this value has no result."""

    value: int
    kind: str
    type_name: str
    message: str
    traceback: str
    payload: bytes | None


class Share(NamedTuple):
    """Worker to driver: the result of this child is also a value with this id.

    `part`: if the child has several results, the index of one, or -1 for all.
    """

    value: int
    child: int
    part: int


class Fetch(NamedTuple):
    """Worker to driver: send a value; answered like a child."""

    task: int
    child: int
    value: int


class Discard(NamedTuple):
    """Worker to driver: cancel the task that makes this value."""

    value: int


# Streams


class Items(NamedTuple):
    """Worker to driver: the items that this task's generator has yielded, in order.

    `payloads`: pickled like results.
    """

    task: int
    payloads: tuple[bytes, ...]


class Demand(NamedTuple):
    """Driver to worker: this task's generator may yield `limit` items in total."""

    task: int
    limit: int


class ChildItems(NamedTuple):
    """Driver to worker: the items that this child's generator has yielded, in order."""

    child: int
    payloads: tuple[bytes, ...]


class ChildDemand(NamedTuple):
    """Worker to driver: this child's generator may yield `limit` items in total."""

    child: int
    limit: int


# Output

PROGRESS: Final = "\r"
"""Ends a line that the next line replaces, as progress bars print them. No other line
ends with it. A line that consists of it alone erases the line that was shown."""


def visible(line: bytes) -> bytes:
    """Return the part of a line with carriage returns that a terminal shows.

    That is the last part, or nothing if the last part is blank.
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
    """Worker to driver: a `logging` record of the task.

    `text`: the formatted record. `fields`: its attributes, packed as plain values.
    """

    task: int
    text: str
    fields: bytes


class Logged(NamedTuple):
    """Node to client: a `logging` record of one of your tasks; see `Record`.

    `label`: names the task when the text is printed. `child`: your number of the task
    that printed it, or of the task that has started that one; 0 if unknown.
    """

    label: str
    text: str
    fields: bytes
    child: int = 0


class Report(NamedTuple):
    """Worker to driver: a report of a task or call; see `api.results.reports`.

    `lost`: the number of reports that were dropped before this one. `payload`: pickled.
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
    """Node to client: a line that one of your tasks printed; `stream` is 1 or 2.

    `text`: the line for the terminal, with a prefix that names the task. If it ends
    with `PROGRESS`, it replaces the progress line of `worker` on this stream; 0 stands
    for no worker. `child`: see `Logged`.
    """

    stream: int
    text: str
    worker: int = 0
    child: int = 0


class Warned(NamedTuple):
    """Node to client: a warning about one of your tasks, for your log."""

    text: str


# Clients

FIRST_CLIENT: Final = 1 << 26
"""The lowest id of a client; ids of workers are below. A client chooses its own id."""

END_OF_CLIENTS: Final = FIRST_CLIENT + (1 << 24)
"""All ids of clients are below."""


class Join(NamedTuple):
    """Client to node: I join; start my tasks' workers with these settings.

    `release`: the client's version of aiogpu. `executable`, `flags`, `argv`,
    `sys_path`, `directory` and `environ`: those of its process. `preload`: modules for
    its zygote. `expected`: modules that its functions will probably need. `shows`: send
    it the output of its tasks. `only_looks`: it will run nothing. `weight`: its share,
    relative to a client of weight 1.
    """

    release: str
    name: str
    executable: str
    flags: tuple[str, ...]
    argv: tuple[str, ...]
    sys_path: tuple[str, ...]
    directory: str
    environ: dict[str, str]
    preload: tuple[str, ...]
    expected: tuple[str, ...]
    shows: bool
    only_looks: bool
    weight: float


class Welcome(NamedTuple):
    """Node to client: you have joined.

    `descriptors`: path of the socket for shared memory. `page`: path of the control
    page. `spill`: directory for values that do not fit into memory, "" for the system's
    default. `ledger`: the node's resources and options, as plain values.
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
"""Asks for the status: tasks, workers, devices, and why tasks wait."""

WHY: Final = "why"
"""Asks why a child waits, by the client's number for it; 0 for no child."""

WHY_TASK: Final = "why task"
"""Asks why any task waits, by the node's number for it."""

TIMELINE: Final = "timeline"
"""Asks which tasks have run where and when; the number limits how many, 0 for all."""

HISTORY: Final = "history"
"""Asks for the last tasks that have ended."""

TASKS: Final = "tasks"
"""Asks for a page of a list of tasks; the query is a `TaskQuery`."""

CANCEL: Final = "cancel"
"""Cancels any task, by the node's number for it, for the user of the node."""

KILL: Final = "kill"
"""Kills any actor, by the number of its task, for the user of the node."""

END_LEASE: Final = "end lease"
"""Ends any lease, by the number of its task, for the user of the node."""

CANCEL_NAMED: Final = "cancel named"
"""Cancels the task with a name, if no other has the name."""

CANCEL_ALL: Final = "cancel all"
"""Cancels all tasks with a name, as many as there are."""

KILL_NAMED: Final = "kill named"
"""Kills the actor with a name, if no other has the name."""


class Inquire(NamedTuple):
    """Client to node: report about the node, or act on it; answered like a child.

    The answer is `ChildDone` with plain values, see `observe.status_codec`. `what`: one
    of the constants above. `number`: the child or task, or 0. `name`: of tasks, or "".
    `query`: plain values for questions with more to say.
    """

    child: int
    what: str
    number: int
    name: str = ""
    query: bytes = b""


class TakeLease(NamedTuple):
    """Client to node: grant a lease of the resources of this declared function.

    `ChildDone` grants it, with a packed `Bind`; `Withdraw` cancels or returns it.
    """

    child: int
    func: int


class Stopping(NamedTuple):
    """Client to node: I am about to stop my tasks; announce this to them."""


class Depart(NamedTuple):
    """Client to node: stop all my tasks, and answer when they have stopped."""


class Departed(NamedTuple):
    """Node to client: all your tasks and actors have stopped."""


# Directions

ToZygote = Keep | Branch | Check | Close
FromZygote = Ready | Importing | Unfit | Lost | Stale | BranchEnded

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
_TaskReports = Done | Failed | Skipped | Began | Halted | Items | Created
_Imports = Importing | Imported
FromWorker = _TaskReports | Log | Record | Report | _Imports | Wait | Sync | _Requests

ToClient = Refused | Welcome | Close | Departed | Printed | Logged | Warned | _Answers
FromClient = Join | Stopping | Depart | Inquire | TakeLease | _Requests

_Processes = ToZygote | FromZygote | ToKeeper | FromKeeper
Message = Hello | Refused | _Processes | ToWorker | FromWorker | ToClient | FromClient

TAGS: Final[dict[type[Message], int]] = {
    kind: tag for tag, kind in enumerate(get_args(Message), start=1)
}
"""The tag of each message; a change here is a new `VERSION`."""
