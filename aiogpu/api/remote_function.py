"""`@remote` on functions and generators: what a module says at import, and `.remote()`.

Light on purpose: user modules bring this file into every worker, so asyncio and the
session are imported by the first `.remote()` alone. A generator's `.remote()` gives a
stream of its items.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NoReturn,
    ParamSpec,
    TypeVar,
    Unpack,
    overload,
)

from aiogpu.api.definition import Definition, Parameters, Reference
from aiogpu.api.mapper import Mapper, no_map
from aiogpu.api.options import (
    MAX_BUFFERED,
    TaskOptions,
    check_kinds,
    check_options,
    not_buffered,
    not_counted,
)
from aiogpu.api.usage_errors import CalledFirst, CalledFirstToIterate
from aiogpu.client.current import services
from aiogpu.errors import MisuseError, SerializationError
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import dump_arguments, dump_retried, load_reference

if TYPE_CHECKING:
    from aiogpu.api.handle import Handle
    from aiogpu.api.keywords import Options
    from aiogpu.api.stream import Stream
    from aiogpu.client.function_spec import Site


P = ParamSpec("P")


R = TypeVar("R")


A = TypeVar("A")


class Decorated(CalledFirst):
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

    def _known_as(self) -> Reference | None:
        """The name by which another process imports it; None if it goes by value.

        Raises:
            SerializationError: it would go by value, and multiprocessing sends it.
        """
        reference = self._definition.reference()
        pickler = sys._getframe(2).f_globals.get("__name__")
        if reference is None and pickler == "multiprocessing.reduction":
            raise SerializationError(
                f"{self!r} cannot be sent by multiprocessing, which finds functions "
                f"and classes by their names, and the name {self.__qualname__} is that "
                f"of the remote one. aiogpu needs no pool: `{self.__name__}.remote(...)"
                f"` runs in a worker. For a pool put it into a module of its own, or "
                f"keep the plain one: `remote_one = aiogpu.remote({self.__name__})`."
            )
        return reference


class RemoteFunction(Decorated, Mapper, Generic[P, R]):
    """A function that runs in a worker; call it by `.remote(...)`."""

    def __init__(self, definition: Definition, options: TaskOptions) -> None:
        super().__init__(definition)
        if options.max_buffered is not None and not definition.is_generator:
            raise not_buffered(definition.name)
        self._options = options
        self._returns = options.num_returns if options.num_returns > 1 else 0
        self._submit: Callable[[Site, bytes], Handle[R]]
        self._least: int
        self._most: float
        self._in_chunks: RemoteFunction[..., Any] | None = None

    @overload
    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R]: ...

    @overload  # a handle as an argument: its type takes the place of the value's
    def remote(self, a: Handle[Any], /, *args: Any, **named: Any) -> Handle[R]: ...

    @overload
    def remote(
        self, a: Any, b: Handle[Any], /, *args: Any, **named: Any
    ) -> Handle[R]: ...

    @overload
    def remote(
        self, a: Any, b: Any, c: Handle[Any], /, *args: Any, **named: Any
    ) -> Handle[R]: ...

    def remote(self, /, *args: Any, **kwargs: Any) -> Handle[R]:
        """Start the task; gives its handle at once.

        Raises:
            MisuseError: the function takes other arguments.
            NoLoopError: no event loop is running here.
            InfeasibleError: the node can never give what the task asks for.
            SerializationError: the function or an argument cannot be pickled.
        """
        site = self._site or self._prepare()
        if kwargs or not self._least <= len(args) <= self._most:
            self._definition.parameters.check(args, kwargs)
        payload = dump_arguments(site.spec.name, args, kwargs, self._returns)
        if type(payload) is PickledValue:
            from aiogpu.api.put import packed_call

            payload = packed_call(site.spec.name, args, kwargs, payload)
        return self._submit(site, payload)  # type: ignore[arg-type]

    def _remote_chunk(self, arguments: tuple[Any, ...]) -> Handle[Any]:
        if self._in_chunks is None:
            self._definition.parameters.check(arguments[:1], {})  # as for one item
            self._in_chunks = self._chunked()
        return self._in_chunks.remote(*arguments)

    def _chunked(self) -> RemoteFunction[..., Any]:
        """The function, with its options, as it is called with chunks.

        Raises:
            SerializationError: with the path to what cannot be pickled.
        """
        from aiogpu.client.function_spec import Function, new_function_id
        from aiogpu.serialization.serializer import dump_function
        from aiogpu.worker.chunk import Sent

        base = self._definition
        chunked = Definition(base.function)
        sent = dump_function(base.name, Sent(base.sent().payload))
        chunked._sent = Function(new_function_id(), sent)
        # Seconds, and any number of items.
        chunked.parameters = Parameters(base.name, None)
        return RemoteFunction(chunked, self._options)

    def _tried_once(self) -> RemoteFunction[P, R]:
        """What an item of `map` is called by that has been tried once already."""
        left = max(self._options.max_retries - 1, -1)  # -1 is without end
        options = self._options._replace(max_retries=left)
        return RemoteFunction(self._definition, options)

    def _prepare(self) -> Site:
        """All that is done once per function: checks, pickling, the request."""
        from aiogpu.client.function_spec import Site, new_site_id

        options, definition = self._options, self._definition
        function = definition.sent()
        spec = options.spec(definition.name, function.id)
        self._submit = self._way()
        parameters = definition.parameters
        self._least, self._most = parameters.least, parameters.most
        self._site = Site(
            id=new_site_id(),
            function=function,
            spec=spec,
            resources=spec.shape.request.as_numbers(),
            environ=dict(options.runtime_env),
            is_coroutine=definition.is_coroutine,
            retry_exceptions=options.retry_exceptions,
            retried=dump_retried(options.retry_exceptions),
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
        def __call__(self, /, *args: object, **kwargs: object) -> NoReturn:
            """Always raises `MisuseError`: a remote function is not called directly."""
            raise MisuseError(
                f"{self.__name__} is a remote function and runs in a worker: write "
                f"`await {self.__name__}.remote(...)`. To call it here, in this "
                f"process, write `{self.__name__}.__wrapped__(...)`."
            )

    def _way(self) -> Callable[[Site, bytes], Any]:
        """Who takes this process's calls: a program's session, or a worker's task."""
        if self._returns:
            from functools import partial

            from aiogpu.api.result_group import submit_several

            return partial(submit_several, self._returns)
        if services.client is not None:
            from aiogpu.api.blocking import submit_in_task

            return submit_in_task
        from aiogpu.api.submission import submit

        return submit

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        source = self._known_as() or self._definition.function
        return _rebuild, (source, self._options)


