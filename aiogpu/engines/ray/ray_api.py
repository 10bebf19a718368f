"""The only door to Ray: what the engine needs of it, in our words.

Nothing of Ray is imported elsewhere, here when a program names a cluster. What is
called is Ray's documented interface where there is one. Questions that take their time
are asked in a thread (`asked`), so that the event loop goes on.
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
from threading import Thread
from typing import Any, Final, NamedTuple, TypeVar

import ray
from ray import exceptions
from ray.experimental import internal_kv
from ray.util import get_placement_group, placement_group, remove_placement_group
from ray.util import scheduling_strategies as strategies

from aiogpu.accelerators.types import AWS_NEURON_CORE
from aiogpu.core.model.units import TYPE_PREFIX
from aiogpu.errors import DeviceError, NodeDiedError, NodeError

NEURON: Final = "neuron_cores"
"""Ray's name, and ours, for the cores of AWS Neuron."""
NAMESPACE: Final = "aiogpu"
"""In which names of actors are that were given without a namespace."""


def check_visible(num_gpus: float | None, visible: str | None) -> None:
    """Refuse to share out more GPUs than a variable lets this machine have.

    Raises:
        DeviceError: says how many.
    """
    named = None if visible is None else [one for one in visible.split(",") if one]
    if named is not None and num_gpus is not None and num_gpus > len(named):
        raise DeviceError(
            f"num_gpus={num_gpus:g}, but CUDA_VISIBLE_DEVICES={visible!r} names "
            f"{len(named)}: ask for fewer, or unset the variable."
        )


def typed(resources: Mapping[str, float]) -> dict[str, float]:
    """What a node has, with the type of the devices that Ray does not look for."""
    of_cores = {TYPE_PREFIX + AWS_NEURON_CORE: 1.0} if NEURON in resources else {}
    return {**of_cores, **resources}


class Node(NamedTuple):
    """A node that lives.

    Attributes:
        id: in hexadecimal.
        host: its machine's name.
        total: its resources by name.
        free: what of each nobody has; None where Ray was not asked.
        labels: what was said of it.
    """

    id: str
    host: str
    total: Mapping[str, float]
    free: Mapping[str, float] | None
    labels: Mapping[str, str]


class Survey(NamedTuple):
    """The cluster at one moment.

    Attributes:
        nodes: those that live.
        demands: what tasks and actors of all programs ask for that have no place yet,
            and how many ask for it.
        coming: nodes that are being started, in words.
        failed: the last ones that could not be, in words.
        grows: whether something starts nodes as they are needed.
    """

    nodes: Sequence[Node]
    demands: Sequence[tuple[Mapping[str, float], int]]
    coming: Sequence[str]
    failed: Sequence[str]
    grows: bool


def survey_of(seen: Any, nodes: Sequence[Node], grows: bool) -> Survey:
    """The cluster as its status tells it.

    Args:
        seen: a `ClusterStatus` of Ray's.
        nodes: those that live.
        grows: whether something starts nodes as they are needed.
    """
    free = {
        one.node_id: one.available_resources()
        for one in (*seen.active_nodes, *seen.idle_nodes)
    }
    names = [
        *(f"{one.count} x {one.ray_node_type_name}" for one in seen.pending_launches),
        *(one.ray_node_type_name for one in seen.pending_nodes),
    ]
    return Survey(
        [node._replace(free=free[node.id]) for node in nodes if node.id in free],
        [
            (dict(shape.bundle), shape.count)
            for demand in seen.resource_demands.ray_task_actor_demand
            for shape in demand.bundles_by_count
        ],
        names,
        [f"{one.ray_node_type_name}: {one.details}" for one in seen.failed_launches],
        grows,
    )


def has_types(told: bytes | None) -> bool:
    """Return whether what Ray's autoscaler has told names types of nodes that may come.

    It runs beside a cluster without one as well, and mirrors its nodes: then each is of
    a type of its own.
    """
    report = json.loads(told or b"{}").get("autoscaler_report") or {}
    types = report.get("node_type_mapping") or {}
    return any(name != f"node_{node}" for node, name in types.items())


AUTH_MODE: Final = "RAY_AUTH_MODE"


AUTH_TOKEN: Final = "RAY_AUTH_TOKEN"


PRIVATE: Final = "AIOGPU_PRIVATE_CLUSTER"
"""Marks the processes of a cluster that was started for a program."""


