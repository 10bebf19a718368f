"""`@remote` on functions: what a module says at import, and `.remote()` does.

A function is kept as it was defined (`Definition`), with what it takes (`Parameters`,
known without calling it), and pickled once. Light on purpose: user modules bring this
file into every worker, so asyncio and the session are imported by the first `.remote()`
alone.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
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
    merged,
    not_buffered,
    not_counted,
)
from aiogpu.api.usage_errors import CalledFirst, CalledFirstToIterate, options_of
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

    Of what has no signature, as some builtins, nothing is checked.

    Attributes:
        least: arguments by position that are needed at least.
        most: so many of them are taken at most. A call by position alone needs no
            `check` between the two.
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
            # Defaults and annotations may be anything; that there are some is enough.
            plain = [
                inspect.Parameter(
                    one.name,
                    one.kind,
                    default=one.default if one.default is one.empty else ...,
                )
                for one in signature.parameters.values()
            ]
            signature = inspect.Signature(plain)
        return Parameters, (self._name, signature, self._owner)

    def check(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Raise `MisuseError` unless it takes these arguments."""
        if not kwargs and self.least <= len(args) <= self.most:
            return
        # Calls by name are mostly alike, and binding one takes microseconds.
        shape = (len(args), *kwargs)
        if self._signature is None or shape == self._accepted:
            return
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            told = ""
            if given := [name for name in kwargs if name in CHECKS["task"]]:
                told = (
                    f" Options go before the call: .options({given[0]}=...).remote()."
                )
            if self._owner and next(iter(self._signature.parameters), "") == "self":
                told = (
                    f" {self._name} is a method of {self._owner}: put @aiogpu.remote "
                    f"above the class, which makes actors of it."
                )
            raise MisuseError(
                f"{self._name}{self._signature} was called with wrong arguments: "
                f"{error}.{told}"
            ) from None
        self._accepted = shape


