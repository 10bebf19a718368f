"""What a function takes, known without calling it; it travels with actors' handles."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from aiogpu.errors import MisuseError


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
    """How many arguments by position it takes, at least and at most."""
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
