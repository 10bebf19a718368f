"""What a call of an actor on a Ray cluster says comes out as it went in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray", reason="Ray is not installed here")
from aiogpu.engines.ray.actor_process import decode_call, encode_call

pytestmark = pytest.mark.ray


@given(
    number=st.integers(0, 2**63 - 1),
    method=st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
    payload=st.binary(max_size=50),
)
def test_it_comes_out_as_it_went_in(number: int, method: str, payload: bytes) -> None:
    assert decode_call(encode_call(number, method.encode(), payload)) == (
        *(number, method, payload),
    )


def test_arguments_may_come_beside_it() -> None:
    assert decode_call(encode_call(0, b"add")) == (0, "add", b"")
