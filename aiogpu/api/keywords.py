"""The options of tasks, actors and methods as keywords, for type checkers and readers.

Nothing imports this file at run time: user modules import `api.options` in every
worker, and each annotation here would cost time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from aiogpu.api.options import GpuWhere, Lifetime, RetryOom, Strategy
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
    strategy: Strategy | None
    name: str | None
    priority: int | None
    runtime_env: Mapping[str, Mapping[str, str]] | None
    lifetime: Lifetime
    placement: Placement | None
    bundle: int | None


class Options(_Common, total=False):
    """The options of a task, as `@remote(...)` and `.options(...)` take them.

    Counts are at most 2_147_483_647 (2**31 - 1), `num_returns` 100_000; times are at
    most 1_000_000_000 seconds.

    Attributes:
        num_cpus: CPUs, may be a fraction; default 1.
        num_gpus: below 1 a share of one GPU, otherwise whole GPUs; default 0.
        memory: main memory in bytes or as a text, "6GiB", reserved for the task. If
            the machine runs short of memory, a task that uses more than it reserved is
            ended first (`OutOfMemoryError`) and retried alone.
        resources: amounts by name: custom resources, `{"license": 1}`, or devices of
            other vendors, `{"neuron_cores": 2}`.
        accelerator_type: only devices of this type, such as "A100".
        gpu_where: only GPUs that meet all conditions: `{"memory": "40GiB",
            "compute_capability": "8.0", "name": "*H100*"}`; the first two are minimums.
        gpu_memory: device memory on each GPU, with or instead of `num_gpus`, in bytes
            or as a text, "6GiB"; "share" is the fraction that `num_gpus` is of the
            GPU. It is reserved for the task, and frameworks are limited to it.
        retry_oom: "exclusive" retries a task that ran out of GPU memory once, on a GPU
            of its own; default None, no such retry.
        strategy: the GPU for a share: "pack", the default, takes the fullest GPU with
            room for it, "spread" the emptiest.
        max_calls: calls of this function after which its worker ends; 0 for no limit.
            Default 1 for tasks with GPUs, 0 for others.
        max_retries: retries after the death of the worker; default 3, -1 for no limit.
        retry_exceptions: exceptions that cause a retry as well: True for all, or
            classes.
        num_returns: how many results a call has, each with a handle of its own;
            default 1.
        max_buffered: items that a generator may be ahead of its consumer; default 64.
            With 1, the generator starts an item when the one before was taken.
        name: name in logs, errors and `status()`; default the function's name.
        priority: higher goes first; default 0.
        timeout: seconds from `.remote()` after which the task is stopped; its wait in
            the queue counts. Default None, no limit.
        run_timeout: seconds from the first line of the task's code after which it is
            stopped; its waits in the queue and for its arguments, and imports on its
            behalf, do not count. Each retry has all of it. Default None, no limit.
        cancel_grace: seconds from a cancel or a timeout until the process is killed if
            the code has not stopped; 0 kills at once; default that of `init`.
        stop_grace: seconds for which the task may go on when its program or node
            stops, before it is cancelled. Meanwhile `get_runtime_context().is_stopping`
            is True. Default 0.
        runtime_env: `{"env_vars": {"A": "1"}}`, variables of the worker.
        lifetime: "detached" lets a task outlive the task that has started it;
            otherwise the two end together. Both end with the node.
        placement: a group from `aiogpu.placement(...)`: the task takes its resources
            from one of the bundles and ends with the group. Without `num_cpus` it
            asks for a CPU only if the bundle has one.
        bundle: number of the bundle, from 0; default -1 or None, any that fits.
    """

    retry_oom: RetryOom | None
    max_calls: int | None
    max_retries: int | None
    retry_exceptions: RetryExceptions | None
    num_returns: int | None
    max_buffered: int | None
    timeout: float | None
    run_timeout: float | None
    cancel_grace: float | None
    stop_grace: float | None


class ActorKeywords(_Common, total=False):
    """The options of an actor, as `@remote(...)` and `.options(...)` take them.

    Counts are at most 2_147_483_647 (2**31 - 1).

    Attributes:
        num_cpus: CPUs held for the actor's life; without it, one CPU must be free to
            start the actor, and none is held afterwards.
        num_gpus: below 1 a share of one GPU, otherwise whole GPUs, held for life.
        memory: main memory in bytes or as a text, "6GiB".
        resources: amounts by name: custom resources, `{"license": 1}`, or devices of
            other vendors, `{"neuron_cores": 2}`.
        accelerator_type: only devices of this type, such as "A100".
        gpu_where: only GPUs that meet all conditions: `{"memory": "40GiB",
            "compute_capability": "8.0", "name": "*H100*"}`; the first two are minimums.
        gpu_memory: device memory on each GPU, with or instead of `num_gpus`, in bytes
            or as a text, "6GiB"; "share" is the fraction that `num_gpus` is of the
            GPU. It is reserved for the actor, and frameworks are limited to it.
        strategy: the GPU for a share: "pack", the default, or "spread".
        name: name for `get_actor`; free again when the actor is dead.
        namespace: namespace of the name; default the program's own.
        get_if_exists: return the living actor of that name, if there is one.
        lifetime: None: the actor ends with its last handle; "detached": it lives until
            it is killed or its node ends.
        max_restarts: restarts after the death of the process; default 0, -1 for no
            limit.
        max_task_retries: retries of a call that was hit by the death of the process;
            default 0, -1 for no limit.
        max_concurrency: calls at once: in threads for plain methods (default 1),
            interleaved for a class with coroutine methods (default 1000).
        concurrency_groups: further groups of methods by name, with the calls of each
            at once; see `@aiogpu.method(concurrency_group=...)`.
        priority: higher goes first; default 0.
        runtime_env: `{"env_vars": {"A": "1"}}`, variables of the process.
        placement: a group from `aiogpu.placement(...)`, in which the actor runs.
        bundle: number of the bundle, from 0; default -1 or None, any that fits.
    """

    namespace: str | None
    get_if_exists: bool | None
    max_restarts: int | None
    max_task_retries: int | None
    max_concurrency: int | None
    concurrency_groups: Mapping[str, int] | None


class AnyKeywords(Options, ActorKeywords, total=False):
    """The options of `@remote(...)`, which may decorate a function or a class."""


class MethodCallKeywords(TypedDict, total=False):
    """The options of a method's calls, as `actor.method.options(...)` takes them.

    Attributes:
        num_returns: how many results a call has, each with a handle of its own.
        concurrency_group: the group that runs the calls, one of the class's
            `concurrency_groups`.
    """

    num_returns: int | None
    concurrency_group: str | None


class MethodKeywords(MethodCallKeywords, total=False):
    """The options of a method, as `@aiogpu.method(...)` takes them.

    Attributes:
        num_returns: how many results a call has; default 1.
        max_buffered: items that a generator may be ahead of its consumer; default 64.
        run_timeout: seconds from the first line of the method's code after which the
            call is cancelled and its handle raises `TaskTimeoutError`. For a chunk of
            `map`, the limit of all its items together. Default None, no limit.
        concurrency_group: one of the class's `concurrency_groups`.
    """

    max_buffered: int | None
    run_timeout: float | None
