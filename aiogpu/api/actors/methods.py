"""The methods of an actor's class: what may be called, with what, and how it runs.

Light on purpose, as `api.remote_function` is: user modules bring this file into every
worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from aiogpu.api.options import (
    INTERLEAVED,
    MAX_BUFFERED,
    THREADS,
    MethodOptions,
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
    """One method of a class.

    Attributes:
        name: what its calls say: that of the class's attribute, and the group that
            they name if it is another than the method's.
        label: how handles and errors call it.
        group: its concurrency group.
        returns: how many results its calls have, 0 for the usual one.
        is_coroutine: whether it needs an event loop.
        window: if it is a generator, how many items it may be ahead; else 0.
        run_limit: the seconds that its code may run; None without limit.
    """

    def __init__(self, owner: str, name: str, found: Any) -> None:
        function = getattr(found, "__func__", found)
        options: MethodOptions = getattr(function, METHOD_MARK, MethodOptions())
        self.name = name
        self.label = f"{owner}.{name}"
        self.group = options.concurrency_group or DEFAULT_GROUP
        self.returns = options.num_returns if options.num_returns > 1 else 0
        self.is_coroutine, is_generator = kind_of(function)
        self.window = (options.max_buffered or MAX_BUFFERED) if is_generator else 0
        self.run_limit = options.run_timeout
        self._found = found

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters; determined at first use."""
        signature = signature_of(getattr(self._found, "__func__", self._found))
        if signature is not None and not isinstance(self._found, staticmethod):
            signature = without_self(signature)
        return Parameters(self.label, signature)

    @property
    def attribute(self) -> str:
        """The name of the method in the class."""
        return self.name.partition(IN_GROUP)[0]

    def with_options(self, options: dict[str, Any], groups: tuple[str, ...]) -> Method:
        """Return this method with other options for some of its calls.

        Args:
            options: checked ones of `MethodOptions`.
            groups: the concurrency groups of the actor's class.

        Raises:
            OptionError: the class has no such group, or a generator no such option.
        """
        found = copy(self)
        for name in ("max_buffered", "run_timeout"):
            if name in options:
                raise OptionError(
                    f"{name}={options[name]!r} belongs to the method and not to one "
                    f"call of {self.label}: write `@aiogpu.method({name}=...)` above "
                    f"it."
                )
        if "num_returns" in options:
            if self.window:
                raise not_counted(self.label, options["num_returns"])
            returns: int = options["num_returns"]
            found.returns = returns if returns > 1 else 0
        group = options.get("concurrency_group")
        if group is not None:
            if group not in groups:
                raise OptionError(
                    f"concurrency_group={group!r} of {self.label}: its class names "
                    f"{', '.join(groups) or 'none'}. Say "
                    f"@aiogpu.remote(concurrency_groups={{{group!r}: 2}})."
                )
            found.group = group
            found.name = f"{self.attribute}{IN_GROUP}{group}"
        return found

    def __getstate__(self) -> dict[str, Any]:
        # Of the function a handle needs no more than what it takes.
        return {**self.__dict__, "_found": None, "parameters": self.parameters}

    def pack(
        self,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        is_chunk: bool = False,
    ) -> bytes:
        """Check and pickle the arguments of a call, or of a `Chunk` of calls.

        Raises:
            MisuseError: it takes others.
            SerializationError: one of them cannot be pickled.
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
    """The public methods of a class and of its bases."""
    found: dict[str, Method] = {}
    for name in dir(cls):
        attribute: object = inspect.getattr_static(cls, name, None)
        if not name.startswith("_") and _is_method(attribute):
            found[name] = Method(cls.__name__, name, attribute)
    return found


def _is_method(attribute: object) -> bool:
    """Return whether it is called on an object of the class it is found in."""
    if isinstance(attribute, staticmethod | classmethod):
        return True
    is_bound = hasattr(type(attribute), "__get__")
    return is_bound and callable(attribute) and not isinstance(attribute, type)


class ActorInterface:
    """The methods of an actor's class and their options.

    Attributes:
        name: of the class.
        methods: those that may be called, by name.
        parameters: of the constructor.
        group_names: the concurrency groups that the class's options name.
    """

    def __init__(self, cls: type) -> None:
        self.name = cls.__name__
        self.group_names: tuple[str, ...] = ()
        self.methods = methods_of(cls)
        self.parameters = Parameters(self.name, signature_of(cls))

    def with_groups(self, options: TaskOptions) -> ActorInterface:
        """Return this description for a class with these concurrency groups."""
        names = tuple(options.concurrency_groups)
        if names == self.group_names:
            return self
        found = copy(self)
        found.group_names = names
        return found

    def terms(self, options: TaskOptions) -> ActorTerms:
        """Return the terms common to all actors of the class with these options."""
        from aiogpu.client.function_spec import ActorTerms

        groups = options.concurrency_groups
        if any(method.is_coroutine for method in self.methods.values()):
            mode, usual = ASYNC, INTERLEAVED
        else:
            is_threaded = groups or (options.max_concurrency or 1) > 1
            mode, usual = THREADED if is_threaded else SERIAL, THREADS
        methods = self.methods.items()
        windows = {name: it.window for name, it in methods if it.window}
        windows |= _by_group(windows, groups)
        limits = {name: it.run_limit for name, it in methods if it.run_limit}
        limits |= _by_group(limits, groups)
        # A chunk of a map is a call of its own name.
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
        )

    def groups(self, options: TaskOptions) -> dict[str, str]:
        """The group of each method that has one, by the name that a call says.

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
                there = ", ".join(options.concurrency_groups) or "none"
                raise OptionError(
                    f"{self.name}.{name} is in the concurrency group {group!r}; its "
                    f"class names {there}. Say "
                    f"@aiogpu.remote(concurrency_groups={{{group!r}: 2}})."
                )
        # One call may name another group than its method's.
        named |= {
            f"{name}{IN_GROUP}{group}": group
            for name in self.methods
            for group in options.concurrency_groups
        }
        # A chunk of a map is a call of its own name.
        return named | {name + CHUNKED: group for name, group in named.items()}


def _by_group(methods: Mapping[str, T], groups: Iterable[str]) -> dict[str, T]:
    """What is known of methods, for calls that name another group than theirs."""
    return {
        f"{name}{IN_GROUP}{group}": known
        for name, known in methods.items()
        for group in groups
    }


def no_method(interface: ActorInterface, name: str) -> AttributeError:
    """The error for a method that a class has not, or that is private."""
    if name.startswith("_"):
        return AttributeError(
            f"{name} of {interface.name} is private: actors are called by public "
            f"methods."
        )
    return AttributeError(
        f"{interface.name} has no method {name}."
        f"{did_you_mean(name, interface.methods)} There are: "
        f"{', '.join(interface.methods) or 'none'}."
    )
