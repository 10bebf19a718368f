"""The only module that imports Ray: its calls, and this process's connection.

If a cluster is lost, Ray waits for its answer without end. So calls that may block run
in daemon threads, which do not keep the interpreter alive.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import ray
from ray import exceptions
from ray.experimental import internal_kv
from ray.util import get_placement_group, placement_group
from ray.util import scheduling_strategies as strategies

from aiogpu.engines.base import CLIENT, NodeOptions, no_client
from aiogpu.errors import NodeDiedError, NodeError, NodeStartError, OptionError

__all__ = ["exceptions"]
T = TypeVar("T")
Ref = Any
"""A `ray.ObjectRef`."""
Handle = Any
"""A `ray.actor.ActorHandle`."""

NAMESPACE: Final = "aiogpu"
"""Ray's namespace for actors that were named without one, and for stored bytes."""
OLDEST: Final = (2, 52)
"""The oldest release that calls an actor's `close` when its last handle goes."""
ANSWER_LIMIT: Final = 15.0
"""Seconds within which a living cluster answers."""


# Calls in threads


def _run(call: Callable[[], T], result: Future[T]) -> None:
    try:
        value = call()
    except BaseException as error:  # noqa: BLE001 - raised at the caller
        result.set_exception(error)
    else:
        result.set_result(value)


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call in a daemon thread; it goes on if the caller is cancelled."""
    result: Future[T] = Future()
    # A future that counts as running is not cancelled with its waiter.
    result.set_running_or_notify_cancel()
    Thread(target=_run, args=(call, result), name="aiogpu-ray", daemon=True).start()
    return await asyncio.wrap_future(result)


async def ask(call: Callable[[], T], seconds: float = ANSWER_LIMIT) -> T:
    """Query the cluster while the event loop goes on.

    Raises:
        NodeDiedError: the call failed, or did not return within `seconds`.
    """
    try:
        async with asyncio.timeout(seconds):
            return await in_thread(call)
    except TimeoutError as error:
        raise NodeDiedError(
            f"the Ray cluster does not answer within {seconds:g} s."
        ) from error
    except Exception as error:
        raise NodeDiedError(
            f"the Ray cluster gives no answer: {type(error).__name__}: {error}"
        ) from error


# Tasks, actors and objects


def remote(target: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """Make a remote function or an actor class of Ray's."""
    return ray.remote(**options)(target) if options else ray.remote(target)


put: Final = ray.put
"""Put a value into the object store; return its `Ref`."""
get: Final = ray.get
"""Return an object; wait in this thread until it is on this machine."""


def add_done_callback(ref: Ref, callback: Callable[[Any], object]) -> None:
    """Call `callback` in one of Ray's threads with the object, or its exception."""
    ref.future().add_done_callback(partial(_report, callback))


def _report(callback: Callable[[Any], object], future: Any) -> None:
    error = future.exception()
    callback(future.result() if error is None else error)


def wait(refs: Sequence[Ref], seconds: float) -> bool:
    """Wait in this thread until one of the objects exists; return False on timeout.

    A task whose main thread waits in this way returns its CPUs meanwhile.
    """
    try:
        ready, _ = ray.wait(list(refs), timeout=seconds, fetch_local=False)
    except ValueError:
        return True  # another thread has just taken the next item of a stream
    return bool(ready)


def wait_for_all(refs: Sequence[Ref]) -> None:
    """Wait in this thread until all of the objects exist, on whichever node."""
    if refs:
        ray.wait(list(refs), num_returns=len(refs), fetch_local=False)


cancel: Final = ray.cancel
"""Stop the task that produces an object, and all tasks that it has started.

`force` kills its process. Calls of actors cannot be stopped by force.
"""
kill: Final = ray.kill
"""End an actor's process at once; `no_restart=False` lets the actor restart."""
exit_actor: Final = ray.actor.exit_actor
"""End this process's actor."""


def is_cancelled() -> bool:
    """Return whether the actor's call that runs in this thread was cancelled."""
    return bool(ray.get_runtime_context().is_canceled())


def actor_id(handle: Handle) -> str:
    """Return the id of an actor, in hexadecimal."""
    return str(handle._actor_id.hex())


def find_actor(name: str, namespace: str) -> Handle | None:
    """Return the living actor with a name."""
    try:
        return ray.get_actor(name, namespace=namespace or NAMESPACE)
    except ValueError:
        return None


create_placement_group: Final = placement_group
"""Request a placement group; `.ready()` is an object that exists once it is placed."""
remove_placement_group: Final = ray.util.remove_placement_group
"""Remove a placement group; Ray ends all tasks and actors in it."""


