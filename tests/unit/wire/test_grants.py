"""What the holder of a lease is told, as bytes and back; nothing is unpickled."""

import pickle

import msgpack
import pytest

from aiogpu.errors import ProtocolError
from aiogpu.wire.codec import pack, unpack_as
from aiogpu.wire.messages import Bind

GRANT = Bind(
    {"CUDA_VISIBLE_DEVICES": "1,GPU-x", "AIOGPU_LEASE": "t.1"},
    {"GPU": (1, "GPU-x"), "neuron_cores": ()},
    (1 << 30, 0),
    (3, 4),
)


def test_a_grant_comes_as_it_was_sent():
    assert unpack_as(Bind, pack(GRANT)) == GRANT
    assert unpack_as(Bind, pack(Bind({}, {}))) == Bind({}, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"{}",
        msgpack.packb([1]),
        msgpack.packb([{}, [], [], []]),
        msgpack.packb([{"A": 1}, {}, [], []]),
        msgpack.packb([{}, {}, ["1"], []]),
        pickle.dumps(GRANT),
    ],
)
def test_what_is_no_grant_is_refused(data):
    with pytest.raises(ProtocolError):
        unpack_as(Bind, data)
