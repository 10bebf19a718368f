"""Remote functions: `@remote` makes them, `.remote()` calls them.

A `Definition` is the decorated function, pickled once; `Parameters` checks arguments
before a call is sent. Light to import: user modules load this file in every worker, so
only the first `.remote()` imports asyncio and the session.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Generic,
    Literal,
    NamedTuple,
    Never,
    ParamSpec,
    Self,
    TypeVar,
    Unpack,
    overload,
)

from aiogpu.api.options import (
    CHECKS,
    MAX_BUFFERED,
    TaskOptions,
    check_flag,
    merged,
    not_buffered,
    not_counted,
)
from aiogpu.api.usage_errors import CalledFirst, CalledFirstToIterate, options_of
from aiogpu.client.current import decorated, is_in_task
from aiogpu.errors import MisuseError, SerializationError
from aiogpu.serialization.references import PickledValue, collect_references
from aiogpu.serialization.serializer import (
    WARNED_FROM,
    dump_arguments,
    dump_function,
    dump_reference,
    dump_retried,
    load_reference,
)

if TYPE_CHECKING:
    from aiogpu.api.keywords import Options
    from aiogpu.api.map import Results, TakesOne
    from aiogpu.api.results.handle import Handle
    from aiogpu.api.results.stream import Stream
    from aiogpu.client.function_spec import Function, FunctionSpec
    from aiogpu.core.model.request import TaskSpec


class Parameters:
    """The parameters of a function, with a fast check of positional arguments.

    Functions without a signature, such as some builtins, accept any arguments.

    Attributes:
        least: fewest positional arguments.
        most: most positional arguments. A call with only positional arguments, `least`
            to `most` of them, needs no `check`.
    """

    def __init__(
        self, name: str, signature: inspect.Signature | None, owner: str = ""
    ) -> None:
        self._name = name
        self._signature = signature
        self._owner = owner
        self.least, self.most = (
            (0, float("inf")) if signature is None else _positions(signature)
        )
        self._accepted: tuple[object, ...] = ()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        signature = self._signature
        if signature is not None:
            # Defaults and annotations may be unpicklable; keep only which have one.
            plain = [
                inspect.Parameter(
                    parameter.name,
                    parameter.kind,
                    default=parameter.default
                    if parameter.default is parameter.empty
                    else ...,
                )
                for parameter in signature.parameters.values()
            ]
            signature = inspect.Signature(plain)
        return Parameters, (self._name, signature, self._owner)

    def check(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Raise `MisuseError` unless the function takes these arguments."""
        if not kwargs and self.least <= len(args) <= self.most:
            return
        # Calls with keywords mostly have the same shape, and `bind` takes microseconds.
        shape = (len(args), *kwargs)
        if self._signature is None or shape == self._accepted:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            advice = ""
            if options := [name for name in kwargs if name in CHECKS["task"]]:
                advice = (
                    f" To set an option, write .options({options[0]}=...).remote()."
                )
            if self._owner and next(iter(self._signature.parameters), "") == "self":
                advice = (
                    f" {self._name} is a method of {self._owner}: put @aiogpu.remote "
                    f"above the class instead."
                )
            raise MisuseError(
                f"{self._name}{self._signature} was called with wrong arguments: "
                f"{error}.{advice}"
            ) from None
        self._accepted = shape


def _positions(signature: inspect.Signature) -> tuple[int, float]:
    """Return the fewest and the most positional arguments of a signature."""
    least, most = 0, 0.0
    for parameter in signature.parameters.values():
        is_needed = parameter.default is parameter.empty
        if parameter.kind is parameter.VAR_POSITIONAL:
            most = float("inf")
        elif parameter.kind is parameter.KEYWORD_ONLY and is_needed:
            return 1, 0.0  # an empty range: positional arguments are never enough
        elif parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        ):
            least += is_needed
            most += 1
    return least, most


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function or class, ignoring `__wrapped__`; or None."""
    try:
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def without_self(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature without its first parameter, as a bound method has it."""
    parameters = [*signature.parameters.values()]
    if not parameters or parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return signature
    return signature.replace(parameters=parameters[1:])