def find_placement_group(name: str) -> Any | None:
    """Return the placement group with a name."""
    try:
        return get_placement_group(name)
    except ValueError:
        return None


def in_bundle(group: Any, bundle: int) -> Any:
    """Return the strategy that places a task in a bundle of a group; -1 is any."""
    return strategies.PlacementGroupSchedulingStrategy(
        group,
        placement_group_bundle_index=bundle,
        placement_group_capture_child_tasks=False,
    )


def store_bytes(key: str, value: bytes) -> None:
    """Keep bytes for all programs on the cluster, until it ends."""
    internal_kv._internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE)


def load_bytes(key: str) -> bytes | None:
    """Return the bytes that were kept under a key."""
    return internal_kv._internal_kv_get(key, namespace=NAMESPACE)  # type: ignore[no-any-return]


# This process in Ray


def process_ids() -> tuple[str, str, str]:
    """Return the ids of this process's node and worker, and of its actor or ""."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_worker_id(), context.get_actor_id() or ""


def task_id() -> str:
    """Return the id of the task that runs in this process, in hexadecimal."""
    return str(ray.get_runtime_context().get_task_id() or "0")


def accelerators() -> dict[str, tuple[int | str, ...]]:
    """Return the devices that the running task may use, by kind."""
    devices: dict[str, list[str]] = ray.get_runtime_context().get_accelerator_ids()
    return {
        kind: tuple(int(id_) if id_.isdecimal() else id_ for id_ in ids)
        for kind, ids in devices.items()
        if ids
    }


# Nodes and resources


class ClusterNode(NamedTuple):
    """A node.

    Attributes:
        id: its id, in hexadecimal.
        total: its resources by name.
        host: the name of its machine.
        is_alive: False for a node that the cluster has lost.
    """

    id: str
    total: Mapping[str, float]
    host: str = ""
    is_alive: bool = True


def all_nodes() -> list[ClusterNode]:
    """Return all nodes, including lost nodes."""
    return [
        ClusterNode(
            str(node["NodeID"]),
            dict(node["Resources"]),
            str(node["NodeManagerHostname"]),
            bool(node["Alive"]),
        )
        for node in ray.nodes()
    ]


def nodes_and_growth() -> tuple[list[ClusterNode], bool]:
    """Return the living nodes, and whether an autoscaler starts more."""
    return [node for node in all_nodes() if node.is_alive], _has_autoscaler()


def _has_autoscaler() -> bool:
    get_value = internal_kv._internal_kv_get
    if get_value(b"__autoscaler_v2_enabled", namespace=b"__autoscaler") == b"1":
        return True
    return names_node_types(get_value(b"__autoscaling_status"))


def names_node_types(status: bytes | None) -> bool:
    """Return whether an autoscaler's report names types of nodes that may be started.

    A cluster without an autoscaler has such a report too, with one type per existing
    node.
    """
    report = json.loads(status or b"{}").get("autoscaler_report") or {}
    types = report.get("node_type_mapping") or {}
    return any(name != f"node_{node}" for node, name in types.items())


free_resources: Final = ray.available_resources
"""Return the free amount of each resource; Ray omits resources with nothing free."""


# The options of `init`

CLUSTER_PORT: Final = 6379
"""The default port of a cluster's head."""
START_OPTIONS: Final = ("num_cpus", "num_gpus", "resources", "object_memory")
"""Options of `init` for a cluster that is started by it."""
JOIN_OPTIONS: Final = ("log_to_driver", "cancel_grace", "gpu_memory", "runtime_env")
"""Options of `init` for a program that joins a cluster."""
CLOSEST: Final = {
    "memory": "declare it at `ray start --memory`",
    "accelerator_type": "Ray detects it, or `ray start --resources` declares it",
    "spill_directory": "`ray start --object-spilling-directory` sets it",
    "preload": "a worker of Ray's imports at its first task, and is reused",
    "dashboard": "Ray has its own, by `ray start --include-dashboard=true`",
    "memory_guard": "Ray has its own, by the variables RAY_memory_monitor_*",
}
"""What comes closest on Ray to a refused option."""


def _check_options(options: NodeOptions) -> None:
    chosen, defaults = options._asdict(), NodeOptions()._asdict()
    for name, value in chosen.items():
        if value != defaults[name] and name not in START_OPTIONS + JOIN_OPTIONS:
            closest = CLOSEST.get(name, "docs/from-ray.md lists what Ray can do")
            raise OptionError(
                f"init(address='ray', {name}=...): a Ray cluster has no such option; "
                f"leave it out ({closest})."
            )


def _check_release() -> None:
    release = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if release < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise NodeError(
            f"Ray {ray.__version__} is installed, and aiogpu needs {oldest} or newer: "
            f"pip install -U 'aiogpu[ray]'."
        )


