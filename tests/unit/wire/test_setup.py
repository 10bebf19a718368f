from __future__ import annotations

from aiogpu.wire import messages as setup
from aiogpu.wire.messages import Setup


def test_both_sides_take_the_names_of_the_node_s_files_from_here():
    assert setup.socket_path("/run/node") == "/run/node/node.sock"
    assert setup.output_path("/run/node", 2, 1) == "/run/node/2.1"
    assert setup.descriptor_path("/run/node") == "/run/node/memory.sock"


def test_it_can_be_handed_over_as_plain_values():
    given = Setup(["/src"], "node", "/run/node", driver=1, page=3, preload=["json"])
    assert Setup(*eval(repr(tuple(given)))) == given
