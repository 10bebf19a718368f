"""Functions and classes as they were defined, and as workers get them: once.

Light on purpose, as `api.task` is: user modules bring this file into every worker.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aiogpu.serialization.serializer import (
    WARNED_FROM,
    dump_function,
    dump_reference,
)

if TYPE_CHECKING:
    from aiogpu.api.parameters import Parameters
    from aiogpu.runtime.call import Function

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
        from aiogpu.api.parameters import Parameters, signature_of

        return Parameters(self.name, signature_of(self.function))

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