def _start_options(options: NodeOptions) -> dict[str, Any]:
    """Return the options of `ray.init` for a new cluster."""
    ray_options: dict[str, Any] = {}
    if options.num_cpus is not None:
        ray_options["num_cpus"] = _whole("num_cpus", options.num_cpus)
    if options.num_gpus is not None:
        ray_options["num_gpus"] = options.num_gpus
    if options.resources:
        ray_options["resources"] = {
            name: _whole(f"resources[{name!r}]", value)
            for name, value in options.resources.items()
        }
    if options.object_memory is not None:
        ray_options["object_store_memory"] = options.object_memory
    return ray_options


def _whole(option: str, value: float) -> int:
    if value != int(value):
        raise OptionError(
            f"init(address='ray', {option}={value!r}): a Ray node has whole quantities "
            f"only; tasks may request fractions."
        )
    return int(value)


# Starting, joining and leaving


def _is_worth_logging(record: logging.LogRecord) -> bool:
    # Ray warns that it keeps a program's signal handlers, which is intended.
    return "SIGTERM handler is not set" not in record.getMessage()


logging.getLogger("ray._private.worker").addFilter(_is_worth_logging)


def head_address() -> str:
    """Return where the cluster's head listens, "host:port"."""
    return str(ray.get_runtime_context().gcs_address)


def is_client() -> bool:
    """Return whether this process uses Ray Client, `ray.init("ray://...")`."""
    from ray.util.client import ray as client

    return bool(client.is_connected())


def connect(options: Mapping[str, Any]) -> None:
    """Join a cluster, or start one; see `ray.init`, whose options these are."""
    if options.get("address") == "local":
        options = {"include_dashboard": False, **options}
    ray.init(namespace=NAMESPACE, logging_level="warning", **options)


leave: Final = ray.shutdown
"""Leave the cluster; a cluster that was started for this program ends."""
is_connected: Final = ray.is_initialized
"""Return whether this process is connected to a cluster, by any code."""


def host_and_port(address: str) -> tuple[str, int]:
    """Split an address.

    Raises:
        NodeError: the address has no host and port.
    """
    parts = urlsplit(f"//{address}")
    with suppress(ValueError):
        if parts.hostname and parts.port:
            return parts.hostname, parts.port
    raise NodeError(
        f"RAY_ADDRESS={address!r} names no host and port; write host:{CLUSTER_PORT}, "
        f"as `ray start --head` has printed it."
    )


async def check_reachable(address: str, seconds: float) -> None:
    """Check that a server accepts connections at a head's address.

    Ray itself would try for a long time, and end the program after a minute without a
    head.

    Raises:
        NodeError: none does within `seconds`.
    """
    host, port = host_and_port(address)
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
        await writer.wait_closed()
    except OSError as error:  # a TimeoutError too
        problem = str(error) or f"no answer within {seconds:g} s"
        raise NodeError(
            f"init(address='ray') with RAY_ADDRESS={address!r}: no Ray cluster answers "
            f"at {host}:{port}: {problem}. Is its head started, by `ray start --head "
            f"--port={port}`? A head that has just been started takes some seconds to "
            f"listen."
        ) from error


# The connection of this process

REACH_LIMIT: Final = 10.0
"""Seconds within which a head answers."""
JOIN_LIMIT: Final = 120.0
"""Seconds for joining a cluster that answers; it takes 5, or 50 if it is busy."""
LEAVE_LIMIT: Final = 60.0
"""Seconds for leaving a lost cluster; Ray itself takes up to 20."""
PORT_HINT: Final = (
    f" Is it the port of the cluster itself, {CLUSTER_PORT} unless `ray start --port` "
    f"has said otherwise? A cluster with tokens needs RAY_AUTH_MODE=token, and the "
    f"token in RAY_AUTH_TOKEN or ~/.ray/auth_token."
)


