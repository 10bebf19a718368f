"""The only module that imports Ray: its calls, and this process's connection.

If a cluster is lost, Ray waits for its answer without end. So calls that may block run
in daemon threads, which do not keep the interpreter alive.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from shutil import rmtree
from threading import Thread
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit

import ray
from ray import exceptions
from ray.experimental import internal_kv
from ray.util import get_placement_group, placement_group
from ray.util import scheduling_strategies as strategies

from aiogpu.accelerators.types import AWS_NEURON_CORE
from aiogpu.core.model.units import TYPE_PREFIX
from aiogpu.engines.base import CLIENT, NodeOptions, no_client
from aiogpu.errors import (
    DeviceError,
    NodeDiedError,
    NodeError,
    NodeStartError,
    OptionError,
)

__all__ = ["exceptions"]
T = TypeVar("T")
Ref = Any
"""A `ray.ObjectRef`."""
Handle = Any
"""A `ray.actor.ActorHandle`."""

NAMESPACE: Final = "aiogpu"
"""Ray's namespace for actors that were named without one, and for stored bytes."""
NEURON_CORES: Final = "neuron_cores"
"""Ray's name, and aiogpu's, for the cores of AWS Neuron."""
OLDEST: Final = (2, 52)
"""The oldest release that calls an actor's `close` when its last handle goes."""
ANSWER_LIMIT: Final = 15.0
"""Seconds within which a living cluster answers."""


# Calls in threads


def start_call(call: Callable[[], T]) -> Future[T]:
    """Run a call in a daemon thread; its future cannot be cancelled."""
    thread = SerialThread("aiogpu-ray-call")
    result = thread.submit(call)
    thread.end()
    return result


async def ask(call: Callable[[], T], seconds: float = ANSWER_LIMIT) -> T:
    """Run a call in a thread while the event loop goes on.

    Raises:
        NodeDiedError: the call failed, or did not return within `seconds`.
    """
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(start_call(call))
    except TimeoutError as error:
        raise NodeDiedError(
            f"the Ray cluster does not answer within {seconds:g} s."
        ) from error
    except Exception as error:
        raise NodeDiedError(
            f"the Ray cluster gives no answer: {type(error).__name__}: {error}"
        ) from error


class SerialThread:
    """A daemon thread that runs calls one after the other."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = Thread(target=self._run_calls, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call after the earlier ones; its future cannot be cancelled."""
        result: Future[T] = Future()
        # A future that counts as running is not cancelled with its waiter.
        result.set_running_or_notify_cancel()
        self._calls.put(partial(_run, call, result))
        return result

    def end(self) -> None:
        """End the thread after the calls that it has."""
        self._calls.put(None)

    def _run_calls(self) -> None:
        while (run := self._calls.get()) is not None:
            run()


def _run(call: Callable[[], T], result: Future[T]) -> None:
    try:
        value = call()
    except BaseException as error:  # noqa: BLE001 - raised at the caller
        result.set_exception(error)
    else:
        result.set_result(value)


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

    A task that waits in this way returns its CPUs meanwhile.
    """
    ready, _ = ray.wait(list(refs), timeout=seconds, fetch_local=False)
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


def is_cancelled() -> bool:
    """Return whether the actor's call that runs in this thread was cancelled."""
    return bool(ray.get_runtime_context().is_canceled())


exit_actor: Final = ray.actor.exit_actor
"""End this process's actor."""


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


def find_placement_group(name: str) -> Any | None:
    """Return the placement group with a name."""
    try:
        return get_placement_group(name)
    except ValueError:
        return None


remove_placement_group: Final = ray.util.remove_placement_group
"""Remove a placement group; Ray ends all tasks and actors in it."""


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


def nodes() -> list[ClusterNode]:
    """Return the living nodes."""
    return [node for node in all_nodes() if node.is_alive]


def has_autoscaler() -> bool:
    """Return whether an autoscaler starts nodes when they are needed."""
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


total_resources: Final = ray.cluster_resources
"""Return all resources of the cluster by name."""
free_resources: Final = ray.available_resources
"""Return the free amount of each resource; Ray omits resources with nothing free."""


# Starting and joining a cluster

