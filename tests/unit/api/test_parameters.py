"""What is refused before it is sent: the same that Python itself would refuse."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiogpu.api.remote_function import Parameters, signature_of, without_self
from aiogpu.errors import MisuseError

NAMES = "abcde"
KINDS = inspect.Parameter


@st.composite
def signatures(draw: st.DrawFn) -> inspect.Signature:
    """Any signature of a few parameters, defaults in any place where they may be."""
    kinds = sorted(
        draw(st.lists(st.sampled_from([*inspect._ParameterKind]), max_size=len(NAMES)))
    )
    parameters: list[inspect.Parameter] = []
    has_default = False
    for name, kind in zip(NAMES, kinds, strict=False):
        is_star = kind in (KINDS.VAR_POSITIONAL, KINDS.VAR_KEYWORD)
        if is_star and any(one.kind == kind for one in parameters):
            continue
        default: Any = KINDS.empty
        if not is_star and (draw(st.booleans()) or has_default):
            if kind != KINDS.KEYWORD_ONLY or draw(st.booleans()):
                default = None
            has_default |= kind != KINDS.KEYWORD_ONLY
        parameters.append(KINDS(name, kind, default=default))
    return inspect.Signature(parameters)


@given(
    signature=signatures(),
    args=st.lists(st.none(), max_size=6).map(tuple),
    kwargs=st.dictionaries(st.sampled_from([*NAMES, "z"]), st.none(), max_size=3),
    has_travelled=st.booleans(),
)
def test_its_verdict_is_pythons(
    signature: inspect.Signature,
    args: tuple[None, ...],
    kwargs: dict[str, None],
    has_travelled: bool,
) -> None:
    parameters = Parameters("f", signature)
    if has_travelled:
        parameters = pickle.loads(pickle.dumps(parameters))
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        with pytest.raises(MisuseError, match=r"f\(.*was called with wrong arguments"):
            parameters.check(args, dict(kwargs))
    else:
        parameters.check(args, dict(kwargs))


def test_what_has_no_signature_is_not_checked() -> None:
    parameters = Parameters("update", signature_of(dict.update))
    for each in (parameters, pickle.loads(pickle.dumps(parameters))):
        each.check((1, 2, 3), {"a": 1})


def test_the_first_parameter_is_left_out_where_it_is_self() -> None:
    def method(self: object, a: int) -> None: ...

    def all_by_position(*args: int) -> None: ...

    def none() -> None: ...

    found = [signature_of(one) for one in (method, all_by_position, none)]
    texts = [str(without_self(one)) for one in found if one is not None]
    assert texts == ["(a: 'int') -> 'None'", "(*args: 'int') -> 'None'", "() -> 'None'"]
