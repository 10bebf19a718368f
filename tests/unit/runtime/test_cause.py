"""The probable cause of a death: the table of the evidence."""

from __future__ import annotations

import re
import signal

import pytest

from aiogpu.errors import WorkerDiedError
from aiogpu.linux.procfs import Findings
from aiogpu.runtime.workers import death as cause
from aiogpu.runtime.workers.death import IN_WORDS, find_cause, may_be_kernels

NOTHING = Findings()
IN_GROUP = Findings(1, 1)
ON_MACHINE = Findings(0, 1)
LOGGED = Findings(0, 0, "Out of memory: Killed process 12 (python) total-vm:1kB")
SEGFAULT = Findings(0, 0, "python[12]: segfault at 0")


@pytest.mark.parametrize(
    ("status", "known", "findings", "expected"),
    [
        (None, "", NOTHING, cause.NOT_STARTED),
        (0, "", NOTHING, cause.EXIT),
        (3 << 8, "", IN_GROUP, cause.EXIT),
        (0, cause.ENDED, NOTHING, cause.EXIT),
        (0, cause.DISCONNECTED, NOTHING, cause.EXIT),
        (0, cause.KEEPER_DIED, NOTHING, cause.KEEPER_DIED),
        (9, "", NOTHING, cause.KILLED),
        (9, "", SEGFAULT, cause.KILLED),
        (9, "", IN_GROUP, cause.OUT_OF_MEMORY),
        (9, "", ON_MACHINE, cause.OUT_OF_MEMORY),
        (9, "", LOGGED, cause.OUT_OF_MEMORY),
        (9, cause.DISCONNECTED, NOTHING, cause.DISCONNECTED),
        (9, cause.DISCONNECTED, IN_GROUP, cause.DISCONNECTED),
        (9, cause.DISCONNECTED, LOGGED, cause.OUT_OF_MEMORY),
        (9, cause.ENDED, NOTHING, cause.ENDED),
        (9, cause.KEEPER_DIED, ON_MACHINE, cause.KEEPER_DIED),
        (9, cause.KEEPER_DIED, LOGGED, cause.OUT_OF_MEMORY),
        (9, cause.NOT_STARTED, NOTHING, cause.NOT_STARTED),
        (15, "", IN_GROUP, cause.SIGNAL),
        (15, cause.ENDED, NOTHING, cause.SIGNAL),
        (signal.SIGRTMIN, "", NOTHING, cause.SIGNAL),
        (11, "", NOTHING, "segfault"),
        (11 | 0x80, "", SEGFAULT, "segfault"),
        (7, "", NOTHING, "bus error"),
        (8, "", NOTHING, "arithmetic error"),
        (4, "", NOTHING, "illegal instruction"),
        (6, "", IN_GROUP, "abort"),
    ],
)
def test_what_the_evidence_says(
    status: int | None, known: str, findings: Findings, expected: str
) -> None:
    assert find_cause(status, known, findings) == expected
    assert IN_WORDS[expected].what
    assert IN_WORDS[expected].advice.endswith(".")


@pytest.mark.parametrize(
    ("status", "known", "expected"),
    [
        (None, "", False),
        (0, "", False),
        (9, "", True),
        (9, cause.DISCONNECTED, True),
        (9, cause.ENDED, False),
        (11, "", True),
        (15, "", False),
    ],
)
def test_when_the_kernel_is_asked(
    status: int | None, known: str, expected: bool
) -> None:
    assert may_be_kernels(status, known) is expected


def test_the_documentation_names_every_cause() -> None:
    assert WorkerDiedError.__doc__ is not None
    text = " ".join(WorkerDiedError.__doc__.split())
    documented = set(re.findall(r'"([a-z ]+)"', text))
    assert documented == {
        *cause.IN_WORDS,
    }