AUTH_MODE: Final = "RAY_AUTH_MODE"
AUTH_TOKEN: Final = "RAY_AUTH_TOKEN"
PRIVATE: Final = "AIOGPU_PRIVATE_CLUSTER"
"""Marks the processes of a cluster that was started for one program."""
_token: Final = secrets.token_hex(32)
"""For clusters that this process starts, unless the user has a token."""
NOT_FOUND: Final = "Could not find any running Ray instance"
"""Ray's message if no address was given and no cluster runs."""
CLUSTER_PORT: Final = 6379
"""The default port of a cluster's head."""
HEADER: Final = 9
"""Bytes of the header of an HTTP/2 frame; the fourth is the frame's kind."""
SETTINGS: Final = 4
"""The kind of a server's first frame."""
GREETING: Final = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, SETTINGS)) + bytes(5)
)
"""The first bytes that a client sends."""


def _is_worth_logging(record: logging.LogRecord) -> bool:
    # Ray warns that it keeps a program's signal handlers, which is intended.
    return "SIGTERM handler is not set" not in record.getMessage()


logging.getLogger("ray._private.worker").addFilter(_is_worth_logging)


is_connected: Final = ray.is_initialized
"""Return whether this process is connected to a cluster, by any code."""


def is_client() -> bool:
    """Return whether this process uses Ray Client, `ray.init("ray://...")`."""
    from ray.util.client import ray as client

    return bool(client.is_connected())


def head_address() -> str:
    """Return where the cluster's head listens, "host:port"."""
    return str(ray.get_runtime_context().gcs_address)


