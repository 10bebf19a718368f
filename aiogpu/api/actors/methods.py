"""The methods of an actor's class: their names, parameters, options and groups.

Light to import, as `api.remote_function` is: user modules load this file in every
worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from copy import copy
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiogpu.api.options import (
    INTERLEAVED,
    MAX_BUFFERED,
    THREADS,
    TaskOptions,
    did_you_mean,
    not_counted,
)
from aiogpu.api.remote_function import Parameters, kind_of, signature_of, without_self
from aiogpu.errors import OptionError
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import NO_ARGUMENTS, dump_arguments
from aiogpu.wire.messages import (
    ASYNC,
    CHUNKED,
    DEFAULT_GROUP,
    IN_GROUP,
    SERIAL,
    THREADED,
)
from aiogpu.worker.chunk import METHOD_MARK

if TYPE_CHECKING:
    from aiogpu.client.function_spec import ActorTerms

T = TypeVar("T")


class Method:
    """A public method of an actor's class.

    Attributes:
        name: the name in calls: the name of the class's attribute, and the group if
            the calls run in another group than the method's.
        label: the name for handles and error messages.
        group: the method's concurrency group.
        returns: number of results of a call; 0 for a single result.
        is_coroutine: True if the method needs an event loop.
        window: items that a generator may be ahead; 0 for other methods.
        run_limit: seconds that a call may run; None for no limit.
    """

    def __init__(self, owner: str, name: str, attribute: Any) -> None:
        function = getattr(attribute, "__func__", attribute)
        options: TaskOptions = getattr(function, METHOD_MARK, TaskOptions())
        self.name = name
        self.label = f"{owner}.{name}"
        self.group = options.concurrency_group or DEFAULT_GROUP
        self.returns = options.num_returns if options.num_returns > 1 else 0
        self.is_coroutine, is_generator = kind_of(function)
        self.window = (options.max_buffered or MAX_BUFFERED) if is_generator else 0
        self.run_limit = options.run_timeout
        self._attribute = attribute

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters; determined at first use."""
        function = getattr(self._attribute, "__func__", self._attribute)
        signature = signature_of(function)
        if signature is not None and not isinstance(self._attribute, staticmethod):
            signature = without_self(signature)
        return Parameters(self.label, signature)

    @property
    def attribute(self) -> str:
        """The name of the method in the class."""
        return self.name.partition(IN_GROUP)[0]

    def with_options(self, options: dict[str, Any], groups: tuple[str, ...]) -> Method:
        """Return this method with other options for some of its calls.

        Args:
            options: checked options of a call.
            groups: the concurrency groups of the actor's class.

        Raises:
            OptionError: the class has no such group, or the option does not apply.
        """
        method = copy(self)
        for name, value in options.items():
            if name not in TaskOptions.taken_by("call"):
                raise OptionError(
                    f"{name} is an option of the method, not of one call: write "
                    f"`@aiogpu.method({name}={value!r})` above {self.label}."
                )
        if "num_returns" in options:
            if self.window:
                raise not_counted(self.label, options["num_returns"])
            returns: int = options["num_returns"]
            method.returns = returns if returns > 1 else 0
        group = options.get("concurrency_group")
        if group is not None:
            if group not in groups:
                raise OptionError(
                    f"{self.label} has no concurrency_group {group!r}; the groups of "
                    f"its class are: {', '.join(groups) or 'none'}. Write "
                    f"@aiogpu.remote(concurrency_groups={{{group!r}: 2}})."
                )
            method.group = group
            method.name = f"{self.attribute}{IN_GROUP}{group}"
        return method

    def __getstate__(self) -> dict[str, Any]:
        # A handle needs only the parameters of the function.
        return {**self.__dict__, "_attribute": None, "parameters": self.parameters}

    def pack(
        self,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        is_chunk: bool = False,
    ) -> bytes:
        """Check and pickle the arguments of a call, or of a `Chunk` of calls.

        Raises:
            MisuseError: the arguments do not match the method's parameters.
            SerializationError: an argument cannot be pickled.
        """
        parameters = self.parameters
        count = 1 if is_chunk else len(args)
        if kwargs or not parameters.least <= count <= parameters.most:
            parameters.check(args[:count], kwargs)
        if not args and not kwargs and not self.returns:
            return NO_ARGUMENTS
        payload = dump_arguments(self.label, args, kwargs, self.returns)
        if type(payload) is PickledValue:
            from aiogpu.api.calls import packed_call

            return packed_call(self.label, args, kwargs, payload)
        return payload  # type: ignore[return-value]


def methods_of(cls: type) -> dict[str, Method]:
    """Return the public methods of a class and of its bases, by name."""
    methods: dict[str, Method] = {}
    for name in dir(cls):
        attribute: object = inspect.getattr_static(cls, name, None)
        if not name.startswith("_") and _is_method(attribute):
            methods[name] = Method(cls.__name__, name, attribute)
    return methods


def _is_method(attribute: object) -> bool:
    """Return whether a class attribute is a method."""
    if isinstance(attribute, staticmethod | classmethod):
        return True
    is_bound = hasattr(type(attribute), "__get__")
    return is_bound and callable(attribute) and not isinstance(attribute, type)


