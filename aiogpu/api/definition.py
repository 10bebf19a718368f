"""Functions and classes as they were defined, and as workers get them: once.

`parameters` says what a function takes, known without calling it; it travels with
actors' handles. Light on purpose, as `api.remote_function` is: user modules bring this
file into every worker.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiogpu.errors import MisuseError
from aiogpu.serialization.serializer import (
    WARNED_FROM,
    dump_function,
    dump_reference,
)

if TYPE_CHECKING:
    from aiogpu.client.function_spec import Function


class Parameters:
    """What a function takes, checked cheaply where arguments come by position.

    Of what has no signature, as some builtins, nothing is checked.

    Attributes:
        least: arguments by position that are needed at least.
        most: so many of them are taken at most. A call by position alone needs no
            `check` between the two.
    """

    def __init__(self, name: str, signature: inspect.Signature | None) -> None:
        self._name = name
        self._signature = signature
        self.least, self.most = (
            (0, float("inf")) if signature is None else _positions(signature)
        )
        self._accepted: tuple[object, ...] = ()

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        if self._signature is None:
            return Parameters, (self._name, None)
        # Defaults and annotations may be anything; that there are some is enough.
        described = [
            (one.name, int(one.kind), one.default is not one.empty)
            for one in self._signature.parameters.values()
        ]
        return _parameters, (self._name, described)

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
            raise MisuseError(
                f"{self._name}{self._signature} was called with other arguments: "
                f"{error}."
            ) from None
        self._accepted = shape


def _parameters(name: str, described: list[tuple[str, int, bool]]) -> Parameters:
    """The parameters of which only names, kinds and who has a default is known."""
    kinds = {int(kind): kind for kind in inspect._ParameterKind}
    empty = inspect.Parameter.empty
    parameters = [
        inspect.Parameter(one, kinds[kind], default=... if has_default else empty)
        for one, kind, has_default in described
    ]
    return Parameters(name, inspect.Signature(parameters))


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
    """What a function or a class takes itself, not what it wraps; None if unknown."""
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

    @cached_property
    def parameters(self) -> Parameters:
        """What the function takes; looked up when it is first needed."""
        return Parameters(self.name, signature_of(self.function))

    def sent(self) -> Function:
        """The function as workers get it; pickled when it is first needed.

        A warning tells of one that takes much with it.

        Raises:
            SerializationError: with the path to what cannot be pickled.
        """
        if self._sent is None:
            from aiogpu.client.function_spec import Function, new_function_id

            reference = self.reference()
            payload = (
                dump_function(self.name, self.function)
                if reference is None
                else dump_reference(*reference)
            )
            self._sent = Function(new_function_id(), payload)
            if len(payload) > WARNED_FROM:
                from aiogpu.serialization.large_arguments import advise_on_function

                advise_on_function(self.name, self.function, len(payload))
        return self._sent

    def reference(self) -> Reference | None:
        """The name under which workers can import the function, None without one."""
        # cloudpickle comes with it, which defining a function does not need.
        from aiogpu.serialization.pickler import is_sent_by_value

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
