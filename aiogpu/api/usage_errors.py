"""Error messages for common mistakes: the wrong loop or `with`, a misspelt name.

Each mixin here, except `Displayed`, gives a public class methods that only raise
`MisuseError` and say what to write instead. They are hidden from type checkers, which
report the mistake themselves. Unknown names are mostly Ray's. Light to import, as
`api.remote_function` is: user modules load this file in every worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from inspect import Parameter, signature
from types import MappingProxyType, ModuleType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    NoReturn,
    ParamSpec,
    TypeVar,
)

from aiogpu.errors import MisuseError

if TYPE_CHECKING:
    from aiogpu.api.options import Kind, OptionTable

P = ParamSpec("P")


R = TypeVar("R")


class EnteredOnLoop:
    """Mixin: `with` raises and says `async with`.

    `_as_called` returns the call that made the object, as the program writes it.
    """

    __slots__ = ()

    if not TYPE_CHECKING:

        def __enter__(self) -> NoReturn:
            call = self._as_called()
            raise MisuseError(
                f"{call} begins and ends on the event loop: write `async with {call}`, "
                f"inside an `async def`."
            )

        def __exit__(self, *_: object) -> None:
            """Python looks up both methods before it calls `__enter__`."""


class IteratedOnLoop:
    """Mixin: `for` raises and says `async for`. Needs `_as_called`, as `EnteredOnLoop`.

    `isinstance(x, Iterable)` is true for such objects. A `Stream` is given to libraries
    that accept both kinds of iterables, so it must not use this mixin.
    """

    __slots__ = ()

    if not TYPE_CHECKING:

        def __iter__(self) -> NoReturn:
            call = self._as_called()
            raise MisuseError(
                f"{call} yields its items on the event loop: write `async for item in "
                f"{call}`, or `[item async for item in {call}]` for a list."
            )

        def __getitem__(self, _: object) -> NoReturn:
            iter(self)


def waited_for(what: str) -> MisuseError:
    """Return the error for a second asyncio task that waits for the next `what`."""
    return MisuseError(
        f"another asyncio task is waiting for the next {what}; iterate in one task, "
        f"and pass the items on through a queue."
    )


class Displayed:
    """Mixin: an object that a notebook shows with its state."""

    __slots__ = ()

    async def _html(self) -> str:
        """Return the HTML; ask the node if needed."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        """Return the HTML for a notebook, without waiting for another process."""
        from aiogpu.notebook.display import html_now

        return html_now(self)

    def _ipython_display_(self) -> None:
        """Show the HTML in a notebook, and update it when the node has answered."""
        from aiogpu.notebook.display import show

        show(self)


PUT_NAME: Final = "put"
"""`task_name` of the handles that `put` returns."""


class NotItsResult:
    """Mixin of handles: using one as if it were its result raises."""

    __slots__ = ()

    def __bool__(self) -> NoReturn:
        raise self._no("has no truth value")

    def _no(self, what: str, more: str = "") -> MisuseError:
        return MisuseError(
            f"a handle is not its result and {what}; write {self._how_to_wait()}.{more}"
        )

    def _how_to_wait(self) -> str:
        """Return the code that waits for the result."""
        raise NotImplementedError

    if not TYPE_CHECKING:

        def __len__(self) -> NoReturn:
            raise self._no("has no length")

        def __getitem__(self, _: object) -> NoReturn:
            raise self._no("has no items")

        def __contains__(self, _: object) -> NoReturn:
            raise self._no("contains no items")

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_") or name == "task_name":  # not set yet
                kind = type(self).__name__
                raise AttributeError(f"{kind!r} object has no attribute {name!r}")
            text = str(self._no(f"has no attribute {name!r}"))
            raise AttributeError(text, name=name, obj=self)

        def __array__(self, *_: object, **_named: object) -> NoReturn:
            # Otherwise numpy makes an array of objects.
            raise self._no("is not an array")

        def __iter__(self) -> NoReturn:
            # `yield from` and `for` both call this, so `yield from` needs `__await__`.
            raise self._no(
                "cannot be iterated",
                " To get one handle for each of several results, set num_returns=.",
            )


def _operator(name: str) -> Callable[..., NoReturn]:
    def refuse(self: NotItsResult, *_: object) -> NoReturn:
        raise self._no(f"does not support arithmetic ({name})")

    return refuse


_CALCULATING: Final = (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "matmul",
    "rmatmul",
    "neg",
    "abs",
    "int",
    "float",
    "lt",
    "le",
    "gt",
    "ge",
)


for _name in _CALCULATING:
    setattr(NotItsResult, f"__{_name}__", _operator(f"__{_name}__"))


class NotPassedOn:
    """Mixin: pickling raises and says what to pass instead.

    Attributes:
        _PASS_INSTEAD: what to pass.
    """

    __slots__ = ()

    _PASS_INSTEAD: ClassVar[str]

    def __reduce__(self) -> NoReturn:
        raise MisuseError(
            f"{self!r} can only be used in the program or task that made it; "
            f"{self._PASS_INSTEAD}."
        )


class SetInItsProcess:
    """Mixin of actors and pools: setting a public attribute raises.

    It would be set in this process only.
    """

    __slots__ = ()

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None:
            if not name.startswith("_"):
                raise MisuseError(
                    f"{name} cannot be set on {self!r}: an actor's attributes are in "
                    f"its process. Write a method that sets {name}, and call it by "
                    f"`.remote(...)`."
                )
            object.__setattr__(self, name, value)


class CalledFirst:
    """Mixin: a direct call or `await` raises and says `.remote(...)`.

    Type checkers do not see these methods: with `__call__` they would accept every
    direct call.
    """

    __slots__ = ()

    def _what_to_write(self) -> str:
        """Explain why the object is not called directly, and what to write instead."""
        raise NotImplementedError

    def _refusal_without_loop(self) -> MisuseError:
        """Return the error of a direct call, for code without an event loop."""
        text = self._what_to_write().replace("`await ", "`")
        return MisuseError(text.replace("`async for ", "`for "))

    if not TYPE_CHECKING:

        def __call__(self, /, *args: object, **kwargs: object) -> NoReturn:
            """Raise `MisuseError`: the call is written `.remote(...)`."""
            raise MisuseError(self._what_to_write())

        def __await__(self) -> NoReturn:
            self()


class CalledFirstToIterate(CalledFirst):
    """Mixin for generators, whose `.remote(...)` returns a stream to iterate."""

    __slots__ = ()

    if not TYPE_CHECKING:
        __iter__ = __aiter__ = CalledFirst.__await__

        def map(self, *_args: object, **_options: object) -> NoReturn:
            """Raise `MisuseError`: one call of a generator has many results."""
            raise MisuseError(
                f"{self.__name__} is a generator, and map() needs one result per call: "
                f"write `async for item in {self.__name__}.remote(...)` for each "
                f"argument."
            )


def options_of(what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: unknown keyword arguments raise `OptionError` with a suggestion.

    If all options are keyword-only, a positional argument raises `MisuseError`. Adds
    about 0.3 microseconds to each call, so it is not for hot functions.

    Args:
        what: owner of the options in the error message, such as "a lease".
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*args: P.args, **options: P.kwargs) -> R:
            known, is_by_name = _keywords_of(function)
            if not options.keys() <= known.keys():
                refuse(options, known, what)
            if args and is_by_name:
                needed = [name for name, default in known.items() if default is _NEEDED]
                advice = ""
                if needed:
                    advice = f" Write `@aiogpu.{function.__name__}({needed[0]}=...)`."
                raise MisuseError(
                    f"{function.__name__}({args[0]!r}): the options of {what} are "
                    f"keyword arguments: {', '.join(known)}.{advice}"
                )
            return function(*args, **options)

        return checked

    return decorate


_NEEDED: Final = Parameter.empty
_BY_NAME: Final = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@cache
def _keywords_of(function: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """Return the arguments that have names, with their defaults; and if all must."""
    parameters = signature(function).parameters.values()
    known = {each.name: each.default for each in parameters if each.kind in _BY_NAME}
    known.pop("self", None)
    return known, all(each.kind is Parameter.KEYWORD_ONLY for each in parameters)


def options_from(
    table: type[OptionTable], kind: Kind
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: `**options` have the names, defaults and docs of a table of options.

    For `help`, and for `options_of`; type checkers read the `TypedDict` of the options.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        named: Any = function
        named.__signature__ = signature(function).replace(
            parameters=[
                Parameter(
                    row.name,
                    Parameter.KEYWORD_ONLY,
                    default=row.default,
                    annotation=row.type,
                )
                for row in table.taken_by(kind).values()
            ]
        )
        docs = (f"        {name}: {text}" for name, text in table.docs(kind).items())
        head, raises, tail = (function.__doc__ or "").partition("    Raises:\n")
        lines = "\n".join(docs)
        named.__doc__ = f"{head}    Args:\n{lines}\n\n{raises}{tail}"
        return function

    return decorate


def refuse(options: dict[str, Any], known: dict[str, Any], what: str) -> None:
    """Raise `OptionError` for the first unknown option."""
    from aiogpu.api.options import unknown_option

    misspelt = next(name for name in options if name not in known)
    raise unknown_option(misspelt, known, what)


NAMES_OF_RAY: Final = MappingProxyType(
    {
        "ObjectRef": ".remote() returns an `aiogpu.Handle`",
        "ObjectRefGenerator": ".remote() of a generator returns an `aiogpu.Stream`",
        "actor": "use `aiogpu.exit_actor()` and `aiogpu.ActorHandle`",
        "cancel": "write `handle.cancel()`",
        "exceptions": "errors are in `aiogpu.errors`; the ones that programs catch are "
        "also in `aiogpu`, such as `aiogpu.TaskError`",
        "nodes": "write `await aiogpu.status()`",
        "timeline": "run `aiogpu timeline FILE`",
        "util": "use `aiogpu.placement`, `aiogpu.ActorPool` or `aiogpu.accelerators`",
    }
)
"""Names of Ray's API, with their replacements."""


def no_such_name(
    name: str,
    known: Sequence[str],
    below: Iterable[ModuleType] = (),
    module: str = "aiogpu",
) -> AttributeError:
    """The error for an unknown attribute of the package, or of `aiogpu.sync`.

    Args:
        name: the attribute.
        known: the public names.
        below: public submodules that may define the name.
        module: the module without the attribute.
    """
    hint = NAMES_OF_RAY.get(name, "")
    if module != "aiogpu":  # code without a loop
        hint = hint.replace("`await aiogpu.", f"`{module}.")
    for public in below:
        attribute = getattr(public, name, None)
        if getattr(attribute, "__module__", "").startswith("aiogpu."):
            hint = f"it is `{public.__name__}.{name}`"
    if not hint and not name.startswith("_"):
        from difflib import get_close_matches

        near = get_close_matches(name, known, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]!r}?" if near else ""
    message = f"module {module!r} has no attribute {name!r}"
    return AttributeError(f"{message}: {hint}" if hint else message)
