"""Exceptions whose constructor takes arguments of its own, as pickles.

`BaseException.__reduce__` has unpickling call the class with `args`: what the class has
handed to `super().__init__()`. Where these differ from its parameters the call fails,
or makes another text. Here no constructor of the class is called: the exception gets
its `args` and its attributes back.
"""

from __future__ import annotations

import copyreg
from typing import Any, Final

Reduced = tuple[Any, ...]

_HEAP_TYPE: Final = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the class was made by a `class` statement."""


def reduced_exception(error: BaseException) -> Reduced | None:
    """How an exception is to be pickled, as `__reduce__` says it.

    Returns:
        None where pickle's own way is right: the class is built in, has no constructor
        of its own, or says itself how it is pickled.

    Raises:
        Exception: whatever a slot or an attribute of it raises.
    """
    kind = type(error)
    base = _builtin_base(kind)
    if kind is base or (
        kind.__init__ is base.__init__ and kind.__new__ is base.__new__
    ):
        return None
    is_own = kind.__reduce__ is not base.__reduce__
    if is_own or kind.__reduce_ex__ is not base.__reduce_ex__:
        return None
    if kind.__setstate__ is not base.__setstate__ or kind in copyreg.dispatch_table:
        return None
    reduced = error.__reduce__()
    assert isinstance(reduced, tuple), error
    _, args, state = (*reduced, None)[:3]
    attributes = dict(state or {})
    for name in copyreg._slotnames(kind):  # type: ignore[attr-defined]
        if hasattr(error, name):
            attributes[name] = getattr(error, name)
    return _made, (kind, *args), attributes, None, None, _set_attributes


def _builtin_base(kind: type[BaseException]) -> Any:
    """The innermost of its bases that is built in; its state is kept there, in C."""
    while kind.__flags__ & _HEAP_TYPE:
        assert kind.__base__ is not None, kind
        kind = kind.__base__
    return kind


def _made(kind: type[BaseException], *args: object) -> BaseException:
    base = _builtin_base(kind)
    error: BaseException = base.__new__(kind, *args)
    base.__init__(error, *args)
    return error


def _set_attributes(error: BaseException, attributes: dict[str, object]) -> None:
    for name, value in attributes.items():
        object.__setattr__(error, name, value)  # the class's own may refuse
