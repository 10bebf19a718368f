"""What a call of an actor on a Ray cluster says comes out as it went in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray", reason="Ray is not installed here")
from aiogpu.engines.ray.actor_process import decode_call, encode_call

pytestmark = pytest.mark.ray


@given(
    method=st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
    payload=st.binary(max_size=50),
)
def test_it_comes_out_as_it_went_in(method: str, payload: bytes) -> None:
    assert decode_call(encode_call(method.encode(), payload)) == (method, payload)


def test_arguments_may_come_beside_it() -> None:
    assert decode_call(encode_call(b"add")) == ("add", b"")
