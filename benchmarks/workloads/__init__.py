"""The questions, one a file. None of them knows what it is asked of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from benchmarks import ray_cluster, service
from benchmarks.method import Scale
from benchmarks.port import Environment
from benchmarks.rows import Row
from benchmarks.workloads import (
    actors,
    backlog,
    batching,
    cancel,
    gpu_latency,
    isolated,
    learning,
    many_actors,
    many_gpus,
    mapping,
    nested,
    noop_latency,
    queue,
    scheduler_only,
    spaced,
    start,
    streams,
    throughput,
    turnover,
    values,
)

Workload = Callable[[Environment, Scale], Awaitable[list[Row]]]

WORKLOADS: Final[Mapping[str, Workload]] = {
    "noop_latency": noop_latency.measure,
    "gpu_latency": gpu_latency.measure,
    "start": start.measure,
    "isolated": isolated.measure,
    "spaced": spaced.measure,
    "learning": learning.measure,
    "cancel": cancel.measure,
    "turnover": turnover.measure,
    "throughput": throughput.measure,
    "streams": streams.measure,
    "nested": nested.measure,
    "actors": actors.measure,
    "many_actors": many_actors.measure,
    "batching": batching.measure,
    "values": values.measure,
    "map": mapping.measure,
    "backlog": backlog.measure,
    "scheduler_only": scheduler_only.measure,
    "service": service.measure,
    "ray": ray_cluster.measure,
    "queue": queue.measure,
    "many_gpus": many_gpus.measure,
}
"""In the order in which they run."""
