"""`@remote` on generators: what `.remote()` gives is a stream of their items.

Light on purpose, as `api.remote_function` is: user modules bring this file into every
worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar, Unpack

from aiogpu.api.definition import Definition
from aiogpu.api.mapper import no_map
from aiogpu.api.options import TaskOptions, not_counted
from aiogpu.api.remote_function import RemoteFunction, merged
from aiogpu.api.usage_errors import CalledFirstToIterate
from aiogpu.client.current import services
from aiogpu.errors import MisuseError
from aiogpu.serialization.references import PickledValue
from aiogpu.serialization.serializer import dump_arguments

if TYPE_CHECKING:
    from aiogpu.api.keywords import Options
    from aiogpu.api.stream import Stream
    from aiogpu.client.function_spec import Site

P = ParamSpec("P")
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
            from aiogpu.api.packing import packed_call

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
