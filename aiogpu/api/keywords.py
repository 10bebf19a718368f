"""The options of a task as keywords, for type checkers and readers.

Only they read this file: every annotation in it would cost at import, and user modules
bring `api.options` into every worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from aiogpu.api.options import GpuWhere, Lifetime, RetryOom, Strategy
from aiogpu.api.reservation import Placement

RetryExceptions = bool | type[Exception] | Sequence[type[Exception]]


class _Common(TypedDict, total=False):
    """What tasks and actors both have."""

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
        num_cpus: CPUs, may be a fraction; 1 unless given.
        num_gpus: below 1 a share of one GPU, else whole ones; 0 unless given.
        memory: main memory in bytes or as a text, "6GiB": as much must not have been
            given to others. Who uses more is the first to be ended where it runs
            short (`OutOfMemoryError`), and tried again alone.
        resources: by name, custom ones such as `{"license": 1}`, or other vendors'
            devices such as `{"neuron_cores": 2}`.
        accelerator_type: only devices of this type, such as "A100".
        gpu_where: only GPUs that fulfil all of these: `{"memory": "40GiB",
            "compute_capability": "8.0", "name": "*H100*"}`, the first two as the least.
        gpu_memory: device memory on each GPU, beside `num_gpus` or in its place, in
            bytes or as a text, "6GiB"; "share" is the part that `num_gpus` is of the
            GPU's. So much is kept for the task, and its frameworks are limited to it.
        retry_oom: "exclusive" tries a task that has run out of GPU memory once more,
            with a GPU of its own; None, the default, does not.
        strategy: where a share of a GPU goes: "pack", the default, to the fullest
            GPU with room for it; "spread" to the emptiest.
        max_calls: calls of this function after which its worker ends; 0 is no
            limit. 1 is the default for tasks with GPUs, 0 for others.
        max_retries: how often it is tried again after its worker died; 3 unless
            given, -1 without end.
        retry_exceptions: exceptions after which it is tried again as well: True
            for all, or classes.
        num_returns: 1.
        max_buffered: for a generator, how many items it may be ahead of its consumer;
            64 unless given. With 1 the next item is not begun before the one before
            was taken.
        name: for logs, errors and `status()`; the function's unless given.
        priority: higher goes first; 0 unless given.
        timeout: seconds from `.remote()` after which it is stopped.
        cancel_grace: seconds from its cancelling, or its `timeout`, until its process
            is killed if its code has not stopped; 0 kills it at once; that of
            `init` unless given.
        runtime_env: `{"env_vars": {"A": "1"}}`, variables that its worker has.
        lifetime: "detached" lets a task outlive the task that has started it; else
            the two end together. Either way it ends with the node.
        placement: what `aiogpu.placement(...)` has given: it takes what it asks for
            from a bundle of that, and ends with it. Without `num_cpus` it asks for a
            CPU only where the bundle has one.
        bundle: number of the bundle, from 0; -1, the default, and None are any in
            which it fits.
    """

    retry_oom: RetryOom | None
    max_calls: int | None
    max_retries: int | None
    retry_exceptions: RetryExceptions | None
    num_returns: int | None
    max_buffered: int | None
    timeout: float | None
    cancel_grace: float | None


class ActorKeywords(_Common, total=False):
    """The options of an actor, as `@remote(...)` and `.options(...)` take them.

    Counts are at most 2_147_483_647 (2**31 - 1).

    Attributes:
        num_cpus: CPUs that it holds for life; without it one CPU must be free for it
            to be placed, and none is held while it lives.
        num_gpus: below 1 a share of one GPU, else whole ones, held for life.
        memory: main memory in bytes or as a text, "6GiB".
        resources: by name, custom ones such as `{"license": 1}`, or other vendors'
            devices such as `{"neuron_cores": 2}`.
        accelerator_type: only devices of this type, such as "A100".
        gpu_where: only GPUs that fulfil all of these: `{"memory": "40GiB",
            "compute_capability": "8.0", "name": "*H100*"}`, the first two as the least.
        gpu_memory: device memory on each GPU, beside `num_gpus` or in its place, in
            bytes or as a text, "6GiB"; "share" is the part that `num_gpus` is of the
            GPU's. So much is kept for the task, and its frameworks are limited to it.
        strategy: where a share of a GPU goes: "pack", the default, or "spread".
        name: under which `get_actor` finds it; free again when it is dead.
        namespace: of its name; the program's own unless given.
        get_if_exists: give the living actor of that name, if there is one.
        lifetime: None: it ends with its last handle; "detached": it lives until it is
            killed, or its node ends.
        max_restarts: how often it is made anew after its process has died; 0 unless
            given, -1 without end.
        max_task_retries: how often a call is tried again that its process's death
            has hit; 0 unless given, -1 without end.
        max_concurrency: calls that run at once: in threads for plain methods (1
            unless given), interleaved for a class with coroutine methods (1000).
        concurrency_groups: further groups of methods by name, and how many calls of
            each run at once; see `@aiogpu.method(concurrency_group=...)`.
        priority: higher goes first; 0 unless given.
        runtime_env: `{"env_vars": {"A": "1"}}`, variables that its process has.
        placement, bundle: the bundle of a placement in which it lives, as for tasks.
    """

    namespace: str | None
    get_if_exists: bool | None
    max_restarts: int | None
    max_task_retries: int | None
    max_concurrency: int | None
    concurrency_groups: Mapping[str, int] | None


class AnyKeywords(Options, ActorKeywords, total=False):
    """What `@remote(...)` takes before it is known what it decorates."""


class MethodCallKeywords(TypedDict, total=False):
    """The options of a method's calls, as `actor.method.options(...)` takes them.

    Attributes:
        num_returns: how many results a call has, each with a handle of its own.
        concurrency_group: in which group its calls run; one of those that the class's
            `concurrency_groups` name.
    """

    num_returns: int | None
    concurrency_group: str | None


class MethodKeywords(MethodCallKeywords, total=False):
    """The options of a method, as `@aiogpu.method(...)` takes them.

    Attributes:
        num_returns: 1.
        max_buffered: for a generator, how many items it may be ahead of its consumer;
            64 unless given.
        concurrency_group: one of those that the class's `concurrency_groups` name.
    """

    max_buffered: int | None
