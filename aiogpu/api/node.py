"""Opens, queries and closes the node of the running event loop."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, Unpack
from weakref import WeakValueDictionary

from aiogpu.api.options import (
    Kinds,
    Option,
    OptionTable,
    check_flag,
    check_seconds,
    check_text,
    choice,
    is_device,
    named_amounts,
    whole,
)
from aiogpu.api.results.handle import Handle, sessions
from aiogpu.api.session import (
    Session,
    default_address,
    find_session,
    refuse_in_worker,
    start_session,
)
from aiogpu.api.usage_errors import Displayed, EnteredOnLoop, options_from, options_of
from aiogpu.client.current import current
from aiogpu.core.model.units import UNIT, memory_size, quantity
from aiogpu.engines.base import Engine, NodeOptions
from aiogpu.errors import NodeRunningError, NoSuchTaskError, OptionError, StackError

if TYPE_CHECKING:
    from aiogpu.api.dashboard import NodeView
    from aiogpu.api.keywords import InitKeywords
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why


MOST_SPARES: Final = 1024
"""Limit of `spare_workers`; each is a process."""


MOST_DEVICES: Final = 10**6
"""Devices of one kind on a node, at most; `num_gpus` included."""


FOREIGN: Final = ("ignore", "avoid", "wait")


AUTO = "auto"
"""Stands in `preload` for modules that turn out to be slow to import in workers."""


def _check_resources(option: str, value: object) -> dict[str, float]:
    """Check the resources of a node; return them unchanged.

    Raises:
        OptionError: as `check_resources`, and for a fraction of a device.
    """
    for name, amount in named_amounts(option, value):
        parts = quantity(f"{option}[{name!r}]", amount)
        if is_device(name) and (parts % UNIT or parts > MOST_DEVICES * UNIT):
            raise OptionError(
                f"init({option}={{{name!r}: {amount!r}}}): a node has a whole number "
                f"of devices; give an int from 0 to {MOST_DEVICES}, or leave it out to "
                f"detect them."
            )
    return dict(value) if isinstance(value, Mapping) else {}


def _check_cpus(option: str, value: Any) -> float:
    quantity(option, value)
    return float(value)


def _check_preload(option: str, value: object) -> tuple[str, ...]:
    if value == AUTO:
        return (AUTO,)
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not all(isinstance(name, str) and name for name in value)
    ):
        raise OptionError(
            f"{option}={value!r} must be 'auto' or a sequence of module names, such as "
            f"preload=('numpy',), which may contain 'auto'; preload=() imports no "
            f"modules."
        )
    return tuple(value)


def _check_directory(option: str, value: object) -> str:
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise OptionError(f"{option}={value!r} must be the path of a directory.")
    if not os.path.isdir(path):
        raise OptionError(
            f"{option}={value!r}: there is no such directory. Create it, or leave the "
            f"option out to use the system's temporary directory."
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise OptionError(
            f"{option}={value!r}: this user cannot write to the directory. Give "
            f"another, or change its permissions."
        )
    return os.path.abspath(path)


def _check_gpu_memory(option: str, value: object) -> int:
    size = memory_size(option, value)
    if size == 0:
        raise OptionError(
            f"init({option}={value!r}): a GPU must have memory; give the memory of "
            f'each GPU, such as gpu_memory="80GiB", or leave the option out.'
        )
    return size


def _check_runtime_env(option: str, value: object) -> dict[str, Any]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    raise OptionError(
        f"init({option}={value!r}) must be a dict as Ray takes it, such as "
        f"{{'working_dir': '.', 'pip': ['einops']}}."
    )


_check_gpus: Final = whole(
    0, "a whole number of GPUs, or left out to detect them", MOST_DEVICES
)
_check_foreign: Final = choice(
    "'ignore', 'avoid' or 'wait'. When processes outside aiogpu use a device, 'avoid' "
    "prefers other devices, and 'wait' waits until they are gone",
    *FOREIGN,
)
_check_mps: Final = choice(
    "'auto' (use an MPS server if one runs) or 'off'", "auto", "off"
)
_check_affinity: Final = choice(
    "'auto' (keep workers on CPUs near their GPUs) or 'off'", "auto", "off"
)
_check_spares: Final = whole(0, "a whole number, 0 for none", MOST_SPARES)


_NODE: Final[Kinds] = ("node", "start")
_INIT: Final[Kinds] = ("node",)


class InitOptions(OptionTable):
    """The options of a node, as `init` takes them.

    Of a node:
        address: "local"; "auto" or the path of a socket to join a running node;
            "inline" for tests; "ray". Default AIOGPU_ADDRESS if set, else "local".
        num_cpus: CPUs of the node; default those that this process may use.
        num_gpus: GPUs of the node, may exceed the real ones; default those detected.
        resources: amounts of other resources by name: `{"license": 2}`,
            `{"neuron_cores": 4}`.
        accelerator_type: type of GPUs that are not detected, such as "A100".
        gpu_memory: memory of each GPU that is not detected, such as "80GiB".
        gpu_memory_enforce: end a task that uses more `gpu_memory` than it asked for;
            default False.
        foreign: what to do about processes outside aiogpu on a device: "ignore" them
            (default), "avoid" the device, or "wait" until they are gone.
        mps: "off" (default), or "auto" to limit shares by an MPS server if one runs.
        cpu_affinity: "auto" (default) keeps workers on CPUs near their GPUs, or "off".
        preload: modules to import before workers fork; default "auto", modules that
            turn out to be slow to import.
        log_to_driver: show what tasks print, line by line; default True.
        cancel_grace: seconds, above 0, between the cancel of a task and the kill of its
            process; default 2.
        spare_workers: processes kept ready for tasks that need a fresh one; default 2.
        memory: main memory for tasks that ask for some, in bytes or as "64GiB"; default
            95 % of the machine's.
        memory_guard: before memory runs out, end the largest task and retry it alone;
            default True.
        object_memory: memory for large values, in bytes or as "8GiB"; default 30 % of
            the machine's.
        spill_directory: directory for values beyond `object_memory`; default the
            system's temporary directory.
        runtime_env: with address="ray", Ray's runtime environment of all tasks, as
            `ray.init` takes it: `{"working_dir": ".", "pip": ["einops"]}`.
        dashboard: serve the dashboard of the node beside the program, and print its URL
            to stderr; needs `aiogpu[dashboard]`; default False.
        ignore_reinit_error: return this loop's node if it already has one; default
            False.
    """

    address = Option(_INIT, check_text, None, "str")
    num_cpus = Option(_NODE, _check_cpus, None, "float")
    num_gpus = Option(_NODE, _check_gpus, None, "int")
    resources = Option(_NODE, _check_resources, None, "Mapping[str, float]")
    accelerator_type = Option(_NODE, check_text, None, "str")
    gpu_memory = Option(_NODE, _check_gpu_memory, None, "int | str")
    gpu_memory_enforce = Option(_NODE, check_flag, False, "bool", takes_none=False)
    foreign = Option(
        _NODE,
        _check_foreign,
        "ignore",
        'Literal["ignore", "avoid", "wait"]',
        takes_none=False,
    )
    mps = Option(_NODE, _check_mps, "off", 'Literal["auto", "off"]', takes_none=False)
    cpu_affinity = Option(
        _NODE, _check_affinity, "auto", 'Literal["auto", "off"]', takes_none=False
    )
    preload = Option[str | tuple[str, ...]](
        _NODE, _check_preload, AUTO, "Sequence[str]", takes_none=False
    )
    log_to_driver = Option(_INIT, check_flag, True, "bool", takes_none=False)
    cancel_grace = Option(_NODE, check_seconds, 2.0, "float", takes_none=False)
    spare_workers = Option(_NODE, _check_spares, 2, "int", takes_none=False)
    memory = Option(_NODE, memory_size, None, "int | str")
    memory_guard = Option(_NODE, check_flag, True, "bool", takes_none=False)
    object_memory = Option(_NODE, memory_size, None, "int | str")
    spill_directory = Option(_NODE, _check_directory, None, "str | os.PathLike[str]")
    runtime_env = Option(_INIT, _check_runtime_env, None, "Mapping[str, Any]")
    dashboard = Option(_INIT, check_flag, False, "bool", takes_none=False)
    ignore_reinit_error = Option(_INIT, check_flag, False, "bool", takes_none=False)


def check_node_options(given: Mapping[str, object]) -> NodeOptions:
    """Check the options of a node; raises `OptionError`."""
    checked = InitOptions.check(given, "node")
    for own in ("address", "ignore_reinit_error"):  # of the call, not of the node
        checked.pop(own, None)
    modules = checked.pop("preload", (AUTO,))
    if checked.get("resources", ()) is None:
        del checked["resources"]
    return NodeOptions(
        preload=tuple(name for name in modules if name != AUTO),
        learns=AUTO in modules,
        **checked,
    )


class Node(Displayed, EnteredOnLoop):
    """The node of this event loop, returned by `init`; `async with` closes it.

    The functions of `aiogpu` with the same names use the node of the running loop.
    """

    __slots__ = ("__weakref__", "_session")

    def __init__(self, session: Session) -> None:
        self._session = session

    def __repr__(self) -> str:
        return f"<Node {'open' if self.is_open else 'closed'}>"

    async def _html(self) -> str:
        from aiogpu.notebook.display import code
        from aiogpu.observe.status import status_html

        state = code(repr(self))
        return state + (status_html(await self.status()) if self.is_open else "")

    def _as_called(self) -> str:
        return "aiogpu.init(...)"

    async def __aenter__(self) -> Node:
        await self._session.opened()
        return self

    async def __aexit__(self, kind: object, error: Any, trace: object) -> None:
        await self._session.leave(error)

    @property
    def is_open(self) -> bool:
        """True until the node is closed, by `shutdown` or with its loop, or dies."""
        return self._session.is_open

    async def status(self) -> NodeStatus:
        """Return which tasks hold or wait for what; see `aiogpu.status`."""
        return await self._session.engine.status()

    async def dashboard(self) -> NodeView:
        """Return the overview of the dashboard, which a notebook shows below the cell.

        It shows the node at this moment. `init(dashboard=True)` serves pages that
        follow it.

        Example:
            `await node.dashboard()` as the last line of a cell.
        """
        from aiogpu.api.dashboard import NodeView

        return NodeView(await self.status())

    @property
    def dashboard_url(self) -> str:
        """The URL of the dashboard, with its token; "" without `dashboard=True`."""
        process = self._session.dashboard
        return "" if process is None else process.url

    async def why(self, task_id: int) -> Why:
        """Return why a task waits; see `aiogpu.why`."""
        return await _why(self._session, task_id)

    async def stack(self, task: int | Handle[Any]) -> str:
        """Return where the code of a running task or actor is, as `aiogpu stack`.

        The calls of each thread are listed with their source, the innermost last, and
        those of each coroutine that awaits something. The task goes on.

        Args:
            task: the task's handle; or the number of a task or actor, as in
                `aiogpu.status()`.

        Raises:
            OptionError: `task` is neither a handle nor a number.
            NoSuchTaskError: the node has no record of such a task.
            StackError: the task does not run, or does not answer; or its node is
                inline or a Ray cluster.
        """
        if isinstance(task, Handle):
            why = await task.why()
        else:
            why = await _why(self._session, task, "stack")
        if not self._session.engine.runs_together:
            raise StackError(
                f"node.stack({task!r}): only tasks in workers of a node of aiogpu are "
                f"asked. A task of an inline node runs in this process: use its "
                f"debugger. On Ray use `ray stack`."
            )
        # Late: few programs ask.
        from aiogpu.engines.stack import stack_of

        return await stack_of(why)

    async def cluster_resources(self) -> dict[str, float]:
        """Return all resources of the node by name, `{"CPU": 4.0, "GPU": 1.0}`."""
        return await self._session.engine.total()

    async def available_resources(self) -> dict[str, float]:
        """Return the free amount of each resource, 0.0 included."""
        return await self._session.engine.available()

    async def shutdown(self, at_once: bool = False) -> None:
        """Close the node: stop its tasks; leave no process or file.

        Args:
            at_once: True to give running tasks no time to stop by themselves.
        """
        await self._session.shutdown(at_once)


_nodes: Final[WeakValueDictionary[Session, Node]] = WeakValueDictionary()


def node_of(session: Session) -> Node:
    """Return the node of a session, always the same object."""
    node = _nodes.get(session)
    if node is None:
        node = _nodes[session] = Node(session)
    return node


async def why(task_id: int) -> Why:
    """Return why a task waits, or its state if it does not; `print` explains it.

    `handle.why()` returns the same. Actors have task numbers too.

    Args:
        task_id: the task's number, as in `aiogpu.status()` and in log lines.

    Raises:
        OptionError: `task_id` is not a number.
        NoSuchTaskError: the node has no record of such a task. A node keeps records of
            the last 10 000 tasks that ended, a Ray cluster of none.
        NodeError: called inside a task.
    """
    return await _why(None, task_id)


async def _why(session: Session | None, task_id: int, asked: str = "why") -> Why:
    """Return why a task of a session's node waits, for the function `asked`."""
    if not isinstance(task_id, int) or isinstance(task_id, bool) or task_id < 0:
        is_why = asked == "why"
        called = f"{'aiogpu' if is_why else 'node'}.{asked}"
        instead = "await handle.why()" if is_why else "await node.stack(handle)"
        raise OptionError(
            f"{called}({task_id!r}): the argument must be a task's number, such as "
            f"12; aiogpu.status() lists them. For a handle write `{instead}`."
        )
    engine = (
        await engine_of_program("aiogpu.why()") if session is None else session.engine
    )
    answer = await engine.why_task(task_id)
    if answer is None:
        raise no_such_task(task_id, "aiogpu.status()")
    return answer