def start(options: Mapping[str, Any]) -> str:
    """Start a cluster of one node for this program, which takes some seconds.

    Returns:
        The directory of its files.

    Raises:
        DeviceError: more GPUs are requested than this process may use.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = None if visible is None else [name for name in visible.split(",") if name]
    num_gpus = options.get("num_gpus") or 0
    if names is not None and num_gpus > len(names):
        raise DeviceError(
            f"num_gpus={num_gpus:g}, but CUDA_VISIBLE_DEVICES={visible!r} names "
            f"{len(names)}: ask for fewer, or unset the variable."
        )
    resources = dict(options.get("resources") or {})
    if NEURON_CORES in resources:  # Ray does not detect their type
        resources.setdefault(TYPE_PREFIX + AWS_NEURON_CORE, 1.0)
    with _private_environment():
        context = ray.init(
            address="local",
            namespace=NAMESPACE,
            include_dashboard=False,
            logging_level="warning",
            **{**options, "resources": resources},
        )
    return str(context.address_info["session_dir"])


@contextmanager
def _private_environment() -> Iterator[None]:
    """Set the mark and the token that only the servers of a new cluster need.

    Without a token Ray writes one to `~/.ray/auth_token`. All later clusters of the
    user would require it, including those of the user's own `ray start`. Servers and
    workers get this token by their environment. Ray keeps the first token that a
    process has used, so all clusters of this process share one token.
    """
    names = (AUTH_MODE, AUTH_TOKEN, PRIVATE)
    before = {name: os.environ.get(name) for name in names}
    os.environ[PRIVATE] = "1"
    has_token = (
        before[AUTH_TOKEN]
        or os.environ.get("RAY_AUTH_TOKEN_PATH")
        or (Path.home() / ".ray" / "auth_token").exists()
    )
    if not has_token and (before[AUTH_MODE] or "token").lower() == "token":
        os.environ[AUTH_TOKEN] = _token
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)  # Ray has set the mode by itself
            if value is not None:
                os.environ[name] = value


def _runs_private_clusters_only() -> bool:
    """Return whether clusters run on this machine, and all are private to a program."""
    environments = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            command = (process / "cmdline").read_bytes().partition(b"\0")[0]
            if command.endswith(b"/raylet"):
                environments.append((process / "environ").read_bytes())
    mark = f"{PRIVATE}=1".encode()
    return bool(environments) and all(mark in e.split(b"\0") for e in environments)


def join(address: str | None, *, shows_output: bool) -> bool:
    """Join a running cluster; return False if no address was given and none runs.

    A cluster that was started for one program is joined only by its address: it may
    have its own token, and ends with its program.

    Args:
        address: "host:port", or None for a cluster on this machine.
        shows_output: whether the output of tasks is shown.

    Raises:
        ConnectionError: the cluster does not answer, or refuses.
    """
    if address is None and _runs_private_clusters_only():
        return False
    try:
        ray.init(
            address=address or "auto",
            namespace=NAMESPACE,
            logging_level="warning",
            log_to_driver=shows_output,
        )
    except ConnectionError as error:
        if address is None and NOT_FOUND in str(error):
            return False
        raise
    return True


leave: Final = ray.shutdown
"""Leave the cluster; a cluster that was started for this program ends."""


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
    """Check that a head answers at an address.

    Ray itself would try for a long time, and end the program after a minute without a
    head. Its servers use HTTP/2, in which the server first sends a settings frame.

    Raises:
        NodeError: no head answers within `seconds`.
    """
    host, port = host_and_port(address)
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                    return  # only Ray has the certificates of the server
                writer.write(GREETING)
                header = await reader.readexactly(HEADER)
            finally:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()
        if header[3] == SETTINGS:
            return
        problem = f"the server is not Ray, and answers {header!r}"
    except TimeoutError:
        problem = f"no answer within {seconds:g} s"
    except asyncio.IncompleteReadError as error:
        problem = f"the server is not Ray, and answers {error.partial!r}"
    except OSError as error:
        problem = str(error) or type(error).__name__
    raise NodeError(
        f"init(address='ray') with RAY_ADDRESS={address!r}: no Ray cluster answers at "
        f"{host}:{port}: {problem}. Is its head started, by `ray start --head "
        f"--port={port}`? A head that has just been started takes some seconds to "
        f"listen."
    )


# The connection of this process

REACH_LIMIT: Final = 10.0
"""Seconds within which a head answers."""
JOIN_LIMIT: Final = 120.0
"""Seconds for joining a cluster that answers; it takes 5, or 50 if it is busy."""
LEAVE_LIMIT: Final = 60.0
"""Seconds for leaving a lost cluster; Ray itself takes up to 20."""
PORT_HINT: Final = (
    f" Is it the port of the cluster itself, {CLUSTER_PORT} unless `ray start --port` "
    f"has said otherwise?"
)
TOKEN_HINT: Final = (
    " By what Ray says, the cluster has tokens, and this program sends none of them. "
    "Start it with RAY_AUTH_MODE=token in its environment, and the cluster's token in "
    "RAY_AUTH_TOKEN, or in ~/.ray/auth_token."
)
START_OPTIONS: Final = ("num_cpus", "num_gpus", "resources", "object_memory")
"""Options of `init` for a cluster that is started by it."""
JOIN_OPTIONS: Final = ("log_to_driver", "cancel_grace")
"""Options of `init` for a program that joins a cluster."""


class RayConnection:
    """The process's connection to Ray, shared by the engines of its event loops.

    When its last user has gone, a cluster that aiogpu has joined or started is left.
    """

    def __init__(self) -> None:
        self._users: set[object] = set()
        self._is_ours = False
        self._options: dict[str, Any] = {}  # of the cluster that was started
        self._session = ""  # the directory of this cluster's files
        # Ray's servers end with the thread that has started them, so it is kept.
        self._thread: SerialThread | None = None
        self._pid = 0  # differs in a fork
        self._leaving: Future[None] | None = None  # the departure from the last cluster

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
        own = _start_options(options)
        named = os.environ.get("RAY_ADDRESS", "")
        address = named if ":" in named and not own else None
        if address is not None and address.startswith(CLIENT):
            raise OptionError(no_client(f"RAY_ADDRESS={address!r}"))
        await self._left_before()
        if is_connected():
            self._check_existing(own)
        else:
            await self._connect(address, own, shows_output=options.log_to_driver)
            self._options = own
        self._users.add(user)
        self._pid = os.getpid()

    def _check_existing(self, own: Mapping[str, Any]) -> None:
        """Check that the existing connection of this process can be used."""
        if is_client():
            raise OptionError(no_client("ray.init('ray://...') in this program"))
        if self._users and self._pid != os.getpid():
            raise NodeError(
                "init(address='ray'): this process is a fork of one that is in a Ray "
                "cluster, and Ray works only in the parent. Start a new interpreter, "
                "as multiprocessing's 'spawn' does."
            )
        if own and own != self._options:
            raise NodeError(
                f"init(address='ray', {next(iter(own))}=...): this process is in a Ray "
                f"cluster already, whose resources are fixed. Leave the option out, or "
                f"shut the other cluster down first."
            )

    async def _connect(
        self, address: str | None, own: Mapping[str, Any], *, shows_output: bool
    ) -> None:
        if address is not None:
            await check_reachable(address, REACH_LIMIT)
        self._thread = SerialThread("aiogpu-ray")
        connect = partial(self._join_or_start, address, own, shows_output=shows_output)
        joining = self._thread.submit(connect)
        try:
            async with asyncio.timeout(None if address is None else JOIN_LIMIT):
                await asyncio.wrap_future(joining)
        except BaseException as error:
            leaving = self._start_leaving()
            if address is None:
                # Wait for the end of the start: a partial start would leave processes
                # behind.
                await asyncio.wait([asyncio.wrap_future(leaving)])
            if not isinstance(error, TimeoutError):
                raise
            raise NodeError(
                f"init(address='ray'): what answers at {address} was not joined within "
                f"{JOIN_LIMIT:g} s.{PORT_HINT} A head's logs may say why; by default "
                f"they are in /tmp/ray/session_latest/logs."
            ) from error
        self._is_ours = True

    def _join_or_start(
        self, address: str | None, own: Mapping[str, Any], *, shows_output: bool
    ) -> None:
        try:
            if own or not join(address, shows_output=shows_output):
                self._session = start({**own, "log_to_driver": shows_output})
        except DeviceError:
            raise
        except (OSError, RuntimeError, ValueError, exceptions.RayError) as error:
            where = f"at {address}" if address else "on this machine"
            hint = PORT_HINT if address else ""
            if address and "AuthenticationError" in str(error.__cause__):
                hint = TOKEN_HINT
            raise NodeStartError(
                f"init(address='ray'): no cluster could be joined or started {where}: "
                f"{type(error).__name__}: {error}.{hint}"
            ) from error

    def lose(self, user: object) -> None:
        """Leave a lost cluster, without waiting."""
        if self._release(user):
            self._start_leaving()

    async def close(self, user: object) -> None:
        """Leave the cluster if this is its last user and aiogpu has connected it."""
        if self._release(user):
            leaving = asyncio.wrap_future(self._start_leaving())
            try:
                await asyncio.shield(leaving)
            except asyncio.CancelledError:
                # Wait for the end of the shutdown: a partial one would leave processes
                # behind.
                await asyncio.wait([leaving])
                raise

    def close_now(self, user: object) -> None:
        """Leave the cluster at the interpreter's exit, even if it has other users."""
        if user in self._users and self._is_ours and self._pid == os.getpid():
            self._is_ours = False
            self._start_leaving().result()

    def _release(self, user: object) -> bool:
        """Remove a user; return whether the connection is to be closed."""
        if user not in self._users or self._pid != os.getpid():
            return False
        self._users.remove(user)
        if self._users or not self._is_ours:
            return False
        self._is_ours = False
        return True

    def _start_leaving(self) -> Future[None]:
        """Leave the cluster in the thread that has joined or started it."""
        thread, self._thread = self._thread, None
        assert thread is not None, self
        self._leaving = thread.submit(self._leave)
        thread.end()
        return self._leaving

    def _leave(self) -> None:
        if is_connected():
            leave()
        session, self._session, self._options = self._session, "", {}
        # Ray leaves its sockets and port files behind. Logs are kept on purpose.
        for entry in Path(session).iterdir() if session else ():
            if not entry.is_dir() or entry.is_symlink():
                entry.unlink(missing_ok=True)
            elif entry.name != "logs":
                rmtree(entry, ignore_errors=True)

    async def _left_before(self) -> None:
        """Wait until the last cluster was left: a process can be in one only."""
        if self._leaving is None:
            return
        leaving = asyncio.wrap_future(self._leaving)
        await asyncio.wait([leaving], timeout=LEAVE_LIMIT)
        if not leaving.done():
            raise NodeError(
                f"init(address='ray'): Ray has not left the lost cluster within "
                f"{LEAVE_LIMIT:g} s; restart the program."
            )
        self._leaving = None


connection: Final = RayConnection()
"""The connection of this process."""


def _check_options(options: NodeOptions) -> None:
    chosen, defaults = options._asdict(), NodeOptions()._asdict()
    for name, value in chosen.items():
        if value != defaults[name] and name not in START_OPTIONS + JOIN_OPTIONS:
            raise OptionError(
                f"init(address='ray', {name}=...): a Ray cluster has no such option; "
                f"leave it out (docs/engines.md lists what each engine can do)."
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