def kind_of(function: object) -> tuple[bool, bool]:
    """Return whether a function needs an event loop, and whether it yields items."""
    is_async_generator = inspect.isasyncgenfunction(function)
    return (
        is_async_generator or inspect.iscoroutinefunction(function),
        is_async_generator or inspect.isgeneratorfunction(function),
    )


class FunctionName(NamedTuple):
    """The name by which another process can import a function."""

    module: str
    qualname: str


_referenced: Final[dict[FunctionName, Definition]] = {}
"""Definitions that are sent by name. A later function with the same name, as in a
reloaded module, must be sent by value."""


class Definition:
    """One decorated function, shared by all its `.options(...)` with the same `setup`.

    Args:
        function: the function.
        setup: the option `setup`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        setup: Callable[[], object] | None = None,
    ) -> None:
        self.function = function
        self.setup = setup
        self._variants: dict[Callable[[], object] | None, Definition] = {setup: self}
        self.name = getattr(function, "__name__", type(function).__name__)
        self.is_coroutine, self.is_generator = kind_of(function)
        self._pickled: Function | None = None
        decorated.add(self)

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters of the function; determined at first use."""
        place = getattr(self.function, "__qualname__", "").rpartition(".")[0]
        owner = "" if place.endswith("<locals>") else place.rpartition(".")[2]
        return Parameters(self.name, signature_of(self.function), owner)

    def with_setup(self, setup: Callable[[], object] | None) -> Definition:
        """Return the same function with this setup."""
        if setup is self.setup:
            return self
        variant = self._variants.get(setup)
        if variant is None:
            variant = self._variants[setup] = Definition(self.function, setup)
            variant._variants = self._variants
        return variant

    def pickled(self) -> Function:
        """Return the pickled function; a large one causes a warning.

        Raises:
            SerializationError: with the path to what cannot be pickled.
        """
        if self._pickled is None:
            self._pickled = pickled = self._pickle()
            if len(pickled.payload) > WARNED_FROM:
                from aiogpu.serialization.large_arguments import advise_on_function

                advise_on_function(self.name, self.function, len(pickled.payload))
        return self._pickled

    def _name(self) -> FunctionName:
        return FunctionName(
            getattr(self.function, "__module__", None) or "__main__",
            getattr(self.function, "__qualname__", self.name),
        )

    def _pickle(self) -> Function:
        from aiogpu.client.function_spec import Function, new_function_id
        from aiogpu.serialization.modules import needed_modules

        reference = self.reference()
        functions = [f for f in (self.function, self.setup) if f is not None]
        with collect_references(are_actors=True) as actors:
            if self.setup is not None:
                payload = self._pickle_pair(reference)
            elif reference is None:
                payload = dump_function(self.name, self.function)
            else:
                payload = dump_reference(*reference)
        return Function(
            id=new_function_id(),
            payload=payload,
            actors=tuple(actors),
            modules=() if is_in_task() else needed_modules(*functions),
            name=".".join(self._name()),
        )

    def _pickle_pair(self, reference: FunctionName | None) -> bytes:
        from aiogpu.client.setup import PickledSetup
        from aiogpu.serialization.pickler import importable

        setup = self.setup
        place = getattr(setup, "__module__", ""), getattr(setup, "__qualname__", "")
        parts: list[object] = [setup, self.function]
        if place[0] and importable(*place) is setup:
            parts[0] = place
        if reference is not None:
            parts[1] = tuple(reference)
        pair = dump_function(self.name, parts)
        return dump_function(self.name, PickledSetup(self.name, pair))

    def renewed(self) -> Definition:
        """Return the function as it is now, pickled again; itself if nothing changed.

        Raises:
            SerializationError: with the path to what cannot be pickled.
        """
        renewed = Definition(self.function, self.setup)
        renewed._pickled = renewed._pickle()
        is_same = renewed._pickled.payload == self.pickled().payload
        return self if is_same else renewed

    def chunked(self) -> Definition:
        """Return a definition that takes a time in seconds and any number of items.

        Raises:
            SerializationError: with the path to what cannot be pickled.
        """
        from aiogpu.client.function_spec import new_function_id
        from aiogpu.worker.chunk import PickledChunk

        chunked = Definition(self.function, self.setup)
        pickled = self.pickled()
        payload = dump_function(self.name, PickledChunk(pickled.payload))
        chunked._pickled = replace(pickled, id=new_function_id(), payload=payload)
        chunked.parameters = Parameters(self.name, None)
        return chunked

    def reference(self) -> FunctionName | None:
        """Return the name by which workers can import the function; None without one.

        Workers can import the function only if the name refers to it: not in
        `__main__`, not in a module that is pickled by value, not if redefined.
        """
        # Imported late: it imports cloudpickle, and defining a function needs none.
        from aiogpu.serialization.pickler import importable

        reference = self._name()
        target = importable(*reference)
        if getattr(target, "__aiogpu_function__", target) is not self.function:
            return None
        if _referenced.setdefault(reference, self).function is not self.function:
            return None
        return reference


