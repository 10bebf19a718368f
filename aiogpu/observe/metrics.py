"""A node in numbers, for Prometheus to fetch. The only importer of prometheus_client.

Served on 127.0.0.1 alone, and only if asked for. Everything is computed when it is
fetched, from the status that `aiogpu status` shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiogpu.errors import NodeStartError

if TYPE_CHECKING:
    from aiogpu.observe.status import NodeStatus

ADDRESS: Final = "127.0.0.1"
"""Nobody beyond this machine may see what runs on it."""
METRICS: Final = {
    "aiogpu_resource_total": "What the node has.",
    "aiogpu_resource_free": "What is free of it.",
    "aiogpu_tasks": "Tasks that hold something, by state.",
    "aiogpu_tasks_waiting": "Tasks that wait.",
    "aiogpu_workers": "Worker processes, by state.",
    "aiogpu_tasks_ended": "Attempts at tasks that have ended, by outcome.",
    "aiogpu_program_running": "Tasks of a program that have a worker.",
    "aiogpu_program_waiting": "Tasks of a program that wait.",
    "aiogpu_device_free_share": "The share of a device that nobody holds.",
    "aiogpu_device_aside": "1 while a device is given to nobody, as it is sick or "
    "not clear.",
    "aiogpu_device_memory_bytes": "Bytes of device memory.",
    "aiogpu_device_memory_used_bytes": "Bytes of device memory in use, by whomever.",
    "aiogpu_device_utilisation_percent": "Percent of the last moments in which "
    "something ran on a device.",
}
"""Every metric, and what it is."""
COUNTERS: Final = ("aiogpu_tasks_ended",)
"""Those that only ever grow."""


class Amount(NamedTuple):
    """One number.

    Attributes:
        name: of the metric.
        value: the number.
        labels: what tells the samples of a metric apart.
    """

    name: str
    value: float
    labels: Mapping[str, str] = {}


class Seen(NamedTuple):
    """A node at one moment.

    Attributes:
        status: who holds what, what waits.
        outcomes: how many attempts at tasks have ended how.
    """

    status: NodeStatus
    outcomes: Mapping[str, int]


def amounts(seen: Seen) -> Iterator[Amount]:
    """Every number of one moment."""
    status = seen.status
    for name, total in status.total.items():
        labels = {"resource": name}
        yield Amount("aiogpu_resource_total", total, labels)
        yield Amount("aiogpu_resource_free", status.available.get(name, 0.0), labels)
    for metric, label, counts in (
        ("tasks", "state", Counter(one.state for one in status.tasks if one.is_held)),
        ("workers", "state", Counter(one.state for one in status.workers)),
        ("tasks_ended", "outcome", seen.outcomes),
    ):
        for value, count in sorted(counts.items()):
            yield Amount(f"aiogpu_{metric}", count, {label: value})
    yield Amount("aiogpu_tasks_waiting", status.waiting_count)
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
    """Serves the numbers in a thread of prometheus_client."""

    def __init__(self, port: int, see: Callable[[], Seen]) -> None:
        """Listen on 127.0.0.1.

        Args:
            port: 0 for one that is free; see the attribute of the same name.
            see: looks at the node; called in another thread, and may wait.

        Raises:
            NodeStartError: prometheus_client is missing, or the port is taken.
        """
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise NodeStartError(
                "--metrics needs prometheus_client, which is not installed; say "
                "`pip install 'aiogpu[metrics]'`."
            ) from None
        registry = CollectorRegistry()
        registry.register(_Collector(see))
        try:
            self._server, self._thread = start_http_server(port, ADDRESS, registry)
        except OSError as error:
            raise NodeStartError(
                f"no metrics on {ADDRESS}:{port}: {error.strerror or error}. Give "
                f"another port by --metrics."
            ) from error
        self.port: int = self._server.server_port

    def __repr__(self) -> str:
        return f"<MetricsServer {ADDRESS}:{self.port}>"

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector:
    """The collector that prometheus_client calls at each fetch."""

    def __init__(self, see: Callable[[], Seen]) -> None:
        self._see = see

    def describe(self) -> list[Any]:
        """Nothing: it would look before there is anything to see."""
        return []

    def collect(self) -> Iterator[Any]:
        """All numbers, each metric with its samples."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for name, value, labels in amounts(self._see()):
            if name not in families:
                make = CounterMetricFamily if name in COUNTERS else GaugeMetricFamily
                families[name] = make(name, METRICS[name], labels=list(labels))
            families[name].add_metric(list(labels.values()), value)
        yield from families.values()