def _rebuild(
    source: Reference | Callable[..., Any], options: TaskOptions
) -> RemoteFunction[..., Any]:
    if not isinstance(source, Reference):
        return made(Definition(source), options)
    found = load_reference(*source)
    if isinstance(found, RemoteFunction):
        return made(found._definition, options)
    return made(Definition(found), options)


def made(definition: Definition, options: TaskOptions) -> RemoteFunction[..., Any]:
    """What a function of its kind becomes; raises `OptionError` if one does not fit."""
    if definition.is_generator:
        return RemoteGenerator(definition, options)
    return RemoteFunction(definition, options)


def merged(base: TaskOptions, options: Options) -> TaskOptions:
    """Options on top of others; raises `OptionError`."""
    found = base._replace(**check_options(dict(options)))
    check_kinds(found.num_gpus, found.gpu_memory, found.resources)
    return found


T = TypeVar("T")


class RemoteGenerator(CalledFirstToIterate, RemoteFunction[P, Any], Generic[P, T]):
    """A generator that runs in a worker; iterate what `.remote(...)` gives."""

    def __init__(self, definition: Definition, options: TaskOptions) -> None:
        if options.num_returns != 1:
            raise not_counted(definition.name, options.num_returns)
        super().__init__(definition, options)

    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]:  # type: ignore[override]
        """Start the task; gives the stream of its items at once.

        In a plain function that runs as a task itself, iterate it by `for`.

        Raises:
            MisuseError: the generator takes other arguments.
            NoLoopError: no event loop is running here.
            InfeasibleError: the node can never give what the task asks for.
            SerializationError: the function or an argument cannot be pickled.
        """
        site = self._site or self._prepare()
        if kwargs or not self._least <= len(args) <= self._most:
            self._definition.parameters.check(args, kwargs)
        payload = dump_arguments(site.spec.name, args, kwargs)
        if isinstance(payload, PickledValue):
            from aiogpu.api.put import packed_call

            payload = packed_call(site.spec.name, args, kwargs, payload)
        return self._submit(site, payload)  # type: ignore[return-value]

    def options(self, **options: Unpack[Options]) -> RemoteGenerator[P, T]:
        """The same generator with other options; this one is left as it is.

        Raises:
            OptionError: names the option, the value and what is allowed.
        """
        return RemoteGenerator(self._definition, merged(self._options, options))

    if not TYPE_CHECKING:

        def map(self, *_args: object, **_options: object) -> NoReturn:
            """Always raises `MisuseError`: a generator gives many results a call."""
            raise no_map(self.__name__)

        def __call__(self, /, *args: object, **kwargs: object) -> NoReturn:
            """Always raises `MisuseError`: a generator is not called directly."""
            raise MisuseError(
                f"{self.__name__} is a remote generator and runs in a worker: write "
                f"`async for item in {self.__name__}.remote(...)`. To call it here, in "
                f"this process, write `{self.__name__}.__wrapped__(...)`."
            )

    def _way(self) -> Callable[[Site, bytes], Any]:

        if services.client is not None:
            from aiogpu.api.blocking_stream import stream_in_task

            return stream_in_task
        from aiogpu.api.submission import stream

        return stream
