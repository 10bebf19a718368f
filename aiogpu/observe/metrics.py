"""A node in numbers, for Prometheus to fetch. Door to prometheus_client.

Served on 127.0.0.1 alone, and only when asked for. All is computed when it is
fetched, from the picture that `aiogpu status` shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiogpu.errors import NodeStartError

if TYPE_CHECKING:
    from aiogpu.observe.status import NodeStatus

ADDRESS: Final = "127.0.0.1"
"""Nobody beyond this machine shall see what runs on it."""


class Amount(NamedTuple):
    """One number.

    Attributes:
        name: of the metric.
        about: what it is, in a line.
        labels: what tells its samples apart.
        value: the number.
        is_count: whether it only ever grows.
    """

    name: str
    about: str
    labels: Mapping[str, str]
    value: float
    is_count: bool = False


class Seen(NamedTuple):
    """What is told of a node at one moment.

    Attributes:
        status: who holds what, what waits.
        outcomes: how many attempts at tasks have ended how.
    """

    status: NodeStatus
    outcomes: Mapping[str, int]


def amounts(seen: Seen) -> Iterator[Amount]:
    """All numbers of one moment."""
    status = seen.status
    for name, total in status.total.items():
        labels = {"resource": name}
        free = status.available.get(name, 0.0)
        yield Amount("aiogpu_resource_total", "What the node has.", labels, total)
        yield Amount("aiogpu_resource_free", "What is free of it.", labels, free)
    states = Counter(task.state for task in status.tasks if task.is_held)
    for state, count in sorted(states.items()):
        about = "Tasks that hold something, by state."
        yield Amount("aiogpu_tasks", about, {"state": state}, count)
    waiting = "Tasks that wait."
    yield Amount("aiogpu_tasks_waiting", waiting, {}, status.waiting_count)
    for state, count in sorted(Counter(one.state for one in status.workers).items()):
        about = "Worker processes, by state."
        yield Amount("aiogpu_workers", about, {"state": state}, count)
    for outcome, count in sorted(seen.outcomes.items()):
        about = "Attempts at tasks that have ended, by outcome."
        labels = {"outcome": outcome}
        yield Amount("aiogpu_tasks_ended", about, labels, count, is_count=True)
    for client in status.clients:
        labels = {"client": str(client.id), "program": client.name}
        about = "Tasks of a program that have a worker."
        yield Amount("aiogpu_program_running", about, labels, client.running)
        about = "Tasks of a program that wait."
        yield Amount("aiogpu_program_waiting", about, labels, client.waiting)
    yield from _of_devices(status)


def _of_devices(status: NodeStatus) -> Iterator[Amount]:
    for device in status.devices:
        labels = {"kind": device.kind, "device": str(device.id)}
        about = "The share of a device that nobody holds."
        yield Amount("aiogpu_device_free_share", about, labels, device.free)
        aside = float(device.aside is not None)
        about = "1 while a device is given to nobody, as it is sick or not clear."
        yield Amount("aiogpu_device_aside", about, labels, aside)
        if device.memory:
            about = "Bytes of device memory."
            yield Amount("aiogpu_device_memory_bytes", about, labels, device.memory)
        if device.used is not None:
            about = "Bytes of device memory in use, by whomever."
            yield Amount("aiogpu_device_memory_used_bytes", about, labels, device.used)
        if device.utilisation is not None:
            about = "Percent of the last moments in which something ran on a device."
            number = device.utilisation
            yield Amount("aiogpu_device_utilisation_percent", about, labels, number)


class MetricsServer:
    """Serves the numbers; its thread is prometheus_client's own."""

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
    """What prometheus_client asks at each fetch."""

    def __init__(self, see: Callable[[], Seen]) -> None:
        self._see = see

    def describe(self) -> list[Any]:
        """Nothing: it would look before there is anything to see."""
        return []

    def collect(self) -> Iterator[Any]:
        """All numbers, each metric with its samples."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for one in amounts(self._see()):
            family = families.get(one.name)
            if family is None:
                make = CounterMetricFamily if one.is_count else GaugeMetricFamily
                family = families[one.name] = make(
                    one.name, one.about, labels=list(one.labels)
                )
            family.add_metric(list(one.labels.values()), one.value)
        yield from families.values()
