"""The options of an actor as keywords, for type checkers and readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from aiogpu.api.gpu_options import GpuWhere
from aiogpu.api.keywords import Options
from aiogpu.api.options import Lifetime, Strategy
from aiogpu.api.placement import Placement


class ActorKeywords(TypedDict, total=False):
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

    num_cpus: float | None
    num_gpus: float | None
    memory: int | str | None
    resources: Mapping[str, float] | None
    accelerator_type: str | None
    gpu_where: GpuWhere | None
    gpu_memory: int | str | None
    strategy: Strategy | None
    name: str | None
    namespace: str | None
    get_if_exists: bool | None
    lifetime: Lifetime
    max_restarts: int | None
    max_task_retries: int | None
    max_concurrency: int | None
    concurrency_groups: Mapping[str, int] | None
    priority: int | None
    runtime_env: Mapping[str, Mapping[str, str]] | None
    placement: Placement | None
    bundle: int | None


class AnyKeywords(Options, total=False):
    """What `@remote(...)` takes before it is known what it decorates."""

    namespace: str | None
    get_if_exists: bool | None
    max_restarts: int | None
    max_task_retries: int | None
    max_concurrency: int | None
    concurrency_groups: Mapping[str, int] | None
