"""What runs a task in a worker of Ray's: the user's function, in surroundings of ours.

Ray has set the devices' variables by then. The function is unpickled when it is first
needed in a process, and not before these are set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final

from aiogpu.accelerators.listed_devices import is_left_alone
from aiogpu.client.current import current, host_of_task, passing, take_kept
from aiogpu.engines import ray
from aiogpu.engines.cluster.failure import TaskFailure, packed, stopped
from aiogpu.engines.cluster.host import ClusterHost
from aiogpu.engines.cluster.interrupts import interrupts
from aiogpu.engines.cluster.payload import Broken, Stored, stored
from aiogpu.engines.cluster.shared import arrived
from aiogpu.engines.cluster.values import packed_here
from aiogpu.errors import SerializationError
from aiogpu.serialization.exceptions import RAISED, STOPPED, UNREADABLE, UNSENDABLE
from aiogpu.serialization.payload import Payload
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import (
    SplitResults,
    dump_result,
    load_arguments,
    load_function,
    split_results,
)
from aiogpu.wire.messages import Define
from aiogpu.worker.invoke import RetryRules

if TYPE_CHECKING:
    from aiogpu.client.function_spec import Site
    from aiogpu.engines.cluster.loops import TaskLoop

HIDDEN: Final = {
    "GPU": "CUDA_VISIBLE_DEVICES",
    "neuron_cores": "NEURON_RT_VISIBLE_CORES",
}
"""By kind the variable that hides devices; Ray sets it for those who have some."""
ORDER: Final = "CUDA_DEVICE_ORDER"
_retrying: Final = RetryRules()
_adopted: Final[set[tuple[str, ...]]] = set()
kinds_here: Final[list[str]] = []
"""The kinds of devices that the cluster has whose task this process is."""


class NeedFailedError(Exception):
    """An argument will never be there; `fields` say why."""

    def __init__(self, fields: tuple[Any, ...]) -> None:
        super().__init__(*fields)
        self.fields = fields


def search_path() -> tuple[str, ...]:
    """Where this program finds its modules, for workers that have these places too."""
    return tuple(os.path.abspath(place) for place in sys.path)


def adopt(places: tuple[str, ...]) -> None:
    """Find modules where the program does, after where this process does."""
    if places in _adopted:
        return
    _adopted.add(places)
    there = [one for one in places if one not in sys.path and os.path.exists(one)]
    sys.path.extend(there)


class Work:
    """A function with what its calls have in common, as it comes to a worker.

    Attributes:
        name: of the task.
        resources: what it holds.
        retried: after which exceptions it is tried again; see `wire.retried`.
        kinds: the kinds of devices that the cluster has.
    """

    def __init__(self, site: Site, kinds: tuple[str, ...]) -> None:
        self.name = site.spec.name
        self.resources = dict(site.resources)
        self.retried = site.retried
        self.kinds = kinds
        self._places = search_path()
        self._payload = site.function.payload
        self._loaded: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return f"<Work {self.name}>"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loaded": None}

    def load(self) -> Callable[..., Any]:
        """The function; raises whatever unpickling it raises."""
        if self._loaded is None:
            adopt(self._places)
            self._loaded = load_function(self._payload)
        return self._loaded

    def wants_retry(self, error: BaseException) -> bool:
        """Return whether the options want it tried again after that."""
        if not self.retried:
            return False
        asked = Define(0, 0, self.name, {}, b"", self.retried)
        return _retrying.wants(asked, error)


def runner(work: Work) -> Callable[..., Any]:
    """Return what Ray is given to run as a task."""

    def run(head: Any, places: Any = (), returns: int = 0, *values: Any) -> Any:
        from aiogpu.engines.cluster.work import run_task

        return run_task(work, head, places, returns, values)

    return _named(run, work.name)


def streamer(work: Work) -> Callable[..., Any]:
    """The same for a generator: each item is an object of its own."""

    def run(head: Any, places: Any = (), returns: int = 0, *values: Any) -> Any:
        from aiogpu.engines.cluster.work import pour_task

        yield from pour_task(work, head, places, values)

    return _named(run, work.name)


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    run.__name__ = run.__qualname__ = name
    return run


@contextmanager
def surroundings(work: Work) -> Iterator[ClusterHost]:
    """What a task's code finds around it: its devices, ids, a way to the cluster."""
    take_place(work.name, work.resources, work.kinds)
    current.task = int(ray.task_id()[:12], 16)
    host = ClusterHost()
    token = host_of_task.set(host)
    try:
        yield host
    finally:
        try:
            host.end()  # no interrupt is heard any more that could have it skipped
        finally:
            host_of_task.reset(token)