def _positions(signature: inspect.Signature) -> tuple[int, float]:
    """Return how many arguments by position it takes, at least and at most."""
    least, most = 0, 0.0
    for parameter in signature.parameters.values():
        is_needed = parameter.default is parameter.empty
        if parameter.kind is parameter.VAR_POSITIONAL:
            most = float("inf")
        elif parameter.kind is parameter.KEYWORD_ONLY and is_needed:
            return 1, 0.0  # never by position alone
        elif parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        ):
            least += is_needed
            most += 1
    return least, most


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function or class, not of what it wraps; or None."""
    try:
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None


def without_self(signature: inspect.Signature) -> inspect.Signature:
    """The signature of a function as its bound method has it."""
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


_MAIN: Final = ("__main__", "__mp_main__")


class FunctionName(NamedTuple):
    """A function that others import by name."""

    module: str
    qualname: str


_referenced: Final[dict[FunctionName, Definition]] = {}
"""Who is meant by a name; a later definition of it must be sent by value."""


class Definition:
    """One decorated function, shared by all its `.options(...)`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)
        self.is_coroutine, self.is_generator = kind_of(function)
        self._sent: Function | None = None

    @cached_property
    def parameters(self) -> Parameters:
        """The parameters of the function; determined at first use."""
        place = getattr(self.function, "__qualname__", "").rpartition(".")[0]
        owner = "" if place.endswith("<locals>") else place.rpartition(".")[2]
        return Parameters(self.name, signature_of(self.function), owner)

    def sent(self) -> Function:
        """The function as workers get it; pickled when it is first needed.

        A warning tells of one that takes much with it.

        Raises:
            SerializationError: with the path to what cannot be pickled.
        """
        if self._sent is None:
            from aiogpu.client.function_spec import Function, new_function_id

            reference = self.reference()
            with collect_references(are_actors=True) as actors:
                payload = (
                    dump_function(self.name, self.function)
                    if reference is None
                    else dump_reference(*reference)
                )
            self._sent = Function(new_function_id(), payload, tuple(actors))
            if len(payload) > WARNED_FROM:
                from aiogpu.serialization.large_arguments import advise_on_function

                advise_on_function(self.name, self.function, len(payload))
        return self._sent

    def in_chunks(self) -> Definition:
        """The function as it is called with seconds, and any number of items.

        Raises:
            SerializationError: with the path to what cannot be pickled.
        """
        from aiogpu.client.function_spec import Function, new_function_id
        from aiogpu.worker.chunk import Sent

        chunked = Definition(self.function)
        sent = self.sent()
        payload = dump_function(self.name, Sent(sent.payload))
        chunked._sent = Function(new_function_id(), payload, sent.actors)
        chunked.parameters = Parameters(self.name, None)
        return chunked

    def reference(self) -> FunctionName | None:
        """The name under which workers can import the function, None without one."""
        # cloudpickle comes with it, which defining a function does not need.
        from aiogpu.serialization.pickler import is_sent_by_value

        reference = FunctionName(
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
    ) -> Results[Any]:
        """Call it with each item; gives an async iterator over the results.

        At most `limit` calls are ahead: started, and their result not yet taken by
        the loop. So the iterable, which may be endless, is never read further than
        `limit` items beyond the results taken, and with `ordered` one slow call
        holds back those behind it. A plain iterable is read on the event loop.

        What a call raises is raised in its place, and what the iterable or
        `.remote()` raises at once; either ends the iteration, and so does leaving
        the loop. All calls that are ahead are then cancelled as by
        `handle.cancel()`. While a name refers to the results, write
        `async with f.map(...) as results:` to have that at the end of the block.

        With `chunk`, several items go as one task, which calls the function with one
        after the other, coroutines too; results come one by one all the same. What an
        item raises comes after the results before it. The options hold for a task, and
        so for a chunk: it runs in one process, and `timeout` is for all of it. With
        `retry_exceptions` an item is retried alone. If the worker dies, the chunk
        starts again; past `max_retries` the error takes the place of its first item.

        `chunk="auto"` takes items back from a task that runs longer than 50 ms. Of an
        async iterable it waits at most 5 ms for items to fill a chunk. A given `limit`
        has room for at least 16 such tasks: `limit=160` bounds chunks to 10 items.

        Args:
            iterable: the arguments, one a call; an iterable or an async iterable.
            *others: none; what takes two arguments is given them as one.
            limit: most items ahead, 1 or more; None for 256, or with `chunk` for 256
                chunks. Take less where arguments or results are large: that many
                are in memory.
            ordered: whether results come in the order of the items; if False, as
                the calls end.
            chunk: items in a task, 1 or more; "auto" for as many as take about 4 ms;
                None for 1.
            return_exceptions: whether what a call raises is given in its place, as a
                result, and the iteration goes on. What the iterable and `.remote()`
                raise is raised all the same. If the process of a chunk dies, the
                error stands for each of its items.

        Raises:
            OptionError: an option is ill-valued, or `limit` has no room for a chunk.
            MisuseError: it is no iterable.
            NoLoopError: no event loop is running here.
        """
        if others:
            raise MisuseError(
                f"{self.__name__}.map() takes one iterable: give it `zip(a, b)`, and "
                f"let the function take the pair."
            )
        from aiogpu.api.map import Results

        return Results(self, iterable, limit, ordered, chunk, return_exceptions)

    def _again_after(self, error: Exception) -> Any:
        """Return what retries an item after this error; None for no retry."""
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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.__module__}.{self.__qualname__}>"

    def _made(
        self, spec: TaskSpec, resources: Mapping[str, float], **more: Any
    ) -> FunctionSpec:
        """The function with its options, as calls need it; pickled before."""
        from aiogpu.client.function_spec import FunctionSpec, new_func_id

        definition, options = self._definition, self._options
        self._func = FunctionSpec(
            id=new_func_id(),
            function=definition.sent(),
            spec=spec,
            resources=resources,
            environ=dict(options.runtime_env),
            is_coroutine=definition.is_coroutine,
            retried=dump_retried(options.retry_exceptions),
            **more,
        )
        return self._func

    def _known_as(self) -> FunctionName | None:
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
        super().__init__(definition, options)
        if options.max_buffered is not None and not definition.is_generator:
            raise not_buffered(definition.name)
        self._returns = options.num_returns if options.num_returns > 1 else 0
        self._submit: Callable[[FunctionSpec, bytes], Handle[R]]
        self._least: int
        self._most: float
        self._in_chunks: RemoteFunction[..., Any] | None = None
        self._again: RemoteFunction[..., Any] | None = None

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
            definition = self._definition.in_chunks()
            self._in_chunks = RemoteFunction(definition, self._options)
        return self._in_chunks.remote(*arguments)

    def _again_after(self, error: Exception) -> RemoteFunction[..., Any] | None:
        options = self._options
        wanted = options.retry_exceptions
        is_wanted = wanted if isinstance(wanted, bool) else isinstance(error, wanted)
        if not is_wanted or not options.max_retries:
            return None
        if self._again is None:
            left = max(options.max_retries - 1, -1)  # -1 is without end
            self._again = RemoteFunction(
                self._definition, options._replace(max_retries=left)
            )
        return self._again

    def _prepare(self) -> FunctionSpec:
        """All that is done once per function: checks, pickling, the request."""
        from aiogpu.api.calls import submitter

        options, definition = self._options, self._definition
        spec = options.spec(definition.name, definition.sent().id)
        parameters = definition.parameters
        self._least, self._most = parameters.least, parameters.most
        window = 0
        if definition.is_generator:
            window = options.max_buffered or MAX_BUFFERED
        self._submit = submitter(self._returns, window)
        return self._made(spec, spec.shape.request.as_numbers(), window=window)

    def options(self, **options: Unpack[Options]) -> Self:
        """Return the same function with other options; this one does not change.

        Raises:
            OptionError: names the option, the value and what is allowed.
        """
        return type(self)(self._definition, merged(self._options, options))

    def _what_to_write(self) -> str:
        return (
            f"{self.__name__} is a remote function and runs in a worker: write "
            f"`await {self.__name__}.remote(...)`. To call it here, in this process, "
            f"write `{self.__name__}.__wrapped__(...)`."
        )

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        source = self._known_as() or self._definition.function
        return _rebuild, (source, self._options)


