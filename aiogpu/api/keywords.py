"""The options as keywords, for type checkers and readers.

`python -m tests.docs.test_api_page` writes this file, from the tables of `api.options`
and `api.node`. Nothing imports it at run time: user modules import `api.options` in
every worker, and each annotation here would cost time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypedDict

from aiogpu.api.options import GpuWhere
from aiogpu.core.model.request import PlacementGroupSpec


class Placement(Protocol):
    """The result of `aiogpu.placement(...)`, in code with a loop or without."""

    def placement_group_of(self) -> PlacementGroupSpec:
        """Return the specification."""


RetryOom = Literal["exclusive"] | Sequence[Literal["share", "exclusive"]]
RetryExceptions = bool | type[Exception] | Sequence[type[Exception]]


class _Reserving(TypedDict, total=False):
    """The options of tasks, actors, leases and gangs."""

    num_cpus: float | None
    num_gpus: float | None
    memory: int | str | None
    resources: Mapping[str, float] | None
    accelerator_type: str | None
    gpu_memory: int | str | None
    name: str | None
    priority: int | None


class _Common(_Reserving, total=False):
    """The options of both tasks and actors."""

    gpu_where: GpuWhere | None
    gpu_strategy: Literal["pack", "spread"] | None
    runtime_env: Mapping[str, Mapping[str, str]] | None
    lifetime: Literal["detached"] | None
    placement: Placement | None
    bundle: int | None
    scheduling_strategy: object | None
    label_selector: Mapping[str, str] | None


class Choice(TypedDict, total=False):
    """An entry of `any_of`: a whole request.

    Attributes:
        num_cpus, num_gpus, memory, resources, accelerator_type, gpu_where, gpu_memory,
            max_calls: as for a task.
    """

    num_cpus: float
    num_gpus: float
    memory: int | str
    resources: Mapping[str, float]
    accelerator_type: str
    gpu_where: GpuWhere
    gpu_memory: int | str
    max_calls: int


class Options(_Common, total=False):
    """The options of a task, as `@remote(...)` and `.options(...)` take them.

    Counts are at most 2_147_483_647 (2**31 - 1), `num_returns` 100_000; times are at
    most 1_000_000_000 seconds.

    Attributes:
        num_cpus: CPUs, may be a fraction; default 1.
        num_gpus: below 1 a share of one GPU, otherwise whole GPUs; default 0.
        memory: main memory, in bytes or as a text such as "6GiB". When the machine runs
            short of memory, a task that uses more than this is ended first
            (`OutOfMemoryError`) and retried alone, or beside others if these have not
            ended in 30 s.
        resources: amounts of other resources by name: `{"license": 1}`,
            `{"neuron_cores": 2}`.
        accelerator_type: only devices of this type, such as "A100".
        gpu_where: only GPUs that meet all conditions: `{"memory": "40GiB",
            "compute_capability": "8.0", "name": "*H100*"}`; the first two are minimums.
        gpu_memory: memory on each GPU, with or instead of `num_gpus`: bytes, "6GiB", or
            "share" for the same fraction as `num_gpus`. Frameworks are limited to it.
        retry_oom: "exclusive": when GPU memory runs out, retry once on a whole GPU;
            `["share", "exclusive"]`: before this, once on twice the share.
        any_of: requests of which the first that is free is taken, the most wanted
            first: `[{"num_gpus": 1}, {"num_cpus": 8}]`; instead of the options above.
        gpu_strategy: which GPU a share is taken from: "pack" (default), the fullest GPU
            with room; "spread", the emptiest.
        max_calls: calls of the function before its worker process is replaced, 0 for no
            limit; default 1 with GPUs, else 0.
        max_retries: retries after the worker has died; default 3, -1 for no limit.
        retry_exceptions: exceptions that also cause a retry: True for all, or classes.
        num_returns: number of results, each with its own handle; default 1.
        max_buffered: items that a generator may be ahead of its consumer; default 64.
        name: name in logs, errors and `status()`; default the function's name.
        priority: tasks with a higher number start first; default 0.
        timeout: seconds from `.remote()` until the task is stopped, time in the queue
            included; default no limit.
        run_timeout: seconds of running until the task is stopped; starts again with
            each retry; default no limit.
        cancel_grace: seconds between a cancel or timeout and the kill of the process;
            default the `cancel_grace` of `init`.
        stop_grace: seconds that the task may go on when the program or node stops;
            `get_runtime_context().is_stopping` is True meanwhile; default 0.
        runtime_env: `{"env_vars": {"A": "1"}}`, environment variables of the worker.
        setup: plain function without arguments that runs once in each worker process,
            before the first task of the function; errors are `WorkerSetupError`.
        lifetime: "detached": the task may outlive the task that started it.
        placement: the `aiogpu.placement(...)` to run in. Without `num_cpus` the task
            asks for a CPU only if the bundle has one.
        bundle: index of the bundle, from 0; default any bundle that fits.
        scheduling_strategy: on a Ray cluster, "SPREAD", "DEFAULT" or one of
            `ray.util.scheduling_strategies`, such as node affinity; refused elsewhere.
        label_selector: on a Ray cluster, labels of the node:
            `{"ray.io/accelerator-type": "H100"}`; refused elsewhere.
    """

    retry_oom: RetryOom | None
    any_of: Sequence[Choice] | None
    max_calls: int | None
    max_retries: int | None
    retry_exceptions: RetryExceptions | None
    num_returns: int | None
    max_buffered: int | None
    timeout: float | None
    run_timeout: float | None
    cancel_grace: float | None
    stop_grace: float | None
    setup: Callable[[], object] | None


class ActorKeywords(_Common, total=False):
    """The options of an actor, as `@remote(...)` and `.options(...)` take them.

    Counts are at most 2_147_483_647 (2**31 - 1).

    Attributes:
        num_cpus: CPUs held while the actor lives. By default one CPU must be free to
            start the actor, and none is held.
        num_gpus, memory, resources: as for a task, held while the actor lives.
        accelerator_type, gpu_where: as for a task.
        gpu_memory: as for a task, held while the actor lives.
        gpu_strategy: as for a task.
        name: name for `get_actor`; free again when the actor is dead.
        priority, runtime_env: as for a task.
        lifetime: "detached": the actor outlives its handles and its program, until it
            is killed or its node ends.
        placement, bundle, scheduling_strategy, label_selector: as for a task.
        namespace: namespace of the name; default the program's own.
        get_if_exists: return the living actor with this name, if there is one.
        max_restarts: restarts after the process has died; default 0, -1 for no limit.
        max_task_retries: retries of a call that was running when the process died;
            default 0, -1 for no limit.
        evict_after: the actor may leave the node when nobody calls it and others wait
            for what it holds, at the earliest so many seconds after its constructor has
            returned; its next call brings it back; default None: it always stays.
        max_concurrency: calls that run at once: plain methods in threads (default 1),
            coroutine methods interleaved (default 1000).
        concurrency_groups: calls that run at once in each named group, for
            `@aiogpu.method(concurrency_group=...)`.
    """

    namespace: str | None
    get_if_exists: bool | None
    max_restarts: int | None
    max_task_retries: int | None
    evict_after: float | None
    max_concurrency: int | None
    concurrency_groups: Mapping[str, int] | None


class AnyKeywords(Options, ActorKeywords, total=False):
    """The options of `@remote(...)`, which may decorate a function or a class."""


class MethodCallKeywords(TypedDict, total=False):
    """The options of a method's calls, as `actor.method.options(...)` takes them.

    Attributes:
        num_returns: as for a task.
        concurrency_group: as for a method.
    """

    num_returns: int | None
    concurrency_group: str | None


class MethodKeywords(MethodCallKeywords, total=False):
    """The options of a method, as `@aiogpu.method(...)` takes them.

    Attributes:
        num_returns, max_buffered: as for a task.
        run_timeout: seconds of running until the caller gets `TaskTimeoutError`; a
            chunk of `map` has this time for all its items together; default no limit.
        concurrency_group: one of the class's `concurrency_groups`.
    """

    max_buffered: int | None
    run_timeout: float | None


class LeaseKeywords(_Reserving, total=False):
    """The options of a lease, as `lease(...)` takes them.

    Attributes:
        num_cpus: CPUs, may be a fraction; default 0.
        num_gpus: as for a task.
        memory: main memory, in bytes or as a text such as "6GiB".
        resources, accelerator_type, gpu_where, gpu_memory, gpu_strategy: as for a task.
        name: name in `status()`; default "lease".
        priority: requests with a higher number are served first; default 0.
        timeout: seconds to wait for the lease; default no limit.
    """

    gpu_where: GpuWhere | None
    gpu_strategy: Literal["pack", "spread"] | None
    timeout: float | None


class GangKeywords(_Reserving, total=False):
    """The options of the ranks of a gang, as `gang(...)` takes them.

    Attributes:
        num_cpus, num_gpus, memory, resources, accelerator_type, gpu_memory, max_calls,
            name, priority, timeout, run_timeout, cancel_grace, stop_grace, runtime_env,
            setup: as for a task.
        max_restarts, max_concurrency, concurrency_groups: as for an actor.
    """

    max_calls: int | None
    timeout: float | None
    run_timeout: float | None
    cancel_grace: float | None
    stop_grace: float | None
    runtime_env: Mapping[str, Mapping[str, str]] | None
    setup: Callable[[], object] | None
    max_restarts: int | None
    max_concurrency: int | None
    concurrency_groups: Mapping[str, int] | None


class InitKeywords(TypedDict, total=False):
    """The options of a node, as `init(...)` takes them.

    Attributes:
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

    address: str | None
    num_cpus: float | None
    num_gpus: int | None
    resources: Mapping[str, float] | None
    accelerator_type: str | None
    gpu_memory: int | str | None
    gpu_memory_enforce: bool
    foreign: Literal["ignore", "avoid", "wait"]
    mps: Literal["auto", "off"]
    cpu_affinity: Literal["auto", "off"]
    preload: Sequence[str]
    log_to_driver: bool
    cancel_grace: float
    spare_workers: int
    memory: int | str | None
    memory_guard: bool
    object_memory: int | str | None
    spill_directory: str | os.PathLike[str] | None
    runtime_env: Mapping[str, Any] | None
    dashboard: bool
    ignore_reinit_error: bool
