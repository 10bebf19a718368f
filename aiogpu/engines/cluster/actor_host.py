"""What Ray makes actors of: it has the user's object, and calls its methods.

A failed constructor is kept and told to whoever calls, with its cause, which Ray itself
would tell in its own words only.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

from aiogpu.client.current import (
    ActorExit,
    current,
    has_exited,
    host_of_task,
    method_called,
)
from aiogpu.engines import ray
from aiogpu.engines.cluster.cancels import Cancels
from aiogpu.engines.cluster.failure import TaskFailure, packed, stopped
from aiogpu.engines.cluster.host import ClusterHost
from aiogpu.engines.cluster.loops import TaskLoop
from aiogpu.engines.cluster.spoken import understood
from aiogpu.engines.cluster.work import (
    NeedFailedError,
    adopt,
    arguments,
    let_go_of_passed,
    returned,
    returned_item,
    search_path,
    take_place,
)
from aiogpu.runtime.actors.actor import not_made
from aiogpu.serialization.exceptions import RAISED, STOPPED, UNREADABLE, UNSENDABLE
from aiogpu.serialization.serializer import load_arguments, load_function, split_results
from aiogpu.wire.messages import DEFAULT_GROUP
from aiogpu.worker.actor import Methods

if TYPE_CHECKING:
    from aiogpu.client.function_spec import Site

Place = tuple[str, int]
"""The node and the process of an actor."""


class Blueprint:
    """A class with its options, as it comes to the process of an actor.

    Attributes:
        name: how errors call the actor.
        resources: what it holds.
        limits: by concurrency group, how many coroutines run at once.
        groups: by method, its group, where it is not the default one.
        kinds: the kinds of devices that the cluster has.
    """

    def __init__(self, site: Site, kinds: tuple[str, ...]) -> None:
        assert site.actor is not None, site
        self.name = site.spec.name
        self.resources = dict(site.resources)
        self.limits = dict(site.actor.limits)
        self.groups = dict(site.actor.groups)
        self.kinds = kinds
        self._payload = site.function.payload
        self._places = search_path()

    def __repr__(self) -> str:
        return f"<Blueprint {self.name}>"

    def load(self) -> Any:
        """The class; raises whatever unpickling it raises."""
        adopt(self._places)
        return load_function(self._payload)


class Stage:
    """The user's object, or why there is none, and what its code finds around it."""

    _name = "actor"
    # Ray asks for its `repr` where an argument has failed, and this never runs.

    def __init__(self, blueprint: Blueprint, given: Sequence[Any]) -> None:
        self._name = blueprint.name
        own_id = ray.facts()[2]
        self._cancels = Cancels(own_id)
        self._failure: TaskFailure | None = None
        self._host = ClusterHost(TaskLoop(is_of_actor=True))
        self._object: Any = None
        self._groups = blueprint.groups
        take_place(blueprint.name, blueprint.resources, blueprint.kinds)
        self._place: Place = current.node, os.getpid()
        current.actor = int(own_id[:12], 16)
        host_of_task.set(self._host)
        kind = UNREADABLE
        try:
            made = blueprint.load()
            head, places, _, *values = (*given, (), 0)[: max(3, len(given))]
            args, kwargs = load_arguments(arguments(head, places, 0, values))
            kind = RAISED
            self._object = made(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - foreign code may raise anything
            failed = failure(kind, error).failed
            self._failure = TaskFailure(*not_made(self._name, failed))
        let_go_of_passed()
        self._methods = Methods(self._object)

    def _stopped(self) -> TaskFailure:
        """Return what is told of a call that was cancelled."""
        return TaskFailure(0, STOPPED, "", stopped(self._name), "", None)

    def __repr__(self) -> str:
        return f"<actor {self._name}>"

    def _begin(self) -> None:
        host_of_task.set(self._host)
        if self._failure is not None:
            raise self._failure

    def _called(
        self, method: str, payload: bytes, given: Sequence[Any]
    ) -> tuple[Any, bytes]:
        """Call a method; gives what it has given, and the arguments' payload."""
        kind = UNREADABLE
        method_called.set(method)
        try:
            if given:
                head, places, returns, *values = given
                payload = arguments(head, places, returns, values)
                found = self._methods[method]
                args, kwargs = self._host.opened(found, payload, load_arguments)
            else:
                found = self._methods[method]
                args, kwargs = load_arguments(payload)
            kind = RAISED
            value = found(*args, **kwargs)
            raise_exit()
            return value, payload
        except ActorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise_exit()
            raise failure(kind, error) from None

    def _returned(self, value: Any, payload: bytes) -> Any:
        kind = RAISED
        try:
            found = split_results(value, payload)
            kind = UNSENDABLE
            return returned(found)
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise failure(kind, error) from None

    def _drop(self) -> None:
        """Let go of the object, so that it may still do what it does at its end."""
        self._object, self._methods = None, Methods(None)
        gc.collect()

    def __ray_shutdown__(self) -> None:
        """Ray ends this process in an orderly way."""
        self._drop()


class PlainHost(Stage):
    """An actor whose methods are plain: one at a time, or each in a thread."""

    def __init__(self, blueprint: Blueprint, *given: Any) -> None:
        self._left = count(1)
        super().__init__(blueprint, given)
        self._is_threaded = len(blueprint.limits) > 1
        self._cancels.watch()

    def ready(self) -> Place:
        """The constructor has returned, in this place; raises why not."""
        self._begin()
        return self._place

    def call(self, said: bytes, *given: Any) -> Any:
        """Call a method of the object."""
        self._begin()
        _, method, payload = understood(said)
        if self._is_threaded:
            # Ray's threads have no names of their own, which logs would show.
            group = self._groups.get(method, DEFAULT_GROUP)
            threading.current_thread().name = f"aiogpu-{group}"
        cancels = self._cancels
        if cancels.has():
            raise self._stopped()
        try:
            with cancels.heard():
                value, payload = self._called(method, payload, given)
            return self._returned(value, payload)
        except ActorExit:
            leave_now()
        except (KeyboardInterrupt, TaskFailure):
            if cancels.has_come:
                raise self._stopped() from None
            raise
        finally:
            let_go_of_passed()

    def pour(self, said: bytes, *given: Any) -> Iterator[Any]:
        """The same for a generator."""
        self._begin()
        _, method, payload = understood(said)
        if self._cancels.has():
            raise self._stopped()
        items, _ = self._called(method, payload, given)
        kind = RAISED
        try:
            for place, item in enumerate(items, 1):
                kind = UNSENDABLE
                yield returned_item(place, item)
                kind = RAISED
                if self._cancels.has():
                    items.close()
                    return
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is the call's
            raise failure(kind, error) from None
        finally:
            let_go_of_passed()

    def leave(self, groups: int) -> None:
        """End, after all that was sent before: each of so many groups is told."""
        if next(self._left) >= groups:
            leave_now()


def failure(kind: str, error: BaseException) -> TaskFailure:
    """Return what is told of a call that has failed, or of what it was given."""
    if isinstance(error, TaskFailure):
        return error
    if isinstance(error, NeedFailedError):
        return TaskFailure(*error.fields)
    return packed(kind, error)


def raise_exit() -> None:
    """End the actor if its method called `exit_actor()` and swallowed the exception."""
    if current.exits and has_exited():
        raise ActorExit


def leave_now() -> NoReturn:
    """End the actor's process, once this call has ended."""
    ray.exit_actor()
    raise ActorExit  # it has raised by now
