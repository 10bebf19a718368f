"""The options of tasks, actors and methods as keywords, for type checkers and readers.

Nothing imports this file at run time: user modules import `api.options` in every
worker, and each annotation here would cost time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

from aiogpu.api.options import GpuStrategy, GpuWhere, Lifetime, RetryOom
from aiogpu.api.reservation import Placement

RetryExceptions = bool | type[Exception] | Sequence[type[Exception]]


class _Common(TypedDict, total=False):
    """The options of both tasks and actors."""

    num_cpus: float | None
    num_gpus: float | None
    memory: int | str | None
    resources: Mapping[str, float] | None
    accelerator_type: str | None
    gpu_where: GpuWhere | None
    gpu_memory: int | str | None
    gpu_strategy: GpuStrategy | None
    name: str | None
    priority: int | None
    runtime_env: Mapping[str, Mapping[str, str]] | None
    lifetime: Lifetime
    placement: Placement | None
    bundle: int | None
    scheduling_strategy: object
    label_selector: Mapping[str, str] | None


class Choice(TypedDict, total=False):
    """An entry of `any_of`: a whole request; the options mean what they do alone."""

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
        memory: main memory, in bytes or as a text such as "6GiB". When the machine
            runs short of memory, a task that uses more than this is ended first
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
        num_gpus, memory, resources, gpu_memory: as for a task, held while the actor
            lives.
        accelerator_type, gpu_where, gpu_strategy, priority: as for a task.
        runtime_env, placement, bundle: as for a task.
        scheduling_strategy, label_selector: as for a task.
        name: name for `get_actor`; free again when the actor is dead.
        namespace: namespace of the name; default the program's own.
        get_if_exists: return the living actor with this name, if there is one.
        lifetime: "detached": the actor outlives its handles and its program, until it
            is killed or its node ends.
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
        num_returns: number of results, each with its own handle.
        concurrency_group: the group that runs the calls, one of the class's
            `concurrency_groups`.
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