_token: Final = secrets.token_hex(32)
"""Of clusters that this process starts, unless the user has one."""


OLDEST: Final = (2, 52)
"""The oldest release that lets an actor close when its last handle goes."""


ASKED_FOR: Final = 10
"""Seconds for the cluster to say what there is."""


Ref = Any
"""A `ray.ObjectRef`."""


Handle = Any
"""A `ray.actor.ActorHandle`."""


NOT_FOUND: Final = "Could not find any running Ray instance"
"""What Ray says where no cluster was named and none is there."""


RayError: Final = exceptions.RayError


TaskFailed: Final = exceptions.RayTaskError


Cancelled: Final = exceptions.TaskCancelledError


Crashed: Final = exceptions.WorkerCrashedError


OutOfMemory: Final = exceptions.OutOfMemoryError


ActorGroupRemoved: Final = exceptions.ActorPlacementGroupRemoved


GroupRemoved: Final = (exceptions.TaskPlacementGroupRemoved, ActorGroupRemoved)


TimedOut: Final = exceptions.GetTimeoutError


ActorGone: Final = exceptions.RayActorError


NodeGone: Final = exceptions.NodeDiedError


ObjectLost: Final = exceptions.ObjectLostError


StoreFull: Final = exceptions.ObjectStoreFullError


SetupFailed: Final = exceptions.RuntimeEnvSetupError


Affinity: Final = strategies.NodeAffinitySchedulingStrategy
"""The strategy that places a task on a node, `Affinity(id, soft=False)`."""


Unschedulable: Final = (
    exceptions.TaskUnschedulableError,
    exceptions.ActorUnschedulableError,
)


def check_release() -> None:
    """Raise `NodeError` if the Ray that is installed is too old."""
    found = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if found < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise NodeError(
            f"Ray {ray.__version__} is installed, and aiogpu needs {oldest} or newer: "
            f"pip install -U 'aiogpu[ray]'."
        )


def _is_worth_telling(record: logging.LogRecord) -> bool:
    # A program's own handlers of signals stay as they are, which is as it should be.
    return "SIGTERM handler is not set" not in record.getMessage()


logging.getLogger("ray._private.worker").addFilter(_is_worth_telling)


def is_connected() -> bool:
    """Return whether this process has joined a cluster, whoever has had it do so."""
    return bool(ray.is_initialized())


def start(options: Mapping[str, Any]) -> str:
    """Start a cluster of one node for this program, which takes some seconds.

    Gives the directory of its files.

    Raises:
        DeviceError: more GPUs are asked for than this machine lets it have.
    """
    check_visible(options.get("num_gpus"), os.environ.get("CUDA_VISIBLE_DEVICES"))
    with _private():
        context = ray.init(
            address="local",
            namespace=NAMESPACE,
            include_dashboard=False,
            logging_level="warning",
            **{**options, "resources": typed(options.get("resources") or {})},
        )
    return str(context.address_info["session_dir"])


@contextmanager
def _private() -> Iterator[None]:
    """In the block, the environment has what only a cluster that Ray starts needs.

    That is a mark, by which other programs tell that it is not for them, and a token.
    Without one, Ray writes a token to `~/.ray/auth_token`, which stays there. From then
    on all clusters of the user demand it, those of his own `ray start` as well. Ray's
    servers and workers get this one by their environment. Ray keeps the first token
    that a process has used, so it is the same for all clusters of a process.
    """
    names = (AUTH_MODE, AUTH_TOKEN, PRIVATE)
    before = {name: os.environ.get(name) for name in names}
    os.environ[PRIVATE] = "1"
    if not _has_token() and (before[AUTH_MODE] or "token").lower() == "token":
        os.environ[AUTH_TOKEN] = _token
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)  # Ray has set the mode by itself
            if value is not None:
                os.environ[name] = value


def _raylets() -> Iterator[bytes]:
    """The environments of the raylets of this machine; each cluster has one here."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            command = (process / "cmdline").read_bytes().partition(b"\0")[0]
            if command.endswith(b"/raylet"):
                yield (process / "environ").read_bytes()


def are_all_private(raylets: Sequence[bytes]) -> bool:
    """Whether some clusters run here, and all of them were started for a program."""
    mark = f"{PRIVATE}=1".encode()
    return bool(raylets) and all(mark in one.split(b"\0") for one in raylets)


def _has_token() -> bool:
    """Return whether Ray finds a token of the user's."""
    is_named = os.environ.get(AUTH_TOKEN) or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(is_named) or (Path.home() / ".ray" / "auth_token").exists()


