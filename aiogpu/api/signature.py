"""Misspelt options of functions, told as those of tasks are.

Light on purpose, as `api.task` is: user modules bring this file into every worker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import CO_VARARGS
from typing import Any, ParamSpec, TypeVar

from aiogpu.errors import MisuseError

P = ParamSpec("P")
R = TypeVar("R")


def options_of(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function refuse options that it has not by an `OptionError`.

    It costs each call a quarter of a microsecond: not for what is called often.

    Where all options go by name, a positional argument is a `MisuseError`.

    Args:
        what: has the options, as the error calls it: "a lease".
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        code = function.__code__
        named = slice(
            code.co_posonlyargcount, code.co_argcount + code.co_kwonlyargcount
        )
        known = dict.fromkeys(code.co_varnames[named])
        known.pop("self", None)
        is_by_name = not code.co_argcount and not code.co_flags & CO_VARARGS

        @wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            if not options.keys() <= known.keys():
                refuse(options, known, what)
            if args and is_by_name:
                raise MisuseError(
                    f"{function.__name__}({args[0]!r}): the options of {what} go by "
                    f"name. There are: {', '.join(known)}."
                )
            return function(*args, **options)

        return checked

    return decorate


def refuse(options: dict[str, Any], known: dict[str, Any], what: str) -> None:
    """Raise the `OptionError` for the first of some options that is not known."""
    from aiogpu.api.options import unknown_option

    misspelt = next(name for name in options if name not in known)
    raise unknown_option(misspelt, known, what)