X_contra = TypeVar("X_contra", contravariant=True)


Y = TypeVar("Y")


class Mapper:
    """Mixin: `map` calls the object with each item of an iterable."""

    __slots__ = ()

    if TYPE_CHECKING:

        @overload
        def map(
            self: TakesOne[X_contra, Y],
            iterable: Iterable[X_contra] | AsyncIterable[X_contra],
            *,
            limit: int | None = None,
            ordered: bool = True,
            chunk: int | Literal["auto"] | None = None,
            return_exceptions: Literal[False] = False,
            progress: bool = False,
        ) -> Results[Y]: ...

        @overload
        def map(
            self: TakesOne[X_contra, Y],
            iterable: Iterable[X_contra] | AsyncIterable[X_contra],
            *,
            limit: int | None = None,
            ordered: bool = True,
            chunk: int | Literal["auto"] | None = None,
            return_exceptions: Literal[True],
            progress: bool = False,
        ) -> Results[Y | Exception]: ...

    @options_of("map()")
    def map(
        self: TakesOne[X_contra, Y],
        iterable: Iterable[X_contra] | AsyncIterable[X_contra],
        *others: Never,
        limit: int | None = None,
        ordered: bool = True,
        chunk: int | Literal["auto"] | None = None,
        return_exceptions: bool = False,
        progress: bool = False,
    ) -> Results[Any]:
        """Call the function with each item; return an async iterator over the results.

        At most `limit` calls are in flight: started, with a result that the consumer
        has not taken. The iterable may be endless: it is read at most `limit` items
        ahead of the consumer. With `ordered`, one slow call holds back the results
        behind it. A plain iterable is read on the event loop.

        An error of a call is raised in place of its result. An error of the iterable or
        of `.remote()` is raised at once. Either ends the iteration, and so does leaving
        the loop: all calls in flight are then cancelled, as by `handle.cancel()`. If a
        variable refers to the results, write `async with f.map(...) as results:` to
        cancel at the end of the block.

        With `chunk`, several items are sent as one task, which calls the function with
        one item after the other (coroutine functions as well). Results still come one
        by one, and an error comes after the results before it. A chunk is one task: it
        runs in one process, and `timeout` covers all its items. With
        `retry_exceptions` a failed item is retried alone. If the worker dies, the chunk
        starts again; after `max_retries` the error takes the place of its first item.

        `chunk="auto"` takes items back from a task that runs longer than 50 ms. With an
        async iterable it waits at most 5 ms for items to fill a chunk. A given `limit`
        leaves room for at least 16 such tasks: `limit=160` bounds chunks to 10 items.

        Args:
            iterable: the arguments, one for each call; an iterable or async iterable.
            *others: none; a function of two arguments takes a pair instead.
            limit: most items in flight, 1 or more; None for 256, or with `chunk` for
                256 chunks. Set a lower limit if arguments or results are large: all
                items in flight are in memory.
            ordered: True for results in the order of the items, False for results in
                the order in which the calls end.
            chunk: items in a task, 1 or more; "auto" for as many as take about 4 ms;
                None for 1.
            return_exceptions: True to get an error of a call as a result, and go on.
                Errors of the iterable and of `.remote()` are raised nevertheless. If
                the process of a chunk dies, each of its items gets the error.
            progress: True for a progress bar: in a notebook, or at the bottom of a
                terminal on stderr; nothing if stderr is no terminal.

        Raises:
            OptionError: an option is invalid, or `limit` has no room for a chunk.
            MisuseError: `iterable` cannot be iterated.
            NoLoopError: no event loop is running in this thread.
        """
        if others:
            raise MisuseError(
                f"{self.__name__}.map() takes one iterable. To pass two arguments to "
                f"each call, map over `zip(a, b)` and let the function take the pair."
            )
        from aiogpu.api.map import Results, ResultsWithProgress

        kind = ResultsWithProgress if check_flag("progress", progress) else Results
        return kind(self, iterable, limit, ordered, chunk, return_exceptions)

    def _for_retry(self, error: Exception) -> Any:
        """Return the remote function that retries an item; None for no retry."""
        return None


