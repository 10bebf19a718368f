"""The running loop's node, as users open, ask and close it.

What `init` is asked for is checked here; every mistake is named.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal

from aiogpu.api.loop_sessions import session_of
from aiogpu.api.options import check_declared, check_seconds, check_text
from aiogpu.api.session import (
    Session,
    current_session,
    default_address,
    refuse_in_worker,
    start_session,
)
from aiogpu.api.usage_errors import EnteredOnLoop, options_of
from aiogpu.client.current import current, error_inside_task
from aiogpu.core.model.units import memory_size, quantity
from aiogpu.engines.base import NodeOptions
from aiogpu.errors import NodeRunningError, NoSuchTaskError, OptionError

if TYPE_CHECKING:
    from aiogpu.observe.status import NodeStatus
    from aiogpu.observe.why import Why


MOST_SPARES: Final = 1024
"""Clean workers that may be asked for; each is a process."""


FOREIGN: Final = ("ignore", "avoid", "wait")


AUTO = "auto"
"""In `preload`: modules that workers import again and again, as they are learnt."""


def check_node_options(
    *,
    num_cpus: object,
    num_gpus: object,
    resources: object,
    accelerator_type: object,
    gpu_memory: object,
    gpu_memory_enforce: object,
    foreign: object,
    mps: object,
    cpu_affinity: object,
    preload: object,
    log_to_driver: object,
    cancel_grace: object,
    spare_workers: object,
    memory: object,
    memory_guard: object,
    object_memory: object,
    spill_directory: object,
) -> NodeOptions:
    """Check the options of a node; raises `OptionError`."""
    modules = _check_preload(preload)
    return NodeOptions(
        num_cpus=_check_cpus(num_cpus),
        num_gpus=_check_gpus(num_gpus),
        resources=_check_custom(resources),
        accelerator_type=check_text("accelerator_type", accelerator_type),
        gpu_memory=_check_gpu_memory(gpu_memory),
        gpu_memory_enforce=check_flag("gpu_memory_enforce", gpu_memory_enforce),
        foreign=_check_foreign(foreign),
        mps=_check_switch("mps", mps, "to use an MPS server where one runs"),
        cpu_affinity=_check_switch(
            "cpu_affinity", cpu_affinity, "to keep workers on CPUs near their GPUs"
        ),
        preload=tuple(name for name in modules if name != AUTO),
        learns=AUTO in modules,
        log_to_driver=check_flag("log_to_driver", log_to_driver),
        cancel_grace=check_seconds("cancel_grace", cancel_grace),
        spare_workers=_check_spares(spare_workers),
        memory=None if memory is None else memory_size("memory", memory),
        memory_guard=check_flag("memory_guard", memory_guard),
        object_memory=(
            None
            if object_memory is None
            else memory_size("object_memory", object_memory)
        ),
        spill_directory=_check_directory("spill_directory", spill_directory),
    )


def _check_cpus(value: object) -> float | None:
    if value is None:
        return None
    quantity("num_cpus", value)
    assert isinstance(value, int | float)
    return float(value)


def _check_gpus(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 10**6:
        raise OptionError(
            f"init(num_gpus={value!r}): a node has a whole number of GPUs; give an "
            f"int from 0 to {10**6}, or leave it out to detect them."
        )
    return value


def _check_foreign(value: object) -> str:
    if isinstance(value, str) and value in FOREIGN:
        return value
    raise OptionError(
        f"init(foreign={value!r}): give 'ignore', 'avoid' or 'wait'. Where processes "
        f"outside of aiogpu are on a device, 'avoid' has others chosen first, and "
        f"'wait' waits until they have gone."
    )


def _check_spares(value: object) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not 0 <= value <= MOST_SPARES
    ):
        raise OptionError(
            f"init(spare_workers={value!r}): give a whole number from 0, for none, to "
            f"{MOST_SPARES}."
        )
    return value


def _check_custom(value: object) -> Mapping[str, float]:
    return {} if value is None else check_declared("resources", value)


def _check_preload(value: object) -> tuple[str, ...]:
    if value == AUTO:
        return (AUTO,)
    if (
        isinstance(value, str)
        or not isinstance(value, Sequence)
        or not all(isinstance(name, str) and name for name in value)
    ):
        raise OptionError(
            f"preload={value!r} must be a sequence of module names, such as "
            f"preload=('numpy',), or 'auto', or a sequence that holds 'auto' too; "
            f"preload=() is for no module at all."
        )
    return tuple(value)


def _check_directory(option: str, value: object) -> str | None:
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str):
        raise OptionError(f"{option}={value!r} must be the path of a directory.")
    if not os.path.isdir(path):
        raise OptionError(
            f"{option}={value!r}: there is no such directory; make it, or leave the "
            f"option out for the system's temporary one."
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise OptionError(f"{option}={value!r}: this user may not write there.")
    return os.path.abspath(path)


def _check_gpu_memory(value: object) -> int | None:
    if value is None:
        return None
    size = memory_size("gpu_memory", value)
    if size == 0:
        raise OptionError(
            f"init(gpu_memory={value!r}): a GPU without memory serves nobody; give "
            f'that of each GPU, such as gpu_memory="80GiB", or leave it out.'
        )
    return size


def _check_switch(option: str, value: object, purpose: str) -> str:
    if isinstance(value, str) and value in ("auto", "off"):
        return str(value)
    raise OptionError(f"{option}={value!r} must be 'auto', {purpose}, or 'off'.")


def check_flag(option: str, value: object) -> bool:
    """Check a switch; raises `OptionError`."""
    if not isinstance(value, bool):
        raise OptionError(f"{option}={value!r} must be True or False.")
    return value


async def why(task_id: int) -> Why:
    """Return why a task waits, or what it does instead; `print` tells it in words.

    `handle.why()` says the same where there is a handle. An actor has a number too.

    Args:
        task_id: the task's number, as `aiogpu.status()` and log lines show it.

    Raises:
        OptionError: it is no number.
        NoSuchTaskError: the node has no task of that number, or none any more.
        NodeError: it was asked inside a task.
    """
    if not isinstance(task_id, int) or isinstance(task_id, bool) or task_id < 0:
        raise OptionError(
            f"aiogpu.why({task_id!r}) asks for a task's number, such as 12; "
            f"aiogpu.status() shows the numbers of those that run and wait."
        )
    session = await asked("aiogpu.why()")
    told = await session._ask().why_task(task_id)
    if told is None:
        raise NoSuchTaskError(
            f"this node has no task {task_id} that waits or runs: it has ended, or "
            f"never was. aiogpu.status() shows those that there are."
        )
    return told


class Opening(EnteredOnLoop):
    """What `init` gives: await it, or use it in `async with`."""

    def __init__(
        self, address: str | None, options: NodeOptions, ignore_reinit_error: bool
    ) -> None:
        self._address = address
        self._options = options
        self._ignore_reinit_error = ignore_reinit_error
        self._is_used = False
        self._mine: Session | None = None

    def _as_called(self) -> str:
        return "aiogpu.init(...)"

    def __await__(self) -> Generator[Any, None, Session]:
        return self._open().__await__()

    async def __aenter__(self) -> Session:
        return await self._open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._mine is not None:
            await self._mine.__aexit__(kind, error, traceback)

    async def _open(self) -> Session:
        self._is_used = True
        refuse_in_worker("aiogpu.init()")
        loop = asyncio.get_running_loop()
        session: Session | None = session_of(loop)
        if session is not None and (session.is_closing or session.has_lost_its_node):
            await session.shutdown()
            session = session_of(loop)
        if session is not None:
            if self._ignore_reinit_error:
                await session.opened()
                return session
            raise NodeRunningError(
                "this event loop has a node already. Call aiogpu.shutdown() before "
                "another init(), or say init(ignore_reinit_error=True) to share it."
            )
        session = self._mine = start_session(self._address, self._options, loop)
        try:
            await asyncio.sleep(0)  # a process is on its way, which takes longer
            from aiogpu.api import submission  # noqa: F401

            await session.opened()
        except asyncio.CancelledError:
            await session.shutdown()
            raise
        return session

    def __del__(self) -> None:
        if not self._is_used:
            warnings.warn(
                "aiogpu.init() was called but never awaited; write `await "
                "aiogpu.init(...)` or `async with aiogpu.init(...)`.",
                RuntimeWarning,
                stacklevel=2,
            )


@options_of("a node")
def init(  # noqa: D417 - all by keyword, each an option of its own
    *,
    address: str | None = None,
    num_cpus: float | None = None,
    num_gpus: int | None = None,
    resources: Mapping[str, float] | None = None,
    accelerator_type: str | None = None,
    gpu_memory: int | str | None = None,
    gpu_memory_enforce: bool = False,
    foreign: Literal["avoid", "wait", "ignore"] = "ignore",
    mps: Literal["auto", "off"] = "off",
    cpu_affinity: Literal["auto", "off"] = "auto",
    preload: Sequence[str] = "auto",
    log_to_driver: bool = True,
    cancel_grace: float = 2.0,
    spare_workers: int = 2,
    memory: int | str | None = None,
    memory_guard: bool = True,
    object_memory: int | str | None = None,
    spill_directory: str | os.PathLike[str] | None = None,
    ignore_reinit_error: bool = False,
) -> Opening:
    """Open a node for this event loop: `await` it, or `async with` it.

    Args:
        address: "local", "auto" or a socket's path to join a node that runs, "inline"
            for tests, "ray"; None: AIOGPU_ADDRESS, else "local".
        num_cpus: CPUs to share out; what this process may use unless given.
        num_gpus: GPUs to share out, maybe more than there are; those detected else.
        resources: by name: custom ones, `{"license": 2}`, or `{"neuron_cores": 4}`.
        accelerator_type, gpu_memory: of the GPUs ("A100", "80GiB") where not detected.
        gpu_memory_enforce: end a task that uses more than the `gpu_memory` it asked.
        foreign: "avoid" devices with others' processes, or "wait" for these to go.
        mps, cpu_affinity: "auto" or "off"; shares limited by MPS, CPUs near the GPUs.
        preload: modules that workers are forked with; "auto": those that prove dear.
        log_to_driver: show what tasks print, line by line.
        cancel_grace: seconds from a task's cancel to the kill of its process.
        spare_workers: processes kept ready, once tasks want one of their own.
        memory: bytes or "64GiB" for tasks that ask; 95 % of what is there else.
        memory_guard: end who uses most before memory runs out, and try him alone.
        object_memory: bytes or "8GiB" for large values; 30 % of what is there else.
        spill_directory: where values go beyond that; the temporary directory else.
        ignore_reinit_error: give this loop's node, should it have one.

    Raises:
        OptionError: an option is ill-valued; or, at the await, asks for more than the
            node has that this program joins.
        NodeError: at the await; this loop has a node already, or it cannot start.
        DeviceError: at the await; CUDA_VISIBLE_DEVICES names what is not there.
    """
    return _opening(**locals())


def _opening(address: object, ignore_reinit_error: object, **given: object) -> Opening:
    where = check_text("address", address) or default_address()
    shared = check_flag("ignore_reinit_error", ignore_reinit_error)
    return Opening(where, check_node_options(**given), shared)


async def shutdown() -> None:
    """Close this loop's node, if it has one: stop its tasks, leave nothing behind."""
    session = session_of(asyncio.get_running_loop())
    if session is not None:
        await session.shutdown()


async def cluster_resources() -> dict[str, float]:
    """All resources of the node by name, `{"CPU": 4.0, "GPU": 1.0}`.

    Raises:
        NodeError: it was asked inside a task.
    """
    return await (await asked("aiogpu.cluster_resources()")).cluster_resources()


async def available_resources() -> dict[str, float]:
    """Return what is free of each resource; 0.0 where nothing is.

    Raises:
        NodeError: it was asked inside a task.
    """
    return await (await asked("aiogpu.available_resources()")).available_resources()


async def status() -> NodeStatus:
    """Who holds what share of which device, what waits and why; `print` shows it.

    Tasks that have a worker are listed one by one, of those that wait the first 100;
    `waiting_count` and `shapes` tell of all of them.

    Raises:
        NodeError: it was asked inside a task.
    """
    return await (await asked("aiogpu.status()")).status()


async def asked(what: str) -> Session:
    """The open session of this loop, for a program's question."""
    if current.worker and session_of(asyncio.get_running_loop()) is None:
        raise error_inside_task(what)
    session = current_session()
    await session.opened()
    return session
