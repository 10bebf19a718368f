"""What the driver tells the zygote before anything else; inherited by all forks.

Both sides take the names of the node's files from here.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

LOG_LEVEL: Final = "aiogpu_log_level"
"""The -X option that says which records workers log."""


class Setup(NamedTuple):
    """Handed over as plain values, since nothing can be imported before them.

    Attributes:
        sys_path: the driver's import path.
        node: the node's id.
        directory: where the node's socket and pipes are.
        driver: process id of the driver.
        page: descriptor of the control page.
        preload: modules to import before the first fork.
        cgroup: directory of the node's cgroup, "" where there is none to be had.
        generation: which of the node's zygotes this is.
        learns: whether workers are to say what they import.
        learnt: further modules to import, if that leaves the zygote fit.
        proven: those of them that were found fit before.
        spill: directory for values for which there is no memory left.
    """

    sys_path: list[str]
    node: str
    directory: str
    driver: int
    page: int
    preload: list[str]
    cgroup: str = ""
    generation: int = 0
    learns: bool = False
    learnt: Sequence[str] = ()
    proven: Sequence[str] = ()
    spill: str = ""


def socket_path(directory: str) -> str:
    """Path of the node's socket."""
    return f"{directory}/node.sock"


def descriptor_path(directory: str) -> str:
    """Path of the socket over which the descriptors of shared memory go."""
    return f"{directory}/memory.sock"


def output_path(directory: str, slot: int, stream: int) -> str:
    """Path of the pipe for what a slot's workers write to descriptor 1 or 2."""
    return f"{directory}/{slot}.{stream}"