P = ParamSpec("P")


R = TypeVar("R")


A = TypeVar("A")


class Decorated(CalledFirst):
    """Base of remote functions and classes; has the names of the decorated object."""

    def __init__(self, definition: Definition, options: TaskOptions) -> None:
        self._definition = definition
        self._options = options
        self._func: FunctionSpec | None = None
        function = definition.function
        self.__wrapped__ = self.__aiogpu_function__ = function
        self.__name__ = definition.name
        self.__qualname__ = getattr(function, "__qualname__", definition.name)
        self.__module__ = getattr(function, "__module__", None) or "__main__"
        self.__doc__ = function.__doc__
        multiprocessing: Any = sys.modules.get("multiprocessing.reduction")
        if multiprocessing is not None:
            multiprocessing.register(type(self), reduce_for_multiprocessing)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.__module__}.{self.__qualname__}>"

    def _new_spec(
        self, spec: TaskSpec, resources: Mapping[str, float], **more: Any
    ) -> FunctionSpec:
        """Make and keep the `FunctionSpec` that all calls refer to."""
        from aiogpu.client.function_spec import FunctionSpec, new_func_id

        definition, options = self._definition, self._options
        self._func = FunctionSpec(
            id=new_func_id(),
            function=definition.pickled(),
            spec=spec,
            resources=resources,
            environ=dict(options.runtime_env),
            ray_options=options.ray_options(),
            is_coroutine=definition.is_coroutine,
            retried=dump_retried(options.retry_exceptions),
            **more,
        )
        return self._func


def reduce_for_multiprocessing(remote: Decorated) -> Any:
    """Pickle by name; multiprocessing, which calls this, cannot send by value.

    Raises:
        SerializationError: the function or class cannot be imported by name.
    """
    if remote._definition.reference() is None:
        name = remote.__name__
        raise SerializationError(
            f"multiprocessing cannot send {remote!r}: it looks functions and classes "
            f"up by name, and {remote.__qualname__} is the remote one. You need no "
            f"pool: `{name}.remote(...)` runs in a worker. To use a pool nevertheless, "
            f"move the function to a module, or keep the plain one: `remote_version = "
            f"aiogpu.remote({name})`."
        )
    return remote.__reduce__()