def take_place(
    name: str, resources: Mapping[str, float], kinds: tuple[str, ...]
) -> None:
    """Note what this process may use, in its variables and for whoever asks."""
    found = ray.accelerators()
    kinds_here[:] = kinds
    for kind in ("GPU", *kinds):
        variable = HIDDEN.get(kind)
        if not variable or found.get(kind):
            continue
        if not is_left_alone(variable, os.environ):
            os.environ[variable] = ""
    if not is_left_alone(HIDDEN["GPU"], os.environ):
        os.environ.setdefault(ORDER, "PCI_BUS_ID")
    node, worker, _ = ray.facts()
    current.node, current.worker = node, int(worker[:12], 16)
    current.name = name
    current.resources, current.accelerators = resources, found


def arguments(
    head: Any, places: Sequence[int | str], returns: int, values: Sequence[Any]
) -> bytes:
    """The payload that has come in pieces.

    Raises:
        NeedFailedError: one of the arguments will never be there.
    """
    for value in values:
        if isinstance(value, Broken):
            raise NeedFailedError(value.fields)
    if not isinstance(head, Stored) and not values and not returns:
        return head  # type: ignore[no-any-return]
    opened = arrived(head if isinstance(head, Stored) else Stored(head))
    assert isinstance(opened, Payload), head
    opened.contents = opened.contents._replace(places=tuple(places), returns=returns)
    opened.parts = tuple(arrived(value) for value in values)
    return opened


def run_task(
    work: Work, head: Any, places: Any, returns: int, values: Sequence[Any]
) -> Any:
    """Run a task; gives what Ray is to keep of its result, or of each of them.

    Raises:
        TaskFailure: it has none.
    """
    with surroundings(work) as host, interrupts.heard():
        kind = UNREADABLE
        try:
            function = work.load()
            payload = arguments(head, places, returns, values)
            args, kwargs = host.opened(function, payload, load_arguments)
            kind = RAISED
            value = function(*args, **kwargs)
            if type(value) is CoroutineType:
                value = host.task_loop.run(value)
            value = split_results(value, payload)
            kind = UNSENDABLE
            return returned(value)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the task's
            raise _failure(work, kind, error) from None
        finally:
            host.end()
            let_go_of_passed()


def pour_task(
    work: Work, head: Any, places: Any, values: Sequence[Any]
) -> Iterator[Any]:
    """The same for a generator; Ray has it wait for its consumer."""
    with surroundings(work) as host, interrupts.heard():
        kind = UNREADABLE
        try:
            function = work.load()
            payload = arguments(head, places, 0, values)
            args, kwargs = host.opened(function, payload, load_arguments)
            kind = RAISED
            items = function(*args, **kwargs)
            for place, item in enumerate(_each(items, host), 1):
                kind = UNSENDABLE
                yield returned_item(place, item)
                kind = RAISED
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the task's
            raise _failure(work, kind, error) from None
        finally:
            host.end()
            let_go_of_passed()


def _each(items: Any, host: ClusterHost) -> Iterator[Any]:
    if not hasattr(items, "__anext__"):
        yield from items
        return
    loop: TaskLoop = host.task_loop
    try:
        while True:
            try:
                yield loop.run(anext(items))
            except StopAsyncIteration:
                return
    finally:
        loop.run(items.aclose())


def returned(value: object) -> Any:
    """Return what Ray is to keep of a result, a tuple if there are several."""
    if type(value) is SplitResults:
        return tuple(map(returned, value))
    result = dump_result(value)
    let_go_of_passed()  # Ray's handles of these actors go along
    return stored(packed_here(result) if isinstance(result, PickledValue) else result)


def let_go_of_passed() -> None:
    """Keep no actor alive whose handle was pickled here; it was sent, or never is."""
    if passing:
        take_kept()


def returned_item(place: int, item: object) -> Any:
    """Return what Ray is to keep of an item of a stream.

    Raises:
        SerializationError: it cannot be pickled; says which one it is.
    """
    try:
        return returned(item)
    except SerializationError as error:
        raise SerializationError(
            f"item {place} of its stream is lost: {error}"
        ) from error


def _failure(work: Work, kind: str, error: BaseException) -> BaseException:
    if isinstance(error, NeedFailedError):
        return TaskFailure(*error.fields)
    if interrupts.has_come:
        return TaskFailure(0, STOPPED, "", stopped(work.name), "", None)
    wants_retry = kind == RAISED and work.wants_retry(error)
    return packed(kind, error, is_retried=wants_retry)