def _rebuild(
    source: FunctionName | Callable[..., Any], options: TaskOptions
) -> RemoteFunction[..., Any]:
    if not isinstance(source, FunctionName):
        return made(Definition(source), options)
    found = load_reference(*source)
    if isinstance(found, RemoteFunction):
        return made(found._definition, options)
    return made(Definition(found), options)


def made(definition: Definition, options: TaskOptions) -> RemoteFunction[..., Any]:
    """Make the remote object of a function; raises `OptionError` for unfit options."""
    if definition.is_generator:
        return RemoteGenerator(definition, options)
    return RemoteFunction(definition, options)


T = TypeVar("T")


class RemoteGenerator(CalledFirstToIterate, RemoteFunction[P, Any], Generic[P, T]):
    """A generator that runs in a worker; iterate what `.remote(...)` gives."""

    def __init__(self, definition: Definition, options: TaskOptions) -> None:
        if options.num_returns != 1:
            raise not_counted(definition.name, options.num_returns)
        super().__init__(definition, options)

    if TYPE_CHECKING:

        def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> Stream[T]:  # type: ignore[override]
            """Start the task; gives the stream of its items at once.

            In a plain function that runs as a task itself, iterate it by `for`.

            Raises:
                MisuseError: the generator takes other arguments.
                NoLoopError: no event loop is running here.
                InfeasibleError: the node can never give what the task asks for.
                SerializationError: the function or an argument cannot be pickled.
            """

    def _what_to_write(self) -> str:
        return (
            f"{self.__name__} is a remote generator and runs in a worker: write "
            f"`async for item in {self.__name__}.remote(...)`. To call it here, in "
            f"this process, write `{self.__name__}.__wrapped__(...)`."
        )