def no_such_task(task_id: int, shows: str) -> NoSuchTaskError:
    """Return the error for an unknown task number; `shows` is what lists tasks."""
    return NoSuchTaskError(
        f"this node has no task {task_id}. Either there never was one, or it ended and "
        f"its record is gone: a node keeps records of the last 10 000 ended tasks. "
        f"{shows} shows the tasks that wait or run."
    )


class Opening(EnteredOnLoop):
    """The result of `init`: await it, or use it in `async with`."""

    def __init__(
        self, address: str | None, options: NodeOptions, ignore_reinit_error: bool
    ) -> None:
        self._address = address
        self._options = options
        self._ignore_reinit_error = ignore_reinit_error
        self._is_used = False
        self._opened: Session | None = None

    def _as_called(self) -> str:
        return "aiogpu.init(...)"

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            self._is_used = True  # no warning in addition to the error
            super().__enter__()

    def __await__(self) -> Generator[Any, None, Node]:
        return self._open().__await__()

    async def __aenter__(self) -> Node:
        return await self._open()

    async def __aexit__(self, kind: object, error: Any, trace: object) -> None:
        if self._opened is not None:
            await self._opened.leave(error)

    async def _open(self) -> Node:
        self._is_used = True
        refuse_in_worker("aiogpu.init()")
        loop = asyncio.get_running_loop()
        session: Session | None = sessions.get(loop)
        if session is not None and (session.is_closing or session.has_lost_its_node):
            await session.shutdown()
            session = sessions.get(loop)
        if session is not None:
            if self._ignore_reinit_error:
                await session.opened()
                return node_of(session)
            opened_by, origin = session.opened_by, "."
            if opened_by:
                origin = (
                    f", which an earlier {opened_by} opened with default options. Call "
                    f"init() before {opened_by}."
                )
            raise NodeRunningError(
                f"this event loop already has a node{origin} Write `await "
                f"aiogpu.shutdown()` before another init(), or "
                f"init(ignore_reinit_error=True) to share the node."
            )
        session = self._opened = start_session(self._address, self._options, loop)
        try:
            # The node starts a process, which takes longer than this import.
            await asyncio.sleep(0)
            from aiogpu.api import calls  # noqa: F401

            await session.opened()
        except asyncio.CancelledError:
            await session.shutdown()
            raise
        return node_of(session)

    def __del__(self) -> None:
        if not self._is_used:
            warnings.warn(
                "aiogpu.init() was called but never awaited; write `await "
                "aiogpu.init(...)` or `async with aiogpu.init(...)`.",
                RuntimeWarning,
                stacklevel=2,
            )