class RemoteFunction(Decorated, Mapper, Generic[P, R]):
    """A function that runs in workers; call it by `.remote(...)`."""

    def __init__(self, definition: Definition, options: TaskOptions) -> None:
        super().__init__(definition.with_setup(options.setup), options)
        if options.max_buffered is not None and not definition.is_generator:
            raise not_buffered(definition.name)
        self._returns = options.num_returns if options.num_returns > 1 else 0
        self._submit: Callable[[FunctionSpec, bytes], Handle[R]]
        self._least: int
        self._most: float
        self._in_chunks: RemoteFunction[..., Any] | None = None
        self._retried: RemoteFunction[..., Any] | None = None

    @overload
    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R]: ...

    @overload  # an argument may be a handle instead of a value
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
        """Start a task that calls the function; return its handle at once.

        Raises:
            MisuseError: the arguments do not match the function's parameters.
            NoLoopError: no event loop is running in this thread.
            InfeasibleError: the task asks for more than the node has.
            SerializationError: the function or an argument cannot be pickled.
        """
        func = self._func or self._prepare()
        if kwargs or not self._least <= len(args) <= self._most:
            self._definition.parameters.check(args, kwargs)
        payload = dump_arguments(func.spec.name, args, kwargs, self._returns)
        if type(payload) is PickledValue:
            from aiogpu.api.calls import packed_call

            payload = packed_call(func.spec.name, args, kwargs, payload)
        return self._submit(func, payload)  # type: ignore[arg-type]

    def _remote_chunk(self, arguments: tuple[Any, ...]) -> Handle[Any]:
        if self._in_chunks is None:
            self._definition.parameters.check(arguments[:1], {})  # as for one item
            definition = self._definition.chunked()
            self._in_chunks = RemoteFunction(definition, self._options)
        return self._in_chunks.remote(*arguments)

    def _for_retry(self, error: Exception) -> RemoteFunction[..., Any] | None:
        options = self._options
        retried = options.retry_exceptions
        is_retried = (
            retried if isinstance(retried, bool) else isinstance(error, retried)
        )
        if not is_retried or not options.max_retries:
            return None
        if self._retried is None:
            retries = max(options.max_retries - 1, -1)  # -1 means no limit
            self._retried = RemoteFunction(
                self._definition, options._replace(max_retries=retries)
            )
        return self._retried

    def _prepare(self) -> FunctionSpec:
        """Do all work that is done once per function: checks, pickling, the request."""
        from aiogpu.api.calls import submitter

        options, definition = self._options, self._definition
        spec = options.spec(definition.name, definition.pickled().id)
        parameters = definition.parameters
        self._least, self._most = parameters.least, parameters.most
        window = 0
        if definition.is_generator:
            window = options.max_buffered or MAX_BUFFERED
        self._submit = submitter(self._returns, window)
        return self._new_spec(
            spec,
            spec.shape.request.as_numbers(),
            window=window,
            choices=options.choices(definition.name, definition.pickled().id),
        )

    def options(self, **options: Unpack[Options]) -> Self:
        """Return the same function with other options; this one does not change.

        Raises:
            OptionError: an option is unknown or invalid.
        """
        return type(self)(self._definition, merged(self._options, options))

    def _renewed(self) -> Self:
        """Return the function as it is now, pickled again; itself if nothing changed.

        Raises:
            SerializationError: with the path to what cannot be pickled.
        """
        definition = self._definition.renewed()
        if definition is self._definition:
            return self
        return type(self)(definition, self._options)

    def _what_to_write(self) -> str:
        return (
            f"{self.__name__} is a remote function and runs in a worker: write "
            f"`await {self.__name__}.remote(...)`. To call it here, in this process, "
            f"write `{self.__name__}.__wrapped__(...)`."
        )

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        source = self._definition.reference() or self._definition.function
        return _rebuild, (source, self._options)


def _rebuild(
    source: FunctionName | Callable[..., Any], options: TaskOptions
) -> RemoteFunction[..., Any]:
    if not isinstance(source, FunctionName):
        return new_remote_function(Definition(source), options)
    function = load_reference(*source)
    if isinstance(function, RemoteFunction):
        return new_remote_function(function._definition, options)
    return new_remote_function(Definition(function), options)


def new_remote_function(
    definition: Definition, options: TaskOptions
) -> RemoteFunction[..., Any]:
    """Make the remote object of a function; raises `OptionError` for unfit options."""
    if definition.is_generator:
        return RemoteGenerator(definition, options)
    return RemoteFunction(definition, options)


T = TypeVar("T")


class RemoteGenerator(CalledFirstToIterate, RemoteFunction[P, Any], Generic[P, T]):
    """A generator that runs in workers; `.remote(...)` returns a stream to iterate."""

    def __init__(self, definition: Definition, options: TaskOptions) -> None:
        if options.num_returns != 1:
            raise not_counted(definition.name, options.num_returns)
        super().__init__(definition, options)

    if TYPE_CHECKING:

        def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]:  # type: ignore[override]
            """Start a task that runs the generator; return the stream of its items.

            In a plain function that runs as a task itself, iterate it by `for`.

            Raises:
                MisuseError: the arguments do not match the generator's parameters.
                NoLoopError: no event loop is running in this thread.
                InfeasibleError: the task asks for more than the node has.
                SerializationError: the function or an argument cannot be pickled.
            """

    def _what_to_write(self) -> str:
        return (
            f"{self.__name__} is a remote generator and runs in a worker: write "
            f"`async for item in {self.__name__}.remote(...)`. To call it here, in "
            f"this process, write `{self.__name__}.__wrapped__(...)`."
        )
