"""`@remote` on functions: what a module says at import, and `.remote()` does.

Light on purpose: user modules bring this file into every worker, so asyncio and
the session are imported by the first `.remote()` alone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    NamedTuple,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from aiogpu.api.mapper import Mapper
from aiogpu.api.options import (
    MAX_BUFFERED,
    TaskOptions,
    check_options,
    not_buffered,
)
from aiogpu.errors import MisuseError, OptionError
from aiogpu.wire.outgoing import Outgoing
from aiogpu.wire.payload import (
    HEAVY,
    dump_arguments,
    dump_function,
    dump_reference,
    is_sent_by_value,
    load_reference,
)

if TYPE_CHECKING:
    from aiogpu.api.actor import RemoteClass
    from aiogpu.api.actor_keywords import AnyKeywords
    from aiogpu.api.generator import RemoteGenerator
    from aiogpu.api.handle import Handle
    from aiogpu.api.keywords import Options
    from aiogpu.runtime.call import Function, Site

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
_MAIN: Final = ("__main__", "__mp_main__")


class Reference(NamedTuple):
    """A function that others import by name."""

    module: str
    qualname: str


_referenced: Final[dict[Reference, Definition]] = {}
"""Who is meant by a name; a later definition of it must be sent by value."""


class Definition:
    """One decorated function, shared by all its `.options(...)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        is_async_generator = inspect.isasyncgenfunction(function)
        self.is_coroutine = is_async_generator or inspect.iscoroutinefunction(function)
        self.is_generator = is_async_generator or inspect.isgeneratorfunction(function)
        self._sent: Function | None = None

    def sent(self) -> Function:
        """The function as workers get it; pickled when it is first needed.

        A warning tells of one that takes much with it.

        Raises:
            SerializationError: with the path to what cannot be pickled.
        """
        if self._sent is None:
            from aiogpu.runtime.call import Function, new_function_id

            reference = self.reference()
            payload = (
                dump_function(self.name, self.function)
                if reference is None
                else dump_reference(*reference)
            )
            self._sent = Function(new_function_id(), payload)
            if len(payload) > HEAVY:
                from aiogpu.wire.weight import advise_on_function

                advise_on_function(self.name, self.function, len(payload))
        return self._sent

    def reference(self) -> Reference | None:
        """The name under which workers can import the function, None without one."""
        reference = Reference(
            getattr(self.function, "__module__", None) or "__main__",
            getattr(self.function, "__qualname__", self.name),
        )
        if reference.module in _MAIN or is_sent_by_value(reference.module):
            return None
        found: object = sys.modules.get(reference.module)
        for name in reference.qualname.split("."):
            found = getattr(found, name, None)
        if getattr(found, "__aiogpu_function__", found) is not self.function:
            return None
        if _referenced.setdefault(reference, self) is not self:
            return None
        return reference


class Decorated:
    """What `remote` makes of a function or a class, under the names of that."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._site: Site | None = None
        function = definition.function
        self.__wrapped__ = self.__aiogpu_function__ = function
        self.__name__ = definition.name
        self.__qualname__ = getattr(function, "__qualname__", definition.name)
        self.__module__ = getattr(function, "__module__", None) or "__main__"
        self.__doc__ = function.__doc__

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.__module__}.{self.__qualname__}>"


class RemoteFunction(Decorated, Mapper, Generic[P, R]):
    """A function that runs in a worker; call it by `.remote(...)`."""

    def __init__(self, definition: Definition, options: TaskOptions) -> None:
        super().__init__(definition)
        if options.max_buffered is not None and not definition.is_generator:
            raise not_buffered(definition.name)
        self._options = options
        self._returns = options.num_returns if options.num_returns > 1 else 0
        self._submit: Callable[[Site, bytes], Handle[R]]
        self._in_chunks: RemoteFunction[..., Any] | None = None

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Start the task; gives its handle at once.

        Raises:
            NoLoopError: no event loop is running here.
            InfeasibleError: the node can never give what the task asks for.
            SerializationError: the function or an argument cannot be pickled.
        """
        site = self._site or self._prepare()
        payload = dump_arguments(site.spec.name, args, kwargs, self._returns)
        if isinstance(payload, Outgoing):
            from aiogpu.api.packing import packed_call

            payload = packed_call(site.spec.name, args, kwargs, payload)
        return self._submit(site, payload)

    def _remote_chunk(self, arguments: tuple[Any, ...]) -> Handle[Any]:
        if self._in_chunks is None:
            from aiogpu.api.chunks import in_chunks

            self._in_chunks = in_chunks(self)
        return self._in_chunks.remote(*arguments)

    def _prepare(self) -> Site:
        """All that is done once per function: checks, pickling, the request."""
        from aiogpu.runtime.call import Site, new_site_id

        options, definition = self._options, self._definition
        function = definition.sent()
        spec = options.spec(definition.name, function.id)
        self._submit = self._way()
        self._site = Site(
            id=new_site_id(),
            function=function,
            spec=spec,
            resources=spec.shape.request.as_numbers(),
            environ=dict(options.runtime_env),
            is_coroutine=definition.is_coroutine,
            retry_exceptions=options.retry_exceptions,
            window=(options.max_buffered or MAX_BUFFERED)
            if definition.is_generator
            else 0,
        )
        return self._site

    def options(self, **options: Unpack[Options]) -> RemoteFunction[P, R]:
        """The same function with other options; this one is left as it is.

        Raises:
            OptionError: names the option, the value and what is allowed.
        """
        return RemoteFunction(self._definition, merged(self._options, options))

    if not TYPE_CHECKING:
        # Visible, it would make type checkers accept every direct call.
        def __call__(self, *args: object, **kwargs: object) -> NoReturn:
            """Always raises `MisuseError`: a remote function is not called directly."""
            raise MisuseError(
                f"{self.__name__} is a remote function and runs in a worker: write "
                f"`await {self.__name__}.remote(...)`. To call it here, in this "
                f"process, write `{self.__name__}.__wrapped__(...)`."
            )

    def _way(self) -> Callable[[Site, bytes], Any]:
        """Who takes this process's calls: a program's session, or a worker's task."""
        from aiogpu.worker.context import current

        if self._returns:
            from functools import partial

            from aiogpu.api.several import submit_several

            return partial(submit_several, self._returns)
        if current.children is not None:
            from aiogpu.api.blocking import submit_child

            return submit_child
        from aiogpu.api.submission import submit

        return submit

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        definition = self._definition
        return _rebuild, (definition.reference() or definition.function, self._options)


def _rebuild(
    source: Reference | Callable[..., Any], options: TaskOptions
) -> RemoteFunction[..., Any]:
    if not isinstance(source, Reference):
        return _made(Definition(source), options)
    found = load_reference(*source)
    if isinstance(found, RemoteFunction):
        return _made(found._definition, options)
    return _made(Definition(found), options)


def _made(definition: Definition, options: TaskOptions) -> RemoteFunction[..., Any]:
    """What a function of its kind becomes; raises `OptionError` if one does not fit."""
    if definition.is_generator:
        from aiogpu.api.generator import RemoteGenerator

        return RemoteGenerator(definition, options)
    return RemoteFunction(definition, options)


class RemoteDecorator(Protocol):
    """What `@remote(...)` with options gives: a decorator that keeps types."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: type[A], /
    ) -> RemoteClass[..., A]: ...

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> RemoteFunction[P, R]: ...

    @overload
    def __call__(
        self, function: Callable[P, Iterator[R] | AsyncIterator[R]], /
    ) -> RemoteGenerator[P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> RemoteFunction[P, R]: ...


@overload
def remote(  # type: ignore[overload-overlap]
    function: type[A], /
) -> RemoteClass[..., A]: ...


@overload
def remote(
    function: Callable[P, Coroutine[Any, Any, R]], /
) -> RemoteFunction[P, R]: ...


@overload
def remote(
    function: Callable[P, Iterator[R] | AsyncIterator[R]], /
) -> RemoteGenerator[P, R]: ...


@overload
def remote(function: Callable[P, R], /) -> RemoteFunction[P, R]: ...


@overload
def remote(**options: Unpack[AnyKeywords]) -> RemoteDecorator: ...


def remote(function: Any = None, /, **options: Any) -> Any:
    """Make a function or a class remote: `@remote`, or `@remote(num_gpus=0.25)`.

    Args:
        function: a plain function, an `async def`, a generator of either kind, or
            the class of an actor.
        **options: see `Options` for functions, `ActorKeywords` for classes.

    Raises:
        OptionError: names the option, the value and what is allowed.
        MisuseError: it is neither, or a function of a kind that cannot be a task.
    """
    _check_any(dict(options))
    if function is None:
        return lambda function: _decorate(function, dict(options))
    if options:
        raise MisuseError(
            "remote() takes a function or options, not both; write "
            "`@remote(num_gpus=1)` above the function."
        )
    return _decorate(function, {})


def _check_any(options: dict[str, Any]) -> None:
    """Refuse what neither a task nor an actor takes, before it is known which it is."""
    from aiogpu.api.actor_options import ACTOR_CHECKS, check_actor_options

    try:
        check_options(options)
    except OptionError:
        if not set(options) <= set(ACTOR_CHECKS):
            raise
        check_actor_options(options)


def merged(base: TaskOptions, options: Options) -> TaskOptions:
    """Options on top of others; raises `OptionError`."""
    return base._replace(**check_options(dict(options)))


def _decorate(function: object, options: dict[str, Any]) -> object:
    if isinstance(function, type):
        from aiogpu.api.actor import decorate_class

        return decorate_class(function, options)
    if "__aiogpu_function__" in getattr(function, "__dict__", ()):
        name = getattr(function, "__name__", "")
        raise MisuseError(
            f"{name} is remote already; write {name}.options(...) to change its "
            f"options."
        )
    checked = merged(TaskOptions(), cast("Options", options))
    if not callable(function):
        raise MisuseError(
            f"remote() was given {function!r}; give it a function, or options by name."
        )
    return _made(Definition(function), checked)
