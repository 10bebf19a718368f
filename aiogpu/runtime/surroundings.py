"""What all zygotes of a node begin with, whenever they are started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aiogpu.linux.cgroup_hierarchy import NodeCgroup
from aiogpu.memory.control_page import ControlPage
from aiogpu.runtime.process import interpreter_flags
from aiogpu.runtime.program import Program


class Surroundings(NamedTuple):
    """What all zygotes of a node share, as it was when the node was opened.

    A later generation finds what the first one has found, whatever the program has
    done to its own environment, path or directory meanwhile.

    Attributes:
        node: the node's id.
        directory: where its socket and pipes are.
        page: descriptor of the control page.
        place: descriptor of the working directory, None where we may not even
            enter it.
        cgroup: the node's, chosen before the first start.
        learns: whether workers report what they import.
        spill: directory for values beyond the memory limit, "" for the system's.
        programs: those that have joined, by key; each has zygotes of its own.
    """

    node: str
    directory: str
    page: int
    place: int | None
    cgroup: NodeCgroup
    learns: bool
    environ: Mapping[str, str]
    sys_path: Sequence[str]
    spill: str
    programs: dict[str, Program]

    @classmethod
    def take(
        cls,
        node: str,
        directory: str,
        cgroup: NodeCgroup,
        learns: bool,
        spill: str = "",
    ) -> Surroundings:
        """What they are now, with a new control page."""
        try:
            place = os.open(".", os.O_PATH | os.O_CLOEXEC)
        except OSError:
            place = None
        return cls(
            node=node,
            directory=directory,
            page=ControlPage.create(),
            place=place,
            cgroup=cgroup,
            learns=learns,
            spill=spill,
            environ=dict(os.environ),
            # Python ignores what else there may be, such as a Path.
            sys_path=[str(path) for path in sys.path if isinstance(path, str)],
            programs={},
        )

    @property
    def own(self) -> Program:
        """What is the node's own program."""
        place = "" if self.place is None else f"/proc/self/fd/{self.place}"
        flags = interpreter_flags()
        return Program(
            *(sys.executable, self.sys_path, place, self.environ), flags=flags
        )

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.page)
        if self.place is not None:
            os.close(self.place)