def join(address: str | None, *, shows_output: bool) -> bool:
    """Join a cluster that runs; False if none was named and none is there.

    One that was started for a program is not joined without being named: it belongs to
    that program, may have a token of its own, and ends with it.

    Args:
        address: "host:port", or None for one that runs on this machine.
        shows_output: whether the output of tasks is shown.

    Raises:
        ConnectionError: it does not answer, or refuses.
    """
    if address is None and are_all_private(list(_raylets())):
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


def head() -> str:
    """Where the cluster's head listens, "host:port", as the cluster's nodes know it."""
    return str(ray.get_runtime_context().gcs_address)


def leave() -> None:
    """Leave the cluster; one that was started for this program ends with it."""
    ray.shutdown()


def facts() -> tuple[str, str, str]:
    """The ids of the node, the worker and the actor that this process is, if it is."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_worker_id(), context.get_actor_id() or ""


def task_id() -> str:
    """The id of the task that runs in this process, in hexadecimal."""
    return str(ray.get_runtime_context().get_task_id() or "0")


def accelerators() -> dict[str, tuple[int | str, ...]]:
    """The devices that the running task may use, by kind, where it has some."""
    found: dict[str, list[str]] = ray.get_runtime_context().get_accelerator_ids()
    return {
        kind: tuple(int(one) if one.isdecimal() else one for one in ids)
        for kind, ids in found.items()
        if ids
    }


def function(run: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    """What Ray runs as a task, by `.remote(...)` or `.options(...).remote(...)`."""
    return ray.remote(**options)(run) if options else ray.remote(run)


def actor(cls: type, options: Mapping[str, Any]) -> Any:
    """Return what Ray makes actors of, by `.remote(...)`."""
    return ray.remote(**options)(cls) if options else ray.remote(cls)


def keep(value: object) -> Ref:
    """Put a value into the object store."""
    return ray.put(value)


def fetched(ref: Ref, seconds: float | None = None) -> Any:
    """An object that is in the store of this machine; waits for it if it is not.

    Raises:
        TimedOut: for longer than that.
    """
    return ray.get(ref, timeout=seconds)


def when_done(ref: Ref, tell: Callable[[Any], object]) -> None:
    """Have it told, in another thread, what has come of an object.

    `tell` is given the value, or the exception that there is in its place.
    """
    ref.future().add_done_callback(partial(_tell, tell))


def _tell(tell: Callable[[Any], object], future: Any) -> None:
    error = future.exception()
    tell(future.result() if error is None else error)


def wait(refs: Sequence[Ref], seconds: float) -> bool:
    """Wait in this thread until one of them is there; False if time is up before.

    A task that waits so gives its CPUs back meanwhile.
    """
    ready, _ = ray.wait(list(refs), timeout=seconds, fetch_local=False)
    return bool(ready)


def cancel(ref: Ref, *, at_once: bool = False) -> None:
    """Stop what makes an object, and all that it has started.

    `at_once` kills its process; no call of an actor can be ended so.
    """
    ray.cancel(ref, force=at_once, recursive=True)


def kill(handle: Handle, *, may_restart: bool) -> None:
    """End an actor's process at once."""
    ray.kill(handle, no_restart=not may_restart)


def new_group(bundles: list[dict[str, float]], **terms: Any) -> Any:
    """Ask for a placement group; `.ready()` is an object that comes with it."""
    return placement_group(bundles, **terms)


def find_group(name: str) -> Any | None:
    """The placement group of that name."""
    try:
        return get_placement_group(name)
    except ValueError:
        return None


def remove_group(group: Any) -> None:
    """Give its bundles back; what runs in them ends."""
    remove_placement_group(group)


def within(group: Any, bundle: int) -> Any:
    """The strategy that places a task in a bundle of a group, -1 for any of them."""
    return strategies.PlacementGroupSchedulingStrategy(
        group,
        placement_group_bundle_index=bundle,
        placement_group_capture_child_tasks=False,
    )


def find_actor(name: str, namespace: str) -> Handle | None:
    """The living actor of that name."""
    try:
        return ray.get_actor(name, namespace=namespace or NAMESPACE)
    except ValueError:
        return None