@options_of("a node")
@options_from(InitOptions, "node")
def init(**options: Unpack[InitKeywords]) -> Opening:
    """Open a node for this event loop: `await` the call, or use `async with`.

    Raises:
        OptionError: an option is invalid; or, at the await, it asks for more than the
            joined node has.
        NodeError: at the await: this loop already has a node, or the node cannot start.
        DeviceError: at the await: CUDA_VISIBLE_DEVICES names devices that do not exist.
    """
    node_options = check_node_options(options)
    given = InitOptions(**options)
    return Opening(
        given.address or default_address(), node_options, given.ignore_reinit_error
    )


def is_initialized() -> bool:
    """Return whether this loop has a node, opened by `init` or by a first `.remote()`.

    Inside a task the answer is True; without a running event loop it is False.
    """
    try:
        session: Session | None = sessions.get(asyncio.get_running_loop())
    except RuntimeError:
        session = None
    if session is None:
        return bool(current.worker)
    return not (session.is_closing or session.has_lost_its_node or session.is_forked)


async def shutdown() -> None:
    """Close this loop's node, if any: stop its tasks; leave no process or file."""
    session = sessions.get(asyncio.get_running_loop())
    if session is not None:
        await session.shutdown()


async def cluster_resources() -> dict[str, float]:
    """Return all resources of the node by name, `{"CPU": 4.0, "GPU": 1.0}`.

    Raises:
        NodeError: called inside a task.
    """
    return await (await engine_of_program("aiogpu.cluster_resources()")).total()


async def available_resources() -> dict[str, float]:
    """Return the free amount of each resource, 0.0 included.

    Raises:
        NodeError: called inside a task.
    """
    return await (await engine_of_program("aiogpu.available_resources()")).available()


async def status() -> NodeStatus:
    """Return which tasks hold which devices, and which tasks wait for what.

    `print` shows the status as text. It lists all tasks that have a worker, and the
    first 100 that wait; `waiting_count` and `shapes` count all of them.

    Raises:
        NodeError: called inside a task.
    """
    return await (await engine_of_program("aiogpu.status()")).status()


async def engine_of_program(what: str) -> Engine:
    """Return the engine of this loop's node once the node is open."""
    session = find_session(what, is_for_programs=True)
    await session.opened()
    return session.engine
