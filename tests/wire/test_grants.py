"""What the holder of a lease is told, as bytes and back; nothing is unpickled."""

import pickle

import pytest

from aiogpu.errors import ProtocolError
from aiogpu.wire.grant import Grant

GRANT = Grant(
    {"CUDA_VISIBLE_DEVICES": "1,GPU-x", "AIOGPU_LEASE": "t.1"},
    {"GPU": (1, "GPU-x"), "neuron_cores": ()},
    (1 << 30, 0),
    (3, 4),
)


def test_a_grant_comes_as_it_was_sent():
    assert Grant.unpack(GRANT.pack()) == GRANT
    assert Grant.unpack(Grant({}, {}).pack()) == Grant({}, {})


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff", b"{}", b"[1]", b"[{}, [], [], []]", pickle.dumps(GRANT)],
)
def test_what_is_no_grant_is_refused(data):
    with pytest.raises(ProtocolError, match="no grant of a lease"):
        Grant.unpack(data)