class ActorInterface:
    """The methods of an actor's class and their options.

    Attributes:
        name: the name of the class.
        methods: the public methods, by name.
        parameters: the parameters of the constructor.
        group_names: the concurrency groups in the class's options.
    """

    def __init__(self, cls: type) -> None:
        self.name = cls.__name__
        self.group_names: tuple[str, ...] = ()
        self.methods = methods_of(cls)
        self.parameters = Parameters(self.name, signature_of(cls))

    def with_groups(self, options: TaskOptions) -> ActorInterface:
        """Return the interface of the class with these concurrency groups."""
        names = tuple(options.concurrency_groups)
        if names == self.group_names:
            return self
        interface = copy(self)
        interface.group_names = names
        return interface

    def check_eviction(self, options: TaskOptions) -> None:
        """Check that an actor that is evicted can keep its state, or keeps none.

        Raises:
            OptionError: only one of `on_evict` and `on_return` is there, or one is not
                a plain method, or takes other arguments.
        """
        hooks = {"on_evict": 0, "on_return": 1}
        if options.evict_after is None or not hooks.keys() & self.methods.keys():
            return
        for name, count in hooks.items():
            method = self.methods.get(name)
            is_fit = (
                method is not None
                and not (method.is_coroutine or method.window)
                and method.parameters.least <= count <= method.parameters.most
            )
            if not is_fit:
                raise OptionError(
                    f"{self.name} has evict_after, and {name} is missing or does not "
                    f"fit: to keep its state it needs both `def on_evict(self)`, which "
                    f"returns the state, and `def on_return(self, state)`, which gets "
                    f"it after the constructor; both without `async`."
                )

    def terms(self, options: TaskOptions) -> ActorTerms:
        """Return the terms of all actors of the class with these options."""
        from aiogpu.client.function_spec import ActorTerms

        groups = options.concurrency_groups
        if any(method.is_coroutine for method in self.methods.values()):
            mode, usual = ASYNC, INTERLEAVED
        else:
            is_threaded = groups or (options.max_concurrency or 1) > 1
            mode, usual = THREADED if is_threaded else SERIAL, THREADS
        methods = self.methods.items()
        windows = {name: each.window for name, each in methods if each.window}
        windows |= _by_group(windows, groups)
        limits = {name: each.run_limit for name, each in methods if each.run_limit}
        limits |= _by_group(limits, groups)
        # A chunk of a map is called by a separate name.
        limits |= {name + CHUNKED: limit for name, limit in limits.items()}
        return ActorTerms(
            mode,
            {DEFAULT_GROUP: options.max_concurrency or usual, **groups},
            self.groups(options),
            options.max_task_retries,
            keeps_cpus=options.num_cpus is not None,
            interface=self,
            windows=windows,
            run_limits=limits,
            evict_after=options.evict_after,
            keeps_state="on_evict" in self.methods,
        )

    def groups(self, options: TaskOptions) -> dict[str, str]:
        """Return the group of each method that has one, by the name in calls.

        Raises:
            OptionError: the class has no such group.
        """
        named = {
            name: method.group
            for name, method in self.methods.items()
            if method.group != DEFAULT_GROUP
        }
        for name, group in named.items():
            if group not in options.concurrency_groups:
                groups = ", ".join(options.concurrency_groups) or "none"
                raise OptionError(
                    f"{self.name}.{name} is in the concurrency group {group!r}, but "
                    f"the groups of its class are: {groups}. Write "
                    f"@aiogpu.remote(concurrency_groups={{{group!r}: 2}})."
                )
        # A call may run in another group than its method's.
        named |= {
            f"{name}{IN_GROUP}{group}": group
            for name in self.methods
            for group in options.concurrency_groups
        }
        # A chunk of a map is called by a separate name.
        return named | {name + CHUNKED: group for name, group in named.items()}


def _by_group(methods: Mapping[str, T], groups: Iterable[str]) -> dict[str, T]:
    """Return values of methods, by the names of calls in each of the groups."""
    return {
        f"{name}{IN_GROUP}{group}": value
        for name, value in methods.items()
        for group in groups
    }


METHODS_OF_RAY: Final = MappingProxyType(
    {
        "__ray_ready__": "write `await actor`, or `aiogpu.sync.get(actor)` without an "
        "event loop",
        "__ray_terminate__": "write `async with A.remote() as actor`, or `with` "
        "without an event loop, which ends the actor after its calls",
    }
)
"""Methods of every actor of Ray, with their replacements."""


def no_method(interface: ActorInterface, name: str) -> AttributeError:
    """Return the error for a private or missing method."""
    if name in METHODS_OF_RAY:
        hint = METHODS_OF_RAY[name]
        return AttributeError(f"{interface.name} has no {name}: {hint}.")
    if name.startswith("_"):
        return AttributeError(
            f"{name} of {interface.name} is private; only public methods of an actor "
            f"can be called."
        )
    return AttributeError(
        f"{interface.name} has no method {name}."
        f"{did_you_mean(name, interface.methods)} Its methods are: "
        f"{', '.join(interface.methods) or 'none'}."
    )
