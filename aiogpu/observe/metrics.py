"""Metrics of a node for Prometheus. The only module that imports prometheus_client.

Served only on 127.0.0.1, and only with `--metrics`. Everything is computed at each
fetch, from the status that `aiogpu status` shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiogpu.errors import NodeStartError
from aiogpu.observe.metrics_server import ADDRESS, HttpServer

if TYPE_CHECKING:
    from aiogpu.observe.status import NodeStatus

METRICS: Final = {
    "aiogpu_resource_total": "Capacity of a resource.",
    "aiogpu_resource_free": "Free amount of a resource.",
    "aiogpu_tasks": "Tasks that hold resources, by state.",
    "aiogpu_tasks_waiting": "Tasks that wait.",
    "aiogpu_workers": "Worker processes, by state.",
    "aiogpu_tasks_ended": "Ended attempts at tasks, by outcome.",
    "aiogpu_actor_evictions": "Times that an actor with evict_after has left so that "
    "others could start.",
    "aiogpu_actor_reloads": "Times that such an actor has come back.",
    "aiogpu_program_running": "Tasks of a program that have a worker.",
    "aiogpu_program_waiting": "Tasks of a program that wait.",
    "aiogpu_device_free_share": "Free share of a device.",
    "aiogpu_device_aside": "1 while a device is set aside: sick or used by others.",
    "aiogpu_device_memory_bytes": "Bytes of device memory.",
    "aiogpu_device_memory_used_bytes": "Bytes of device memory used by any process.",
    "aiogpu_device_utilisation_percent": "Percent of the last sample period in which "
    "a kernel ran on a device.",
}
"""Every metric with its help text."""
COUNTERS: Final = (
    "aiogpu_tasks_ended",
    "aiogpu_actor_evictions",
    "aiogpu_actor_reloads",
)
"""The metrics that only grow."""


class Amount(NamedTuple):
    """One sample of a metric.

    Attributes:
        name: name of the metric.
        value: the value.
        labels: the labels, which distinguish the samples of a metric.
    """

    name: str
    value: float
    labels: Mapping[str, str] = {}


class Seen(NamedTuple):
    """The data from which the metrics of one fetch are computed.

    Attributes:
        status: the node's status.
        outcomes: the number of ended attempts at tasks, by outcome.
    """

    status: NodeStatus
    outcomes: Mapping[str, int]


def amounts(seen: Seen) -> Iterator[Amount]:
    """Yield every sample of one fetch."""
    status = seen.status
    for name, total in status.total.items():
        labels = {"resource": name}
        yield Amount("aiogpu_resource_total", total, labels)
        yield Amount("aiogpu_resource_free", status.available.get(name, 0.0), labels)
    for metric, label, counts in (
        ("tasks", "state", Counter(t.state for t in status.tasks if t.is_held)),
        ("workers", "state", Counter(worker.state for worker in status.workers)),
        ("tasks_ended", "outcome", seen.outcomes),
    ):
        for value, count in sorted(counts.items()):
            yield Amount(f"aiogpu_{metric}", count, {label: value})
    yield Amount("aiogpu_tasks_waiting", status.waiting_count)
    yield Amount("aiogpu_actor_evictions", status.evictions)
    yield Amount("aiogpu_actor_reloads", status.reloads)
    for client in status.clients:
        labels = {"client": str(client.id), "program": client.name}
        yield Amount("aiogpu_program_running", client.running, labels)
        yield Amount("aiogpu_program_waiting", client.waiting, labels)
    for device in status.devices:
        labels = {"kind": device.kind, "device": str(device.id)}
        for metric, number in (
            ("free_share", device.free),
            ("aside", device.aside is not None),
            ("memory_bytes", device.memory or None),
            ("memory_used_bytes", device.used),
            ("utilisation_percent", device.utilisation),
        ):
            if number is not None:
                yield Amount(f"aiogpu_device_{metric}", float(number), labels)


class MetricsServer:
    """Serves the metrics in threads."""

    def __init__(self, port: int, see: Callable[[], Seen]) -> None:
        """Listen on 127.0.0.1.

        Args:
            port: the port; 0 for any free port, see the attribute `port`.
            see: returns the node's data; called in another thread, and may block.

        Raises:
            NodeStartError: prometheus_client is missing, or the port is taken.
        """
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError:
            raise NodeStartError(
                "--metrics needs prometheus_client, which is not installed; run "
                "`pip install 'aiogpu[metrics]'`."
            ) from None
        registry = CollectorRegistry()
        registry.register(_Collector(see))
        try:
            self._server = HttpServer(port, make_wsgi_app(registry))
        except OSError as error:
            raise NodeStartError(
                f"metrics cannot be served on {ADDRESS}:{port}: "
                f"{error.strerror or error}. Give another port with --metrics."
            ) from error
        self.port: int = self._server.server_port

    def __repr__(self) -> str:
        return f"<MetricsServer {ADDRESS}:{self.port}>"

    def close(self) -> None:
        """Stop serving."""
        self._server.close()


class _Collector:
    """The collector that prometheus_client calls at each fetch."""

    def __init__(self, see: Callable[[], Seen]) -> None:
        self._see = see

    def describe(self) -> list[Any]:
        """Return nothing: the default would call `collect` before the node is open."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield every metric with its samples."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for name, value, labels in amounts(self._see()):
            if name not in families:
                make = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
                families[name] = make(name, METRICS[name], labels=list(labels))
            families[name].add_metric(list(labels.values()), value)
        yield from families.values()