def remember(name: str, told: bytes, *, replaces: bool = True) -> bool:
    """Keep bytes for whoever is on the cluster; whether there were some before."""
    put = internal_kv._internal_kv_put
    return bool(put(name, told, overwrite=replaces, namespace=NAMESPACE))


def unlearn(name: str) -> None:
    """Keep them no more."""
    internal_kv._internal_kv_del(name, namespace=NAMESPACE)


def recall(name: str) -> bytes | None:
    """Return what was kept under a name."""
    return internal_kv._internal_kv_get(name, namespace=NAMESPACE)  # type: ignore[no-any-return]


def exit_actor() -> None:
    """End the actor that this process is, once this call has ended."""
    ray.actor.exit_actor()


def id_of(handle: Handle) -> str:
    """The id of an actor, in hexadecimal."""
    return str(handle._actor_id.hex())


def nodes() -> list[Node]:
    """The nodes that live."""
    return [
        Node(
            str(node["NodeID"]),
            str(node["NodeManagerHostname"]),
            dict(node["Resources"]),
            None,
            dict(node.get("Labels", {})),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def survey() -> Survey:
    """Return what there is, what of it is free, and what waits; needs no dashboard.

    Raises:
        RayError: the cluster does not answer.
    """
    from ray.autoscaler.v2.sdk import get_cluster_status

    return survey_of(get_cluster_status(head(), ASKED_FOR), nodes(), grows())


def is_client() -> bool:
    """Whether this process uses a cluster by Ray Client, `ray.init("ray://...")`."""
    from ray.util.client import ray as client

    return bool(client.is_connected())


def grows() -> bool:
    """Return whether something starts nodes as they are needed."""
    told = internal_kv._internal_kv_get
    if told(b"__autoscaler_v2_enabled", namespace=b"__autoscaler") == b"1":
        return True
    return has_types(told(b"__autoscaling_status"))


def total() -> dict[str, float]:
    """All resources of the cluster by name."""
    return dict(ray.cluster_resources())


def available() -> dict[str, float]:
    """Return what is free of each; Ray leaves out those of which nothing is."""
    return dict(ray.available_resources())


T = TypeVar("T")


PATIENCE: Final = 15.0
"""Seconds in which a cluster that lives has answered."""


def begun(call: Callable[[], T]) -> Future[T]:
    """Return what a call will give that is made in a thread of its own."""
    answer: Future[T] = Future()
    Thread(target=_make, args=(call, answer), name="aiogpu-ask", daemon=True).start()
    return answer


class OneThread:
    """A thread in which calls are made one after the other, until it is ended."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<OneThread {self._thread.name}>"

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Return what a call will give, when those before it have been made."""
        answer: Future[T] = Future()
        self._calls.put(partial(_make, call, answer))
        return answer

    def end(self) -> None:
        """It ends when the calls have been made that it has."""
        self._calls.put(None)

    def _run(self) -> None:
        while (make := self._calls.get()) is not None:
            make()


def _make(call: Callable[[], T], answer: Future[T]) -> None:
    try:
        found = call()
    except BaseException as error:  # noqa: BLE001 - whoever asks is told
        answer.set_exception(error)
    else:
        answer.set_result(found)


async def asked(call: Callable[[], T], seconds: float = PATIENCE) -> T:
    """Return what a call gives, while the loop goes on.

    Raises:
        NodeDiedError: it has given nothing in that time, or failed.
    """
    answer = begun(call)
    waiting = asyncio.wrap_future(unless_left(answer))
    try:
        async with asyncio.timeout(seconds):
            return await waiting
    except TimeoutError as error:
        raise NodeDiedError(
            f"the Ray cluster does not answer within {seconds:g} s."
        ) from error
    except Exception as error:
        raise NodeDiedError(
            f"the Ray cluster gives no answer: {type(error).__name__}: {error}"
        ) from error


def unless_left(answer: Future[T]) -> Future[T]:
    """The same for a waiter that may leave, and with it the loop, before it comes."""
    passed_on: Future[T] = Future()

    def tell(done: Future[T]) -> None:
        if not passed_on.set_running_or_notify_cancel():
            return
        error = done.exception()
        if error is not None:
            passed_on.set_exception(error)
        else:
            passed_on.set_result(done.result())

    answer.add_done_callback(tell)
    return passed_on