class _Turns:
    """The thread that joins and leaves clusters, one call after the other.

    Ray's servers end with the thread that has started them.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: Thread | None = None

    def run(self, call: Callable[[], T]) -> Future[T]:
        """Run a call after those before."""
        result: Future[T] = Future()
        result.set_running_or_notify_cancel()
        if self._thread is None or not self._thread.is_alive():  # as in a fork
            self._thread = Thread(target=self._work, name="aiogpu-ray", daemon=True)
            self._thread.start()
        self._calls.put(partial(_run, call, result))
        return result

    def _work(self) -> None:
        while True:
            self._calls.get()()


class RayConnection:
    """The process's connection to Ray, shared by the engines of its event loops.

    When its last user has gone, a cluster that aiogpu has joined or started is left.
    """

    def __init__(self) -> None:
        self._users: set[object] = set()
        self._options: Mapping[str, Any] = {}  # by which the cluster was joined
        self._turns = _Turns()
        self._is_own = False  # False for the user's own `ray.init`
        self._pid = 0  # differs in a fork

    def __repr__(self) -> str:
        return f"<RayConnection with {len(self._users)} users>"

    async def open(self, user: object, options: NodeOptions) -> None:
        """Join the cluster, or start one.

        Raises:
            NodeError: the cluster does not answer, or Ray is too old.
            OptionError: Ray has no such option, or the address is of Ray Client.
        """
        _check_release()
        _check_options(options)
        named = os.environ.get("RAY_ADDRESS", "")
        if named.startswith(CLIENT):
            raise OptionError(no_client(f"RAY_ADDRESS={named!r}"))
        given = _start_options(options)
        is_started = bool(given)
        if options.runtime_env is not None:
            given["runtime_env"] = dict(options.runtime_env)
        if await self._has_joined():
            self._check_existing(given)
        else:
            at = "" if is_started or ":" not in named else named
            if at:
                await check_reachable(at, REACH_LIMIT)
            place = {"address": "local"} if is_started else {}
            more = {**place, "log_to_driver": options.log_to_driver}
            await self._join({**given, **more}, at)
            self._options = given
        self._users.add(user)
        self._pid = os.getpid()

    async def _has_joined(self) -> bool:
        """Return whether this process is in a cluster, once it has left the last."""
        try:
            async with asyncio.timeout(LEAVE_LIMIT):
                return await asyncio.wrap_future(self._turns.run(is_connected))
        except TimeoutError as error:
            raise NodeError(
                f"init(address='ray'): Ray has not left the lost cluster within "
                f"{LEAVE_LIMIT:g} s; restart the program."
            ) from error

    def _check_existing(self, given: Mapping[str, Any]) -> None:
        """Check that the existing connection of this process can be used."""
        if is_client():
            raise OptionError(no_client("ray.init('ray://...') in this program"))
        if self._users and self._pid != os.getpid():
            raise NodeError(
                "init(address='ray'): this process is a fork of one that is in a Ray "
                "cluster, and Ray works only in the parent. Start a new interpreter, "
                "as multiprocessing's 'spawn' does."
            )
        if given and given != self._options:
            raise NodeError(
                f"init(address='ray', {next(iter(given))}=...): this process is in a "
                f"Ray cluster already, which was joined without it. Leave the option "
                f"out, or shut the other cluster down first."
            )

    async def _join(self, options: Mapping[str, Any], at: str) -> None:
        self._is_own = True
        where = f"at {at}" if at else "on this machine"
        hint = PORT_HINT if at else ""
        joined = self._turns.run(partial(connect, options))
        try:
            async with asyncio.timeout(JOIN_LIMIT if at else None):
                await asyncio.wrap_future(joined)
        except TimeoutError as error:
            self._leave()
            raise NodeError(
                f"init(address='ray'): what answers {where} was not joined within "
                f"{JOIN_LIMIT:g} s.{hint} The head's logs may say why; by default they "
                f"are in /tmp/ray/session_latest/logs."
            ) from error
        except (OSError, RuntimeError, ValueError, exceptions.RayError) as error:
            self._leave()
            raise NodeStartError(
                f"init(address='ray'): no cluster could be joined or started {where}: "
                f"{type(error).__name__}: {error}.{hint}"
            ) from error
        except asyncio.CancelledError:
            await _end(self._leave())
            raise

    def lose(self, user: object) -> None:
        """Leave a lost cluster, without waiting."""
        if self._is_last(user):
            self._leave()

    async def close(self, user: object) -> None:
        """Leave the cluster if this is its last user and aiogpu has connected it."""
        if self._is_last(user):
            await _end(self._leave())

    def close_now(self, user: object) -> None:
        """Leave the cluster at the interpreter's exit, even if it has other users."""
        if user in self._users and self._is_own and self._pid == os.getpid():
            self._leave().result()

    def _is_last(self, user: object) -> bool:
        """Remove a user; return whether the connection is to be closed."""
        if user not in self._users or self._pid != os.getpid():
            return False
        self._users.remove(user)
        return not self._users and self._is_own

    def _leave(self) -> Future[None]:
        self._is_own, self._options = False, {}
        return self._turns.run(leave)


async def _end(leaving: Future[None]) -> None:
    """Wait until a cluster was left, even if this is cancelled.

    Otherwise processes would be left behind.
    """
    left = asyncio.wrap_future(leaving)
    try:
        await asyncio.shield(left)
    except asyncio.CancelledError:
        await asyncio.wait([left])
        raise


connection: Final = RayConnection()
"""The connection of this process."""
